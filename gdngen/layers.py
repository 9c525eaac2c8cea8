"""Token mixers as modules: convolution, recurrence, norm and gate around them, with published parameter names.

The names, shapes and initial values of parameters are those of the models in transformers, so that a published
checkpoint's layer loads with load_state_dict.  All layers are called alike:

    o = layer(x)                                    # x, o [B, T, hidden_size]
    o = layer(x, attention_mask=mask)               # [B, T], 0 for padding on the left
    o = layer(x[None], cu_seqlens=offsets)          # packed sequences, B = 1
    state = LayerState(); o = layer(x, state=state) # prefill, then decode: layer(next, state=state), any lengths

Everything runs on the operators of gdngen.ops: CPU tensors in PyTorch, GPU tensors in kernels.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gdngen import ops
from gdngen.runtime.arguments import ArgumentError

__all__ = ["GatedDeltaNet", "KimiDeltaAttention", "LayerState", "Mamba2"]


@dataclass
class LayerState:
    """What a layer has to know of the tokens so far; a call with it goes on from there and leaves it behind the last.

    window [N, D, W - 1]: the convolution's last inputs, in their dtype.  recurrent: the recurrence's state, float32, as
    the operators return it.  Both are None before the first token; keep, copy or save them as any tensors.
    """

    window: Tensor | None = None
    recurrent: Tensor | None = None

    def detach(self) -> "LayerState":
        """The same without its history, for training on a sequence in parts."""
        return LayerState(*(None if x is None else x.detach() for x in (self.window, self.recurrent)))


class GatedNorm(nn.Module):
    """The weight of an RMS norm with a gate; see gdngen.ops.rms_norm_gated."""

    def __init__(self, size: int, eps: float, device: Any, dtype: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))

    def forward(self, x: Tensor, gate: Tensor, activation: str = "silu", groups: int = 0) -> Tensor:
        """norm(x) * weight * activation(gate); of ``groups`` groups of channels each, norm(x * silu(gate)) * weight."""
        if not groups:
            return ops.rms_norm_gated(x, gate, self.weight, None, activation, eps=self.eps)
        weight = self.weight if groups == 1 else None
        x, gate = (y.unflatten(-1, (groups, -1)) for y in (x, gate))
        o = ops.rms_norm_gated(x, gate, weight, None, eps=self.eps, norm_before_gate=False).flatten(-2)
        return o if groups == 1 else (o * self.weight).to(o.dtype)


class _Mixer(nn.Module):
    """What the layers share: the convolution and where its window is kept."""

    conv1d: nn.Conv1d  # holds weight and bias; never called

    def _convolution(self, channels: int, width: int, bias: bool, made: dict[str, Any]) -> nn.Conv1d:
        return nn.Conv1d(channels, channels, width, groups=channels, bias=bias, padding=width - 1, **made)

    def _convolved(self, x: Tensor, state: LayerState | None, cu_seqlens: Tensor | None) -> Tensor:
        """silu(conv(x)) of x [B, T, D]; one token of a decoding moves the window on in place."""
        weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        if _decodes(x, state):
            assert state is not None
            return ops.causal_conv1d_update(x, state.window, None, weight, bias, "silu")[0]
        window = None if state is None else state.window
        if window is None and state is not None:
            N = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
            window = x.new_zeros(N, x.shape[2], weight.shape[1] - 1)
        o, final = ops.causal_conv1d(
            x, weight, bias, None, window, state is not None, activation="silu", cu_seqlens=cu_seqlens
        )
        if state is not None:
            state.window = final
        return o


def _decodes(x: Tensor, state: LayerState | None) -> bool:
    """One token each, after others, without gradients."""
    return state is not None and state.window is not None and x.shape[1] == 1 and not torch.is_grad_enabled()


def _masked(x: Tensor, attention_mask: Tensor | None) -> Tensor:
    """0 for padding, which then changes neither window nor state."""
    if attention_mask is None:
        return x
    if attention_mask.shape != x.shape[:2]:
        got, wanted = list(attention_mask.shape), list(x.shape[:2])
        raise ArgumentError(
            f"attention_mask: got {got}, expected [B, T] = {wanted}. Give the mask of these tokens alone."
        )
    return (x * attention_mask[:, :, None]).to(x.dtype)


def _multiple(name: str, value: int, of: int) -> None:
    if of < 1 or value < 1 or value % of:
        raise ArgumentError(
            f"{name}: got {value}, expected a multiple of {of}. Each key head serves as many value heads."
        )


class GatedDeltaNet(_Mixer):
    """The gated delta rule's layer of Qwen3-Next (``fused_projections``) and Qwen3.5 (separate ones).

    Parameters: in_proj_qkvz and in_proj_ba, rows ordered by key head, or in_proj_qkv, in_proj_z, in_proj_b and
    in_proj_a; conv1d; A_log and dt_bias [num_v_heads]; norm; out_proj.
    """

    def __init__(
        self, hidden_size: int, num_k_heads: int, num_v_heads: int, head_k_dim: int = 128, head_v_dim: int = 128,
        conv_kernel_size: int = 4, norm_eps: float = 1e-6, fused_projections: bool = True, device: Any = None,
        dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        _multiple("num_v_heads", num_v_heads, num_k_heads)
        made = {"device": device, "dtype": dtype}
        self.num_k_heads, self.num_v_heads = num_k_heads, num_v_heads
        self.head_k_dim, self.head_v_dim = head_k_dim, head_v_dim
        self.key_dim, self.value_dim = num_k_heads * head_k_dim, num_v_heads * head_v_dim
        self.fused_projections = fused_projections
        sizes = {"qkv": 2 * self.key_dim + self.value_dim, "z": self.value_dim, "b": num_v_heads, "a": num_v_heads}
        if fused_projections:
            sizes = {"qkvz": sizes["qkv"] + sizes["z"], "ba": 2 * num_v_heads}
        self.conv1d = self._convolution(2 * self.key_dim + self.value_dim, conv_kernel_size, False, made)
        for name, size in sizes.items():
            self.add_module(f"in_proj_{name}", nn.Linear(hidden_size, size, bias=False, **made))
        self.dt_bias = nn.Parameter(torch.ones(num_v_heads, **made))
        self.A_log = nn.Parameter(torch.empty(num_v_heads, **made).uniform_(0.01, 16).log_())
        self.norm = GatedNorm(head_v_dim, norm_eps, device, dtype)
        self.out_proj = nn.Linear(self.value_dim, hidden_size, bias=False, **made)

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k and v side by side, z, b and a."""
        if not self.fused_projections:
            qkv, z, b, a = (self.get_submodule(f"in_proj_{name}")(x) for name in ("qkv", "z", "b", "a"))
            return qkv, z, b, a
        ratio = self.num_v_heads // self.num_k_heads
        K, V = self.head_k_dim, ratio * self.head_v_dim
        parts = self.get_submodule("in_proj_qkvz")(x).unflatten(-1, (self.num_k_heads, -1)).split([K, K, V, V], -1)
        q, k, v, z = (y.flatten(-2) for y in parts)
        b, a = (
            y.flatten(-2)
            for y in self.get_submodule("in_proj_ba")(x).unflatten(-1, (self.num_k_heads, -1)).split(ratio, -1)
        )
        return torch.cat([q, k, v], -1), z, b, a

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, state: LayerState | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """x [B, T, hidden_size] -> the same shape; see the module for masks, packed sequences and states."""
        qkv, z, b, a = self._projected(_masked(x, attention_mask))
        decodes = _decodes(qkv, state)
        mixed = self._convolved(qkv, state, cu_seqlens)
        q, k, v = mixed.split([self.key_dim, self.key_dim, self.value_dim], -1)
        q, k = (y.unflatten(-1, (self.num_k_heads, -1)) for y in (q, k))
        v, z = (y.unflatten(-1, (self.num_v_heads, -1)) for y in (v, z))
        operator: Any = ops.fused_recurrent_gated_delta_rule if decodes else ops.chunk_gated_delta_rule
        o, final = operator(
            q, k, v, g=a, beta=b, initial_state=None if state is None else state.recurrent,
            output_final_state=state is not None, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, A_log=self.A_log, dt_bias=self.dt_bias, cu_seqlens=cu_seqlens,
        )  # fmt: skip
        if state is not None:
            state.recurrent = final
        return self.out_proj(self.norm(o, z).flatten(-2))


