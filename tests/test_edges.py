"""Edges of the contract (section 6), faults seen in the wild, what holds between calls: the kernels, interpreted."""

from dataclasses import replace
from itertools import pairwise
from unittest import mock

import pytest
import torch
from support import BUDGETS, DECAYS, VIEWS, Case, answer, call, case, check, errors, poisoned_memory, same, viewed
from torch.nn.functional import normalize
from triton.runtime.interpreter import GridExecutor

from gdngen.spec import Spec

SIZES = {"key_dim": 8, "value_dim": 6, "chunk": 16}
SPEC = Spec(**SIZES)
FUSED = Spec(
    key_dim=8, value_dim=6, chunk=16, fused_gate="softplus", beta_logits=True, qk_norm=True, state_v_first=True
)
FORMS = pytest.mark.parametrize("form", ["chunk", "recurrent"])
FP32 = BUDGETS[torch.float32]
HARD = {torch.float32: (FP32, FP32), torch.float16: (0.015, 0.026), torch.bfloat16: (0.015, 0.026)}  # section 5

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning", "ignore:All-NaN:RuntimeWarning")


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


# ---- dtypes ----------------------------------------------------------------------------------------------------------


@FORMS
@pytest.mark.parametrize(("v_dtype", "dtype"), [(torch.float32, torch.float16), (torch.float16, torch.float32)])
def test_q_and_k_are_cast_to_the_dtype_of_v(packages, form, v_dtype, dtype):
    """And their gradients back; states come in any of the dtypes and leave in float32."""
    this = case(SPEC, 20, dtype=v_dtype)
    mixed = this.changed(**{name: this.x[name].to(dtype) for name in ("q", "k", "h0")})
    cast = this.changed(**{name: mixed.x[name].to(v_dtype) for name in ("q", "k")}, h0=mixed.x["h0"].float())
    found = []
    with torch.enable_grad():
        for one in (mixed, cast):
            leaves = [one.x[name].requires_grad_() for name in ("q", "k", "h0")]
            o, state = call(packages(SPEC), one, form)
            gradients = torch.autograd.grad(o.float().sum() + state.sum(), leaves)
            assert [d.dtype for d in gradients] == [x.dtype for x in leaves]
            found.append([o, state, *(d.to(dtype) for d in gradients)])
    (o, state, *_), _ = found
    assert o.dtype == v_dtype and state.dtype == torch.float32 and same(*found)


# ---- lengths and offsets ---------------------------------------------------------------------------------------------


@FORMS
@pytest.mark.parametrize("T", [0, 1, 2, 15, 16, 17, 33])
def test_any_length(packages, form, T):
    check(packages(SPEC), case(SPEC, T, R=1), form)
    o, state = check(packages(SPEC), case(SPEC, T, B=2, R=1, state=False), form)
    if T == 0:
        assert o.shape == (2, 0, 1, 6) and same((state,), (torch.zeros(2, 1, 8, 6),))


@FORMS
@pytest.mark.parametrize("offsets", [(0, 0), (0, 0, 0, 0), (0, 3, 3), (0, 0, 16, 16, 17, 17, 19, 19), (0, 1, 2, 3, 4)])
def test_empty_sequences_keep_their_state(packages, form, offsets):
    this = case(SPEC, offsets[-1], offsets=offsets, offsets_dtype=torch.int32)
    _, states = check(packages(SPEC), this, form)
    empty = [n for n, (first, last) in enumerate(pairwise(offsets)) if first == last]
    assert same((states[empty],), (this.x["h0"][empty],))
    _, states = call(packages(SPEC), this.changed(h0=None), form)
    assert not states[empty].any()


@FORMS
@pytest.mark.parametrize("gate", ["scalar", "none"])
@pytest.mark.parametrize("offsets", [(0, 0), (0, 5), (0, 16, 18), (0, 20, 20), None])
def test_no_uninitialised_memory_is_seen(packages, form, gate, offsets):
    """Rows past the last offset are zero; what was not written is not read."""
    spec = Spec(gate=gate, **SIZES)
    this = case(spec, 39, offsets=offsets, R=1)
    with poisoned_memory():
        o, _ = check(packages(spec), this, form)
    if offsets:
        assert same((o[:, offsets[-1] :],), (torch.zeros(1, 39 - offsets[-1], 1, 6),))


@FORMS
def test_rows_past_the_last_offset_are_not_read(packages, form):
    this = case(SPEC, 30, offsets=(0, 9, 20), R=1)
    wanted = call(packages(SPEC), this, form)
    dirty = {name: x.clone() for name, x in this.x.items() if name != "h0"}
    for x in dirty.values():
        x[:, 20:] = torch.nan
    assert same(call(packages(SPEC), this.changed(**dirty), form), wanted)


