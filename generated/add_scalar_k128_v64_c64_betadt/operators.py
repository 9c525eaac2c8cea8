"""The public operators.  Section numbers are those of the contract, docs/operators.md of gdngen: what each computes.

Shapes: B batch, T tokens, H query/key heads, HV value heads (a multiple of H), K key dim (at most 256), V value dim,
N sequences (N = B without cu_seqlens).  Everywhere:

- q, k [B, T, H, K] and v [B, T, HV, V]: bfloat16, float16 or float32; read in place when the last dim is contiguous.
  The operator computes in the dtype of v: q and k of another are cast to it.  Gates and write strengths: float32,
  bfloat16 or float16, any strides.  Any other dtype is an error that names the argument.
- scale: a finite number, K ** -0.5 by default.
- initial_state: [N, HV, K, V], or [N, HV, V, K] with state_v_first; float32, bfloat16 or float16.  None: zeros.
- cu_seqlens: int32 or int64 [N + 1] on the tensors' device, with B == 1: tokens cu[n] .. cu[n + 1] - 1 are sequence n.
- result: (o, final_state): o like v; final_state float32, in the layout of initial_state, or None unless asked for.
- cu_seqlens_cpu and chunk_indices are accepted and not needed; cp_context must be None.
- positions and defaults are those of flash-linear-attention; what is here alone comes behind them, by keyword.
- errors: ArgumentError (a ValueError), before any launch, for an argument that does not fit or an option that the
  package was not generated for; KeywordError (a TypeError too) for a keyword that the operator does not have.
"""

import torch
from torch import Tensor

from .arguments import KDA_NAMES, check_bound, check_max_num_seqs, check_switches, prepare, prepare_mamba2
from .composed import run_reversed, run_with_states
from .dispatch import run
from .keywords import explain_keywords

__all__ = [
    "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "chunk_kda",
    "fused_recurrent_kda",
    "chunk_delta_rule",
    "fused_recurrent_delta_rule",
    "chunk_simple_gla",
    "fused_recurrent_simple_gla",
    "chunk_linear_attn",
    "fused_recurrent_linear_attn",
    "chunk_mamba2",
    "recurrent_mamba2",
    "chunk_gdn",
    "fused_recurrent_gdn",
]

States = Tensor | tuple[Tensor, Tensor] | None
Result = tuple[Tensor, States]


@explain_keywords
def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, chunk_indices: Tensor | None = None,
    cp_context: object = None, *, use_gate_in_kernel: bool = False, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, lower_bound: float | None = None, chunk_size: int = 64, gk: Tensor | None = None,
    gv: Tensor | None = None,
) -> Result:  # fmt: skip
    """The delta rule with any gates, in chunks (sections 2 and 4): training and prefill.

    g [B, T, HV] per head, gk [B, T, HV, K] per key, gv [B, T, HV, V] per value: natural-log decays, each may be None;
    several multiply.  beta [B, T, HV]; None: 1.  Work taken over from the model (section 3):

    - use_qk_l2norm_in_kernel: q and k are normalised over K.
    - use_gate_in_kernel: the one gate given is its raw input; A_log [HV], dt_bias [HV] (per key: [HV, K] or [HV * K])
      or None; lower_bound in [-5, 0) chooses the bounded gate, None the softplus one.
    - use_beta_sigmoid_in_kernel: beta holds logits; with allow_neg_eigval the write strength is 2 * sigmoid.

    chunk_size: 16, 32, 64 or 128; shorter ones (1, 2, 4, 8) are computed in chunks of 16.
    q, k [B, T, H, K]; v, o [B, T, HV, V]: bfloat16, float16 or float32.  States, offsets, errors (ArgumentError,
    KeywordError): see the module.
    """
    return run(*prepare(
        "chunk", "delta", q, k, v, g=g, gk=gk, gv=gv, beta=beta, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first, cu_seqlens=cu_seqlens, cp_context=cp_context, chunk_size=chunk_size,
    ))  # fmt: skip