class ForgetGate(nn.Module):
    """The gate per key channel of Kimi Delta Attention before its softplus, and what that takes."""

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int, made: dict[str, Any]) -> None:
        super().__init__()
        self.f_a_proj = nn.Linear(hidden_size, head_dim, bias=False, **made)
        self.f_b_proj = nn.Linear(head_dim, num_heads * head_dim, bias=False, **made)
        rate = torch.empty(num_heads * head_dim, device=made["device"]).uniform_(math.log(1e-3), math.log(1e-1))
        self.dt_bias = nn.Parameter(_inverse_softplus(rate.exp().clamp_min(1e-4)))
        self.A_log = nn.Parameter(torch.empty(1, 1, num_heads, 1, **made).uniform_(1, 16).log_())

    def forward(self, x: Tensor) -> Tensor:
        return self.f_b_proj(self.f_a_proj(x))


def _inverse_softplus(x: Tensor) -> Tensor:
    return x + torch.log(-torch.expm1(-x))


class KimiDeltaAttention(_Mixer):
    """Kimi Linear's layer: the delta rule with a decay per key channel, a sigmoid gate behind the norm.

    Parameters: q_proj, k_proj, v_proj; conv1d over the three side by side; forget_gate; b_proj; g_a_proj, g_b_proj;
    o_norm; o_proj.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, head_dim: int = 128, conv_kernel_size: int = 4, norm_eps: float = 1e-5,
        device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        made, width = {"device": device, "dtype": dtype}, num_heads * head_dim
        self.num_heads, self.head_dim = num_heads, head_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden_size, width, bias=False, **made) for _ in range(3))
        self.conv1d = self._convolution(3 * width, conv_kernel_size, False, made)
        self.forget_gate = ForgetGate(hidden_size, num_heads, head_dim, made)
        self.b_proj = nn.Linear(hidden_size, num_heads, bias=False, **made)
        self.g_a_proj = nn.Linear(hidden_size, head_dim, bias=False, **made)
        self.g_b_proj = nn.Linear(head_dim, width, bias=False, **made)
        self.o_norm = GatedNorm(head_dim, norm_eps, device, dtype)
        self.o_proj = nn.Linear(width, hidden_size, bias=False, **made)

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, state: LayerState | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """x [B, T, hidden_size] -> the same shape; see the module for masks, packed sequences and states."""
        x = _masked(x, attention_mask)
        qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        decodes = _decodes(qkv, state)
        heads = (self.num_heads, self.head_dim)
        q, k, v = (y.unflatten(-1, heads) for y in self._convolved(qkv, state, cu_seqlens).chunk(3, -1))
        operator: Any = ops.fused_recurrent_kda if decodes else ops.chunk_kda
        o, final = operator(
            q, k, v, g=self.forget_gate(x).unflatten(-1, heads), beta=self.b_proj(x),
            initial_state=None if state is None else state.recurrent, output_final_state=state is not None,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            A_log=self.forget_gate.A_log, dt_bias=self.forget_gate.dt_bias, cu_seqlens=cu_seqlens,
        )  # fmt: skip
        if state is not None:
            state.recurrent = final
        gate = self.g_b_proj(self.g_a_proj(x)).unflatten(-1, heads)
        return self.o_proj(self.o_norm(o, gate, "sigmoid").flatten(-2))


class Mamba2(_Mixer):
    """Mamba-2's layer.

    Parameters: in_proj to z, (x, B, C) and dt; conv1d; dt_bias, A_log and D [num_heads]; norm; out_proj.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, head_dim: int = 64, state_size: int = 128, n_groups: int = 1,
        conv_kernel_size: int = 4, norm_eps: float = 1e-5, use_bias: bool = False, use_conv_bias: bool = True,
        time_step_min: float = 0.001, time_step_max: float = 0.1, time_step_floor: float = 1e-4,
        time_step_limit: tuple[float, float] = (0.0, float("inf")), device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        _multiple("num_heads", num_heads, n_groups)
        made = {"device": device, "dtype": dtype}
        self.num_heads, self.n_groups, self.time_step_limit = (
            num_heads,
            n_groups,
            (time_step_limit[0], time_step_limit[1]),
        )
        self.inner, self.shared = num_heads * head_dim, n_groups * state_size
        channels = self.inner + 2 * self.shared
        self.conv1d = self._convolution(channels, conv_kernel_size, use_conv_bias, made)
        self.in_proj = nn.Linear(hidden_size, self.inner + channels + num_heads, bias=use_bias, **made)
        low, high = math.log(time_step_min), math.log(time_step_max)
        step = torch.empty(num_heads, device=device).uniform_(low, high).exp().clamp_min(time_step_floor)
        self.dt_bias = nn.Parameter(_inverse_softplus(step).to(dtype))
        self.A_log = nn.Parameter(torch.arange(1, num_heads + 1, device=device).float().log().to(dtype))
        self.D = nn.Parameter(torch.ones(num_heads, **made))
        self.norm = GatedNorm(self.inner, norm_eps, device, dtype)
        self.out_proj = nn.Linear(self.inner, hidden_size, bias=use_bias, **made)

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, state: LayerState | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """x [B, T, hidden_size] -> the same shape; see the module for masks, packed sequences and states."""
        sizes = [self.inner, self.inner + 2 * self.shared, self.num_heads]
        z, mixed, dt = self.in_proj(_masked(x, attention_mask)).split(sizes, -1)
        decodes = _decodes(mixed, state)
        mixed = _masked(self._convolved(mixed, state, cu_seqlens), attention_mask)
        v, B, C = mixed.split([self.inner, self.shared, self.shared], -1)
        operator: Any = ops.recurrent_mamba2 if decodes else ops.chunk_mamba2
        o, final = operator(
            v.unflatten(-1, (self.num_heads, -1)), dt, self.A_log, B.unflatten(-1, (self.n_groups, -1)),
            C.unflatten(-1, (self.n_groups, -1)), self.dt_bias, self.D, self.time_step_limit,
            None if state is None else state.recurrent, state is not None, cu_seqlens,
        )  # fmt: skip
        if state is not None:
            state.recurrent = final
        return self.out_proj(self.norm(o.flatten(-2), z, groups=self.n_groups))
