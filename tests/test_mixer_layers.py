"""Layers of gdngen's own against those of transformers, with the same weights; states, packed sequences, compiling."""

import copy
import io
import pickle
from itertools import pairwise

import pytest
import torch
from support import ROOT, pytorch_version

from gdngen.layers import GatedDeltaNet, KimiDeltaAttention, LayerState, Mamba2
from gdngen.runtime.arguments import ArgumentError

SIZE = 24


def qwen3_next():
    from transformers.models.qwen3_next import modeling_qwen3_next as modeling
    from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

    config = Qwen3NextConfig(
        hidden_size=SIZE, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=6, num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    return GatedDeltaNet(SIZE, 2, 4, 8, 6), modeling.Qwen3NextGatedDeltaNet(config, 0)


def qwen3_5():
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        hidden_size=SIZE, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=6, num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    return GatedDeltaNet(SIZE, 2, 4, 8, 6, fused_projections=False), modeling.Qwen3_5GatedDeltaNet(config, 0)


def kimi():
    from transformers.models.kimi_linear import modeling_kimi_linear as modeling
    from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig

    config = KimiLinearConfig(
        hidden_size=SIZE, linear_num_heads=2, linear_head_dim=8, num_hidden_layers=1, layer_types=["linear_attention"],
        rms_norm_eps=1e-5,
    )  # fmt: skip
    return KimiDeltaAttention(SIZE, 2, 8), modeling.KimiLinearDeltaAttention(config, 0)


def mamba2(groups=1):
    from transformers.models.mamba2 import modeling_mamba2 as modeling
    from transformers.models.mamba2.configuration_mamba2 import Mamba2Config

    config = Mamba2Config(
        hidden_size=SIZE, num_heads=6, head_dim=8, state_size=5, n_groups=groups, expand=2, num_hidden_layers=1,
        chunk_size=16,
    )  # fmt: skip
    return Mamba2(SIZE, 6, 8, 5, groups), modeling.Mamba2Mixer(config, 0)


MAKERS = {
    "qwen3-next": qwen3_next,
    "qwen3.5": qwen3_5,
    "kimi-linear": kimi,
    "mamba2": mamba2,
    "mamba2 of two groups": lambda: mamba2(2),
}
EVERY = pytest.mark.parametrize("model", MAKERS)


def pair(model):
    """Our layer with their weights, and theirs."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    ours, theirs = MAKERS[model]()
    with torch.no_grad():
        for name, x in theirs.named_parameters():
            if name.endswith(("dt_bias", "A_log")):
                x.uniform_(0.1, 1.5)
            elif name.endswith("norm.weight"):
                x.uniform_(0.5, 1.5)
    ours.load_state_dict(theirs.state_dict())  # the same names and shapes
    return ours, theirs.eval()


@EVERY
@pytest.mark.parametrize("padded", [False, True])
def test_outputs_and_gradients_are_theirs(model, padded):
    ours, theirs = pair(model)
    x = torch.randn(2, 11, SIZE)
    mask = torch.ones(2, 11)
    if padded:
        mask[0, :4] = 0
    keep = mask.bool()
    cotangent = torch.randn(2, 11, SIZE) * mask[:, :, None]
    results = []
    for layer in (ours, theirs):
        leaf = x.clone().requires_grad_()
        with pytorch_version():
            o = layer(leaf, attention_mask=mask if padded else None)
        wanted = dict(layer.named_parameters())
        slopes = torch.autograd.grad(o, [leaf, *wanted.values()], cotangent)
        results.append((o[keep], dict(zip(["x", *wanted], slopes))))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=1e-5)
    for name, slope in results[1][1].items():
        torch.testing.assert_close(results[0][1][name], slope, rtol=1e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


@EVERY
def test_prefill_and_decode_split_anywhere(model):
    ours, _ = pair(model)
    x = torch.randn(2, 9, SIZE)
    with pytorch_version(), torch.no_grad():
        whole = ours(x)
        for lengths in ((9,), (1, 1, 7), (4, 1, 1, 3), (2, 7), (8, 1)):
            state, parts = LayerState(), []
            for part in x.split(lengths, 1):
                parts.append(ours(part, state=state))
                state = saved_and_loaded(state)
            torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save({"window": state.window, "recurrent": state.recurrent}, file)
    file.seek(0)
    return LayerState(**torch.load(file))


@EVERY
def test_packed_sequences(model):
    ours, _ = pair(model)
    x, offsets = torch.randn(1, 12, SIZE), (0, 5, 6, 12)
    with pytorch_version(), torch.no_grad():
        state = LayerState()
        packed = ours(x, cu_seqlens=torch.tensor(offsets), state=state)
        for n, (a, b) in enumerate(pairwise(offsets)):
            alone = LayerState()
            torch.testing.assert_close(ours(x[:, a:b], state=alone), packed[:, a:b], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(alone.window[0], state.window[n])
            torch.testing.assert_close(alone.recurrent[0], state.recurrent[n], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", ["qwen3-next", pytest.param("kimi-linear", marks=pytest.mark.full), "mamba2"])
def test_kernels(model):
    """In Triton's interpreter, outputs and gradients as in PyTorch."""
    ours, _ = pair(model)
    x = torch.randn(1, 6, SIZE)
    found = []
    for version in (torch.enable_grad, pytorch_version):
        leaf = x.clone().requires_grad_()
        with version():
            o = ours(leaf)
            found.append([o, *torch.autograd.grad(o.square().sum(), [leaf, *ours.parameters()])])
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@EVERY
def test_copies_checkpoints_and_autocast(model):
    ours, _ = pair(model)
    x = torch.randn(1, 5, SIZE, requires_grad=True)
    with pytorch_version():
        wanted = ours(x)
        for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            assert torch.equal(other(x), wanted)
        again = torch.utils.checkpoint.checkpoint(ours, x, use_reentrant=False)
        slopes = [torch.autograd.grad(o.square().sum(), list(ours.parameters())) for o in (wanted, again)]
        assert all(map(torch.equal, *slopes))
        with torch.autocast("cpu", torch.bfloat16):
            o = ours(x)
        assert o.dtype == torch.bfloat16
        torch.testing.assert_close(o.float(), wanted, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("model", ["qwen3.5", pytest.param("mamba2", marks=pytest.mark.full)])
def test_compiles_in_one_graph(model):
    torch.compiler.reset()
    ours, _ = pair(model)
    x = torch.randn(1, 5, SIZE)
    with pytorch_version():
        wanted = ours(x)
        compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), wanted)