@explain_keywords
def fused_recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, gk: Tensor | None = None, gv: Tensor | None = None,
    beta: Tensor | None = None, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None, dt_bias: Tensor | None = None, use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None, *,
    lower_bound: float | None = None,
) -> Result:  # fmt: skip
    """The delta rule with any gates, token by token (section 2): decode.

    Arguments as in chunk_gated_delta_rule; beta may also be [B, T, HV, V], one write strength per value channel.
    q, k [B, T, H, K]; v, o [B, T, HV, V]: bfloat16, float16 or float32.  States, offsets, errors (ArgumentError,
    KeywordError): see the module.
    """
    return run(*prepare(
        "recurrent", "delta", q, k, v, g=g, gk=gk, gv=gv, beta=beta, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first, cu_seqlens=cu_seqlens,
    ))  # fmt: skip


@explain_keywords
def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    safe_gate: bool = False, lower_bound: float | None = None, disable_recompute: bool = False,
    return_intermediate_states: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, cp_context: object = None, use_graph: bool = False,
    max_num_seqs: int | None = None, *, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    chunk_indices: Tensor | None = None, chunk_size: int = 64,
) -> Result | tuple[Tensor, States, Tensor]:  # fmt: skip
    """Kimi Delta Attention in chunks (sections 2 and 4): the delta rule with a decay per key channel.

    g [B, T, HV, K] natural-log decay, or its raw input with use_gate_in_kernel: then A_log [HV], and dt_bias [HV, K],
    [HV * K] or None; lower_bound in [-5, 0) chooses the bounded gate, for which A_log may be None (a rate of 1).
    beta [B, T, HV] or None (1).  The other options are chunk_gated_delta_rule's.  safe_gate, disable_recompute and
    use_graph are accepted and change nothing: every gate is safe here, what is kept for backward is decided when a
    package is built, and every call can be captured.  With safe_gate, lower_bound may stand beside gates that are
    computed already, whose bound it names.
    return_intermediate_states, without gradients: (o, final_state, states), where states [B, NT, HV, K, V] (V before K
    with state_v_first) in the dtype of v are those that enter each chunk of chunk_size tokens; one call a chunk, and
    cu_seqlens is read on the host unless cu_seqlens_cpu is given.
    q, k [B, T, H, K]; v, o [B, T, HV, V]: bfloat16, float16 or float32.  States, offsets, errors (ArgumentError,
    KeywordError): see the module.
    """
    if safe_gate or use_graph or disable_recompute or return_intermediate_states:
        check_switches(
            safe_gate=safe_gate, use_graph=use_graph, disable_recompute=disable_recompute,
            return_intermediate_states=return_intermediate_states,
        )  # fmt: skip
        if use_graph:
            check_max_num_seqs(cu_seqlens, max_num_seqs)
        if safe_gate and not use_gate_in_kernel:
            check_bound(lower_bound)
            lower_bound = None
    options, call = prepare(
        "chunk", "delta", q, k, v, gk=g, beta=beta, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval, names=KDA_NAMES,
        state_v_first=state_v_first, cu_seqlens=cu_seqlens, cp_context=cp_context, chunk_size=chunk_size,
    )  # fmt: skip
    if return_intermediate_states:
        return run_with_states(options, call, chunk_size, cu_seqlens_cpu)
    return run(options, call)


@explain_keywords
def fused_recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, lower_bound: float | None = None,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """Kimi Delta Attention token by token (section 2): decode.

    Arguments as in chunk_kda; beta may also be [B, T, HV, V], one write strength per value channel.
    q, k [B, T, H, K]; v, o [B, T, HV, V]: bfloat16, float16 or float32.  States, offsets, errors (ArgumentError,
    KeywordError): see the module.
    """
    return run(*prepare(
        "recurrent", "delta", q, k, v, gk=g, beta=beta, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first, cu_seqlens=cu_seqlens, names=KDA_NAMES,
    ))  # fmt: skip


@explain_keywords
def chunk_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, *,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, state_v_first: bool = False,
    chunk_indices: Tensor | None = None, cp_context: object = None, chunk_size: int = 64,
) -> Result:  # fmt: skip
    """DeltaNet in chunks (sections 2 and 4): the delta rule without a gate.

    beta [B, T, HV], its logits with use_beta_sigmoid_in_kernel, or None (1).
    q, k [B, T, H, K]; v, o [B, T, HV, V]: bfloat16, float16 or float32.  States, offsets, errors (ArgumentError,
    KeywordError): see the module.
    """
    return run(*prepare(
        "chunk", "delta", q, k, v, beta=beta, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first, cu_seqlens=cu_seqlens, cp_context=cp_context, chunk_size=chunk_size,
    ))  # fmt: skip


