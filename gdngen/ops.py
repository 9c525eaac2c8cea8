"""The operators, with the package each call needs built and loaded on first use.

The Spec is derived from the call: gates given, shapes, options.  A generated package has the same functions for the one
member it was made for, without the compiler.  LAUNCHES counts kernel launches by kernel name over all packages so far.
"""

from gdngen.runtime.arguments import ArgumentError
from gdngen.runtime.dispatch import LAUNCHES
from gdngen.runtime.keywords import KeywordError
from gdngen.runtime.operators import (
    chunk_delta_rule,
    chunk_gated_delta_rule,
    chunk_kda,
    chunk_linear_attn,
    chunk_mamba2,
    chunk_simple_gla,
    fused_recurrent_delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_kda,
    fused_recurrent_linear_attn,
    fused_recurrent_simple_gla,
    recurrent_mamba2,
)

__all__ = [
    "LAUNCHES",
    "ArgumentError",
    "KeywordError",
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "chunk_linear_attn",
    "chunk_mamba2",
    "chunk_simple_gla",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
    "fused_recurrent_linear_attn",
    "fused_recurrent_simple_gla",
    "recurrent_mamba2",
]
