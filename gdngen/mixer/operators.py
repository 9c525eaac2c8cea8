"""The mixer's operators under the names and with the keywords of flash-linear-attention and of causal-conv1d.

Shapes: B batch, T tokens, D channels, N sequences (N = B without cu_seqlens), W width of the convolution, 2 to 4.
Tensors are bfloat16, float16 or float32, each in its own; everything is computed in float32.  CPU tensors run the
PyTorch version of the same graph.  Errors: ArgumentError (a ValueError) before any launch, KeywordError for a keyword
that the operator does not have.
"""

import threading
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gdngen.runtime.arguments import (
    FLOATS,
    OFFSETS,
    _debugging,
    _describe,
    _either,
    _expect,
    _is_dense,
    _number,
    _wrong,
    check_gate,
    check_offsets,
    check_switches,
)
from gdngen.runtime.keywords import explain_keywords

if TYPE_CHECKING:
    from gdngen.mixer.specs import MixerSpec

__all__ = [
    "causal_conv1d",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "fused_gdn_gate",
    "fused_kda_gate",
    "l2norm",
    "rms_norm_gated",
    "sigmoid_beta",
]

WIDTHS = (2, 3, 4)
MAX_CHANNELS = 65536  # of a row: a norm holds it in registers
ACTIVATIONS = {None: "none", "silu": "silu", "swish": "silu"}
GATES: dict[str, Any] = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}

Options = tuple[Any, ...]  # a member's kind and the fields of its Spec: what torch.compile can make while it traces

_packages: dict[Options, ModuleType] = {}
_loading = threading.Lock()


def package_of(spec: "MixerSpec") -> ModuleType:
    """The package of a member, built on first use."""
    return _package(type(spec).__name__, *(getattr(spec, name) for name in type(spec).model_fields))


def _package(*options: Any) -> ModuleType:
    if torch.compiler.is_compiling():
        _has_package(*options)
    package = _packages.get(options)
    return _load(options) if package is None else package


@torch.compiler.assume_constant_result
def _has_package(*options: Any) -> bool:
    """Called, not traced, by torch.compile: it cannot trace how a package is built, but can trace into it."""
    return _load(options) is not None


def _load(options: Options) -> ModuleType:
    # The compiler is needed only here.
    from gdngen.mixer.packages import load
    from gdngen.mixer.specs import Convolution, Gate, RowNorm

    kind, *values = options
    member: Any = {"Convolution": Convolution, "Gate": Gate, "RowNorm": RowNorm}[kind]
    with _loading:
        if options not in _packages:
            _packages[options] = load(member(**dict(zip(member.model_fields, values, strict=True))))
        return _packages[options]


# ------------------------------------------------------------------------------------------------ row-wise


