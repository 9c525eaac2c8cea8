"""Calls made from a Spec: the operator's public name, random inputs for every option, the float64 answer.

``verify`` runs them; ``inspect`` records what they would launch.
"""

import inspect
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import elu, softplus

from gdngen import oracle
from gdngen.runtime import operators
from gdngen.spec import Spec

GATES = {"scalar": "g", "key": "gk", "value": "gv"}


@dataclass(frozen=True)
class Case:
    """A shape and what is special about it.

    ``offsets`` pack sequences; ``marks`` (start, step, value) are gates to set; ``strided``: views of one tensor;
    ``segmented``: sequences are split however many heads there are.
    """

    name: str
    tokens: int
    sequences: int = 1
    offsets: tuple[int, ...] = ()
    marks: tuple[int, int, float] | None = None
    strided: bool = False
    stateful: bool = True
    segmented: bool = False
    dt_limit: tuple[float, float] | None = None

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


def inputs(spec: Spec, case: Case, dtype: torch.dtype, heads: tuple[int, int], device: str = "cpu") -> dict[str, Any]:
    """What the Spec reads, under the graph's names; random, but the same for every case of this name on a device.

    On the device "meta": the shapes alone.
    """
    generator = None if device == "meta" else torch.Generator(device).manual_seed(zlib.crc32(case.name.encode()))

    def draw(*shape: int, of: Any = torch.randn) -> Tensor:
        return of(shape, generator=generator, device=device)

    K, V = spec.key_dim, spec.value_dim
    rows, channels = (case.sequences, case.tokens, heads[1]), {"scalar": (), "key": (K,), "value": (V,)}
    x: dict[str, Any] = {name: _feature(spec, draw(*rows[:2], heads[0], K)).to(dtype) for name in ("q", "k")}
    x["v"] = draw(*rows, V).to(dtype)
    if case.strided:  # as models split one projection
        sizes = [value.shape[2:] for value in x.values()]
        parts = torch.cat([value.flatten(2) for value in x.values()], -1).split([h * d for h, d in sizes], -1)
        x = {name: part.unflatten(2, size) for name, part, size in zip(x, parts, sizes)}
    gates = {GATES[gate]: -0.3 * draw(*rows, *channels[gate], of=torch.rand) for gate in spec.gate}
    if spec.fused_gate != "none" or spec.beta == "dt":
        own = channels[spec.gate[0]]
        gates = {"dt" if spec.beta == "dt" else "a": draw(*rows, *own)}
        x |= {"A_log": draw(heads[1], of=torch.rand), "dt_bias": draw(heads[1], *own)}
    if case.marks:
        for gate in gates.values():
            gate[:, case.marks[0] :: case.marks[1]] = case.marks[2]
    x |= gates
    if spec.beta in ("head", "value"):
        beta = draw(*rows, *((V,) if spec.beta == "value" else ()), of=torch.randn if spec.beta_logits else torch.rand)
        x["b" if spec.beta_logits else "beta"] = beta.to(dtype)
    if case.stateful:
        states = len(case.parts) if case.offsets else case.sequences
        x["h0"] = 0.3 * draw(states, heads[1], *((V, K) if spec.state_v_first else (K, V)))
        x |= {"z0": draw(states, heads[1], K, of=torch.rand)} if spec.normalize else {}
    if case.offsets:
        x["cu_seqlens"] = torch.tensor(case.offsets, dtype=torch.int32, device=device)
    return x


def _feature(spec: Spec, x: Tensor) -> Tensor:
    """q or k such that the rule sees about unit length, and a positive sum where a normaliser divides by it."""
    if spec.feature_map == "elu1" and not spec.qk_norm:
        return 0.3 * x - 0.5 * torch.log(torch.tensor(float(spec.key_dim)))  # here elu(x) + 1 is exp(x)
    x = x if spec.qk_norm else x / x.norm(dim=-1, keepdim=True)
    return x.abs() if spec.normalize else x


def keywords(spec: Spec, form: str, x: Mapping[str, Any], case: Case) -> dict[str, Any]:
    """The inputs as keyword arguments of the public operator."""
    name = operator_name(spec, form)
    given = {key: x[key] for key in ("q", "k", "v", "A_log", "dt_bias", "cu_seqlens") if key in x}
    given |= {"initial_state": (x["h0"], x["z0"]) if "z0" in x else x.get("h0"), "output_final_state": True}
    if spec.beta == "dt":
        given |= {"x": x["v"], "dt": x["dt"], "B": x["k"], "C": x["q"], "dt_limit": case.dt_limit}
    else:
        gates = {GATES[gate]: x["a"] if "a" in x else x[GATES[gate]] for gate in spec.gate}
        given |= {"g": gates["gk"]} if name.endswith("kda") else {"g": None, **gates}
        given["beta"] = x.get("b", x.get("beta"))
    given |= {
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


def expected(spec: Spec, x: Mapping[str, Any], case: Case) -> tuple[Tensor, ...]:
    """(o, S), with a normaliser (o, S, z): the float64 recurrence, sequence by sequence, in the operator's layouts."""
    tokens, scale = _computed(spec, x, case), 1.0 if spec.beta == "dt" else None
    starts = {name: x[name] for name in ("h0", "z0") if name in x}
    if "h0" in x and spec.state_v_first:
        starts["h0"] = x["h0"].transpose(-1, -2)
    rows, states = [], []
    for part, of in case.parts:
        here = {name: value[:, part] for name, value in tokens.items()} | {n: value[of] for n, value in starts.items()}
        if not here["v"].numel():
            here.pop("beta", None)  # nothing is written
        o, state = oracle.recurrence(**here, scale=scale, rule=spec.rule, normalize=spec.normalize)
        rows.append(o)
        states.append(state if spec.normalize else (state,))
    tail = rows[0].new_zeros(case.sequences, case.tokens - sum(o.shape[1] for o in rows), *rows[0].shape[2:])
    S, *z = (torch.cat(parts) for parts in zip(*states))
    return torch.cat([*rows, tail], 1), S.transpose(-1, -2) if spec.state_v_first else S, *z


def _computed(spec: Spec, x: Mapping[str, Any], case: Case) -> dict[str, Tensor]:
    """q, k, v, gates and write strength as the recurrence reads them: section 3 of the contract in float64."""
    found = {name: x[name] for name in ("v", *GATES.values(), "beta") if name in x}
    for name in ("q", "k"):
        value = elu(x[name].double()) + 1 if spec.feature_map == "elu1" else x[name]
        found[name] = oracle.normalized(value) if spec.qk_norm else value
    if "dt" in x:
        dt = softplus(x["dt"].double() + x["dt_bias"].double(), threshold=20)
        found["beta"] = dt if case.dt_limit is None else dt.clamp(*case.dt_limit)
        found["g"] = -x["A_log"].double().exp() * found["beta"]
    if "a" in x:
        found[GATES[spec.gate[0]]] = oracle.gate(x["a"], x["A_log"], x["dt_bias"], spec.lower_bound)
    if "b" in x:
        found["beta"] = oracle.sigmoid(x["b"]) * (2 if spec.neg_eigval else 1)
    return found
