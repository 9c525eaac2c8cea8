"""Which plan: cuts and the way to make the inverse, measured before launch choices are.

They are decided when a package is built, for all shapes.  Every cut that comes close to the cost model's best one, and
an inverse in tf32 where it is made in fp16, is built, gated and timed: whole operators with the cost model's launch
choices, sequences whole (the package's segments.py).  The fastest cut of each operator, and the inverse if it gains, by
the geometric mean over the points, are built together in place of the package; the tuning that follows gates them.
"""

import itertools
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gdngen import kept, package
from gdngen import target as targets
from gdngen.autotune.store import Measurements
from gdngen.autotune.tuner import Progress, Tuner, Wish, plan_of
from gdngen.passes.pipeline import Compilation, compile_spec
from gdngen.passes.plan import Plan

QUICK = 2  # other cuts of each operator, unless --effort full
GAIN = 1.02  # what a plan has to be faster by to be taken for the built one
CUTS = {"cut": "chunk", "backward_cut": "chunk_backward"}  # pin -> operator

Pins = tuple[str, ...]
Times = Mapping[str, Mapping[str, float | None]]  # operator -> point -> us; None: not right


@dataclass(frozen=True)
class Comparison:
    """Times of every plan by the pins that it adds, those of the plan as built first; the pins that were taken."""

    times: Mapping[Pins, Times]
    taken: Pins

    def ratio(self, pins: Pins, operator: str) -> float | None:
        """How many times as long the plan as built takes, by the geometric mean over the points."""
        return ratio(self.times[()].get(operator, {}), self.times[pins].get(operator, {}))


def compare(wish: Wish, measurements: Measurements, tell: Callable[[Progress], object]) -> Comparison:
    """Measure the plans and build the fastest into the package's folder, unless that is the one it has."""
    plan = plan_of(wish.folder)
    points = tuple(point for point in wish.points if point.shape.length > 1)  # decode has one plan
    if not points:
        return Comparison({(): {}}, ())
    every: list[Pins] = [(), *rivals(plan, None if wish.effort == "full" else QUICK)]
    wish = replace(wish, points=points, kernels=(), effort="none", budget=None)
    times: dict[Pins, Times] = {}
    for pins in every:
        tell(Progress(0, 0, f"plan {' '.join(pins) or 'as built'}"))
        times[pins] = measured(compiled(plan, pins).plan, wish, measurements, tell)
    found = Comparison(times, fastest(times))
    if found.taken:
        package.write(package.render(compiled(plan, found.taken).plan, wish.folder.name), wish.folder)
    return found


def rivals(plan: Plan, most: int | None) -> list[Pins]:
    """Pins of other plans: cuts of both operators together, as they do not depend on each other; the inverse."""
    choices = compiled(plan).choices
    pinned_keys = {pin.partition("=")[0] for pin in plan.pins}
    others: list[list[str]] = []
    for key, operator in CUTS.items():
        if operator in choices and key not in pinned_keys:
            own = choices[operator].cut.name
            names = dict.fromkeys(c.cut.name for c in choices[operator].kept if c.cut.name != own)
            others.append([f"{key}={name}" for name in names][:most])
    found = [tuple(filter(None, pair)) for pair in itertools.zip_longest(*others)]
    inverse = ("inverse=tf32",)
    inverts = any(node.op == "uli" for one in plan.operators for kernel in one.kernels for node in kernel.graph.nodes)
    if inverts and "inverse" not in pinned_keys and _kernels(compiled(plan, inverse).plan) != _kernels(plan):
        found.append(inverse)
    return found


def _kernels(plan: Plan) -> dict[str, str]:
    return kept.kernel_digests(package.render(plan, plan.spec.name))


def compiled(plan: Plan, pins: Pins = ()) -> Compilation:
    """How the same Spec becomes a plan, with more pins."""
    return compile_spec(plan.spec, targets.get(plan.target), plan.pins + pins)


def measured(plan: Plan, wish: Wish, measurements: Measurements, tell: Callable[[Progress], object]) -> Times:
    """Times of the operators of a plan, built in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="gdngen_plan_") as scratch:
        folder = package.write(package.render(plan, wish.folder.name), Path(scratch) / wish.folder.name)
        report = Tuner(replace(wish, folder=folder), measurements, tell).run()
    found: dict[str, dict[str, float | None]] = {}
    for total in report.totals:
        found.setdefault(total["operator"], {})[f"{total['shape']} {total['dtype']}"] = total["untuned_us"]
    return found


def ratio(own: Mapping[str, float | None], other: Mapping[str, float | None]) -> float | None:
    """own / other, the geometric mean over the points; None where one is not right at every point."""
    if not own or own.keys() != other.keys():
        return None
    pairs = [(own[point], other[point]) for point in own]
    if not all(a and b for a, b in pairs):
        return None
    return statistics.geometric_mean([a / b for a, b in pairs if a and b])


def fastest(times: Mapping[Pins, Times]) -> Pins:
    """The pins to build with: of each operator the fastest cut; the inverse by all operators together."""
    own = times[()]
    best: dict[str, tuple[float, str]] = {}  # key of a pin -> ratio, the pin
    for pins, found in times.items():
        for pin in pins:
            key = pin.partition("=")[0]
            operators = [CUTS[key]] if key in CUTS else list(own)
            ratios = [ratio(own.get(name, {}), found.get(name, {})) for name in operators]
            gain = statistics.geometric_mean([r for r in ratios if r]) if ratios and all(ratios) else 0.0
            if gain > best.get(key, (GAIN, ""))[0]:
                best[key] = (gain, pin)
    return tuple(pin for _, pin in best.values())
