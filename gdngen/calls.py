"""Calls made from a Spec: the operator's public name, random inputs for every option, the float64 answer.

``verify`` runs them; ``inspect`` records what they would launch.
"""

import inspect
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus

from gdngen import oracle
from gdngen.runtime import operators
from gdngen.spec import Spec

GATES = {"scalar": "g", "key": "gk", "value": "gv"}
STRONG, RESET = -20.0, -torch.inf


@dataclass(frozen=True)
class Case:
    """A shape and what is special about it.  ``offsets`` pack sequences; rows past the last offset are zero in o."""

    name: str
    tokens: int
    sequences: int = 1
    offsets: tuple[int, ...] = ()
    gate: Literal["mild", "strong", "reset"] = "mild"
    strided: bool = False
    stateful: bool = True
    dt_limit: tuple[float, float] | None = None

    @property
    def states(self) -> int:
        return len(self.offsets) - 1 if self.offsets else self.sequences

    @property
    def parts(self) -> list[tuple[slice, slice]]:
        """(tokens, states) of what is one computation: the whole batch, or each packed sequence."""
        ends = list(zip(self.offsets, self.offsets[1:]))
        return [(slice(*end), slice(n, n + 1)) for n, end in enumerate(ends)] or [(slice(None), slice(None))]


def operator_name(spec: Spec, form: str) -> str:
    """The public name under which users know this member, in form "chunk" or "recurrent"."""
    if spec.beta == "dt":
        return f"{form}_mamba2"
    if spec.rule == "delta":
        family = {(): "delta_rule", ("key",): "kda"}.get(spec.gate, "gated_delta_rule")
    else:
        family = "simple_gla" if spec.gate or spec.beta != "none" else "linear_attn"
    return f"chunk_{family}" if form == "chunk" else f"fused_recurrent_{family}"


# ------------------------------------------------------------------------------------------------ inputs


class _Draw:
    """Random numbers on a device that depend on the case's name alone."""

    def __init__(self, case: Case, device: str) -> None:
        self.generator, self.device = torch.Generator().manual_seed(zlib.crc32(case.name.encode())), device

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator).to(self.device)


def inputs(
    spec: Spec, case: Case, dtype: torch.dtype, q_heads: int, v_heads: int, device: str = "cpu"
) -> dict[str, Any]:
    """What the Spec reads, under the graph's names; what it does not read is left out."""
    draw = _Draw(case, device)
    K, V = spec.key_dim, spec.value_dim
    rows, channels = (case.sequences, case.tokens, v_heads), {"scalar": (), "key": (K,), "value": (V,)}
    x: dict[str, Any] = {name: _feature(spec, draw.normal(*rows[:2], q_heads, K)) for name in ("q", "k")}
    x = {name: value.to(dtype) for name, value in (x | {"v": draw.normal(*rows, V)}).items()}
    if case.strided:  # as models split one projection
        whole = torch.cat([value.flatten(2) for value in x.values()], -1)
        parts = whole.split([value.shape[2] * value.shape[3] for value in x.values()], -1)
        x = {name: part.unflatten(2, x[name].shape[2:]) for name, part in zip(x, parts)}
    if spec.fused_gate != "none" or spec.beta == "dt":
        own = channels[spec.gate[0]]
        x["dt" if spec.beta == "dt" else "a"] = _marked(draw.normal(*rows, *own), case, -STRONG, -STRONG)
        x |= {"A_log": draw.uniform(v_heads), "dt_bias": draw.normal(v_heads, *own)}
    else:
        x |= {GATES[g]: _marked(-0.3 * draw.uniform(*rows, *channels[g]), case, STRONG, RESET) for g in spec.gate}
    if spec.beta in ("head", "value"):
        shape = (*rows, V) if spec.beta == "value" else rows
        x["b" if spec.beta_logits else "beta"] = (draw.normal if spec.beta_logits else draw.uniform)(*shape).to(dtype)
    if case.stateful:
        x["h0"] = 0.3 * draw.normal(case.states, v_heads, *((V, K) if spec.state_v_first else (K, V)))
        x |= {"z0": draw.uniform(case.states, v_heads, K)} if spec.normalize else {}
    if case.offsets:
        x["cu_seqlens"] = torch.tensor(case.offsets, dtype=torch.int32, device=device)
    return x


def _feature(spec: Spec, x: Tensor) -> Tensor:
    """q or k such that the rule sees about unit length, and a positive sum where a normaliser divides by it."""
    if spec.feature_map == "elu1" and not spec.qk_norm:
        return 0.3 * x - 0.5 * torch.log(torch.tensor(float(spec.key_dim)))  # here elu(x) + 1 is exp(x)
    x = x if spec.qk_norm else x / x.norm(dim=-1, keepdim=True)
    return x.abs() if spec.normalize else x


