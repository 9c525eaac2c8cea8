"""The mixer: graphs with offsets and their derivatives, kernels and PyTorch versions against float64, drop-in calls."""

import inspect
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import pytorch_version
from torch._subclasses.fake_tensor import FakeTensorMode

from gdngen import ops, oracle, verification
from gdngen.errors import SpecError
from gdngen.ir import evaluate, parse
from gdngen.ir.ops import OPS
from gdngen.mixer import calls, operators, packages
from gdngen.mixer.graphs import backward_graph, forward_graph
from gdngen.mixer.inspection import inspect as inspect_kernels
from gdngen.mixer.specs import Convolution, Gate, RowNorm
from gdngen.oracle import rms_ratio
from gdngen.package import faults

SILU = Convolution(width=4, activation="silu")
WHOLE = Convolution(width=3, bias=True, activation="silu", residual=True, columns=3)
GATED = RowNorm(gate="silu", weight="plain")
SPECS = [
    SILU,
    WHOLE,
    Convolution(width=2, columns=2),
    GATED,
    RowNorm(norm="l2"),
    RowNorm(gate="sigmoid", weight="one_plus", bias=True, residual=True),
    RowNorm(gate="silu", weight="plain", gate_first=True),
    Gate(bias=True),
    Gate(kind="bounded", bias=True),
    Gate(kind="bounded"),
    Gate(kind="sigmoid2"),
]
IDS = [spec.name for spec in SPECS]
# Of rms(error) / rms(exact): outputs, gradients.  Results in 16 bits are rounded once.
BUDGETS = {torch.float32: (1e-6, 5e-6), torch.float16: (1e-3, 1e-3), torch.bfloat16: (5e-3, 5e-3)}


def run(spec, x, offsets=None, dtype=None):
    package = operators.package_of(spec)
    cu_seqlens = None if offsets is None else torch.tensor(offsets, dtype=[torch.int32, torch.int64][len(offsets) % 2])
    return package.run(package.Call(x, calls.number_of(spec), cu_seqlens, dtype, isinstance(spec, Convolution)))


def cotangents_of(found, names, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(x.shape, generator=generator).to(x.dtype) for n, x in zip(names, found, strict=True)}


def check(spec, shape, dtype=torch.float32, offsets=None, stateful=True, seed=0):
    """Outputs and every gradient against the graph in float64, twice the same bits."""
    sequences = None if offsets is None else len(offsets) - 1
    x = calls.inputs(spec, shape, dtype=dtype, sequences=sequences, seed=seed)
    if not stateful:
        x |= {"h0": None} if "h0" in x else {}
    leaves = [y.requires_grad_() for y in x.values() if y is not None]
    names = [name for name, y in x.items() if y is not None]
    found = run(spec, x, offsets)
    dy = cotangents_of(found, operators.package_of(spec).OUTPUTS)
    gradients = torch.autograd.grad(found, leaves, list(dy.values()))
    values = {name: None if y is None else y.detach() for name, y in x.items()}
    exact, slopes = calls.answer(spec, values, calls.number_of(spec), offsets, dy)
    output_budget, gradient_budget = BUDGETS[dtype]
    for name, y in zip(operators.package_of(spec).OUTPUTS, found, strict=True):
        assert y.dtype == dtype and rms_ratio(y, exact[name]) <= output_budget, name
    for name, y in zip(names, gradients, strict=True):
        assert y.dtype == dtype and rms_ratio(y, slopes[name]) <= gradient_budget, f"d{name}"
    again = run(spec, x, offsets)
    assert all(map(torch.equal, found, again))
    assert all(map(torch.equal, gradients, torch.autograd.grad(again, leaves, list(dy.values()))))


# ---- graphs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_text_round_trip(spec):
    for graph in (forward_graph(spec), backward_graph(spec)):
        assert parse(str(graph)) == graph


def random_data(spec, length, D=3):
    """Inputs of the forward graph in float64."""
    generator = torch.Generator().manual_seed(length)
    shapes = {"iv": (2, length, D), "v": (D,), "": ()}
    graph = forward_graph(spec)
    data = {}
    for name, i in graph.inputs.items():
        node = graph.nodes[i]
        shape = (2, D) if node.grid == "b" else shapes[node.axes]
        data[name] = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1
    return data


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 11])
@pytest.mark.parametrize("spec", [SILU, WHOLE], ids=["silu", "whole"])
def test_chunks_hand_their_window_on(spec, length):
    """However short they are, and whether or not the last one is full."""
    data = random_data(spec, length)
    whole = evaluate(forward_graph(spec), data, length, length)
    for chunk in (1, 2, 3, 5):
        parts = evaluate(forward_graph(spec), data, length, chunk)
        for name in whole:
            if "@" not in name:
                torch.testing.assert_close(parts[name], whole[name])


