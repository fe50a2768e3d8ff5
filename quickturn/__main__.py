"""`python -m quickturn` is the command `quickturn`."""

from quickturn.cli.main import app

app()
