"""The PyTorch version of a package: same results as the kernels and the oracle, and the oracle's gradients."""

from collections.abc import Callable

import pytest
import torch
from graphs import SMALL, TARGET
from support import Case, answer, call, case, errors, pytorch_version, same

from gdngen import oracle
from gdngen.codegen.torch_version import StepWriter
from gdngen.ir.builder import Builder
from gdngen.passes.pipeline import compile_spec
from gdngen.spec import Spec

RESULTS, GRADIENTS = 1e-5, 1e-4  # contract section 5, fp32 without tf32

MEMBERS = [
    Spec(chunk=16, **SMALL),
    Spec(chunk=16, gate="none", beta="none", **SMALL),
    Spec(chunk=16, qk_norm=True, fused_gate="softplus", beta_logits=True, neg_eigval=True, state_v_first=True, **SMALL),
    Spec(chunk=32, qk_norm=True, fused_gate="bounded", lower_bound=-1.0, **SMALL),
    Spec(chunk=16, feature_map="elu1", qk_norm=True, **SMALL),
    Spec(chunk=16, rule="additive", beta="dt", **SMALL),
    Spec(chunk=16, rule="additive", normalize=True, feature_map="elu1", **SMALL),
    Spec(chunk=16, rule="additive", gate="none", beta="none", **SMALL),
    Spec(gate="key", fused_gate="softplus", qk_norm=True, **SMALL),
    Spec(gate="key+value", beta="value", beta_logits=True, **SMALL),
]
EACH = [(spec, form) for spec in MEMBERS for form in ("chunk", "recurrent")]
EACH = [(spec, form) for spec, form in EACH if compile_spec(spec, TARGET).plan.operator(form)]
MEMBER = pytest.mark.parametrize(("spec", "form"), EACH, ids=[f"{spec.name}-{form}" for spec, form in EACH])


def wanting(this: Case) -> Case:
    """The case with every input a leaf that wants its gradient."""
    return this.changed(**{name: x.detach().clone().requires_grad_() for name, x in this.x.items()})


def gradients(run: Callable[[Case], tuple[torch.Tensor, ...]], this: Case, use: slice) -> dict[str, torch.Tensor]:
    """Gradients of a fixed random sum of some of the results."""
    leaves = wanting(this)
    generator = torch.Generator().manual_seed(1)
    results = run(leaves)
    weights = [torch.randn(x.shape, generator=generator) for x in results]
    total = sum((weight * x).sum() for weight, x in list(zip(weights, results))[use])
    total.backward()
    return {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.x.items()}


@MEMBER
def test_results(packages, spec, form):
    package = packages(spec)
    for this in (
        case(spec, 37, B=2, decays="mixed"),
        case(spec, 37, H=2, offsets=(0, 0, 17, 17, 30), bias=False, state=False),
        case(spec, 0, B=2),
        case(spec, 1, dtype=torch.float16),
    ):
        package.LAUNCHES.clear()
        with pytorch_version():
            found = call(package, this, form)
        assert package.LAUNCHES.total() == 0 and found[0].dtype == this.dtype
        assert max(errors(found, answer(this))) < (RESULTS if this.dtype == torch.float32 else 5e-3)
        if this.offsets:
            assert not found[0][:, 30:].any()


@MEMBER
def test_the_kernels_agree(packages, spec, form):
    this = case(spec, 20, R=1, decays="some strong")
    packages(spec).LAUNCHES.clear()
    with torch.no_grad():
        kernels = call(packages(spec), this, form)
    with pytorch_version():
        plain = call(packages(spec), this, form)
    assert max(errors(kernels, tuple(x.double() for x in plain))) < RESULTS
    assert packages(spec).LAUNCHES.total() > 0


@pytest.mark.parametrize("use", [slice(None), slice(0, 1), slice(1, None)], ids=["all", "o", "states"])
@MEMBER
def test_gradients(packages, spec, form, use):
    """From o and the final state, together or alone; dense and packed."""
    for this in (case(spec, 21, B=2), case(spec, 25, H=2, offsets=(0, 0, 17, 17, 22), decays="some strong")):
        with pytorch_version():
            found = gradients(lambda leaves: call(packages(spec), leaves, form), this, use)
        wanted = gradients(answer, this, use)
        assert set(found) == set(wanted) == set(this.x)
        for name, gradient in wanted.items():
            assert oracle.rms_ratio(found[name], gradient) < GRADIENTS, name
        reaches = {"o": {"q", "k", "v", "h0"}, "states": {"k", "v", "h0"}}.get("states" if use.start else "o")
        assert all(found[name].any() for name in reaches & set(this.x))


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_gradients_at_a_reset_are_zero(packages, form):
    spec = Spec(chunk=16, **SMALL)
    this = case(spec, 21, decays="mixed")
    with pytorch_version():
        found = gradients(lambda leaves: call(packages(spec), leaves, form), this, slice(None))
    wanted = gradients(answer, this, slice(None))
    resets = this.x["g"] == -torch.inf
    assert resets.any() and not found["g"][resets].any()
    for name, gradient in wanted.items():
        assert found[name].isfinite().all() and oracle.rms_ratio(found[name], gradient) < GRADIENTS, name


@pytest.mark.parametrize("fused", ["softplus", "bounded"])
def test_gradients_of_huge_rates_are_finite(packages, fused):
    spec = Spec(chunk=16, fused_gate=fused, **SMALL)
    this = case(spec, 21)
    this = this.changed(A_log=torch.full_like(this.x["A_log"], 100.0))
    for form in ("chunk", "recurrent"):
        with pytorch_version():
            found = gradients(lambda leaves, form=form: call(packages(spec), leaves, form), this, slice(None))
        assert all(gradient.isfinite().all() for gradient in found.values())


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_gradients_of_nothing(packages, form):
    """No tokens, or none in a sequence: the gradient of its initial state is that of its final state."""
    spec = Spec(chunk=16, **SMALL)
    for this in (case(spec, 0, B=2), case(spec, 9, offsets=(0, 0, 4))):
        with pytorch_version():
            found = gradients(lambda leaves: call(packages(spec), leaves, form), this, slice(None))
        wanted = gradients(answer, this, slice(None))
        assert same((found["h0"][:1],), (wanted["h0"][:1].float(),)) and found["h0"][:1].any()
        for name in ("q", "k", "v", "g", "beta"):
            assert not found[name][:, 4:].any()


@pytest.mark.parametrize("kind", ["causal", "strict", "same"])
def test_masks_as_text(kind):
    b = Builder()
    x = b.input("x", "ij", "bh")
    graph = b.finish([("y", b.ein([x, b.tri(kind)], "i"))], [])
    value = torch.randn(2, 1, 4, 4, dtype=torch.float64)
    scope: dict[str, object] = {"torch": torch, "x": value, "valid": torch.ones(4, dtype=torch.float64)}
    exec("\n".join(StepWriter(graph).lines()), scope)
    mask = {"causal": torch.ones(4, 4).tril(), "strict": torch.ones(4, 4).tril(-1), "same": torch.eye(4)}[kind]
    name = StepWriter(graph).names[graph.outputs[0][1].value]
    torch.testing.assert_close(scope[name], (value * mask).sum(-1))
