"""The engine: its loop, the process it runs in, and the two doors to it (async client, offline LLM)."""
