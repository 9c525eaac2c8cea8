"""Save: what the forward operator keeps for backward, and what backward computes again.

The states are computed again always: storing them would keep K x V numbers a chunk.  What the forward's prepare kernel
hands to its scan (the inverse, the scores, decays per token) may be kept: that saves backward one kernel and costs its
bytes from the forward of a layer to its backward.  ``--pin save=memory`` keeps nothing, ``--pin save=speed`` all of it.
By default it is kept where products with decays per channel make it, a fifth of a step; otherwise not, as training at
length is short of memory rather than of the tenth of a step that the kernel takes.
"""

from dataclasses import dataclass
from typing import Literal

from gdngen.errors import PinError
from gdngen.passes.plan import Operator, Plan, Stored
from gdngen.target import Target

Keep = Literal["memory", "speed"]


@dataclass(frozen=True)
class Save:
    """Requires chosen formats; ensures ``saved`` of the backward operator.

    Rewrite: backward reads X, P, eG, ... of a kernel of its own  ->  of the forward's, where both store the same.
    """

    keep: Keep | None = None
    name: str = "save"

    def run(self, plan: Plan, target: Target) -> Plan:
        forward, backward = plan.operator("chunk"), plan.operator("chunk_backward")
        if self.keep == "memory" or backward is None:
            return plan
        assert forward is not None
        shared = kept_by_both(forward, backward)
        dear = any(k.name == "prepare_backward" and k.has_decayed_products for k in backward.kernels)
        if self.keep is None and not (dear and shared):
            return plan
        if not shared:
            raise PinError("pin save=speed: the forward operator stores nothing that backward would read")
        operators = [o.model_copy(update={"saved": shared}) if o is backward else o for o in plan.operators]
        return plan.model_copy(update={"operators": tuple(operators)})


def kept_by_both(forward: Operator, backward: Operator) -> tuple[str, ...]:
    """All that backward's first kernel stores, if the forward stores it alike; else nothing."""
    wanted = [stored for stored in backward.stored if stored.writer == "prepare_backward"]
    there = {_kind(stored) for stored in forward.stored if stored.writer == "prepare"}
    return tuple(stored.name for stored in wanted) if {_kind(stored) for stored in wanted} <= there else ()


def _kind(stored: Stored) -> tuple[str, ...]:
    return stored.name, stored.axes, stored.heads, stored.format
