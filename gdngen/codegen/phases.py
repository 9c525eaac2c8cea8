"""Where a chunk kernel computes each value: around and inside its loops over value heads and over tiles of v.

    before                     what all value heads of a group share
    for each value head:       only where value heads are summed
        head
        for each tile of v:    only where v is summed
            tile
        end                    what reads a sum over v
    after                      what reads a sum over value heads
"""

from gdngen.errors import PlanError
from gdngen.ir.text import value_names
from gdngen.passes.plan import Kernel

BEFORE, HEAD, TILE, END, AFTER = "before", "head", "tile", "end", "after"
PHASES = (BEFORE, HEAD, TILE, END, AFTER)


def phases(kernel: Kernel) -> list[str]:
    """The phase of each value; PlanError where a value with a v axis reads a sum over v."""
    graph, found = kernel.graph, []
    for i, node in enumerate(graph.nodes):
        inner = [(graph[ref], found[ref.value]) for ref in node.args]
        late = any(phase == END or (phase == TILE and "v" in arg.summed) for arg, phase in inner)
        if kernel.is_grouped and any("r" in arg.summed or phase == AFTER for arg, phase in inner):
            found.append(AFTER)
        elif late:
            found.append(END)
        elif kernel.is_tiled and ("v" in node.axes or "v" in node.summed):
            found.append(TILE)
        else:
            found.append(BEFORE if kernel.is_grouped and "r" not in node.grid + node.summed else HEAD)
        if late and "v" in node.axes:
            raise PlanError(f"codegen: {value_names(graph)[i]} has a v axis and reads a sum over v: not one loop")
    return found