@explain_keywords
def fused_recurrent_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None, *, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    state_v_first: bool = False,
) -> Result:  # fmt: skip
    """DeltaNet token by token (section 2): decode.

    beta [B, T, HV], [B, T, HV, V], logits of either with use_beta_sigmoid_in_kernel, or None (1).
    q, k [B, T, H, K]; v, o [B, T, HV, V]: bfloat16, float16 or float32.  States, offsets, errors (ArgumentError,
    KeywordError): see the module.
    """
    return run(*prepare(
        "recurrent", "delta", q, k, v, beta=beta, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first, cu_seqlens=cu_seqlens,
    ))  # fmt: skip


@explain_keywords
def chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None, scale: float | None = None,
    initial_state: States = None, output_final_state: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, *, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    lower_bound: float | None = None, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    chunk_indices: Tensor | None = None, cp_context: object = None, chunk_size: int = 64, gk: Tensor | None = None,
    gv: Tensor | None = None, beta: Tensor | None = None, normalize: bool = False,
) -> Result:  # fmt: skip
    """The additive rule with any gates, in chunks (sections 2 and 4): gated linear attention.

    Gates and their fused form as in chunk_gated_delta_rule; g_gamma [HV] in place of g is a decay that is the same for
    all tokens.  beta [B, T, HV] or [B, T, HV, V] scales the values, None:
    no write strength.  normalize (no gate or a scalar one) as in chunk_linear_attn.
    q, k [B, T, H, K]; v, o [B, T, HV, V]: bfloat16, float16 or float32.  States, offsets, errors (ArgumentError,
    KeywordError): see the module.
    """
    result = run(*prepare(
        "chunk", "additive", q, k, v, g=g, g_gamma=g_gamma, gk=gk, gv=gv, beta=beta, scale=scale,
        initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval, normalize=normalize,
        state_v_first=state_v_first, cu_seqlens=cu_seqlens, cp_context=cp_context, chunk_size=chunk_size,
    ))  # fmt: skip
    return result if initial_state is None else _as_given(initial_state, *result)


@explain_keywords
def fused_recurrent_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None, scale: float | None = None,
    initial_state: States = None, output_final_state: bool = False, reverse: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, *, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None, dt_bias: Tensor | None = None, lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, gk: Tensor | None = None,
    gv: Tensor | None = None, beta: Tensor | None = None, normalize: bool = False,
) -> Result:  # fmt: skip
    """The additive rule with any gates, token by token (section 2): decode.

    Arguments as in chunk_simple_gla.  reverse: every sequence from its last token to its first, where the state enters
    and leaves.
    q, k [B, T, H, K]; v, o [B, T, HV, V]: bfloat16, float16 or float32.  States, offsets, errors (ArgumentError,
    KeywordError): see the module.
    """
    check_switches(reverse=reverse)
    result = (run_reversed if reverse else run)(*prepare(
        "recurrent", "additive", q, k, v, g=g, g_gamma=g_gamma, gk=gk, gv=gv, beta=beta, scale=scale,
        initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval, normalize=normalize,
        state_v_first=state_v_first, cu_seqlens=cu_seqlens,
    ))  # fmt: skip
    return result if initial_state is None else _as_given(initial_state, *result)


@explain_keywords
def chunk_linear_attn(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: States = None,
    output_final_state: bool = False, normalize: bool = True, cu_seqlens: Tensor | None = None, *,
    use_qk_l2norm_in_kernel: bool = False, state_v_first: bool = False, cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None, cp_context: object = None, chunk_size: int = 64, feature_map: str = "identity",
) -> Result:  # fmt: skip
    """Linear attention in chunks (sections 2 and 4): the additive rule without a gate.

    normalize divides o by z . q + 1e-10, z the sum of the keys so far; both states are then pairs (S, z).  z is
    [N, HV, K]; one of [N, 1, HV, K] is taken as well, and returned in that shape.
    feature_map "identity" or "elu1" (elu(x) + 1) is applied to q and k.
    q, k [B, T, H, K]; v, o [B, T, HV, V]: bfloat16, float16 or float32.  States, offsets, errors (ArgumentError,
    KeywordError): see the module.
    """
    result = run(*prepare(
        "chunk", "additive", q, k, v, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, normalize=normalize, feature_map=feature_map,
        state_v_first=state_v_first, cu_seqlens=cu_seqlens, cp_context=cp_context, chunk_size=chunk_size,
    ))  # fmt: skip
    return result if initial_state is None else _as_given(initial_state, *result)


