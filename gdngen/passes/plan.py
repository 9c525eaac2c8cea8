"""Plan: kernels, what they hand to each other, and how each value lies in registers; a frozen value, text and JSON.

A kernel is a Graph of its own.  What another kernel stored appears in it as an input; what it stores is one of its
outputs.  So a plan is evaluated like a graph, kernel after kernel, and codegen sees nothing but the kernel.
"""

import hashlib
from typing import Literal

import networkx as nx
from pydantic import BaseModel, ConfigDict

from gdngen.ir.graph import CHANNELS, Graph
from gdngen.ir.text import parse
from gdngen.spec import Spec

OperatorName = Literal["chunk", "chunk_backward", "recurrent"]
Loop = Literal["chunks", "scan", "tokens"]
Format = Literal["input", "f32"]

TASKS = {  # of kernels by name
    "decays": "Decays of gates per channel, and keys and queries multiplied with them, for the next kernels.",
    "decays_backward": "Decays of gates per channel, and what they are multiplied with, for backward.",
    "prepare": "What does not depend on the state, chunk by chunk.",
    "scan": "The state from chunk to chunk, and what is read from it.",
    "output": "What is read from the stored states, chunk by chunk.",
    "prepare_backward": "What gradients need and does not depend on any state, chunk by chunk.",
    "states": "The state that enters each chunk, once more.",
    "reverse": "The state's gradient, from the last chunk to the first.",
    "products": "Matrices that gradients with decays per channel need, and dv, chunk by chunk.",
    "crossings": "What decays per value channel between tokens give to their gates, chunk by chunk.",
    "pairs": "What the gradients need of pairs of tokens, chunk by chunk.",
    "queries": "The gradient of q, chunk by chunk.",
    "gates": "The gradients of gates per channel, chunk by chunk.",
    "gradients": "All other gradients, chunk by chunk.",
    "recurrence": "The state from token to token, and what is read from it.",
}


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Stored(Frozen):
    """A value handed from one kernel to the next through device memory, one tile per chunk and head.

    heads: one per value head, or per group of value heads that share a query/key head.
    format: ``input`` the input dtype, or ``f32``."""

    name: str
    axes: str
    heads: Literal["value", "group"]
    format: Format
    writer: str


class Tuning(Frozen):
    """Launch choices of one kernel: tile of v (0: not tiled), warps, pipeline stages, loads by descriptors or not."""

    BV: int
    num_warps: int
    num_stages: int
    descriptors: int = 0


class Kernel(Frozen):
    """One launch.  ``orders`` gives the register axis order of each value with two axes; ``wide_dots`` names the matrix
    products whose operands stay in fp32; ``split_v`` says whether programs share out the value channels, and
    ``is_segmented`` whether they may share out a sequence."""

    name: str
    loop: Loop
    text: str
    stores: tuple[str, ...] = ()
    orders: tuple[tuple[str, str], ...] = ()
    wide_dots: tuple[str, ...] = ()
    split_v: bool = False
    is_segmented: bool = False
    tuning: tuple[tuple[str, Tuning], ...] = ()

    @property
    def graph(self) -> Graph:
        return parse(self.text)

    @property
    def is_reverse(self) -> bool:
        """A scan from the last chunk to the first."""
        return any(carry.reverse for carry in self.graph.carries)

    @property
    def is_tiled(self) -> bool:
        """A chunk kernel whose programs go over v tile by tile, because v is summed or left out of a result."""
        uses_v = any("v" in node.axes for node in self.graph.nodes)
        return self.loop == "chunks" and uses_v and not self.split_v

    @property
    def has_channel_gate(self) -> bool:
        """Whether it computes with a gate per channel: tiles where other members have a row."""
        return any(node.op in ("decay", "cumsum") and set(node.axes) & set(CHANNELS) for node in self.graph.nodes)

    @property
    def has_decayed_products(self) -> bool:
        return any(map(self.graph.has_decay, range(len(self.graph.nodes))))

    @property
    def is_sliced(self) -> bool:
        """A chunk kernel whose programs go over k slice by slice: its products with decays take each channel apart."""
        graph = self.graph
        over_k = {i for i, node in enumerate(graph.nodes) if "k" in node.summed + node.axes}
        decayed = set(filter(graph.has_decay, over_k))
        sums = [i for i in over_k if "k" in graph.nodes[i].summed]
        behind = set().union(*(nx.descendants(graph.dataflow, i) for i in sums))  # of whole sums, after the loop
        apart = not any(graph.is_heavy(i) for i in over_k - decayed)
        return bool(decayed) and apart and not any(set(graph.nodes[i].axes) & set(CHANNELS) for i in behind)

    @property
    def is_grouped(self) -> bool:
        """One program computes the value heads of a group in turn: they are summed, or share matrix products."""
        graph = self.graph
        if any("r" in node.summed for node in graph.nodes):
            return True
        shared = any(graph.kind(i) == "dot" and "r" not in node.grid for i, node in enumerate(graph.nodes))
        apart = any("r" in node.grid for node in graph.nodes) and not any("v" in node.axes for node in graph.nodes)
        return self.loop == "chunks" and shared and apart