def _marked(gate: Tensor, case: Case, strong: float, reset: float) -> Tensor:
    """The gate with every fourth token strong, or every ninth emptying the state."""
    if case.gate == "strong":
        gate[:, 1::4] = strong
    elif case.gate == "reset":
        gate[:, 4::9] = reset
    return gate


def keywords(spec: Spec, form: str, x: Mapping[str, Any], case: Case) -> dict[str, Any]:
    """The inputs as keyword arguments of the public operator."""
    given = {name: x[name] for name in ("A_log", "dt_bias", "cu_seqlens") if name in x}
    given |= {"initial_state": x.get("h0"), "output_final_state": True}
    if spec.beta == "dt":
        return given | {"x": x["v"], "dt": x["dt"], "B": x["k"], "C": x["q"], "dt_limit": case.dt_limit}
    if "z0" in x:
        given["initial_state"] = (x["h0"], x["z0"])
    name = operator_name(spec, form)
    gates = {GATES[gate]: x["a"] if spec.fused_gate != "none" else x[GATES[gate]] for gate in spec.gate}
    given |= {"g": gates["gk"]} if name.endswith("kda") else {"g": None, **gates}
    given |= {key: x[key] for key in ("q", "k", "v")}
    given |= {
        "beta": x.get("b", x.get("beta")),
        "use_qk_l2norm_in_kernel": spec.qk_norm,
        "use_gate_in_kernel": spec.fused_gate != "none",
        "lower_bound": spec.lower_bound,
        "use_beta_sigmoid_in_kernel": spec.beta_logits,
        "allow_neg_eigval": spec.neg_eigval,
        "state_v_first": spec.state_v_first,
        "normalize": spec.normalize,
        "feature_map": spec.feature_map,
    }
    accepted = inspect.signature(getattr(operators, name)).parameters
    return {key: value for key, value in given.items() if key in accepted}


# ------------------------------------------------------------------------------------------------ answers


def expected(spec: Spec, x: Mapping[str, Any], case: Case) -> tuple[Tensor, ...]:
    """(o, S), with a normaliser (o, S, z): the float64 recurrence, sequence by sequence, in the operator's layouts."""
    tokens = _computed(spec, x, case)
    h0, z0, scale = x.get("h0"), x.get("z0"), 1.0 if spec.beta == "dt" else None
    h0 = h0.transpose(-1, -2) if h0 is not None and spec.state_v_first else h0
    rows, states = [], []
    for part, of in case.parts:
        start = {"h0": None if h0 is None else h0[of], "z0": None if z0 is None else z0[of]}
        here = {name: value[:, part] for name, value in tokens.items()}
        if not here["v"].numel():
            here.pop("beta", None)  # nothing is written
        o, state = oracle.recurrence(**here, **start, scale=scale, rule=spec.rule, normalize=spec.normalize)
        rows.append(o)
        states.append(state if spec.normalize else (state,))
    tail = rows[0].new_zeros(case.sequences, case.tokens - sum(o.shape[1] for o in rows), *rows[0].shape[2:])
    S, *z = (torch.cat(parts) for parts in zip(*states))
    return torch.cat([*rows, tail], 1), S.transpose(-1, -2) if spec.state_v_first else S, *z


def _computed(spec: Spec, x: Mapping[str, Any], case: Case) -> dict[str, Tensor]:
    """q, k, v, gates and write strength as the recurrence reads them: section 3 of the contract in float64."""
    found: dict[str, Tensor] = {"v": x["v"]}
    for name in ("q", "k"):
        value = torch.nn.functional.elu(x[name].double()) + 1 if spec.feature_map == "elu1" else x[name]
        found[name] = oracle.normalized(value) if spec.qk_norm else value
    if spec.beta == "dt":
        found["beta"] = softplus(x["dt"].double() + x["dt_bias"].double(), threshold=20)
        found["beta"] = found["beta"] if case.dt_limit is None else found["beta"].clamp(*case.dt_limit)
        found["g"] = -x["A_log"].double().exp() * found["beta"]
        return found
    if spec.fused_gate != "none":
        found[GATES[spec.gate[0]]] = oracle.gate(x["a"], x["A_log"], x["dt_bias"], spec.lower_bound)
    else:
        found |= {GATES[gate]: x[GATES[gate]] for gate in spec.gate}
    if spec.beta_logits:
        found["beta"] = torch.sigmoid(x["b"].double()) * (2 if spec.neg_eigval else 1)
    elif spec.beta != "none":
        found["beta"] = x["beta"]
    return found
