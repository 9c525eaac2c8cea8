"""Gradients of generated packages on a GPU against autograd of the float64 recurrence: one line per configuration.

Every key dim and chunk length, every dtype, long sequences, packed ones with empty segments, gates at 0, -20 and -inf,
head ratios, K != V, fused gates.  Each configuration builds its package and compiles it in a process of its own.
"""

import argparse
import itertools
import multiprocessing
import re
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

NARROW, WIDE = 8e-3, 2e-2  # contract section 5: q, k, v, states; everything else
BUDGETS = {torch.float32: (2e-3, 2e-3), torch.float16: (NARROW, WIDE), torch.bfloat16: (NARROW, WIDE)}


@dataclass(frozen=True)
class Job:
    """A Spec by its options and one call of its chunk operator."""

    options: tuple[tuple[str, Any], ...]
    dtype: torch.dtype = torch.bfloat16
    tokens: int = 300
    heads: tuple[int, int] = (2, 4)
    offsets: tuple[int, ...] = ()
    gates: str = "mild"

    def __str__(self) -> str:
        options = " ".join(f"{name}={value}" for name, value in self.options)
        packed = f" offsets {self.offsets}" if self.offsets else ""
        name = str(self.dtype).removeprefix("torch.")
        return f"{name} T={self.tokens} heads {self.heads[0]}/{self.heads[1]} {options} gates {self.gates}{packed}"


def jobs() -> list[Job]:
    table = [
        Job((("key_dim", K), ("value_dim", K), ("chunk", C)))
        for K, C in itertools.product((64, 100, 128, 256), (16, 32, 64, 128))
    ]
    norm = (("qk_norm", True),)
    every = [Job(norm, dtype, 8192, (1, 2)) for dtype in BUDGETS]
    every += [Job(norm, dtype, gates=gates) for dtype in BUDGETS for gates in ("strong", "mixed", "resets", "zero")]
    every += [Job(norm, dtype, 400, offsets=(0, 65, 65, 130, 317)) for dtype in BUDGETS]
    every += [Job((("key_dim", 100), ("value_dim", 60), ("state_v_first", True)), dtype) for dtype in BUDGETS]
    fused = (("fused_gate", "softplus"), ("beta_logits", True), ("qk_norm", True))
    every += [Job(fused, dtype) for dtype in BUDGETS]
    every += [Job((), torch.bfloat16, 300, (H, HV)) for H, HV in ((4, 4), (1, 3), (1, 8))]
    members = (("gate", "none"),), (("rule", "additive"),), (("rule", "additive"), ("gate", "none"), ("beta", "none"))
    every += [Job((*member, ("value_dim", 200)), dtype) for member in members for dtype in BUDGETS]
    return table + every


