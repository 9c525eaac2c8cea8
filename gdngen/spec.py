"""Spec: which member of the gated delta family is wanted.  A frozen value with a name, a text and a digest."""

import hashlib
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gdngen.errors import SpecError

MAX_KEY_DIM = 256
CHUNKS = (16, 32, 64, 128)

Gate = Literal["scalar", "key", "value"]


class Spec(BaseModel):
    """One member of the family (semantics sections 1 to 3).  Dtypes, head counts and lengths are bound at launch.

    ``gate`` lists the gates that apply, in the order scalar, key, value; a string such as ``"key+value"`` or
    ``"none"`` is accepted too.  ``head_ratio`` is ``"any"`` or the number of value heads per query/key head.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    rule: Literal["delta", "additive"] = "delta"
    gate: tuple[Gate, ...] = ("scalar",)
    beta: Literal["none", "head", "value", "dt"] = "head"
    key_dim: int = Field(default=128, ge=1, le=MAX_KEY_DIM)
    value_dim: int = Field(default=128, ge=1)
    head_ratio: int | Literal["any"] = "any"
    chunk: Literal[16, 32, 64, 128, "auto"] = 64
    state_v_first: bool = False
    fused_gate: Literal["none", "softplus", "bounded"] = "none"
    lower_bound: float | None = None
    beta_logits: bool = False
    neg_eigval: bool = False
    qk_norm: bool = False
    normalize: bool = False
    feature_map: Literal["identity", "elu1"] = "identity"
    varlen: bool = True
    backward: bool = True

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise SpecError(_explain(error)) from None

    @field_validator("gate", mode="before")
    @classmethod
    def _read_gate(cls, gate: Any) -> Any:
        if isinstance(gate, str):
            gate = () if gate == "none" else tuple(gate.split("+"))
        if isinstance(gate, list):
            gate = tuple(gate)
        if isinstance(gate, tuple) and (unknown := [name for name in gate if name not in get_args(Gate)]):
            known = ", ".join(get_args(Gate))
            whole = "" if len(gate) == 1 else f" in {'+'.join(map(str, gate))!r}"
            raise ValueError(f"{unknown[0]!r}{whole} is not one of none, {known} (several of the last are joined by +)")
        if isinstance(gate, tuple) and len(set(gate)) == len(gate):
            return tuple(sorted(gate, key=lambda name: ("scalar", "key", "value", name).index(name)))
        return gate

    @field_validator("head_ratio", mode="before")
    @classmethod
    def _read_head_ratio(cls, ratio: Any) -> Any:
        if ratio != "any" and (not isinstance(ratio, int) or isinstance(ratio, bool) or ratio < 1):
            raise ValueError(f"{ratio!r} is neither any nor a whole number of at least 1")
        return ratio

    @model_validator(mode="after")
    def _check(self) -> "Spec":
        for wrong, message in self._contradictions():
            if wrong:
                raise ValueError(message)
        if self.fused_gate == "bounded" and self.lower_bound is None:
            object.__setattr__(self, "lower_bound", -5.0)
        return self

    def _contradictions(self) -> list[tuple[bool, str]]:
        bound = self.lower_bound
        return [
            (len(set(self.gate)) != len(self.gate), f"gate: {'+'.join(self.gate)} names a gate twice; name each once"),
            (
                self.fused_gate != "none" and len(self.gate) != 1,
                f"fused_gate: {self.fused_gate} computes exactly one gate, but gate is "
                f"{'+'.join(self.gate) or 'none'}; choose scalar, key or value",
            ),
            (
                bound is not None and self.fused_gate != "bounded",
                f"lower_bound: {bound} belongs to fused_gate='bounded', but fused_gate is {self.fused_gate!r}",
            ),
            (bound is not None and not -5 <= bound < 0, f"lower_bound: got {bound}, must be in [-5, 0)"),
            (
                self.beta_logits and self.beta not in ("head", "value"),
                f"beta_logits: needs beta='head' or beta='value', got beta={self.beta!r}",
            ),
            (
                self.neg_eigval and not self.beta_logits,
                "neg_eigval: 2 * sigmoid(b) needs beta_logits=True (the logits are what is doubled)",
            ),
            (
                self.beta == "dt" and (self.rule != "additive" or self.gate != ("scalar",)),
                "beta: 'dt' is Mamba-2's write strength and needs rule='additive' with gate='scalar'",
            ),
            (
                self.beta == "dt"
                and (self.qk_norm or self.normalize or self.state_v_first or self.feature_map != "identity"),
                "beta: 'dt' is Mamba-2's; its operators have no qk_norm, normalize, feature_map or state_v_first",
            ),
            (
                self.normalize and (self.rule != "additive" or not set(self.gate) <= {"scalar"}),
                "normalize: the normaliser needs rule='additive' and gate='none' or gate='scalar'",
            ),
        ]

    @property
    def name(self) -> str:
        """A valid Python identifier that names every choice, for example gdn_scalar_k128_v128_c64_vfirst."""
        parts = ["gdn" if self.rule == "delta" else "add", "_".join(self.gate) or "nogate"]
        parts += [f"k{self.key_dim}", f"v{self.value_dim}", "cauto" if self.chunk == "auto" else f"c{self.chunk}"]
        options = {
            f"r{self.head_ratio}": self.head_ratio != "any",
            f"beta{self.beta}": self.beta != "head",
            self.fused_gate: self.fused_gate != "none",
            f"{abs(self.lower_bound or 0):g}".replace(".", "p"): self.fused_gate == "bounded",
            "logits": self.beta_logits,
            "neg": self.neg_eigval,
            "qknorm": self.qk_norm,
            "normalized": self.normalize,
            "elu1": self.feature_map == "elu1",
            "dense": not self.varlen,
            "forward": not self.backward,
            "vfirst": self.state_v_first,
        }
        return "_".join(parts + [text for text, wanted in options.items() if wanted])

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]

    @property
    def command(self) -> str:
        """The command that builds this Spec's package."""
        return " ".join(["gdngen build", *self.flags()])

    def flags(self) -> list[str]:
        """The command-line flags that differ from the defaults; ``--gate`` always (it is what people look for)."""
        flags = ["--gate", "+".join(self.gate) or "none"]
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name == "gate" or value == field.default:
                continue
            flag = "--" + name.replace("_", "-")
            if isinstance(value, bool):
                flags.append(flag if value else "--no-" + name.replace("_", "-"))
            else:
                flags += [flag, f"{value}"]
        return flags

    def __str__(self) -> str:
        return " ".join(flag.removeprefix("--") if flag.startswith("--") else flag for flag in self.flags())


def _explain(error: ValidationError) -> str:
    """A pydantic report as one sentence per field: what was got, what is expected."""
    lines: dict[str, str] = {}
    for fault in error.errors():
        field = ".".join(str(part) for part in fault["loc"][:1])
        text = fault["msg"].removeprefix("Value error, ")
        if field:
            text = f"{field}: {text}" + ("" if fault["type"] == "value_error" else f" (got {fault['input']!r})")
        lines.setdefault(field, text)
    return "; ".join(lines.values())
