"""Argument checks: from what an operator was called with to Options (which member is asked for) and Call (the data).

Everything here runs on every call, before any launch: conditions are cheap, messages are made only when one fails, and
nothing is read back from a GPU.  Shapes are named as everywhere: B batch, T tokens, H query/key heads, HV value heads,
K key dim, V value dim, N sequences.
"""

import os
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
OFFSETS = (torch.int32, torch.int64)
CHUNKS = (16, 32, 64, 128)
SHORT_CHUNKS = (1, 2, 4, 8)  # what is computed does not depend on the length: these are computed in chunks of CHUNKS[0]
FEATURE_MAPS = ("identity", "elu1")
MAX_KEY_DIM = 256
TOKEN_ADVICE = "Tensors are batch, tokens, heads, channels, on one device."
DENSE_ADVICE = "Pass a dense tensor: sequences of several lengths follow each other, their offsets in cu_seqlens."
SWITCHES = (
    "output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel use_beta_sigmoid_in_kernel allow_neg_eigval "
    "state_v_first normalize"
).split()
GATE_SHAPES = {"scalar": "[B, T, HV]", "key": "[B, T, HV, K]", "value": "[B, T, HV, V]"}
BIAS_SHAPES = {"scalar": "[HV]", "key": "[HV, K] or [HV * K]", "value": "[HV, V] or [HV * V]"}

# What the caller knows each input as, where it is not the graph's own name.
NAMES = {name: name for name in ("q", "k", "v", "g", "gk", "gv")}
KDA_NAMES = NAMES | {"gk": "g"}
MAMBA2_NAMES = NAMES | {"q": "C", "k": "B", "v": "x"}


class ArgumentError(ValueError):
    """A call passed an argument that the operator cannot take; the message says which, why and what to do."""


class Options(NamedTuple):
    """The member a call asks for, in the field names of Spec.  None: the call does not say, so any package will do."""

    rule: str
    gate: tuple[str, ...]
    beta: str
    key_dim: int
    value_dim: int
    state_v_first: bool = False
    fused_gate: str = "none"
    lower_bound: float | None = None
    beta_logits: bool = False
    neg_eigval: bool = False
    qk_norm: bool = False
    normalize: bool = False
    feature_map: str | None = None
    chunk: int | None = None

    def said(self) -> dict[str, Any]:
        """What the call does say: keyword arguments for Spec."""
        return {name: value for name, value in zip(self._fields, self, strict=True) if value is not None}


@dataclass(slots=True)
class Call:
    """One checked call.  ``inputs`` holds what the member reads, under the graph's names, and h0 (None: zeros).

    q, k [B, T, H, K] and v [B, T, HV, V] have a contiguous last dim; h0 (and z0) are contiguous in the caller's layout;
    A_log [HV] and dt_bias [HV] or [HV, K or V] (None: absent) are contiguous; every other input has any strides.
    """

    operator: str
    inputs: dict[str, Tensor | None]
    scale: float
    cu_seqlens: Tensor | None
    output_final_state: bool
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int
    device: torch.device
    dt_limit: tuple[float, float] = (0.0, float("inf"))


