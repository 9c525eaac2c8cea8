"""Launch choices: kernel -> "target/bytes per element" -> tile of v, warps, pipeline stages.

A key that ends in /few is for launches that would leave processors idle.
"""

from typing import Any, NamedTuple


class Tuning(NamedTuple):
    """BV: value channels per program (0: v is not tiled)."""

    BV: int
    num_warps: int
    num_stages: int


V = 128
FP32_PRODUCTS = "tf32x3"  # of fp32 inputs: three tf32 products each, or without matrix units
TUNING = {
    "prepare": {
        "sm_80/2": Tuning(BV=0, num_warps=4, num_stages=1),
        "sm_80/4": Tuning(BV=0, num_warps=4, num_stages=1),
        "sm_90/2": Tuning(BV=0, num_warps=4, num_stages=1),
        "sm_90/4": Tuning(BV=0, num_warps=4, num_stages=1),
        "sm_100/2": Tuning(BV=0, num_warps=4, num_stages=1),
        "sm_100/4": Tuning(BV=0, num_warps=4, num_stages=1),
        "sm_120/2": Tuning(BV=0, num_warps=4, num_stages=1),
        "sm_120/4": Tuning(BV=0, num_warps=4, num_stages=1),
        "gfx942/2": Tuning(BV=0, num_warps=4, num_stages=1),
        "gfx942/4": Tuning(BV=0, num_warps=4, num_stages=1),
    },
    "scan": {
        "sm_80/2": Tuning(BV=32, num_warps=4, num_stages=2),
        "sm_80/2/few": Tuning(BV=16, num_warps=4, num_stages=3),
        "sm_80/4": Tuning(BV=32, num_warps=4, num_stages=2),
        "sm_80/4/few": Tuning(BV=16, num_warps=4, num_stages=2),
        "sm_90/2": Tuning(BV=32, num_warps=4, num_stages=2),
        "sm_90/2/few": Tuning(BV=16, num_warps=4, num_stages=3),
        "sm_90/4": Tuning(BV=32, num_warps=4, num_stages=2),
        "sm_90/4/few": Tuning(BV=16, num_warps=4, num_stages=2),
        "sm_100/2": Tuning(BV=32, num_warps=4, num_stages=2),
        "sm_100/2/few": Tuning(BV=16, num_warps=4, num_stages=3),
        "sm_100/4": Tuning(BV=32, num_warps=4, num_stages=2),
        "sm_100/4/few": Tuning(BV=16, num_warps=4, num_stages=2),
        "sm_120/2": Tuning(BV=32, num_warps=4, num_stages=2),
        "sm_120/2/few": Tuning(BV=16, num_warps=4, num_stages=2),
        "sm_120/4": Tuning(BV=16, num_warps=4, num_stages=1),
        "sm_120/4/few": Tuning(BV=16, num_warps=4, num_stages=1),
        "gfx942/2": Tuning(BV=16, num_warps=4, num_stages=1),
        "gfx942/2/few": Tuning(BV=16, num_warps=4, num_stages=1),
        "gfx942/4": Tuning(BV=16, num_warps=4, num_stages=1),
        "gfx942/4/few": Tuning(BV=16, num_warps=4, num_stages=1),
    },
    "prepare_backward": {
        "sm_80/2": Tuning(BV=0, num_warps=4, num_stages=1),
        "sm_80/4": Tuning(BV=0, num_warps=4, num_stages=1),
        "sm_90/2": Tuning(BV=0, num_warps=4, num_stages=1),
        "sm_90/4": Tuning(BV=0, num_warps=4, num_stages=1),
        "sm_100/2": Tuning(BV=0, num_warps=4, num_stages=1),
        "sm_100/4": Tuning(BV=0, num_warps=4, num_stages=1),
        "sm_120/2": Tuning(BV=0, num_warps=4, num_stages=1),
        "sm_120/4": Tuning(BV=0, num_warps=4, num_stages=1),
        "gfx942/2": Tuning(BV=0, num_warps=4, num_stages=1),
        "gfx942/4": Tuning(BV=0, num_warps=4, num_stages=1),
    },
    "states": {
        "sm_80/2": Tuning(BV=32, num_warps=4, num_stages=2),
        "sm_80/2/few": Tuning(BV=16, num_warps=4, num_stages=3),
        "sm_80/4": Tuning(BV=32, num_warps=4, num_stages=2),
        "sm_80/4/few": Tuning(BV=16, num_warps=4, num_stages=2),
        "sm_90/2": Tuning(BV=32, num_warps=4, num_stages=2),
        "sm_90/2/few": Tuning(BV=16, num_warps=4, num_stages=3),
        "sm_90/4": Tuning(BV=32, num_warps=4, num_stages=2),
        "sm_90/4/few": Tuning(BV=16, num_warps=4, num_stages=2),
        "sm_100/2": Tuning(BV=32, num_warps=4, num_stages=2),
        "sm_100/2/few": Tuning(BV=16, num_warps=4, num_stages=3),
        "sm_100/4": Tuning(BV=32, num_warps=4, num_stages=2),
        "sm_100/4/few": Tuning(BV=16, num_warps=4, num_stages=2),
        "sm_120/2": Tuning(BV=32, num_warps=4, num_stages=2),
        "sm_120/2/few": Tuning(BV=16, num_warps=4, num_stages=3),
        "sm_120/4": Tuning(BV=32, num_warps=4, num_stages=2),
        "sm_120/4/few": Tuning(BV=16, num_warps=4, num_stages=2),
        "gfx942/2": Tuning(BV=32, num_warps=4, num_stages=1),
        "gfx942/2/few": Tuning(BV=16, num_warps=4, num_stages=1),
        "gfx942/4": Tuning(BV=16, num_warps=4, num_stages=1),
        "gfx942/4/few": Tuning(BV=16, num_warps=4, num_stages=1),
    },
    "reverse": {
        "sm_80/2": Tuning(BV=32, num_warps=4, num_stages=2),
        "sm_80/2/few": Tuning(BV=16, num_warps=4, num_stages=3),
        "sm_80/4": Tuning(BV=32, num_warps=4, num_stages=2),
        "sm_80/4/few": Tuning(BV=16, num_warps=4, num_stages=2),
        "sm_90/2": Tuning(BV=32, num_warps=4, num_stages=2),
        "sm_90/2/few": Tuning(BV=16, num_warps=4, num_stages=3),
        "sm_90/4": Tuning(BV=32, num_warps=4, num_stages=2),
        "sm_90/4/few": Tuning(BV=16, num_warps=4, num_stages=2),
        "sm_100/2": Tuning(BV=32, num_warps=4, num_stages=2),
        "sm_100/2/few": Tuning(BV=16, num_warps=4, num_stages=3),
        "sm_100/4": Tuning(BV=32, num_warps=4, num_stages=2),
        "sm_100/4/few": Tuning(BV=16, num_warps=4, num_stages=2),
        "sm_120/2": Tuning(BV=32, num_warps=4, num_stages=2),
        "sm_120/2/few": Tuning(BV=16, num_warps=4, num_stages=2),
        "sm_120/4": Tuning(BV=16, num_warps=4, num_stages=1),
        "sm_120/4/few": Tuning(BV=16, num_warps=4, num_stages=1),
        "gfx942/2": Tuning(BV=16, num_warps=4, num_stages=1),
        "gfx942/2/few": Tuning(BV=16, num_warps=4, num_stages=1),
        "gfx942/4": Tuning(BV=16, num_warps=4, num_stages=1),
        "gfx942/4/few": Tuning(BV=16, num_warps=4, num_stages=1),
    },
    "pairs": {
        "sm_80/2": Tuning(BV=128, num_warps=8, num_stages=1),
        "sm_80/4": Tuning(BV=64, num_warps=8, num_stages=1),
        "sm_90/2": Tuning(BV=128, num_warps=8, num_stages=1),
        "sm_90/4": Tuning(BV=128, num_warps=8, num_stages=1),
        "sm_100/2": Tuning(BV=128, num_warps=8, num_stages=1),
        "sm_100/4": Tuning(BV=128, num_warps=8, num_stages=1),
        "sm_120/2": Tuning(BV=128, num_warps=8, num_stages=1),
        "sm_120/4": Tuning(BV=16, num_warps=8, num_stages=1),
        "gfx942/2": Tuning(BV=64, num_warps=8, num_stages=1),
        "gfx942/4": Tuning(BV=16, num_warps=8, num_stages=1),
    },
    "queries": {
        "sm_80/2": Tuning(BV=64, num_warps=4, num_stages=2),
        "sm_80/4": Tuning(BV=16, num_warps=8, num_stages=1),
        "sm_90/2": Tuning(BV=64, num_warps=4, num_stages=2),
        "sm_90/4": Tuning(BV=64, num_warps=8, num_stages=1),
        "sm_100/2": Tuning(BV=64, num_warps=4, num_stages=2),
        "sm_100/4": Tuning(BV=64, num_warps=8, num_stages=1),
        "sm_120/2": Tuning(BV=64, num_warps=4, num_stages=2),
        "sm_120/4": Tuning(BV=16, num_warps=8, num_stages=1),
        "gfx942/2": Tuning(BV=16, num_warps=4, num_stages=2),
        "gfx942/4": Tuning(BV=16, num_warps=8, num_stages=1),
    },
    "gradients": {
        "sm_80/2": Tuning(BV=64, num_warps=8, num_stages=2),
        "sm_80/4": Tuning(BV=16, num_warps=8, num_stages=1),
        "sm_90/2": Tuning(BV=128, num_warps=8, num_stages=2),
        "sm_90/4": Tuning(BV=16, num_warps=8, num_stages=1),
        "sm_100/2": Tuning(BV=128, num_warps=8, num_stages=2),
        "sm_100/4": Tuning(BV=16, num_warps=8, num_stages=1),
        "sm_120/2": Tuning(BV=16, num_warps=8, num_stages=2),
        "sm_120/4": Tuning(BV=16, num_warps=8, num_stages=1),
        "gfx942/2": Tuning(BV=16, num_warps=8, num_stages=2),
        "gfx942/4": Tuning(BV=16, num_warps=8, num_stages=1),
    },
    "recurrence": {
        "sm_80/2": Tuning(BV=64, num_warps=4, num_stages=1),
        "sm_80/4": Tuning(BV=64, num_warps=4, num_stages=1),
        "sm_90/2": Tuning(BV=64, num_warps=4, num_stages=1),
        "sm_90/4": Tuning(BV=64, num_warps=4, num_stages=1),
        "sm_100/2": Tuning(BV=64, num_warps=4, num_stages=1),
        "sm_100/4": Tuning(BV=64, num_warps=4, num_stages=1),
        "sm_120/2": Tuning(BV=64, num_warps=4, num_stages=1),
        "sm_120/4": Tuning(BV=64, num_warps=4, num_stages=1),
        "gfx942/2": Tuning(BV=64, num_warps=4, num_stages=1),
        "gfx942/4": Tuning(BV=64, num_warps=4, num_stages=1),
    },
}


def choice(kernel: str, at: Any, heads: int | None = None) -> Tuning:
    """The launch choice on a machine; ``heads``: sequences times value heads of a scan, of all that run at once."""
    table = TUNING[kernel]
    tuned = table[at.key]
    if heads is not None and heads * -(-V // tuned.BV) < at.processors:
        return table[f"{at.key}/few"]
    return tuned
