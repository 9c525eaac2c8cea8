"""Operators in transformers' gated delta net layers: installed, really called, put back, never half done."""

import copy
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
from transformers import DynamicCache
from transformers.models.qwen3_next import modeling_qwen3_next as modeling

from gdngen import oracle
from gdngen.errors import ArgumentError
from gdngen.integrate.transformers import pytorch_operators, use_operators
from gdngen.spec import Spec


def oracle_operators() -> SimpleNamespace:
    """The two operators as the float64 recurrence, counting their calls."""
    calls = {"chunk_gated_delta_rule": 0, "fused_recurrent_gated_delta_rule": 0}

    def operator(name):
        def call(
            q,
            k,
            v,
            g,
            beta,
            initial_state=None,
            output_final_state=False,
            use_qk_l2norm_in_kernel=False,
            cu_seqlens=None,
        ):
            assert use_qk_l2norm_in_kernel and cu_seqlens is None
            calls[name] += 1
            q, k = oracle.normalized(q), oracle.normalized(k)
            o, state = oracle.recurrence(q, k, v, g=g, beta=beta, h0=initial_state)
            return o.to(v.dtype), state if output_final_state else None

        return call

    return SimpleNamespace(calls=calls, **{name: operator(name) for name in calls})


def layer_and_config(seed: int = 0):
    torch.manual_seed(seed)
    config = modeling.Qwen3NextConfig(
        hidden_size=48,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
    )
    return modeling.Qwen3NextGatedDeltaNet(config, 0).eval(), config


class Old(torch.nn.Module):
    """A layer as older releases write it: the functions are attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.chunk_gated_delta_rule = self.recurrent_gated_delta_rule = self.original

    def original(self, *_, **__):
        raise AssertionError

    def forward(self, q, v, g, **options):
        return self.chunk_gated_delta_rule(q, q, v, g=g, beta=g.exp(), use_qk_l2norm_in_kernel=True, **options)[0]


@torch.no_grad()
def walk(layer, config, hidden, prefill):
    """Prefill, then one token at a time, through the layer's own cache."""
    cache = DynamicCache(config=config)
    parts = [hidden[:, :prefill], *hidden[:, prefill:].split(1, dim=1)]
    return torch.cat([layer(part, cache) for part in parts], dim=1), cache.layers[0].recurrent_states[0]


def test_prefill_and_decode_agree_with_the_layers_own_path() -> None:
    layer, config = layer_and_config()
    hidden, operators = torch.randn(2, 75, 48), oracle_operators()
    expected, expected_state = walk(layer, config, hidden, 70)
    with use_operators(layer, operators):
        got, state = walk(layer, config, hidden, 70)
    assert operators.calls == {"chunk_gated_delta_rule": 1, "fused_recurrent_gated_delta_rule": 5}
    assert oracle.rms_ratio(got, expected) < 1e-5
    assert oracle.rms_ratio(state, expected_state) < 1e-5


def test_kimi_delta_attention(packages) -> None:
    """The other kind of layer, through a package: prefill and decode as its own path computes them."""
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    torch.manual_seed(0)
    config = kimi.KimiLinearConfig(
        hidden_size=32, num_hidden_layers=1, layer_types=["linear_attention"], linear_head_dim=16, linear_num_heads=2
    )
    layer = kimi.KimiLinearDeltaAttention(config, 0).eval()
    torch.nn.init.normal_(layer.forget_gate.A_log)
    torch.nn.init.normal_(layer.forget_gate.dt_bias)
    hidden = torch.randn(1, 38, 32)
    expected, expected_state = walk(layer, config, hidden, 35)
    package = packages(Spec(gate="key", qk_norm=True, key_dim=16, value_dim=16, chunk=16))
    package.LAUNCHES.clear()
    with use_operators(layer, package):
        got, state = walk(layer, config, hidden, 35)
    assert package.LAUNCHES["recurrence"] == 3 and package.LAUNCHES["scan"] == 1
    assert oracle.rms_ratio(got, expected) < 1e-5 and oracle.rms_ratio(state, expected_state) < 1e-5
    with pytest.raises(ArgumentError, match="has no chunk_kda"):
        use_operators(layer, oracle_operators())
    with pytest.raises(ArgumentError, match="gdngen build --gate key --qk-norm --key-dim 16"):
        spec = Spec(qk_norm=True, key_dim=16, value_dim=16).model_dump()
        use_operators(layer, SimpleNamespace(SPEC=spec, chunk_kda=print, fused_recurrent_kda=print))