def inputs(job: Job, spec: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    (H, HV), T, K, V = job.heads, job.tokens, spec.key_dim, spec.value_dim
    unit = torch.nn.functional.normalize
    x = {name: unit(torch.randn(1, T, H, K, device="cuda"), dim=-1).to(job.dtype) for name in ("q", "k")}
    x["v"] = torch.randn(1, T, HV, V, device="cuda").to(job.dtype)
    gate = torch.randn(1, T, HV, device="cuda")
    if spec.fused_gate == "none" and spec.gate:
        gate = torch.nn.functional.logsigmoid(gate) / 4
        if job.gates == "strong":
            gate = -20 * torch.rand_like(gate)
        elif job.gates == "zero":
            gate = torch.zeros_like(gate)
        elif job.gates != "mild":
            gate[:, 5::7] = -torch.inf
        if job.gates == "mixed":
            gate[:, 2::7], gate[:, 3::7], gate[:, 4::7] = -20.0, 0.0, -1e4
    x |= {"g": gate} if spec.gate else {}
    if spec.fused_gate != "none":
        x |= {"A_log": torch.randn(HV, device="cuda") / 2, "dt_bias": torch.randn(HV, device="cuda")}
    if spec.beta != "none":
        x["beta"] = torch.randn(1, T, HV, device="cuda") if spec.beta_logits else torch.rand(1, T, HV, device="cuda")
    states = max(1, len(job.offsets) - 1)
    x["initial_state"] = torch.randn(states, HV, *((V, K) if spec.state_v_first else (K, V)), device="cuda") / 4
    return x


def exact(x: dict[str, torch.Tensor], job: Job, spec: Any) -> list[torch.Tensor]:
    """o and the final states by the float64 recurrence, sequence by sequence."""
    from gdngen import oracle

    q, k = (oracle.normalized(x[name]) if spec.qk_norm else x[name] for name in ("q", "k"))
    g, beta = x.get("g"), x.get("beta")
    if spec.fused_gate != "none":
        g = oracle.gate(g, x["A_log"], x["dt_bias"], spec.lower_bound)
    beta = torch.sigmoid(beta) if spec.beta_logits else beta
    states = x["initial_state"].transpose(2, 3) if spec.state_v_first else x["initial_state"]
    rows, finals = [], []
    for n, (first, last) in enumerate(itertools.pairwise(job.offsets or (0, job.tokens))):
        if first == last:
            finals.append(states[n : n + 1])
            continue
        part = {"q": q, "k": k, "v": x["v"], "g": g, "beta": beta}
        part = {name: value[:, first:last] for name, value in part.items() if value is not None}
        o, state = oracle.recurrence(**part, h0=states[n : n + 1], rule=spec.rule)
        rows.append(o)
        finals.append(state)
    final = torch.cat(finals)
    return [torch.cat(rows, 1), final.transpose(2, 3) if spec.state_v_first else final]


def check(job: Job) -> tuple[str, bool]:
    import gdngen
    from gdngen import api, calls

    spec = gdngen.Spec(**dict(job.options))
    folder = api.build(spec, tempfile.mkdtemp())
    package = api.import_folder(folder, folder.name)
    x = {name: value.requires_grad_() for name, value in inputs(job, spec).items()}
    options = {
        "use_qk_l2norm_in_kernel": spec.qk_norm, "use_gate_in_kernel": spec.fused_gate != "none",
        "use_beta_sigmoid_in_kernel": spec.beta_logits, "state_v_first": spec.state_v_first, "chunk_size": spec.chunk,
    }  # fmt: skip
    options = {name: value for name, value in options.items() if value}
    if job.offsets:
        options["cu_seqlens"] = torch.tensor(job.offsets, device="cuda", dtype=torch.int32)
    name = calls.operator_name(spec, "chunk")
    given = {**x, **({"g": None} if "g" not in x and name.endswith("gated_delta_rule") else {})}
    found, given_back = [], None
    for _ in range(2):
        results = getattr(package, name)(**given, **options, output_final_state=True)
        if given_back is None:
            given_back = [torch.randn(r.shape, device="cuda").to(r.dtype) for r in results]
        found.append(torch.autograd.grad(results, list(x.values()), given_back))
    y = {n: value.detach().double().requires_grad_() for n, value in x.items()}
    right = exact(y, job, spec)
    covered = right[0].shape[1]
    wanted = torch.autograd.grad(right, list(y.values()), [given_back[0][:, :covered].double(), given_back[1].double()])
    ratios = {n: _ratio(a, b) for n, a, b in zip(x, found[0], wanted)}
    same = all(torch.equal(a, b) for a, b in zip(*found))
    narrow, wide = BUDGETS[job.dtype]
    good = same and all(e <= (narrow if n in ("q", "k", "v", "initial_state") else wide) for n, e in ratios.items())
    numbers = " ".join(f"d{n} {e:.1e}" for n, e in ratios.items())
    return f"{job}: {numbers}{'' if same else ' DIFFERENT BITS'}{'' if good else '   FAILED'}", good


def _ratio(found: torch.Tensor, wanted: torch.Tensor) -> float:
    if not wanted.any():
        return float(found.abs().max())
    return float((found.double() - wanted).norm() / wanted.norm())


def guarded(job: Job) -> tuple[str, bool]:
    try:
        return check(job)
    except Exception as error:
        return f"{job}: FAILED {type(error).__name__}: {str(error)[-200:]}", False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--only", default="", help="only configurations whose line matches this expression")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("check_training: needs a GPU, and torch sees none", file=sys.stderr)
        return 3
    chosen, start, failed = [job for job in jobs() if re.search(options.only, str(job))], time.monotonic(), 0
    # A fresh process for each: a kernel that crashes takes its own check with it and no other.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, context, max_tasks_per_child=1) as pool:
        for text, good in pool.map(guarded, chosen):
            failed += not good
            print(text, flush=True)
    seconds = time.monotonic() - start
    print(f"{torch.cuda.get_device_name()}: {len(chosen)} configurations, {failed} failed, {seconds:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