@FORMS
def test_offsets_may_be_refilled_in_place(packages, form):
    this, offsets = case(SPEC, 30, offsets=(0, 9, 20, 30), R=1), torch.tensor([0, 9, 20, 30], dtype=torch.int32)
    first = call(packages(SPEC), this, form, cu_seqlens=offsets)
    offsets.copy_(torch.tensor([0, 0, 17, 26]))
    second = call(packages(SPEC), this, form, cu_seqlens=offsets)
    fresh = Case(SPEC, this.x, (0, 0, 17, 26))
    assert same(second, call(packages(SPEC), fresh, form)) and not same(first, second)
    assert max(errors(second, answer(fresh))) < FP32


@FORMS
def test_no_sequence_at_all(packages, form):
    this = case(SPEC, 3, R=1, state=False)
    with poisoned_memory():
        o, state = call(packages(SPEC), this, form, cu_seqlens=torch.tensor([0]))
    assert state.shape == (0, 1, 8, 6) and same((o,), (torch.zeros(1, 3, 1, 6),))


# ---- gates -----------------------------------------------------------------------------------------------------------


@FORMS
@pytest.mark.parametrize("decays", DECAYS)
def test_any_decay(packages, form, decays):
    check(packages(SPEC), case(SPEC, 37, decays=decays), form)
    check(packages(SPEC), case(SPEC, 20, decays=decays, dtype=torch.bfloat16, gate_dtype=torch.bfloat16, R=1), form)


@FORMS
@pytest.mark.parametrize("value", [-20.0, -104.0, -1e30, -torch.inf])
def test_one_strong_decay_anywhere(packages, form, value):
    """At the first and last token, beside a chunk boundary, twice in a chunk; and in every token."""
    this = case(SPEC, 36, R=1)
    for where in ([0, 35], [15], [16], [3, 9], range(36)):
        g = 0.1 * this.x["g"]
        g[:, list(where)] = value
        check(packages(SPEC), this.changed(g=g), form)


@FORMS
@pytest.mark.parametrize("fused", ["softplus", "bounded"])
@pytest.mark.parametrize("rate", [-100.0, 50.0, 100.0])
def test_huge_rates_are_finite(packages, form, fused, rate):
    spec = Spec(fused_gate=fused, **SIZES)
    this = case(spec, 20)
    this = this.changed(A_log=torch.full((2,), rate), dt_bias=None)
    a = this.x["a"].clone()
    a[:, ::3] = 0.0
    a[:, 1::3] -= 200.0
    found = call(packages(spec), this.changed(a=a), form)
    assert all(x.isfinite().all() for x in found)
    assert max(errors(found, answer(this.changed(a=a)))) < FP32


@FORMS
def test_no_bias_is_a_bias_of_zero(packages, form):
    this = case(FUSED, 20).changed(dt_bias=None)
    zero = this.changed(dt_bias=torch.zeros(2))
    assert same(call(packages(FUSED), this, form), call(packages(FUSED), zero, form))
    assert not same(call(packages(FUSED), this, form), call(packages(FUSED), zero.changed(dt_bias=torch.ones(2)), form))


@FORMS
def test_no_gate_is_a_gate_of_zero(packages, form):
    plain = Spec(gate="none", **SIZES)
    this = case(plain, 37)
    zero = Case(SPEC, {**this.x, "g": torch.zeros(1, 37, 2)})
    found = call(packages(plain), this, form)
    assert max(errors(found, tuple(x.double() for x in call(packages(SPEC), zero, form)))) < FP32


@FORMS
def test_write_strengths_of_mamba2_can_be_limited(packages, form):
    spec = Spec(rule="additive", beta="dt", **SIZES)
    for limit in ((0.3, 0.9), (0.0, 0.5), (0.5, torch.inf)):
        this = replace(case(spec, 20, R=1), dt_limit=limit)
        check(packages(spec), this, form)
        assert max(errors(answer(this), answer(replace(this, dt_limit=None)))) > 0.01


# ---- hard and odd values ---------------------------------------------------------------------------------------------


@FORMS
@pytest.mark.parametrize("beta", [1.0, 2.0])
@pytest.mark.parametrize(("dtype", "budget"), HARD.items())
def test_identical_keys(packages, form, beta, dtype, budget):
    """No decay, every key the same: what rounds in one row rounds in all (contract section 5, hard inputs)."""
    this = case(SPEC, 48, R=1, dtype=dtype, decays="zero")
    k = this.x["k"][:, :1].expand(1, 48, 1, 8)
    this = this.changed(k=k, beta=torch.full((1, 48, 1), beta))
    size = errors(call(packages(SPEC), this, form), answer(this))
    assert all(error <= most for error, most in zip(size, budget)), size


