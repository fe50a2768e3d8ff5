"""HTTP: the APIs that agents speak, in front of an engine process."""
