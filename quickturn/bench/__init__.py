"""Measurements: of this engine, and of peers in the same run."""
