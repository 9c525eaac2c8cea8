"""Results and gradients of generated packages on a GPU against the float64 recurrence: one line per configuration.

Every key dim and chunk length, every dtype, long sequences, packed ones with empty segments, gates at 0, -20 and -inf,
head ratios, K != V, fused gates, every member.  Each configuration builds and compiles in a process of its own.
"""

import argparse
import itertools
import multiprocessing
import re
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
STRONG = ("strong", "mixed", "resets", "zero")


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
    every = [Job(norm, dtype, 8192, (1, 2)) for dtype in DTYPES]
    every += [Job(norm, dtype, gates=gates) for dtype in DTYPES for gates in STRONG]
    every += [Job(norm, dtype, 400, offsets=(0, 65, 65, 130, 317)) for dtype in DTYPES]
    every += [Job((("key_dim", 100), ("value_dim", 60), ("state_v_first", True)), dtype) for dtype in DTYPES]
    fused = (("fused_gate", "softplus"), ("beta_logits", True), ("qk_norm", True))
    every += [Job(fused, dtype) for dtype in DTYPES]
    every += [Job((), torch.bfloat16, 300, (H, HV)) for H, HV in ((4, 4), (1, 3), (1, 8))]
    members = (("gate", "none"),), (("rule", "additive"),), (("rule", "additive"), ("gate", "none"), ("beta", "none"))
    every += [Job((*member, ("value_dim", 200)), dtype) for member in members for dtype in DTYPES]
    every += [Job((("rule", "additive"), ("beta", "dt"), ("value_dim", 64)), dtype, heads=(1, 8)) for dtype in DTYPES]
    every += [Job((("rule", "additive"), ("normalize", True), ("feature_map", "elu1"))), Job((("gate", "key"), *norm))]
    for gate in ("key", "value"):
        channel = ("gate", gate)
        every += [Job((channel, *norm), dtype, 2048, (2, 2)) for dtype in DTYPES]
        every += [Job((channel, *norm), torch.bfloat16, gates=gates) for gates in STRONG]
        every += [
            Job((channel, *norm), torch.float32, gates="mixed"),
            Job((channel, *norm), offsets=(0, 65, 65, 130, 300)),
        ]
        every += [Job((channel, ("rule", "additive")), dtype) for dtype in DTYPES]
        every += [Job((channel, ("chunk", C), ("key_dim", 100), ("value_dim", 60))) for C in (16, 32, 128)]
    every += [Job((("gate", "key"), *fused)), Job((("gate", "key"), ("fused_gate", "bounded"), *norm))]
    return table + every + [Job((("gate", gate),)) for gate in ("scalar+key", "scalar+value", "key+value")]


def inputs(job: Job, spec: Any) -> tuple[dict[str, Any], Any]:
    """What the Spec reads, and the call as a case of gdngen.calls."""
    from gdngen import calls

    case = calls.Case(job.gates, job.tokens, offsets=job.offsets)
    x = calls.inputs(spec, case, job.dtype, job.heads, "cuda")
    for gate in (x[name] for name in ("g", "gk", "gv") if name in x):
        if job.gates == "strong":
            gate.uniform_(-20, 0)
        elif job.gates == "zero":
            gate.zero_()
        elif job.gates != "mild":
            gate[:, 5::7] = -torch.inf
        if job.gates == "mixed":
            gate[:, 2::7], gate[:, 3::7], gate[:, 4::7] = -20.0, 0.0, -1e4
    return x, case


def check(job: Job, folder: str) -> tuple[str, bool]:
    import gdngen
    from gdngen import api, calls
    from gdngen.oracle import budget, rms_ratio

    torch.manual_seed(0)
    spec = gdngen.Spec(**dict(job.options))
    path = api.build(spec, folder)
    operator = getattr(api.import_folder(path, path.name), calls.operator_name(spec, "chunk"))
    x, case = inputs(job, spec)
    for value in x.values():
        value.requires_grad_(value.is_floating_point())
    leaves = {name: value for name, value in x.items() if value.requires_grad}
    found, cotangents = [], None
    for _ in range(2):
        o, state = operator(**calls.keywords(spec, "chunk", x, case))
        results = (o, *(state if spec.normalize else (state,)))
        cotangents = cotangents or [torch.randn(r.shape, device="cuda").to(r.dtype) for r in results]
        found.append([*results, *torch.autograd.grad(results, list(leaves.values()), cotangents)])
    right = calls.expected(spec, x, case)
    wanted = torch.autograd.grad(right, list(leaves.values()), [d.double() for d in cotangents])
    names = ["o", "state", "z"][: len(right)] + [f"d{name}" for name in leaves]
    errors = {n: rms_ratio(a, b) for n, a, b in zip(names, found[0], [*right, *wanted], strict=True)}
    same = all(torch.equal(a, b) for a, b in zip(*found))
    good = same and all(error <= budget(name, str(job.dtype).removeprefix("torch.")) for name, error in errors.items())
    numbers = " ".join(f"{name} {error:.1e}" for name, error in errors.items())
    return f"{job}: {numbers}{'' if same else ' DIFFERENT BITS'}{'' if good else '   FAILED'}", good


def guarded(job: Job) -> tuple[str, bool]:
    try:
        with tempfile.TemporaryDirectory() as folder:
            return check(job, folder)
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
        for future in as_completed([pool.submit(guarded, job) for job in chosen]):
            text, good = future.result()
            failed += not good
            print(text, flush=True)
    seconds = time.monotonic() - start
    print(f"{torch.cuda.get_device_name()}: {len(chosen)} configurations, {failed} failed, {seconds:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
