"""torch.func, forward-mode differentiation, fake tensors and tracing: over kernels and over the PyTorch version."""

import contextlib
import shutil

import pytest
import torch
from support import call, case, keywords, operator_name, pytorch_version
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functionalize, grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from gdngen import ops
from gdngen.spec import Spec

SPEC = Spec(key_dim=4, value_dim=3, chunk=16)
FUSED = Spec(key_dim=4, value_dim=3, chunk=16, fused_gate="softplus")
FORMS = pytest.mark.parametrize("form", ["chunk", "recurrent"])


@contextlib.contextmanager
def kernels():
    yield


BACK_ENDS = pytest.mark.parametrize("back_end", [kernels, pytorch_version])


def function(package, this, form, *names):
    """o and the final state as a function of the inputs named."""
    return lambda *values: call(package, this.changed(**dict(zip(names, values))), form)


def close(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def plain_gradients(f, values, given):
    values = [x.detach().requires_grad_() for x in values]
    return torch.autograd.grad(f(*values), values, given)


@BACK_ENDS
@pytest.mark.parametrize(("spec", "form"), [(SPEC, "recurrent"), (FUSED, "chunk")])
def test_gradients_by_transforms(packages, spec, form, back_end):
    this = case(spec, T=3, R=1)
    names = ["q", "h0", "A_log" if spec is FUSED else "g"]
    f, values = function(packages(spec), this, form, *names), [this.x[name] for name in names]
    with back_end():
        results, pull = vjp(f, *values)
        given = tuple(torch.randn_like(x) for x in results)
        close(pull(given), plain_gradients(f, values, given))
        ones = tuple(torch.ones_like(x) for x in results)
        close(grad(lambda *x: sum(y.sum() for y in f(*x)), (0, 1, 2))(*values), plain_gradients(f, values, ones))


@BACK_ENDS
@pytest.mark.parametrize(
    ("form", "packed"), [("chunk", False), pytest.param("recurrent", False, marks=pytest.mark.full), ("chunk", True)]
)
@pytest.mark.parametrize("per_rate", [False, True])
def test_mapped_over_one_more_dimension(packages, form, back_end, packed, per_rate):
    """Some inputs have it, some not; inside of a gradient and around one."""
    if packed and per_rate:
        pytest.skip("one after the other in either case")
    this = case(FUSED, T=3, R=1, offsets=(0, 1, 2) if packed else None, B=1 if packed else 2)
    f = function(packages(FUSED), this, form, "q", "v", "A_log")
    q, v = (torch.stack([this.x[name], -2 * this.x[name]], dim) for name, dim in (("q", 0), ("v", 2)))
    A_log = torch.stack([this.x["A_log"], this.x["A_log"] + 1]) if per_rate else this.x["A_log"]
    dims = (0, 2, 0 if per_rate else None)
    each = [(q[n], v[:, :, n], A_log[n] if per_rate else A_log) for n in range(2)]

    def loss(q, v, A_log):
        return sum(y.square().sum() for y in f(q, v, A_log))

    with back_end():
        close(vmap(f, dims)(q, v, A_log), stacked(f(*one) for one in each))
        apart = stacked(plain_gradients(lambda *x: [loss(*x)], one, None) for one in each)
        close(vmap(grad(loss, (0, 1, 2)), dims)(q, v, A_log), apart)
        dq, dv, dA_log = grad(lambda *x: vmap(loss, dims)(*x).sum(), (0, 1, 2))(q, v, A_log)
        close([dq, dv.movedim(2, 0), dA_log], [*apart[:2], apart[2] if per_rate else apart[2].sum(0)])


def stacked(results):
    return [torch.stack(x) for x in zip(*results)]


@BACK_ENDS
def test_mapped_over_nothing(packages, back_end):
    this = case(SPEC, T=3, R=1, B=2)
    f = function(packages(SPEC), this, "chunk", "q")
    with back_end():
        for q, dim in ((torch.zeros(0, 2, 3, 1, 4), 0), (torch.zeros(2, 0, 3, 1, 4), 1)):
            assert [x.shape for x in vmap(f, dim)(q)] == [(0, *x.shape) for x in f(this.x["q"])]


@BACK_ENDS
def test_functionalized(packages, back_end):
    this = case(SPEC, T=3, R=1, B=2)
    f, q = function(packages(SPEC), this, "chunk", "q"), this.x["q"]
    with back_end():
        close(functionalize(f)(q), f(q))
        several = torch.stack([q, 2 * q])
        close(functionalize(vmap(f))(several), vmap(f)(several))


def test_a_batch_of_gradients_is_refused(packages):
    """By kernels: what maps gradients there is older than torch.func, and has no way in."""
    this, package = case(SPEC, T=3, R=1), packages(SPEC)
    f, v = function(package, this, "chunk", "v"), this.x["v"].requires_grad_()
    o, _ = f(v)
    with pytest.raises(package.arguments.ArgumentError, match=r"batch of gradients .* Use torch\.func\.jacrev"):
        torch.autograd.grad(o, v, torch.randn(4, *o.shape), is_grads_batched=True)
    with pytorch_version():
        o, _ = f(v)
        assert torch.autograd.grad(o, v, torch.randn(4, *o.shape), is_grads_batched=True)[0].shape == (4, *v.shape)


@BACK_ENDS
def test_jacobians(packages, back_end):
    this = case(SPEC, T=1, R=1)
    f = function(packages(SPEC), this, "chunk", "v")
    with back_end():
        (o, _), v = f(this.x["v"]), this.x["v"].detach().requires_grad_()
        rows = [torch.autograd.grad(f(v)[0].flatten()[n], v)[0] for n in range(o.numel())]
        close([jacrev(lambda v: f(v)[0])(this.x["v"]).flatten(0, 3)], [torch.stack(rows)])


@FORMS
def test_forward_mode(packages, form):
    """Kernels have none, and say so; the PyTorch version has."""
    package, this = packages(SPEC), case(SPEC, T=5)
    f, v = function(package, this, form, "v"), this.x["v"]
    tangent = torch.randn_like(v)
    for transform in (lambda: jvp(f, (v,), (tangent,)), lambda: jacfwd(f)(v), lambda: dual(f, v, tangent)):
        with pytest.raises(package.arguments.ArgumentError, match="v: got a tensor with a tangent"):
            transform()
    with pytorch_version():
        _, found = jvp(f, (v,), (tangent,))
        close(dual(f, v, tangent), found)
        close(found, [a - b for a, b in zip(f(v + tangent), f(v))])  # linear in v, but for the initial state


def dual(f, v, tangent):
    with forward_ad.dual_level():
        return [forward_ad.unpack_dual(x).tangent for x in f(forward_ad.make_dual(v, tangent))]


@FORMS
@BACK_ENDS
@pytest.mark.parametrize("offsets", [None, (0, 2, 2, 4)])
def test_without_contents(packages, form, back_end, offsets):
    this = case(SPEC, T=5, R=2, offsets=offsets)
    package = packages(SPEC)
    wanted = call(package, this, form)
    operator = getattr(package, operator_name(SPEC, form))
    given = keywords(this, form)

    def run(q, v):
        return operator(**given | {"q": q, "v": v})

    with back_end():
        mode = FakeTensorMode()
        package.LAUNCHES.clear()
        with mode:
            fake = {n: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for n, x in given.items()}
            found = operator(**fake)
        assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in wanted]
        assert not package.LAUNCHES
        assert all(x.is_contiguous() for x in (*found, *operator(**given)))
        graph = make_fx(run)(this.x["q"], this.x["v"])
        close(graph(this.x["q"], this.x["v"]), wanted)
        doubled = graph(2 * this.x["q"], this.x["v"])
        torch.testing.assert_close(doubled[0], 2 * wanted[0], rtol=1e-4, atol=1e-5)


