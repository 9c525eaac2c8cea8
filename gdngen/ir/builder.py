"""Builder: makes values in a normal form, sharing equal ones modulo the names of token axes.

Normal form of products (``ein``): nested products are flattened, constants become a coefficient that stays outside of
sums, factors without a summed axis leave the sum, redundant masks vanish.  Folds (no token axes at chunk length 1, an
inverse of nothing, sums of zero) happen here, so that every pass that rebuilds a graph gets them for free.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from gdngen.ir.graph import AXES, GRID, TOKENS, Carry, Graph, Node, Ref, is_virtual, ordered, ordered_grid
from gdngen.ir.ops import OPS

Attrs = tuple[str | float, ...]


class Builder:
    """Collects nodes; ``finish`` prunes what nothing reads and returns the frozen Graph."""

    def __init__(self, chunked: bool = True) -> None:
        self.chunked = chunked
        self.nodes: list[Node] = []
        self.names: dict[int, str] = {}
        self._table: dict[Node, int] = {}

    def __getitem__(self, ref: Ref) -> Node:
        return self.nodes[ref.value]

    # ---------------------------------------------------------------------------------------- leaves and names

    def name(self, ref: Ref, hint: str) -> Ref:
        """Attach the paper's symbol to a value; the first hint stays."""
        if hint and self[ref].op not in ("input", "carry_in", "const"):
            self.names.setdefault(ref.value, hint)
        return ref

    def _leaf(self, op: str, name: str, axes: str, grid: str) -> Ref:
        axes = axes if self.chunked else "".join(axis for axis in axes if axis not in TOKENS)
        return self._make(op, (), (name,), axes, grid)

    def input(self, name: str, axes: str, grid: str) -> Ref:
        return self._leaf("input", name, axes, grid)

    def carry_in(self, name: str, axes: str, grid: str = "bnhr") -> Ref:
        return self._leaf("carry_in", name, axes, grid)

    def const(self, value: float) -> Ref:
        return self._make("const", (), (float(value),), "", "")

    def constant(self, ref: Ref) -> float | None:
        """The number a reference stands for, if it is one."""
        return float(self[ref].attrs[0]) if self[ref].op == "const" else None

    def _make(self, op: str, args: tuple[Ref, ...], attrs: Attrs, axes: str, grid: str) -> Ref:
        node = Node(op, args, attrs, axes, grid)
        if node not in self._table:
            self._table[node] = len(self.nodes)
            self.nodes.append(node)
        return Ref(self._table[node], axes)

    def _apply(self, op: str, args: tuple[Ref, ...], attrs: Attrs = ()) -> Ref:
        """A node whose type follows from the op's rule."""
        infer = OPS[op].infer
        assert infer is not None
        return self._make(op, args, attrs, *infer(self, Node(op, args, attrs, "", "")))

    # ---------------------------------------------------------------------------------------- primitives over tokens

    def tri(self, kind: str) -> Ref:
        if not self.chunked:
            return self.const(0.0 if kind == "strict" else 1.0)
        return self._apply("tri", (), (kind,))

    def decay(self, gate: Ref, over: str) -> Ref:
        """exp of the log decay over a token range; of one token alone it is 1 or exp(gate)."""
        if not self.chunked:
            return self.const(1.0) if over in ("ij", "1i") else self.apply("exp", gate)
        return self._apply("decay", (gate,), (over,))

    def inverse(self, matrix: Ref) -> Ref:
        """(I + strictly_lower(matrix))^-1.  strict * A -> A inside, as nothing else is read."""
        if not self.chunked or self.constant(matrix) == 0:
            return self.tri("same")
        node = self[matrix]
        if node.op == "ein" and not node.summed:
            kept = [ref for ref in node.args if self[ref].op != "tri" or self[ref].attrs == ("same",)]
            if len(kept) < len(node.args):
                hint = self.names.get(matrix.value)
                matrix = self.ein([self._through(ref, node, matrix) for ref in kept], matrix.axes, float(node.attrs[0]))
                matrix = self.name(matrix, hint) if hint else matrix
        return self._apply("uli", (matrix,))

    def crossing(self, product: Ref, gate: Ref) -> Ref:
        """For each token, the sum of a virtual product m[i,j] x[i,c] y[j,c] over all pairs j < token <= i, decayed."""
        if not self.chunked:
            return self.const(0.0)
        node = self[product]
        factors = [self._through(ref, node, product) for ref in node.args] if node.op == "ein" else [product]
        rows = [ref for ref in factors if "i" in ref.axes and "j" not in ref.axes]
        columns = [ref for ref in factors if "j" in ref.axes and "i" not in ref.axes]
        matrix = [ref for ref in factors if ref not in rows + columns]
        operands = (self.mul(*matrix, coef=float(node.attrs[0])), self.mul(*rows), self.mul(*columns), gate)
        return self._apply("crossing", operands)

    def cumsum(self, value: Ref, direction: str) -> Ref:
        if self.constant(value) == 0:
            return value
        if not self.chunked:
            return value if direction.endswith("incl") else self.const(0.0)
        return self._alike("cumsum", value, attrs=(direction,))

    def apply(self, op: str, value: Ref, *more: Ref) -> Ref:
        """An elementwise op; operands broadcast."""
        if op == "valid" and (self[value].op == "input" or self.constant(value) == 0):
            return value  # loads pad with zero already
        return self._alike(op, value, *more)

    def _alike(self, op: str, value: Ref, *more: Ref, attrs: Attrs = ()) -> Ref:
        """A value of the operands' axes, read under the same names as they are."""
        axes = ordered("".join(ref.axes for ref in (value, *more)))
        tokens = [axis for axis in axes if axis in TOKENS]
        names = dict(zip(tokens, TOKENS))  # the first ones, whatever the operands are read under
        if not more and tokens:
            names = dict(zip(value.axes, self[value].axes, strict=True))
        made = self._apply(op, tuple(ref.renamed(names) for ref in (value, *more)), attrs)
        return made.renamed({new: old for old, new in names.items()})

    # ---------------------------------------------------------------------------------------- products

    def mul(self, *refs: Ref, coef: float = 1.0) -> Ref:
        """Elementwise product, broadcasting over the axes an operand lacks."""
        return self.ein(refs, {axis for ref in refs for axis in ref.axes}, coef)

    def ein(self, refs: Iterable[Ref], keep: Iterable[str], coef: float = 1.0, grid: str | None = None) -> Ref:
        """coef * product of ``refs``, summed over every tile axis not in ``keep`` and grid axis not in ``grid``."""
        refs, keep = list(refs), set(keep)
        distributed = self._distribute(refs, keep, coef, grid)
        if distributed is not None:
            return distributed
        operands, coef = self._flatten(refs, keep, coef)
        if coef == 0:
            return self.const(0.0)
        if not operands:
            return self.const(coef)
        all_grid = {axis for ref in operands for axis in self[ref].grid}
        if grid is not None and not all_grid <= set(grid):
            return self._group_sum(operands, keep, coef, grid)
        operands = self._without_redundant_masks(operands)
        names = {axis for ref in operands for axis in ref.axes}
        summed = names - keep
        if summed and len(operands) > 1:
            outside = [ref for ref in operands if not set(ref.axes) & summed]
            if outside:
                inside = self.ein([ref for ref in operands if ref not in outside], names & keep)
                return self.ein([*outside, inside], keep, coef)
            operands = self._premultiplied(operands)
        if len(operands) == 1 and not summed and coef == 1:
            return operands[0]
        if coef != 1 and (summed or len(operands) > 1):
            return self._scaled(self.ein(operands, keep), coef)
        return self._canonical("ein", operands, (1.0,) * len(operands), coef, ordered(names & keep), summed)

    def _scaled(self, body: Ref, coef: float) -> Ref:
        """coef * body as a node of its own: bodies stay free of coefficients, so that equal ones are shared."""
        node = self[body]
        if node.op == "const":
            return self.const(coef * float(node.attrs[0]))
        if node.op == "ein" and len(node.args) == 1 and not node.summed:
            coef *= float(node.attrs[0])
            body = self._through(node.args[0], node, body)
        if coef == 1:
            return body
        return self._canonical("ein", [body], (1.0,), coef, ordered(body.axes), set())

    def _group_sum(self, operands: list[Ref], keep: set[str], coef: float, grid: str) -> Ref:
        """Sums over grid axes are a separate last step (their place is a plan decision)."""
        body = self.ein(operands, keep, coef)
        node = self[body]
        if node.op == "const" or set(node.grid) <= set(grid):
            return body
        summed = "".join(axis for axis in node.grid if axis not in grid)
        made = self._apply("ein", (Ref(body.value, node.axes),), (1.0, summed))
        return Ref(made.value, body.axes)

    def _through(self, inner: Ref, node: Node, outer: Ref) -> Ref:
        """An operand of a node, in the names under which the node itself is read."""
        return inner.renamed(dict(zip(node.axes, outer.axes, strict=True)))

    def _flatten(self, refs: list[Ref], keep: set[str], coef: float) -> tuple[list[Ref], float]:
        """(a * b) * c -> a * b * c where that keeps or shortens the work; constants join the coefficient."""
        summed = {axis for ref in refs for axis in ref.axes} - keep
        todo, operands = list(refs), []
        while todo:
            ref = todo.pop(0)
            node = self[ref]
            if node.op == "const":
                coef *= float(node.attrs[0])
            elif node.op == "ein" and not node.summed and self._opens(node, ref, summed):
                coef *= float(node.attrs[0])
                todo = [self._through(inner, node, ref) for inner in node.args] + todo
            else:
                operands.append(ref)
        return operands, coef

    def _opens(self, node: Node, ref: Ref, summed: set[str]) -> bool:
        """Open a product that only scales, is virtual, stays elementwise, or has a factor that can leave the sum."""
        if len(node.args) == 1 or is_virtual(node.axes) or not summed:
            return True
        inner = [self._through(arg, node, ref) for arg in node.args]
        return bool(summed & set(ref.axes)) and any(not set(arg.axes) & summed for arg in inner)

    def _distribute(self, refs: list[Ref], keep: set[str], coef: float, grid: str | None) -> Ref | None:
        """x * (y + z) -> x y + x z for a sum of virtual products, which is never a value."""
        for position, ref in enumerate(refs):
            terms, coefs = self.virtual_terms(ref)
            if len(terms) > 1:
                rest = refs[:position] + refs[position + 1 :]
                return self.add(*(self.ein([*rest, term], keep, coef, grid) for term in terms), coefs=coefs)
        return None

    def virtual_terms(self, ref: Ref) -> tuple[list[Ref], list[float]]:
        """The terms of a sum that is never a value of its own, with their coefficients; else the reference itself."""
        node = self[ref]
        if node.op != "add" or not is_virtual(node.axes):
            return [ref], [1.0]
        return [self._through(term, node, ref) for term in node.args], [float(c) for c in node.attrs]

    def _without_redundant_masks(self, operands: list[Ref]) -> list[Ref]:
        """Masks are idempotent, and causal is implied by a strict mask or a decay over (j, i] beside it."""
        kept = [ref for i, ref in enumerate(operands) if self[ref].op != "tri" or ref not in operands[:i]]
        for mask in [ref for ref in kept if self[ref].op == "tri" and self[ref].attrs == ("causal",)]:
            implied = any(
                other != mask and other.axes[:2] == mask.axes and (self[other].op, self[other].attrs[0]) in
                (("tri", "strict"), ("decay", "ij"))
                for other in kept if self[other].op in ("tri", "decay")
            )  # fmt: skip
            if implied:
                kept.remove(mask)
        return kept

    def _premultiplied(self, operands: list[Ref]) -> list[Ref]:
        """A dot has two operands: of more factors under a sum, multiply one into another whose axes hold it."""
        while len(operands) > 2:
            places = next(self._absorbing_pairs(operands), None)
            if places is None:
                return operands
            product = self.mul(*(operands[place] for place in places))
            operands = [*_without(operands, *places), product]
        return operands

    def _absorbing_pairs(self, operands: list[Ref]) -> Iterator[tuple[int, int]]:
        """Places of two operands: equal ones may stand at several."""
        for places in itertools.permutations(range(len(operands)), 2):
            small, large = (operands[place] for place in places)
            if not set(small.axes) <= set(large.axes) or is_virtual(large.axes):
                continue
            hosts = [other for other in _without(operands, *places) if set(small.axes) <= set(other.axes)]
            grid = set(self[small].grid)
            if grid <= set(self[large].grid) or not any(grid <= set(self[host].grid) for host in hosts):
                yield places

    # ---------------------------------------------------------------------------------------- sums

    def add(self, *refs: Ref, coefs: Sequence[float] | None = None) -> Ref:
        """Sum of coefficients times operands; equal operands merge, scalings join the coefficients."""
        total: dict[Ref, float] = {}
        number = 0.0
        for ref, coef in zip(refs, coefs or [1.0] * len(refs), strict=True):
            node = self[ref]
            if node.op == "ein" and len(node.args) == 1 and not node.summed:
                coef *= float(node.attrs[0])
                ref = self._through(node.args[0], node, ref)
            if node.op == "const":
                number += coef * float(node.attrs[0])
            else:
                total[ref] = total.get(ref, 0.0) + coef
        if number:
            total[self.const(number)] = 1.0
        total = {ref: coef for ref, coef in total.items() if coef}
        if len(total) < 2:
            return self._scaled(*next(iter(total.items()))) if total else self.const(0.0)
        return self._canonical(
            "add", list(total), tuple(total.values()), 1.0, ordered("".join(ref.axes for ref in total)), set()
        )

    # ---------------------------------------------------------------------------------------- sharing

    def _canonical(
        self, op: str, refs: list[Ref], coefs: tuple[float, ...], coef: float, axes: str, summed: set[str]
    ) -> Ref:
        """The node for these operands under the token naming found first in the table, else the first legal naming."""
        tokens = [token for token in TOKENS if token in axes or token in summed]
        first: tuple[Node, dict[str, str]] | None = None
        grid = ordered_grid(axis for ref in refs for axis in self[ref].grid)
        for names in itertools.permutations(TOKENS[: len(tokens)]):
            forward = dict(zip(tokens, names, strict=True))
            kept = "".join(sorted(forward[token] for token in tokens if token in axes))
            if kept != TOKENS[: len(kept)]:
                continue
            terms = sorted((ref.renamed(forward), c) for ref, c in zip(refs, coefs, strict=True))
            attrs: Attrs = tuple(c for _, c in terms)
            if op == "ein":
                attrs = (coef, "".join(sorted((forward.get(axis, axis) for axis in summed), key=AXES.index)))
            new_axes = ordered(forward.get(axis, axis) for axis in axes)
            node = Node(op, tuple(ref for ref, _ in terms), attrs, new_axes, grid)
            back = {new: old for old, new in forward.items()}
            if node in self._table:
                return Ref(self._table[node], new_axes).renamed(back)
            first = first or (node, back)
        assert first is not None
        node, back = first
        return self._make(node.op, node.args, node.attrs, node.axes, node.grid).renamed(back)

    # ---------------------------------------------------------------------------------------- result

    def finish(self, outputs: Sequence[tuple[str, Ref]], carries: Sequence[Carry]) -> Graph:
        """The frozen graph of what outputs and carries read, renumbered densely in definition order."""
        live: set[int] = set()
        todo = [ref.value for _, ref in outputs] + [ref.value for c in carries for ref in (c.out, c.init)]
        while todo:
            value = todo.pop()
            if value not in live:
                live.add(value)
                todo += [ref.value for ref in self.nodes[value].args]
        names = tuple(self.names.get(i, "") for i in range(len(self.nodes)))
        whole = Graph(tuple(self.nodes), tuple(outputs), tuple(carries), self.chunked, names)
        return whole.reordered(sorted(live))