@FORMS
def test_a_full_write_with_a_unit_key_replaces_the_value(packages, form):
    this = case(SPEC, 37, decays="zero", R=1)
    k = normalize(torch.randn(1, 37, 1, 8), dim=-1)
    this = this.changed(q=k, k=k, beta=torch.ones(1, 37, 1))
    o, _ = call(packages(SPEC), this, form, scale=1.0)
    torch.testing.assert_close(o, this.x["v"], rtol=1e-5, atol=1e-5)


@FORMS
@pytest.mark.parametrize("size", [1e4, 1e-2])
def test_the_range_of_float16(packages, form, size):
    this = case(SPEC, 37, dtype=torch.float16, R=1)
    this = this.changed(v=size * normalize(this.x["v"].float(), dim=-1), h0=size * normalize(this.x["h0"], dim=-1))
    check(packages(SPEC), this.changed(v=this.x["v"].half()), form)


@FORMS
def test_mixed_dtypes(packages, form):
    this = case(SPEC, 20, dtype=torch.float16)
    x = {"g": this.x["g"], "beta": this.x["beta"].bfloat16(), "h0": this.x["h0"].bfloat16()}
    check(packages(SPEC), this.changed(**x), form)
    check(packages(SPEC), this.changed(g=this.x["g"].half(), beta=this.x["beta"].half()), form)


@FORMS
@pytest.mark.parametrize("name", ["v", "g", "k", "q", "h0"])
def test_nan_stays_in_its_head_and_its_sequence(packages, form, name):
    this = case(SPEC, 36, H=2, R=2, offsets=(0, 18, 30, 36))
    wanted = call(packages(SPEC), this, form)
    x = this.x[name].clone()
    x[(1, 2) if name == "h0" else (0, 20, 1 if name in "qk" else 2)] = torch.nan
    o, states = call(packages(SPEC), this.changed(**{name: x}), form)
    heads = [0, 1] if name in "qk" else [0, 1, 3]  # a query/key head is shared by two value heads
    assert same((o[:, :, heads], states[:, heads]), (wanted[0][:, :, heads], wanted[1][:, heads]))
    assert same((o[:, :18], o[:, 30:], states[[0, 2]]), (wanted[0][:, :18], wanted[0][:, 30:], wanted[1][[0, 2]]))
    assert o[:, 20:30, 2].isnan().any()


# ---- shapes and memory -----------------------------------------------------------------------------------------------


@FORMS
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize(("K", "V"), [(1, 1), (1, 20), (20, 1), (256, 3), (3, 256), (16, 16), (60, 100), (17, 33)])
def test_any_head_dim(packages, form, K, V, v_first):
    spec = Spec(key_dim=K, value_dim=V, chunk=16, state_v_first=v_first)
    this = case(spec, 20, R=1)
    _, turned = check(packages(spec), this, form)
    assert turned.shape == (1, 1, K, V)


@FORMS
def test_state_v_first_transposes_states_and_nothing_else(packages, form):
    square = {"key_dim": 16, "value_dim": 16, "chunk": 16}
    this = case(Spec(**square), 20)
    o, state = call(packages(Spec(**square)), this, form)
    turned = Case(Spec(**square, state_v_first=True), this.x)
    o_turned, state_turned = call(packages(turned.spec), turned, form)
    assert same((o, state), (o_turned, state_turned)) and not same((state,), (state.transpose(2, 3),))


@FORMS
@pytest.mark.parametrize(("H", "R"), [(1, 1), (1, 5), (3, 2), (2, 3), (5, 1)])
def test_value_heads_read_their_group(packages, form, H, R):
    this = case(SPEC, 18, H=H, R=R)
    grouped = check(packages(SPEC), this, form)
    repeated = {name: this.x[name].repeat_interleave(R, dim=2) for name in "qk"}
    assert same(grouped, call(packages(SPEC), this.changed(**repeated), form))


@FORMS
@pytest.mark.parametrize("kind", sorted(set(VIEWS) - {"contiguous"}))
def test_views_are_read_as_they_lie(packages, form, kind):
    this = case(SPEC, 18, B=2, H=2, R=1)
    view = viewed(this, kind)
    assert not all(view.x[name].is_contiguous() for name in "qkv")
    gates = {name: this.x[name].repeat_interleave(2, dim=2)[:, :, ::2] for name in ("g", "beta")}
    wanted = check(packages(SPEC), this, form)
    assert same(call(packages(SPEC), view, form), wanted)
    assert same(call(packages(SPEC), view.changed(**gates), form), wanted)


