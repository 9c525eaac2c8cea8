"""The environment variables, typed and read at the moment of use (so that tests may set them)."""

import os
from pathlib import Path


def debug() -> int:
    """GDNGEN_DEBUG=0..4: 1 checks the contents of cu_seqlens, higher levels log more."""
    text = os.environ.get("GDNGEN_DEBUG", "0")
    return int(text) if text.isdigit() else 0


def dump() -> Path | None:
    """GDNGEN_DUMP=dir: every stage of a build is written there as a numbered file."""
    text = os.environ.get("GDNGEN_DUMP")
    return Path(text) if text else None


def cache_dir() -> Path:
    """GDNGEN_CACHE_DIR, else $XDG_CACHE_HOME/gdngen, else ~/.cache/gdngen."""
    if text := os.environ.get("GDNGEN_CACHE_DIR"):
        return Path(text)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gdngen"
