"""A package's operators and those of installed peers on the same inputs: times, and errors against the oracle."""

import functools
import importlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gdngen import calls, verification
from gdngen.autotune import clock
from gdngen.autotune.space import Shape
from gdngen.calls import Case
from gdngen.oracle import rms_ratio
from gdngen.spec import Spec

FORMS = {"forward": "chunk", "training": "chunk", "decode": "recurrent"}
NEEDS = FORMS | {"training": "chunk_backward"}  # as the manifest names what a package has
GRADIENTS = verification.GRADIENTS | {"bf16": 2e-2, "fp16": 2e-2}  # contract section 5, the gates' for all
DRAWN = 1024  # tokens that are drawn, then repeated
SHORT = {"forward": 200, "training": 100, "decode": 1}  # tokens that the oracle computes; autograd keeps every state
OURS = "gdngen"
Inputs = dict[str, Any]
Operator = Callable[..., Any]


class Missing(Exception):
    """Why a side has no number: not installed, no such member or option, or its call failed."""


@dataclass(frozen=True)
class Peer:
    """A library to compare with.  ``homes``: family of operators -> module; ``unnamed``: options behind **kwargs."""

    name: str
    homes: Mapping[str, str]
    unnamed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def version(self) -> str | None:
        try:
            return metadata.version(self.name)
        except metadata.PackageNotFoundError:
            return None

    def operator(self, name: str, keywords: Mapping[str, Any]) -> Operator:
        """The peer's operator of our name as a function of our keywords; Missing where it has none."""
        if self.version is None:
            raise Missing(f"not installed: pip install {self.name}")
        home = self.homes.get(name.removeprefix("fused_recurrent_").removeprefix("chunk_"))
        if home is None:
            raise Missing(f"has no {name}")
        try:
            function: Operator = getattr(importlib.import_module(home), name)
        except Exception as error:  # whatever a library does when it is imported
            raise Missing(f"{home}.{name} cannot be imported: {type(error).__name__}: {error}") from error
        taken = {*inspect.signature(function).parameters, *self.unnamed.get(name, ())}
        if lacking := [key for key, value in keywords.items() if key not in taken and _says_something(value)]:
            raise Missing(f"{name} has no {', '.join(lacking)}")
        return lambda **given: function(**{key: value for key, value in given.items() if key in taken})


def _says_something(value: object) -> bool:
    return isinstance(value, Tensor) or value not in (None, False, "identity")


_FAMILIES = ("gated_delta_rule", "kda", "delta_rule", "simple_gla", "linear_attn")
_FUSED_GATE = ("use_gate_in_kernel", "A_log", "dt_bias")
PEERS = (
    Peer(
        "fla-core",
        {family: f"fla.ops.{family}" for family in _FAMILIES},
        {"chunk_gated_delta_rule": _FUSED_GATE, "chunk_kda": _FUSED_GATE[1:]},
    ),
)


