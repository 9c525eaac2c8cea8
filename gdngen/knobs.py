"""The environment variables, typed and read at the moment of use (so that tests may set them)."""

import os
from pathlib import Path

from gdngen.errors import EnvironmentProblem

LEVELS = tuple("01234")  # of GDNGEN_DEBUG


def debug() -> int:
    """GDNGEN_DEBUG=0..4: 1 checks the contents of cu_seqlens, higher levels log more."""
    text = os.environ.get("GDNGEN_DEBUG", "") or "0"
    if text not in LEVELS:
        raise EnvironmentProblem(f"GDNGEN_DEBUG is {text!r}, expected a number from {LEVELS[0]} to {LEVELS[-1]}")
    return int(text)


def dump() -> Path | None:
    """GDNGEN_DUMP=dir: every stage of a build is written there as a numbered file."""
    text = os.environ.get("GDNGEN_DUMP")
    return Path(text) if text else None


def cache_dir() -> Path:
    """GDNGEN_CACHE_DIR, else $XDG_CACHE_HOME/gdngen, else ~/.cache/gdngen."""
    if text := os.environ.get("GDNGEN_CACHE_DIR"):
        return Path(text)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "gdngen"
    except RuntimeError as error:  # a user without a home
        raise EnvironmentProblem(f"there is no cache folder: {error}; set GDNGEN_CACHE_DIR to one") from None
