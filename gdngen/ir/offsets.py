"""Ops that read another token of the same sequence: y[i] = x[i - d], with the tokens before the sequence as carries.

A chunk's past is carried as single tokens: ``h1`` is the one just before the chunk, ``h2`` the one before that, and so
on.  The attribute of each op is its offset, as text.  Transposes are ops of the same kind, so that the derivative of a
graph with offsets is again a graph with offsets.
"""

from collections.abc import Sequence

import torch

from gdngen.errors import GraphError
from gdngen.ir.builder import Builder
from gdngen.ir.graph import Graph, Node, Ref, ordered
from gdngen.ir.ops import OPS, Contributions, Op, Scope, infer_same


def lag(build: Builder, value: Ref, past: Sequence[Ref], offset: int) -> Ref:
    """value[i - offset]; before the chunk past[0] is the last token, past[1] the one before it."""
    return build._apply("lag", (value, *past[:offset]), (str(offset),)) if offset else value


def ending(build: Builder, value: Ref, past: Sequence[Ref], place: int) -> Ref:
    """The token that is ``place``-th from the end of the chunk and its past: 1 is the last one."""
    return build._apply("ending", (value, *past[:place]), (str(place),))


def _moved(build: Builder, op: str, value: Ref, offset: int) -> Ref:
    """lead or first of a value.  lead(w x) -> w lead(x) for factors w without tokens, and first likewise."""
    node = build[value]
    if build.constant(value) == 0 or (op == "lead" and offset == 0):
        return value
    if node.op == "ein" and not node.summed and len(node.args) > 1:
        factors = [build._through(ref, node, value) for ref in node.args]
        outside = [ref for ref in factors if "i" not in ref.axes]
        if outside:
            inside = build.mul(*(ref for ref in factors if "i" in ref.axes))
            return build.mul(*outside, _moved(build, op, inside, offset), coef=float(node.attrs[0]))
    return build._apply(op, (value,), (str(offset),))


def _offset(node: Node) -> int:
    return int(node.attrs[0])


def _rows(scope: Scope) -> int:
    return int(scope.valid.sum())


def _joined(args: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """The past, oldest token first, and behind it the chunk."""
    past = [x.expand(args[0].select(dim, 0).shape).unsqueeze(dim) for x in reversed(args[1:])]
    return torch.cat([*past, args[0]], dim)


def _dim(node: Node, scope: Scope) -> int:
    return len(scope.dims(node, ""))


def _eval_lag(node: Node, args: Sequence[torch.Tensor], scope: Scope) -> torch.Tensor:
    dim = _dim(node, scope)
    return _joined(args, dim).narrow(dim, 0, args[0].shape[dim])


def _eval_lead(node: Node, args: Sequence[torch.Tensor], scope: Scope) -> torch.Tensor:
    dim, (x,) = _dim(node, scope), args
    x = x.narrow(dim, 0, _rows(scope))
    kept = x.narrow(dim, min(_offset(node), x.shape[dim]), max(x.shape[dim] - _offset(node), 0))
    shape = list(x.shape)
    shape[dim] = scope.chunk - kept.shape[dim]
    return torch.cat([kept, x.new_zeros(shape)], dim)


def _eval_first(node: Node, args: Sequence[torch.Tensor], scope: Scope) -> torch.Tensor:
    dim, (x,) = _dim(node, scope), args
    there = _offset(node) < _rows(scope)
    row = x.select(dim, _offset(node) if there else 0)
    return row if there else torch.zeros_like(row)


def _eval_ending(node: Node, args: Sequence[torch.Tensor], scope: Scope) -> torch.Tensor:
    dim = _dim(node, scope)
    joined = _joined(args, dim).narrow(dim, 0, len(args) - 1 + _rows(scope))
    return joined.select(dim, joined.shape[dim] - _offset(node))


def _eval_placed(node: Node, args: Sequence[torch.Tensor], scope: Scope) -> torch.Tensor:
    dim = _dim(node, scope)
    here = torch.arange(scope.chunk) == _rows(scope) - _offset(node)
    return torch.where(here.reshape([-1] + [1] * (args[0].ndim - dim)), args[0].unsqueeze(dim), 0.0)


def _eval_passed(node: Node, args: Sequence[torch.Tensor], scope: Scope) -> torch.Tensor:
    return args[0] if _rows(scope) == _offset(node) else torch.zeros_like(args[0])


def _derive_lag(build: Builder, me: Ref, adjoint: Ref, node: Node) -> Contributions:
    """Token t is read at t + d, and the m-th token of the past at row d - m."""
    offset = _offset(node)
    yield node.args[0], _moved(build, "lead", adjoint, offset)
    for m, past in enumerate(node.args[1:], 1):
        yield past, _moved(build, "first", adjoint, offset - m)


def _derive_ending(build: Builder, me: Ref, adjoint: Ref, node: Node) -> Contributions:
    """The chunk's own token where it is long enough, else one of its past."""
    place = _offset(node)
    yield node.args[0], build._apply("placed", (adjoint,), (str(place),))
    for m, past in enumerate(node.args[1:], 1):
        yield past, build._apply("passed", (adjoint,), (str(place - m),))


def _infer_offset(graph: Graph | Builder, node: Node) -> tuple[str, str]:
    if node.args[0].axes[:1] != "i":
        raise GraphError(f"{node.op}: its value must be read under token axis i, got axes {node.args[0].axes!r}")
    return infer_same(graph, node)


def _infer_row(graph: Graph | Builder, node: Node) -> tuple[str, str]:
    axes, grid = _infer_offset(graph, node)
    return axes.replace("i", ""), grid


def _infer_placed(graph: Graph | Builder, node: Node) -> tuple[str, str]:
    axes, grid = infer_same(graph, node)
    return ordered("i" + axes), grid


OFFSETS = {
    op.name: op
    for op in (
        Op("lag", "x[i - d]; the tokens before the chunk are operands, the latest first.",
           _infer_offset, _eval_lag, _derive_lag, 0),
        Op("lead", "x[i + d], 0 past the end of the sequence: the transpose of lag.",
           _infer_offset, _eval_lead, None, 0),
        Op("first", "Row d of the chunk, 0 where it has fewer.", _infer_row, _eval_first, None, 0),
        Op("ending", "The d-th token from the end of the chunk and, where that is too short, of its past.",
           _infer_row, _eval_ending, _derive_ending, 0),
        Op("placed", "x at the d-th token from the end of the chunk, 0 at others: the transpose of ending.",
           _infer_placed, _eval_placed, None, 0),
        Op("passed", "x where the chunk has exactly d tokens, else 0: the transpose of ending in its past.",
           infer_same, _eval_passed, None, 0),
    )
}  # fmt: skip
OPS |= OFFSETS
