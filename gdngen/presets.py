"""Presets: published model shapes as names for Specs.  Presets of equal options share one package."""

from dataclasses import dataclass

from gdngen.errors import SpecError
from gdngen.spec import Spec


@dataclass(frozen=True)
class Preset:
    """A Spec with the head counts of a published model (0: any)."""

    name: str
    spec: Spec
    q_heads: int
    v_heads: int
    note: str


_QWEN = Spec(gate="scalar", qk_norm=True)
_PRESETS = (
    Preset("qwen3-next", _QWEN, 16, 32, "Qwen3-Next 80B-A3B; gate and beta in the layer, q/k norm in the operator"),
    Preset("qwen3.5-397b", _QWEN, 16, 64, "Qwen3.5 397B; tensor parallel 2, 4, 8 gives 8/32, 4/16, 2/8"),
    Preset("qwen3.5-122b", _QWEN, 16, 64, "Qwen3.5 122B"),
    Preset("qwen3.5-35b", _QWEN, 16, 32, "Qwen3.5 35B"),
    Preset("qwen3.5-27b", _QWEN, 16, 48, "Qwen3.5 27B"),
    Preset("qwen3.5-9b", _QWEN, 16, 32, "Qwen3.5 9B"),
    Preset("qwen3.5-4b", _QWEN, 16, 32, "Qwen3.5 4B"),
    Preset("qwen3.5-2b", _QWEN, 16, 16, "Qwen3.5 2B"),
    Preset("qwen3.5-0.8b", _QWEN, 16, 16, "Qwen3.5 0.8B"),
    Preset("kimi-linear", Spec(gate="key", qk_norm=True), 32, 32, "Kimi Linear 48B-A3B"),
    Preset("mamba2-2.7b", Spec(rule="additive", beta="dt", value_dim=64), 1, 80, "Mamba-2 2.7B; 1 group, state 128"),
    Preset("deltanet", Spec(gate="none"), 0, 0, "DeltaNet"),
    Preset("linear-attention", Spec(rule="additive", gate="none", beta="none"), 0, 0, "linear attention"),
)
PRESETS = {preset.name: preset for preset in _PRESETS}


def get(name: str) -> Preset:
    """The preset of that name; SpecError lists the known ones."""
    if name not in PRESETS:
        raise SpecError(f"preset: unknown {name!r}; known presets are {', '.join(PRESETS)}")
    return PRESETS[name]
