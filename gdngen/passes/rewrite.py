"""Rewrites: equal forms of one graph that cost differently.  Each rule is a hook for ``rebuild``, before -> after."""

from dataclasses import dataclass

from gdngen.ir.builder import Builder, Hook, rebuild
from gdngen.ir.graph import TOKENS, Graph, Node, Ref
from gdngen.target import Target


def inner_operands(build: Builder | Graph, ref: Ref) -> list[Ref]:
    """The operands of an ``ein``, in the names under which it is read; summed tokens keep free names."""
    node = build[ref]
    names = dict(zip(node.axes, ref.axes, strict=True))
    free = [token for token in TOKENS if token not in ref.axes]
    for axis in node.summed:
        if axis in TOKENS:
            names[axis] = free.pop(0)
    return [arg.renamed(names) for arg in node.args]


def factors(build: Builder | Graph, ref: Ref) -> tuple[list[Ref], float]:
    """A nested elementwise product as a flat list of factors and a coefficient."""
    node = build[ref]
    if node.op != "ein" or node.summed:
        return [ref], 1.0
    found: list[Ref] = []
    coef = float(node.attrs[0])
    for inner in inner_operands(build, ref):
        more, c = factors(build, inner)
        found, coef = found + more, coef * c
    return found, coef


def gate_out_of_inverse(build: Builder, node: Node, args: list[Ref]) -> Ref | None:
    """uli(E[i,j] * A) -> E[i,j] * uli(A) for a decay without channel axis: E_il E_lj = E_ij, a diagonal similarity."""
    if node.op != "uli" or build[args[0]].op != "ein" or build[args[0]].summed:
        return None
    found, coef = factors(build, args[0])
    decays = [ref for ref in found if build[ref].op == "decay" and build[ref].attrs == ("ij",) and ref.axes == "ij"]
    if not decays:
        return None
    rest = [ref for ref in found if ref not in decays]
    inverse = build.name(build.inverse(build.ein(rest, "ij", coef)), "X0")
    return build.mul(*decays, inverse)


def _is_inverse(build: Builder, ref: Ref) -> bool:
    """X itself, or a gate times X."""
    return any(build[factor].op == "uli" for factor in factors(build, ref)[0])


def distribute_inverse(build: Builder, node: Node, args: list[Ref]) -> Ref | None:
    """sum j: X b (x - c sum k: y S)  ->  U - W S  with  U = sum j: X b x  and  W = sum j: X (b c y).

    Of values [i,v] alone, where each term reads the state at most once and W has no v axis."""
    if node.op != "ein" or node.summed != "j" or node.axes != "iv" or len(args) != 2:
        return None
    for inverse, right in (args, args[::-1]):
        found, coef = factors(build, right)
        sums = [ref for ref in found if build[ref].op == "add"]
        if not _is_inverse(build, inverse) or len(sums) != 1:
            continue
        rest = [ref for ref in found if ref != sums[0]]
        outer = coef * float(node.attrs[0])
        terms = [
            _distributed_term(build, inverse, rest, term, outer * float(c))
            for term, c in zip(inner_operands(build, sums[0]), build[sums[0]].attrs, strict=True)
        ]
        return build.add(*(term for term in terms if term)) if all(terms) else None
    return None


def _distributed_term(build: Builder, inverse: Ref, rest: list[Ref], term: Ref, coef: float) -> Ref | None:
    found, c = factors(build, term)
    coef *= c
    reads = [place for place, ref in enumerate(found) if build[ref].op == "ein" and build[ref].summed == "k"]
    if not reads:
        return build.mul(build.name(build.ein([inverse, *rest, *found], "iv"), "U"), coef=coef)
    read = found.pop(reads[0])
    operands = inner_operands(build, read)
    state = [ref for ref in operands if not set(ref.axes) & set(TOKENS)]
    others = [*rest, *(ref for ref in operands if ref not in state), *found]
    if (
        len(reads) > 1
        or [ref.axes for ref in state] != ["kv"]
        or {axis for ref in others for axis in ref.axes} - {*"jk"}
    ):
        return None
    coef *= float(build[read].attrs[0])
    w = build.name(build.ein([inverse, *others], "ik"), "W")
    return build.ein([w, *state], "iv", coef)


def read_after_write(build: Builder, node: Node, args: list[Ref]) -> Ref | None:
    """At chunk length 1: c (sum k: q S) + b (sum k: q k) -> sum k: q (c S + k b): o reads the state just written."""
    if build.chunked or node.op != "add" or node.axes != "v" or node.attrs != (1.0, 1.0) or len(args) != 2:
        return None
    wanted = [_read_term(build, ref) for ref in args]
    for value, other in enumerate(build.nodes):
        if other.op != "add" or other.axes != "kv" or other.attrs != (1.0, 1.0):
            continue
        written = [factors(build, ref) for ref in other.args]
        for shared in sorted({ref for ref in wanted[0] if build[ref].axes == "k"} & set(wanted[1])):
            rest = [sorted(_without(terms, shared)) for terms in wanted]
            if sorted(rest) == sorted(sorted(found) for found, _ in written) and {c for _, c in written} == {1.0}:
                return build.ein([shared, Ref(value, other.axes)], node.axes)
    return None


def _read_term(build: Builder, ref: Ref) -> list[Ref]:
    """All factors of a term that has one sum over k, those under it included; of another term none."""
    found: list[Ref] = []
    outer, coef = factors(build, ref)
    sums = [factor for factor in outer if build[factor].op == "ein" and build[factor].summed == "k"]
    coefs = [coef, *(float(build[factor].attrs[0]) for factor in sums)]
    for factor in outer:
        inner = [factors(build, operand) for operand in inner_operands(build, factor)] if factor in sums else []
        coefs += [c for _, c in inner]
        found += [ref for refs, _ in inner for ref in refs] if inner else [factor]
    return found if len(sums) == 1 and set(coefs) == {1.0} else []


def _without(items: list[Ref], item: Ref) -> list[Ref]:
    position = items.index(item)
    return items[:position] + items[position + 1 :]


RULES: dict[str, Hook] = {
    "gate_out_of_inverse": gate_out_of_inverse,
    "distribute_inverse": distribute_inverse,
    "read_after_write": read_after_write,
}


@dataclass(frozen=True)
class Rewrite:
    """Apply one rule everywhere.  Requires a graph; ensures an equal one.  Rewrite: see the rule's docstring."""

    rule: str

    @property
    def name(self) -> str:
        return self.rule

    def run(self, graph: Graph, target: Target) -> Graph:
        return rebuild(graph, hook=RULES[self.rule])


@dataclass(frozen=True)
class FoldToTokens:
    """Chunk length 1.  Requires a chunk graph; ensures one without token axes: decode is this fold and nothing else.

    Rewrite: decay.ij, decay.1i -> 1; decay.i0, decay.10 -> exp(g); uli -> 1; strict masks -> 0; cumsum -> x or 0.
    """

    name: str = "fold_to_tokens"

    def run(self, graph: Graph, target: Target) -> Graph:
        return rebuild(graph, chunked=False)