def derived_and_exact(spec, length):
    """Gradients by the derived graph, chunk by chunk, and by autograd of the evaluation."""
    forward, backward = forward_graph(spec), backward_graph(spec)
    data = {name: x.requires_grad_() for name, x in random_data(spec, length).items()}
    outputs = {n: x for n, x in evaluate(forward, data, length, 3).items() if "@" not in n}
    states = {n.partition("@")[0]: x for n, x in evaluate(forward, data, length, 3).items() if "@" in n}
    generator = torch.Generator().manual_seed(0)
    dy = {n: torch.randn(x.shape, generator=generator, dtype=x.dtype) for n, x in outputs.items()}
    wanted = [n for n in data if n not in forward.scalars]
    exact = torch.autograd.grad(list(outputs.values()), [data[n] for n in wanted], list(dy.values()))
    given = {**{n: x.detach() for n, x in data.items()}, **{f"d{n}": x for n, x in dy.items()}, **states}
    found = evaluate(backward, given, length, 3)
    return [(found[f"d{n}"], x) for n, x in zip(wanted, exact, strict=True)]


@pytest.mark.parametrize("length", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_derived_gradients(spec, length):
    for found, exact in derived_and_exact(spec, length):
        torch.testing.assert_close(found, exact)


@pytest.mark.parametrize("op", ["lag", "ending"])
def test_a_wrong_derivative_would_be_seen(monkeypatch, op):
    derive = OPS[op].derive

    def wrong(build, me, adjoint, node):
        for operand, contribution in derive(build, me, adjoint, node):
            yield operand, build.mul(contribution, coef=1.5)

    monkeypatch.setitem(OPS, op, replace(OPS[op], derive=wrong))
    backward_graph.cache_clear()
    try:
        with pytest.raises(AssertionError):
            for found, exact in derived_and_exact(SILU, 5):
                torch.testing.assert_close(found, exact)
    finally:
        backward_graph.cache_clear()


# ---- kernels and PyTorch versions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
@pytest.mark.parametrize("dtype", BUDGETS, ids=str)
def test_kernels(spec, dtype):
    ops.LAUNCHES.clear()
    check(spec, (2, 21, 37), dtype)
    assert ops.LAUNCHES.total() >= 4


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
@pytest.mark.parametrize("dtype", BUDGETS, ids=str)
def test_pytorch_versions(spec, dtype):
    ops.LAUNCHES.clear()
    with pytorch_version():
        check(spec, (2, 21, 37), dtype)
    assert not ops.LAUNCHES.total()


@pytest.mark.parametrize("back_end", ["kernels", "pytorch"])
@pytest.mark.parametrize("offsets", [(0, 1, 1, 3, 20, 37), (0, 0), (0, 16, 33), (0, 40), (0,)])
@pytest.mark.parametrize("spec", [SILU, WHOLE], ids=["silu", "whole"])
def test_packed_sequences(spec, offsets, back_end):
    """Empty ones, ones shorter than the window, rows past the last offset, none at all."""
    if offsets == (0,):
        x = calls.inputs(spec, (1, 5, 3), sequences=0)
        o, ht = run(spec, x, offsets)
        assert not o.any() and ht.shape == (0, 3, spec.columns)
    elif back_end == "kernels":
        check(spec, (1, 40, 3), offsets=offsets)
    else:
        with pytorch_version():
            check(spec, (1, 40, 3), offsets=offsets)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 16, 17])
def test_short_sequences(length):
    for spec in (SILU, WHOLE):
        check(spec, (2, length, 5), stateful=length % 2 == 0)
        with pytorch_version():
            check(spec, (2, length, 5))


@st.composite
def convolutions(draw):
    width = draw(st.integers(2, 4))
    spec = Convolution(
        width=width,
        bias=draw(st.booleans()),
        activation=draw(st.sampled_from(["none", "silu"])),
        residual=draw(st.booleans()),
        columns=draw(st.sampled_from([width - 1, width])),
    )
    ends = draw(st.none() | st.lists(st.integers(0, 40), min_size=1, max_size=4))
    offsets = None if ends is None else (0, *sorted(ends))
    T = draw(st.integers(0, 40)) if offsets is None else offsets[-1] + draw(st.integers(0, 3))
    B = draw(st.integers(1, 3)) if offsets is None else 1
    return spec, (B, T, draw(st.integers(1, 70))), offsets, draw(st.booleans())


@st.composite
def norms(draw):
    gate = draw(st.sampled_from(["none", "silu", "sigmoid"]))
    spec = RowNorm(
        norm=draw(st.sampled_from(["l2", "rms"])),
        gate=gate,
        weight=draw(st.sampled_from(["none", "plain", "one_plus"])),
        bias=draw(st.booleans()),
        residual=draw(st.booleans()),
        gate_first=draw(st.booleans()) and gate != "none",
    )
    return spec, (draw(st.integers(1, 3)), draw(st.integers(0, 30)), draw(st.integers(8, 300))), None, True


