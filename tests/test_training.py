"""Gradients of the operators: the backward kernels, interpreted, and the PyTorch version against the float64 oracle."""

import contextlib
import functools
import os
from collections.abc import Mapping
from types import ModuleType

import pytest
import torch
from graphs import TARGET
from hypothesis import given, seed, settings
from support import (
    Case,
    call,
    case,
    errors,
    every_other_in_short,
    keywords,
    operator_name,
    poisoned_memory,
    pytorch_version,
    same,
    viewed,
)
from support import answer as recurrence
from test_kernels import MEMBERS, PHASES, calls
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gdngen import oracle
from gdngen.passes.pipeline import compile_spec, no_chunk_form
from gdngen.spec import Spec

# Contract section 5.  The interpreter multiplies fp32 exactly: the budget without tf32 applies.
WIDE, NARROW = {"q": 8e-3, "k": 8e-3, "v": 8e-3, "h0": 8e-3, "z0": 8e-3}, 2e-2
SPEC = Spec(key_dim=9, value_dim=20, chunk=16)
BACKWARD = ("prepare_backward", "states", "reverse", "pairs", "queries", "gradients")
TRAINED = [spec for spec in MEMBERS if not no_chunk_form(spec)]
FUSED = next(spec for spec in TRAINED if spec.fused_gate == "bounded")


def leaves(this: Case, names: str = "") -> Case:
    """The case with inputs that require gradients: all of them, or those named."""
    wanted = names.split() or list(this.x)
    return this.changed(**{name: x.detach().requires_grad_(name in wanted) for name, x in this.x.items()})


