"""`python -m fivefold`."""

from fivefold.cli.main import program

program()
