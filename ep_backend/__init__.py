"""Expert-parallel dispatch and combine for mixture-of-experts serving. Importing this package imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ep_backend.buffer import EpBuffer
    from ep_backend.dispatched import Dispatched, Handle
    from ep_backend.errors import EpConfigMismatch, EpDisagree, EpError, EpFailed, EpRefused, EpTimeout
    from ep_backend.modes import Family, Layout, Mode

_HOMES = {
    "buffer": ("EpBuffer",),
    "dispatched": ("Dispatched", "Handle"),
    "errors": ("EpConfigMismatch", "EpDisagree", "EpError", "EpFailed", "EpRefused", "EpTimeout"),
    "modes": ("Family", "Layout", "Mode"),
}

__all__ = [
    "Dispatched",
    "EpBuffer",
    "EpConfigMismatch",
    "EpDisagree",
    "EpError",
    "EpFailed",
    "EpRefused",
    "EpTimeout",
    "Family",
    "Handle",
    "Layout",
    "Mode",
]


def __getattr__(name: str) -> Any:
    """Import on first use: the tools run without torch."""
    from importlib import import_module

    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"ep_backend.{module}"), name)
    raise AttributeError(f"module 'ep_backend' has no attribute {name!r}")