@explain_keywords
def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dim: x [..., D], the result like x or of output_dtype."""
    _rows("x", x)
    package = _package("RowNorm", "l2", "none", "none", False, False, False)
    call = package.Call({"x": x}, _epsilon(eps), None, _output_dtype(output_dtype))
    (o,) = package.run(call)
    return o


@explain_keywords
def rms_norm_gated(
    x: Tensor, g: Tensor, weight: Tensor | None, bias: Tensor | None, activation: str = "swish",
    residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False, eps: float = 1e-6, *,
    norm_before_gate: bool = True, weight_offset: float = 0.0,
) -> Any:  # fmt: skip
    """RMS norm over the last dim, times a gate: x' rsqrt(mean(x'^2) + eps) weight + bias, x' = x + residual.

    x, g, residual [..., D]; weight, bias [D] or None.  The gate is silu(g) ("swish", "silu") or sigmoid(g) ("sigmoid").
    norm_before_gate False: x' silu(g) is normalised, as in Mamba-2.  weight_offset 1: the weight is 1 + weight.
    prenorm: the result is (o, x'); x' has the residual's dtype, float32 with residual_in_fp32.
    """
    check_switches(prenorm=prenorm, residual_in_fp32=residual_in_fp32, norm_before_gate=norm_before_gate)
    _rows("x", x)
    _expect("g", g, "like x", tuple(x.shape), FLOATS, x.device, "There is one gate per element of x.")
    D = x.shape[-1]
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            _expect(name, tensor, "[D]", (D,), FLOATS, x.device, "It has one entry per channel.")
    if activation not in GATES:
        raise _wrong("activation", _describe(activation), _either(tuple(GATES)), "There is no other gate.")
    if weight_offset not in (0, 1) or (weight_offset and weight is None):
        raise _wrong("weight_offset", repr(weight_offset), "0 or, with a weight, 1", "The weight is 1 + weight then.")
    if residual is not None:
        _expect("residual", residual, "like x", tuple(x.shape), FLOATS, x.device)
        residual = residual.float() if residual_in_fp32 else residual
    kind: Any = "none" if weight is None else "one_plus" if weight_offset else "plain"
    chosen = (GATES[activation], kind, bias is not None, residual is not None, not norm_before_gate)
    package = _package("RowNorm", "rms", *chosen)
    given = {"x": x, "g": g, "weight": weight, "bias": bias, "residual": residual}
    inputs = {name: given[name] for name in package.INPUTS}
    found = package.run(package.Call(inputs, _epsilon(eps)))
    if not prenorm:
        return found[0]
    return tuple(found) if residual is not None else (found[0], x.float() if residual_in_fp32 else x)


@explain_keywords
def fused_gdn_gate(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, output_dtype: torch.dtype = torch.float32
) -> Tensor:
    """The softplus gate by itself (section 3 of docs/operators.md): -exp(A_log) * softplus(g + dt_bias).

    g [..., HV]; A_log [HV]; dt_bias [HV] or None.  Errors: ArgumentError.
    """
    return _gate("scalar", g, A_log, dt_bias, None, output_dtype)


@explain_keywords
def fused_kda_gate(
    g: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None, lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """The gate per key channel by itself (section 3 of docs/operators.md): softplus, or with lower_bound bounded.

    g [..., HV, K]; A_log [HV], with lower_bound also None (a rate of 1); dt_bias [HV, K], [HV * K] or None.
    Errors: ArgumentError.
    """
    return _gate("key", g, A_log, dt_bias, lower_bound, output_dtype)


@explain_keywords
def sigmoid_beta(b: Tensor, allow_neg_eigval: bool = False, output_dtype: torch.dtype | None = None) -> Tensor:
    """The write strength by itself (section 3 of docs/operators.md): sigmoid(b), twice that with allow_neg_eigval.

    b [..., HV], the result like it or of output_dtype.  Errors: ArgumentError.
    """
    check_switches(allow_neg_eigval=allow_neg_eigval)
    _rows("b", b)
    package = _package("Gate", "sigmoid2" if allow_neg_eigval else "sigmoid", False)
    return package.run(package.Call({"x": b}, 0.0, None, _output_dtype(output_dtype)))[0]


def _gate(
    kind: str, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None, dtype: Any
) -> Tensor:
    """The numbers of a head are those of its channels."""
    A_log, dt_bias, lower_bound = check_gate(kind, g, A_log, dt_bias, lower_bound)
    heads = g.shape[-1:] if kind == "scalar" else g.shape[-2:]
    x = g if kind == "scalar" else g.flatten(-2)
    _rows("g", x)
    A_log = A_log if kind == "scalar" else A_log[:, None].expand(heads).flatten()
    package = _package("Gate", "softplus" if lower_bound is None else "bounded", dt_bias is not None)
    given = {"x": x, "A_log": A_log, "dt_bias": None if dt_bias is None else dt_bias.flatten()}
    inputs = {name: given[name] for name in package.INPUTS}
    return package.run(package.Call(inputs, lower_bound or 0.0, None, _output_dtype(dtype)))[0].view(g.shape)


def _rows(name: str, x: Any) -> None:
    if not isinstance(x, Tensor) or not _is_dense(x) or x.dim() < 1 or x.dtype not in FLOATS:
        raise _wrong(name, _describe(x), f"{_either(FLOATS)} [..., D]", "Pass a dense tensor with its channels last.")
    if not 1 <= x.shape[-1] <= MAX_CHANNELS:
        advice = "A row is held in registers whole."
        raise _wrong(name, f"D = {x.shape[-1]} channels", f"1 <= D <= {MAX_CHANNELS}", advice)


def _epsilon(eps: Any) -> float:
    number = _number("eps", eps)
    if not 0 <= number < float("inf"):
        raise _wrong("eps", number, "a finite number of at least 0", "1e-6 is usual.")
    return number


def _output_dtype(dtype: Any) -> torch.dtype | None:
    if dtype is not None and dtype not in FLOATS:
        raise _wrong("output_dtype", dtype, f"{_either(FLOATS)} or None", "None gives the dtype of x.")
    return dtype


# ------------------------------------------------------------------------------------------------ convolution


@explain_keywords
def causal_conv1d(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, residual: Tensor | None = None,
    initial_state: Tensor | None = None, output_final_state: bool | None = False, activation: str | None = None,
    backend: str | None = "triton", cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None, cp_context: object = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(o, final_state): each channel is convolved with its W taps over its own and the W - 1 tokens before.

    x, residual, o [B, T, D], o = activation(conv(x) + bias) + residual; weight [D, W] (or [D, 1, W]); bias [D];
    activation "silu", "swish" or None.
    initial_state: the tokens before the first one, [N, D, W] as in flash-linear-attention or [N, D, W - 1], the latest
    last; final_state has as many columns (W without an initial one) and the dtype of x; None unless asked for.
    cu_seqlens: int32 or int64 [N + 1] with B = 1, packed sequences; rows past the last offset are 0.
    backend, cu_seqlens_cpu and chunk_indices are accepted and not needed; cp_context must be None.
    """
    check_switches(output_final_state=output_final_state)
    if cp_context is not None:
        raise _wrong("cp_context", type(cp_context).__name__, "None", "Sequences are not split over GPUs here.")
    kind = _activation(activation)
    if not isinstance(x, Tensor) or not _is_dense(x) or x.dim() != 3 or x.dtype not in FLOATS or x.shape[-1] < 1:
        advice = "Channels are last; causal_conv1d_fn takes them before the tokens."
        raise _wrong("x", _describe(x), f"{_either(FLOATS)} [B, T, D]", advice)
    weight = _weight(weight, bias, x.shape[2], x)
    if residual is not None:
        _expect("residual", residual, "[B, T, D]", tuple(x.shape), FLOATS, x.device)
    N = x.shape[0] if cu_seqlens is None else _offsets(cu_seqlens, x)
    width: Any = weight.shape[1]
    columns = width
    if initial_state is not None:
        columns = _columns("initial_state", initial_state, (N, x.shape[2]), width, x)
    package = _package("Convolution", width, bias is not None, kind, residual is not None, columns)
    given = {"x": x, "weight": weight, "bias": bias, "residual": residual, "h0": initial_state}
    inputs = {name: given[name] for name in package.INPUTS}
    offsets = None if cu_seqlens is None else cu_seqlens.contiguous()
    return package.run(package.Call(inputs, 0.0, offsets, None, bool(output_final_state)))


@explain_keywords
def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None, return_final_states: bool = False, final_states_out: Tensor | None = None,
    activation: str | None = None, *, cu_seqlens: Tensor | None = None,
) -> Any:  # fmt: skip
    """causal_conv1d with the arguments of the causal-conv1d package: x and the result [B, D, T].

    x is read in place where channels lie side by side (a transposed [B, T, D]).  initial_states and final states are
    [N, D, W - 1]; with return_final_states the result is (o, final states), which final_states_out receives too.
    """
    if not isinstance(x, Tensor) or not _is_dense(x) or x.dim() != 3:
        raise _wrong("x", _describe(x), "[B, D, T]", "Channels come before the tokens; causal_conv1d has them last.")
    if seq_idx is not None:
        advice = "Pass the offsets of the packed sequences in cu_seqlens."
        raise _wrong("seq_idx", _describe(seq_idx), "None", advice)
    if initial_states is None and return_final_states and isinstance(weight, Tensor) and weight.dim() > 1:
        N = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        initial_states = x.new_zeros(N, x.shape[1], weight.shape[-1] - 1)
    o, final = causal_conv1d(
        x.transpose(1, 2), weight, bias, None, initial_states, return_final_states, activation, cu_seqlens=cu_seqlens
    )
    if not return_final_states:
        return o.transpose(1, 2)
    if final_states_out is not None:
        final = final_states_out.copy_(final)  # type: ignore[arg-type]
    return o.transpose(1, 2), final


