"""The Spec that this package was generated from."""

from typing import Any

NAME = "gdn_key_k128_v128_c64_qknorm"
BUILD_COMMAND = "gdngen build --gate key --qk-norm"
DIFFERENTIABLE = True  # whether there are backward kernels
SPEC: dict[str, Any] = {
    "rule": "delta",
    "gate": ("key",),
    "beta": "head",
    "key_dim": 128,
    "value_dim": 128,
    "head_ratio": "any",
    "chunk": 64,
    "state_v_first": False,
    "fused_gate": "none",
    "lower_bound": None,
    "beta_logits": False,
    "neg_eigval": False,
    "qk_norm": True,
    "normalize": False,
    "feature_map": "identity",
    "varlen": True,
    "backward": True,
}
MISSING: dict[str, str] = {}