def prepare(
    form: str, rule: str, q: Tensor, k: Tensor, v: Tensor, *,
    g: Tensor | None = None, gk: Tensor | None = None, gv: Tensor | None = None, g_gamma: Tensor | None = None,
    beta: Tensor | None = None, scale: float | None = None, initial_state: Any = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, lower_bound: float | None = None, use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cp_context: object = None, chunk_size: int | None = None, normalize: bool = False, feature_map: str | None = None,
    names: dict[str, str] = NAMES,
) -> tuple[Options, Call]:  # fmt: skip
    """Check one call of a member without dt; ``form`` is "chunk" or "recurrent", ``rule`` "delta" or "additive"."""
    switches: tuple[Any, ...] = (
        output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        state_v_first, normalize,
    )  # fmt: skip
    for switch in switches:
        if switch is not True and switch is not False:
            check_switches(**dict(zip(SWITCHES, switches)))
    call = _tokens(form, q, k, v, names)
    if cu_seqlens is not None:
        _sequences(call, cu_seqlens)
    if scale is not None:
        call.scale = _scale(scale)
    if g_gamma is not None:
        g = _fixed_decay(call, g, g_gamma, use_gate_in_kernel)
    gate = _gates(call, g, gk, gv, names)
    if use_gate_in_kernel:
        lower_bound = _fuse_gate(call, gate, A_log, dt_bias, lower_bound)
    elif A_log is not None or dt_bias is not None or lower_bound is not None:
        raise _unfused(A_log, dt_bias, lower_bound)
    strength = _write_strength(call, rule, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    _states(call, initial_state, state_v_first, normalize)
    call.output_final_state = bool(output_final_state)
    if cp_context is not None or chunk_size not in CHUNKS or normalize or feature_map is not None:
        chunk_size = _rarities(gate, cp_context, chunk_size, normalize, feature_map)
    fused_gate = "none" if not use_gate_in_kernel else "softplus" if lower_bound is None else "bounded"
    return Options(  # by position: keywords would cost a microsecond more
        rule, gate, strength, call.K, call.V, bool(state_v_first), fused_gate, lower_bound,
        bool(use_beta_sigmoid_in_kernel), bool(allow_neg_eigval), bool(use_qk_l2norm_in_kernel), bool(normalize),
        feature_map, chunk_size,
    ), call  # fmt: skip


def prepare_mamba2(
    form: str, x: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, *, dt_bias: Tensor | None = None,
    D: Tensor | None = None, dt_limit: tuple[float, float] | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None,
) -> tuple[Options, Call]:  # fmt: skip
    """Check one call of Mamba-2: C, B and x are q, k and v; dt feeds both the gate and the write strength."""
    check_switches(output_final_state=output_final_state)
    call = _tokens(form, C, B, x, MAMBA2_NAMES)
    call.scale = 1.0
    if cu_seqlens is not None:
        _sequences(call, cu_seqlens)
    _expect("dt", dt, "[B, T, HV]", (call.B, call.T, call.HV), FLOATS, call.device)
    call.inputs["dt"] = dt
    _gate_parameters(call, "scalar", A_log, dt_bias, None)
    if dt_limit is not None:
        call.dt_limit = _dt_limit(dt_limit)
    if D is not None:
        per_channel = _rank(D) == 2
        shape = (call.HV, call.V) if per_channel else (call.HV,)
        _expect("D", D, "[HV, V]" if per_channel else "[HV]", shape, FLOATS, call.device)
    _states(call, initial_state, None, False)
    call.output_final_state = bool(output_final_state)
    return Options("additive", ("scalar",), "dt", call.K, call.V), call


def _tokens(form: str, q: Tensor, k: Tensor, v: Tensor, names: dict[str, str]) -> Call:
    """Check q, k and v against each other and start the Call with their sizes.

    The dtype of v is the operator's: q and k of others are cast to it.
    """
    if not isinstance(q, Tensor) or not _is_dense(q) or q.dim() != 4 or q.dtype not in FLOATS:
        advice = f"Cast it: {names['q']}.to(torch.bfloat16)." if _rank(q) == 4 else TOKEN_ADVICE
        advice = advice if not isinstance(q, Tensor) or _is_dense(q) else DENSE_ADVICE
        raise _wrong(names["q"], _describe(q), f"{_either(FLOATS)} [B, T, H, K]", advice)
    B, T, H, K = shape = q.shape
    device = q.device
    _expect(names["k"], k, "[B, T, H, K]", shape, FLOATS, device, TOKEN_ADVICE)
    if not isinstance(v, Tensor) or not _is_dense(v) or v.dim() != 4:
        advice = TOKEN_ADVICE if not isinstance(v, Tensor) or _is_dense(v) else DENSE_ADVICE
        raise _wrong(names["v"], _describe(v), f"{_either(FLOATS)} [B, T, HV, V]", advice)
    _, _, HV, V = v.shape
    K, V = int(K), int(V)  # traced with symbolic sizes, too: they tell members apart
    _expect(names["v"], v, "[B, T, HV, V]", (B, T, HV, V), FLOATS, device, TOKEN_ADVICE)
    if H < 1 or HV < 1 or HV % H:
        advice = "Give every query/key head the same number of value heads, at least one."
        raise _wrong(names["v"], f"HV = {HV} heads beside H = {H} in {names['q']}", "a multiple of H", advice)
    if not 1 <= K <= MAX_KEY_DIM:
        advice = "Split larger heads into several of at most 256."
        raise _wrong(names["q"], f"head dim K = {K}", f"1 <= K <= {MAX_KEY_DIM}", advice)
    if V < 1:
        raise _wrong(names["v"], f"head dim V = {V}", "V >= 1", "Pass values with at least one channel.")
    dtype = v.dtype
    q, k = q if q.dtype == dtype else q.to(dtype), k if k.dtype == dtype else k.to(dtype)
    inputs: dict[str, Tensor | None] = {"q": _readable(q), "k": _readable(k), "v": _readable(v)}
    return Call(form, inputs, K**-0.5, None, False, B, T, H, HV, K, V, B, device)


def _readable(tensor: Tensor) -> Tensor:
    """Kernels read q, k and v in place whenever the last dim is contiguous; any other strides are copied."""
    return tensor if tensor.is_contiguous() or tensor.stride(-1) == 1 else tensor.contiguous()


def _sequences(call: Call, cu_seqlens: Tensor) -> None:
    if _rank(cu_seqlens) != 1 or cu_seqlens.dtype not in OFFSETS:
        advice = "Pass the N + 1 offsets of the packed sequences as one tensor: a cumulative sum that starts with 0."
        raise _wrong("cu_seqlens", _describe(cu_seqlens), f"{_either(OFFSETS)} [N + 1]", advice)
    if cu_seqlens.shape[0] < 1:
        raise _wrong("cu_seqlens", "0 offsets", "N + 1 of them", "No sequence at all is the single offset 0.")
    if cu_seqlens.device != call.device:
        advice = f"Move it once, outside the loop: cu_seqlens.to({str(call.device)!r})."
        raise _wrong("cu_seqlens", f"a tensor on {cu_seqlens.device}", f"one on {call.device}, where q is", advice)
    if call.B != 1:
        advice = "Pack the sequences along T: x.reshape(1, B * T, ...), or leave cu_seqlens out for equal lengths."
        raise _wrong("cu_seqlens", f"B = {call.B}", "B = 1 with packed sequences", advice)
    if _debugging() or not cu_seqlens.is_cuda:
        check_offsets(cu_seqlens, call.T)
    call.cu_seqlens = cu_seqlens if cu_seqlens.is_contiguous() else cu_seqlens.contiguous()
    call.N = cu_seqlens.shape[0] - 1


def is_traced() -> bool:
    """Whether torch records operations, or computes without contents, instead of just computing."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def is_transformed() -> bool:
    """Whether a transform of torch.func is at work: vmap, grad, vjp, ..."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def _debugging() -> bool:
    level = os.environ.get("GDNGEN_DEBUG") or "0"
    if level not in ("0", "1", "2", "3", "4"):
        raise _wrong("GDNGEN_DEBUG", f"{level!r} in the environment", "0 to 4", "1 has the offsets checked.")
    return level != "0"


def check_offsets(cu_seqlens: Tensor, T: int) -> None:
    """Read the offsets themselves; impossible while tracing, and under graph capture it would break the capture."""
    if is_traced() or type(cu_seqlens) is not Tensor:
        return
    if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0:
        raise _wrong("cu_seqlens", f"first offset {offsets[0]}", "0", "Offsets start at the first token.")
    for index, (start, end) in enumerate(pairwise(offsets)):
        if end < start:
            got = f"offset {end} at index {index + 1} after {start}"
            raise _wrong("cu_seqlens", got, "offsets that never decrease", "Use the cumulative sum of the lengths.")
    if offsets[-1] > T:
        advice = "Check that the offsets belong to these tensors."
        raise _wrong("cu_seqlens", f"last offset {offsets[-1]}", f"at most T = {T}", advice)


def _gates(
    call: Call, g: Tensor | None, gk: Tensor | None, gv: Tensor | None, names: dict[str, str]
) -> tuple[str, ...]:
    """Check the gates that are given and put them into the inputs; several together multiply their decays."""
    gate: tuple[str, ...] = ()
    shape = (call.B, call.T, call.HV)
    if g is not None:
        advice = "A per-key gate goes into gk, a per-value gate into gv." if _rank(g) == 4 else ""
        _expect(names["g"], g, GATE_SHAPES["scalar"], shape, FLOATS, call.device, advice)
        call.inputs["g"], gate = g, ("scalar",)
    if gk is not None:
        advice = "A gate per value head goes into g of chunk_gated_delta_rule." if _rank(gk) == 3 else ""
        _expect(names["gk"], gk, GATE_SHAPES["key"], (*shape, call.K), FLOATS, call.device, advice)
        call.inputs["gk"], gate = gk, (*gate, "key")
    if gv is not None:
        _expect(names["gv"], gv, GATE_SHAPES["value"], (*shape, call.V), FLOATS, call.device)
        call.inputs["gv"], gate = gv, (*gate, "value")
    return gate


def _fixed_decay(call: Call, g: Tensor | None, g_gamma: Tensor, is_raw: bool) -> Tensor:
    """The scalar gate that g_gamma [HV] stands for."""
    if g is not None or is_raw:
        got = "a tensor beside g" if g is not None else "a tensor with use_gate_in_kernel=True"
        advice = "It is the decay itself, the same for all tokens: pass one or the other, or g + g_gamma as g."
        raise _wrong("g_gamma", got, "None, or the only scalar gate", advice)
    _expect("g_gamma", g_gamma, "[HV]", (call.HV,), FLOATS, call.device, "It has one decay per value head.")
    return g_gamma.expand(call.B, call.T, call.HV)


def _fuse_gate(
    call: Call, gate: tuple[str, ...], A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> float | None:
    """Turn the one gate that is given into the raw input ``a``; return the checked lower bound."""
    if len(gate) != 1:
        advice = "Pass the raw gate input alone, or compute the gates in the model and leave use_gate_in_kernel False."
        raise _wrong("use_gate_in_kernel", f"True with gates {' + '.join(gate) or 'none'}", "exactly one gate", advice)
    kind = gate[0]
    call.inputs["a"] = call.inputs.pop({"scalar": "g", "key": "gk", "value": "gv"}[kind])
    lower_bound = check_bound(lower_bound)
    _gate_parameters(call, kind, A_log, dt_bias, lower_bound)
    return lower_bound


def check_bound(lower_bound: float | None) -> float | None:
    if lower_bound is None:
        return None
    bound = _number("lower_bound", lower_bound)
    if not -5 <= bound < 0:
        advice = "Published models use -5; None gives the softplus gate."
        raise _wrong("lower_bound", bound, "a bound in [-5, 0)", advice)
    return bound


def _gate_parameters(
    call: Call, kind: str, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> None:
    sizes = {"scalar": (call.HV,), "key": (call.HV, call.K), "value": (call.HV, call.V)}[kind]
    call.inputs["A_log"], call.inputs["dt_bias"] = _parameters(kind, sizes, A_log, dt_bias, lower_bound, call.device)


def _parameters(
    kind: str, sizes: tuple[int, ...], A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None,
    device: torch.device,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """A_log [HV] (dims of size 1 around it are dropped: checkpoints store [1, 1, HV, 1]) and the optional dt_bias.

    A bounded gate may do without A_log: its rate is then 1.
    """
    HV = sizes[0]
    if A_log is None:
        if lower_bound is None:
            advice = "The gate computed in the operator is -exp(A_log) * softplus(a + dt_bias)."
            raise _wrong("A_log", "None", f"{_either(FLOATS)} [HV] = [{HV}]", advice)
        A_log = torch.zeros(HV, device=device)
    if (_rank(A_log) or 0) > 1 and A_log.numel() == HV == max(A_log.shape):
        A_log = A_log.reshape(HV)
    _expect("A_log", A_log, "[HV]", (HV,), FLOATS, device, "It has one entry per value head.")
    if dt_bias is not None:
        if len(sizes) == 2 and _rank(dt_bias) == 1 and dt_bias.numel() == sizes[0] * sizes[1]:
            dt_bias = dt_bias.reshape(sizes)
        _expect("dt_bias", dt_bias, BIAS_SHAPES[kind], sizes, FLOATS, device, "It has one entry per gate channel.")
        dt_bias = dt_bias.contiguous()
    return A_log.contiguous(), dt_bias


def check_gate(
    kind: str, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> tuple[Tensor, Tensor | None, float | None]:
    """Check the arguments of a gate that is computed by itself: g [..., HV], or [..., HV, K] per key channel."""
    letters, rank = {"scalar": ("[..., HV]", 1), "key": ("[..., HV, K]", 2)}[kind]
    if not isinstance(g, Tensor) or not _is_dense(g) or g.dim() < rank or g.dtype not in FLOATS:
        raise _wrong("g", _describe(g), f"{_either(FLOATS)} {letters}", "Pass the raw gate input, a dense tensor.")
    lower_bound = check_bound(lower_bound)
    A_log, dt_bias = _parameters(kind, tuple(g.shape[-rank:]), A_log, dt_bias, lower_bound, g.device)
    return A_log, dt_bias, lower_bound


def _write_strength(call: Call, rule: str, beta: Tensor | None, logits: bool, negative: bool) -> str:
    """Put beta, or its logits b, into the inputs and return which kind it is."""
    if negative and not logits:
        advice = "2 * sigmoid is applied to logits: pass them in beta with use_beta_sigmoid_in_kernel=True."
        raise _wrong("allow_neg_eigval", "True without logits", "use_beta_sigmoid_in_kernel=True beside it", advice)
    if beta is None:
        if logits:
            advice = "Pass the logits in beta, or leave use_beta_sigmoid_in_kernel False."
            raise _wrong("beta", "None with use_beta_sigmoid_in_kernel=True", "logits [B, T, HV]", advice)
        return "none"
    per_value = _rank(beta) == 4
    shape: tuple[int, ...] = (call.B, call.T, call.HV)
    letters = "[B, T, HV, V]" if per_value else "[B, T, HV]"
    advice = "One write strength per value head is [B, T, HV], one per value channel [B, T, HV, V]."
    _expect("beta", beta, letters, (*shape, call.V) if per_value else shape, FLOATS, call.device, advice)
    if per_value and rule == "delta" and call.operator == "chunk":
        advice = "The delta rule with one per value channel has no chunk form: call the fused_recurrent_ operator."
        raise _wrong("beta", "one write strength per value channel [B, T, HV, V]", "[B, T, HV]", advice)
    call.inputs["b" if logits else "beta"] = beta
    return "value" if per_value else "head"


def _states(call: Call, state: Any, v_first: bool | None, normalize: bool) -> None:
    """Check the initial state, a pair (S, z) with normalize; ``v_first`` None: the operator has no such keyword."""
    inputs = call.inputs
    if state is None:
        inputs.update({"h0": None, "z0": None} if normalize else {"h0": None})
        return
    N, HV, K, V = call.N, call.HV, call.K, call.V
    if normalize:
        if not isinstance(state, (tuple, list)) or len(state) != 2:
            advice = "With normalize the state is the pair that an earlier call returned as final_state."
            raise _wrong("initial_state", _describe(state), "a pair (S, z [N, HV, K])", advice)
        state, z = state
        if _rank(z) == 4 and z.shape == (N, 1, HV, K):
            z = z.squeeze(1)
        _expect("initial_state[1]", z, "[N, HV, K]", (N, HV, K), FLOATS, call.device, "It is z, the sum of k.")
        inputs["z0"] = z.contiguous()
    letters, shape = ("[N, HV, V, K]", (N, HV, V, K)) if v_first else ("[N, HV, K, V]", (N, HV, K, V))
    fits = isinstance(state, Tensor) and (not _is_dense(state) or state.shape == shape)
    advice = "" if fits else _state_advice(call, state, v_first, normalize)
    _expect("initial_state", state, letters, shape, FLOATS, call.device, advice)
    inputs["h0"] = state.contiguous()


def _state_advice(call: Call, state: Any, v_first: bool | None, normalize: bool) -> str:
    if isinstance(state, (tuple, list)) and not normalize:
        return "A pair (S, z) is the state of normalize=True."
    shape = tuple(getattr(state, "shape", ()))
    if shape == (call.N, call.HV, *((call.K, call.V) if v_first else (call.V, call.K))):
        fix = "transpose it: .transpose(-1, -2)" if v_first is None else f"pass state_v_first={not v_first}"
        return f"This is the transposed layout: {fix}."
    if len(shape) == 4 and shape[0] != call.N:
        return f"There is one state per sequence, and this call has {call.N}."
    return "There is one state matrix per sequence and value head."


def _rarities(gate: tuple[str, ...], cp_context: object, chunk_size: Any, normalize: bool, feature_map: Any) -> Any:
    """Checks that an ordinary call does not need; the length of chunks."""
    if cp_context is not None:
        advice = "Sequences split over GPUs are for gdngen.parallel, which does not exist yet: leave it None."
        raise _wrong("cp_context", type(cp_context).__name__, "None", advice)
    if chunk_size is not None and chunk_size not in CHUNKS + SHORT_CHUNKS:
        raise _wrong("chunk_size", repr(chunk_size), _either(CHUNKS), "64 suits most shapes.")
    if feature_map is not None and feature_map not in FEATURE_MAPS:
        advice = "Apply any other feature map to q and k in the model."
        raise _wrong("feature_map", repr(feature_map), _either(FEATURE_MAPS), advice)
    if normalize and gate not in ((), ("scalar",)):
        advice = "Leave normalize False, or use a scalar gate."
        raise _wrong("normalize", f"True with gates {' + '.join(gate)}", "no gate or a scalar gate", advice)
    return CHUNKS[0] if chunk_size in SHORT_CHUNKS else chunk_size


def _unfused(A_log: object, dt_bias: object, lower_bound: object) -> ArgumentError:
    given = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound}
    name = next(name for name, value in given.items() if value is not None)
    advice = "Pass use_gate_in_kernel=True with the raw gate input in g, or leave it out when g is the gate itself."
    return _wrong(name, f"{_describe(given[name])} without use_gate_in_kernel", "None", advice)


def _dt_limit(limit: Any) -> tuple[float, float]:
    if not isinstance(limit, (tuple, list)) or len(limit) != 2:
        raise _wrong("dt_limit", _describe(limit), "a pair (low, high)", "After the softplus dt is clamped to it.")
    low, high = (_number("dt_limit", bound) for bound in limit)
    if not 0 <= low <= high:
        raise _wrong("dt_limit", (low, high), "0 <= low <= high", "The default (0, inf) clamps nothing.")
    return low, high


def _scale(scale: Any) -> float:
    number = _number("scale", scale)
    if not isfinite(number):
        raise _wrong("scale", number, "a finite number", "None gives K ** -0.5.")
    return number


def check_switches(**switches: Any) -> None:
    """Options that are on or off: True or False (None, 0 and 1 too), and no string, which would always be on."""
    for name, value in switches.items():
        if not (value is None or isinstance(value, int) or type(value).__name__ in ("bool_", "bool")):
            advice = "Strings and tensors are not interpreted; compare them yourself."
            raise _wrong(name, _describe(value), "True or False", advice)


def check_max_num_seqs(cu_seqlens: Any, max_num_seqs: Any) -> None:
    """For a graph theirs takes offsets padded to this many sequences; any number of them can be captured here."""
    if max_num_seqs is None or not isinstance(cu_seqlens, Tensor):
        return
    if cu_seqlens.shape[0] - 1 != max_num_seqs:
        advice = "Pad cu_seqlens with empty sequences at the end, or leave max_num_seqs out."
        got = f"{max_num_seqs!r} with {cu_seqlens.shape[0] - 1} sequences in cu_seqlens"
        raise _wrong("max_num_seqs", got, "the number of sequences", advice)


def _number(name: str, value: Any) -> float:
    if isinstance(value, (float, int, Real)):
        try:
            return float(value)
        except OverflowError:  # an integer beyond what a float holds
            return inf
    advice = "Reading a tensor would wait for the GPU; keep it as a float."
    raise _wrong(name, _describe(value), "a Python number", advice)


def _expect(
    name: str, tensor: Any, letters: str, shape: tuple[int, ...], dtypes: tuple[Any, ...], device: Any, advice: str = ""
) -> None:
    """Raise unless ``tensor`` has that shape, one of those dtypes and that device; ``advice`` is for a wrong shape."""
    if (
        isinstance(tensor, Tensor)
        and _is_dense(tensor)
        and tensor.shape == shape
        and tensor.dtype in dtypes
        and tensor.device == device
    ):
        return
    if not isinstance(tensor, Tensor):
        advice = "Pass a torch.Tensor."
    elif not _is_dense(tensor):
        advice = DENSE_ADVICE
    elif tensor.shape != shape:
        advice = advice or "Check how it was split or reshaped."
    elif tensor.dtype not in dtypes:
        advice = f"Cast it: {name}.to({dtypes[0]})."
    else:
        advice = f"Move it: {name}.to({str(device)!r})."
    raise _wrong(name, _describe(tensor), f"{_either(dtypes)} {letters} = {list(shape)} on {device}", advice)


def _wrong(name: str, got: object, expected: str, advice: str) -> ArgumentError:
    return ArgumentError(f"{name}: got {got}, expected {expected}. {advice}")


def _is_dense(tensor: Tensor) -> bool:
    """Whether it is an ordinary tensor: neither sparse nor nested (the shape of such a one may not be asked for)."""
    return tensor.layout is torch.strided and not tensor.is_nested


def _describe(value: Any) -> str:
    if isinstance(value, Tensor) and not _is_dense(value):
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        return f"a {kind} tensor"
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)} on {value.device}"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"


def _either(choices: tuple[Any, ...]) -> str:
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}" if others else last


def _rank(value: Any) -> int | None:
    return value.dim() if isinstance(value, Tensor) and _is_dense(value) else None
