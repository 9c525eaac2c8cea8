"""The Spec that this package was generated from."""

from typing import Any

NAME = "add_scalar_k128_v64_c64_betadt"
BUILD_COMMAND = "gdngen build --gate scalar --rule additive --beta dt --value-dim 64"
DIFFERENTIABLE = True  # whether there are backward kernels
SPEC: dict[str, Any] = {
    "rule": "additive",
    "gate": ("scalar",),
    "beta": "dt",
    "key_dim": 128,
    "value_dim": 64,
    "head_ratio": "any",
    "chunk": 64,
    "state_v_first": False,
    "fused_gate": "none",
    "lower_bound": None,
    "beta_logits": False,
    "neg_eigval": False,
    "qk_norm": False,
    "normalize": False,
    "feature_map": "identity",
    "varlen": True,
    "backward": True,
}
MISSING: dict[str, str] = {}
