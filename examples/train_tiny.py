"""Train a tiny two-layer model through generated operators, and through the plain recurrence: the losses must agree.

Each layer is a gated delta net mixer and an MLP (d = 256); the data are sequences of key-value pairs, in which a key
that comes again is followed by the same value as before.  `python examples/train_tiny.py` takes 300 steps on a GPU;
without one the package's PyTorch version runs, 100 steps in about two minutes on two cores.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gdngen

WIDTH, Q_HEADS, V_HEADS, HEAD_DIM = 256, 2, 4, 64
KEYS, VALUES, LENGTH, BATCH = 32, 32, 40, 32
WINDOW, NOISE = 25, 0.03  # losses are compared as means over a window of steps; relative difference allowed
GPU_STEPS, CPU_STEPS = 300, 100
Operator = Callable[..., Tensor]


class Mixer(nn.Module):
    """Projections, gate and write strength around an operator ``o = f(q, k, v, a, b, A_log, dt_bias)``."""

    def __init__(self, operator: Operator) -> None:
        super().__init__()
        self.operator = operator
        self.qk = nn.Linear(WIDTH, 2 * Q_HEADS * HEAD_DIM, bias=False)
        self.v = nn.Linear(WIDTH, V_HEADS * HEAD_DIM, bias=False)
        self.gates = nn.Linear(WIDTH, 2 * V_HEADS, bias=False)
        self.A_log = nn.Parameter(torch.linspace(-2, 1, V_HEADS))
        self.dt_bias = nn.Parameter(torch.full((V_HEADS,), -2.0))
        self.out = nn.Linear(V_HEADS * HEAD_DIM, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk(x).unflatten(-1, (2 * Q_HEADS, HEAD_DIM)).chunk(2, dim=2)
        v = self.v(x).unflatten(-1, (V_HEADS, HEAD_DIM))
        a, b = self.gates(x).chunk(2, dim=-1)
        return self.out(self.operator(q, k, v, a, b, self.A_log, self.dt_bias).flatten(2))


class Model(nn.Module):
    """Embedding, two blocks, logits."""

    def __init__(self, operator: Operator) -> None:
        super().__init__()
        self.embed = nn.Embedding(KEYS + VALUES, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.02)  # it also makes the logits
        self.mixers = nn.ModuleList(Mixer(operator) for _ in range(2))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for n, (mixer, mlp) in enumerate(zip(self.mixers, self.mlps, strict=True)):
            x = x + mixer(self.norms[2 * n](x))
            x = x + mlp(self.norms[2 * n + 1](x))
        return self.norms[4](x) @ self.embed.weight.T


def generated(dtype: torch.dtype) -> Operator:
    """The operator of a package built for this very mixer."""
    spec = gdngen.Spec(key_dim=HEAD_DIM, value_dim=HEAD_DIM, fused_gate="softplus", beta_logits=True, qk_norm=True)
    package = gdngen.load(spec)

    def operator(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
        q, k, v = (x.to(dtype) for x in (q, k, v))
        o, _ = package.chunk_gated_delta_rule(
            q, k, v, g=a, beta=b, A_log=A_log, dt_bias=dt_bias, use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return o.to(a.dtype)

    return operator


def recurrence(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """The same in plain PyTorch, token by token (contract section 2)."""
    q, k = (F.normalize(x, dim=-1).repeat_interleave(V_HEADS // Q_HEADS, dim=2) for x in (q, k))
    decay, beta = torch.exp(-A_log.exp() * F.softplus(a + dt_bias)), b.sigmoid()
    S = q.new_zeros(q.shape[0], V_HEADS, HEAD_DIM, HEAD_DIM)
    rows = []
    for t in range(q.shape[1]):
        S = decay[:, t, :, None, None] * S
        r = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
        S = S + k[:, t, :, :, None] * r[:, :, None]
        rows.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) * HEAD_DIM**-0.5)
    return torch.stack(rows, 1)


def batches(steps: int, device: str) -> Iterator[Tensor]:
    """[BATCH, LENGTH + 1] tokens: key, value, key, value, ...; each sequence has a table of its own."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        table = torch.randint(VALUES, (BATCH, KEYS), generator=generator) + KEYS
        keys = torch.randint(8, (BATCH, LENGTH // 2 + 1), generator=generator)
        pairs = torch.stack([keys, table.gather(1, keys)], 2).flatten(1)
        yield pairs[:, : LENGTH + 1].to(device)


def train(operator: Operator, steps: int, device: str) -> list[float]:
    """The loss at every step; means over windows are printed as they come."""
    torch.manual_seed(0)
    model = Model(operator).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    losses, window = [], min(WINDOW, steps)
    for tokens in batches(steps, device):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits[:, ::2].flatten(0, 1), tokens[:, 1::2].flatten())  # the values alone
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.detach())
        if len(losses) % window == 0:
            print(f" {torch.stack(losses[-window:]).mean():.3f}", end="", flush=True)
    return torch.stack(losses).tolist()


def smooth(losses: list[float]) -> Tensor:
    window = min(WINDOW, len(losses))
    return torch.tensor(losses).unfold(0, window, window).mean(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, help=f"of training, at least 1  [{GPU_STEPS}; {CPU_STEPS} on the CPU]")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    steps = (CPU_STEPS if options.device == "cpu" else GPU_STEPS) if options.steps is None else options.steps
    if steps < 1:
        parser.error(f"--steps {steps}: expected at least 1")
    print(f"{steps} steps on {options.device}; losses are means over {min(WINDOW, steps)} of them", flush=True)
    runs = {"recurrence, float32": recurrence, "generated, float32": generated(torch.float32)}
    runs |= {"generated, bfloat16": generated(torch.bfloat16)}
    curves, agree = {}, True
    for name, operator in runs.items():
        start = time.perf_counter()
        print(f"{name:20} loss", end="", flush=True)
        curves[name] = smooth(train(operator, steps, options.device))
        print(f"  ({time.perf_counter() - start:.1f} s)", flush=True)
    base = curves.pop("recurrence, float32")
    for name, curve in curves.items():
        largest = float(((curve - base).abs() / base[0]).max())
        agree &= largest <= NOISE
        print(f"{name:20} largest difference to the recurrence {100 * largest:.2f} % of the first loss")
    print("the losses agree" if agree else f"FAILED: more than {100 * NOISE:.0f} %")
    return int(not agree)


if __name__ == "__main__":
    sys.exit(main())