def cotangents(results: tuple[Tensor, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(x.shape, generator=generator).to(x.dtype) for x in results]


def gradients(results: tuple[Tensor, ...], this: Case, given: list[Tensor | None]) -> dict[str, Tensor]:
    """Of every input that requires one; zeros where nothing depends on it."""
    pairs = [(x, d) for x, d in zip(results, given) if d is not None and x.requires_grad]
    names = [name for name, x in this.x.items() if x.requires_grad]
    if not pairs:
        return {name: torch.zeros_like(this.x[name]) for name in names}
    results, given = (list(column) for column in zip(*pairs))
    found = torch.autograd.grad(results, [this.x[n] for n in names], given, allow_unused=True)
    return {n: torch.zeros_like(this.x[n]) if d is None else d for n, d in zip(names, found)}


def budget(name: str, dtype: torch.dtype) -> float:
    return 1e-4 if dtype == torch.float32 else WIDE.get(name, NARROW)


def wrong(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, float]:
    """The gradients that exceed the contract's budget; where the right one is 0, so must be the found one."""
    size = {
        n: oracle.rms_ratio(found[n], wanted[n]) if wanted[n].any() else float(found[n].abs().sum()) for n in wanted
    }
    return {name: error for name, error in size.items() if not error <= budget(name, dtype)}


def check(package: ModuleType, this: Case, form: str = "chunk", only: int | None = None, names: str = "") -> None:
    """Every gradient, from all results or from the one with this index."""
    this = leaves(this, names)
    before = package.LAUNCHES.total()
    results = call(package, this, form)
    given = [d if only in (None, n) else None for n, d in enumerate(cotangents(results))]
    found = gradients(results, this, given)
    assert package.LAUNCHES.total() > before or this.is_empty, "the PyTorch version ran"
    exact = recurrence(this)
    assert max(errors(tuple(x.detach() for x in results), tuple(x.detach() for x in exact))) < 1e-2
    assert all(d.dtype == this.x[name].dtype and d.shape == this.x[name].shape for name, d in found.items())
    wanted = gradients(exact, this, given)
    bad = wrong(found, wanted, this.dtype)
    if this.spec.qk_norm and this.spec.key_dim == 1 and this.x["q"].numel():
        faint = {n for n in found if is_faint(n, found[n] - wanted[n], this)}
        assert faint >= {"q", "k"} & set(found)
        bad = {n: error for n, error in bad.items() if n not in faint}
    assert not bad, bad


def is_faint(name: str, error: Tensor, this: Case) -> bool:
    """Whether an error is a rounding error of terms that cancel: a gradient by a unit vector of one channel is what
    eps leaves of them, a millionth.  Without a write strength each write erases what was in the state, and with it all
    but v."""
    size = {n: x.detach().float().abs() for n, x in this.x.items()}
    terms = float(size["v"].max())
    if name in ("q", "k"):  # divided by the length
        return bool((error.abs() < 1e-5 * terms / min(size["q"].min(), size["k"].min())).all())
    erased = this.spec.rule == "delta" and this.spec.beta == "none" and name != "v"
    return erased and bool((error.abs() < 1e-6 * terms).all())


# ---- random calls ----------------------------------------------------------------------------------------------------


@settings(max_examples=1, phases=PHASES, report_multiple_bugs=False)
@given(this=calls("chunk"))
def test_random_calls(packages, this):
    check(packages(this.spec), this)


@pytest.mark.full
@pytest.mark.parametrize("shard", range(1, 9))
def test_many_random_calls(packages, shard):
    """Hundreds more: eight times thirty."""

    @seed(shard)
    @settings(max_examples=30, derandomize=False, phases=PHASES, report_multiple_bugs=False)
    @given(this=calls("chunk"))
    def run(this):
        check(packages(this.spec), this)

    run()


# ---- members, cuts, shapes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", TRAINED, ids=lambda spec: spec.name)
def test_members(packages, spec):
    """Dense and packed, with a bias and without."""
    check(packages(spec), case(spec, T=20, B=2, R=2))
    check(packages(spec), case(spec, T=25, H=2, R=1, offsets=(0, 7, 7, 24), state=False, bias=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_normalised_keys_of_one_channel(packages, dtype):
    spec = Spec(gate="key", key_dim=1, value_dim=13, chunk=16, qk_norm=True)
    check(packages(spec), case(spec, T=5, R=1, dtype=dtype))


@pytest.mark.parametrize("spec", every_other_in_short(TRAINED), ids=lambda spec: spec.name)
def test_several_tiles_of_v(packages, spec):
    """More value channels than a tile holds: sums over v go over tiles; a normaliser's programs hold all of v."""
    wide = Spec(**{**spec.model_dump(), "value_dim": 40, "chunk": 16})
    check(packages(wide, *([] if spec.normalize else ["BV=16"])), case(wide, T=18, R=2))


@pytest.mark.parametrize("cut", [c.cut.name for c in compile_spec(SPEC, TARGET).choices["chunk_backward"].front])
def test_every_cut(packages, cut):
    check(packages(SPEC, f"backward_cut={cut}"), case(SPEC, T=35, R=2, decays="mixed"))


@pytest.mark.parametrize("decays", ["strong", "all resets", "resets", "mixed", "zero"])
@pytest.mark.parametrize("T", [1, 15, 33])
def test_decays(packages, T, decays):
    """Gates at -20, -inf, 0 and in between give finite gradients, right to rounding."""
    check(packages(SPEC), case(SPEC, T=T, decays=decays))


def test_a_gate_that_empties_the_state_has_no_gradient(packages):
    """Exactly 0 (contract section 5), so that a large raw gate input has nothing to multiply."""
    this = leaves(case(SPEC, T=40, R=2, decays="resets"))
    results = call(packages(SPEC), this)
    dg = gradients(results, this, cotangents(results))["g"]
    resets = this.x["g"] == -torch.inf
    assert resets.any() and not dg[resets].any() and dg[~resets].all()
    fused = Spec(fused_gate="softplus", key_dim=9, value_dim=20, chunk=16)
    check(packages(fused), case(fused, T=60, R=3, decays="resets"))


@pytest.mark.parametrize(("K", "V"), [(64, 96), (100, 60), (128, 128), (256, 40), (16, 300)])
def test_head_dims(packages, K, V):
    spec = Spec(key_dim=K, value_dim=V, chunk=16, state_v_first=K > V)
    check(packages(spec), case(spec, T=20, R=2, decays="some strong"))


@pytest.mark.parametrize("chunk", [32, 64, 128])
def test_chunk_lengths(packages, chunk):
    spec = Spec(key_dim=16, value_dim=24, chunk=chunk, qk_norm=True)
    check(packages(spec), case(spec, T=chunk + 9, R=1))


@pytest.mark.parametrize("R", [1, 3, 8])
def test_head_ratios(packages, R):
    check(packages(SPEC), case(SPEC, T=18, H=2, R=R))


@pytest.mark.parametrize("view", ["split", "amid NaN", "every other channel"])
def test_views(packages, view):
    check(packages(SPEC), viewed(case(SPEC, T=21, B=2), view))


@pytest.mark.parametrize("norm", [False, True])
def test_kept_or_computed_again(packages, norm):
    """``save=speed`` hands the forward's inverse and scores to backward: one launch less, the same gradients."""
    spec, found = Spec(key_dim=128, value_dim=128, chunk=64, qk_norm=norm), {}
    this = leaves(case(spec, T=70, R=1))
    for keep, launches in (("memory", 1), ("speed", 0)):
        package = packages(spec, f"save={keep}")
        package.LAUNCHES.clear()
        results = call(package, this)
        found[keep] = tuple(gradients(results, this, cotangents(results)).values())
        assert package.LAUNCHES["prepare_backward"] == launches
    # with q/k norm the forward takes the gate out of the inverse: equal to rounding, not in every bit
    assert norm or same(found["memory"], found["speed"])
    assert all(oracle.rms_ratio(a, b) < 1e-5 for a, b in zip(found["memory"], found["speed"]))
    check(packages(spec, "save=speed"), case(spec, T=20, R=2), "recurrent")


# ---- edges -----------------------------------------------------------------------------------------------------------


def test_rows_past_the_offsets_have_zero_gradients(packages):
    this = leaves(case(SPEC, T=40, offsets=(0, 5, 5, 22)))
    this = this.changed(v=torch.cat([this.x["v"][:, :22], torch.full_like(this.x["v"][:, 22:], 3.0)], 1).detach())
    this = leaves(this)
    found = gradients(call(packages(SPEC), this), this, cotangents(call(packages(SPEC), this)))
    for name in ("q", "k", "v", "g", "beta"):
        assert not found[name][:, 22:].any(), name


@pytest.mark.parametrize("offsets", [None, (0, 0, 0)])
def test_no_tokens(packages, offsets):
    """The gradient of a state that nothing happened to is that of the final state; everything else has none."""
    this = leaves(case(SPEC, T=0, B=1, offsets=offsets))
    results = call(packages(SPEC), this)
    given = cotangents(results)
    found = gradients(results, this, given)
    assert torch.equal(found["h0"], given[1])


def test_parameters_without_tokens(packages):
    spec = FUSED
    this = leaves(case(spec, T=0))
    results = call(packages(spec), this)
    found = gradients(results, this, cotangents(results))
    assert not found["A_log"].any() and not found["dt_bias"].any()


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("spec", [SPEC, FUSED, TRAINED[-1]], ids=lambda spec: spec.name)
def test_no_sequence_beside_rows(packages, spec, form):
    """The only offset is a view of a longer buffer, behind which nothing may be read: rows and gradients are zero."""
    package, buffer = packages(spec), torch.tensor([0, 30, 40])
    this = leaves(case(spec, T=2 * 64, R=1, state=False))
    package.LAUNCHES.clear()
    for computed in (contextlib.nullcontext, pytorch_version):
        with computed(), poisoned_memory() if computed is contextlib.nullcontext else contextlib.nullcontext():
            results = call(package, this, form, cu_seqlens=buffer[:1])
            found = torch.autograd.grad(results, list(this.x.values()), cotangents(results))
        assert not results[0].any() and all(state.shape[0] == 0 for state in results[1:])
        assert not any(gradient.any() for gradient in found)
    assert not package.LAUNCHES


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("spec", [FUSED, next(spec for spec in TRAINED if spec.normalize)], ids=lambda spec: spec.name)
@pytest.mark.parametrize(("T", "offsets"), [(3, None), (0, None), (4, (0, 0, 0)), (4, (0,)), (5, (0, 2, 2, 4))])
def test_kernels_and_the_pytorch_version_want_the_same_gradients(packages, spec, form, T, offsets):
    package, this = packages(spec), case(spec, T=T, R=1, offsets=offsets)
    every = " ".join(this.x)
    for names in ["none", *this.x, every]:
        asked, found = leaves(this, names), []
        for computed in (contextlib.nullcontext, pytorch_version):
            with computed():
                results = call(package, asked, form)
                kinds = [(x.requires_grad, x.dtype, x.shape) for x in results]
                given = cotangents(results)
                wanted = torch.autograd.grad(results, list(asked.x.values()), given) if names == every else ()
            found.append((kinds, wanted))
        assert found[0][0] == found[1][0], names
        assert all((a - b).abs().max() < 1e-3 for a, b in zip(found[0][1], found[1][1]) if a.numel()), names


@pytest.mark.parametrize("only", [0, 1])
def test_one_result_alone(packages, only):
    """Gradients that arrive through o alone, or through the final state alone."""
    check(packages(SPEC), case(SPEC, T=35), only=only)
    check(packages(FUSED), case(FUSED, T=19, R=3), only=only)


@pytest.mark.parametrize(
    ("names", "idle"),
    [("v", {"states", "pairs", "queries"}), ("h0", {"states", "pairs", "queries", "gradients"}), ("q", {"reverse"})],
)
def test_frozen_inputs_skip_work(packages, names, idle):
    package = packages(SPEC)
    package.LAUNCHES.clear()
    check(package, case(SPEC, T=35), names=names)
    launched = {kernel for kernel, count in package.LAUNCHES.items() if count} & set(BACKWARD)
    assert not launched & idle, launched
    assert launched, "no backward kernel ran"


def test_an_output_without_a_final_state(packages):
    this = leaves(case(SPEC, T=20))
    o, state = packages(SPEC).chunk_gated_delta_rule(**keywords(this, "chunk") | {"output_final_state": False})
    assert state is None
    given = cotangents((o,))
    assert not wrong(gradients((o,), this, given), gradients(recurrence(this)[:1], this, given), this.dtype)


@pytest.mark.parametrize("fused", ["bounded", "softplus"])
def test_a_large_A_log_has_finite_gradients(packages, fused):
    spec = Spec(fused_gate=fused, key_dim=9, value_dim=20, chunk=16)
    this = case(spec, T=20)
    this = leaves(this.changed(A_log=torch.full_like(this.x["A_log"], 100.0)))
    results = call(packages(spec), this)
    assert all(d.isfinite().all() for d in gradients(results, this, cotangents(results)).values())


# ---- the same bits ---------------------------------------------------------------------------------------------------


def test_two_runs_give_the_same_bits(packages):
    spec = FUSED
    this, found = leaves(case(spec, T=50, B=2, R=3)), []
    for _ in range(2):
        results = call(packages(spec), this)
        found.append(tuple(gradients(results, this, cotangents(results)).values()))
    assert same(*found)


def test_a_packed_sequence_has_the_gradients_it_has_alone(packages):
    package, whole = packages(SPEC), leaves(case(SPEC, T=60, H=2, offsets=(0, 21, 21, 55)))
    results = call(package, whole)
    given = cotangents(results)
    packed = gradients(results, whole, given)
    alone = leaves(whole.tokens(21, 55).changed(h0=whole.x["h0"][2:3]))
    single = Case(SPEC, alone.x)
    results = call(package, single)
    found = gradients(results, single, [given[0][:, 21:55], given[1][2:3]])
    for name in ("q", "k", "v", "g", "beta"):
        assert torch.equal(found[name], packed[name][:, 21:55]), name
    assert torch.equal(found["h0"], packed["h0"][2:3])


# ---- the recurrent operator, the PyTorch version ---------------------------------------------------------------------


@pytest.mark.parametrize("spec", [SPEC, FUSED], ids=lambda spec: spec.name)
def test_the_recurrent_operator(packages, spec):
    check(packages(spec), case(spec, T=20, B=2), "recurrent")


@pytest.mark.parametrize("spec", MEMBERS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_the_pytorch_version(packages, spec, form):
    if form == "chunk" and no_chunk_form(spec):
        pytest.skip("no chunk form")
    this = leaves(case(spec, T=19, R=2))
    with pytorch_version():
        results = call(packages(spec), this, form)
        given = cotangents(results)
        bad = wrong(gradients(results, this, given), gradients(recurrence(this), this, given), this.dtype)
    assert not bad, bad


# ---- torch -----------------------------------------------------------------------------------------------------------


def loss(package, this: Case, *values: Tensor) -> Tensor:
    o, state = call(package, this.changed(**dict(zip(this.x, values))))
    return o.sin().sum() + state.square().sum()


def test_compiled_without_a_break(packages):
    package, this = packages(SPEC), leaves(case(SPEC, T=20))
    values = list(this.x.values())
    wanted = torch.autograd.grad(loss(package, this, *values), values)
    compiled = torch.compile(lambda *x: loss(package, this, *x), fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*values), values)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted))


def test_compiled_around_a_break(packages):
    """After a break torch.compile must call the op, not trace into it."""
    package, this = packages(SPEC), leaves(case(SPEC, T=20))
    values = list(this.x.values())
    wanted = torch.autograd.grad(loss(package, this, *values), values)

    def broken(*x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return loss(package, this, *x)

    found = torch.autograd.grad(torch.compile(broken, backend="aot_eager")(*values), values)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted))


