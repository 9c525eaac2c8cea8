"""Inputs for any Spec, their float64 answer, and the operators of a package called on them."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import elu, normalize, softplus

from gdngen import oracle
from gdngen.spec import Spec

ROOT = Path(__file__).resolve().parent.parent
GATES = {"scalar": "g", "key": "gk", "value": "gv"}

# Contract section 5, for o and states.  The interpreter multiplies fp32 exactly: the budget without tf32 applies.
BUDGETS = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-3}


def _every(step: int, value: float) -> Callable[[Tensor], Tensor]:
    def mark(gate: Tensor) -> Tensor:
        gate = gate.clone()
        gate[:, step // 2 :: step] = value
        return gate

    return mark


def _mixed(gate: Tensor) -> Tensor:
    """Every kind of decay beside every other."""
    gate = gate.clone()
    for i, value in enumerate((-20.0, 0.0, -torch.inf, -1e4, -1e30, -1e-8)):
        gate[:, 2 * i + 1 :: 13] = value
    return gate


# What becomes of a mild log decay (or of the raw input of a fused gate, where a large input is a strong decay).
DECAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "mild": lambda gate: gate,
    "zero": torch.zeros_like,
    "strong": lambda gate: gate - 20.0,
    "some strong": _every(3, -20.0),
    "resets": _every(7, -torch.inf),
    "all resets": lambda gate: torch.full_like(gate, -torch.inf),
    "mixed": _mixed,
}
RAW = {
    "strong": lambda a: a + 20.0,
    "some strong": _every(3, 30.0),
    "resets": _every(7, 200.0),
    "mixed": _every(5, -50.0),
}


@dataclass(frozen=True)
class Case:
    """One call: the inputs a Spec reads under the graph's names, states as [N, HV, K, V] whatever the Spec's layout."""

    spec: Spec
    x: Mapping[str, Tensor]
    offsets: tuple[int, ...] | None = None
    scale: float | None = None
    offsets_dtype: torch.dtype = torch.int64
    dt_limit: tuple[float, float] | None = None

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {tuple(x.shape)} {x.stride()} {x.dtype}" for name, x in self.x.items())
        return f"Case({self.spec}; {shapes}; offsets {self.offsets} {self.offsets_dtype}, scale {self.scale})"

    @property
    def dtype(self) -> torch.dtype:
        return self.x["q"].dtype

    @property
    def is_empty(self) -> bool:
        """No sequence or no channel: nothing to launch for."""
        return self.x["v"].numel() == 0 or self.offsets == (0,)

    def changed(self, **x: Tensor | None) -> "Case":
        """With other inputs; None leaves one out."""
        return replace(self, x={name: value for name, value in {**self.x, **x}.items() if value is not None})

    def tokens(self, first: int, last: int | None = None) -> "Case":
        """The same call on some of its tokens."""
        per_token = [n for n in self.x if n not in ("h0", "z0", "A_log", "dt_bias")]
        return self.changed(**{name: self.x[name][:, first:last] for name in per_token})


def case(
    spec: Spec,
    T: int = 20,
    *,
    B: int = 1,
    H: int = 1,
    R: int = 2,
    dtype: torch.dtype = torch.float32,
    gate_dtype: torch.dtype = torch.float32,
    offsets: tuple[int, ...] | None = None,
    offsets_dtype: torch.dtype = torch.int64,
    state: bool = True,
    bias: bool = True,
    decays: str = "mild",
    scale: float | None = None,
    seed: int = 0,
) -> Case:
    """Random inputs.  Keys have unit length unless the operator normalises them itself."""
    generator = torch.Generator().manual_seed(seed)
    K, V, HV, N = spec.key_dim, spec.value_dim, H * R, len(offsets) - 1 if offsets else B

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    x = {name: _feature(spec, normal(B, T, H, K)).to(dtype) for name in ("q", "k")}
    x["v"] = normal(B, T, HV, V).to(dtype)
    channels = {"scalar": (), "key": (K,), "value": (V,)}
    if spec.fused_gate != "none" or spec.beta == "dt":
        own = channels[spec.gate[0]]
        raw = RAW.get(decays, DECAYS["mild"])(normal(B, T, HV, *own))
        x |= {"dt" if spec.beta == "dt" else "a": raw.to(gate_dtype), "A_log": 0.5 * normal(HV)}
        x |= {"dt_bias": normal(HV, *own)} if bias else {}
    else:
        x |= {GATES[g]: DECAYS[decays](-uniform(B, T, HV, *channels[g])).to(gate_dtype) for g in spec.gate}
    if spec.beta in ("head", "value"):
        shape = (B, T, HV, V) if spec.beta == "value" else (B, T, HV)
        x |= {"b": 2 * normal(*shape)} if spec.beta_logits else {"beta": uniform(*shape)}
    if state:
        x["h0"] = normal(N, HV, K, V)
        x |= {"z0": uniform(N, HV, K)} if spec.normalize else {}
    return Case(spec, x, offsets, scale, offsets_dtype)


def _feature(spec: Spec, x: Tensor) -> Tensor:
    """q or k; positive where a normaliser divides by a sum of products."""
    if spec.feature_map == "elu1":
        return 0.3 * x - 0.5 * torch.tensor(float(spec.key_dim)).log()  # elu(x) + 1 is about K ** -0.5
    x = x if spec.qk_norm else normalize(x, dim=-1)
    return x.abs() if spec.normalize else x


def every_other_in_short(values: Sequence[Any]) -> list[Any]:
    """Parameters of a test of which make test runs half."""
    return [pytest.param(value, marks=pytest.mark.full if n % 2 else ()) for n, value in enumerate(values)]


# ------------------------------------------------------------------------------------------------ the answer


def answer(this: Case) -> tuple[Tensor, ...]:
    """(o, S), with a normaliser (o, S, z): contract sections 2 and 3 in float64, sequence by sequence."""
    spec, x = this.spec, this.x
    read = _read(this)
    B, T, HV, V = x["v"].shape
    ends = list(zip(this.offsets, this.offsets[1:])) if this.offsets else [(0, T)]
    scale = 1.0 if spec.beta == "dt" else this.scale
    found = []
    for n, (first, last) in enumerate(ends):
        part = slice(n, n + 1) if this.offsets else slice(None)
        states = {name: x[name][part] for name in ("h0", "z0") if name in x}
        here = {name: value[:, first:last] for name, value in read.items()}
        if first == last:
            found.append((read["v"].double()[:, first:last], *_unchanged(this, states)))
            continue
        o, state = oracle.recurrence(**here, **states, scale=scale, rule=spec.rule, normalize=spec.normalize)
        found.append((o, *state) if spec.normalize else (o, state))
    if not found:  # no sequence at all
        sizes = _unchanged(this, {})
        return torch.zeros(B, T, HV, V, dtype=torch.float64), *(state.new_zeros(0, *state.shape[1:]) for state in sizes)
    o, *states = zip(*found)
    tail = torch.zeros(B, T - ends[-1][1], HV, V, dtype=torch.float64)
    return torch.cat([*o, tail], 1), *(torch.cat(parts) for parts in states)


def _unchanged(this: Case, states: dict[str, Tensor]) -> list[Tensor]:
    """The states of one empty sequence, or of every empty one: what they were, or zeros."""
    (B, _, HV, V), K = this.x["v"].shape, this.spec.key_dim
    sizes = {"h0": (B, HV, K, V)} | ({"z0": (B, HV, K)} if this.spec.normalize else {})
    return [states.get(name, torch.zeros(size)).double() for name, size in sizes.items()]


def _read(this: Case) -> dict[str, Tensor]:
    """q, k, v, the gates and the write strength as the recurrence reads them."""
    spec, x = this.spec, this.x
    read = {"v": x["v"]}
    for name in ("q", "k"):
        feature = elu(x[name].double()) + 1 if spec.feature_map == "elu1" else x[name].double()
        read[name] = oracle.normalized(feature) if spec.qk_norm else feature
    if spec.beta == "dt":
        biased = x["dt"].double() + (x["dt_bias"].double() if "dt_bias" in x else 0.0)
        dt = softplus(biased, threshold=20)
        read["beta"] = dt if this.dt_limit is None else dt.clamp(*this.dt_limit)
        read["g"] = -x["A_log"].double().exp() * read["beta"]
    elif spec.fused_gate != "none":
        read[GATES[spec.gate[0]]] = oracle.gate(x["a"], x["A_log"], x.get("dt_bias"), spec.lower_bound)
    read |= {name: x[name] for name in ("g", "gk", "gv", "beta") if name in x}
    if spec.beta_logits:
        read["beta"] = oracle.sigmoid(x["b"]) * (2 if spec.neg_eigval else 1)
    return read


# ------------------------------------------------------------------------------------------------ the operators


def operator_name(spec: Spec, form: str) -> str:
    """The name under which users know the member."""
    prefix = "chunk" if form == "chunk" else "fused_recurrent"
    if spec.beta == "dt":
        return f"{form}_mamba2"
    if spec.rule == "delta":
        return f"{prefix}_{ {(): 'delta_rule', ('key',): 'kda'}.get(spec.gate, 'gated_delta_rule') }".replace(" ", "")
    return f"{prefix}_{'linear_attn' if spec.gate == () and spec.beta == 'none' else 'simple_gla'}"


def call(package: ModuleType, this: Case, form: str = "chunk", **changes: Any) -> tuple[Tensor, ...]:
    """(o, S), with a normaliser (o, S, z), S as [N, HV, K, V]; ``changes`` replace keyword arguments."""
    operator = getattr(package, operator_name(this.spec, form))
    o, final = operator(**keywords(this, form) | changes)
    finals = final if isinstance(final, tuple) else (final,)
    turned = this.spec.state_v_first
    return o, *(s.transpose(2, 3) if s is not None and s.ndim == 4 and turned else s for s in finals)


def keywords(this: Case, form: str) -> dict[str, Any]:
    """The case as keyword arguments of its operator."""
    spec, x = this.spec, this.x
    state = x.get("h0")
    if state is not None and spec.state_v_first:
        state = state.transpose(2, 3).contiguous()
    given: dict[str, Any] = {"initial_state": (state, x["z0"]) if "z0" in x else state, "output_final_state": True}
    if this.offsets is not None:
        given["cu_seqlens"] = torch.tensor(this.offsets, dtype=this.offsets_dtype)
    given |= {name: x[name] for name in ("A_log", "dt_bias") if name in x}
    if spec.beta == "dt":
        return given | {"x": x["v"], "dt": x["dt"], "B": x["k"], "C": x["q"], "dt_limit": this.dt_limit}
    given |= {"q": x["q"], "k": x["k"], "v": x["v"], "scale": this.scale}
    beta = x.get("b", x.get("beta"))
    if beta is not None or spec.rule == "delta":
        given["beta"] = beta
    for gate in spec.gate:
        name = "g" if operator_name(spec, form).endswith("kda") else GATES[gate]
        given[name] = x["a" if spec.fused_gate != "none" else GATES[gate]]
    if "g" not in given and operator_name(spec, form).endswith(("gated_delta_rule", "gla")):
        given["g"] = None
    options = {
        "use_qk_l2norm_in_kernel": spec.qk_norm,
        "use_gate_in_kernel": spec.fused_gate != "none",
        "lower_bound": spec.lower_bound,
        "use_beta_sigmoid_in_kernel": spec.beta_logits,
        "allow_neg_eigval": spec.neg_eigval,
        "state_v_first": spec.state_v_first,
        "normalize": spec.normalize,
        "chunk_size": spec.chunk if form == "chunk" else None,
        "feature_map": spec.feature_map if operator_name(spec, form).endswith("linear_attn") else None,
    }
    said = {name: value for name, value in options.items() if value}
    if operator_name(spec, form).endswith("linear_attn"):
        said["normalize"] = spec.normalize  # the default differs between the two forms, as in fla-core
    return given | said


@contextmanager
def pytorch_version() -> Iterator[None]:
    """Inside, CPU tensors run the PyTorch version of a package: the interpreter is not asked for."""
    with mock.patch.dict(os.environ):
        os.environ.pop("TRITON_INTERPRET", None)
        yield


# ------------------------------------------------------------------------------------------------ comparison


def errors(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> list[float]:
    """The contract's error measure of o and of each state; a wrong shape is an error of its own."""
    assert [tuple(a.shape) for a in found] == [tuple(b.shape) for b in wanted]
    return [oracle.rms_ratio(a, b) if a.numel() else 0.0 for a, b in zip(found, wanted)]


