"""Precision: which matrix products need more than the input dtype, and how stored values are kept.

Accumulation is fp32 everywhere and operands are in the input dtype, except at the inverse: its rounding error repeats
in every row and multiplies the part that correlated keys share.  There operands stay in fp32 and the product is formed
in tf32 for 16-bit inputs: three bits more than bf16, the range of fp32, and no scale that would carry a trace of later
tokens into earlier ones (contract section 5, hard inputs and causality).  The same holds for gradients of normalised
scores, where rows cancel.
"""

from dataclasses import dataclass

from gdngen.ir.graph import Graph, Ref
from gdngen.ir.text import value_names
from gdngen.passes.plan import Kernel, Operator, Plan, Stored
from gdngen.target import Target


@dataclass(frozen=True)
class Precision:
    """Requires fused kernels; ensures ``wide_dots`` of each and the format of every stored value.

    Rewrite: r = X . y in the input dtype  ->  r = X . y in fp32 operands, wherever X is an inverse times anything.
    """

    name: str = "precision"

    def run(self, plan: Plan, target: Target) -> Plan:
        operators = tuple(self._operator(operator, plan.spec.normalize) for operator in plan.operators)
        return plan.model_copy(update={"operators": operators})

    def _operator(self, operator: Operator, normalized: bool) -> Operator:
        # Divided by their sum, scores weigh what differs from the mean: the gradient of a row of them sums to nothing.
        cancelling = {s.name for s in operator.stored if normalized and s.writer == "pairs" and s.axes == "ij"}
        inverses = set(cancelling)
        kernels = []
        for kernel in operator.kernels:
            names = value_names(kernel.graph)
            ends = [(name, ref) for name, ref in kernel.graph.outputs if name in kernel.stores]
            inverses |= {name for name, ref in ends if keeps_inverse(kernel.graph, ref, names, inverses)}
            kernels.append(kernel.model_copy(update={"wide_dots": self._wide_dots(kernel, inverses)}))
        matrices = set().union(*(_beside_inverses(kernel) for kernel in kernels))
        stored = [self._format(value, inverses | matrices) for value in operator.stored]
        return operator.model_copy(update={"kernels": tuple(kernels), "stored": tuple(stored)})

    def _wide_dots(self, kernel: Kernel, inverses: set[str]) -> tuple[str, ...]:
        graph = kernel.graph
        names = value_names(graph)
        return tuple(
            names[i]
            for i, node in enumerate(graph.nodes)
            if graph.is_product(i) and any(holds_inverse(graph, ref, names, inverses) for ref in node.args)
        )

    def _format(self, stored: Stored, inverses: set[str]) -> Stored:
        """fp32 for inverses, matrices that they multiply and values per token, which are few; tiles are rounded like
        matrix operands."""
        wide = stored.name in inverses or len(stored.axes) < 2
        return stored.model_copy(update={"format": "f32" if wide else "input"})


def holds_inverse(graph: Graph, ref: Ref, names: list[str], inverses: set[str]) -> bool:
    """X itself, X as another kernel stored it, or a product with either."""
    node = graph[ref]
    if node.op == "uli" or (node.op == "input" and names[ref.value] in inverses):
        return True
    return graph.kind(ref.value) == "product" and any(holds_inverse(graph, arg, names, inverses) for arg in node.args)


def keeps_inverse(graph: Graph, ref: Ref, names: list[str], inverses: set[str]) -> bool:
    """An inverse, or what one made without a state (U, W): of the state such tiles are subtracted from each other."""
    made = graph.kind(ref.value) == "dot" and not graph.carried[ref.value]
    operands = graph[ref].args if made and "v" not in graph[ref].summed else (ref,)
    return any(holds_inverse(graph, operand, names, inverses) for operand in operands)


def _beside_inverses(kernel: Kernel) -> set[str]:
    """Loaded matrices that are multiplied with an inverse."""
    graph, names = kernel.graph, value_names(kernel.graph)
    products = [node for i, node in enumerate(graph.nodes) if names[i] in kernel.wide_dots]
    read = {ref.value for node in products for ref in node.args if graph[ref].op == "input"}
    return {names[i] for i in read if graph.nodes[i].axes == "ij"}