@pytest.mark.parametrize("beta", ["head", "value"])  # forward only; without kernels for chunks and so without gradients
def test_compiled_without_gradients(packages, beta):
    spec = Spec(key_dim=4, value_dim=6, chunk=16, beta=beta, backward=beta == "value")
    package, this = packages(spec), case(spec, T=18)
    form = "chunk" if beta == "head" else "recurrent"
    wanted = call(package, this, form)
    found = torch.compile(lambda: call(package, this, form), fullgraph=True, backend="aot_eager")()
    assert all(map(same, found, wanted))


def test_compiled_before_any_call(tmp_path):
    """Nothing of the package but its operators is imported yet; an eager call without gradients comes in between."""
    from gdngen import api

    spec = Spec(key_dim=4, value_dim=6, chunk=16)
    for eager_first in (False, True):
        folder = api.build(spec, tmp_path, name=f"compiled_{eager_first}")
        package, this = api.import_folder(folder, folder.name), leaves(case(spec, T=18))
        values = list(this.x.values())
        if eager_first:
            with torch.no_grad():
                call(package, this)
        compiled = torch.compile(functools.partial(loss, package, this), fullgraph=True, backend="aot_eager")
        found = torch.autograd.grad(compiled(*values), values)
        wanted = torch.autograd.grad(loss(package, this, *values), values)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted))