@st.composite
def gates(draw):
    kind = draw(st.sampled_from(["softplus", "bounded", "sigmoid", "sigmoid2"]))
    spec = Gate(kind=kind, bias=kind in ("softplus", "bounded") and draw(st.booleans()))
    return spec, (draw(st.integers(1, 3)), draw(st.integers(0, 30)), draw(st.integers(1, 300))), None, True


@settings(max_examples=15)
@given(case=convolutions() | norms() | gates(), dtype=st.sampled_from([torch.float32, torch.float16]))
@example(case=(SILU, (1, 40, 300), None, True), dtype=torch.float32)
def test_any_member(case, dtype):
    spec, shape, offsets, stateful = case
    check(spec, shape, dtype, offsets, stateful)


@pytest.mark.full
@settings(max_examples=120)
@given(case=convolutions() | norms() | gates(), dtype=st.sampled_from(list(BUDGETS)), seed=st.integers(0, 9))
def test_many_members(case, dtype, seed):
    spec, shape, offsets, stateful = case
    check(spec, shape, dtype, offsets, stateful, seed)
    with pytorch_version():
        check(spec, shape, dtype, offsets, stateful, seed)


@pytest.mark.parametrize("D", [1, 2])
def test_few_channels(D):
    """Where the norm leaves next to nothing of a gradient, its error is that of the terms that cancel."""
    spec = RowNorm(norm="l2")
    x = calls.inputs(spec, (2, 7, D))
    leaf = x["x"].requires_grad_()
    found = run(spec, x)
    dy = cotangents_of(found, ["o"])
    (dx,) = torch.autograd.grad(found, leaf, dy["o"])
    _, slopes = calls.answer(spec, {"x": leaf.detach()}, 1e-5, None, dy)
    scale = (dy["o"] / leaf.detach().square().sum(-1, keepdim=True).sqrt()).abs().max()
    assert (dx - slopes["x"]).abs().max() < 1e-6 * scale


@pytest.mark.parametrize("spec", [GATED, SILU, Gate(kind="sigmoid2")], ids=["norm", "conv", "gate"])
def test_shut_gates(spec):
    """The sigmoid is next to nothing and exp(-x) next to infinity: their products are neither."""
    x = calls.inputs(spec, (1, 8, 16))
    x["g" if "g" in x else "x"] *= 200.0
    leaves = [y.requires_grad_() for y in x.values()]
    found = run(spec, x)
    dy = cotangents_of(found, operators.package_of(spec).OUTPUTS)
    gradients = torch.autograd.grad(found, leaves, list(dy.values()))
    values = {name: y.detach() for name, y in x.items()}
    _, slopes = calls.answer(spec, values, calls.number_of(spec), None, dy)
    for name, y in zip(x, gradients, strict=True):
        assert rms_ratio(y, slopes[name]) <= 5e-6, name


def test_what_lies_past_a_sequence_reaches_nothing():
    x = calls.inputs(SILU, (1, 40, 3), sequences=2)
    given = (0, 5, 20)
    clean = run(SILU, x, given)
    for first, last in ((20, 40), (5, 20)):  # rows past the offsets; the next sequence
        dirty = x["x"].clone()
        dirty[:, first:last] = float("nan")
        leaf = dirty.requires_grad_()
        o, _ = run(SILU, {**x, "x": leaf}, given)
        assert torch.equal(o[:, :5], clean[0][:, :5])
        (dx,) = torch.autograd.grad(o[:, :5].sum(), leaf)
        assert dx[:, :5].isfinite().all()


def test_strided_inputs():
    """Slices of a projection are read where they are; other layouts are copied."""
    x, wide = calls.inputs(SILU, (2, 21, 8)), torch.zeros(2, 21, 24)
    wide[..., 8:16] = x["x"]
    wanted = run(SILU, x)
    for view in (wide[..., 8:16], x["x"].transpose(1, 2).contiguous().transpose(1, 2), x["x"].expand(2, 21, 8)):
        assert all(map(torch.equal, run(SILU, {**x, "x": view}), wanted))
    rows = calls.inputs(GATED, (2, 21, 8))
    wide[..., 8:16] = rows["x"]
    assert torch.equal(run(GATED, {**rows, "x": wide[..., 8:16]})[0], run(GATED, rows)[0])


def test_one_output_alone_has_gradients():
    x = calls.inputs(WHOLE, (2, 9, 5))
    leaf = x["x"].requires_grad_()
    for n in range(2):
        found = run(WHOLE, x)
        (dx,) = torch.autograd.grad(found[n].sum(), leaf)
        dy = {name: torch.ones_like(y) if i == n else None for i, (name, y) in enumerate(zip(("o", "ht"), found))}
        _, slopes = calls.answer(WHOLE, {k: y.detach() for k, y in x.items()}, 0.0, None, dy)
        assert rms_ratio(dx, slopes["x"]) < 1e-6