@explain_keywords
def fused_recurrent_linear_attn(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: States = None,
    output_final_state: bool = False, reverse: bool = False, normalize: bool = False,
    cu_seqlens: Tensor | None = None, *, use_qk_l2norm_in_kernel: bool = False, state_v_first: bool = False,
    feature_map: str = "identity",
) -> Result:  # fmt: skip
    """Linear attention token by token (section 2): decode.

    Arguments as in chunk_linear_attn.  reverse: every sequence from its last token to its first, where the state enters
    and leaves.
    q, k [B, T, H, K]; v, o [B, T, HV, V]: bfloat16, float16 or float32.  States, offsets, errors (ArgumentError,
    KeywordError): see the module.
    """
    check_switches(reverse=reverse)
    result = (run_reversed if reverse else run)(*prepare(
        "recurrent", "additive", q, k, v, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, normalize=normalize,
        feature_map=feature_map, state_v_first=state_v_first, cu_seqlens=cu_seqlens,
    ))  # fmt: skip
    return result if initial_state is None else _as_given(initial_state, *result)


@explain_keywords
def chunk_mamba2(
    x: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, dt_bias: Tensor | None = None, D: Tensor | None = None,
    dt_limit: tuple[float, float] | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """Mamba-2 / SSD in chunks (sections 2 and 4): the additive rule with a scalar gate and a write strength from dt.

    x [B, T, HV, V] is v; B and C [B, T, H, K] are k and q (H groups, K the state size).  dt [B, T, HV], A_log [HV],
    dt_bias [HV] or None: softplus(dt + dt_bias), clamped to dt_limit (low, high), is the write strength and, times
    -exp(A_log), the gate.  Scale 1.  With D [HV] or [HV, V] the output is o + D * x.  States are [N, HV, K, V].
    x, B, C, o: bfloat16, float16 or float32.  States, offsets, errors (ArgumentError, KeywordError): see the module.
    """
    return _mamba2("chunk", x, dt, A_log, B, C, dt_bias, D, dt_limit, initial_state, output_final_state, cu_seqlens)


@explain_keywords
def recurrent_mamba2(
    x: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, dt_bias: Tensor | None = None, D: Tensor | None = None,
    dt_limit: tuple[float, float] | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """Mamba-2 token by token (section 2): decode.

    Arguments as in chunk_mamba2.
    x, B, C, o: bfloat16, float16 or float32.  States, offsets, errors (ArgumentError, KeywordError): see the module.
    """
    return _mamba2("recurrent", x, dt, A_log, B, C, dt_bias, D, dt_limit, initial_state, output_final_state, cu_seqlens)


def _as_given(initial_state: States, o: Tensor, final_state: States) -> Result:
    """The normaliser z of a final state in the shape that it had in the initial one: [N, HV, K] or [N, 1, HV, K]."""
    if isinstance(initial_state, tuple | list) and isinstance(final_state, tuple) and initial_state[1].dim() == 4:
        return o, (final_state[0], final_state[1].unsqueeze(1))
    return o, final_state


def _mamba2(
    form: str, x: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, dt_bias: Tensor | None, D: Tensor | None,
    dt_limit: tuple[float, float] | None, initial_state: Tensor | None, output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> Result:  # fmt: skip
    o, final_state = run(*prepare_mamba2(
        form, x, dt, A_log, B, C, dt_bias=dt_bias, D=D, dt_limit=dt_limit, initial_state=initial_state,
        output_final_state=output_final_state, cu_seqlens=cu_seqlens,
    ))  # fmt: skip
    return (o if D is None else _skip(o, x, D, cu_seqlens)), final_state


def _skip(o: Tensor, x: Tensor, D: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """o + D * x; rows past the last offset stay zero, and so do their gradients, whatever x holds there."""
    if cu_seqlens is not None:
        past = torch.arange(x.shape[1], device=x.device) >= cu_seqlens[-1]
        x = x.masked_fill(past[:, None, None], 0)
    return (o + (D if D.dim() == 2 else D[:, None]).float() * x).to(o.dtype)


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule
