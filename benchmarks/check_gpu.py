"""Generated packages on a GPU against the float64 recurrence: the contract's hard inputs and edges, at full size.

usage: python benchmarks/check_gpu.py PACKAGE_DIR [PACKAGE_DIR ...]    (packages of the scalar-gate delta rule)

Prints one line per check: what, the error of o and of the final state (rms ratio), the budget; exits 1 when one fails.
"""

import argparse
import importlib
import itertools
import math
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from gdngen import oracle

BUDGETS = {torch.bfloat16: (5e-3, 5e-3), torch.float16: (5e-3, 5e-3), torch.float32: (5e-4, 5e-4)}
FAILED: list[str] = []


def report(what: str, errors: tuple[float, float], budget: tuple[float, float]) -> None:
    ok = all(error <= limit for error, limit in zip(errors, budget, strict=True))
    print(f"{'ok  ' if ok else 'FAIL'} {what:66s} o {errors[0]:.2e}  state {errors[1]:.2e}", flush=True)
    if not ok:
        FAILED.append(what)


def require(what: str, holds: bool) -> None:
    print(f"{'ok  ' if holds else 'FAIL'} {what}", flush=True)
    if not holds:
        FAILED.append(what)


def inputs(
    B: int, T: int, H: int, HV: int, N: int, K: int, V: int, dtype: torch.dtype, seed: int = 0
) -> dict[str, Any]:
    """Random inputs; h0 in [K, V] order."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    q, k = (torch.nn.functional.normalize(normal(B, T, H, K), dim=-1).to(dtype) for _ in range(2))
    g = torch.nn.functional.logsigmoid(normal(B, T, HV)) / 16
    g[:, :, ::4] = 0
    beta = normal(B, T, HV).sigmoid()
    return {"q": q, "k": k, "v": normal(B, T, HV, V).to(dtype), "g": g, "beta": beta, "h0": normal(N, HV, K, V) * 0.1}


def call(
    package: ModuleType, x: dict[str, Any], form: str = "chunk", cu: torch.Tensor | None = None, **more: Any
) -> Any:
    """The operator as a user calls it; the state comes back in [K, V] order."""
    spec = package.SPEC
    names = {"chunk": "chunk_gated_delta_rule", "recurrent": "fused_recurrent_gated_delta_rule"}
    h0 = x["h0"].transpose(2, 3).contiguous() if spec["state_v_first"] else x["h0"]
    with torch.no_grad():
        o, state = getattr(package, names[form])(
            x["q"], x["k"], x["v"], g=x["g"], beta=x["beta"], initial_state=h0, output_final_state=True, cu_seqlens=cu,
            use_qk_l2norm_in_kernel=spec["qk_norm"], state_v_first=spec["state_v_first"], **more,
        )  # fmt: skip
    return o, state.transpose(2, 3) if spec["state_v_first"] else state


def reference(package: ModuleType, x: dict[str, Any], cu: list[int] | None = None) -> Any:
    """The float64 recurrence on the same inputs, sequence by sequence."""
    q, k = (oracle.normalized(x[n]) if package.SPEC["qk_norm"] else x[n] for n in ("q", "k"))
    if cu is None:
        return oracle.recurrence(q, k, x["v"], g=x["g"], beta=x["beta"], h0=x["h0"])
    o = torch.zeros(x["v"].shape, dtype=torch.float64, device="cuda")
    state = x["h0"].double().clone()
    for n, (a, b) in enumerate(itertools.pairwise(cu)):
        if b > a:
            part = {name: t[:, a:b] for name, t in (("q", q), ("k", k), *((m, x[m]) for m in ("v", "g", "beta")))}
            o[:, a:b], state[n : n + 1] = oracle.recurrence(**part, h0=x["h0"][n : n + 1])
    return o, state


def compare(package: ModuleType, what: str, x: dict[str, Any], budget: tuple[float, float], **more: Any) -> None:
    cu = more.pop("cu", None)
    found = call(package, x, cu=None if cu is None else torch.tensor(cu, dtype=torch.int32, device="cuda"), **more)
    wanted = reference(package, x, cu)
    report(what, (oracle.rms_ratio(found[0], wanted[0]), oracle.rms_ratio(found[1], wanted[1])), budget)


def accuracy(package: ModuleType, K: int, V: int, lengths: tuple[int, ...]) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        for T in lengths:
            compare(package, f"{name} chunk 1 x {T}, 16/64", inputs(1, T, 16, 64, 1, K, V, dtype), BUDGETS[dtype])
        compare(package, f"{name} chunk 3 x 700, 2/8", inputs(3, 700, 2, 8, 3, K, V, dtype), BUDGETS[dtype])
        cu = [0, 0, 300, 301, 301, 1024, 3000, 3000]
        x = inputs(1, 3100, 4, 8, len(cu) - 1, K, V, dtype)
        compare(package, f"{name} chunk packed, empty segments, rows past the end", x, BUDGETS[dtype], cu=cu)
        compare(package, f"{name} recurrent packed", x, BUDGETS[dtype], form="recurrent", cu=cu)


def hard_inputs(package: ModuleType, K: int, V: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        for what in ("-20", "-inf", "0", "-1e4"):
            x = inputs(1, 1000, 4, 8, 1, K, V, dtype)
            x["g"] = {"-20": -20 + 0 * x["g"], "0": 0 * x["g"]}.get(what, x["g"].clone())
            if what in ("-inf", "-1e4"):
                x["g"][:, 5::7] = float(what)
            for form in ("chunk", "recurrent"):
                compare(package, f"{name} {form} gates of {what}", x, BUDGETS[dtype], form=form)
    x = inputs(1, 512, 2, 4, 1, K, V, torch.bfloat16)
    x["k"] = x["k"][:, :1].expand_as(x["k"])
    x["g"], x["beta"] = 0.01 * x["g"], torch.full_like(x["beta"], 0.99)
    compare(package, "bfloat16 identical keys, beta 0.99 (fla-core: 0.015, 0.026)", x, (0.015, 0.026))


def edges(package: ModuleType, K: int, V: int) -> None:
    x = inputs(2, 300, 2, 6, 2, K, V, torch.bfloat16)
    first, again = call(package, x), call(package, x)
    require("two runs give the same bits", all(torch.equal(a, b) for a, b in zip(first, again, strict=True)))
    changed = {name: t.clone() for name, t in x.items()}
    for name in ("q", "k", "v", "g", "beta"):
        changed[name][:, 170:] *= 3
    require("a prefix does not see its suffix", torch.equal(call(package, changed)[0][:, :170], first[0][:, :170]))
    cu = [0, 100, 100, 257, 600]
    packed = inputs(1, 600, 2, 6, 4, K, V, torch.bfloat16)
    alone = {name: t[:, 100:257] for name, t in packed.items() if name != "h0"} | {"h0": packed["h0"][2:3]}
    tuning = importlib.import_module(f"{package.__name__}.tuning")
    tuning.BATCH_INVARIANT = True  # else launch choices, and bits with them, depend on the number of sequences
    try:
        together = call(package, packed, cu=torch.tensor(cu, device="cuda"))
        single = call(package, alone)
    finally:
        tuning.BATCH_INVARIANT = False
    same = torch.equal(single[0], together[0][:, 100:257]) and torch.equal(single[1], together[1][2:3])
    require("a packed sequence equals itself alone, bit for bit", same)
    for T in (0, 1, 17):
        y = inputs(2, T, 2, 4, 2, K, V, torch.bfloat16)
        for form in ("chunk", "recurrent"):
            if T:
                compare(package, f"bfloat16 {form} T = {T}", y, BUDGETS[torch.bfloat16], form=form)
            else:
                require(f"{form} T = 0 hands the state on", torch.equal(call(package, y, form)[1], y["h0"]))
    wide = inputs(1, 200, 4, 8, 1, K, V, torch.bfloat16)
    views = dict(wide)
    for name in ("q", "k", "v"):
        views[name] = torch.cat([wide[name], wide[name]], -1)[..., : wide[name].shape[-1]]
    require("non-contiguous views give the same bits", torch.equal(call(package, views)[0], call(package, wide)[0]))
    turned = dict(wide, **{name: wide[name].transpose(1, 3).contiguous().transpose(1, 3) for name in ("q", "k", "v")})
    require("transposed inputs give the same bits", torch.equal(call(package, turned)[0], call(package, wide)[0]))


def graphs(package: ModuleType, K: int, V: int) -> None:
    """CUDA graph capture, with offsets refilled in place between replays."""
    x = inputs(1, 512, 2, 4, 2, K, V, torch.bfloat16)
    cu = torch.tensor([0, 100, 512], dtype=torch.int32, device="cuda")
    call(package, x, cu=cu)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(package, x, cu=cu)
    cu.copy_(torch.tensor([0, 333, 500], dtype=torch.int32))
    graph.replay()
    wanted = call(package, x, cu=torch.tensor([0, 333, 500], dtype=torch.int32, device="cuda"))
    require("a captured graph follows offsets refilled in place", all(map(torch.equal, out, wanted)))


def large(package: ModuleType, K: int, V: int) -> None:
    many = inputs(1100, 3, 2, 64, 1100, K, V, torch.bfloat16)
    some = {name: t[-2:] for name, t in many.items()}
    for form in ("chunk", "recurrent"):
        found, wanted = call(package, many, form), reference(package, some)
        errors = (oracle.rms_ratio(found[0][-2:], wanted[0]), oracle.rms_ratio(found[1][-2:], wanted[1]))
        report(f"bfloat16 {form} 70400 sequence-heads", errors, BUDGETS[torch.bfloat16])
        del found
    del many
    T = math.ceil(2**31 / (64 * V)) + 200
    x = inputs(1, T, 4, 64, 1, K, V, torch.bfloat16)
    cu = [0, T - 400, T]
    x["h0"] = x["h0"].expand(2, -1, -1, -1).contiguous()
    found = call(package, x, cu=torch.tensor(cu, device="cuda"))
    tail = {name: t[:, cu[1] :] for name, t in x.items() if name != "h0"} | {"h0": x["h0"][1:2]}
    wanted = reference(package, tail)
    errors = (oracle.rms_ratio(found[0][:, cu[1] :], wanted[0]), oracle.rms_ratio(found[1][1:2], wanted[1]))
    report(f"bfloat16 chunk output of {T * 64 * V:,} elements (last sequence)", errors, BUDGETS[torch.bfloat16])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="+", type=Path)
    parser.add_argument("--lengths", default="2048,32768", help="chunk lengths at heads 16/64")
    options = parser.parse_args()
    print(torch.__version__, torch.cuda.get_device_name())
    for folder in options.packages:
        sys.path.insert(0, str(folder.resolve().parent))
        package = importlib.import_module(folder.name)
        K, V = package.SPEC["key_dim"], package.SPEC["value_dim"]
        print(f"--- {folder.name}", flush=True)
        start = time.perf_counter()
        accuracy(package, K, V, tuple(int(n) for n in options.lengths.split(",")))
        hard_inputs(package, K, V)
        edges(package, K, V)
        graphs(package, K, V)
        large(package, K, V)
        print(f"{time.perf_counter() - start:.0f} s; launches {dict(package.LAUNCHES)}", flush=True)
        torch.cuda.empty_cache()
    print(f"{len(FAILED)} failed" + "".join(f"\n  {what}" for what in FAILED))
    return int(bool(FAILED))


if __name__ == "__main__":
    sys.exit(main())
