"""Text in and out of token ids: tokenizers, chat templates, incremental detokenisation, stop strings."""
