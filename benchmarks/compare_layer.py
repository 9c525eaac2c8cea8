"""A gated delta net layer (Qwen3-Next: hidden 2048, 16 / 32 heads) on a GPU, with gdngen's and fla-core's operators.

    python benchmarks/compare_layer.py [--tokens 8192] [--batches 1 32 256]

The layer is gdngen.layers.GatedDeltaNet, the same weights; only the functions that it calls differ.  Rows: forward;
forward and backward of all parameters; a decode step, captured in a CUDA graph and called from the host.
"""

import argparse
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton

from gdngen import layers, ops


def theirs() -> Any:
    """fla-core's functions under the names that the layer looks up; None without it."""
    try:
        from fla.modules.convolution import causal_conv1d, causal_conv1d_update
        from fla.modules.fused_norm_gate import rms_norm_gated
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    except ImportError:
        return None
    return SimpleNamespace(
        causal_conv1d=causal_conv1d,
        causal_conv1d_update=causal_conv1d_update,
        rms_norm_gated=rms_norm_gated,
        chunk_gated_delta_rule=chunk_gated_delta_rule,
        fused_recurrent_gated_delta_rule=fused_recurrent_gated_delta_rule,
    )


def timed(function: Callable[[], object]) -> float:
    """Microseconds of the median call."""
    return 1e3 * float(triton.testing.do_bench(function, warmup=50, rep=200, return_mode="median"))


def training(layer: torch.nn.Module, x: torch.Tensor) -> tuple[dict[str, float], torch.Tensor]:
    given = torch.randn_like(x)

    def step() -> None:
        x.grad = None
        layer.zero_grad()
        layer(x).backward(given)

    with torch.no_grad():
        o, forward = layer(x), timed(lambda: layer(x))
    return {"forward": forward, "forward and backward": timed(step)}, o


@torch.no_grad()
def decoding(layer: layers.GatedDeltaNet, batch: int, columns: int) -> dict[str, float]:
    """``columns``: of the window that the convolution's update keeps."""
    channels = layer.conv1d.in_channels
    window = torch.randn(batch, channels, columns, device="cuda", dtype=torch.bfloat16)
    state = layers.LayerState(window, torch.randn(batch, layer.num_v_heads, 128, 128, device="cuda"))
    token = torch.randn(batch, 1, 2048, device="cuda", dtype=torch.bfloat16)
    recurrent = state.recurrent

    def step() -> None:
        state.recurrent = recurrent
        layer(token, state=state)

    times = {f"decode {batch}, host": timed(step)}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return {f"decode {batch}, graph": timed(graph.replay)} | times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    given = parser.parse_args()
    torch.manual_seed(0)
    layer = layers.GatedDeltaNet(2048, 16, 32, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(1, given.tokens, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    found, outputs = [], []
    for functions, columns in ((ops, 3), (theirs(), 4)):
        if functions is None:
            continue
        vars(layers)["ops"] = functions
        times, o = training(layer, x)
        for batch in given.batches:
            times |= decoding(layer, batch, columns)
        found.append(times)
        outputs.append(o)
    print(f"{torch.cuda.get_device_name()}, T = {given.tokens}, bf16")
    for row, *columns in zip(found[0], *(times.values() for times in found)):
        beside = f", fla-core {columns[1]:8.0f} us, ratio {columns[1] / columns[0]:.2f}" if len(columns) > 1 else ""
        print(f"  {row:22} {columns[0]:8.0f} us{beside}")
    if len(outputs) > 1:
        a, b = (o.double() for o in outputs)
        print(f"  outputs differ by {float((a - b).norm() / b.norm()):.1e}")


if __name__ == "__main__":
    main()
