"""Agent sessions against a server or an engine: growing conversations, and what their users see."""
