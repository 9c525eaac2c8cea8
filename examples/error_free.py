"""A member that gdngen does not know: error-free linear attention, added from outside in one op, one method, one Spec.

The delta rule is one Euler step of dS/dt = k (v - S^T k)^T.  Solved exactly over a step of size beta (Lei et al. 2025,
arXiv 2512.12602) it is the delta rule again, with the write strength (1 - exp(-beta |k|^2)) / |k|^2 on raw keys.  Here
that is an op `relax` of two operands, beta and |k|^2, and a Family that writes with it; the gates, the chunk form,
backward, decode and the PyTorch version follow from the graph.

`python examples/error_free.py` builds the package and compares its gradients and its decode with the recurrence.
"""

import sys
import tempfile
from typing import ClassVar

import torch
from torch import Tensor

from gdngen import Spec, api, oracle

# ---- the member ------------------------------------------------------------------------------------------------------
from gdngen.ir.family import Family
from gdngen.ir.ops import OPS, Op, elementwise, infer_same

SMALL = 0.1  # of beta |k|^2: below it the closed forms cancel, and their series are exact to fp32


def relax(beta, square):
    x = beta * square
    series = beta * (1 - x * (1 / 2 - x * (1 / 6 - x * (1 / 24 - x / 120))))
    return torch.where(x < SMALL, series, -torch.expm1(-x) / square)


def slope(beta, square):
    """The derivative by the square."""
    x = beta * square
    series = -1 / 2 + x * (1 / 3 - x * (1 / 8 - x * (1 / 30 - x / 144)))
    return torch.where(x < SMALL, series * beta**2, (torch.exp(-x) * (1 + x) - 1) / square**2)


def derive_relax(build, me, adjoint, node):
    beta, square = node.args
    yield beta, build.mul(adjoint, build.apply("exp", build.mul(beta, square, coef=-1.0)))
    yield square, build.mul(adjoint, build.apply("relax_slope", beta, square))


OPS["relax"] = Op("relax", "(1 - exp(-beta s)) / s.", infer_same, elementwise(relax), derive_relax, 8,
    kernel="tl.where({0} * {1} < 0.1, {0} * (1.0 - {0} * {1} * (0.5 - {0} * {1} * (0.16666667 - {0} * {1} * "
           "(0.041666667 - {0} * {1} * 0.0083333333)))), (1.0 - tl.exp(-{0} * {1})) / {1})",
    torch="torch.where({0} * {1} < 0.1, {0} * (1 - {0} * {1} * (1 / 2 - {0} * {1} * (1 / 6 - {0} * {1} * (1 / 24 - "
          "{0} * {1} / 120)))), -torch.expm1(-{0} * {1}) / {1}.where({0} * {1} >= 0.1, 1.0))")  # fmt: skip
OPS["relax_slope"] = Op("relax_slope", "Its derivative by s.", infer_same, elementwise(slope), None, 8,
    kernel="tl.where({0} * {1} < 0.1, {0} * {0} * (-0.5 + {0} * {1} * (0.33333333 - {0} * {1} * (0.125 - {0} * {1} * "
           "(0.033333333 - {0} * {1} * 0.0069444444)))), (tl.exp(-{0} * {1}) * (1.0 + {0} * {1}) - 1.0) / ({1} * {1}))",
)  # fmt: skip


class ErrorFreeFamily(Family):
    def write_strength(self, k, softplus):
        b, beta = self.build, super().write_strength(k, softplus)
        return b.name(b.apply("relax", beta, b.ein([k, k], "i")), "alpha")


class ErrorFree(Spec):
    family: ClassVar[type[Family]] = ErrorFreeFamily

    @property
    def name(self) -> str:
        return f"error_free_{super().name}"

    @property
    def command(self) -> str:
        return "python examples/error_free.py"


# ---- and what it gives -----------------------------------------------------------------------------------------------


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """o in float64, differentiable: the delta rule of the oracle with the exact write strength."""
    square = k.double().square().sum(-1).repeat_interleave(v.shape[2] // k.shape[2], 2)
    return oracle.recurrence(q, k, v, g=g, beta=-torch.expm1(-beta.double() * square) / square)[0]


def main() -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        spec = ErrorFree(key_dim=64, value_dim=64)
        package = api.import_folder(api.build(spec, folder), spec.name)
        torch.manual_seed(0)
        x = [torch.randn(1, 200, heads, 64, device=device) * 0.2 for heads in (2, 2, 4)]
        x += [-torch.rand(1, 200, 4, device=device), 2 * torch.rand(1, 200, 4, device=device)]
        x = [tensor.requires_grad_() for tensor in x]
        o, exact = package.chunk_gated_delta_rule(*x)[0], recurrence(*x)
        cotangent = torch.randn_like(o)
        found, wanted = (torch.autograd.grad(y, x, cotangent.to(y.dtype)) for y in (o, exact))
        with torch.no_grad():
            decoded = package.fused_recurrent_gated_delta_rule(*x[:4], beta=x[4])[0]
    worst = {"chunks": oracle.rms_ratio(o, exact), "decode": oracle.rms_ratio(decoded, exact)}
    worst |= {f"d{name}": oracle.rms_ratio(a, b) for name, a, b in zip(("q", "k", "v", "g", "beta"), found, wanted)}
    print("error against the recurrence:", ", ".join(f"{name} {error:.1e}" for name, error in worst.items()))
    return max(worst.values()) > 1e-3


if __name__ == "__main__":
    sys.exit(main())