# ---- the operators as others call them -------------------------------------------------------------------------------


def convolved(x, weight, bias=None, before=None):
    """[B, T, D] by torch's own convolution, in float64."""
    W = weight.shape[1]
    before = x.new_zeros(x.shape[0], x.shape[2], W - 1) if before is None else before[..., 1 - W :]
    padded = torch.cat([before, x.transpose(1, 2)], 2).double()
    y = torch.nn.functional.conv1d(
        padded, weight[:, None].double(), None if bias is None else bias.double(), groups=x.shape[2]
    )
    return torch.nn.functional.silu(y).transpose(1, 2)


@pytest.mark.parametrize("back_end", ["kernels", "pytorch"])
def test_convolution_against_torch(back_end):
    x = calls.inputs(WHOLE, (2, 21, 6))
    with pytorch_version() if back_end == "pytorch" else torch.no_grad():
        o, final = ops.causal_conv1d(
            x["x"], x["weight"], x["bias"], x["residual"], x["h0"], True, activation="swish"
        )  # fmt: skip
        assert rms_ratio(o, convolved(x["x"], x["weight"], x["bias"], x["h0"]) + x["residual"]) < 1e-6
        assert torch.equal(final, x["x"].transpose(1, 2)[..., -3:])
        turned = x["x"].transpose(1, 2)
        y, states = ops.causal_conv1d_fn(turned, x["weight"], x["bias"], activation="silu", return_final_states=True)
        assert rms_ratio(y.transpose(1, 2), convolved(x["x"], x["weight"], x["bias"])) < 1e-6
        assert torch.equal(states, turned[..., -2:])
        assert ops.causal_conv1d(x["x"], x["weight"][:, None], x["bias"])[1] is None


def test_state_is_as_wide_as_it_came():
    x = torch.randn(1, 1, 3)
    w = torch.randn(3, 4)
    for columns in (3, 4):
        h = torch.randn(1, 3, columns)
        assert torch.equal(ops.causal_conv1d(x, w, initial_state=h, output_final_state=True)[1][..., :-1], h[..., 1:])
    assert ops.causal_conv1d(x, w, output_final_state=True)[1].shape == (1, 3, 4)


@pytest.mark.parametrize("back_end", ["kernels", "pytorch"])
@settings(max_examples=8)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    width=st.integers(2, 4),
    columns=st.integers(0, 3),
    residual=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_updates_go_on_from_any_point(back_end, lengths, width, columns, residual, dtype):
    """The whole at once is a first part and then updates of any sizes, bit for bit with kernels."""
    T, D = sum(lengths), 5
    generator = torch.Generator().manual_seed(T)
    x = torch.randn(2, T, D, generator=generator).to(dtype)
    w, b = (torch.randn(*s, generator=generator).to(dtype) for s in ((D, width), (D,)))
    more = torch.randn(2, T, D, generator=generator).to(dtype) if residual else None
    with pytorch_version() if back_end == "pytorch" else torch.no_grad():
        whole, _ = ops.causal_conv1d(x, w, b, more, activation="silu")
        state = torch.zeros(2, D, width - 1 + columns, dtype=dtype)
        parts, first = [], 0
        for length in lengths:
            here = slice(first, first + length)
            part = None if more is None else more[:, here]
            o, cache = ops.causal_conv1d_update(x[:, here], state, part, w, b, "silu")
            assert cache is state
            parts.append(o)
            first += length
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    kept = min(T, state.shape[2])
    assert torch.equal(state[..., state.shape[2] - kept :], x[:, T - kept :].transpose(1, 2))


@pytest.mark.parametrize("back_end", ["kernels", "pytorch"])
def test_update_as_causal_conv1d_calls_it(back_end):
    x, w, b = torch.randn(3, 6), torch.randn(6, 4), torch.randn(6)
    states = torch.randn(5, 6, 3)
    indices = torch.tensor([4, -1, 0], dtype=torch.int32)
    before = states.clone()
    with pytorch_version() if back_end == "pytorch" else torch.no_grad():
        o = ops.causal_conv1d_update(
            x, conv_state=states, weight=w, bias=b, activation="silu", conv_state_indices=indices
        )
        assert not o[1].any() and torch.equal(states[1:4], before[1:4])
        for row, slot in ((0, 4), (2, 0)):
            wanted = convolved(x[row][None, None], w, b, before[slot][None])
            assert rms_ratio(o[row], wanted[0, 0]) < 1e-6
            assert torch.equal(states[slot], torch.cat([before[slot][:, 1:], x[row][:, None]], 1))
        one, two = before[:3].clone(), before[:3].clone()
        tokens = x[:, :, None]
        a = ops.causal_conv1d_update(tokens, one, w, b, "silu")
        c = ops.causal_conv1d_update(tokens, conv_state=two, weight=w, bias=b, activation="silu")
        assert a.shape == tokens.shape and torch.equal(a, c) and torch.equal(one, two)
        d, cache = ops.causal_conv1d_update(x[None], before[:3].clone(), None, w, b, "silu")
        assert d.shape == (1, 3, 6) and torch.equal(d[0], a[..., 0]) and torch.equal(cache, one)
        assert ops.causal_conv1d_update(x, before[:3].clone(), w, None, None).shape == x.shape  # without a bias


