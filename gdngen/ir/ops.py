"""The op table: each op declared once, with its type rule, torch evaluation, derivative, cost and meaning.

In evaluation a value is a tensor whose dimensions are its grid axes among ``b h r`` and then its tile axes; the chunk
axis ``n`` is the evaluator's loop.  A derivative receives the builder, the value's reference, its adjoint and the node,
and yields (operand, contribution) pairs; contributions are summed and reduced to the operand's axes by the caller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gdngen.errors import GraphError
from gdngen.ir.graph import CHANNELS, TOKENS, Graph, Node, Ref, is_virtual, ordered, ordered_grid

if TYPE_CHECKING:
    from gdngen.ir.builder import Builder

SATURATION = 80.0  # exp() of more is held here: a huge A_log must give a finite factor (contract section 3)
LOWEST_GATE = -110.0  # exp() of this is 0 in float32, where kernels hold gates too: -inf would give NaN differences
# A sigmoid by its logarithm, whose derivative does not cancel where the sigmoid is nearly 1.
LOGISTIC = "torch.nn.functional.logsigmoid({0}).exp()"
DECAY_AXES = {"ij": "ij", "i0": "i", "1i": "i", "10": ""}

Contributions = Iterator[tuple[Ref, Ref]]


@dataclass(frozen=True)
class Scope:
    """What evaluation of one chunk needs beside the operands."""

    graph: Graph
    chunk: int
    valid: torch.Tensor  # [chunk], 1 for tokens inside the sequence, 0 for padding

    def dims(self, node: Node, axes: str | None = None) -> str:
        return "".join(axis for axis in "bhr" if axis in node.grid) + (node.axes if axes is None else axes)

    def operand_dims(self, ref: Ref) -> str:
        return self.dims(self.graph[ref], ref.axes)

    def aligned(self, tensor: torch.Tensor, ref: Ref, target: str) -> torch.Tensor:
        """An operand permuted to the order of ``target``, with length-1 dimensions for what it lacks."""
        source = self.operand_dims(ref)
        tensor = tensor.permute([source.index(axis) for axis in target if axis in source])
        return tensor[tuple(slice(None) if axis in source else None for axis in target)]


@dataclass(frozen=True)
class Op:
    """One row of the table.  ``infer`` gives (axes, grid) from operands and attributes; None for declared leaves.

    An op that computes element by element also says how: ``kernel`` and ``torch`` are its Triton and its PyTorch
    expression of the operands {0}, {1}, ...
    """

    name: str
    doc: str
    infer: Callable[[Graph | Builder, Node], tuple[str, str]] | None
    evaluate: Callable[[Node, Sequence[torch.Tensor], Scope], torch.Tensor] | None
    derive: Callable[[Builder, Ref, Ref, Node], Contributions] | None
    flops_per_element: float = 1.0
    kernel: str = ""
    torch: str = ""


def _token_dim(node: Node, scope: Scope) -> int:
    return len(scope.dims(node, ""))


# ------------------------------------------------------------------------------------------------ type rules


def _names(node: Node) -> set[str]:
    return set().union(*(ref.axes for ref in node.args)) if node.args else set()


def _grids(graph: Graph | Builder, node: Node) -> set[str]:
    return set().union(*(graph[ref].grid for ref in node.args)) if node.args else set()


def _infer_ein(graph: Graph | Builder, node: Node) -> tuple[str, str]:
    return ordered(_names(node) - set(node.summed)), ordered_grid(_grids(graph, node) - set(node.summed))


def infer_same(graph: Graph | Builder, node: Node) -> tuple[str, str]:
    return ordered(_names(node)), ordered_grid(_grids(graph, node))


def _infer_decay(graph: Graph | Builder, node: Node) -> tuple[str, str]:
    (ref,) = node.args
    if ref.axes[:1] != "i":
        raise GraphError(f"decay: its gate must be read under token axis i, got axes {ref.axes!r}")
    channels = "".join(axis for axis in ref.axes if axis in CHANNELS)
    return DECAY_AXES[str(node.attrs[0])] + channels, graph[ref].grid


def _infer_inverse(graph: Graph | Builder, node: Node) -> tuple[str, str]:
    (ref,) = node.args
    if ref.axes[:2] != "ij":
        raise GraphError(f"uli: the matrix has axes {ref.axes!r}, expected 'ij'")
    return ref.axes, graph[ref].grid


def _infer_crossing(graph: Graph | Builder, node: Node) -> tuple[str, str]:
    return node.args[-1].axes, ordered_grid(_grids(graph, node))


# ------------------------------------------------------------------------------------------------ evaluation


def _eval_const(node: Node, args: Sequence[torch.Tensor], scope: Scope) -> torch.Tensor:
    return torch.tensor(float(node.attrs[0]), dtype=scope.valid.dtype)


def _eval_ein(node: Node, args: Sequence[torch.Tensor], scope: Scope) -> torch.Tensor:
    operands = ",".join(scope.operand_dims(ref) for ref in node.args)
    return float(node.attrs[0]) * torch.einsum(f"{operands}->{scope.dims(node)}", *args)


def _eval_add(node: Node, args: Sequence[torch.Tensor], scope: Scope) -> torch.Tensor:
    target = scope.dims(node)
    terms = [float(c) * scope.aligned(t, ref, target) for c, t, ref in zip(node.attrs, args, node.args, strict=True)]
    return sum(terms[1:], terms[0])


def _eval_decay(node: Node, args: Sequence[torch.Tensor], scope: Scope) -> torch.Tensor:
    """Finite because the gate is held at a value whose exponential is exactly 0."""
    dim = len(scope.dims(scope.graph[node.args[0]], ""))
    total = args[0].clamp(min=LOWEST_GATE).cumsum(dim)
    last = total.narrow(dim, scope.chunk - 1, 1)
    match node.attrs[0]:
        case "i0":
            return total.exp()
        case "1i":
            return (last - total).exp()
        case "10":
            return last.squeeze(dim).exp()
    difference = total.unsqueeze(dim + 1) - total.unsqueeze(dim)
    causal = torch.ones(scope.chunk, scope.chunk, dtype=torch.bool).tril()
    causal = causal.reshape([scope.chunk, scope.chunk] + [1] * (difference.ndim - dim - 2))
    return torch.where(causal, difference, -math.inf).exp()


def _eval_crossing(node: Node, args: Sequence[torch.Tensor], scope: Scope) -> torch.Tensor:
    wide = scope.dims(node, "ij" + node.axes[1:])
    matrix, x, y = (scope.aligned(tensor, ref, wide) for tensor, ref in zip(args[:3], node.args[:3], strict=True))
    between = _eval_decay(Node("decay", node.args[3:], ("ij",), "", ""), args[3:], scope)
    dim = _token_dim(node, scope)
    strict = torch.ones(scope.chunk, scope.chunk, dtype=torch.bool).tril(-1)
    strict = strict.reshape([scope.chunk, scope.chunk, 1])
    pairs = torch.where(strict, matrix * x * y * between, 0.0)
    below = pairs.flip(dim).cumsum(dim).flip(dim)
    return torch.where(strict, below, 0.0).sum(dim + 1)


def _eval_inverse(node: Node, args: Sequence[torch.Tensor], scope: Scope) -> torch.Tensor:
    dim = _token_dim(node, scope)
    matrix = args[0].movedim((dim, dim + 1), (-2, -1))
    eye = torch.eye(scope.chunk, dtype=matrix.dtype)
    inverse = torch.linalg.solve_triangular(
        eye + matrix.tril(-1), eye.expand_as(matrix), upper=False, unitriangular=True
    )
    return inverse.movedim((-2, -1), (dim, dim + 1))


def _eval_cumsum(node: Node, args: Sequence[torch.Tensor], scope: Scope) -> torch.Tensor:
    direction, dim = str(node.attrs[0]), _token_dim(node, scope)
    value = args[0].flip(dim) if direction.startswith("rev") else args[0]
    total = value.cumsum(dim)
    total = total if direction.endswith("incl") else total - value
    return total.flip(dim) if direction.startswith("rev") else total


def _eval_tri(node: Node, args: Sequence[torch.Tensor], scope: Scope) -> torch.Tensor:
    ones = torch.ones(scope.chunk, scope.chunk, dtype=scope.valid.dtype)
    return {"causal": ones.tril(), "strict": ones.tril(-1), "same": ones.tril() * ones.triu()}[str(node.attrs[0])]


def _eval_valid(node: Node, args: Sequence[torch.Tensor], scope: Scope) -> torch.Tensor:
    if not node.tokens:
        return args[0] * scope.valid[0]
    mask = scope.valid.reshape([-1] + [1] * (len(node.axes) - 1))
    return torch.where(mask > 0, args[0], 0.0)


def elementwise(
    function: Callable[..., torch.Tensor],
) -> Callable[[Node, Sequence[torch.Tensor], Scope], torch.Tensor]:
    """Evaluation by a function of the operands, broadcast to the dimensions of the result."""
    return lambda node, args, scope: function(
        *(scope.aligned(x, ref, scope.dims(node)) for x, ref in zip(args, node.args, strict=True))
    )


def _clamp(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    return torch.minimum(torch.maximum(x, low), high)


def _within(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    return ((x >= low) & (x <= high)).to(x.dtype)


def _softplus(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.softplus(x, threshold=20)


def _elu1(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


# ------------------------------------------------------------------------------------------------ derivatives


def _derive_ein(build: Builder, me: Ref, adjoint: Ref, node: Node) -> Contributions:
    solved = _inverse_operand(build, node)
    if solved is not None:
        yield from _derive_solve(build, me, adjoint, node, solved)
        return
    for position, ref in enumerate(node.args):
        others = [other for index, other in enumerate(node.args) if index != position]
        yield ref, build.ein([adjoint, *others], ref.axes, float(node.attrs[0]), grid=build[ref].grid)


def _inverse_operand(build: Builder, node: Node) -> int | None:
    """Position of X in y = sum j: X[i,j] b[j,..], where X is an inverse."""
    if len(node.args) != 2 or len(node.summed) != 1:
        return None
    for position, ref in enumerate(node.args):
        if build[ref].op == "uli" and ref.axes[1] == node.summed:
            return position
    return None


def _derive_solve(build: Builder, me: Ref, adjoint: Ref, node: Node, position: int) -> Contributions:
    """y = X b as a solve: db = X^T dy and dA = -strict(db y^T); neither dX nor X^T dX X^T exists.

    Of a matrix b over tokens the product sums over its other token axis, which gets the third name.  db is per value
    head here even where b is shared: whoever takes it sums over heads."""
    inverse, right = node.args[position], node.args[1 - position]
    solution = build.ein([adjoint, inverse], right.axes, float(node.attrs[0]))
    yield right, solution
    row, column = inverse.axes[0], inverse.axes[1]
    (other,) = set(TOKENS) - {row, column}
    names = {column: "i", row: "j", other: "l"}
    pair = [solution.renamed(names), me.renamed(names)]
    matrix = build.ein([*pair, build.tri("strict")], "ij", -1.0 / float(node.attrs[0]))
    yield build[inverse].args[0], matrix


def _derive_add(build: Builder, me: Ref, adjoint: Ref, node: Node) -> Contributions:
    for ref, coef in zip(node.args, node.attrs, strict=True):
        yield ref, build.mul(adjoint, coef=float(coef))


def _derive_decay(build: Builder, me: Ref, adjoint: Ref, node: Node) -> Contributions:
    """Of (j, i] the sum over all pairs that a token lies between: only terms that hold its own decay.

    Rows minus columns would be the same, but what must cancel there is as large as the whole chunk's pairs.
    """
    (gate,) = node.args
    channels = "".join(axis for axis in node.axes if axis in CHANNELS)
    match node.attrs[0]:
        case "ij" if channels:
            parts, coefs = build.virtual_terms(adjoint)
            yield gate, build.add(*(build.crossing(part, gate) for part in parts), coefs=coefs)
        case "ij":
            below = build.cumsum(build.mul(adjoint, me, build.tri("strict")), "revincl")
            yield gate, build.ein([below, build.tri("strict")], "i")
        case "10":
            yield gate, build.mul(adjoint, me)
        case "i0":
            yield gate, build.cumsum(build.mul(adjoint, me), "revincl")
        case _:
            yield gate, build.cumsum(build.mul(adjoint, me), "fwdexcl")


def _derive_inverse(build: Builder, me: Ref, adjoint: Ref, node: Node) -> Contributions:
    left = build.ein([me.renamed({"i": "l", "j": "i"}), adjoint.renamed({"i": "l"})], "ij")
    both = build.ein([left.renamed({"j": "l"}), me.renamed({"i": "j", "j": "l"}), build.tri("strict")], "ij", -1.0)
    yield node.args[0], both


def _derive_cumsum(build: Builder, me: Ref, adjoint: Ref, node: Node) -> Contributions:
    direction = str(node.attrs[0])
    yield node.args[0], build.cumsum(adjoint, ("fwd" if direction.startswith("rev") else "rev") + direction[3:])


def _derive_sigmoid(build: Builder, me: Ref, adjoint: Ref, node: Node) -> Contributions:
    """s(x) s(-x): 1 - s(x) would cancel where the sigmoid is nearly 1.  The same holds for 2 s(x)."""
    away = build.apply("sigmoid", build.mul(node.args[0], coef=-1.0))
    yield node.args[0], build.mul(adjoint, me, away)


def _derive_softplus(build: Builder, me: Ref, adjoint: Ref, node: Node) -> Contributions:
    yield node.args[0], build.mul(adjoint, build.apply("sigmoid", node.args[0]))


def _derive_rsqrt(build: Builder, me: Ref, adjoint: Ref, node: Node) -> Contributions:
    yield node.args[0], build.mul(adjoint, me, me, me, coef=-0.5)


def _derive_reciprocal(build: Builder, me: Ref, adjoint: Ref, node: Node) -> Contributions:
    yield node.args[0], build.mul(adjoint, me, me, coef=-1.0)


def _derive_exp(build: Builder, me: Ref, adjoint: Ref, node: Node) -> Contributions:
    yield node.args[0], build.mul(adjoint, me)


def _derive_clamp(build: Builder, me: Ref, adjoint: Ref, node: Node) -> Contributions:
    yield node.args[0], build.mul(adjoint, build.apply("within", *node.args))


def _derive_elu1(build: Builder, me: Ref, adjoint: Ref, node: Node) -> Contributions:
    yield node.args[0], build.mul(adjoint, build.apply("elu1_slope", me))


def _derive_cast(build: Builder, me: Ref, adjoint: Ref, node: Node) -> Contributions:
    yield node.args[0], adjoint


def _derive_valid(build: Builder, me: Ref, adjoint: Ref, node: Node) -> Contributions:
    yield node.args[0], build.apply("valid", adjoint)


# fmt: off
OPS = {
    op.name: op
    for op in (
        Op("input", "A declared tensor; loads pad with 0 past the end of the sequence.", None, None, None, 0),
        Op("carry_in", "The carried value as it enters the chunk.", None, None, None, 0),
        Op("const", "A number.", lambda g, n: ("", ""), _eval_const, None, 0),
        Op("tri", "A mask as a factor: causal (j <= i), strict (j < i) or same (j = i).",
           lambda g, n: ("ij", ""), _eval_tri, None),
        Op("ein", "coef * sum over `summed` of the product of operands: multiply, reduce, contract, group sum.",
           _infer_ein, _eval_ein, _derive_ein),
        Op("add", "Sum of operands with coefficients.", infer_same, _eval_add, _derive_add),
        Op("decay", "exp of the log decay over tokens: (j,i] as `ij`, start..i as `i0`, (i,end] as `1i`, all as `10`.",
           _infer_decay, _eval_decay, _derive_decay, 4),
        Op("crossing", "sum over i >= t > j of m[i,j] x[i,c] y[j,c] exp(log decay over (j, i]), for each token t.",
           _infer_crossing, _eval_crossing, None, 4),
        Op("uli", "(I + strictly_lower(A))^-1; reads nothing on or above the diagonal.",
           _infer_inverse, _eval_inverse, _derive_inverse),
        Op("cumsum", "Running sum over tokens: fwd or rev, incl or excl.",
           infer_same, _eval_cumsum, _derive_cumsum, 2),
        Op("cast", "The value as a matrix operand (input dtype): algebra does not look through it.",
           infer_same, elementwise(lambda x: x), _derive_cast, kernel="{0}.to(DOT)", torch="{0}"),
        Op("valid", "0 for tokens past the end of the sequence.", infer_same, _eval_valid, _derive_valid),
        Op("exp", "exp, held at exp(80).",
           infer_same, elementwise(lambda x: x.clamp(max=SATURATION).exp()), _derive_exp, 4,
           f"tl.exp(tl.minimum({{0}}, {SATURATION}))", f"torch.exp({{0}}.clamp(max={SATURATION}))"),
        Op("sigmoid", "1 / (1 + exp(-x)).", infer_same, elementwise(torch.sigmoid), _derive_sigmoid, 4,
           "tl.sigmoid({0})", LOGISTIC),
        Op("odds", "exp(-x), not beyond 2^126: what share makes the sigmoid of, and times that the sigmoid of -x.",
           infer_same, elementwise(lambda x: (-x).exp()), None, 2, "odds_against({0})"),
        Op("share", "1 / (1 + x).", infer_same, elementwise(lambda x: 1 / (1 + x)), None, 3, "share({0})"),
        Op("rest", "x y of odds and their share, 1 - y: a value by itself, as odds times anything else may overflow.",
           infer_same, elementwise(lambda x, y: x * y), None, 1, "{0} * {1}"),
        Op("sigmoid2", "2 / (1 + exp(-x)).",
           infer_same, elementwise(lambda x: 2 * torch.sigmoid(x)), _derive_sigmoid, 4,
           "2.0 * tl.sigmoid({0})", f"2.0 * {LOGISTIC}"),
        Op("softplus", "log(1 + exp(x)); x for x > 20.", infer_same, elementwise(_softplus), _derive_softplus, 8,
           "softplus({0})", "torch.nn.functional.softplus({0}, threshold=20.0)"),
        Op("clamp", "x held between two scalars.", infer_same, elementwise(_clamp), _derive_clamp, 2,
           "tl.minimum(tl.maximum({0}, {1}), {2})", "{0}.clamp({1}, {2})"),
        Op("within", "1 where x lies between two scalars, else 0.", infer_same, elementwise(_within), None, 2,
           "tl.where(({0} >= {1}) & ({0} <= {2}), 1.0, 0.0)"),
        Op("elu1", "elu(x) + 1: x + 1 for x > 0, else exp(x).", infer_same, elementwise(_elu1), _derive_elu1, 4,
           "elu1({0})", "torch.where({0} > 0, {0} + 1.0, torch.exp({0}.clamp(max=0.0)))"),
        Op("elu1_slope", "min(y, 1): the derivative of elu1 from its result.",
           infer_same, elementwise(lambda y: y.clamp(max=1)), None, kernel="tl.minimum({0}, 1.0)"),
        Op("rsqrt", "1 / sqrt(x).", infer_same, elementwise(torch.rsqrt), _derive_rsqrt, 2,
           "tl.rsqrt({0})", "torch.rsqrt({0})"),
        Op("reciprocal", "1 / x.", infer_same, elementwise(torch.reciprocal), _derive_reciprocal, 2,
           "1.0 / {0}", "1.0 / {0}"),
    )
}
# fmt: on


def is_elementwise(op: str) -> bool:
    """Whether an op computes element by element, without a sum."""
    return op in ("add", "valid") or bool(OPS[op].kernel)


def flops(graph: Graph, value: int, extents: dict[str, int]) -> float:
    """Floating-point operations of one value in one chunk of one head; ``extents`` gives the size of each tile axis."""
    node = graph[value]
    if node.op == "uli":
        return 2.0 * extents["i"] ** 3 / 3
    if is_virtual(node.axes):
        return 0.0  # computed where it is contracted
    if node.op == "crossing":  # two products, a running sum and a share of exponents, for every doubling
        return 16.0 * extents["i"] * math.prod(extents[axis] for axis in node.axes) * math.log2(extents["i"])
    if node.op != "ein":
        return OPS[node.op].flops_per_element * len(node.args) * math.prod(extents[axis] for axis in node.axes)
    volume = math.prod(extents[axis] for axis in _names(node))
    if graph.kind(value) == "decayed":  # for every doubling of blocks: exponents in two parts, and the product
        return 6.0 * volume * math.log2(extents["i"])
    return volume * (2.0 if graph.is_product(value) else float(len(node.args)))