def test_initial_values_are_the_published_ones():
    layer = Mamba2(SIZE, 6, 8, 5)
    torch.testing.assert_close(layer.A_log, torch.arange(1.0, 7.0).log())
    step = torch.nn.functional.softplus(layer.dt_bias)
    assert (step > 0.9e-3).all() and (step < 0.11).all() and (layer.D == 1).all()
    layer = GatedDeltaNet(SIZE, 2, 4, 8, 6)
    assert (layer.dt_bias == 1).all() and (layer.A_log.exp() <= 16.01).all() and (layer.norm.weight == 1).all()
    gate = KimiDeltaAttention(SIZE, 2, 8).forget_gate
    assert gate.A_log.shape == (1, 1, 2, 1) and (gate.A_log >= 0).all() and gate.dt_bias.dtype == torch.float32


def test_wrong_arguments():
    with pytest.raises(ArgumentError, match="num_v_heads: got 3, expected a multiple of 2"):
        GatedDeltaNet(SIZE, 2, 3)
    with pytest.raises(ArgumentError, match="num_heads: got 5, expected a multiple of 2"):
        Mamba2(SIZE, 5, n_groups=2)
    layer = GatedDeltaNet(SIZE, 2, 4, 8, 6)
    with pytest.raises(ArgumentError, match=r"attention_mask: got \[1, 4\], expected \[B, T\] = \[1, 5\]"):
        layer(torch.zeros(1, 5, SIZE), attention_mask=torch.ones(1, 4))


def test_the_documentation_runs():
    text = (ROOT / "docs" / "token_mixer.md").read_text()
    blocks = [block.partition("```")[0] for block in text.split("```python\n")[1:]]
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "token_mixer.md", "exec"), {})