def test_gradients_do_not_import_the_compiler(tmp_path):
    """torch._dynamo takes a second or more, which first calls must not cost those who never compile."""
    import subprocess
    import sys

    from gdngen import api

    folder = api.build(Spec(key_dim=4, value_dim=6, chunk=16), tmp_path, name="uncompiled")
    script = """
import sys
import torch
import uncompiled
q, k, v = (torch.ones(1, 3, 1, d).requires_grad_() for d in (4, 4, 6))
g, beta = -torch.ones(1, 3, 1), torch.ones(1, 3, 1)
uncompiled.chunk_gated_delta_rule(q, k, v, g=g, beta=beta)[0].sum().backward()
assert uncompiled.LAUNCHES and q.grad.any()
assert "torch._dynamo" not in sys.modules
"""
    environment = {**os.environ, "PYTHONPATH": str(folder.parent), "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], env=environment, check=True)


KEEPING = Spec(key_dim=64, value_dim=64, chunk=32)


@pytest.mark.parametrize("offsets", [None, (0, 5, 5, 18)])
@pytest.mark.parametrize(("spec", "pins"), [(SPEC, []), (KEEPING, ["cut=X+P", "save=speed"])])
def test_ops_are_well_formed(packages, spec, pins, offsets):
    package, this = packages(spec, *pins), leaves(case(spec, T=20, offsets=offsets))
    registration = package.dispatch.module_named("registration")
    tensors = [this.x[name] for name in registration.INPUTS]
    packed = None if offsets is None else torch.tensor(offsets)
    rest = [packed, "chunk", 0.25, 0.0, float("inf"), True]
    torch.library.opcheck(registration.forward_op, (*tensors, *rest))
    results = registration.forward_op(*tensors, *rest)
    assert (len(results) > 2) == bool(pins)
    kept = [x.detach() for x in results[2:]]
    given = [torch.randn(x.shape) for x in results[:2]]
    needs = [True, False, True, True, False, True]
    torch.library.opcheck(registration.backward_op, (*(x.detach() for x in tensors), *rest, *given, *kept, needs))


def test_activation_checkpointing(packages):
    package, this = packages(SPEC), leaves(case(SPEC, T=20))
    values = list(this.x.values())
    wanted = torch.autograd.grad(loss(package, this, *values), values)
    again = checkpoint(lambda *x: loss(package, this, *x), *values, use_reentrant=False)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(again, values), wanted))


