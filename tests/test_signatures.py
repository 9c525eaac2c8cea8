"""The operators' signatures, word for word: others call them by position and keyword, and filter keywords by them."""

import ast
import inspect
import pickle
import re
import zipfile

import pytest
from versions import IndexUnreachable, pip

from gdngen import ops
from gdngen.mixer import operators as mixer
from gdngen.runtime import operators

SIGNATURES = {
    "chunk_gated_delta_rule": """q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
        state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, *,
        use_gate_in_kernel=False, A_log=None, dt_bias=None, lower_bound=None, chunk_size=64, gk=None, gv=None""",
    "fused_recurrent_gated_delta_rule": """q, k, v, g=None, gk=None, gv=None, beta=None, scale=None,
        initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False,
        A_log=None, dt_bias=None, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False,
        cu_seqlens=None, *, lower_bound=None""",
    "chunk_kda": """q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False,
        allow_neg_eigval=False, safe_gate=False, lower_bound=None, disable_recompute=False,
        return_intermediate_states=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None,
        cp_context=None, use_graph=False, max_num_seqs=None, *, A_log=None, dt_bias=None, chunk_indices=None,
        chunk_size=64""",
    "fused_recurrent_kda": """q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None,
        output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False,
        use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, lower_bound=None, state_v_first=False,
        cu_seqlens=None""",
    "chunk_delta_rule": """q, k, v, beta, scale=None, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None, *, use_beta_sigmoid_in_kernel=False,
        allow_neg_eigval=False, state_v_first=False, chunk_indices=None, cp_context=None, chunk_size=64""",
    "fused_recurrent_delta_rule": """q, k, v, beta=None, scale=None, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, cu_seqlens=None, *, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
        state_v_first=False""",
    "chunk_simple_gla": """q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False,
        state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, *, use_qk_l2norm_in_kernel=False,
        use_gate_in_kernel=False, A_log=None, dt_bias=None, lower_bound=None, use_beta_sigmoid_in_kernel=False,
        allow_neg_eigval=False, chunk_indices=None, cp_context=None, chunk_size=64, gk=None, gv=None, beta=None,
        normalize=False""",
    "fused_recurrent_simple_gla": """q, k, v, g=None, g_gamma=None, scale=None, initial_state=None,
        output_final_state=False, reverse=False, state_v_first=False, cu_seqlens=None, *,
        use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None, dt_bias=None, lower_bound=None,
        use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, gk=None, gv=None, beta=None, normalize=False""",
    "chunk_linear_attn": """q, k, v, scale=None, initial_state=None, output_final_state=False, normalize=True,
        cu_seqlens=None, *, use_qk_l2norm_in_kernel=False, state_v_first=False, cu_seqlens_cpu=None,
        chunk_indices=None, cp_context=None, chunk_size=64, feature_map='identity'""",
    "fused_recurrent_linear_attn": """q, k, v, scale=None, initial_state=None, output_final_state=False,
        reverse=False, normalize=False, cu_seqlens=None, *, use_qk_l2norm_in_kernel=False, state_v_first=False,
        feature_map='identity'""",
    "chunk_mamba2": """x, dt, A_log, B, C, dt_bias=None, D=None, dt_limit=None, initial_state=None,
        output_final_state=False, cu_seqlens=None""",
    "recurrent_mamba2": """x, dt, A_log, B, C, dt_bias=None, D=None, dt_limit=None, initial_state=None,
        output_final_state=False, cu_seqlens=None""",
}
ALIASES = {"chunk_gdn": "chunk_gated_delta_rule", "fused_recurrent_gdn": "fused_recurrent_gated_delta_rule"}

# fla-core 0.6.0: a record, because its mere presence makes transformers choose its kernels, which need a GPU.
FLA = {
    "chunk_delta_rule": """q, k, v, beta, scale=None, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None, **kwargs""",
    "fused_recurrent_delta_rule": """q, k, v, beta=None, scale=None, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, cu_seqlens=None""",
    "chunk_gated_delta_rule": """q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
        state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, **kwargs""",
    "fused_recurrent_gated_delta_rule": """q, k, v, g=None, gk=None, gv=None, beta=None, scale=None,
        initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False,
        A_log=None, dt_bias=None, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False,
        cu_seqlens=None, **kwargs""",
    "chunk_kda": """q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False,
        allow_neg_eigval=False, safe_gate=False, lower_bound=None, disable_recompute=False,
        return_intermediate_states=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None,
        cp_context=None, use_graph=False, max_num_seqs=None, **kwargs""",
    "fused_recurrent_kda": """q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None,
        output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False,
        use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, lower_bound=None, state_v_first=False,
        cu_seqlens=None, **kwargs""",
    "chunk_linear_attn": """q, k, v, scale=None, initial_state=None, output_final_state=False, normalize=True,
        cu_seqlens=None""",
    "fused_recurrent_linear_attn": """q, k, v, scale=None, initial_state=None, output_final_state=False,
        reverse=False, normalize=False, cu_seqlens=None""",
    "chunk_simple_gla": """q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False,
        state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, **kwargs""",
    "fused_recurrent_simple_gla": """q, k, v, g=None, g_gamma=None, scale=None, initial_state=None,
        output_final_state=False, reverse=False, state_v_first=False, cu_seqlens=None, **kwargs""",
}


def parameters(text):
    """(positional parameters with their defaults, keyword-only ones) of a signature."""
    namespace = {}
    text = re.sub(r"\s+", " ", text).replace("torch.float32", "'torch.float32'")
    exec(f"def function({text}): ...", namespace)
    found = list(inspect.signature(namespace["function"]).parameters.values())
    positional = [(p.name, p.default) for p in found if p.kind is p.POSITIONAL_OR_KEYWORD]
    return positional, [p.name for p in found if p.kind is p.KEYWORD_ONLY]


def test_every_operator_is_listed():
    public = {name for name in ops.__all__ if name[0].islower()} - set(mixer.__all__)
    assert public == {*SIGNATURES, *ALIASES} == set(operators.__all__)
    assert all(getattr(ops, name) is getattr(operators, name) for name in public)
    assert all(getattr(ops, alias) is getattr(ops, name) for alias, name in ALIASES.items())


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


@pytest.mark.parametrize("name", FLA)
def test_positions_and_defaults_are_those_of_fla_core(name):
    """What is here alone comes behind their parameters, and by keyword only."""
    theirs, _ = parameters(FLA[name])
    ours, keywords = parameters(SIGNATURES[name])
    assert ours == theirs and keywords == [name for name in keywords if name not in dict(theirs)]


def test_the_record_of_fla_core(tmp_path):
    """Read from the sources in its wheel, which is not installed for the reason above."""
    try:
        pip("download", "--no-deps", "--dest", str(tmp_path), "fla-core==0.6.0")
    except IndexUnreachable as error:
        pytest.skip(f"the package index does not answer: {error}")
    (wheel,) = tmp_path.glob("*.whl")
    found = {}
    with zipfile.ZipFile(wheel) as archive:
        for file in sorted(name for name in archive.namelist() if re.fullmatch(r"fla/ops/\w+/\w+\.py", name)):
            for node in ast.parse(archive.read(file)).body:
                if isinstance(node, ast.FunctionDef) and node.name in FLA:
                    found[node.name] = parameters(bare(node.args))
    assert found == {name: parameters(text) for name, text in FLA.items()}


def bare(arguments):
    """The parameters of a parsed function without their annotations."""
    for argument in (*arguments.args, *arguments.kwonlyargs, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    return ast.unparse(arguments)
