"""Launch choices: kernel -> "target/bytes per element" -> tile of v, warps, pipeline stages."""

from typing import NamedTuple


class Tuning(NamedTuple):
    """BV: value channels per program (0: all of them are not tiled)."""

    BV: int
    num_warps: int
    num_stages: int


TUNING = {
#% for row in rows
PUT_row_PUT
#% endfor
}
