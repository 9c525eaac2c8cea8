"""Forward and decode times of a generated package against fla-core's, in one run, on the same inputs.

Both libraries are called as their users call them, through their public operators.  Outputs are checked in the same
run: against the float64 recurrence at a short length, against each other at the full one.  Prints one JSON line per
measurement and a table last.  The inputs are the public mix: unit q and k, an initial state, a quarter of the heads
without decay and the rest with log decay logsigmoid(randn) / 16; `--gates strong` draws log decays down to -20.
"""

import argparse
import functools
import importlib
import json
import math
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("FLA_FLASH_QLA", "0")  # fla-core's own kernels, also where another backend is installed

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from gdngen.autotune import clock

ROOT = Path(__file__).resolve().parent.parent
HEAD_DIM = 128
SHAPES = "32768x1:16/64 8192x4:16/64 8192x1:16/64 32768x1:16/32 1024x8:16/32 32768x1:2/8"
DECODE_BATCHES = (1, 32, 256)
OPERATORS = {"forward": "chunk_gated_delta_rule", "decode": "fused_recurrent_gated_delta_rule"}
BUDGET = 5e-3  # rms(x - ref) / rms(ref) in bfloat16
Inputs = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """``length``x``sequences``:``q_heads``/``v_heads``; forward packs the sequences, decode batches them."""

    length: int
    sequences: int
    q_heads: int
    v_heads: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        sizes, _, heads = text.partition(":")
        return cls(*(int(number) for number in [*sizes.split("x"), *heads.split("/")]))

    def __str__(self) -> str:
        return f"{self.length}x{self.sequences}:{self.q_heads}/{self.v_heads}"