def test_norms_against_torch():
    x, g, residual = torch.randn(3, 4, 5, 24).unbind(0)
    w, b = torch.rand(2, 24)
    assert rms_ratio(ops.l2norm(x), x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()) < 1e-6
    assert ops.l2norm(x, output_dtype=torch.float16).dtype == torch.float16

    def rms(y, weight):
        return torch.nn.functional.rms_norm(y.double(), (24,), None, 1e-6) * weight

    silu = torch.nn.functional.silu(g.double())
    assert rms_ratio(ops.rms_norm_gated(x, g, w, b), (rms(x, w) + b) * silu) < 1e-6
    assert rms_ratio(ops.rms_norm_gated(x, g, w, None, "sigmoid"), rms(x, w) * g.double().sigmoid()) < 1e-6
    assert rms_ratio(ops.rms_norm_gated(x, g, w, None, weight_offset=1), rms(x, 1 + w) * silu) < 1e-6
    assert rms_ratio(ops.rms_norm_gated(x, g, w, None, norm_before_gate=False), rms(x * silu, w)) < 1e-6
    o, s = ops.rms_norm_gated(x.half(), g, None, None, residual=residual.half(), prenorm=True, residual_in_fp32=True)
    assert o.dtype == torch.float16 and s.dtype == torch.float32
    assert rms_ratio(s, x.half().double() + residual.half().double()) < 1e-6
    assert ops.rms_norm_gated(x, g, w, None, prenorm=True)[1] is x


def test_against_transformers():
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    norm = modeling.Qwen3NextRMSNormGated(32, eps=1e-6)
    norm.weight.data.uniform_(0.5, 1.5)
    x, g = torch.randn(2, 7, 4, 32)
    torch.testing.assert_close(ops.rms_norm_gated(x, g, norm.weight, None, eps=1e-6), norm(x, g))
    torch.testing.assert_close(ops.l2norm(x), modeling.l2norm(x))
    x, w, states = torch.randn(2, 6, 9), torch.randn(6, 4), torch.randn(2, 6, 4)
    fn, step = (getattr(f, "__wrapped__", f) for f in (modeling.causal_conv1d_fn, modeling.causal_conv1d_update))
    with torch.no_grad():
        torch.testing.assert_close(ops.causal_conv1d_fn(x, w, None, activation="silu"), fn(x, w, None, "silu"))
        other = states.clone()
        found = ops.causal_conv1d_update(x[..., :1], states, w, None, "silu")
        torch.testing.assert_close(found, step(x[..., :1], other, w, None, "silu"))
        torch.testing.assert_close(states, other)


@pytest.mark.parametrize("back_end", ["kernels", "pytorch"])
@pytest.mark.parametrize(
    "name, lower_bound", [("fused_gdn_gate", None), ("fused_kda_gate", None), ("fused_kda_gate", -2.0)]
)
def test_gates_alone(name, lower_bound, back_end):
    """Outputs and gradients against float64; rates that overflow, inputs where the softplus is x or next to nothing."""
    generator = torch.Generator().manual_seed(0)
    channels = (7,) if "kda" in name else ()
    a, bias = torch.randn(2, 9, 3, *channels, generator=generator) * 8, torch.randn(3, *channels, generator=generator)
    a[0, 0], a[0, 1] = -90.0, 90.0
    leaves = [y.requires_grad_() for y in (a, torch.tensor([-3.0, 0.0, 2.0]), bias)]
    options = {} if lower_bound is None else {"lower_bound": lower_bound}
    with pytorch_version() if back_end == "pytorch" else torch.enable_grad():
        found = getattr(ops, name)(leaves[0], leaves[1], leaves[2].flatten(), **options)
        exact = oracle.gate(*leaves, lower_bound)
        dy = torch.randn(found.shape, generator=generator)
        slopes = torch.autograd.grad(found, leaves, dy), torch.autograd.grad(exact, leaves, dy.double())
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-30)
        for one, other in zip(*slopes):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        assert getattr(ops, name)(a, torch.full((3,), 200.0), **options).isfinite().all()
        turned = a.detach().transpose(0, 1)  # strided, and in a dtype of its own
        half = getattr(ops, name)(turned.half(), leaves[1], **options, output_dtype=torch.float16)
        wanted = oracle.gate(turned.half(), leaves[1], None, lower_bound).half()
        torch.testing.assert_close(half, wanted, rtol=2e-3, atol=1e-6)


