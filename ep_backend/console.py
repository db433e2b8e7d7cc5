"""The console that the commands print on."""

from rich.console import Console

PLAIN_WIDTH = 150


def make_console() -> Console:
    """On a terminal as wide as it; elsewhere (a file, a pipe) wide enough for every table."""
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)