@dataclass(frozen=True)
class Comparison:
    """What is compared: a package, its Spec, the forms that it has, the dtype of q, k and v, where it runs."""

    package: ModuleType
    spec: Spec
    forms: tuple[str, ...]
    dtype: str
    device: str
    peers: tuple[Peer, ...]

    def operations(self, shape: Shape) -> list[str]:
        """What can be timed at a shape: decode for one token, else forward and training."""
        names = ["decode"] if shape.length == 1 else ["forward", "training"]
        return [name for name in names if NEEDS[name] in self.forms]

    def rows(self, operation: str, shape: Shape) -> Iterator[dict[str, Any]]:
        """One row a side: the first call in s, median ms, spread, error; or ``missing`` and why.  Ours is first."""
        x, case = self._inputs(shape, packed=operation == "forward" and self.spec.varlen)
        exact = self._short(operation, shape)
        ours = None
        for side in (None, *self.peers):
            row: dict[str, Any] = {"operation": operation, "shape": str(shape), "side": side.name if side else OURS}
            try:
                row |= self._measured(operation, side, calls.keywords(self.spec, FORMS[operation], x, case), exact)
            except Missing as reason:
                yield row | {"missing": str(reason)}
                continue
            ours = ours or row["ms"]
            yield row | {"times_ours": row["ms"] / ours}
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def _operator(self, side: Peer | None, operation: str, keywords: Inputs) -> Operator:
        name = calls.operator_name(self.spec, FORMS[operation])
        found: Operator = side.operator(name, keywords) if side else getattr(self.package, name)
        return found

    def _measured(self, operation: str, side: Peer | None, keywords: Inputs, exact: "_Exact") -> Inputs:
        operator = self._operator(side, operation, keywords)
        try:
            if operation == "training":
                step = functools.partial(_gradients, operator, keywords, _cotangents(keywords))
                first, time = clock.cold_s(step), clock.timed([step], graph=False)
            else:
                with torch.no_grad():
                    first = clock.cold_s(functools.partial(operator, **keywords))
                    time = clock.timed([functools.partial(operator, **one) for one in _copies(keywords)])
            error = exact.error(operator)
        except Exception as fault:
            if side is None:
                raise
            raise Missing(f"failed: {type(fault).__name__}: {str(fault).partition(chr(10))[0]}") from fault
        row = {"ms": time.milliseconds, "spread": time.spread, "how": time.how, "first_s": first, "error": error}
        return row | {"budget": (GRADIENTS if operation == "training" else verification.BUDGETS)[self.dtype]}

    def _inputs(self, shape: Shape, packed: bool) -> tuple[Inputs, Case]:
        """Inputs of a shape: the tokens of one short sequence, drawn once and repeated."""
        heads, drawn = (shape.q_heads, shape.v_heads), min(shape.length, DRAWN)
        dtype = verification.DTYPES[self.dtype]
        x = calls.inputs(self.spec, Case("timed", drawn), dtype, heads, self.device)
        for name, value in x.items():
            if name not in ("A_log", "dt_bias", "h0", "z0"):
                value = torch.cat([value] * -(-shape.length // drawn), 1)[:, : shape.length]
                x[name] = torch.cat([value] * shape.sequences, 1 if packed else 0)
            elif name in ("h0", "z0"):
                x[name] = torch.cat([value] * shape.sequences)
        if not packed:
            return x, Case("timed", shape.length, shape.sequences)
        total = shape.length * shape.sequences
        x["cu_seqlens"] = torch.arange(0, total + 1, shape.length, device=self.device)
        return x, Case("timed", total, offsets=tuple(range(0, total + 1, shape.length)))

    def _short(self, operation: str, shape: Shape) -> "_Exact":
        """The float64 answer for these heads and at most two sequences of few tokens."""
        length, heads = min(shape.length, SHORT[operation]), (shape.q_heads, shape.v_heads)
        case = Case(f"{operation}, {length} tokens", length, min(shape.sequences, 2))
        x = calls.inputs(self.spec, case, verification.DTYPES[self.dtype], heads, self.device)
        return _Exact.of(self.spec, operation, x, case)


@dataclass(frozen=True)
class _Exact:
    """A call and what the oracle says: results, or gradients where there are cotangents."""

    keywords: Inputs
    answer: tuple[Tensor, ...]
    cotangents: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, spec: Spec, operation: str, x: Inputs, case: Case) -> "_Exact":
        keywords = calls.keywords(spec, FORMS[operation], x, case)
        if operation != "training":
            return cls(keywords, calls.expected(spec, x, case))
        names = [name for key in _leaves(keywords) for name in x if x[name] is keywords[key]]
        leaves = {name: x[name].detach().requires_grad_() for name in names}
        right = calls.expected(spec, x | leaves, case)
        given = [torch.randn_like(y, dtype=torch.float32) for y in right]
        exact = torch.autograd.grad(right, list(leaves.values()), [d.double() for d in given])
        return cls(keywords, exact, (given[0].to(x["v"].dtype), *given[1:]))

    def error(self, operator: Operator) -> float:
        """The largest rms(x - ref) / rms(ref) of what the operator gives."""
        if self.cotangents:
            found = _gradients(operator, self.keywords, self.cotangents)
        else:
            with torch.no_grad():
                found = _results(operator(**self.keywords))
        errors = [rms_ratio(x, y) for x, y in zip(found, self.answer, strict=True)]
        return max(error if math.isfinite(error) else sys.float_info.max for error in errors)


def _results(given: tuple[Any, Any]) -> tuple[Tensor, ...]:
    o, state = given
    return o, *(state if isinstance(state, tuple) else (state,))


def _leaves(keywords: Inputs) -> list[str]:
    """The keywords that gradients are asked for: every one that is a tensor of numbers."""
    return [key for key, x in keywords.items() if isinstance(x, Tensor) and x.is_floating_point()]


def _gradients(operator: Operator, keywords: Inputs, cotangents: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    leaves = {key: keywords[key].detach().requires_grad_() for key in _leaves(keywords)}
    return torch.autograd.grad(_results(operator(**keywords | leaves)), list(leaves.values()), cotangents)


def _cotangents(keywords: Inputs) -> tuple[Tensor, ...]:
    """Random ones for o, which is like the values, and for the final states, which are like the initial ones."""
    state = keywords["initial_state"]
    states = state if isinstance(state, tuple) else (state,)
    return tuple(map(torch.randn_like, (keywords.get("v", keywords.get("x")), *states)))


def _copies(keywords: Inputs) -> list[Inputs]:
    """Enough copies of the inputs to keep the L2 cache cold; the offsets, which libraries key on, stay shared."""

    def cloned(value: Any) -> Any:
        return tuple(map(cloned, value)) if isinstance(value, tuple) else value.clone()

    own = {key: x for key, x in keywords.items() if isinstance(x, Tensor | tuple) and key != "cu_seqlens"}
    own = {key: x for key, x in own.items() if isinstance(x, Tensor) or isinstance(x[0], Tensor)}
    size = sum(part.nbytes for x in own.values() for part in (x if isinstance(x, tuple) else (x,)))
    rest = clock.copies_for_cold_cache(size) - 1
    return [keywords, *(keywords | {key: cloned(x) for key, x in own.items()} for _ in range(rest))]
