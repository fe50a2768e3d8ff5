"""What goes wrong with a model's files."""


class LoadError(ValueError):
    """A model that can't be loaded; the message says what is wrong and what would help."""