def test_a_bounded_gate_without_a_rate():
    a = torch.randn(2, 9, 3, 7)
    found = ops.fused_kda_gate(a, lower_bound=-5.0)
    torch.testing.assert_close(found.double(), oracle.gate(a, torch.zeros(3), None, -5.0), rtol=1e-5, atol=1e-5)


def test_a_write_strength_alone():
    b = (torch.randn(2, 9, 3, generator=torch.Generator().manual_seed(0)) * 8).requires_grad_()
    for twice in (False, True):
        found = ops.sigmoid_beta(b, twice)
        exact = (1 + twice) * b.double().sigmoid()
        torch.testing.assert_close(found.double(), exact, rtol=4e-6, atol=0)
        slopes = [torch.autograd.grad(y.square().sum(), b)[0] for y in (found, exact)]
        torch.testing.assert_close(*slopes, rtol=1e-5, atol=0)
    assert ops.sigmoid_beta(b.bfloat16()).dtype == torch.bfloat16
    assert ops.sigmoid_beta(b.bfloat16(), output_dtype=torch.float32).dtype == torch.float32


THEIRS = {  # of fla-core 0.6.0 and causal-conv1d 1.6: positions and defaults
    "causal_conv1d": "x weight=None bias=None residual=None initial_state=None output_final_state=False "
    "activation=None backend=triton cu_seqlens=None cu_seqlens_cpu=None chunk_indices=None cp_context=None",
    "causal_conv1d_update": "x cache=None residual=None weight=None bias=None activation=None",
    "fused_gdn_gate": "g A_log dt_bias=None output_dtype=torch.float32",
    "fused_kda_gate": "g A_log=None dt_bias=None lower_bound=None output_dtype=torch.float32",
    "l2norm": "x eps=1e-06 output_dtype=None",
    "rms_norm_gated": "x g weight bias activation=swish residual=None prenorm=False residual_in_fp32=False eps=1e-06",
    "causal_conv1d_fn": "x weight bias=None seq_idx=None initial_states=None return_final_states=False "
    "final_states_out=None activation=None",
}


@pytest.mark.parametrize("name", THEIRS)
def test_signatures(name):
    found = []
    for p in inspect.signature(getattr(ops, name)).parameters.values():
        if p.kind is p.POSITIONAL_OR_KEYWORD:
            found.append(p.name if p.default is p.empty else f"{p.name}={p.default}")
    assert " ".join(found) == THEIRS[name]


