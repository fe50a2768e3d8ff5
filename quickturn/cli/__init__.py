"""The `quickturn` command."""
