"""The version, for whoever mustn't load more than that."""

__version__ = "0.1.0"
