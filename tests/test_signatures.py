"""The operators' signatures, word for word: others call them by position and keyword, and filter keywords by them."""

import inspect
import pickle
import re

import pytest

from gdngen import ops
from gdngen.runtime import operators

SIGNATURES = {
    "chunk_gated_delta_rule": """q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None, dt_bias=None, lower_bound=None,
        use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None,
        cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, chunk_size=64, *, gk=None, gv=None""",
    "fused_recurrent_gated_delta_rule": """q, k, v, g=None, gk=None, gv=None, beta=None, scale=None,
        initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False,
        A_log=None, dt_bias=None, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False,
        cu_seqlens=None, *, lower_bound=None""",
    "chunk_kda": """q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None, dt_bias=None, safe_gate=False,
        lower_bound=None, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False,
        cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, chunk_size=64""",
    "fused_recurrent_kda": """q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None,
        output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False,
        use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, lower_bound=None, state_v_first=False,
        cu_seqlens=None""",
    "chunk_delta_rule": """q, k, v, beta, scale=None, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, cu_seqlens=None, *, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
        state_v_first=False, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, chunk_size=64""",
    "fused_recurrent_delta_rule": """q, k, v, beta, scale=None, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, cu_seqlens=None, *, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
        state_v_first=False""",
    "chunk_simple_gla": """q, k, v, g, scale=None, initial_state=None, output_final_state=False, *,
        use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None, dt_bias=None, lower_bound=None,
        use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None,
        cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, chunk_size=64, gk=None, gv=None, beta=None,
        normalize=False""",
    "fused_recurrent_simple_gla": """q, k, v, g, scale=None, initial_state=None, output_final_state=False, *,
        use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None, dt_bias=None, lower_bound=None,
        use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, gk=None,
        gv=None, beta=None, normalize=False""",
    "chunk_linear_attn": """q, k, v, scale=None, initial_state=None, output_final_state=False, normalize=False, *,
        use_qk_l2norm_in_kernel=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None,
        cp_context=None, chunk_size=64, feature_map='identity'""",
    "fused_recurrent_linear_attn": """q, k, v, scale=None, initial_state=None, output_final_state=False,
        normalize=False, *, use_qk_l2norm_in_kernel=False, state_v_first=False, cu_seqlens=None,
        feature_map='identity'""",
    "chunk_mamba2": """x, dt, A_log, B, C, dt_bias=None, D=None, dt_limit=None, initial_state=None,
        output_final_state=False, cu_seqlens=None""",
    "recurrent_mamba2": """x, dt, A_log, B, C, dt_bias=None, D=None, dt_limit=None, initial_state=None,
        output_final_state=False, cu_seqlens=None""",
}


def test_every_operator_is_listed():
    public = {name for name in ops.__all__ if name[0].islower()}
    assert public == set(SIGNATURES) == set(operators.__all__)
    assert all(getattr(ops, name) is getattr(operators, name) for name in public)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    operator = getattr(operators, name)
    signature = inspect.signature(operator)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    expected = re.sub(r"\s+", " ", SIGNATURES[name])
    assert str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)) == f"({expected})"
    assert list(inspect.getfullargspec(operator).args)[:3] == list(signature.parameters)[:3]
    assert operator.__doc__ and "section" in operator.__doc__ and "ArgumentError" in operator.__doc__
    assert pickle.loads(pickle.dumps(operator)) is operator
