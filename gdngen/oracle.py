"""The float64 oracle: the recurrence of contract section 2, token by token, independent of the IR."""

from typing import Any

import torch
from torch import Tensor

# Contract section 5, by dtype: results; gradients of the operands below; gradients of everything else.
_HALF = (5e-3, 8e-3, 2e-2)
BUDGETS = {"float32": (5e-4, 2e-3, 2e-3), "float16": _HALF, "bfloat16": _HALF}
OPERANDS = ("dq", "dk", "dv", "dh0", "dz0")

LOWEST = -800.0  # exp of it is 0 in float64; keeps the gradient at a gate of -inf at 0


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, gk: Tensor | None = None, gv: Tensor | None = None,
    beta: Tensor | None = None, scale: float | Tensor | None = None, h0: Tensor | None = None, rule: str = "delta",
    normalize: bool = False, z0: Tensor | None = None,
) -> Any:  # fmt: skip
    """(o [B,T,HV,V], S [B,HV,K,V]), with ``normalize`` (o, (S, z [B,HV,K])); float64, differentiable.

    q, k [B,T,H,K]; v [B,T,HV,V]; g, gk, gv, beta as in contract section 1, already computed; h0 [B,HV,K,V].
    """
    (B, T, HV, V), K = v.shape, q.shape[3]
    q, k = (x.double().repeat_interleave(HV // q.shape[2], dim=2) for x in (q, k))
    v = v.double()
    gates = [(g, (..., None, None)), (gk, (..., None)), (gv, (..., None, slice(None)))]
    decays = [(gate.double().clamp(min=LOWEST).exp(), form) for gate, form in gates if gate is not None]
    beta = v.new_ones(B, T, HV, 1) if beta is None else beta.double()
    beta = beta[..., None] if beta.ndim == 3 else beta
    S = v.new_zeros(B, HV, K, V) if h0 is None else h0.double()
    z = v.new_zeros(B, HV, K) if z0 is None else z0.double()
    rows = []
    for t in range(T):
        for decay, form in decays:
            S = decay[:, t][form] * S
            z = decay[:, t][form][..., 0] * z if normalize else z
        predicted = torch.einsum("bhkv,bhk->bhv", S, k[:, t]) if rule == "delta" else 0.0
        S = S + k[:, t, :, :, None] * (beta[:, t] * (v[:, t] - predicted))[:, :, None, :]
        z = z + k[:, t]
        read = torch.einsum("bhkv,bhk->bhv", S, q[:, t])
        weight = (z * q[:, t]).sum(-1, keepdim=True) + 1e-10
        rows.append(read / weight if normalize else (K**-0.5 if scale is None else scale) * read)
    o = torch.stack(rows, 1) if rows else v.new_zeros(B, 0, HV, V)
    return o, ((S, z) if normalize else S)


def sigmoid(x: Tensor) -> Tensor:
    """By its logarithm: autograd of torch.sigmoid multiplies with 1 - s(x), which cancels in float64 from x = 30 on."""
    return torch.nn.functional.logsigmoid(x.double()).exp()


def gate(a: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, lower_bound: float | None = None) -> Tensor:
    """The fused gates of contract section 3 in float64: softplus, or bounded when ``lower_bound`` is given."""
    rate = A_log.double().exp().reshape(-1, *[1] * (a.ndim - 3))
    x = a.double() if dt_bias is None else a.double() + dt_bias.double().reshape(a.shape[2:])
    if lower_bound is not None:
        return lower_bound * sigmoid(rate * x)
    return -rate * torch.nn.functional.softplus(x, threshold=20)


def normalized(x: Tensor) -> Tensor:
    """q/k norm of contract section 3 in float64."""
    return x.double() * (x.double().square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def rms_ratio(x: Tensor, reference: Tensor) -> float:
    """The error measure of contract section 5: rms(x - ref) / rms(ref); plain rms(x) where the reference is 0.

    NaN and infinity anywhere give NaN or infinity, which no budget admits.  Empty tensors agree: 0.
    """
    if not reference.numel():
        return 0.0
    reference = reference.detach().double()
    size = reference.square().mean().sqrt()
    error = (x.detach().to(reference.device).double() - reference).square().mean().sqrt()
    return float(error / size) if size > 0 else float(error)


def budget(name: str, dtype: str) -> float:
    """How far a tensor of this name ("o", "dq", ...) may be off, as an rms ratio."""
    results, operands, others = BUDGETS[dtype]
    if not name.startswith("d"):
        return results
    return operands if name in OPERANDS else others
