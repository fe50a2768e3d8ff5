"""Getting models into memory: `load.load_model` is the door."""
