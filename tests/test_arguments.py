"""What the operators make of their arguments, and what every wrong argument is told."""

import inspect
import re
import timeit

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import gdngen.runtime.operators as operators
from gdngen.runtime import arguments
from gdngen.runtime.arguments import ArgumentError, Call, Options
from gdngen.runtime.keywords import INSTEAD, KeywordError
from gdngen.spec import CHUNKS, MAX_KEY_DIM, Spec

B, T, H, HV, K, V = 2, 5, 2, 4, 8, 6

OPERATORS = [name for name in operators.__all__ if not name.endswith("_gdn")]


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    """Operators return what they would have run."""
    monkeypatch.setattr(operators, "run", lambda options, call: (options, call))


def zeros(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def ordinary(name, **changes):
    """Keyword arguments of an ordinary call, with some changed; a value of ... leaves the argument out."""
    sizes = {"q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, HV, V), "beta": (B, T, HV)}
    sizes["g"] = (B, T, HV, K) if name.endswith("kda") else (B, T, HV)
    sizes |= {"x": (B, T, HV, V), "dt": (B, T, HV), "A_log": (HV,), "B": (B, T, H, K), "C": (B, T, H, K)}
    given = {
        p: zeros(*sizes[p])
        for p, parameter in inspect.signature(getattr(operators, name)).parameters.items()
        if parameter.default is parameter.empty
    }
    return {argument: value for argument, value in (given | changes).items() if value is not ...}


def call(name, **changes) -> tuple[Options, Call]:
    return getattr(operators, name)(**ordinary(name, **changes))


def packed(*offsets, dtype=torch.int32):
    """Arguments of a packed gated call, of T tokens."""
    shapes = {"q": (1, T, H, K), "k": (1, T, H, K), "v": (1, T, HV, V), "g": (1, T, HV), "beta": (1, T, HV)}
    return {n: zeros(*s) for n, s in shapes.items()} | {"cu_seqlens": torch.tensor(offsets, dtype=dtype)}


# ---- what a call becomes ---------------------------------------------------------------------------------------------


def test_constants_agree_with_the_spec():
    assert arguments.CHUNKS == CHUNKS and arguments.MAX_KEY_DIM == MAX_KEY_DIM
    assert set(Options._fields) <= set(Spec.model_fields)


@pytest.mark.parametrize("name", OPERATORS)
def test_ordinary_calls_make_a_spec(name):
    options, made = call(name)
    spec = Spec(**options.said())
    assert (spec.key_dim, spec.value_dim, spec.chunk) == (K, V, 64)
    assert spec.rule == ("delta" if "delta" in name or "kda" in name else "additive")
    assert made.operator == ("chunk" if name.startswith("chunk") else "recurrent")
    assert (made.B, made.T, made.H, made.HV, made.K, made.V, made.N) == (B, T, H, HV, K, V, B)
    assert made.scale == (1.0 if "mamba2" in name else K**-0.5)
    assert made.cu_seqlens is None and made.output_final_state is False and made.inputs["h0"] is None
    assert hash(options) == hash(Options(*options))


@pytest.mark.parametrize("name", OPERATORS)
def test_chunk_and_recurrent_forms_ask_for_the_same_member(name):
    twin = {"chunk_mamba2": "recurrent_mamba2"}.get(name, name.replace("chunk_", "fused_recurrent_"))
    given = ordinary(name)
    given |= {"normalize": False} if name.endswith("linear_attn") else {}  # the forms' defaults differ
    options = [getattr(operators, form)(**given)[0]._replace(chunk=None) for form in (name, twin)]
    assert options[0] == options[1]


def test_options_of_the_fused_inputs():
    gate = {"use_gate_in_kernel": True, "A_log": zeros(HV)}
    options, made = call("chunk_gated_delta_rule", **gate, use_qk_l2norm_in_kernel=True)
    assert (options.gate, options.fused_gate, options.lower_bound, options.qk_norm) == (
        ("scalar",),
        "softplus",
        None,
        True,
    )
    assert "g" not in made.inputs and made.inputs["a"].shape == (B, T, HV) and made.inputs["dt_bias"] is None

    options, made = call("chunk_kda", **gate, dt_bias=zeros(HV * K), lower_bound=-5, safe_gate=True)
    assert (options.gate, options.fused_gate, options.lower_bound) == (("key",), "bounded", -5.0)
    assert made.inputs["a"].shape == (B, T, HV, K) and made.inputs["dt_bias"].shape == (HV, K)

    options, made = call("fused_recurrent_gated_delta_rule", gv=zeros(B, T, HV, V), **gate, dt_bias=zeros(HV, V))
    assert (options.gate, made.inputs["dt_bias"].shape) == (("value",), (HV, V))

    options, made = call("chunk_kda", use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)
    assert (options.beta, options.beta_logits, options.neg_eigval) == ("head", True, True)
    assert "beta" not in made.inputs and made.inputs["b"].shape == (B, T, HV)


def test_a_log_as_checkpoints_store_it():
    _, made = call("chunk_kda", use_gate_in_kernel=True, A_log=zeros(1, 1, HV, 1))
    assert made.inputs["A_log"].shape == (HV,)


def test_gates_together_and_alone():
    both = {"gk": zeros(B, T, HV, K), "gv": zeros(B, T, HV, V)}
    assert call("chunk_gated_delta_rule", **both)[0].gate == ("scalar", "key", "value")
    assert call("chunk_gated_delta_rule", g=None, gv=both["gv"])[0].gate == ("value",)
    assert call("chunk_gated_delta_rule", g=None, beta=None)[0][:3] == ("delta", (), "none")
    assert call("chunk_simple_gla", g=None, beta=zeros(B, T, HV, V))[0][:3] == ("additive", (), "value")


def test_states():
    state = zeros(B, HV, V, K, dtype=torch.bfloat16).transpose(0, 1).contiguous().transpose(0, 1)
    options, made = call("chunk_kda", initial_state=state, state_v_first=True, output_final_state=True)
    assert options.state_v_first and made.output_final_state and made.inputs["h0"].is_contiguous()
    pair = (zeros(B, HV, K, V), zeros(B, HV, K))
    options, made = call("chunk_linear_attn", normalize=True, initial_state=pair, feature_map="elu1")
    assert options.normalize and options.feature_map == "elu1"
    assert made.inputs["h0"] is pair[0] and made.inputs["z0"] is pair[1]
    assert call("chunk_linear_attn", normalize=True)[1].inputs["z0"] is None


def test_strides_pass_through_where_kernels_can_read_them():
    mixed = zeros(B, T, HV, 2 * K + V)
    q, k, v = mixed[:, :, :H].split([K, K, V], dim=-1)
    v, g = mixed[..., 2 * K :], zeros(HV, T, B).permute(2, 1, 0)
    _, made = call("chunk_gated_delta_rule", q=q, k=k, v=v, g=g)
    assert made.inputs["q"] is q and made.inputs["k"] is k and made.inputs["v"] is v and made.inputs["g"] is g
    _, made = call("chunk_gated_delta_rule", q=zeros(K, B, T, H).permute(1, 2, 3, 0))
    assert made.inputs["q"].is_contiguous()


def test_packed_calls():
    _, made = call("chunk_gated_delta_rule", **packed(0, 2, 2, T, dtype=torch.int64), initial_state=zeros(3, HV, K, V))
    assert (made.B, made.N) == (1, 3) and made.cu_seqlens.tolist() == [0, 2, 2, T]
    assert call("chunk_gated_delta_rule", **packed(0))[1].N == 0


@pytest.mark.parametrize("sizes", [{"B": 0}, {"T": 0}, {"T": 1}, {"K": 1}, {"K": 256}, {"V": 1}])
def test_edges_are_ordinary(sizes):
    b, t, kd, vd = sizes.get("B", B), sizes.get("T", T), sizes.get("K", K), sizes.get("V", V)
    shapes = {"q": (b, t, H, kd), "k": (b, t, H, kd), "v": (b, t, HV, vd), "g": (b, t, HV), "beta": (b, t, HV)}
    options, made = call("chunk_gated_delta_rule", **{n: zeros(*s) for n, s in shapes.items()})
    assert (made.B, made.T, options.key_dim, options.value_dim) == (b, t, kd, vd)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    tokens = {n: zeros(B, T, h, d, dtype=dtype) for n, h, d in (("q", H, K), ("k", H, K), ("v", HV, V))}
    call("chunk_gated_delta_rule", **tokens, g=zeros(B, T, HV, dtype=torch.bfloat16), beta=zeros(B, T, HV, dtype=dtype))


def test_mamba2_inputs():
    options, made = call("chunk_mamba2", dt_bias=zeros(HV), dt_limit=(0.001, 0.1), initial_state=zeros(B, HV, K, V))
    assert options[:5] == ("additive", ("scalar",), "dt", K, V) and options.fused_gate == "none"
    assert set(made.inputs) == {"q", "k", "v", "dt", "A_log", "dt_bias", "h0"}
    assert made.dt_limit == (0.001, 0.1)
    assert call("chunk_mamba2", dt_limit=(0.0, float("inf")))[1].dt_limit == (0.0, float("inf"))


@pytest.mark.parametrize("per_channel", [False, True])
def test_mamba2_skip_belongs_to_the_operator_and_spares_rows_past_the_end(monkeypatch, per_channel):
    monkeypatch.setattr(operators, "run", lambda options, call: (call.inputs["v"] * 0, None))
    x, D = torch.randn(1, T, HV, V), torch.randn(HV, V) if per_channel else torch.randn(HV)
    x[:, 3:] = float("nan")
    x.requires_grad_(), D.requires_grad_()
    tokens = {"x": x, "dt": zeros(1, T, HV), "B": zeros(1, T, H, K), "C": zeros(1, T, H, K), "D": D}
    o, _ = call("recurrent_mamba2", **tokens, cu_seqlens=torch.tensor([0, 3]))
    expected = (D if per_channel else D[:, None]) * x[:, :3]
    torch.testing.assert_close(o[:, :3], expected)
    o[:, :3].sum().backward()
    assert D.grad.isfinite().all()


def test_fresh_inputs_every_call():
    tensors = ordinary("chunk_gated_delta_rule")
    first, second = (operators.chunk_gated_delta_rule(**tensors) for _ in range(2))
    assert first[0] == second[0] and first[1].inputs is not second[1].inputs


# ---- what is wrong, and what is said about it ------------------------------------------------------------------------

GATED, RECURRENT, KDA = "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_kda"
GLA, LINEAR, MAMBA = "chunk_simple_gla", "chunk_linear_attn", "chunk_mamba2"
FUSED = {"use_gate_in_kernel": True, "A_log": zeros(HV)}
META = {"device": "meta"}

WRONG = [
    # tokens
    (GATED, {"q": None}, ["q: got None", "[B, T, H, K]"]),
    (GATED, {"q": zeros(B, T, K)}, ["q: got torch.float32 [2, 5, 8]", "batch, tokens, heads"]),
    (GATED, {"q": zeros(B, T, H, K, dtype=torch.int64)}, ["q: got torch.int64", "torch.bfloat16", "Cast it"]),
    (GATED, {"q": zeros(B, T, H, K, dtype=torch.float64)}, ["q: got torch.float64", "Cast it"]),
    (GATED, {"k": zeros(B, T, H, K + 1)}, ["k: got torch.float32 [2, 5, 2, 9]", "[B, T, H, K] = [2, 5, 2, 8]"]),
    (GATED, {"k": zeros(B, T, H, K, dtype=torch.float64)}, ["k: got torch.float64", "k.to(torch.float32)"]),
    (GATED, {"k": zeros(B, T, H, K, **META)}, ["k: ", "on meta", "on cpu", "Move it: k.to('cpu')"]),
    (GATED, {"v": [1.0]}, ["v: got a list", "[B, T, HV, V]"]),
    (GATED, {"v": zeros(B, T + 1, HV, V)}, ["v: got torch.float32 [2, 6, 4, 6]", "[B, T, HV, V] = [2, 5, 4, 6]"]),
    (GATED, {"v": zeros(B, T, HV, V, dtype=torch.int32)}, ["v: got torch.int32", "v.to(torch.float32)"]),
    (GATED, {"v": zeros(B, T, 3, V)}, ["v: got HV = 3 heads beside H = 2 in q", "a multiple of H"]),
    (GATED, {"v": zeros(B, T, 0, V)}, ["v: got HV = 0", "at least one"]),
    (GATED, {"q": zeros(B, T, 0, K), "k": zeros(B, T, 0, K)}, ["H = 0", "at least one"]),
    (GATED, {n: zeros(B, T, H, 257) for n in "qk"}, ["q: got head dim K = 257", "1 <= K <= 256", "at most 256"]),
    (GATED, {n: zeros(B, T, H, 0) for n in "qk"}, ["q: got head dim K = 0"]),
    (GATED, {"v": zeros(B, T, HV, 0)}, ["v: got head dim V = 0", "V >= 1"]),
    (GATED, {"q": zeros(B, T, H, K).to_sparse()}, ["q: got a sparse_coo tensor", "Pass a dense tensor"]),
    (GATED, {"v": torch.nested.nested_tensor([zeros(T, HV, V)] * B)}, ["v: got a nested tensor", "cu_seqlens"]),
    (GATED, {"g": zeros(B, T, HV).to_sparse()}, ["g: got a sparse_coo tensor", "Pass a dense tensor"]),
    (GATED, {"initial_state": torch.nested.nested_tensor([zeros(HV, K, V)] * B)}, ["initial_state: got a nested"]),
    (GATED, {"beta": torch.nested.nested_tensor([zeros(T, HV)] * B)}, ["beta: got a nested tensor", "cu_seqlens"]),
    (GATED, packed(0, T) | {"cu_seqlens": torch.tensor([0, T]).to_sparse()}, ["cu_seqlens: got a sparse_coo tensor"]),
    (GATED, FUSED | {"A_log": zeros(HV).to_sparse()}, ["A_log: got a sparse_coo tensor", "Pass a dense tensor"]),
    (GATED, FUSED | {"A_log": torch.nested.nested_tensor([zeros(HV)])}, ["A_log: got a nested tensor"]),
    (GATED, FUSED | {"dt_bias": torch.nested.nested_tensor([zeros(HV)])}, ["dt_bias: got a nested tensor"]),
    (MAMBA, {"D": torch.nested.nested_tensor([zeros(HV)])}, ["D: got a nested tensor"]),
    (GATED, {"scale": float("nan")}, ["scale: got nan", "a finite number"]),
    (GATED, {"scale": float("inf")}, ["scale: got inf", "a finite number"]),
    (GATED, {"scale": 10**400}, ["scale: got inf", "a finite number"]),
    (GATED, {"output_final_state": "False"}, ["output_final_state: got 'False'", "True or False"]),
    (KDA, {"use_qk_l2norm_in_kernel": "no"}, ["use_qk_l2norm_in_kernel: got 'no'", "True or False"]),
    (KDA, {"safe_gate": "no"}, ["safe_gate: got 'no'", "True or False"]),
    (LINEAR, {"normalize": zeros(1)}, ["normalize: got torch.float32 [1]", "True or False"]),
    (MAMBA, {"output_final_state": "no"}, ["output_final_state: got 'no'", "True or False"]),
    (GATED, {"scale": zeros(1)}, ["scale: got torch.float32 [1]", "a Python number", "keep it as a float"]),
    # gates and write strengths
    (GATED, {"g": zeros(B, T, H)}, ["g: got torch.float32 [2, 5, 2]", "[B, T, HV] = [2, 5, 4]"]),
    (GATED, {"g": zeros(B, T, HV, K)}, ["g: ", "per-key gate goes into gk"]),
    (GATED, {"g": zeros(B, T, HV, dtype=torch.int32)}, ["g: got torch.int32", "torch.float32, torch.bfloat16 or"]),
    (GATED, {"g": zeros(B, T, HV, **META)}, ["g: ", "on meta", "g.to('cpu')"]),
    (GATED, {"gk": zeros(B, T, HV, V)}, ["gk: ", "[B, T, HV, K] = [2, 5, 4, 8]"]),
    (GATED, {"gv": zeros(B, T, HV, K)}, ["gv: ", "[B, T, HV, V] = [2, 5, 4, 6]"]),
    (KDA, {"g": zeros(B, T, HV)}, ["g: ", "[B, T, HV, K] = [2, 5, 4, 8]", "into g of chunk_gated_delta_rule"]),
    (GATED, {"beta": zeros(B, T, H)}, ["beta: ", "[B, T, HV] = [2, 5, 4]", "per value channel [B, T, HV, V]"]),
    (GATED, {"beta": 0.5}, ["beta: got 0.5", "Pass a torch.Tensor"]),
    (GATED, {"beta": zeros(B, T, HV, V)}, ["beta: ", "no chunk form", "call the fused_recurrent_ operator"]),
    (RECURRENT, {"beta": zeros(B, T, HV, K)}, ["beta: ", "[B, T, HV, V] = [2, 5, 4, 6]"]),
    (GATED, {"allow_neg_eigval": True}, ["allow_neg_eigval: got True without logits", "use_beta_sigmoid_in_kernel"]),
    (GATED, {"beta": None, "use_beta_sigmoid_in_kernel": True}, ["beta: got None", "logits [B, T, HV]"]),
    # fused gates
    (GATED, {"use_gate_in_kernel": True}, ["A_log: got None", "[HV] = [4]"]),
    (GATED, FUSED | {"A_log": zeros(HV + 1)}, ["A_log: got torch.float32 [5]", "[HV] = [4]", "per value head"]),
    (GATED, FUSED | {"dt_bias": zeros(HV, K)}, ["dt_bias: ", "[HV] = [4]"]),
    (KDA, FUSED | {"dt_bias": zeros(HV)}, ["dt_bias: ", "[HV, K] or [HV * K] = [4, 8]"]),
    (
        GATED,
        FUSED | {"gk": zeros(B, T, HV, K)},
        ["use_gate_in_kernel: got True with gates scalar + key", "exactly one"],
    ),
    (GATED, FUSED | {"g": None}, ["use_gate_in_kernel: got True with gates none", "exactly one gate"]),
    (GATED, FUSED | {"lower_bound": 0.0}, ["lower_bound: got 0.0", "[-5, 0)"]),
    (GATED, FUSED | {"lower_bound": -5.5}, ["lower_bound: got -5.5", "[-5, 0)"]),
    (GATED, FUSED | {"lower_bound": float("nan")}, ["lower_bound: got nan", "[-5, 0)"]),
    (KDA, {"lower_bound": -5.0}, ["lower_bound: got -5.0 without use_gate_in_kernel", "use_gate_in_kernel=True"]),
    (GATED, {"A_log": zeros(HV)}, ["A_log: ", "without use_gate_in_kernel", "raw gate input in g"]),
    (GATED, {"dt_bias": zeros(HV)}, ["dt_bias: ", "without use_gate_in_kernel"]),
    # states
    (
        GATED,
        {"initial_state": zeros(B, HV, V, K)},
        ["initial_state: ", "[N, HV, K, V] = [2, 4, 8, 6]", "state_v_first=True"],
    ),
    (
        GATED,
        {"initial_state": zeros(B, HV, K, V), "state_v_first": True},
        ["[N, HV, V, K] = [2, 4, 6, 8]", "transposed layout: pass state_v_first=False"],
    ),
    (GATED, {"initial_state": zeros(3, HV, K, V)}, ["initial_state: ", "one state per sequence, and this call has 2"]),
    (GATED, {"initial_state": zeros(B, H, K, V)}, ["initial_state: ", "per sequence and value head"]),
    (
        GATED,
        {"initial_state": zeros(B, HV, K, V, dtype=torch.float64)},
        ["torch.float64", "torch.float32, torch.bfloat16 or torch.float16"],
    ),
    (GATED, {"initial_state": zeros(B, HV, K, V, **META)}, ["initial_state: ", "on meta", "Move it"]),
    (GATED, {"initial_state": (zeros(1), zeros(1))}, ["initial_state: got a tuple", "Pass a torch.Tensor"]),
    (LINEAR, {"normalize": True, "initial_state": zeros(B, HV, K, V)}, ["initial_state: ", "a pair (S, z [N, HV, K])"]),
    (
        LINEAR,
        {"normalize": True, "initial_state": (zeros(B, HV, K, V), zeros(B, HV, V))},
        ["initial_state[1]: ", "[N, HV, K] = [2, 4, 8]", "sum of k"],
    ),
    # packed sequences
    (GATED, {"cu_seqlens": [0, 5]}, ["cu_seqlens: got a list", "torch.int32 or torch.int64 [N + 1]"]),
    (GATED, packed(0, T) | {"cu_seqlens": torch.tensor([0.0, 5.0])}, ["cu_seqlens: got torch.float32", "torch.int32"]),
    (GATED, packed(0, T) | {"cu_seqlens": torch.tensor([[0, 5]])}, ["cu_seqlens: got torch.int64 [1, 2]", "[N + 1]"]),
    (GATED, packed(), ["cu_seqlens: got 0 offsets", "N + 1"]),
    (GATED, {"cu_seqlens": torch.tensor([0, 5])}, ["cu_seqlens: got B = 2", "B = 1", "reshape(1, B * T"]),
    (
        GATED,
        packed(0, T) | {"cu_seqlens": torch.zeros(2, dtype=torch.int32, device="meta")},
        ["cu_seqlens: got a tensor on meta", "cpu", "outside the loop"],
    ),
    (GATED, packed(0, 4, 2, T), ["cu_seqlens: got offset 2 at index 2 after 4", "never decrease"]),
    (GATED, packed(0, T + 1), ["cu_seqlens: got last offset 6", "at most T = 5"]),
    (GATED, packed(1, T), ["cu_seqlens: got first offset 1", "first token"]),
    (GATED, packed(0, 2, T) | {"initial_state": zeros(1, HV, K, V)}, ["[2, 4, 8, 6]", "this call has 2"]),
    # the rest
    (GATED, {"cp_context": object()}, ["cp_context: got object", "gdngen.parallel"]),
    (GATED, {"chunk_size": 48}, ["chunk_size: got 48", "16, 32, 64 or 128"]),
    (LINEAR, {"feature_map": "relu"}, ["feature_map: got 'relu'", "identity or elu1", "in the model"]),
    (
        GLA,
        {"normalize": True, "g": zeros(B, T, HV), "gk": zeros(B, T, HV, K)},
        ["normalize: got True with gates scalar + key", "scalar gate"],
    ),
    (GLA, {"initial_state": (zeros(1), zeros(1))}, ["initial_state: got a tuple"]),
    # Mamba-2, in its own names
    (MAMBA, {"B": zeros(B, T, H, V)}, ["B: ", "[2, 5, 2, 8]"]),
    (MAMBA, {"x": zeros(B, T, 3, V)}, ["x: got HV = 3 heads beside H = 2 in C"]),
    (MAMBA, {"C": zeros(B, T, K)}, ["C: got torch.float32 [2, 5, 8]"]),
    (MAMBA, {"dt": zeros(B, T, HV, V)}, ["dt: ", "[B, T, HV] = [2, 5, 4]"]),
    (MAMBA, {"A_log": None}, ["A_log: got None"]),
    (MAMBA, {"dt_bias": zeros(HV, V)}, ["dt_bias: ", "[HV] = [4]"]),
    (MAMBA, {"D": zeros(V)}, ["D: ", "[HV] = [4]"]),
    (MAMBA, {"dt_limit": 0.1}, ["dt_limit: got 0.1", "a pair (low, high)"]),
    (MAMBA, {"dt_limit": (1.0, 0.1)}, ["dt_limit: got (1.0, 0.1)", "0 <= low <= high"]),
    (MAMBA, {"initial_state": zeros(B, HV, V, K)}, ["initial_state: ", "transposed layout: transpose it"]),
]


@pytest.mark.parametrize(
    ("name", "changes", "fragments"), WRONG, ids=[f"{i}-{w[2][0][:24]}" for i, w in enumerate(WRONG)]
)
def test_wrong_arguments_are_explained(name, changes, fragments):
    with pytest.raises(ArgumentError) as error:
        call(name, **changes)
    message = str(error.value)
    assert re.fullmatch(r"[\w\[\]]+: got .+, expected .+\. [A-Z0-9(].+\.", message), message
    for fragment in fragments:
        assert fragment in message
    assert isinstance(error.value, ValueError) and not isinstance(error.value, TypeError)


RENAMED = {"transpose_state_layout": "state_v_first"}


def foreign():
    for name in OPERATORS:
        accepted = dict(inspect.signature(getattr(operators, name)).parameters)
        yield from ((name, keyword) for keyword in INSTEAD if keyword not in accepted | RENAMED.keys())


@pytest.mark.parametrize(("name", "keyword"), list(foreign()))
def test_keywords_of_others_say_what_to_use(name, keyword):
    with pytest.raises(KeywordError) as error:
        call(name, **{keyword: None})
    assert str(error.value).startswith(f"{keyword}: {name}() does not take it; {INSTEAD[keyword]}.")
    assert isinstance(error.value, ArgumentError) and isinstance(error.value, TypeError)


@pytest.mark.parametrize("name", [GATED, RECURRENT, KDA, GLA, LINEAR])
def test_keywords_of_older_releases(name):
    with pytest.warns(DeprecationWarning, match="state_v_first") as warned:
        options, _ = call(name, transpose_state_layout=True, head_first=False)
    assert options.state_v_first and warned[0].filename == __file__
    with pytest.raises(KeywordError, match=r"transpose_state_layout: .* got state_v_first too"):
        call(name, transpose_state_layout=True, state_v_first=True)
    with pytest.raises(KeywordError, match=r"head_first: .* does not take it; tensors are always"):
        call(name, head_first=True)


def test_hints_change_nothing():
    given = packed(0, 2, T) | {"g": zeros(1, T, HV, K)}
    plain = call(KDA, **given)[0]
    assert call(KDA, **given, disable_recompute=True, safe_gate=True)[0] == plain
    assert call(KDA, **given, safe_gate=True, lower_bound=-5.0, disable_recompute=True)[0] == plain
    with pytest.raises(ArgumentError, match=r"lower_bound: got -7"):
        call(KDA, **given, safe_gate=True, lower_bound=-7)
    with pytest.raises(ArgumentError, match=r"lower_bound: got -5\.0 without use_gate_in_kernel"):
        call(KDA, **given, lower_bound=-5.0)
    for hint in ("disable_recompute", "return_intermediate_states", "safe_gate", "use_graph"):
        with pytest.raises(ArgumentError, match=rf"{hint}: got 'no'"):
            call(KDA, **given, **{hint: "no"})


def test_short_chunks_are_computed_in_longer_ones():
    assert call(GATED, chunk_size=4)[0] == call(GATED, chunk_size=16)[0]
    for length in (0, -4, 3, 4.5, "16"):
        with pytest.raises(ArgumentError, match=r"chunk_size: got .*16, 32, 64 or 128"):
            call(GATED, chunk_size=length)


@pytest.mark.parametrize("name", [GLA, "fused_recurrent_simple_gla"])
def test_a_decay_that_is_the_same_for_all_tokens(name):
    gamma = torch.randn(HV)
    options, made = call(name, g=None, g_gamma=gamma)
    assert options.gate == ("scalar",) and torch.equal(made.inputs["g"], gamma.expand(B, T, HV))
    with pytest.raises(ArgumentError, match=r"g_gamma: got a tensor beside g"):
        call(name, g=zeros(B, T, HV), g_gamma=gamma)
    with pytest.raises(ArgumentError, match=r"g_gamma: got .*with use_gate_in_kernel"):
        call(name, g=None, g_gamma=gamma, use_gate_in_kernel=True, A_log=zeros(HV))
    with pytest.raises(ArgumentError, match=r"g_gamma: got .*\[5\].*\[HV\] = \[4\]"):
        call(name, g=None, g_gamma=zeros(HV + 1))


def test_graphs_need_nothing():
    given = packed(0, 2, T) | {"g": zeros(1, T, HV, K)}
    assert call(KDA, **given, use_graph=True, max_num_seqs=2)[0] == call(KDA, **given)[0]
    with pytest.raises(ArgumentError, match="max_num_seqs: got 3 with 2 sequences"):
        call(KDA, **given, use_graph=True, max_num_seqs=3)


def test_a_bounded_gate_without_a_rate():
    options, made = call(KDA, use_gate_in_kernel=True, lower_bound=-5.0, A_log=None)
    assert options.fused_gate == "bounded" and torch.equal(made.inputs["A_log"], zeros(HV))


def test_the_normaliser_keeps_the_shape_it_came_in(monkeypatch):
    S, z = zeros(B, HV, K, V), zeros(B, HV, K)
    monkeypatch.setattr(operators, "run", lambda options, call: (call.inputs["v"], (S, call.inputs["z0"])))
    for given in (z, z.unsqueeze(1)):
        _, (_, found) = call(LINEAR, initial_state=(S, given))
        assert found.shape == given.shape
    assert operators.chunk_linear_attn(**ordinary(LINEAR))[1][1] is None  # normalised by default


def test_unknown_keywords():
    with pytest.raises(TypeError, match="did you mean output_final_state"):
        call(KDA, output_final_states=True)
    with pytest.raises(TypeError, match=r"no_such_thing: .* leave it out. It takes q, k, v"):
        call(KDA, no_such_thing=True)


def test_other_type_errors_are_left_alone(monkeypatch):
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'beta'") as error:
        call(KDA, beta=...)
    assert not isinstance(error.value, KeywordError)

    def broken(options, call):
        raise TypeError("from inside")

    monkeypatch.setattr(operators, "run", broken)
    with pytest.raises(TypeError, match=r"^from inside$"):
        call(KDA)


# ---- the hot path ----------------------------------------------------------------------------------------------------


def test_offsets_on_a_gpu_are_read_only_when_debugging(monkeypatch):
    read = []
    monkeypatch.setattr(arguments, "check_offsets", lambda cu_seqlens, T: read.append(T))
    with FakeTensorMode():
        tensors = {name: torch.empty(t.shape, dtype=t.dtype, device="cuda") for name, t in packed(0, 2, T).items()}
        for level, reads in ((None, 0), ("0", 0), ("", 0), ("1", 1), ("4", 2)):
            monkeypatch.delenv("GDNGEN_DEBUG", raising=False)
            if level is not None:
                monkeypatch.setenv("GDNGEN_DEBUG", level)
            _, made = operators.chunk_gated_delta_rule(**tensors)
            assert len(read) == reads and made.N == 2 and made.device.type == "cuda"
        for level in ("yes", "5", "12"):
            monkeypatch.setenv("GDNGEN_DEBUG", level)
            with pytest.raises(
                ArgumentError, match=f"^GDNGEN_DEBUG: got '{level}' in the environment, expected 0 to 4"
            ):
                operators.chunk_gated_delta_rule(**tensors)


def test_compiles_without_a_graph_break():
    def doubled(**tensors):
        return operators.chunk_gated_delta_rule(**tensors)[1].inputs["v"] * 2

    torch.compiler.reset()
    tensors = packed(0, 2, T) | {"use_gate_in_kernel": True, "A_log": zeros(HV), "initial_state": zeros(2, HV, K, V)}
    assert torch.compile(doubled, backend="eager", fullgraph=True)(**tensors).shape == (1, T, HV, V)


def test_checks_are_cheap():
    tensors = ordinary(GATED, initial_state=zeros(B, HV, K, V), output_final_state=True)
    once = min(timeit.repeat(lambda: operators.chunk_gated_delta_rule(**tensors), number=200, repeat=10)) / 200
    assert once < 60e-6  # about 6 us on an idle machine