def test_autocast_leaves_the_operator_alone(packages):
    package, this = packages(SPEC), leaves(case(SPEC, T=20))
    values = list(this.x.values())
    wanted = torch.autograd.grad(loss(package, this, *values), values)
    for computed in ("kernels", "PyTorch version"):
        with (
            torch.autocast("cpu", torch.bfloat16),
            contextlib.nullcontext() if computed == "kernels" else pytorch_version(),
        ):
            total = loss(package, this, *values)
        found = torch.autograd.grad(total, values)  # torch asks for the backward outside of autocast
        for a, b in zip(found, wanted):
            assert oracle.rms_ratio(a, b) < 1e-4, computed


def test_a_second_derivative_is_refused(packages):
    package, this = packages(SPEC), leaves(case(SPEC, T=20))
    o, _ = call(package, this)
    (first,) = torch.autograd.grad(o.sum(), this.x["q"], create_graph=True)
    with pytest.raises(ValueError, match="got a second derivative"):
        torch.autograd.grad(first.sum(), this.x["k"])


def test_the_operators_of_gdngen_differentiate():
    from gdngen import ops

    this = leaves(case(Spec(key_dim=8, value_dim=8), T=10))
    o, state = getattr(ops, operator_name(this.spec, "chunk"))(**keywords(this, "chunk"))
    given = cotangents((o, state))
    assert not wrong(gradients((o, state), this, given), gradients(recurrence(this), this, given), this.dtype)


