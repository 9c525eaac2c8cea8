"""gdngen.ops as layers of transformers call them: the recurrence and what stands around it.

Each function has the name, the arguments and the layouts of the one that it stands in for, so that a layer with these
operators can be pickled by the name of this module.  Offsets of packed sequences (``cu_seq_lens_q``) are followed by
the convolution too, and by Mamba-2: no sequence reads another one's tokens or state.
"""

from typing import Any

import torch
from torch import Tensor, nn

from gdngen import ops
from gdngen.errors import ArgumentError
from gdngen.ops import (
    chunk_gated_delta_rule,
    chunk_kda,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_kda,
)

__all__ = ["chunk_gated_delta_rule", "chunk_kda", "fused_recurrent_gated_delta_rule", "fused_recurrent_kda"]


def _offsets(options: dict[str, Any]) -> Tensor | None:
    found = options.get("cu_seq_lens_q")
    if found is None and options.get("seq_idx") is not None:
        raise ArgumentError(
            "seq_idx: got sequence numbers alone, expected the offsets of packed sequences; pass cu_seq_lens_q, as "
            "DataCollatorWithFlattening(return_flash_attn_kwargs=True) makes them"
        )
    return found


# ---- the convolution -------------------------------------------------------------------------------------------------


def causal_conv1d_fn(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **options: Any
) -> Any:
    """hidden_states and the result [B, D, T], weight [D, W]; a layer with a cache puts its window before the tokens."""
    return ops.causal_conv1d_fn(hidden_states, weight, bias, activation=activation, cu_seqlens=_offsets(options))


def causal_conv1d_update(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """The next tokens [B, D, T]; the window conv_state [B, D, L] moves on in place."""
    return ops.causal_conv1d_update(
        hidden_states, conv_state=conv_state, weight=weight, bias=bias, activation=activation
    )


# ---- Mamba-2 ---------------------------------------------------------------------------------------------------------

_chunk_mamba2: Any = ops.chunk_mamba2  # whose states are a tensor here
_recurrent_mamba2: Any = ops.recurrent_mamba2


def mamba2_split_conv1d_scan_combined(*_: Any, **__: Any) -> None:
    """No result: the layer goes on with the functions below, one after the other."""


def mamba2_chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] | None = None,
    return_final_states: bool = False,
    z: Tensor | None = None,
    **options: Any,
) -> Any:
    """hidden_states and the result [B, T, HV, V], dt [B, T, HV], A [HV] below 0, B and C [B, T, H, K].

    States are [N, HV, V, K].  ``chunk_size`` does not change the result; the package has its own.
    """
    _check_softplus(dt_softplus)
    state = None if initial_states is None else initial_states.transpose(-1, -2)
    o, final = _chunk_mamba2(
        hidden_states, dt, (-A).log(), B, C, dt_bias, D, dt_limit, state, return_final_states, _offsets(options)
    )
    o = o if z is None else o * nn.functional.silu(z)
    return (o, final.transpose(-1, -2)) if return_final_states else o


def mamba2_selective_state_update(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """One token: hidden_states and the result [B, HV, V], B and C [B, H, K]; state [B, HV, V, K] moves on in place.

    What belongs to a head comes spread out over its channels: dt [B, HV, V], A [HV, V, K], D and dt_bias [HV, V].
    """
    _check_softplus(dt_softplus)
    dt_bias, D = (None if x is None else x[..., 0] for x in (dt_bias, D))
    x, B, C, dt = (y[:, None] for y in (hidden_states, B, C, dt[..., 0]))
    A_log = (-A[:, 0, 0]).log()
    o, final = _recurrent_mamba2(x, dt, A_log, B, C, dt_bias, D, None, state.transpose(-1, -2), True)
    state.copy_(final.transpose(-1, -2))
    return o[:, 0] if z is None else o[:, 0] * nn.functional.silu(z)


def _check_softplus(dt_softplus: bool) -> None:
    if not dt_softplus:
        raise ArgumentError(
            "dt_softplus: got False, expected True; only layers whose steps are softplus(dt + dt_bias) can be computed"
        )


# ---- norms with a gate -----------------------------------------------------------------------------------------------


def norm_silu(layer: Any, hidden_states: Tensor, gate: Tensor) -> Any:
    """The norm, then silu(gate)."""
    return _gated_norm(layer, hidden_states, gate, "silu")


def norm_sigmoid(layer: Any, hidden_states: Tensor, gate: Tensor) -> Any:
    """The norm, then sigmoid(gate)."""
    return _gated_norm(layer, hidden_states, gate, "sigmoid")


def silu_norm(layer: Any, hidden_states: Tensor, gate: Tensor) -> Any:
    """The norm of hidden_states silu(gate), in groups of channels as Mamba-2 does."""
    size = getattr(layer, "group_size", hidden_states.shape[-1])
    groups = hidden_states.shape[-1] // size
    if groups == 1:
        return _gated_norm(layer, hidden_states, gate, "silu", norm_before_gate=False)
    x, g = (y.unflatten(-1, (groups, size)) for y in (hidden_states, gate))
    normed = ops.rms_norm_gated(x, g, None, None, "silu", eps=layer.variance_epsilon, norm_before_gate=False)
    return layer.weight * normed.flatten(-2)


def _gated_norm(layer: Any, hidden_states: Tensor, gate: Tensor, activation: str, **order: Any) -> Any:
    weight, eps = layer.weight, layer.variance_epsilon
    return ops.rms_norm_gated(hidden_states, gate.to(hidden_states.dtype), weight, None, activation, eps=eps, **order)


NORMS = (norm_silu, norm_sigmoid, silu_norm)


@torch.no_grad()
def norm_like(layer: nn.Module, own: Any) -> str | None:
    """The name of the function above that computes what ``own``, the forward of such a layer, does; None if none does.

    Found by trying: these layers have one name for many orders of norm, weight and gate.
    """
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not hasattr(layer, "variance_epsilon"):
        return None
    random = torch.Generator().manual_seed(0)
    probe = object.__new__(type(layer))
    vars(probe).update(vars(layer))
    vars(probe)["_parameters"] = {"weight": 1 + torch.rand(weight.shape, generator=random)}
    x, gate = torch.randn(2, 3, weight.numel(), generator=random)
    try:
        wanted = own(probe, x, gate)
        found = [norm.__name__ for norm in NORMS if torch.allclose(norm(probe, x, gate), wanted, 1e-4, 1e-5)]
    except (TypeError, ValueError, RuntimeError, AttributeError):  # it takes other arguments
        return None
    return found[0] if found else None