class Operator(Frozen):
    """The kernels of one operator, in launch order, and what they exchange."""

    name: OperatorName
    graph: str
    cut: str
    forms: tuple[str, ...]
    stored: tuple[Stored, ...]
    kernels: tuple[Kernel, ...]
    chunks: tuple[tuple[str, tuple[int, ...]], ...] = ()  # target/bytes per element -> chunk lengths to try in turn
    totals: tuple[str, ...] = ()  # outputs that are summed over sequences and chunks after the kernels
    saved: tuple[str, ...] = ()  # stored values that the forward operator hands over; without them they are recomputed

    @property
    def is_backward(self) -> bool:
        return self.name == "chunk_backward"


class Plan(Frozen):
    """Everything codegen needs; ``str()`` is readable, JSON round-trips, the digest names it."""

    spec: Spec
    target: str
    chunk: int
    operators: tuple[Operator, ...]
    pins: tuple[str, ...] = ()
    missing: tuple[tuple[str, str], ...] = ()  # operator, why this member has none

    @property
    def is_fixed(self) -> bool:
        """Whether kernels are written for the one chunk length; else they take it as an argument."""
        return not any(operator.chunks for operator in self.operators)

    @property
    def notes(self) -> list[str]:
        return [f"no {operator.replace('_', ' ')} operator: {reason}" for operator, reason in self.missing]

    def operator(self, name: str) -> Operator | None:
        return next((operator for operator in self.operators if operator.name == name), None)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]

    def __str__(self) -> str:
        lines = [f"plan for {self.spec.name} on {self.target}, chunk {self.chunk}"]
        for operator in self.operators:
            forms = f", forms {' '.join(operator.forms)}" if operator.forms else ""
            lines.append(f"operator {operator.name}: cut {operator.cut}{forms}")
            shorter = [f"{lengths[0]} on {key}" for key, lengths in operator.chunks if lengths[0] < self.chunk]
            lines += [f"  chunks of {', '.join(shorter)}"] if shorter else []
            lines += [f"  saved by the forward operator: {', '.join(operator.saved)}"] if operator.saved else []
            lines += [f"  stored {s.name}[{','.join(s.axes)}] as {s.format}, by {s.writer}" for s in operator.stored]
            for kernel in operator.kernels:
                lines += [f"  {line}" for line in describe_kernel(kernel)]
        return "\n".join([*lines, *self.notes]) + "\n"


def describe_kernel(kernel: Kernel) -> list[str]:
    """A kernel as a loop nest: its grid, its loop, its values in order."""
    segment = "   # of a segment, where heads are few" if kernel.is_segmented else ""
    heads = "sequence, value head" + (", tile of v" if kernel.split_v else "")
    chunk_heads = "query/key head" if kernel.is_grouped else "value head" + (", tile of v" if kernel.split_v else "")
    way = "last to first" if kernel.is_reverse else "first to last"
    loops = {
        "chunks": [f"kernel {kernel.name}: one program per chunk, {chunk_heads}"],
        "scan": [f"kernel {kernel.name}: one program per {heads}", f"  for each chunk, {way}:{segment}"],
        "tokens": [f"kernel {kernel.name}: one program per {heads}", "  for each token, first to last:"],
    }[kernel.loop]
    indent = "  " * len(loops)
    orders = dict(kernel.orders)
    body = []
    for line in kernel.text.splitlines()[1:]:
        name = line.split("[")[0]
        notes = [f"registers {','.join(orders[name])}"] if name in orders else []
        notes += ["fp32 operands"] if name in kernel.wide_dots else []
        body.append(f"{indent}{line}" + (f"   # {'; '.join(notes)}" if notes else ""))
    return loops + body