def test_only_the_given_layer_changes_and_restore_undoes_it() -> None:
    layer, config = layer_and_config()
    other, operators, hidden = copy.deepcopy(layer), oracle_operators(), torch.randn(1, 6, 48)
    before = dict(vars(layer))
    installed = use_operators(torch.nn.ModuleList([layer]), operators)
    walk(other, config, hidden, 5)
    assert sum(operators.calls.values()) == 0
    walk(layer, config, hidden, 5)
    assert sum(operators.calls.values()) == 2
    installed.restore()
    installed.restore()
    assert vars(layer) == before
    walk(layer, config, hidden, 5)
    assert sum(operators.calls.values()) == 2


def test_pytorch_operators_are_the_layers_own() -> None:
    layer, config = layer_and_config()
    hidden = torch.randn(1, 9, 48)
    expected, _ = walk(layer, config, hidden, 8)
    with use_operators(layer, pytorch_operators(layer)):
        assert torch.equal(walk(layer, config, hidden, 8)[0], expected)


def test_layers_that_keep_the_functions_as_attributes() -> None:
    layer, operators = Old(), oracle_operators()
    original, q = layer.chunk_gated_delta_rule, torch.randn(1, 3, 2, 8)
    with use_operators(layer, operators):
        layer(q, q, -torch.rand(1, 3, 2))
    assert operators.calls["chunk_gated_delta_rule"] == 1
    assert layer.chunk_gated_delta_rule == original


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cu_seqlens": None, "position_ids": torch.arange(4), "use_cache": True}, None),
        ({"cu_seqlens": None, "seq_idx": torch.zeros(1, 4)}, "seq_idx: packed sequences .* as cu_seq_lens_q"),
        ({"cu_seq_lens_q": torch.tensor([0, 4])}, "cu_seq_lens_q: this layer hands .* on its own path either"),
        ({"surprise": 1}, None),  # nothing reads it on the layer's own path
    ],
)
def test_keywords_from_the_model(options, message) -> None:
    layer, q = Old(), torch.randn(1, 4, 2, 8)
    with use_operators(layer, oracle_operators()):
        if message is None:
            layer(q, q, -torch.rand(1, 4, 2), **options)
        else:
            with pytest.raises(ArgumentError, match=message):
                layer(q, q, -torch.rand(1, 4, 2), **options)


def test_refusals_change_nothing() -> None:
    layer, _ = layer_and_config()
    before = dict(vars(layer))
    with pytest.raises(ArgumentError, match="Linear holds no gated delta net layer"):
        use_operators(torch.nn.Linear(2, 2), oracle_operators())
    with pytest.raises(ArgumentError, match="has no fused_recurrent_gated_delta_rule"):
        use_operators(layer, SimpleNamespace(chunk_gated_delta_rule=print))
    spec = {"rule": "delta", "gate": ("scalar",), "beta": "head", "qk_norm": True, "fused_gate": "none"}
    spec |= {"beta_logits": False, "normalize": False, "state_v_first": False, "key_dim": 128, "value_dim": 24}
    with pytest.raises(ArgumentError, match="needs key_dim=16, the package has 128; build one with"):
        use_operators(layer, SimpleNamespace(SPEC=spec, **vars(oracle_operators())))
    assert vars(layer) == before
    with use_operators(layer, oracle_operators()), pytest.raises(ArgumentError, match="has operators already"):
        use_operators(layer, oracle_operators())
