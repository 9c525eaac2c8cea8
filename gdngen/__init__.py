"""gdngen: a kernel compiler for the gated delta rule family."""

from typing import Any

__version__ = "0.1.0"

_HOMES = {"Spec": "gdngen.spec", "build": "gdngen.api", "load": "gdngen.api"}
__all__ = ["Spec", "__version__", "build", "integrate", "load", "ops"]
_PLANNED = ("layers", "parallel", "serve")  # importing them says what is missing


def __getattr__(name: str) -> Any:
    """Import what is asked for, when it is asked for."""
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in __all__ or name in _PLANNED:
        return import_module(f"gdngen.{name}")
    raise AttributeError(f"module 'gdngen' has no attribute {name!r}")
