"""Segment: which scans may take a sequence in several parts at once.

A scan is as long as its sequence, and with few heads most processors have nothing to do.  Where a step is a linear map
of the state, the same for every value channel, and a write, so is a segment of many steps: S_out = M S_in + w, with M
what becomes of the unit matrix where nothing is written and w what becomes of 0 (contract, section 4).  All segments
find theirs at once, a short pass makes the states between them, and the scan runs in all segments.

Forward alone: the two scans of backward run beside each other already, and in segments they took as long on an H200.
"""

from dataclasses import dataclass

import networkx as nx

from gdngen.ir.graph import Graph, Node
from gdngen.passes.plan import Kernel, Plan
from gdngen.target import Target

CHUNKS = 32  # of a segment: 25 to 30 were best for 8 heads and 512 chunks on an H200


@dataclass(frozen=True)
class Segment:
    """Requires tiled kernels; decides ``is_segmented`` of each forward kernel.

    Rewrite: S over all chunks  ->  (M, w) over the chunks of each segment; S over segments; S over the chunks of each.
    """

    name: str = "segment"

    def run(self, plan: Plan, target: Target) -> Plan:
        operators = []
        for operator in plan.operators:
            may = [not operator.is_backward and may_be_segmented(kernel) for kernel in operator.kernels]
            kernels = tuple(
                k.model_copy(update={"is_segmented": m}) for k, m in zip(operator.kernels, may, strict=True)
            )
            operators.append(operator.model_copy(update={"kernels": kernels}))
        return plan.model_copy(update={"operators": tuple(operators)})


def may_be_segmented(kernel: Kernel) -> bool:
    """Whether its one state is split over v, every step is such a map, and what it writes comes from inputs with value
    channels alone: a map is found by leaving those out."""
    graph = kernel.graph
    if kernel.loop != "scan" or not kernel.split_v or [carry.out.axes for carry in graph.carries] != ["kv"]:
        return False
    written = _written(graph)
    return all(_is_linear(graph, node, written) for i, node in enumerate(graph.nodes) if graph.carried[i])


def span(plan: Plan) -> int:
    """Tokens of a segment."""
    return CHUNKS * plan.chunk


def is_write(node: Node) -> bool:
    """An input with tokens and value channels: what a step writes."""
    return node.op == "input" and "n" in node.grid and "v" in node.axes


def _written(graph: Graph) -> set[int]:
    """Values that are 0 where all inputs of tokens with value channels are; no factor of theirs depends on those."""
    found = {i for i, node in enumerate(graph.nodes) if is_write(node)}
    reached = set().union(found, *(nx.descendants(graph.dataflow, i) for i in found))
    for i, node in enumerate(graph.nodes):
        args = {ref.value for ref in node.args}
        zero = args & found if node.op == "ein" else node.op in ("add", "cast", "valid") and args <= found
        if zero and not args & reached - found:
            found.add(i)
    return found


def _is_linear(graph: Graph, node: Node, written: set[int]) -> bool:
    """A product of the state with what has no value channels, or a sum of such and of what is written."""
    others = [ref for ref in node.args if not graph.carried[ref.value]]
    if node.op == "ein":
        return len(others) == len(node.args) - 1 and not any("v" in ref.axes for ref in others)
    return node.op == "carry_in" or (node.op == "add" and all(ref.value in written for ref in others))