X, W4 = torch.zeros(2, 5, 3), torch.zeros(3, 4)
WRONG = [
    (lambda: ops.causal_conv1d(X[0], W4), r"x: got torch.float32 \[5, 3\] on cpu, expected .* \[B, T, D\]"),
    (lambda: ops.causal_conv1d(X.double(), W4), "x: got torch.float64"),
    (lambda: ops.causal_conv1d(X), "weight: got None"),
    (lambda: ops.causal_conv1d(X, W4[:2]), r"weight: got .* \[2, 4\] .* expected .* \[D, W\] = \[3, 4\]"),
    (lambda: ops.causal_conv1d(X, torch.zeros(3, 5)), "W of 2, 3 or 4"),
    (lambda: ops.causal_conv1d(X, W4, torch.zeros(4)), r"bias: got .*\[4\]"),
    (lambda: ops.causal_conv1d(X, W4, residual=X[:1]), "residual: got"),
    (lambda: ops.causal_conv1d(X, W4, activation="relu"), "activation: got 'relu', expected silu, swish or None"),
    (lambda: ops.causal_conv1d(X, W4, initial_state=torch.zeros(2, 3, 2)), "initial_state: got 2 columns, expected 3"),
    (lambda: ops.causal_conv1d(X, W4, initial_state=torch.zeros(1, 3, 4)), "initial_state: got"),
    (lambda: ops.causal_conv1d(X, W4, cu_seqlens=torch.tensor([0, 5])), "cu_seqlens: got B = 2, expected B = 1"),
    (lambda: ops.causal_conv1d(X[:1], W4, cu_seqlens=torch.tensor([0, 6])), "last offset 6, expected at most T = 5"),
    (lambda: ops.causal_conv1d(X[:1], W4, cu_seqlens=torch.tensor([0.0])), "cu_seqlens: got torch.float32"),
    (lambda: ops.causal_conv1d(X, W4, cp_context=1), "cp_context: got int"),
    (lambda: ops.causal_conv1d(X, W4, output_final_state="no"), "output_final_state: got 'no'"),
    (lambda: ops.causal_conv1d(X, W4, seq_idx=None), "seq_idx: causal_conv1d.. does not take it; use cu_seqlens"),
    (lambda: ops.fused_gdn_gate(X, torch.zeros(4)), r"A_log: got .*\[4\]"),
    (lambda: ops.fused_kda_gate(X, torch.zeros(6)), r"A_log: got .*\[6\]"),
    (lambda: ops.fused_gdn_gate(X, None), "A_log: got None"),
    (lambda: ops.fused_gdn_gate(X.long(), X[0, 0]), "g: got torch.int64"),
    (lambda: ops.fused_kda_gate(X, lower_bound=-7), "lower_bound: got -7"),
    (lambda: ops.fused_gdn_gate(X, X[0, 0], output_dtype=torch.int32), "output_dtype: got torch.int32"),
    (lambda: ops.sigmoid_beta(X.double()), "b: got torch.float64"),
    (lambda: ops.sigmoid_beta(X, "yes"), "allow_neg_eigval: got 'yes'"),
    (lambda: ops.causal_conv1d_fn(X[0], W4), r"x: got .*, expected \[B, D, T\]"),
    (lambda: ops.causal_conv1d_fn(X, W4, seq_idx=X), "seq_idx: got"),
    (lambda: ops.causal_conv1d_update(X, torch.zeros(2, 3, 2), None, W4), "cache: got 2 columns, expected at least 3"),
    (lambda: ops.causal_conv1d_update(X, None, None, W4), "cache: got None"),
    (lambda: ops.causal_conv1d_update(X[0], conv_state=X, weight=W4, cache_seqlens=X), "cache_seqlens: got"),
    (lambda: ops.causal_conv1d_update(X, X, None, W4, conv_state=X), "conv_state: got a state beside cache"),
    (lambda: ops.causal_conv1d_update(X, X, None, W4, conv_state_indices=X), "conv_state_indices: got indices without"),
    (lambda: ops.causal_conv1d_update(X.clone().requires_grad_(), torch.zeros(2, 3, 4), None, W4), "requires grad"),
    (lambda: ops.l2norm(3), "x: got 3"),
    (lambda: ops.l2norm(X[..., :0]), "x: got D = 0 channels"),
    (lambda: ops.l2norm(X, -1.0), "eps: got -1.0"),
    (lambda: ops.l2norm(X, 1e-6, torch.int32), "output_dtype: got torch.int32"),
    (lambda: ops.rms_norm_gated(X, X[:1], None, None), "g: got"),
    (lambda: ops.rms_norm_gated(X, X, W4, None), "weight: got"),
    (lambda: ops.rms_norm_gated(X, X, None, None, "relu"), "activation: got 'relu', expected silu, swish or sigmoid"),
    (lambda: ops.rms_norm_gated(X, X, None, None, weight_offset=1), "weight_offset: got 1"),
    (lambda: ops.rms_norm_gated(X, X, None, None, residual=X[0]), "residual: got"),
    (lambda: ops.rms_norm_gated(X, X, None, None, z=X), "z: rms_norm_gated.. does not take it"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_arguments(call, message):
    with pytest.raises(ops.ArgumentError, match=message):
        call()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Convolution(width=4, columns=2), "columns: got 2, expected 3 or 4"),
        (lambda: Convolution(width=9), "width: "),
        (lambda: RowNorm(gate_first=True), "gate_first: there is no gate"),
    ],
)
def test_specs_that_contradict_themselves(make, message):
    with pytest.raises(SpecError, match=message):
        make()


# ---- transforms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("back_end", ["kernels", "pytorch"])
def test_compiles_in_one_graph(back_end):
    torch.compiler.reset()
    x = calls.inputs(WHOLE, (1, 9, 5), sequences=2)
    leaves = [y.requires_grad_() for y in (x["x"], x["weight"], x["h0"])]
    offsets = torch.tensor([0, 3, 7])

    def f(tokens, weight, state):
        o, final = ops.causal_conv1d(
            tokens, weight, x["bias"], None, state, True, activation="silu", cu_seqlens=offsets
        )  # fmt: skip
        return ops.rms_norm_gated(ops.l2norm(o), tokens, None, None), final

    with pytorch_version() if back_end == "pytorch" else torch.enable_grad():
        wanted = torch.autograd.grad([y.sin().sum() for y in f(*leaves)], leaves)
        found = torch.compile(f, fullgraph=True, backend="aot_eager")(*leaves)
        for a, b in zip(torch.autograd.grad([y.sin().sum() for y in found], leaves), wanted):
            torch.testing.assert_close(a, b)


def test_update_compiles_in_one_graph():
    torch.compiler.reset()
    x, w = torch.randn(2, 1, 6), torch.randn(6, 4)
    one, two = torch.zeros(2, 2, 6, 4)

    def f(tokens, state):
        return ops.causal_conv1d_update(tokens, state, None, w, None, "silu")[0] * 2

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(x, one), f(x, two))
            assert torch.equal(one, two) and one.any()


