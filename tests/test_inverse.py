"""unit_lower_inverse on both machine paths of 16-bit inputs, which whole kernels take on a GPU alone."""

import importlib

import pytest
import torch
import triton
import triton.language as tl

from gdngen import oracle
from gdngen.spec import Spec

WIDE = {"key_dim": 64, "value_dim": 8}  # of few channels the delta rule itself leaves next to nothing
device = None  # of a package, which a kernel finds among the globals


@triton.jit
def invert_tile(a, e, x, TURNED: tl.constexpr, NARROW: tl.constexpr, C: tl.constexpr):
    o_c = tl.arange(0, C)
    tile = o_c[:, None] * C + o_c[None, :]
    b_A = tl.load(a + tile)
    if e is None:
        tl.store(x + tile, device.unit_lower_inverse(b_A, None, TURNED, NARROW, C, "tf32"))
    else:
        tl.store(x + tile, device.unit_lower_inverse(b_A, tl.load(e + tile), TURNED, NARROW, C, "tf32"))


@pytest.fixture(scope="module")
def invert(packages):
    global device
    device = importlib.import_module(f"{packages(Spec()).__name__}.device")

    def run(a: torch.Tensor, turned: bool, e: torch.Tensor | None = None, narrow: bool = True) -> torch.Tensor:
        a, e = (x if x is None else x.T.contiguous() if turned else x.contiguous() for x in (a, e))
        x = torch.full_like(a, torch.nan)
        invert_tile[(1,)](a, e, x, turned, narrow, len(a))
        return x.T if turned else x

    return run


def scores(C: int, keys: str) -> torch.Tensor:
    """beta k k^T of unit keys, whole: what lies on and above the diagonal is not to be read."""
    torch.manual_seed(C)
    k = torch.randn(1 if keys == "identical" else C, 64).expand(C, 64)
    k = torch.nn.functional.normalize(k + (0.5 * k[:1] if keys == "correlated" else 0), dim=-1)
    return 2 * torch.rand(C, 1) * (k @ k.T)


def right(a: torch.Tensor) -> torch.Tensor:
    return torch.linalg.inv(torch.eye(len(a), dtype=torch.float64) + a.double().tril(-1))


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def every_chunk(test):
    either_way = pytest.mark.parametrize("turned", [False, True])
    return either_way(pytest.mark.parametrize("C", [16, 32, 64, 128])(test))


@pytest.mark.parametrize("keys", ["random", "correlated", "identical"])
@every_chunk
def test_products_in_fp16(invert, C, turned, keys):
    a = scores(C, keys)
    found = invert(a, turned)
    assert distance(found, right(a)) < 3e-3
    assert distance(found, invert(a, turned, narrow=False)) > 0  # another way of computing it
    assert torch.equal(found.triu(1), torch.zeros(C, C)) and torch.equal(found.diagonal(), torch.ones(C))


@every_chunk
def test_decays_keep_their_digits(invert, C, turned):
    """Decays down to e^-64, far below what fp16 holds: relative to its decay every entry is as right as without."""
    a, g = scores(C, "random"), torch.full((C,), -0.5, dtype=torch.float64).cumsum(0)
    e = (g[:, None] - g[None, :]).tril().exp().tril()
    found = invert(a, turned, e.float())
    shown = e > 1e-35  # not subnormal in float32
    free = torch.where(shown, found / e, 0.0)
    assert distance(free, torch.where(shown, right(a), 0.0)) < 3e-3


@pytest.mark.parametrize("what", ["a score", "a value on the way"])
@every_chunk
def test_what_overflows_fp16_is_computed_again(invert, C, turned, what):
    if what == "a score":
        a = torch.zeros(C, C)
        a[1::2, 0::2] = 1e5 * torch.eye(C // 2)
    else:  # identical keys with so large a beta that the inverse grows to 1e12 over the chunk
        a = (1 + 10 ** (12 / C)) * torch.ones(C, C)
    found = invert(a, turned)
    assert found.isfinite().all()
    assert distance(found, right(a)) < 1e-4


@pytest.mark.parametrize("spec", [Spec(qk_norm=True, **WIDE), Spec(**WIDE)], ids=str)
def test_what_passed_the_whole_decay(packages, monkeypatch, spec):
    """Of the final state alone, with nothing written and a decay of e^-32 over the chunk: every pair counts alike."""
    package = packages(spec)
    launch = importlib.import_module(f"{package.__name__}.launch")
    of_interpreter = launch.machine_of
    monkeypatch.setattr(launch, "machine_of", lambda x: of_interpreter(x)._replace(PRECISION="tf32"))
    torch.manual_seed(0)
    q, k = torch.nn.functional.normalize(torch.randn(2, 1, 64, 1, spec.key_dim), dim=-1)
    v, beta = torch.zeros(1, 64, 1, spec.value_dim), torch.rand(1, 64, 1)
    g, h0 = torch.full((1, 64, 1), -0.5), torch.randn(1, 1, spec.key_dim, spec.value_dim, requires_grad=True)
    keywords = {"use_qk_l2norm_in_kernel": True} if spec.qk_norm else {}
    _, state = package.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=h0, output_final_state=True, **keywords)
    (found,) = torch.autograd.grad(state.sum(), h0)
    exact = h0.detach().double().requires_grad_()
    _, wanted = oracle.recurrence(q, k, v, g=g, beta=beta, h0=exact)
    (gradient,) = torch.autograd.grad(wanted.sum(), exact)
    assert oracle.rms_ratio(state.detach(), wanted.detach()) < 5e-3
    assert oracle.rms_ratio(found, gradient) < 8e-3
