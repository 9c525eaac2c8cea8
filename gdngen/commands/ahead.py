"""gdngen build --aot: which kernels to compile ahead of time."""

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from gdngen import target as targets
from gdngen.commands.common import published_heads
from gdngen.commands.kinds import Dtypes, Several
from gdngen.spec import Spec

COMPILED = [target.name for target in targets.TARGETS.values() if target.backend == "cuda"]
Names = tuple[str, ...] | None


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
    def wrapped(aot: Names, aot_dtypes: Names, aot_heads: Names, **options: Any) -> Any:
        given = {"--aot-dtypes": aot_dtypes, "--aot-heads": aot_heads}
        if aot is None and (idle := [name for name, value in given.items() if value is not None]):
            raise click.UsageError(f"{idle[0]} is about --aot, which is not given: for example --aot sm_90")
        heads = _heads(aot_heads, options["spec"]) if aot else ()
        return command(ahead=Ahead(aot or (), aot_dtypes or ("bfloat16",), heads), **options)

    pairs = "H/HV,...: query/key and value heads to compile for.  [those of the preset]"
    wrapped = click.option("--aot-heads", type=Several(), metavar="PAIRS", help=pairs)(wrapped)
    of = "Of q, k and v, for --aot, separated by commas.  [bfloat16]"
    wrapped = click.option("--aot-dtypes", type=Dtypes(), metavar="D,...", help=of)(wrapped)
    text = "Also compile kernels for these targets, so that a first call compiles nothing."
    return click.option("--aot", type=Several(COMPILED), metavar="T,...", help=text)(wrapped)


def _heads(given: Names, spec: Spec) -> tuple[tuple[int, int], ...]:
    """The pairs given, else those of the preset that is named, else of all presets of this Spec."""
    if given is None:
        named = click.get_current_context().params.get("preset")
        pairs = published_heads(named, spec)
        if not pairs:
            raise click.UsageError("--aot: no preset says how many heads: give --aot-heads, for example 16/32")
        return tuple(pairs)
    pairs = []
    for pair in given:
        H, _, HV = pair.partition("/")
        if not (H.isdigit() and HV.isdigit() and int(H) and int(HV) and int(HV) % int(H) == 0):
            raise click.UsageError(f"--aot-heads: {pair!r} is no H/HV, for example 16/32, HV a multiple of H")
        pairs.append((int(H), int(HV)))
    return tuple(pairs)
