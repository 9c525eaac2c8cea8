"""Training times and memory of a generated package against fla-core's, in one run, on the same inputs.

With `--gate scalar` the gated delta rule, with `--gate key` Kimi Delta Attention (chunk_kda of both).  A step is the
public operator under autograd and the gradients of all six inputs, from both o and the final state.  Gradients are
checked in the same run: against autograd of the float64 recurrence at a short length, against each other at the full
one.  Prints one JSON line per measurement.  The inputs are compare_fla's.
"""

import argparse
import functools
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("FLA_FLASH_QLA", "0")  # fla-core's own kernels, also where another backend is installed

import torch
from compare_fla import HEAD_DIM, ROOT, Inputs, Shape, clock, difference, load_package, make_inputs

BUDGETS = {"q": 8e-3, "k": 8e-3, "v": 8e-3, "g": 2e-2, "beta": 2e-2, "initial_state": 8e-3}
OPERATORS = {"scalar": ("gated_delta_rule", "chunk_gated_delta_rule"), "key": ("kda", "chunk_kda")}
SHAPES = "32768x1:16/64 8192x4:16/64 8192x1:16/64 32768x1:16/32 1024x8:16/32 32768x1:2/8"
Gradients = dict[str, torch.Tensor]


def leaves(shape: Shape, options: argparse.Namespace, seed: int = 0) -> Inputs:
    inputs = make_inputs(shape, options, packed=False, seed=seed)
    if options.gate == "key":  # every channel its own decay, between none and the head's twice
        inputs["g"] = inputs["g"].unsqueeze(-1) * 2 * torch.rand(*inputs["g"].shape, HEAD_DIM, device="cuda")
    return {name: x.requires_grad_() for name, x in inputs.items()}


def cotangents(shape: Shape, inputs: Inputs) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    do = torch.randn(inputs["v"].shape, device="cuda", generator=generator).to(inputs["v"].dtype)
    return [do, torch.randn(inputs["initial_state"].shape, device="cuda", generator=generator) / 8]


def gradients(results: Any, inputs: Inputs, given: list[torch.Tensor], keep: bool = False) -> Gradients:
    found = torch.autograd.grad(results, list(inputs.values()), given, retain_graph=keep)
    return dict(zip(inputs, found, strict=True))


def exact_gradients(inputs: Inputs, given: list[torch.Tensor], options: argparse.Namespace) -> Gradients:
    """By autograd of the float64 recurrence."""
    from gdngen import oracle

    x = {name: value.detach().double().requires_grad_() for name, value in inputs.items()}
    q, k = (oracle.normalized(x[name]) if options.qk_norm else x[name] for name in ("q", "k"))
    gate = {"gk" if options.gate == "key" else "g": x["g"]}
    results = oracle.recurrence(q, k, x["v"], beta=x["beta"], h0=x["initial_state"], **gate)
    return gradients(results, x, [value.double() for value in given])


def errors(operator: Any, options: argparse.Namespace, heads: tuple[int, int]) -> dict[str, float]:
    short = Shape(200, 2, *heads)
    x = leaves(short, options, seed=2)
    given = cotangents(short, x)
    exact, found = exact_gradients(x, given, options), gradients(operator(**x), x, given)
    return {name: difference(found[name], exact[name]) for name in BUDGETS}


def measure(operator: Any, inputs: Inputs, given: list[torch.Tensor]) -> tuple[dict[str, Any], Gradients]:
    """First step in seconds, peak memory of a step in GB, times of forward, backward and the whole step in ms."""
    step = lambda: gradients(operator(**inputs), inputs, given)  # noqa: E731
    timed = lambda call: clock.timed([call], 200, graph=False).milliseconds  # noqa: E731
    row: dict[str, Any] = {"cold_s": clock.cold_s(step)}
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = step()
    row["peak_GB"] = (torch.cuda.max_memory_allocated() - base) / 1e9
    with torch.no_grad():
        row["forward_ms"] = timed(lambda: operator(**inputs))
    results = operator(**inputs)
    row["backward_ms"] = timed(lambda: gradients(results, inputs, given, keep=True))
    row["step_ms"] = timed(step)
    return row, found


def compare(shape: Shape, sides: dict[str, Any], options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    inputs = leaves(shape, options)
    given, row, found, failures = cotangents(shape, inputs), {"shape": str(shape)}, {}, []
    for side, operator in sides.items():
        measured, found[side] = measure(operator, inputs, given)
        row |= {f"{side}_{name}": value for name, value in measured.items()}
        exact = errors(operator, options, (shape.q_heads, shape.v_heads))
        row[f"{side}_errors"] = {name: float(f"{value:.1e}") for name, value in exact.items()}
        if side == "ours":
            failures += [f"{shape} d{name}: {e:.1e}" for name, e in exact.items() if not e <= BUDGETS[name]]
    if len(sides) > 1:
        for name in ("forward_ms", "backward_ms", "step_ms", "peak_GB"):
            row[f"{name.split('_')[0]}_ratio"] = row[f"fla_{name}"] / row[f"ours_{name}"]
        row["difference"] = {n: float(f"{difference(found['ours'][n], found['fla'][n]):.1e}") for n in BUDGETS}
        failures += [
            f"{shape} d{n} against fla-core: {e}" for n, e in row["difference"].items() if not e <= 2 * BUDGETS[n]
        ]
    return row, failures


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", default=SHAPES, help="LENGTHxSEQUENCES:Q_HEADS/V_HEADS ...")
    parser.add_argument("--gate", choices=tuple(OPERATORS), default="scalar", help="the member")
    parser.add_argument("--gates", choices=("mix", "strong"), default="mix")
    parser.add_argument("--qk-norm", action="store_true", help="let both sides normalise q and k")
    parser.add_argument("--alone", action="store_true", help="without fla-core")
    parser.add_argument("--budget", type=float, default=480, help="start nothing new after this many seconds")
    parser.add_argument("--ours", help="folder of a built package instead of building one")
    parser.add_argument("--out", type=Path, help="also write the JSON lines here")
    options = parser.parse_args()
    options.ours_v_first = None
    if options.ours is None and options.gate != "scalar":
        import gdngen

        spec = gdngen.Spec(gate=options.gate, qk_norm=options.qk_norm)
        options.ours = gdngen.build(spec, out=ROOT / "generated")
    return options


def main() -> int:
    options, start = read_options(), time.monotonic()
    if not torch.cuda.is_available():
        print("compare_training: needs a GPU, and torch sees none", file=sys.stderr)
        return 3
    common = {"output_final_state": True, "use_qk_l2norm_in_kernel": options.qk_norm}
    home, name = OPERATORS[options.gate]
    sides = {"ours": functools.partial(getattr(load_package(options, False), name), **common)}
    if not options.alone:
        sides["fla"] = functools.partial(getattr(importlib.import_module(f"fla.ops.{home}"), name), **common)
    rows, failures = [{"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, **clock.ceilings()}], []
    print(json.dumps(rows[0]), flush=True)
    for text in options.shapes.split():
        if time.monotonic() - start < options.budget:
            row, wrong = compare(Shape.parse(text), sides, options)
            rows.append({n: float(f"{x:.4g}") if isinstance(x, float) else x for n, x in row.items()})
            failures += wrong
            print(json.dumps(rows[-1]), flush=True)
            torch.cuda.empty_cache()
    if options.out:
        options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print("\n".join(["FAILED:", *failures] if failures else ["gradients agree"]))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