@BACK_ENDS
@FORMS
def test_traced_with_symbolic_sizes(packages, form, back_end):
    this = case(SPEC, T=5, R=1, B=2)
    f = function(packages(SPEC), this, form, *this.x)
    with back_end():
        graph = make_fx(f, tracing_mode="symbolic")(*this.x.values())
        close(graph(*this.x.values()), f(*this.x.values()))


@pytest.mark.parametrize("mode", ["vmap", "grad", "fake", "meta by default", "no gradients", "symbolic"])
def test_a_package_may_be_built_at_any_call(monkeypatch, tmp_path, mode):
    """Building computes: what the first call is made under must not reach it."""
    monkeypatch.setenv("GDNGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("gdngen.runtime.dispatch._packages", {})
    monkeypatch.setattr("gdngen.api._loaded", {})
    this = case(SPEC, T=3, R=1, B=2)
    q, others = this.x["q"], {name: x for name, x in keywords(this, "recurrent").items() if name != "q"}

    def f(q, **changes):
        return ops.fused_recurrent_gated_delta_rule(q, **others | changes)[0]

    if mode == "vmap":
        found = vmap(f)(q[None])[0]
    elif mode == "grad":
        grad(lambda q: f(q).sum())(q)
        found = f(q)
    elif mode == "fake":
        with FakeTensorMode() as fake:
            given = {n: fake.from_tensor(x) for n, x in others.items() if isinstance(x, torch.Tensor)}
            found = f(fake.from_tensor(q), **given)
        assert found.shape == f(q).shape
        return
    elif mode == "meta by default":
        with torch.device("meta"):
            found = f(q)
    elif mode == "no gradients":
        with torch.inference_mode():
            found = f(q)
    else:
        names = [name for name, x in others.items() if isinstance(x, torch.Tensor)]
        tensors = [others[name] for name in names]
        found = make_fx(lambda q, *x: f(q, **dict(zip(names, x))), tracing_mode="symbolic")(q, *tensors)(q, *tensors)
    close([found], [f(q)])


@BACK_ENDS
def test_packed_sequences_compile_in_one_graph(packages, back_end):
    torch.compiler.reset()
    this = case(SPEC, T=6, offsets=(0, 2, 2, 5))
    f = function(packages(SPEC), this, "chunk", "q", "k", "h0")
    values = [this.x[name].requires_grad_() for name in ("q", "k", "h0")]
    with back_end():
        wanted = torch.autograd.grad([x.sin().sum() for x in f(*values)], values)
        compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
        close(torch.autograd.grad([x.sin().sum() for x in compiled(*values)], values), wanted)


@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler of torch.compile needs a C++ compiler")
def test_packed_sequences_on_a_cpu_compile_by_default(packages):
    """torch.compile's own compiler relies on the strides that fake tensors have."""
    torch.compiler.reset()
    this = case(SPEC, T=6, offsets=(0, 2, 2, 5))
    f, q = function(packages(SPEC), this, "chunk", "q"), this.x["q"].requires_grad_()
    with pytorch_version():
        wanted, found = f(q), torch.compile(f, fullgraph=True)(q)
        close(found, wanted)
        close(*(torch.autograd.grad(x[0].sin().sum(), q) for x in (found, wanted)))


def test_gdngen_compiles_before_its_first_call(monkeypatch):
    torch.compiler.reset()
    monkeypatch.setattr("gdngen.runtime.dispatch._packages", {})
    this = case(SPEC, T=3)
    given = keywords(this, "recurrent") | {"state_v_first": False}
    compiled = torch.compile(ops.fused_recurrent_gated_delta_rule, fullgraph=True, backend="eager")
    close(compiled(**given), ops.fused_recurrent_gated_delta_rule(**given))
