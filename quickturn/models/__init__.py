"""Models, one file a family; `registry.architecture_of` finds the one that a config names."""
