"""Where a chunk kernel computes each value: around and inside its loops over value heads and over tiles of v.

before                      what all value heads of a group share
for each value head:        only where value heads are summed
    head
    for each tile of v:     as often as sums over v would not fit into registers together
        tile
    end                     what reads those sums
    for each slice of k:    where channels of k are on their own
        slice
    last                    what reads sums over k
after                       what reads a sum over value heads
"""

import math
from dataclasses import dataclass

from gdngen.errors import PlanError
from gdngen.ir.graph import Graph
from gdngen.ir.text import value_names
from gdngen.passes.plan import Kernel

BEFORE, HEAD, TILE, END, SLICE, LAST, AFTER = "before", "head", "tile", "end", "slice", "last", "after"


@dataclass(frozen=True)
class Phase:
    """Values to compute at one place, in order; a value that two loops need is in both."""

    kind: str
    values: tuple[int, ...]


def arranged(kernel: Kernel, sizes: dict[str, int]) -> list[Phase]:
    """The phases of a kernel in order.  PlanError where a value that goes over v reads a sum over v."""
    graph = kernel.graph
    kinds = _postponed(graph, _kinds(kernel))
    loops = _loops(graph, kinds, sizes)
    ready = _ready(graph, kinds, loops)
    found = [Phase(kind, tuple(i for i, own in enumerate(kinds) if own == kind)) for kind in (BEFORE, HEAD)]
    for number, loop in enumerate(loops):
        found.append(Phase(TILE, tuple(sorted(loop))))
        found.append(Phase(END, tuple(i for i, own in enumerate(kinds) if own == END and ready[i] == number)))
    if kernel.is_sliced:
        found += [Phase(kind, tuple(i for i, own in enumerate(kinds) if own == kind)) for kind in (SLICE, LAST)]
    return [*found, Phase(AFTER, tuple(i for i, own in enumerate(kinds) if own == AFTER))]


def _kinds(kernel: Kernel) -> list[str]:
    graph = kernel.graph
    found: list[str] = []
    for i, node in enumerate(graph.nodes):
        inner = [(graph[ref], found[ref.value]) for ref in node.args]
        late = any(kind == END or (kind == TILE and "v" in arg.summed) for arg, kind in inner)
        if kernel.is_sliced and ("k" in node.axes or "k" in node.summed):
            found.append(SLICE)
        elif any(kind == LAST or (kind == SLICE and "k" in arg.summed) for arg, kind in inner):
            found.append(LAST)
        elif kernel.is_grouped and any("r" in arg.summed or kind == AFTER for arg, kind in inner):
            found.append(AFTER)
        elif late:
            found.append(END)
        elif kernel.is_tiled and ("v" in node.axes or "v" in node.summed):
            found.append(TILE)
        else:
            found.append(BEFORE if kernel.is_grouped and "r" not in node.grid + node.summed else HEAD)
        if late and "v" in node.axes + node.summed:
            raise PlanError(f"codegen: {value_names(graph)[i]} goes over v and reads a sum over v: not one loop")
    return found


def _postponed(graph: Graph, kinds: list[str]) -> list[str]:
    """What only an end reads is computed there: registers are scarce in between."""
    for i in reversed(range(len(kinds))):
        readers = {kinds[reader] for reader in graph.dataflow.successors(i)}
        if (kinds[i], readers) in ((BEFORE, {AFTER}), (HEAD, {END})):
            (kinds[i],) = readers
    return kinds


def _loops(graph: Graph, kinds: list[str], sizes: dict[str, int]) -> list[set[int]]:
    """The values of each loop over tiles: sums share one while together they are no larger than the largest."""
    ends = {ref.value for _, ref in graph.outputs}
    goals = [i for i, kind in enumerate(kinds) if kind == TILE and ("v" in graph.nodes[i].summed or i in ends)]
    size = {i: math.prod(sizes[axis] for axis in graph.nodes[i].axes) * ("v" in graph.nodes[i].summed) for i in goals}
    room = max(size.values(), default=0)
    loops: list[tuple[int, set[int]]] = []
    for i in sorted(goals, key=lambda i: (-size[i], i)):
        needed = _needed(graph, kinds, i)
        fitting = [loop for loop in loops if len(graph.nodes[i].axes) < 2 or not size[i] or loop[0] + size[i] <= room]
        best = max(fitting, key=lambda loop: len(loop[1] & needed), default=(0, set()))
        if best in loops:
            loops.remove(best)
        loops.append((best[0] + size[i], best[1] | needed))
    return sorted((values for _, values in loops), key=min)


def _needed(graph: Graph, kinds: list[str], value: int) -> set[int]:
    """A value of a loop and the values of the same loop that it is computed from."""
    found, todo = set(), [value]
    while todo:
        i = todo.pop()
        if kinds[i] == TILE and i not in found:
            found.add(i)
            todo += [ref.value for ref in graph.nodes[i].args]
    return found


def _ready(graph: Graph, kinds: list[str], loops: list[set[int]]) -> list[int]:
    """The loop behind which each value is computed: where its sums are whole, or where it is first read."""
    found: list[int] = []
    for i, node in enumerate(graph.nodes):
        own = [number for number, loop in enumerate(loops) if i in loop and "v" in node.summed]
        found.append(max([-1, *own, *(found[ref.value] for ref in node.args if kinds[ref.value] in (TILE, END))]))
    for i in reversed(range(len(found))):
        if found[i] < 0:
            found[i] = min((found[reader] for reader in graph.dataflow.successors(i)), default=0)
    return found
