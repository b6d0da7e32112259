"""AG-UI for Django: run any agent, keep every event, stream and replay it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aguiapp.agents import RunContext, agent
    from aguiapp.errors import RunError

__version__ = "0.1.0"
__all__ = ["RunContext", "RunError", "__version__", "agent"]

_HOMES = {"agent": "aguiapp.agents", "RunContext": "aguiapp.agents", "RunError": "aguiapp.errors"}


def __getattr__(name: str) -> Any:
    """Resolve public names lazily: importing the app must not need configured settings."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