def check(package: ModuleType, this: Case, form: str = "chunk", budget: float | None = None) -> tuple[Tensor, ...]:
    """Call the kernels and compare with the answer; returns what the kernels gave."""
    before = package.LAUNCHES.total()
    with torch.no_grad():
        found = call(package, this, form)
    assert package.LAUNCHES.total() > before or this.is_empty, "the PyTorch version ran"
    assert found[0].dtype == this.dtype and all(state.dtype == torch.float32 for state in found[1:])
    size = errors(found, answer(this))
    assert max(size) <= (BUDGETS[this.dtype] if budget is None else budget), size
    assert not any(state.isnan().any() for state in found)
    return found


def same(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> bool:
    """Bit for bit equal, NaN included."""
    return all(a.shape == b.shape and torch.equal(_bits(a), _bits(b)) for a, b in zip(found, wanted))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def viewed(this: Case, kind: str) -> Case:
    """The same values with q, k and v as some other view of memory."""
    return this.changed(**dict(zip("qkv", VIEWS[kind](*(this.x[name] for name in "qkv")))))


def _split(*parts: Tensor) -> list[Tensor]:
    """As models split one projection."""
    whole = torch.cat([x.flatten(2) for x in parts], -1)
    pieces = whole.split([x.shape[2] * x.shape[3] for x in parts], -1)
    return [piece.unflatten(2, x.shape[2:]) for piece, x in zip(pieces, parts)]


def _amid_nan(x: Tensor) -> Tensor:
    """Channels, heads and tokens of a tensor that is NaN everywhere else."""
    whole = torch.full([x.shape[0], *(size + 3 for size in x.shape[1:])], torch.nan, dtype=x.dtype)
    inside = whole[:, 1 : x.shape[1] + 1, 1 : x.shape[2] + 1, 1 : x.shape[3] + 1]
    return inside.copy_(x)


VIEWS: dict[str, Callable[..., list[Tensor]]] = {
    "contiguous": lambda *parts: list(parts),
    "split": _split,
    "amid NaN": lambda *parts: [_amid_nan(x) for x in parts],
    "head first": lambda *parts: [x.transpose(1, 2).contiguous().transpose(1, 2) for x in parts],
    "channel before token": lambda *parts: [x.transpose(1, 3).contiguous().transpose(1, 3) for x in parts],
    "every other channel": lambda *parts: [x.repeat_interleave(2, dim=-1)[..., ::2] for x in parts],
}


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that is allocated without being filled holds NaN."""
    with mock.patch(
        "torch.empty", side_effect=lambda *size, **options: torch.full(*size, torch.nan, **options)
    ) as empty:
        yield
    assert empty.call_count >= 1
