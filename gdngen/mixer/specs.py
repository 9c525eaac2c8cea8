"""Specs of the mixer's members: frozen values with a name, as those of the recurrence."""

import hashlib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gdngen.errors import SpecError
from gdngen.spec import _explain


class MixerSpec(BaseModel):
    """What the members share.  Dtypes, channels, lengths and epsilon are bound at launch."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise SpecError(_explain(error)) from None

    @property
    def name(self) -> str:
        """A valid Python identifier that names every choice."""
        raise NotImplementedError

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"{type(self).__name__} {self.model_dump_json()}".encode()).hexdigest()[:16]

    def __str__(self) -> str:
        chosen = [f"{field} {value}" for field, value in self.model_dump().items()]
        return f"{type(self).__name__.lower()}: {', '.join(chosen)}"


class Convolution(MixerSpec):
    """Causal depthwise convolution over tokens.

    ``columns`` is the number of tokens that a state holds: width - 1, or width as in flash-linear-attention."""

    width: Literal[2, 3, 4] = 4
    bias: bool = False
    activation: Literal["none", "silu"] = "none"
    residual: bool = False
    columns: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _check(self) -> "Convolution":
        if self.columns == 0:
            object.__setattr__(self, "columns", self.width - 1)
        if self.columns not in (self.width - 1, self.width):
            raise ValueError(f"columns: got {self.columns}, expected {self.width - 1} or {self.width} for this width")
        return self

    @property
    def name(self) -> str:
        options = {"bias": self.bias, self.activation: self.activation != "none", "residual": self.residual}
        parts = ["conv", f"w{self.width}", f"s{self.columns}"]
        return "_".join(parts + [text for text, wanted in options.items() if wanted])


class Gate(MixerSpec):
    """A gate or write strength by itself, element by element; A_log and dt_bias are numbers of a channel.

    ``kind`` softplus: -exp(A_log) softplus(x + dt_bias); bounded: lower_bound sigmoid(exp(A_log) (x + dt_bias));
    sigmoid: sigmoid(x), and sigmoid2 twice that."""

    kind: Literal["softplus", "bounded", "sigmoid", "sigmoid2"] = "softplus"
    bias: bool = False

    @model_validator(mode="after")
    def _check(self) -> "Gate":
        if self.bias and self.kind not in ("softplus", "bounded"):
            raise ValueError(f"bias: a {self.kind} has none; choose softplus or bounded")
        return self

    @property
    def name(self) -> str:
        return f"gate_{self.kind}" + "_bias" * self.bias


class RowNorm(MixerSpec):
    """L2 or RMS norm over channels, times a gate: norm(x + residual) * weight + bias, then times gate(g).

    ``weight`` one_plus multiplies by 1 + weight; ``gate_first`` normalises x gate(g), as Mamba-2 does.
    """

    norm: Literal["l2", "rms"] = "rms"
    gate: Literal["none", "silu", "sigmoid"] = "none"
    weight: Literal["none", "plain", "one_plus"] = "none"
    bias: bool = False
    residual: bool = False
    gate_first: bool = False

    @model_validator(mode="after")
    def _check(self) -> "RowNorm":
        if self.gate_first and self.gate == "none":
            raise ValueError("gate_first: there is no gate; choose silu or sigmoid")
        return self

    @property
    def name(self) -> str:
        options = {
            self.gate: self.gate != "none",
            f"weight_{self.weight}": self.weight != "none",
            "bias": self.bias,
            "residual": self.residual,
            "gatefirst": self.gate_first,
        }
        return "_".join([f"{self.norm}norm", *(text for text, wanted in options.items() if wanted)])