def _without(operands: Sequence[Ref], *places: int) -> list[Ref]:
    return [ref for place, ref in enumerate(operands) if place not in places]


Hook = Callable[[Builder, Node, list[Ref]], Ref | None]


def rebuild(graph: Graph, chunked: bool | None = None, hook: Hook | None = None) -> Graph:
    """Re-emit a graph through the builder; ``hook(builder, node, operands)`` may give another value for a node."""
    build = Builder(graph.chunked if chunked is None else chunked)
    made = copy_into(build, graph, hook)
    outputs = [(name, made(ref)) for name, ref in graph.outputs]
    carries = [Carry(c.name, made(c.out), made(c.init), c.final, c.reverse) for c in graph.carries]
    return build.finish(outputs, carries)


def copy_into(build: Builder, graph: Graph, hook: Hook | None = None) -> Callable[[Ref], Ref]:
    """Emit every value of ``graph`` into ``build``; the result maps references of the one to the other."""
    where: dict[int, Ref] = {}

    def made(ref: Ref) -> Ref:
        axes = graph[ref].axes
        names = dict(zip(axes, ref.axes, strict=True))
        return where[ref.value].renamed(names)

    for i, node in enumerate(graph.nodes):
        operands = [made(ref) for ref in node.args]
        result = hook(build, node, operands) if hook else None
        where[i] = result if result is not None else emit(build, node, operands)
        if graph.names and graph.names[i]:
            build.name(where[i], graph.names[i])
    return made


def emit(build: Builder, node: Node, operands: list[Ref]) -> Ref:
    """The same value as ``node`` over new operands, through the builder's folds."""
    match node.op:
        case "input" | "carry_in":
            return build._leaf(node.op, str(node.attrs[0]), node.axes, node.grid)
        case "const":
            return build.const(float(node.attrs[0]))
        case "tri":
            return build.tri(str(node.attrs[0]))
        case "decay":
            return build.decay(operands[0], str(node.attrs[0]))
        case "uli":
            return build.inverse(operands[0])
        case "cumsum":
            return build.cumsum(operands[0], str(node.attrs[0]))
        case "crossing":
            return build._apply("crossing", tuple(operands)) if build.chunked else build.const(0.0)
        case "add":
            return build.add(*operands, coefs=[float(coef) for coef in node.attrs])
        case "ein":
            grid = node.grid if set(node.summed) & set(GRID) else None
            return build.ein(operands, node.axes, float(node.attrs[0]), grid=grid)
    return build._apply(node.op, tuple(operands), node.attrs) if node.attrs else build.apply(node.op, *operands)
