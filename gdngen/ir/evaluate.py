"""Evaluate a graph chunk by chunk: the meaning that every pass must keep and every kernel must match."""

from collections.abc import Mapping, Sequence

import torch

from gdngen.ir.graph import Graph, Node, Ref, ordered
from gdngen.ir.ops import OPS, Scope

Data = Mapping[str, torch.Tensor | Sequence[torch.Tensor]]


def evaluate(
    graph: Graph,
    data: Data,
    length: int,
    chunk: int,
    dtype: torch.dtype = torch.float64,
    per_chunk: Sequence[str] = (),
) -> dict[str, torch.Tensor]:
    """Outputs and final carries of a sequence of ``length`` tokens.

    ``data`` holds the declared inputs: per-token ones as [b, h(, r), T, ...] (zero-padded here), values that exist once
    per chunk (what another kernel stored) as a list with one entry per chunk, parameters as they are.  Outputs named in
    ``per_chunk`` come back as such lists.  Beside outputs and finals the result has ``<carry>@chunks``: the carried
    value as it entered each chunk.
    """
    run = _Run(graph, data, length, chunk if graph.chunked else 1, dtype, per_chunk)
    count = -(-length // run.chunk)
    reverse = any(carry.reverse for carry in graph.carries)
    for n in reversed(range(count)) if reverse else range(count):
        run.step(n)
    return run.results(count)


class _Run:
    def __init__(
        self, graph: Graph, data: Data, length: int, chunk: int, dtype: torch.dtype, per_chunk: Sequence[str]
    ) -> None:
        self.graph, self.data, self.length, self.chunk, self.dtype = graph, data, length, chunk, dtype
        self.per_chunk = per_chunk
        self.state: dict[str, torch.Tensor] = {}
        self.entered: dict[str, dict[int, torch.Tensor]] = {carry.name: {} for carry in graph.carries}
        self.rows: dict[str, dict[int, torch.Tensor]] = {name: {} for name, _ in graph.outputs}
        self.totals: dict[int, torch.Tensor] = {}
        self.parameters: dict[int, torch.Tensor] = {}  # values that no chunk changes, for what reads the totals
        self.late = self._after_all_chunks()

    def _after_all_chunks(self) -> set[int]:
        """Sums over chunks, and what reads them."""
        late: set[int] = set()
        for i, node in enumerate(self.graph.nodes):
            if "n" in node.summed or any(ref.value in late for ref in node.args):
                late.add(i)
        return late

    def step(self, n: int) -> None:
        start = n * self.chunk
        rows = min(self.chunk, self.length - start)
        valid = (torch.arange(self.chunk) < rows).to(self.dtype)
        scope = Scope(self.graph, self.chunk, valid)
        values: dict[int, torch.Tensor] = {}
        for i, node in enumerate(self.graph.nodes):
            if node.op == "carry_in":
                values[i] = self._carried(node, values)
            elif node.op == "input":
                values[i] = self._input(node, n, start, rows)
            elif "n" in node.summed:
                self.totals[i] = self.totals.get(i, 0) + self._apply(i, values, scope)
            elif i not in self.late:
                values[i] = self._apply(i, values, scope)
        self.parameters = {i: value for i, value in values.items() if "n" not in self.graph.nodes[i].grid}
        for carry in self.graph.carries:
            self.entered[carry.name][n] = values[self.graph.carry_ids[carry.name]]
        for carry in self.graph.carries:
            target = self.entered[carry.name][n]
            self.state[carry.name] = scope.aligned(
                values[carry.out.value], carry.out, scope.dims(self.graph.nodes[self.graph.carry_ids[carry.name]])
            ).expand_as(target)
        for name, ref in self.graph.outputs:
            if ref.value not in self.late:
                value = scope.aligned(values[ref.value], ref, scope.dims(self.graph[ref], ordered(ref.axes)))
                self.rows[name][n] = value if name in self.per_chunk else self._output(ref, value, rows)

    def _apply(self, i: int, values: dict[int, torch.Tensor], scope: Scope) -> torch.Tensor:
        node = self.graph.nodes[i]
        function = OPS[node.op].evaluate
        assert function is not None
        return function(node, [values[ref.value] for ref in node.args], scope)

    def _carried(self, node: Node, values: dict[int, torch.Tensor]) -> torch.Tensor:
        name = str(node.attrs[0])
        if name not in self.state:
            carry = next(c for c in self.graph.carries if c.name == name)
            init = self.data[str(self.graph[carry.init].attrs[0])]
            assert isinstance(init, torch.Tensor)
            self.state[name] = init.to(self.dtype)
        return self.state[name]

    def _input(self, node: Node, n: int, start: int, rows: int) -> torch.Tensor:
        value = self.data[str(node.attrs[0])]
        if not isinstance(value, torch.Tensor):
            return value[n].to(self.dtype)
        value = value.to(self.dtype)
        if "n" in node.grid:
            dim = sum(axis in node.grid for axis in "bhr")
            value = value.narrow(dim, start, rows)
            if not self.graph.chunked:
                return value.squeeze(dim)
            padding = list(value.shape)
            padding[dim] = self.chunk - rows
            value = torch.cat([value, value.new_zeros(padding)], dim)
        return value

    def _output(self, ref: Ref, value: torch.Tensor, rows: int) -> torch.Tensor:
        node = self.graph[ref]
        dim = sum(axis in node.grid for axis in "bhr")
        if not self.graph.chunked:
            return value.unsqueeze(dim)
        if not node.tokens:
            value = value.unsqueeze(dim).expand(*value.shape[:dim], self.chunk, *value.shape[dim:])
        return value.narrow(dim, 0, rows)

    def results(self, count: int) -> dict[str, torch.Tensor]:
        values = {**self.parameters, **self.totals}
        scope = Scope(self.graph, self.chunk, torch.ones(self.chunk, dtype=self.dtype))
        for i in sorted(self.late - set(self.totals)):
            values[i] = self._apply(i, values, scope)
        found: dict[str, torch.Tensor] = {}
        for name, ref in self.graph.outputs:
            node = self.graph[ref]
            if ref.value in self.late:
                found[name] = values[ref.value]
            elif name in self.per_chunk:
                found[name] = [self.rows[name][n] for n in range(count)]  # type: ignore[assignment]
            elif "n" not in node.grid:
                found[name] = next(iter(self.rows[name].values()))
            else:
                found[name] = torch.cat([self.rows[name][n] for n in range(count)], sum(a in node.grid for a in "bhr"))
        for carry in self.graph.carries:
            found[carry.final] = self.state[carry.name]
            found[f"{carry.name}@chunks"] = [self.entered[carry.name][n] for n in range(count)]  # type: ignore[assignment]
        return found
