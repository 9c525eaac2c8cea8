"""gdngen build --aot: which kernels to compile ahead of time."""

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from gdngen import target as targets
from gdngen.commands.common import DTYPES, published_heads
from gdngen.spec import Spec


@dataclass(frozen=True)
class Ahead:
    """For which targets, dtypes and heads (H, HV); no target: nothing is compiled."""

    targets: tuple[str, ...]
    dtypes: tuple[str, ...]
    heads: tuple[tuple[int, int], ...]

    def compile(self, folder: Path) -> Iterator[str]:
        """Compile into the package; one line per target."""
        from gdngen.autotune import aot

        for target in self.targets:
            started = time.perf_counter()
            made = aot.build(aot.Job(folder.resolve(), target, self.dtypes, self.heads))
            heads = ", ".join(f"{H}/{HV}" for H, HV in self.heads)
            yield (
                f"{folder / 'aot' / target}: {made.kernels} kernels for {', '.join(self.dtypes)} and heads {heads}, "
                f"{made.launchers} launchers, {made.size / 2**20:.1f} MiB, {time.perf_counter() - started:.0f} s"
            )


def aot_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --aot, --aot-dtypes and --aot-heads; hands on ``ahead``."""

    @functools.wraps(command)
    def wrapped(aot: str | None, aot_dtypes: str | None, aot_heads: str | None, **options: Any) -> Any:
        given = {"--aot-dtypes": aot_dtypes, "--aot-heads": aot_heads}
        if aot is None and (idle := [name for name, value in given.items() if value is not None]):
            raise click.UsageError(f"{idle[0]} is about --aot, which is not given: for example --aot sm_90")
        names = tuple(dict.fromkeys(_target(name) for name in aot.split(","))) if aot is not None else ()
        dtypes = tuple(dict.fromkeys((aot_dtypes or "bfloat16").split(",")))
        if unknown := set(dtypes) - set(DTYPES):
            raise click.UsageError(f"--aot-dtypes: {', '.join(sorted(unknown))} is none of {', '.join(DTYPES)}")
        heads = _heads(aot_heads, options["spec"]) if names else ()
        return command(ahead=Ahead(names, dtypes, heads), **options)

    pairs = "H/HV,...: query/key and value heads to compile for.  [those of the preset]"
    wrapped = click.option("--aot-heads", metavar="PAIRS", help=pairs)(wrapped)
    of = "Of q, k and v, for --aot, separated by commas.  [bfloat16]"
    wrapped = click.option("--aot-dtypes", metavar="D,...", help=of)(wrapped)
    text = "Also compile kernels for these targets, so that a first call compiles nothing."
    return click.option("--aot", metavar="T,...", help=text)(wrapped)


def _target(name: str) -> str:
    """A target that kernels can be compiled for ahead of time; UsageError names those."""
    known = [target.name for target in targets.TARGETS.values() if target.backend == "cuda"]
    if name not in known:
        raise click.UsageError(f"--aot: {name!r} is not one of {', '.join(known)}")
    return name


def _heads(text: str | None, spec: Spec) -> tuple[tuple[int, int], ...]:
    """The pairs given, else those of the preset that is named, else of all presets of this Spec."""
    if text is None:
        named = click.get_current_context().params.get("preset")
        pairs = published_heads(named, spec)
        if not pairs:
            raise click.UsageError("--aot: no preset says how many heads: give --aot-heads, for example 16/32")
        return tuple(pairs)
    pairs = []
    for pair in text.split(","):
        H, _, HV = pair.partition("/")
        if not (H.isdigit() and HV.isdigit() and int(H) and int(HV) and int(HV) % int(H) == 0):
            raise click.UsageError(f"--aot-heads: {pair!r} is no H/HV, for example 16/32, HV a multiple of H")
        pairs.append((int(H), int(HV)))
    return tuple(pairs)
