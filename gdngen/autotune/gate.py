"""The candidate gate: a time counts only where results met the float64 recurrence, twice bit for bit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdngen import calls
from gdngen.autotune.handle import Package
from gdngen.autotune.space import Outcome, Point, gate_cases
from gdngen.calls import Case
from gdngen.oracle import budget, rms_ratio


class Verdict(NamedTuple):
    """``note`` says what was wrong."""

    outcome: Outcome
    note: str = ""


@dataclass(frozen=True)
class Question:
    """A call and its right answer: results, then gradients by input name from the cotangents."""

    case: Case
    dtype: str
    x: dict[str, Any]
    cotangents: list[Tensor]
    results: list[Tensor]
    gradients: dict[str, Tensor]

    def __str__(self) -> str:
        return f"{self.case.name}, {self.dtype}"


class Gate:
    """Holds the right answers for the points asked for so far; they are computed once for each dtype and head count."""

    def __init__(self, package: Package, chunk: int, device: str) -> None:
        self.package, self.chunk, self.device = package, chunk, device
        self._questions: dict[tuple[str, tuple[int, int], bool], list[Question]] = {}

    def questions(self, point: Point, derived: bool) -> list[Question]:
        """The gate's calls, in every dtype that the decision will serve; ``derived``: with gradients."""
        key = (point.dtype, point.shape.heads, derived)
        if key not in self._questions:
            span = 0 if derived else self.package.span  # backward splits nothing
            cases = gate_cases(self.package.spec, self.chunk, self.device == "cpu", span)
            served = [point._replace(dtype=dtype) for dtype in self.package.sharing(point.dtype, self.device)]
            self._questions[key] = [self._question(case, one, derived) for one in served for case in cases]
        return self._questions[key]

    def _question(self, case: Case, point: Point, derived: bool) -> Question:
        spec, dtype = self.package.spec, getattr(torch, point.dtype)
        x = calls.inputs(spec, case, dtype, point.shape.heads, self.device)
        names = [name for name, value in x.items() if derived and value.is_floating_point()]
        leaves = {name: value.detach().requires_grad_(name in names) for name, value in x.items()}
        with torch.set_grad_enabled(derived):
            right = list(calls.expected(spec, leaves, case))
        cotangents = cotangents_of(right, x["v"].dtype)
        exact: Sequence[Tensor] = ()
        if derived:
            exact = torch.autograd.grad(right, [leaves[name] for name in names], [d.double() for d in cotangents])
        return Question(case, point.dtype, leaves, cotangents, [y.detach() for y in right], dict(zip(names, exact)))

    def verdict(self, operator: str, point: Point, derived: bool) -> Verdict:
        """The first fault that the operator shows with the choices in force, or "ok"."""
        for question in self.questions(point, derived):
            found = [self._answer(operator, question) for _ in range(2)]
            fault = self._fault(question, found[0])
            if fault:
                return Verdict("wrong", f"{question}: {fault}")
            if not all(map(same_bits, *found)):
                return Verdict("racy", f"{question}: a second call gave other bits")
        return Verdict("ok")

    def _answer(self, operator: str, question: Question) -> list[Tensor]:
        """Results, then gradients."""
        names = list(question.gradients)
        with torch.set_grad_enabled(bool(names)):
            found = self.package.call(operator, question.x, question.case)
        leaves = [question.x[name] for name in names]
        more = torch.autograd.grad(found, leaves, question.cotangents) if names else ()
        return [x.detach() for x in [*found, *more]]

    @staticmethod
    def _fault(question: Question, found: list[Tensor]) -> str:
        wanted = [*zip(("o", "state", "z"), question.results), *((f"d{n}", y) for n, y in question.gradients.items())]
        for (name, y), x in zip(wanted, found, strict=True):
            if x.shape != y.shape:
                return f"{name} is {list(x.shape)}, not {list(y.shape)}"
            error, allowed = rms_ratio(x, y), budget(name, question.dtype)
            if not error <= allowed:  # a NaN fails too
                return f"{name} is off by {error:.1e}, allowed is {allowed:.0e}"
        return ""


def cotangents_of(results: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Random cotangents, the same for every call of these shapes: o's in the operands' dtype, states' in fp32."""
    device = results[0].device
    generator = torch.Generator(device).manual_seed(0)
    drawn = [torch.randn(y.shape, generator=generator, device=device) for y in results]
    return [drawn[0].to(dtype), *drawn[1:]]


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Bit for bit, NaN included."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.shape == y.shape and torch.equal(x.contiguous().view(whole), y.contiguous().view(whole))
