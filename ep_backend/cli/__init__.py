"""The `ep-backend` command. Commands import what they need when they run, so that `--help` is quick."""

from ep_backend.cli.app import main

__all__ = ["main"]
