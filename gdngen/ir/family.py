"""Spec -> Graph: the whole family as one construction (contract sections 2 to 4).

Every gate contributes its four decays; what a member lacks is the constant 1 and folds away.  Nothing here chooses an
algorithm: a pass may rewrite the result, cut it into kernels, or fold it to chunk length 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from gdngen.ir.builder import Builder
from gdngen.ir.graph import Carry, Graph, Ref
from gdngen.ir.schema import NUMBERS, Role, Schema, make
from gdngen.spec import Spec

NORM_EPSILON = 1e-6
NORMALISER_EPSILON = 1e-10
CHANNEL_OF = {"scalar": "", "key": "k", "value": "v"}
GATE_INPUT = {"scalar": "g", "key": "gk", "value": "gv"}


@dataclass(frozen=True)
class Decays:
    """The four decays of one gate: between two tokens, from the start, to the end, over the whole chunk."""

    between: Ref
    start: Ref
    end: Ref
    whole: Ref


def forward_graph(spec: Spec) -> Graph:
    """The graph of one chunk.  Inputs q, k, v, the gates (or a, A_log, dt_bias), beta (or b, dt), scale and h0.

    A subclass of Spec may name a subclass of Family in an attribute ``family``: a member that is not in the Spec.
    """
    return _family(spec).graph()


@lru_cache(maxsize=64)
def schema_of(spec: Spec) -> Schema:
    """A row for each tensor of the member, from its graph and what its Family says of inputs."""
    family = _family(spec)
    return make(family.graph(), family.roles, family.argument, spec.state_v_first)


def _family(spec: Spec) -> "Family":
    member: type[Family] = getattr(type(spec), "family", Family)
    return member(spec)


class Family:
    """Makes the graph of a Spec, part by part; each part can be replaced.

    ``roles`` says of inputs what the graph does not.  One that is missing there is taken for a gate if a decay reads
    it, and else for data in any dtype and with any strides, which is right and slower.
    """

    roles: ClassVar[Mapping[str, Role]] = {
        "q": "query",
        "k": "key",
        "v": "value",
        "g": "gate",
        "gk": "gate",
        "gv": "gate",
        "a": "raw_gate",
        "dt": "raw_gate",
        "A_log": "log_rate",
        "dt_bias": "bias",
        "beta": "strength",
        "b": "logits",
    }

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.build = Builder()

    def graph(self) -> Graph:
        b = self.build
        q, k = (self.feature(name) for name in ("q", "k"))
        v = b.input("v", "iv", "bnhr")
        softplus = self.softplus() if self.spec.fused_gate == "softplus" or self.spec.beta == "dt" else None
        decays: dict[str, Decays] = {gate: self.decays(gate, softplus) for gate in self.spec.gate}
        beta = self.write_strength(k, softplus)
        state = b.carry_in("S", "kv")
        r = self.residual(k, v, beta, decays, state)
        b.name(r, "r")
        end, whole = ([getattr(decay, which) for decay in decays.values()] for which in ("end", "whole"))
        state_out = b.name(b.add(b.mul(*whole, state), b.name(b.ein([k, *end, r], "kv"), "KR")), "S_out")
        carries = [Carry("S", state_out, b.input("h0", "kv", "bhr"), "ht")]
        o, normaliser = self.read(q, k, r, decays, state)
        return b.finish([("o", b.name(o, "o"))], carries + normaliser)

    def argument(self, name: str) -> str:
        """What a caller of the public operators knows an input as."""
        if name in ("h0", "z0"):
            return "initial_state"
        if name in NUMBERS:
            return NUMBERS[name]
        if self.spec.beta == "dt":
            return {"q": "C", "k": "B", "v": "x"}.get(name, name)
        raw = GATE_INPUT[self.spec.gate[0]] if self.spec.gate else ""
        name = {"a": raw, "b": "beta"}.get(name, name)
        return "g" if name == "gk" and self.spec.rule == "delta" and self.spec.gate == ("key",) else name

    # ---- inputs, and what the operator takes over from the model (contract section 3)

    def feature(self, name: str) -> Ref:
        """q or k after feature map and normalisation: an atom for everything after it."""
        b = self.build
        x = b.input(name, "ik", "bnh")
        if self.spec.feature_map == "elu1":
            x = b.apply("valid", b.apply("elu1", x))
        if self.spec.qk_norm:
            square = b.add(b.ein([x, x], "i"), b.const(NORM_EPSILON))
            x = b.mul(x, b.apply("rsqrt", square))
        return x if b[x].op == "input" else b.name(b.apply("cast", x), name + "n")

    def raw(self) -> Ref:
        """The raw gate input plus its bias."""
        b = self.build
        channel = CHANNEL_OF[self.spec.gate[0]]
        raw = b.input("dt" if self.spec.beta == "dt" else "a", "i" + channel, "bnhr")
        return b.add(raw, b.input("dt_bias", channel, "hr"))

    def softplus(self) -> Ref:
        b = self.build
        softplus = b.apply("softplus", self.raw())
        if self.spec.beta == "dt":
            softplus = b.apply("clamp", softplus, b.input("dt_min", "", ""), b.input("dt_max", "", ""))
        return b.name(softplus, "sp")

    def gate(self, gate: str, softplus: Ref | None) -> Ref:
        b = self.build
        if self.spec.fused_gate == "none" and self.spec.beta != "dt":
            return b.input(GATE_INPUT[gate], "i" + CHANNEL_OF[gate], "bnhr")
        rate = b.apply("exp", b.input("A_log", "", "hr"))
        if softplus is not None:
            computed = b.mul(rate, softplus, coef=-1.0)
        else:
            assert self.spec.lower_bound is not None
            computed = b.mul(b.apply("sigmoid", b.mul(rate, self.raw())), coef=self.spec.lower_bound)
        return b.name(b.apply("valid", computed), GATE_INPUT[gate])

    def decays(self, gate: str, softplus: Ref | None) -> Decays:
        b, g = self.build, self.gate(gate, softplus)
        tail = CHANNEL_OF[gate]
        names = {"ij": "E", "i0": "eG", "1i": "eT", "10": "eL"}
        return Decays(*(b.name(b.decay(g, over), hint + tail) for over, hint in names.items()))

    def write_strength(self, k: Ref, softplus: Ref | None) -> Ref:
        """What a write is multiplied with; ``k`` is the key as it is read."""
        b = self.build
        if self.spec.beta == "none":
            return b.const(1.0)
        if self.spec.beta == "dt":
            assert softplus is not None
            return softplus
        axes = "i" if self.spec.beta == "head" else "iv"
        if not self.spec.beta_logits:
            return b.input("beta", axes, "bnhr")
        sigmoid = "sigmoid2" if self.spec.neg_eigval else "sigmoid"
        return b.name(b.apply(sigmoid, b.input("b", axes, "bnhr")), "beta")

    # ---- the rule and the read-out (contract section 4)

    def between(self, decays: dict[str, Decays], inside: bool) -> list[Ref]:
        """Decays between two tokens; that of a value gate has a v axis and stays outside of Gram matrix and inverse."""
        chosen = [d.between for gate, d in decays.items() if (gate != "value") == inside]
        return chosen if chosen or not inside else [self.build.tri("causal")]

    def residual(self, k: Ref, v: Ref, beta: Ref, decays: dict[str, Decays], state: Ref) -> Ref:
        b = self.build
        if self.spec.rule == "additive":
            return b.mul(beta, v)
        start = [d.start for d in decays.values()]
        predicted = b.name(b.ein([k, *start, state], "iv"), "KS")
        gram = [beta, *self.between(decays, inside=True), b.tri("strict"), k, k.renamed({"i": "j"})]
        matrix = b.name(b.ein(gram, "ij" + ("v" if self.spec.beta == "value" else "")), "A")
        inverse = b.name(b.inverse(matrix), "X")
        error = b.name(b.add(v, predicted, coefs=(1.0, -1.0)), "e")
        written = b.name(b.mul(beta, error), "y")
        return b.ein([inverse, *self.between(decays, inside=False), written.renamed({"i": "j"})], "iv")

    def read(self, q: Ref, k: Ref, r: Ref, decays: dict[str, Decays], state: Ref) -> tuple[Ref, list[Carry]]:
        b = self.build
        start = [d.start for d in decays.values()]
        scores = b.name(b.ein([*self.between(decays, inside=True), q, k.renamed({"i": "j"})], "ij"), "P")
        within = b.name(b.ein([scores, *self.between(decays, inside=False), r.renamed({"i": "j"})], "iv"), "PR")
        read = b.add(b.name(b.ein([q, *start, state], "iv"), "QS"), within)
        if not self.spec.normalize:
            return b.mul(b.input("scale", "", ""), read), []
        z = b.carry_in("z", "k")
        end, whole = ([getattr(d, which) for d in decays.values()] for which in ("end", "whole"))
        z_out = b.name(b.add(b.mul(*whole, z), b.ein([k, *end], "k")), "z_out")
        weight = b.add(b.ein([q, *start, z], "i"), b.ein([scores], "i"), b.const(NORMALISER_EPSILON))
        o = b.mul(read, b.apply("valid", b.apply("reciprocal", weight)))
        return o, [Carry("z", z_out, b.input("z0", "k", "bhr"), "zt")]
