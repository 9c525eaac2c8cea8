"""Every model of transformers whose token mixers are known, tiny, with operators for all of them and without."""

import copy
import io
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import pytorch_version

pytest.importorskip("transformers")
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, DynamicCache, models

from gdngen.errors import ArgumentError
from gdngen.integrate import mixers, use_operators
from gdngen.integrate.equipped import Equipped
from gdngen.integrate.transformers import CONVOLUTION
from gdngen.ops import LAUNCHES

BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
HYBRID = BASE | {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16}
DELTA = HYBRID | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
SHORT = BASE | {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
SIZES = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16}
TINY = {
    "qwen3_next": DELTA | EXPERTS,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA | EXPERTS,
    "olmo_hybrid": DELTA,
    "kimi_linear": HYBRID
    | {"linear_head_dim": 8, "linear_num_heads": 2, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    | {"v_head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "lara_mini": DELTA | EXPERTS,
    "qwen4_exp_text": DELTA
    | EXPERTS
    | {"hc_lowrank": 8, "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 1, "indexer_n_heads": 2}
    | {"indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 32, "indexer_compress_ratio": 4}
    | {"output_gate_type": "sigmoid"},
    "bailing_hybrid": HYBRID
    | {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_local_experts": 4}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "head_dim": 8},
    "lfm2": SHORT,
    "lfm2_moe": SHORT
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_dense_layers": 1},
    "lfm3": SHORT | {"head_dim": 16},
    "mamba2": {
        **{name: BASE[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "pad_token_id")},
        **{"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "expand": 2, "chunk_size": 16},
        **{"bos_token_id": 1, "eos_token_id": None},
    },
    "bamba": BASE | SIZES | {"attn_layer_indices": [1], "mamba_expand": 2},
    "falcon_h1": BASE | SIZES | {"mamba_d_ssm": 64, "head_dim": 16},
    "granitemoehybrid": BASE
    | SIZES
    | {
        "layer_types": ["mamba", "attention"],
        "mamba_expand": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
    },
    "nemotron_h": BASE
    | {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16}
    | {"n_groups": 2, "chunk_size": 16, "head_dim": 16},
    "zamba2": BASE
    | {"layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1], "num_mem_blocks": 1, "mamba_d_state": 16}
    | {"mamba_expand": 2, "mamba_ngroups": 2, "n_mamba_heads": 8, "mamba_headdim": 8, "chunk_size": 16},
}
TINY = {name: sizes for name, sizes in TINY.items() if name in CONFIG_MAPPING}  # older releases know fewer
SOME = ("qwen3_next", "kimi_linear", "mamba2")
NORMLESS = ("falcon_h1", "lfm2", "lfm2_moe", "lfm3")  # no norm there (by default)
LEFT_ALONE = {
    *("mamba", "falcon_mamba", "jamba", "zamba"),  # the recurrence is none of the family
    *("inkling", "inkling2", "inkling2_loop"),  # seq_idx alone is handed on
}
ELSEWHERE = {"glm5_next"}  # test_equipped.py has its layer


@pytest.fixture(scope="module", params=list(TINY))
def model(request):
    return tiny(request.param)


def tiny(name):
    torch.manual_seed(0)
    known = AutoConfig.for_model(name, **TINY[name])
    return AutoModelForCausalLM.from_config(known).eval().requires_grad_(True)


def tokens(*shape):
    return torch.randint(2, 60, shape, generator=torch.Generator().manual_seed(1))


def differentiated(model, ids, mask=None):
    model.zero_grad()
    logits = model(ids, attention_mask=mask).logits
    logits.square().mean().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_near(found, wanted, most=1e-4):
    assert (found - wanted).norm() <= most * wanted.norm()


@pytest.mark.parametrize("left", [0, 5], ids=["whole", "padded"])
def test_logits_and_gradients_are_those_of_the_model(model, left):
    ids, mask = tokens(2, 21), torch.ones(2, 21, dtype=torch.long)
    mask[0, :left] = 0
    logits, gradients = differentiated(model, ids, mask)
    with use_operators(model) as installed:
        assert all(isinstance(layer, Equipped) for layer in installed.layers)
        found = differentiated(model, ids, mask)
    assert_near(found[0], logits)
    assert found[1].keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert_near(found[1][name], gradient, 1e-3)
    assert torch.equal(differentiated(model, ids, mask)[0], logits), "restored"


def test_generated_tokens_are_those_of_the_model(model):
    """Greedy; the second prompt is padded on the left."""
    ids, mask = tokens(2, 13), torch.ones(2, 13, dtype=torch.long)
    mask[0, :4] = 0
    wanted = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    with use_operators(model):
        assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False), wanted)


def onto(cache, model, ids, start):
    """Logits of the tokens from ``start`` on.  Positions are given, as generate does: Bamba starts each call at 0."""
    positions = torch.arange(start, ids.shape[1]).expand(ids.shape[0], -1)
    return model(ids[:, start:], cache=cache, use_cache=True, position_ids=positions).logits


def in_parts(model, ids, ends):
    """Logits of all tokens, and the cache, of calls that end at these tokens: of many tokens, of several, of one."""
    cache = DynamicCache(config=model.config)
    found = [onto(cache, model, ids[:, :end], start) for start, end in pairwise([0, *ends, ids.shape[1]])]
    return torch.cat(found, 1), cache


def greedy(model, ids, ends, count):
    """A prompt that was read in parts, and the tokens after it."""
    logits, cache = in_parts(model, ids, ends)
    for _ in range(count):
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
        logits = onto(cache, model, ids, ids.shape[1] - 1)
    return ids


SPLITS = st.lists(st.integers(1, 11), max_size=4, unique=True).map(sorted)


@torch.no_grad()
def test_greedy_tokens_are_those_of_the_model_wherever_the_prompt_is_split(model):
    ids = tokens(2, 12)
    whole, wanted = model(ids).logits, model.generate(ids, max_new_tokens=5, do_sample=False)

    @settings(max_examples=6)
    @given(SPLITS)
    def check(ends):
        assert_near(in_parts(model, ids, ends)[0], whole)
        assert torch.equal(greedy(model, ids, ends, 5), wanted)

    with pytorch_version(), use_operators(model):
        check()


@pytest.mark.parametrize("name", SOME)
@torch.no_grad()
def test_kernels_continue_from_any_split(name):
    model, ids = tiny(name), tokens(1, 12)
    wanted = model(ids).logits

    @settings(max_examples=6)
    @given(SPLITS)
    def check(ends):
        assert_near(in_parts(model, ids, ends)[0], wanted)

    with use_operators(model):
        check()


def test_norms_with_a_gate_are_among_the_layers(model):
    with use_operators(model) as installed:
        norms = [layer for layer in installed.layers if type(layer).__name__.endswith("RMSNormGated")]
    assert bool(norms) == (model.config.model_type not in NORMLESS)


@pytest.mark.parametrize("name", SOME)
def test_packed_sequences_read_nothing_of_each_other(name):
    """The convolution follows the offsets, too: the same as one call for each sequence."""
    model = tiny(name)
    with use_operators(model) as installed:
        layer = next(layer for layer in installed.layers if hasattr(layer, "conv1d"))
        x, ends = torch.randn(1, 20, 32), (0, 7, 8, 20)
        if name == "kimi_linear":  # its own path hands offsets to nothing that reads them
            with pytest.raises(ArgumentError, match="cu_seq_lens_q"):
                layer(x, cu_seq_lens_q=torch.tensor(ends))
            return
        with pytest.raises(ArgumentError, match="pass cu_seq_lens_q"):
            layer(x, seq_idx=torch.zeros(1, 20, dtype=torch.int32))
        found = layer(x, cu_seq_lens_q=torch.tensor(ends))
        assert_near(found, torch.cat([layer(x[:, a:b]) for a, b in pairwise(ends)], 1), 1e-5)


@pytest.mark.parametrize("name", SOME)
def test_copies_and_loaded_models_keep_them(name):
    model, ids = tiny(name), tokens(1, 9)
    with torch.no_grad(), use_operators(model):
        wanted, file = model(ids).logits, io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            equipped = [layer for layer in other.modules() if isinstance(layer, Equipped)]
            assert len(equipped) == sum(isinstance(layer, Equipped) for layer in model.modules()) > 1
            assert all(layer.equipment.operators is mixers for layer in equipped)
            assert torch.equal(other(ids).logits, wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_on_a_gpu(model, dtype):
    """Kernels throughout: logits, gradients, greedy tokens."""
    most = {torch.float32: 1e-3, torch.bfloat16: 4e-2}[dtype]
    model, ids = copy.deepcopy(model).to("cuda", dtype), tokens(2, 21).cuda()
    logits, gradients = differentiated(model, ids)
    wanted = model.generate(ids, max_new_tokens=6, do_sample=False)
    before = sum(LAUNCHES.values())
    with use_operators(model):
        found = differentiated(model, ids)
        generated = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert sum(LAUNCHES.values()) > before
    assert_near(found[0], logits, most)
    largest = max(gradient.norm() for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert (found[1][name] - gradient).norm() <= most * max(gradient.norm(), 0.1 * largest), name
    assert dtype == torch.bfloat16 or torch.equal(generated, wanted)


@pytest.mark.parametrize("name", ["mamba", "inkling_text"])
def test_models_that_are_left_alone(name):
    if name not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    sizes = BASE | {"head_dim": 16, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_head_dim": 16}
    experts = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes | experts))
    with pytest.raises(ArgumentError, match="or causal_conv1d_fn and causal_conv1d_update"):
        use_operators(model)


def test_what_is_not_known_is_refused():
    with pytest.raises(ArgumentError, match="mamba2_chunk_scan and mamba2_selective_state_update"):
        use_operators(torch.nn.Linear(2, 2))
    with pytest.raises(ArgumentError, match="dt_softplus: got False, expected True"):
        mixers.mamba2_chunk_scan(*[torch.ones(1)] * 5, 16)
    model = tiny("mamba2")
    with use_operators(model), pytest.raises(ArgumentError, match="has operators already"):
        use_operators(model)


class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.ones(8)), 1e-6


@pytest.mark.parametrize("order", ["one_plus", "tanh", "three"])
def test_a_norm_of_another_kind_is_left_alone(order):
    def forward(self, x, gate):
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (1 + self.weight) * x * (gate.sigmoid() if order == "one_plus" else gate.tanh())

    assert mixers.norm_like(Norm(), forward if order != "three" else lambda self, x, gate, more: x) is None


def test_every_model_that_calls_these_functions_is_here():
    folder = Path(models.__file__).parent
    calling = {path.parent.name for path in folder.glob("*/modeling_*.py") if "causal_conv1d_fn(" in path.read_text()}
    tried = {type(AutoConfig.for_model(name)).__module__.split(".")[-2] for name in TINY}
    assert tried <= calling <= tried | LEFT_ALONE | ELSEWHERE


@pytest.mark.parametrize("around", [True, False])
def test_convolutions_and_norms_can_be_left_alone(model, around):
    ids = tokens(1, 9)
    wanted = model(ids).logits
    if not around and model.config.model_type.startswith("lfm"):
        with pytest.raises(ArgumentError, match="holds no gated delta net layer"):
            use_operators(model, around=False)
        return
    with use_operators(model, around=around) as installed:
        names = {role.name for layer in installed.layers for role in layer.equipment.roles}
        assert names.isdisjoint(CONVOLUTION) if not around else names.issuperset(CONVOLUTION)
        norms = [layer for layer in installed.layers if type(layer).__name__.endswith("RMSNormGated")]
        assert around or not norms
        assert_near(model(ids).logits, wanted)
