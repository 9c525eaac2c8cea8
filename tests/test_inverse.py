"""unit_lower_inverse on both machine paths of 16-bit inputs, which whole kernels take on a GPU alone."""

import importlib

import pytest
import torch
import triton
import triton.language as tl

from gdngen.spec import Spec

device = None  # of a package, which a kernel finds among the globals


@triton.jit
def invert_tile(a, x, TURNED: tl.constexpr, UNIT_KEYS: tl.constexpr, C: tl.constexpr):
    o_c = tl.arange(0, C)
    tile = o_c[:, None] * C + o_c[None, :]
    tl.store(x + tile, device.unit_lower_inverse(tl.load(a + tile), TURNED, UNIT_KEYS, C, "tf32"))


@pytest.fixture(scope="module")
def invert(packages):
    global device
    device = importlib.import_module(f"{packages(Spec()).__name__}.device")

    def run(a: torch.Tensor, turned: bool, unit_keys: bool) -> torch.Tensor:
        a = a.T.contiguous() if turned else a.contiguous()
        x = torch.full_like(a, torch.nan)
        invert_tile[(1,)](a, x, turned, unit_keys, len(a))
        return x.T if turned else x

    return run


def scores(C: int, keys: str) -> torch.Tensor:
    """beta k k^T of unit keys, whole: what lies on and above the diagonal is not to be read."""
    torch.manual_seed(C)
    k = torch.randn(1 if keys == "identical" else C, 64).expand(C, 64)
    k = torch.nn.functional.normalize(k + (0.5 * k[:1] if keys == "correlated" else 0), dim=-1)
    return 2 * torch.rand(C, 1) * (k @ k.T)


@pytest.mark.parametrize("keys", ["random", "correlated", "identical"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("C", [16, 32, 64, 128])
def test_inverse_in_fp16_products(invert, C, turned, keys):
    a = scores(C, keys)
    right = torch.linalg.inv(torch.eye(C, dtype=torch.float64) + a.double().tril(-1))
    found = invert(a, turned, unit_keys=True)
    assert (found - right).norm() / right.norm() < 3e-3
    assert torch.equal(found.triu(1), torch.zeros(C, C)) and torch.equal(found.diagonal(), torch.ones(C))
    assert torch.equal(found, invert(a, turned, unit_keys=False))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("C", [16, 32, 64, 128])
def test_inverse_of_long_keys_keeps_the_range_of_fp32(invert, C, turned):
    """Scores of 1e5 are infinite in fp16: where keys may be long, products of fp32's range follow."""
    a = torch.zeros(C, C)
    a[1::2, 0::2] = 1e5 * torch.eye(C // 2)
    right = torch.linalg.inv(torch.eye(C, dtype=torch.float64) + a.double().tril(-1))
    found = invert(a, turned, unit_keys=False)
    assert (found - right).norm() / right.norm() < 1e-6
    assert not invert(a, turned, unit_keys=True).isfinite().all()
