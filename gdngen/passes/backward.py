"""Backward: reverse mode over the ops.  From the graph of one chunk to the graph of one chunk in the reverse scan.

The carried value S becomes a per-chunk input (the state that entered the chunk); its adjoint dS is the new carry, from
the last chunk to the first.  Derivatives stand beside the ops (ir/ops.py); shared heads, A_log and dt_bias get their
sums because an adjoint is reduced to the axes of what it belongs to.
"""

from dataclasses import dataclass, field, replace

from gdngen.errors import GraphError
from gdngen.ir.builder import Builder, copy_into
from gdngen.ir.graph import Carry, Graph, Node, Ref
from gdngen.ir.ops import OPS
from gdngen.target import Target


@dataclass(frozen=True)
class Backward:
    """Requires a forward graph; ensures its gradient graph: inputs do, dht; outputs dq, dk, ...; final dh0.

    The state that entered each chunk is an input S; with ``joint`` it is the forward carry, so that one graph holds
    both scans and can be cut into kernels."""

    joint: bool = False
    name: str = "backward"

    def run(self, graph: Graph, target: Target) -> Graph:
        return _Reverse(graph, self.joint).graph()


@dataclass
class _Reverse:
    forward: Graph
    joint: bool
    build: Builder = field(init=False)
    adjoints: dict[int, list[Ref]] = field(default_factory=dict)

    def graph(self) -> Graph:
        forward, build = self.forward, Builder(self.forward.chunked)
        self.build = build
        made = copy_into(build, forward, None if self.joint else self._carry_as_input)
        count = len(build.nodes)
        for name, ref in forward.outputs:
            self._give(made(ref), build.input(f"d{name}", ref.axes, forward[ref].grid))
        for carry in forward.carries:
            grid = forward.nodes[forward.carry_ids[carry.name]].grid
            self._give(made(carry.out), build.carry_in(f"d{carry.name}", carry.out.axes, grid))
        for i in reversed(range(count)):
            self._propagate(i)
        skipped = {str(forward[carry.init].attrs[0]) for carry in forward.carries} | set(forward.scalars)
        outputs = []
        carries = [replace(c, out=made(c.out), init=made(c.init)) for c in forward.carries if self.joint]
        for name, i in forward.inputs.items():
            total = self._total(made(Ref(i, forward.nodes[i].axes)).value)
            if name not in skipped and total is not None:
                outputs.append((f"d{name}", build.name(total, f"d{name}")))
        for carry in forward.carries:
            carries.append(self._reverse_carry(carry, made))
        return build.finish(outputs, carries)

    @staticmethod
    def _carry_as_input(build: Builder, node: Node, operands: list[Ref]) -> Ref | None:
        return build.input(str(node.attrs[0]), node.axes, node.grid) if node.op == "carry_in" else None

    def _reverse_carry(self, carry: Carry, made) -> Carry:  # type: ignore[no-untyped-def]
        forward, build = self.forward, self.build
        value = forward.carry_ids[carry.name]
        node = forward.nodes[value]
        total = self._total(made(Ref(value, node.axes)).value)
        if total is None:
            raise GraphError(f"backward: carry {carry.name} is never read")
        init = build.input(f"d{carry.final}", node.axes, forward[carry.init].grid)
        return Carry(f"d{carry.name}", total, init, f"d{forward[carry.init].attrs[0]}", reverse=True)

    def _give(self, ref: Ref, adjoint: Ref) -> None:
        """Add a contribution, named as the operand is read, to the operand's value: reduced to its axes, renamed."""
        build = self.build
        if build.constant(adjoint) == 0 or build.constant(ref) is not None:
            return
        node = build[ref]
        reduced = build.ein([adjoint], ref.axes, grid=node.grid)
        names = dict(zip(ref.axes, node.axes, strict=True))
        self.adjoints.setdefault(ref.value, []).append(reduced.renamed(names))

    def _total(self, value: int) -> Ref | None:
        found = self.adjoints.get(value)
        return self.build.add(*found) if found else None

    def _propagate(self, value: int) -> None:
        node = self.build.nodes[value]
        if node.op in ("input", "carry_in", "const", "tri") or value not in self.adjoints:
            return
        derive = OPS[node.op].derive
        if derive is None:
            raise GraphError(f"backward: op {node.op} has no derivative")
        total = self._total(value)
        assert total is not None
        name = self._symbol(value)
        if name and self.build.names.get(total.value, f"d{name}_").startswith(f"d{name}_"):
            self.build.names.pop(total.value, None)  # the whole adjoint, not one contribution to it
            self.build.name(total, f"d{name}")
        self.adjoints[value] = [total]
        for operand, contribution in derive(self.build, Ref(value, node.axes), total, node):
            if name and self._symbol(operand.value):
                self.build.name(contribution, f"d{self._symbol(operand.value)}_{name}")
            self._give(operand, contribution)

    def _symbol(self, value: int) -> str:
        """The paper's symbol of a value, or an empty text."""
        node = self.build.nodes[value]
        leaf = node.op in ("input", "carry_in")
        return str(node.attrs[0]) if leaf else self.build.names.get(value, "")
