"""Regrouping of a derived gradient graph: fewer products, fewer sums that have to be kept.

Reverse mode makes one term per use of a value.  These rules bring terms together that share an operand.
"""

import itertools
from dataclasses import dataclass

from gdngen.ir.builder import Builder, rebuild
from gdngen.ir.graph import CHANNELS, GRID, Graph, Node, Ref, is_virtual
from gdngen.passes.rewrite import factors, inner_operands
from gdngen.target import Target


@dataclass(frozen=True)
class Regroup:
    """Requires a gradient graph; ensures an equal one.  Rewrites:

    sum v: x[i,v] (sum k: c[i,k] M[k,v])   ->  sum k: c[i,k] (sum v: x[i,v] M[k,v])  where the inner sum exists anyway
    sum v: x[i,v] (y[i,v] + sum j: P[i,j] r[j,v])  ->  sum v: x y + sum j: P (sum v: x[i,v] r[j,v])  for sums y over k
        (x is do, and what a normaliser reads of o . do most of it cancels in dq: it has to be made of the same sums)
    sum j: a[j] X[i,j] + sum j: a[j] Y[i,j]  ->  sum j: a[j] (X + Y)[i,j]
    sum r: x + sum r: y  ->  sum r: (x + y), likewise sums over sequences and chunks of what a parameter gets
    p * sum b,n: x       ->  sum b,n: p x    for a parameter p: totals are formed last
    sum j: y[j,c] E[i,j,c] m[i,j]  ->  the same over j < i, + y[i,c] m[i,i]: dq and the gate share the first part
    sum j: (sum c: x[i,c] y[j,c] E[i,j,c]) m[i,j]  ->  sum c: x[i,c] (sum j: y[j,c] E[i,j,c] m[i,j])
        where the inner sum exists anyway
    """

    name: str = "regroup"

    def run(self, graph: Graph, target: Target) -> Graph:
        graph = rebuild(graph, hook=_results_apart)
        made = {
            frozenset(ref.value for ref in node.args)
            for i, node in enumerate(graph.nodes)
            if node.op == "ein" and ("v" in node.summed or graph.kind(i) == "decayed")
        }

        def hook(build: Builder, node: Node, args: list[Ref]) -> Ref | None:
            if node.op == "add":
                return _merged_terms(build, node, args)
            if node.op != "ein":
                return None
            if not node.summed:
                return _total_last(build, node, args)
            found = _state_read_once(build, graph, made, node, args)
            found = found or _gram_summed_last(build, graph, made, node, args)
            return found or _diagonal_apart(build, node, args)

        return rebuild(graph, hook=hook)


def _results_apart(build: Builder, node: Node, args: list[Ref]) -> Ref | None:
    if node.op != "ein" or node.summed != "v" or len(args) != 2 or len(node.axes) != 1:
        return None
    for total, other in itertools.permutations(args):
        terms = inner_operands(build, total) if build[total].op == "add" else []
        sums = [{build[factor].summed for factor in factors(build, term)[0]} for term in terms]
        if {"j"} in sums and all(found & {"j", "k"} for found in sums):
            parts = [
                _pairs_read_once(build, term, other, node.axes) or build.ein([term, other], node.axes) for term in terms
            ]
            return build.add(*parts, coefs=[float(node.attrs[0]) * float(c) for c in build[total].attrs])
    return None


def _pairs_read_once(build: Builder, term: Ref, other: Ref, keep: str) -> Ref | None:
    inner = sorted(inner_operands(build, term), key=lambda ref: "v" in ref.axes) if build[term].summed == "j" else []
    if len(inner) != 2:
        return None
    return build.ein([inner[0], build.ein([inner[1], other], inner[0].axes)], keep)


def _state_read_once(
    build: Builder, graph: Graph, made: set[frozenset[int]], node: Node, args: list[Ref]
) -> Ref | None:
    if node.summed != "v" or len(args) != 2 or len(node.axes) != 1:
        return None
    for (old, ref), (old_other, other) in itertools.permutations(zip(node.args, args, strict=True)):
        product = graph[old]
        if product.op != "ein" or product.summed != "k" or len(product.args) != 2:
            continue
        for position, matrix in enumerate(product.args):
            if "k" in matrix.axes and frozenset({matrix.value, old_other.value}) in made:
                inner = inner_operands(build, ref)
                if len(inner) == 2 and build[inner[position]].axes == "kv":
                    read = build.ein([inner[position], other], node.axes + "k")
                    return build.ein([inner[1 - position], read], node.axes, float(node.attrs[0]))
    return None


