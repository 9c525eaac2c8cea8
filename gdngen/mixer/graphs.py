"""Spec -> Graph: the mathematics of each member, and its derivative by the compiler's own pass."""

from functools import lru_cache

from gdngen.ir.builder import Builder, rebuild
from gdngen.ir.graph import Carry, Graph, Node, Ref
from gdngen.ir.offsets import ending, lag
from gdngen.ir.verify import verify
from gdngen.mixer.specs import Convolution, Gate, MixerSpec, RowNorm
from gdngen.passes.backward import Backward
from gdngen.target import DEFAULT_TARGET, get

TIMES = {"sigmoid": 1.0, "sigmoid2": 2.0}


@lru_cache(maxsize=64)
def forward_graph(spec: MixerSpec) -> Graph:
    """x[i,v] and what else the member reads -> o[i,v]; inputs that the kernels read have the names of its arguments."""
    match spec:
        case Convolution():
            return verify(_convolution(spec))
        case RowNorm():
            return verify(_row_norm(spec))
        case Gate():
            return verify(_alone(spec))
    raise TypeError(f"no graph for {type(spec).__name__}")


@lru_cache(maxsize=64)
def backward_graph(spec: MixerSpec) -> Graph:
    """The derivative: do and what was carried out of the sequence come in, a gradient of every input goes out."""
    return verify(Backward().run(forward_graph(spec), get(DEFAULT_TARGET)))


def in_kernels(graph: Graph) -> Graph:
    """The same graph with sigmoids of x and -x made from one exponential, and without a division."""
    return rebuild(graph, hook=_from_odds)


def _from_odds(build: Builder, node: Node, args: list[Ref]) -> Ref | None:
    """sigmoid(x) -> share(odds(x)); sigmoid(-x) -> rest(odds(x), share(odds(x)))."""
    if node.op != "sigmoid":
        return None
    inner = build[args[0]]
    if inner.op == "ein" and inner.attrs[0] == -1.0 and len(inner.args) == 1 and not inner.summed:
        odds = build.apply("odds", inner.args[0])
        return build.apply("rest", odds, build.apply("share", odds))
    return build.apply("share", build.apply("odds", args[0]))


def _convolution(spec: Convolution) -> Graph:
    """z[i] = sum over d of w_d x[i - d]; h1, h2, ... are the tokens before the sequence, the latest first."""
    build = Builder()
    x = build.input("x", "iv", "bn")
    taps = [build.input(f"w{d}", "v", "") for d in range(spec.width)]
    inits = [build.input(f"h0_{m}", "v", "b") for m in range(1, spec.columns + 1)]
    past = [build.carry_in(f"h{m}", "v", "bn") for m in range(1, spec.columns + 1)]
    terms = [build.mul(tap, build.name(lag(build, x, past, d), f"x_{d}")) for d, tap in enumerate(taps)]
    z = build.name(build.add(*terms, *([build.input("bias", "v", "")] if spec.bias else [])), "z")
    y = build.name(_gate(build, z, "silu"), "y") if spec.activation == "silu" else z
    o = build.name(build.add(y, build.input("residual", "iv", "bn")), "o") if spec.residual else y
    carries = []
    for m, init in enumerate(inits, 1):
        carries.append(Carry(f"h{m}", build.name(ending(build, x, past, m), f"e{m}"), init, f"ht_{m}"))
    return build.finish([("o", o)], carries)


def _row_norm(spec: RowNorm) -> Graph:
    """eps and, for the mean, inverse_dim = 1 / channels are numbers of the call."""
    build = Builder()
    x = build.input("x", "iv", "bn")
    if spec.residual:
        x = build.name(build.add(x, build.input("residual", "iv", "bn")), "s")
    gate = _gate(build, build.input("g", "iv", "bn"), spec.gate) if spec.gate != "none" else None
    y = build.mul(x, gate) if gate is not None and spec.gate_first else x
    squares = build.ein([y, y], "i")
    mean = [squares, build.input("inverse_dim", "", "")] if spec.norm == "rms" else [squares]
    scale = build.apply("rsqrt", build.add(build.mul(*mean), build.input("eps", "", "")))
    y = build.name(build.mul(y, build.name(scale, "rstd")), "y")
    if spec.weight != "none":
        weight = build.input("weight", "v", "")
        y = build.mul(y, build.add(weight, build.const(1.0)) if spec.weight == "one_plus" else weight)
    if spec.bias:
        y = build.add(y, build.input("bias", "v", ""))
    if gate is not None and not spec.gate_first:
        y = build.mul(y, gate)
    outputs = [("o", build.name(y, "o"))] + ([("s", x)] if spec.residual else [])
    return build.finish(outputs, [])


def _alone(spec: Gate) -> Graph:
    """The mathematics of the recurrence's own gates (gdngen/ir/family.py), over channels."""
    build = Builder()
    x = build.input("x", "iv", "bn")
    if spec.bias:
        x = build.add(x, build.input("dt_bias", "v", ""))
    if spec.kind in ("sigmoid", "sigmoid2"):
        return build.finish([("o", build.name(build.mul(_gate(build, x, "sigmoid"), coef=TIMES[spec.kind]), "o"))], [])
    rate = build.apply("exp", build.input("A_log", "v", ""))
    if spec.kind == "softplus":
        o = build.mul(rate, build.name(build.apply("softplus", x), "sp"), coef=-1.0)
    else:
        o = build.mul(_gate(build, build.mul(rate, x), "sigmoid"), build.input("lower_bound", "", ""))
    return build.finish([("o", build.name(o, "o"))], [])


def _gate(build: Builder, x: Ref, kind: str) -> Ref:
    """silu(x) = x sigmoid(x), or the sigmoid alone."""
    gate = build.apply("sigmoid", x)
    return build.mul(x, gate) if kind == "silu" else gate