def test_the_oracle_of_a_saturated_gate():
    """s(x) s(-x) to float64 accuracy, where 1 - s(x) has no digit left."""
    a = torch.tensor([20.0, 30.0, 40.0, -40.0], dtype=torch.float64).reshape(1, 4, 1).requires_grad_()
    (gradient,) = torch.autograd.grad(oracle.gate(a, torch.zeros(1), lower_bound=-5.0).sum(), a)
    exact = -5.0 * torch.exp(-a.abs()) / (1 + torch.exp(-a.abs())) ** 2
    torch.testing.assert_close(gradient, exact.detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("strong, weak", [(20.0, -5.0), (60.0, -8.0), (60.0, -12.0)])
@pytest.mark.parametrize("gate", ["scalar", "key", "value"])
def test_strong_gates_beside_weak_ones(packages, gate, strong, weak):
    """A strong gate's gradient is tiny, and softplus gives it its weight back: no digit may come from other pairs."""
    spec = Spec(gate=gate, fused_gate="softplus", key_dim=8, value_dim=8, chunk=16)
    this = case(spec, T=16, R=1, seed=5)
    a = torch.full_like(this.x["a"], weak)
    a[:, 3::4] = strong
    zeros = {name: torch.zeros_like(this.x[name]) for name in ("A_log", "dt_bias")}
    check(packages(spec), this.changed(a=a, **zeros))