def _gram_summed_last(
    build: Builder, graph: Graph, made: set[frozenset[int]], node: Node, args: list[Ref]
) -> Ref | None:
    """sum j: (sum c: x y E) m  ->  sum c: x (sum j: y E m)."""
    if node.summed not in ("i", "j") or len(args) != 2 or len(node.axes) != 1:
        return None
    for (old, ref), (old_other, other) in itertools.permutations(zip(node.args, args, strict=True)):
        if graph.kind(old.value) != "decayed" or graph[old].tokens != graph[old].axes:
            continue
        inner = inner_operands(build, ref)
        own = next(i for i, operand in enumerate(inner) if node.axes in operand.axes and not is_virtual(operand.axes))
        rest = [pair for i, pair in enumerate(zip(graph[old].args, inner, strict=True)) if i != own]
        if frozenset({old_other.value, *(before.value for before, _ in rest)}) in made:
            again = build.ein([other, *(operand for _, operand in rest)], node.axes + inner[own].axes[-1])
            return build.ein([inner[own], again], node.axes, float(node.attrs[0]))
    return None


def _diagonal_apart(build: Builder, node: Node, args: list[Ref]) -> Ref | None:
    """sum j: y E m  ->  the same over j < i, + y[i] m[i,i]."""
    decay = next((ref for ref in args if is_virtual(ref.axes)), None)
    if decay is None or node.tokens == node.axes:
        return None
    matrix, tile = sorted((ref for ref in args if ref != decay), key=lambda ref: ref.axes[-1] in CHANNELS)
    if any(build[factor].op == "tri" and build[factor].attrs == ("strict",) for factor in factors(build, matrix)[0]):
        return None
    pair, token = decay.axes[:2], node.axes[0]
    strict, same = (build.tri(kind).renamed(dict(zip("ij", pair, strict=True))) for kind in ("strict", "same"))
    before = build.ein([build.mul(matrix, strict), decay, tile], node.axes)
    own = build.mul(build.ein([matrix, same], token), tile.renamed({node.summed: token}))
    return build.add(before, own, coefs=(float(node.attrs[0]),) * 2)


def _merged_terms(build: Builder, node: Node, args: list[Ref]) -> Ref | None:
    """One merge at a time; the builder's own sum of the result is merged again until nothing is left to merge."""
    terms = list(zip(args, (float(c) for c in node.attrs), strict=True))
    for one, two in itertools.combinations(range(len(terms)), 2):
        merged = _merged_pair(build, *terms[one], *terms[two])
        if merged is not None:
            rest = [term for place, term in enumerate(terms) if place not in (one, two)]
            refs, coefs = [ref for ref, _ in rest] + [merged], [c for _, c in rest] + [1.0]
            again = _merged_terms(build, Node("add", (), tuple(coefs), node.axes, node.grid), refs)
            return again if again is not None else build.add(*refs, coefs=coefs)
    return None


def _merged_pair(build: Builder, x: Ref, a: float, y: Ref, b: float) -> Ref | None:
    left, right = build[x], build[y]
    if left.op != "ein" or right.op != "ein" or left.summed != right.summed or not left.summed:
        return None
    if set(x.axes) != set(y.axes):
        return None
    ours, theirs = inner_operands(build, x), inner_operands(build, y)
    if len(ours) == len(theirs) == 1 and set(left.summed) <= set(GRID):
        return build.ein([build.add(ours[0], theirs[0], coefs=(a, b))], x.axes, grid=left.grid)
    shared = [(i, j) for i, one in enumerate(ours) for j, two in enumerate(theirs) if one == two]
    if len(ours) == len(theirs) == 2 and len(shared) == 1 and left.summed in "ijl":
        ((i, j),) = shared
        return build.ein([ours[i], build.add(ours[1 - i], theirs[1 - j], coefs=(a, b))], x.axes)
    return None


def _total_last(build: Builder, node: Node, args: list[Ref]) -> Ref | None:
    totals = [ref for ref in args if "n" in build[ref].summed]
    if len(totals) != 1 or (len(args) == 1 and float(node.attrs[0]) == 1.0):
        return None
    others = [ref for ref in args if ref not in totals]
    return build.ein([*others, *inner_operands(build, totals[0])], node.axes, float(node.attrs[0]), grid=node.grid)
