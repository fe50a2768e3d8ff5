"""The bytes of the cache: how blocks lie in the arena, and the arena itself."""
