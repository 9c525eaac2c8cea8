"""What to say about a keyword that an operator does not have: which one to use instead, or where the feature lives."""

import difflib
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from .arguments import ArgumentError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

SERVING = "no operator reads states inside an engine's cache yet: gather and scatter them around the call"
CHUNK_ONLY = "it concerns the chunk form only: leave it out here"

# Keywords of other libraries, and of operators here that are not the one called.
INSTEAD = {
    "head_first": "tensors are always [B, T, H, ...]: transpose(1, 2) head-first ones",
    "transpose_state_layout": "use state_v_first",
    "state_layout": "use state_v_first",
    "offsets": "use cu_seqlens",
    "seq_idx": "use cu_seqlens",
    "initial_states": "use initial_state",
    "return_final_states": "use output_final_state",
    "g_gamma": "pass the fixed decay as the gate: g_gamma.expand(B, T, HV)",
    "reverse": "flip the inputs and the output along T yourself: x.flip(1)",
    "disable_recompute": "what is kept for backward is decided when a package is built: leave it out",
    "return_intermediate_states": "stored intermediates belong to the plan: split the sequence with cu_seqlens and use "
    "output_final_state",
    "state_dtype": "states are computed and returned in float32: cast final_state yourself",
    "use_exp2": "gates are natural logarithms: leave it out",
    "use_qk_l2norm": "use use_qk_l2norm_in_kernel",
    "A": "use A_log, where A = -exp(A_log)",
    "z": "gate the output in the layer",
    "dt_softplus": "softplus is always applied to dt + dt_bias",
    "initial_state_indices": SERVING,
    "ssm_state_indices": SERVING,
    "num_accepted_tokens": SERVING,
    "inplace_final_state": SERVING,
    "use_gate_in_kernel": "this operator has no gate to compute",
    "safe_gate": "every gate is safe here: leave it out",
    "cp_context": "splitting a sequence over GPUs is the business of gdngen.parallel, which does not exist yet",
    "chunk_size": CHUNK_ONLY,
    "chunk_indices": CHUNK_ONLY,
    "cu_seqlens_cpu": "the offsets are not needed on the host: leave it out",
    "g": "chunk_gated_delta_rule and chunk_simple_gla (and their fused_recurrent_ forms) take a gate",
    "gk": "chunk_gated_delta_rule and chunk_simple_gla (and their fused_recurrent_ forms) take several gates",
    "gv": "chunk_gated_delta_rule and chunk_simple_gla (and their fused_recurrent_ forms) take several gates",
    "beta": "chunk_simple_gla(g=None, beta=...) is additive attention with a write strength",
    "normalize": "chunk_linear_attn and chunk_simple_gla (and their fused_recurrent_ forms) have a normaliser",
    "feature_map": "apply it to q and k in the model, or use chunk_linear_attn",
    "scale": "scale q yourself: this operator reads with scale 1",
    "state_v_first": "this operator keeps states as [N, HV, K, V]: transpose(-1, -2) them yourself",
}


class KeywordError(ArgumentError, TypeError):
    """A call used a keyword that the operator does not have.  A TypeError too, as Python's own error would be."""


def explain_keywords(operator: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Make an unexpected keyword raise KeywordError, which says what to use instead; take those of older releases.

    Python has already noticed by then, so an accepted call pays for one forwarding and nothing else.
    """
    signature = inspect.signature(operator)

    @functools.wraps(operator)
    def explained(*args: Parameters.args, **keywords: Parameters.kwargs) -> Result:
        try:
            return operator(*args, **keywords)
        except TypeError:
            unknown = [keyword for keyword in keywords if keyword not in signature.parameters]
            if not unknown:
                raise
            renewed: Any = _renewed(operator.__name__, keywords, list(signature.parameters))
        return operator(*args, **renewed)

    explained.__signature__ = signature  # type: ignore[attr-defined]
    return explained


def _renewed(operator: str, keywords: Mapping[str, Any], accepted: list[str]) -> dict[str, Any]:
    """Keywords that flash-linear-attention has renamed or removed, as they are now; KeywordError for any other."""
    renewed = dict(keywords)
    if renewed.get("head_first") is False:
        del renewed["head_first"]
    if "transpose_state_layout" in renewed and "state_v_first" in accepted:
        if renewed.get("state_v_first"):
            raise KeywordError(f"transpose_state_layout: {operator}() got state_v_first too; leave the old name out.")
        warnings.warn("transpose_state_layout is called state_v_first now", DeprecationWarning, stacklevel=4)
        renewed["state_v_first"] = renewed.pop("transpose_state_layout")
    for keyword in renewed:
        if keyword not in accepted:
            raise KeywordError(_advice(operator, keyword, accepted)) from None
    return renewed


def _advice(operator: str, keyword: str, accepted: list[str]) -> str:
    if keyword in INSTEAD:
        advice = INSTEAD[keyword]
    elif close := difflib.get_close_matches(keyword, accepted, n=1):
        advice = f"did you mean {close[0]}?"
    else:
        advice = "leave it out"
    return f"{keyword}: {operator}() does not take it; {advice}. It takes {', '.join(accepted)}."