@explain_keywords
def causal_conv1d_update(
    x: Tensor, cache: Tensor | None = None, residual: Tensor | None = None, weight: Tensor | None = None,
    bias: Any = None, activation: str | None = None, *, conv_state: Tensor | None = None,
    cache_seqlens: Tensor | None = None, conv_state_indices: Tensor | None = None,
) -> Any:  # fmt: skip
    """The convolution's next tokens; the window is moved on in place.  Without gradients.

    As in flash-linear-attention, (o, cache): x [N, T, D], [1, N, D] or [N, D]; cache [N, D, W] or [N, D, W - 1].
    As in causal-conv1d, o: called as (x, conv_state, weight, bias, activation) or with conv_state: x [B, D] or
    [B, D, T], conv_state [.., D, L] with L >= W - 1; conv_state_indices [B] says which state belongs to a sequence,
    and a negative one that the sequence is padding (o is 0, no state changes).
    """
    if isinstance(bias, str) or (weight is None and isinstance(residual, Tensor) and conv_state is None):
        residual, weight, bias, activation = None, residual, weight, bias if isinstance(bias, str) else activation
        conv_state, cache = cache, None
    elif isinstance(weight, Tensor) and weight.dim() == 1 and conv_state is None:
        residual, weight, bias = None, residual, weight
        conv_state, cache = cache, None
    if cache_seqlens is not None:
        advice = "The window is kept in order, the latest token last; leave it out."
        raise _wrong("cache_seqlens", _describe(cache_seqlens), "None", advice)
    if conv_state is None:
        if conv_state_indices is not None:
            raise _wrong("conv_state_indices", "indices without conv_state", "None", "Pass the states in conv_state.")
        return _update_cache(x, cache, residual, weight, bias, activation)
    if cache is not None or residual is not None:
        raise _wrong("conv_state", "a state beside cache or residual", "one convention", "Pass x, conv_state, weight.")
    if not isinstance(x, Tensor) or not _is_dense(x) or x.dim() not in (2, 3):
        raise _wrong("x", _describe(x), "[B, D] or [B, D, T]", "Channels come before the tokens.")
    tokens = (x.unsqueeze(2) if x.dim() == 2 else x).transpose(1, 2)
    o = _update(tokens, "conv_state", conv_state, None, weight, bias, activation, conv_state_indices).transpose(1, 2)
    return o.squeeze(2) if x.dim() == 2 else o


def _update_cache(
    x: Tensor, cache: Any, residual: Tensor | None, weight: Any, bias: Any, activation: Any
) -> tuple[Tensor, Tensor]:
    if not isinstance(x, Tensor) or not _is_dense(x) or x.dim() not in (2, 3):
        raise _wrong("x", _describe(x), "[N, T, D], [1, N, D] or [N, D]", "Channels are last.")
    if not isinstance(cache, Tensor) or not _is_dense(cache) or cache.dim() != 3:
        raise _wrong("cache", _describe(cache), "[N, D, W]", "It is what causal_conv1d returned as final_state.")
    N, shape = cache.shape[0], x.shape
    if residual is not None:
        _expect("residual", residual, "like x", tuple(shape), FLOATS, x.device)
    one_each = x.dim() == 2 or (shape[0] != N and shape[0] == 1 and shape[1] == N)
    tokens, more = (y if y is None or not one_each else y.reshape(-1, 1, shape[-1]) for y in (x, residual))
    assert tokens is not None
    return _update(tokens, "cache", cache, more, weight, bias, activation, None).reshape(shape), cache


def _update(
    x: Tensor, name: str, state: Tensor, residual: Tensor | None, weight: Any, bias: Any, activation: Any,
    indices: Tensor | None,
) -> Tensor:  # fmt: skip
    """Check and run one update of x [B, T, D]."""
    kind = _activation(activation)
    if x.dtype not in FLOATS or x.shape[2] < 1:
        raise _wrong("x", _describe(x), _either(FLOATS), "Cast it: x.to(torch.bfloat16).")
    B, _, D = x.shape
    weight = _weight(weight, bias, D, x)
    width: Any = weight.shape[1]
    rows = state.shape[0] if isinstance(state, Tensor) and indices is not None and state.dim() == 3 else B
    _columns(name, state, (rows, D), width, x, at_least=True)
    if indices is not None:
        _expect("conv_state_indices", indices, "[B]", (B,), OFFSETS, x.device, "It has one entry per sequence.")
    package = _package("Convolution", width, bias is not None, kind, residual is not None, width - 1)
    arguments = (x, state, weight, bias, residual, indices)
    needs = torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in arguments)
    if needs and (state.requires_grad or package.dispatch.are_kernels_for(x)):
        advice = "Call it under torch.no_grad(), or causal_conv1d with initial_state for gradients."
        raise _wrong("x", "an input that requires grad", "none: the window is changed in place", advice)
    return package.update(*arguments)


