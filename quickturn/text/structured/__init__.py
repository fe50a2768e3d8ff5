"""What an answer has to look like: schemas, patterns and tools as grammars."""