@pytest.mark.parametrize("back_end", ["kernels", "pytorch"])
@pytest.mark.parametrize("spec", [SILU, GATED], ids=["conv", "norm"])
def test_functional_transforms(spec, back_end):
    x = calls.inputs(spec, (2, 5, 3))
    names = ["x", "weight"]
    values = [x[name] for name in names]

    def loss(*values):
        return sum(y.square().sum() for y in run(spec, {**x, **dict(zip(names, values))}))

    with pytorch_version() if back_end == "pytorch" else torch.enable_grad():
        leaves = [y.detach().requires_grad_() for y in values]
        wanted = torch.autograd.grad(loss(*leaves), leaves)
        for a, b in zip(torch.func.grad(loss, (0, 1))(*values), wanted):
            torch.testing.assert_close(a, b)
        stacked = [torch.stack([y, 2 * y]) for y in values]
        found = torch.func.vmap(torch.func.grad(loss, (0, 1)))(*stacked)
        for n in range(2):
            leaves = [y[n].detach().requires_grad_() for y in stacked]
            for a, b in zip(found, torch.autograd.grad(loss(*leaves), leaves)):
                torch.testing.assert_close(a[n], b)


def test_fake_tensors():
    with FakeTensorMode():
        x, w = torch.empty(2, 9, 5, dtype=torch.bfloat16), torch.empty(5, 4)
        o, final = ops.causal_conv1d(x, w, output_final_state=True)
        assert (o.shape, o.dtype, final.shape) == (x.shape, x.dtype, (2, 5, 4))
        assert ops.l2norm(x, output_dtype=torch.float32).dtype == torch.float32
        assert ops.causal_conv1d_update(x, torch.empty(2, 5, 4), None, w)[0].shape == x.shape


def test_second_derivatives_are_refused_by_kernels_alone():
    x = torch.randn(2, 3, requires_grad=True)
    (dx,) = torch.autograd.grad(ops.l2norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(ValueError, match="second derivative"):
        dx.sum().backward()
    with pytorch_version():
        assert torch.autograd.gradgradcheck(lambda y: ops.l2norm(y.float()).double(), x.double(), eps=1e-3, atol=1e-2)


# ---- packages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_packages_are_clean(spec, tmp_path):
    """As ruff would write them, the same bytes every time, and importable without gdngen."""
    folder = packages.build(spec, tmp_path)
    assert packages.render(spec, spec.name) == packages.render(spec, spec.name) and not faults(folder)
    for command in ("check", "format --check --diff"):
        call = [sys.executable, "-m", "ruff", *command.split(), "--config", "pyproject.toml", str(folder)]
        result = subprocess.run(call, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
    modules = ", ".join(f"{spec.name}.{module}" for module in ("launch", "reference", "registration"))
    code = f"import sys; sys.modules['gdngen'] = None; import {modules}"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_verify(tmp_path):
    """Passes for a package as built; finds a kernel that computes something else."""
    folder = packages.build(WHOLE, tmp_path)
    found = list(verification.verify(folder))
    assert len(found) > 15 and all(check.passed for check in found), [str(check) for check in found]
    kernel = folder / "kernels" / "forward.py"
    kernel.write_text(kernel.read_text().replace("b_x * b_w0", "b_x * b_w1"))
    failed = {check.where for check in verification.verify(folder) if not check.passed}
    assert failed == {"files", "kernels in Triton's interpreter"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_on_a_gpu(spec, tmp_path):
    found = list(verification.verify(packages.build(spec, tmp_path)))
    assert all(check.passed for check in found), [str(check) for check in found]


def test_a_damaged_package_is_built_again(tmp_path, monkeypatch):
    monkeypatch.setenv("GDNGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(packages, "_loaded", {})
    spec = RowNorm(norm="l2", weight="plain")
    folder = next(iter(packages.load(spec).__path__))
    with open(f"{folder}/reference.py", "a") as file:
        file.write("broken(")
    packages._loaded.clear()
    assert not faults(type(tmp_path)(next(iter(packages.load(spec).__path__))))


@pytest.mark.parametrize(
    "target", ["sm_90", *(pytest.param(t, marks=pytest.mark.full) for t in ("sm_80", "sm_100", "sm_120", "gfx942"))]
)
def test_nothing_spills(target):
    for spec in (WHOLE, GATED, Gate(bias=True)):
        records = list(inspect_kernels(spec, (target,), ("bf16", "fp32")))
        assert {record["kernel"] for record in records} in (
            {"conv_forward", "conv_final", "conv_backward", "conv_update"},
            {"norm_forward", "norm_backward"},
            {"gate_forward", "gate_backward"},
        )
        for record in records:
            assert record["spill_bytes"] == 0 and record["registers"] <= 255, record