class Sides:
    """The two libraries under one name each, and the record of what was measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.ours = {v_first: load_package(options, v_first) for v_first in (False, True)}
        self.fla = importlib.import_module("fla.ops.gated_delta_rule")
        self.options, self.start = options, time.monotonic()
        self.rows: list[dict[str, Any]] = []
        self.failures: list[str] = []

    def pair(self, kind: str, v_first: bool) -> dict[str, Any]:
        """The operator of both sides, with the options every call here has in common."""
        common = {"output_final_state": True, "state_v_first": v_first}
        common["use_qk_l2norm_in_kernel"] = self.options.qk_norm
        name = OPERATORS[kind]
        sides = {"ours": self.ours[v_first], "fla": self.fla}
        return {side: functools.partial(getattr(module, name), **common) for side, module in sides.items()}

    def over_budget(self, what: object) -> bool:
        late = time.monotonic() - self.start > self.options.budget
        if late:
            self.record(skipped=str(what), why=f"--budget {self.options.budget} s is spent")
        return late

    def record(self, **row: Any) -> None:
        row = {name: float(f"{x:.4g}") if isinstance(x, float) else x for name, x in row.items()}
        print(json.dumps(row), flush=True)
        self.rows.append(row)

    def check(self, what: str, error: float, budget: float) -> float:
        if not error <= budget:  # a NaN fails too
            self.failures.append(f"{what}: {error:.2e} exceeds {budget:.1e}")
        return error


def load_package(options: argparse.Namespace, v_first: bool) -> ModuleType:
    """The package given on the command line, else one built here."""
    path = options.ours_v_first if v_first else options.ours
    if path is None:
        import gdngen

        path = gdngen.build(gdngen.Spec(state_v_first=v_first, qk_norm=options.qk_norm), out=ROOT / "generated")
    sys.path.insert(0, str(Path(path).resolve().parent))
    return importlib.import_module(Path(path).name)


def make_inputs(shape: Shape, options: argparse.Namespace, packed: bool, seed: int = 0) -> Inputs:
    torch.manual_seed(seed)
    rows = (1, shape.length * shape.sequences) if packed else (shape.sequences, shape.length)
    randn = functools.partial(torch.randn, device="cuda")
    q, k = (F.normalize(randn(*rows, shape.q_heads, HEAD_DIM), dim=-1).bfloat16() for _ in range(2))
    if options.gates == "strong":
        g = -20 * torch.rand(*rows, shape.v_heads, device="cuda")
    else:
        g = F.logsigmoid(randn(*rows, shape.v_heads)) / 16
        g[..., math.ceil(0.75 * shape.v_heads) :] = 0
    inputs = {"q": q, "k": k, "v": randn(*rows, shape.v_heads, HEAD_DIM).bfloat16(), "g": g}
    inputs["beta"] = torch.rand(*rows, shape.v_heads, device="cuda")
    inputs["initial_state"] = randn(shape.sequences, shape.v_heads, HEAD_DIM, HEAD_DIM)
    if packed:
        inputs["cu_seqlens"] = torch.arange(shape.sequences + 1, device="cuda") * shape.length
    return inputs


def copies(inputs: Inputs) -> list[Inputs]:
    """Enough copies of the inputs to keep the L2 cache cold; the offsets, which libraries key on, stay shared."""
    size = sum(x.numel() * x.element_size() for x in inputs.values()) + inputs["initial_state"].nbytes
    rest = clock.copies_for_cold_cache(size) - 1
    return [inputs] + [{n: x if n == "cu_seqlens" else x.clone() for n, x in inputs.items()} for _ in range(rest)]


def errors_against_oracle(sides: Sides, kind: str, shape: Shape, v_first: bool) -> dict[str, float]:
    """Output and state of both sides at a short length, sequence by sequence against the float64 recurrence."""
    from gdngen import oracle

    packed = kind == "forward"
    short = Shape(200, min(shape.sequences, 2), shape.q_heads, shape.v_heads) if packed else shape
    x = make_inputs(short, sides.options, packed, seed=1)
    parts = {n: x[n].reshape(short.sequences, short.length, *x[n].shape[2:]) for n in ("q", "k", "v", "g", "beta")}
    if sides.options.qk_norm:
        parts |= {n: oracle.normalized(parts[n]) for n in ("q", "k")}
    exact = [
        oracle.recurrence(**{n: part[i : i + 1] for n, part in parts.items()}, h0=x["initial_state"][i : i + 1])
        for i in range(short.sequences)
    ]
    o_exact, state_exact = (torch.cat(values) for values in zip(*exact))
    x["initial_state"] = layout(x["initial_state"], v_first)
    errors = {}
    for side, operator in sides.pair(kind, v_first).items():
        o, state = operator(**x)
        errors[f"{side}_o"] = oracle.rms_ratio(o.reshape(o_exact.shape), o_exact)
        errors[f"{side}_state"] = oracle.rms_ratio(layout(state, v_first), state_exact)
    for name in ("ours_o", "ours_state"):
        sides.check(f"{kind} {short} {name}", errors[name], BUDGET)
    return errors


def layout(state: torch.Tensor, v_first: bool) -> torch.Tensor:
    return state.transpose(-1, -2).contiguous() if v_first else state


def compare(sides: Sides, kind: str, shape: Shape, v_first: bool) -> None:
    """One row: first call, median time and errors of both sides."""
    packed = kind == "forward"
    row: dict[str, Any] = {"op": kind, "shape": str(shape), "state": "VK" if v_first else "KV"}
    x = make_inputs(shape, sides.options, packed)
    x["initial_state"] = layout(x["initial_state"], v_first)
    sets, results = copies(x), {}
    for side, operator in sides.pair(kind, v_first).items():
        row[f"{side}_cold_s"] = clock.cold_s(functools.partial(operator, **x))
        row[f"{side}_ms"], _, row[f"{side}_how"] = clock.timed([functools.partial(operator, **one) for one in sets])
        results[side] = operator(**x)
    row["ratio"] = row["fla_ms"] / row["ours_ms"]
    row["difference"] = max(difference(a, b) for a, b in zip(results["ours"], results["fla"]))
    sides.check(f"{kind} {shape} against fla-core", row["difference"], 2 * BUDGET)
    if kind == "decode":
        for side in results:
            row[f"{side}_GBps"] = 2 * x["initial_state"].nbytes / row[f"{side}_ms"] / 1e6
    del results, sets, x
    torch.cuda.empty_cache()
    sides.record(**row, **errors_against_oracle(sides, kind, shape, v_first))


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """rms(a - b) / rms(b), in float32: at full length float64 copies would be large."""
    return float((a.float() - b.float()).square().mean().sqrt() / b.float().square().mean().sqrt())


def compare_host_time(sides: Sides) -> None:
    """Host time of a call whose GPU work is negligible."""
    for kind, shape in (("forward", Shape(64, 1, 2, 2)), ("decode", Shape(1, 1, 2, 2))):
        x = make_inputs(shape, sides.options, packed=False)
        row: dict[str, Any] = {"op": f"host time, {kind}", "shape": str(shape), "state": "KV"}
        for side, operator in sides.pair(kind, v_first=False).items():
            row[f"{side}_us"] = clock.host_us(functools.partial(operator, **x))
        sides.record(**row, ratio=row["fla_us"] / row["ours_us"])


def print_table(rows: list[dict[str, Any]]) -> None:
    print(f"\n{'op':<19}{'shape':<17}{'state':<6}{'ours':>11}{'fla-core':>11}{'ratio':>7}  ours: error, GB/s")
    for row in rows:
        if "ratio" not in row:
            continue
        unit = "ms" if "ours_ms" in row else "us"
        times = "".join(f"{row[f'{side}_{unit}']:8.4g} {unit}" for side in ("ours", "fla"))
        notes = f"{row['ours_o']:.1e} {row['ours_state']:.1e}" if "ours_o" in row else ""
        notes += f"  {row['ours_GBps']:.0f} (fla-core {row['fla_GBps']:.0f})" if "ours_GBps" in row else ""
        print(f"{row['op']:<19}{row['shape']:<17}{row['state']:<6}{times}{row['ratio']:7.2f}  {notes}")
    ratios = [row["ratio"] for row in rows if row.get("op") == "forward"]
    if ratios:
        print(f"forward, geometric mean of {len(ratios)} shapes: {statistics.geometric_mean(ratios):.2f}x fla-core")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", default=SHAPES, help="forward shapes, LENGTHxSEQUENCES:Q_HEADS/V_HEADS ...")
    parser.add_argument("--decode", default="16/32", help="heads of the decode rows; empty for none")
    parser.add_argument("--gates", choices=("mix", "strong"), default="mix")
    parser.add_argument("--qk-norm", action="store_true", help="let both sides normalise q and k")
    parser.add_argument("--state-v-first", action="store_true", help="forward rows with the [V, K] state")
    parser.add_argument("--budget", type=float, default=480, help="start nothing new after this many seconds")
    parser.add_argument("--ours", help="folder of a built package ([K, V] state) instead of building one")
    parser.add_argument("--ours-v-first", help="the same for the [V, K] state")
    parser.add_argument("--out", type=Path, help="also write the JSON lines here")
    return parser.parse_args()


@torch.no_grad()
def main() -> int:
    options = read_options()
    if not torch.cuda.is_available():
        print("compare_fla: needs a GPU, and torch sees none", file=sys.stderr)
        return 3
    sides = Sides(options)
    versions = {name: importlib.import_module(name).__version__ for name in ("torch", "triton", "fla")}
    sides.record(gpu=torch.cuda.get_device_name(), gates=options.gates, **versions, **clock.ceilings())
    compare_host_time(sides)
    work = [("forward", Shape.parse(text), options.state_v_first) for text in options.shapes.split()]
    if options.decode:
        shapes = [Shape.parse(f"1x{batch}:{options.decode}") for batch in DECODE_BATCHES]
        work += [("decode", shape, v_first) for shape in shapes for v_first in (False, True)]
    for kind, shape, v_first in work:
        if not sides.over_budget(f"{kind} {shape}"):
            compare(sides, kind, shape, v_first)
    print_table(sides.rows)
    if options.out:
        options.out.write_text("".join(json.dumps(row) + "\n" for row in sides.rows))
    print("\n".join(["FAILED:", *sides.failures] if sides.failures else ["outputs agree"]))
    return int(bool(sides.failures))


if __name__ == "__main__":
    sys.exit(main())
