"""What an option takes: texts, lists, dtypes, files, seconds.  One that is empty is a mistake, not left out."""

import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import click

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


class Some(click.ParamType):
    """A text; one that is empty, as in --kernel "$KERNEL" where nobody set it, is a mistake."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value or self.fail("got '', expected a name", param, ctx)


class Several(click.ParamType):
    """Texts between commas or spaces, each once, at least one; of those that are known, where they are.  ``also`` has
    other spellings."""

    name = "list"

    def __init__(self, known: Collection[str] = (), also: Mapping[str, str] | None = None) -> None:
        self.known, self.also = known, also or {}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = tuple(dict.fromkeys(self.also.get(text, text) for text in value.replace(",", " ").split()))
        if not found:
            self.fail(f"got {value!r}, expected {' '.join(self.known) or 'at least one'}", param, ctx)
        if self.known and (unknown := [text for text in found if text not in self.known]):
            self.fail(f"{unknown[0]!r} is not one of {', '.join(self.known)}", param, ctx)
        return found


class Dtype(click.Choice[str]):
    """A dtype, by torch's name or the short one; the short one is handed on."""

    def __init__(self) -> None:
        super().__init__([*DTYPES, *DTYPES.values()])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        found = super().convert(value, param, ctx)
        return DTYPES.get(found, found)


class Dtypes(Several):
    """Dtypes, by torch's names or the short ones; torch's are handed on."""

    def __init__(self) -> None:
        super().__init__(tuple(DTYPES), {short: name for name, short in DTYPES.items()})


class NewFile(click.Path):
    """A file that will be written: that it has no folder is said before the work that would fill it."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not str(value):
            self.fail("expected the name of a file", param, ctx)
        file = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not file.absolute().parent.is_dir():
            self.fail(f"{file}: there is no folder {file.parent}", param, ctx)
        return file


class Seconds(click.FloatRange):
    """A finite time, zero only where nothing is told to be measured; nan, which no comparison refuses, is none."""

    def __init__(self, some: bool = False) -> None:
        super().__init__(0, min_open=some)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value} is not a finite number of seconds", param, ctx)
        return seconds