def _activation(activation: Any) -> Any:
    if (activation is not None and not isinstance(activation, str)) or activation not in ACTIVATIONS:
        raise _wrong("activation", _describe(activation), "silu, swish or None", "Apply any other to the result.")
    return ACTIVATIONS[activation]


def _weight(weight: Any, bias: Any, D: int, x: Tensor) -> Tensor:
    """Check weight and bias; the weight as [D, W]."""
    if isinstance(weight, Tensor) and _is_dense(weight) and weight.dim() == 3 and weight.shape[1] == 1:
        weight = weight.squeeze(1)
    fits = isinstance(weight, Tensor) and _is_dense(weight) and weight.dim() == 2 and weight.shape[1] in WIDTHS
    if not fits:
        advice = "Each channel has its own 2 to 4 taps, the latest token's last."
        raise _wrong("weight", _describe(weight), f"{_either(FLOATS)} [D, W] with W of {_either(WIDTHS)}", advice)
    _expect("weight", weight, "[D, W]", (D, weight.shape[1]), FLOATS, x.device, "It has one row per channel of x.")
    if bias is not None:
        _expect("bias", bias, "[D]", (D,), FLOATS, x.device, "It has one entry per channel.")
    return weight


def _offsets(cu_seqlens: Any, x: Tensor) -> int:
    """Check the offsets of packed sequences; the number of these."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dim() != 1 or cu_seqlens.dtype not in OFFSETS:
        advice = "Pass the N + 1 offsets of the packed sequences as one tensor: a cumulative sum that starts with 0."
        raise _wrong("cu_seqlens", _describe(cu_seqlens), f"{_either(OFFSETS)} [N + 1]", advice)
    if cu_seqlens.shape[0] < 1:
        raise _wrong("cu_seqlens", "0 offsets", "N + 1 of them", "No sequence at all is the single offset 0.")
    if cu_seqlens.device != x.device:
        advice = f"Move it once, outside the loop: cu_seqlens.to({str(x.device)!r})."
        raise _wrong("cu_seqlens", f"a tensor on {cu_seqlens.device}", f"one on {x.device}, where x is", advice)
    if x.shape[0] != 1:
        advice = "Pack the sequences along T: x.reshape(1, B * T, D), or leave cu_seqlens out for equal lengths."
        raise _wrong("cu_seqlens", f"B = {x.shape[0]}", "B = 1 with packed sequences", advice)
    if _debugging() or not cu_seqlens.is_cuda:
        check_offsets(cu_seqlens, x.shape[1])
    return cu_seqlens.shape[0] - 1


def _columns(name: str, state: Any, rows: tuple[int, int], width: int, x: Tensor, at_least: bool = False) -> int:
    """Check a window; how many tokens it holds."""
    columns = state.shape[2] if isinstance(state, Tensor) and _is_dense(state) and state.dim() == 3 else width
    if columns < width - 1 or (columns > width and not at_least):
        expected = f"at least {width - 1} columns" if at_least else f"{width - 1} or {width} columns"
        raise _wrong(name, f"{columns} columns", expected, "The window holds the tokens before, the latest last.")
    advice = "There is one window of D channels per sequence."
    _expect(name, state, "[N, D, columns]", (*rows, columns), FLOATS, x.device, advice)
    return columns
