"""What a kernel can say: which values have a text, so that no cut is chosen that cannot be written.

Each rule is a limit of the text that codegen makes; tests hold every kernel without an obstacle against that.
"""

from collections.abc import Iterator

from gdngen.ir.graph import CHANNELS, GRID, Graph, Ref, is_virtual
from gdngen.ir.ops import OPS
from gdngen.ir.text import value_names
from gdngen.passes.plan import Kernel
from gdngen.passes.rewrite import factors
from gdngen.passes.tile import may_fit, unordered
from gdngen.target import Target

TILES = ("ij", "ik", "iv", "kv")  # axes of values with two of them
ROWS = ("", "i", "k", "v")
WRITTEN = ("valid", "cast", "const", "tri", "carry_in")  # ops with a macro or none; other elementwise ones have a text


def obstacle(kernel: Kernel, sizes: dict[str, int], target: Target) -> str:
    """The first value that keeps a kernel from being written, and why; an empty text where there is none."""
    graph = kernel.graph
    names = value_names(graph)
    for i in range(len(graph.nodes)):
        if reason := next(_reasons(kernel, graph, i), ""):
            return f"kernel {kernel.name}, value {names[i]}[{','.join(graph.nodes[i].axes)}]: {reason}"
    if (value := _in_two_loops(kernel, graph)) is not None:
        return f"kernel {kernel.name}, value {names[value]}: it goes over v and reads a sum over v, which is two loops"
    if reason := unordered(kernel.text):
        return f"kernel {kernel.name}, {reason}"
    if not may_fit(kernel, sizes, target):
        return f"kernel {kernel.name}: its products with decays hold more key channels than {target.name} has room for"
    return ""


def _reasons(kernel: Kernel, graph: Graph, i: int) -> Iterator[str]:
    node, kind = graph.nodes[i], graph.kind(i)
    if is_virtual(node.axes):
        readers = {graph.kind(reader) for reader in graph.dataflow.successors(i)}
        if node.op != "decay" or readers - {"decayed"} or i in {ref.value for ref in graph.roots()}:
            yield "a number for every pair of tokens and channel is written only as a decay in a product with others"
    elif node.axes not in (*TILES, *ROWS):
        yield f"there are no tiles with axes {','.join(node.axes)}"
    elif node.op == "input":
        yield from _of_input(graph, i)
    elif node.op == "carry_in" and node.axes not in ("kv", "k"):
        yield "a carried value has axes k,v or k"
    elif kind == "group_sum":
        if kernel.loop != "chunks" or node.summed != "r":
            yield "value heads are summed in kernels of chunks alone, sequences and chunks only last, as a result"
    elif kind == "dot":
        yield from _of_dot(graph, i)
    elif kind == "reduce":
        names = {axis for ref in node.args for axis in ref.axes}
        if not any(set(ref.axes) == names for ref in node.args) or set(node.summed) & set(GRID):
            yield "no operand has all axes of the sum"
    elif graph.has_decay(i):
        yield from _of_decayed(graph, i)
    elif kind not in ("product", "add", "uli", "decay", "cumsum", *WRITTEN) and not OPS[kind].kernel:
        yield f"op {kind} has no kernel text"


def _of_input(graph: Graph, i: int) -> Iterator[str]:
    node = graph.nodes[i]
    initial = {carry.init.value for carry in graph.carries}
    if i not in initial and node.grid not in ("", "hr") and "n" not in node.grid:
        yield f"a parameter is one for all or one per value head, not per {','.join(node.grid)}"
    elif node.grid == "hr" and node.axes not in ("", "k", "v"):
        yield "a parameter has no token axis"


def _of_dot(graph: Graph, i: int) -> Iterator[str]:
    node = graph.nodes[i]
    if len(node.args) != 2 or len(node.axes) != 2 or len(node.summed) != 1:
        yield f"a matrix product has two operands and one summed axis, this one {len(node.args)} and {len(node.summed)}"
        return
    one, two = (set(ref.axes) for ref in node.args)
    if one & two != {node.summed} or one ^ two != set(node.axes):
        yield "the operands of a matrix product share the summed axis and have one of their own"


def _of_decayed(graph: Graph, i: int) -> Iterator[str]:
    node = graph.nodes[i]
    if node.op == "crossing":
        matrix, late, early = (set(ref.axes) for ref in node.args[:3])
        if matrix != {"i", "j"} or not (late & early & set(CHANNELS)):
            yield "it is not of a matrix over tokens and two tiles"
        return
    if len(node.args) != 3 or sum(is_virtual(ref.axes) for ref in node.args) != 1 or len(node.summed) != 1:
        yield "a product with decays has one of them and two other operands"
        return
    found = graph.decayed(i)
    first, second = set(found.first.axes), set(found.second.axes)
    row, column = found.axes[0], found.axes[1]
    if (first, second) != ({row, node.summed}, {column, node.summed}):
        yield "its operands are not those of a product with decays"
        return
    masks = [ref for ref in factors(graph, found.first)[0] if graph[ref].op == "tri"]
    if not found.is_gram and any(_is_turned(graph, mask, found.later, row) for mask in masks):
        yield "it is masked against the direction of its decay"


def _is_turned(graph: Graph, mask: Ref, later: bool, row: str) -> bool:
    """A mask that keeps pairs whose decay is 0."""
    return graph[mask].attrs[0] != "same" and (mask.axes[0] != row) != later


def _in_two_loops(kernel: Kernel, graph: Graph) -> int | None:
    """A value of a loop over v that needs a sum over v whole."""
    late: set[int] = set()
    for i, node in enumerate(graph.nodes):
        if any(ref.value in late or (kernel.is_tiled and "v" in graph[ref].summed) for ref in node.args):
            late.add(i)
            if "v" in node.axes + node.summed:
                return i
    return None
