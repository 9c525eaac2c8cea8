"""Kernels on 16-bit inputs as on a GPU: bf16 and tf32 operands, sums of gates in bf16, an inverse in fp16."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from support import answer, case, check, errors
from tensor_cores import rounded, tensor_cores
from test_training import check as check_gradients

from gdngen.spec import Spec

MEMBERS = [
    Spec(key_dim=20, value_dim=33, chunk=32, qk_norm=True, state_v_first=True),
    Spec(gate="key", key_dim=40, value_dim=20, chunk=32),  # three slices of key channels
    Spec(gate="scalar+value", key_dim=16, value_dim=20, chunk=16),
    Spec(gate="none", key_dim=16, value_dim=16, chunk=64, beta_logits=True),
    Spec(gate="key", fused_gate="bounded", key_dim=16, value_dim=9, chunk=16, qk_norm=True),
    Spec(rule="additive", gate="key", beta="none", key_dim=33, value_dim=16, chunk=32),
    Spec(
        rule="additive", gate="none", beta="none", normalize=True, feature_map="elu1", key_dim=16, value_dim=9, chunk=16
    ),
    Spec(rule="additive", beta="dt", key_dim=16, value_dim=20, chunk=16),
]


def members(*short: int) -> list[object]:
    return [
        pytest.param(spec, id=spec.name, marks=() if n in short else pytest.mark.full) for n, spec in enumerate(MEMBERS)
    ]


@triton.jit
def sum_of_products(x, y, z, SIZE: tl.constexpr):
    tile = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    b_x, b_y = tl.load(x + tile), tl.load(y + tile)
    tl.store(z + tile, tl.dot(b_x, b_y, input_precision="tf32").to(z.dtype.element_ty))


def test_rounding() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.arange(-500, 500).div(5).round()
    x = torch.cat([x, torch.tensor([0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, 1 + 2**-8, 1 + 3 * 2**-8])])
    assert np.array_equal(rounded(x.numpy()), x.bfloat16().float().numpy(), equal_nan=True)


@pytest.mark.parametrize(("dtype", "least", "most"), [(torch.bfloat16, 1e-3, 4e-3), (torch.float32, 1e-4, 1.5e-3)])
def test_products(packages, dtype, least, most) -> None:
    """Stored as bf16, a product is off by bf16's rounding; in fp32 by what tf32 drops of its operands."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.rand(16, 16, generator=generator).to(dtype) for _ in range(2))
    z = torch.empty_like(x)
    with tensor_cores(packages(MEMBERS[0])):
        sum_of_products[(1,)](x, y, z, 16)
    exact = x.double() @ y.double()
    assert least < float((z.double() - exact).norm() / exact.norm()) < most


@pytest.mark.parametrize("spec", members(0))
def test_results(packages, spec) -> None:
    """Chunks and tokens; dense and packed, with rows behind the sequences; mild and mixed decays."""
    package = packages(spec)
    with tensor_cores(package):
        this = case(spec, T=70, B=2, dtype=torch.bfloat16, seed=2)
        size, few = errors(check(package, this), answer(this)), spec.rule == "delta" and spec.key_dim < 64
        assert max(size[1:]) < 1e-5 if few else min(size) > 2e-4  # states of few key channels as of fp32 inputs
        this = case(spec, T=80, R=1, offsets=(0, 5, 5, 75), dtype=torch.bfloat16, decays="mixed", seed=3)
        check(package, this)
        check(package, this, "recurrent")
        check(package, case(spec, T=40, dtype=torch.float16, seed=4))


@pytest.mark.parametrize("spec", members(1))
def test_gradients(packages, spec) -> None:
    package = packages(spec)
    with tensor_cores(package):
        check_gradients(package, case(spec, T=40, R=1, dtype=torch.bfloat16, seed=5))
        check_gradients(package, case(spec, T=50, offsets=(0, 5, 5, 45), dtype=torch.bfloat16, decays="mixed", seed=6))
