"""The IR: one flat DAG for what happens in one chunk, plus carried values.  See graph.py first, then ops.py."""

from gdngen.ir import offsets
from gdngen.ir.builder import Builder
from gdngen.ir.evaluate import evaluate
from gdngen.ir.family import forward_graph
from gdngen.ir.graph import Carry, Graph, Node, Ref
from gdngen.ir.text import parse
from gdngen.ir.verify import verify

__all__ = ["Builder", "Carry", "Graph", "Node", "Ref", "evaluate", "forward_graph", "offsets", "parse", "verify"]
