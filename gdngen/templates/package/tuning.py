"""Launch choices: kernel -> "target/bytes per element" -> tile of v, warps, pipeline stages.

A key that ends in /few is for launches that would leave processors idle.
"""

from typing import Any, NamedTuple


class Tuning(NamedTuple):
    """BV: value channels per program (0: v is not tiled)."""

    BV: int
    num_warps: int
    num_stages: int


V = PUT_value_dim_PUT
FP32_PRODUCTS = "PUT_exact_PUT"  # of fp32 inputs: three tf32 products each, or without matrix units
TUNING = {
#% for row in rows
PUT_row_PUT
#% endfor
}


def choice(kernel: str, at: Any, heads: int | None = None) -> Tuning:
    """The launch choice on a machine; ``heads``: sequences times value heads of a scan, of all that run at once."""
    table = TUNING[kernel]
    tuned = table[at.key]
    if heads is not None and heads * -(-V // tuned.BV) < at.processors:
        return table[f"{at.key}/few"]
    return tuned