@pytest.mark.full
@FORMS
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_offsets_beyond_2_31_elements(packages, form, dim):
    """A view whose batch, token or head stride carries it past 2^31 elements.

    It starts in the middle of its memory, so that an offset which wraps round reads zeros and no foreign memory.
    Nothing but the view itself is ever touched, so most of that memory is never taken.
    """
    stride = [72, 24, 8, 1]
    stride[dim] = 2**30 + 8
    this = case(SPEC, 3, B=3 if dim == 0 else 1, H=3, R=1, dtype=torch.float16)
    wanted, wide = call(packages(SPEC), this, form), {}
    for name in "qk":
        try:
            whole = torch.empty(2**32 + 2**12, dtype=torch.float16)
        except RuntimeError:
            pytest.skip("8 GiB cannot be reserved")
        wide[name] = whole.as_strided(this.x[name].shape, stride, 2**31 + 64).copy_(this.x[name])
    with mock.patch.object(GridExecutor, "_restore_args_dev", lambda *_: None):  # it would copy the whole storage
        assert same(call(packages(SPEC), this.changed(**wide), form), wanted)


# ---- between calls ---------------------------------------------------------------------------------------------------


@FORMS
@pytest.mark.parametrize("spec", [SPEC, FUSED], ids=lambda spec: spec.name)
def test_the_same_call_gives_the_same_bits(packages, form, spec):
    this = case(spec, 37, dtype=torch.float16, R=1)
    given = {name: x.clone() for name, x in this.x.items()}
    first = call(packages(spec), this, form)
    assert same(first, call(packages(spec), this, form))
    assert same(tuple(given.values()), tuple(this.x.values()))  # inputs are left alone, the state too


@FORMS
@pytest.mark.parametrize("cut", [1, 9, 16, 23])
def test_a_prefix_does_not_see_what_follows(packages, form, cut):
    this, other = case(SPEC, 37, R=1), case(SPEC, 37, R=1, seed=1, decays="mixed")
    o, _ = call(packages(SPEC), this, form)
    later = {name: torch.cat([x[:, :cut], 9 * other.x[name][:, cut:]], 1) for name, x in this.x.items() if name != "h0"}
    changed, _ = call(packages(SPEC), this.changed(**later), form)
    assert same((o[:, :cut],), (changed[:, :cut],)) and not same((o,), (changed,))
    alone, _ = call(packages(SPEC), this.tokens(0, cut), form)
    assert same((o[:, :cut],), (alone,))


@FORMS
def test_a_packed_sequence_equals_itself_alone(packages, form):
    this = case(SPEC, 60, offsets=(0, 17, 17, 22, 54), dtype=torch.float16)
    o, states = call(packages(SPEC), this, form)
    for n, (first, last) in enumerate(pairwise(this.offsets)):
        alone = this.tokens(first, last).changed(h0=this.x["h0"][n : n + 1])
        wanted = (o[:, first:last], states[n : n + 1])
        assert same(call(packages(SPEC), Case(SPEC, alone.x), form), wanted)
        assert same(call(packages(SPEC), Case(SPEC, alone.x, (0, last - first)), form), wanted)


@FORMS
def test_a_batch_entry_equals_itself_alone(packages, form):
    this = case(SPEC, 20, B=3)
    o, states = call(packages(SPEC), this, form)
    alone = this.changed(**{name: x[1:2] for name, x in this.x.items()})
    assert same(call(packages(SPEC), alone, form), (o[1:2], states[1:2]))


@FORMS
@pytest.mark.parametrize("cut", [1, 16, 21])
def test_a_state_handed_over_continues_the_sequence(packages, form, cut):
    this = case(FUSED, 40)
    o, state = check(packages(FUSED), this, form)
    first, middle = call(packages(FUSED), this.tokens(0, cut), form)
    rest, last = call(packages(FUSED), this.tokens(cut).changed(h0=middle), form)
    assert max(errors((torch.cat([first, rest], 1), last), (o.double(), state.double()))) < FP32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_continues_a_prefill(packages, dtype):
    this = case(FUSED, 24, dtype=dtype, B=2)
    rows, state = call(packages(FUSED), this.tokens(0, 19), "chunk")
    rows = [rows]
    for t in range(19, 24):
        row, state = call(packages(FUSED), this.tokens(t, t + 1).changed(h0=state), "recurrent")
        rows.append(row)
    assert max(errors((torch.cat(rows, 1), state), answer(this))) < BUDGETS[dtype]


@FORMS
def test_launches_are_counted(packages, form):
    package = packages(SPEC, "cut=S+U+W+r")
    kernels = ["prepare", "scan", "output"] if form == "chunk" else ["recurrence"]
    for T, launched in ((20, kernels), (0, [name for name in kernels if name in ("scan", "recurrence")])):
        package.LAUNCHES.clear()
        call(package, case(SPEC, T), form)
        assert dict.fromkeys(launched, 1) == package.LAUNCHES
