"""Convolution, L2 norm and gated RMS norm on a GPU: time, share of copy bandwidth, and fla-core where it is installed.

    python benchmarks/compare_mixer.py [--tokens 8192 32768] [--channels 8192]

The bytes of a row are what must be moved at least: every input read once, every output written once.
"""

import argparse
import functools
from collections.abc import Callable, Iterator

import torch
import triton

from gdngen import ops

HEAD = 128  # channels of a norm's row


def theirs() -> dict[str, Callable[..., torch.Tensor]]:
    """The same operators of fla-core; none without it."""
    try:
        from fla.modules.convolution import causal_conv1d
        from fla.modules.fused_norm_gate import rms_norm_gated
        from fla.modules.l2norm import l2norm
    except ImportError:
        return {}
    return {"causal_conv1d": causal_conv1d, "rms_norm_gated": rms_norm_gated, "l2norm": l2norm}


def cases(T: int, D: int) -> Iterator[tuple[str, str, list[torch.Tensor], dict[str, object], int, int]]:
    """Row, operator, tensors, options, and how many tensors like x move forward and backward."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()

    yield "convolution", "causal_conv1d", [normal(1, T, D), normal(D, 4)], {"activation": "silu"}, 2, 3
    heads = (1, T, D // HEAD, HEAD)
    yield "L2 norm", "l2norm", [normal(*heads)], {}, 2, 3
    gated = [normal(*heads), normal(*heads), normal(HEAD)]
    yield "gated RMS norm", "rms_norm_gated", gated, {"bias": None}, 3, 5


def timed(function: Callable[[], object]) -> float:
    """Seconds of the median call."""
    return 1e-3 * float(triton.testing.do_bench(function, warmup=50, rep=200, return_mode="median"))


def forward_and_backward(
    operator: Callable[..., torch.Tensor], tensors: list[torch.Tensor], options: dict[str, object]
) -> tuple[float, float]:
    def forward() -> torch.Tensor:
        found = operator(*tensors, **options)
        return found[0] if isinstance(found, tuple) else found

    with torch.no_grad():
        first = timed(forward)
    o = forward()
    given = torch.randn_like(o)
    return first, timed(functools.partial(torch.autograd.grad, o, tensors, given, retain_graph=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--channels", type=int, default=8192)
    given = parser.parse_args()
    peers = theirs()
    for T in given.tokens:
        x = torch.randn(1, T, given.channels, device="cuda", dtype=torch.bfloat16)
        size, y = x.numel() * x.element_size(), torch.empty_like(x)
        bandwidth = 2 * size / timed(lambda y=y, x=x: torch.add(x, 1, out=y))  # type: ignore[misc]
        print(f"T = {T}, D = {given.channels}, bf16: a copy moves {bandwidth / 1e12:.2f} TB/s")
        for row, name, tensors, options, *moved in cases(T, given.channels):
            times = forward_and_backward(getattr(ops, name), tensors, options)
            other = forward_and_backward(peers[name], tensors, options) if name in peers else (None, None)
            for way, seconds, peer, count in zip(("forward", "backward"), times, other, moved):
                share = count * size / seconds / bandwidth
                beside = f", fla-core {1e6 * peer:7.0f} us" if peer else ""
                print(f"  {row:15} {way:9} {1e6 * seconds:7.0f} us, {share:4.0%} of copy{beside}")


if __name__ == "__main__":
    main()
