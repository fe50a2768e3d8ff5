"""From the tokens that a model writes to typed events: reasoning, text, tool calls."""
