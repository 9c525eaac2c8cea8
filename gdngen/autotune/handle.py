"""A package in this process under the tuner's control: forced choices, recorded launches, calls on any device."""

import contextlib
import importlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from gdngen import calls, inspection
from gdngen.calls import Case
from gdngen.oracle import BUDGETS
from gdngen.spec import Spec

Choice = dict[str, int]  # the fields of the package's Tuning
FORMS = {"chunk": "chunk", "chunk_backward": "chunk", "recurrent": "recurrent"}  # operator -> form of the call


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel; called, it happens again (kernels never update in place)."""

    kernel: Any
    grid: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def __call__(self) -> None:
        self.kernel[self.grid](*self.arguments, **self.keywords)


@dataclass(frozen=True)
class _Watched:
    """Stands where launch.py has a kernel: hands each launch on to ``seen``."""

    kernel: Any
    seen: Callable[[Launch], None]

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *arguments, **keywords: self.seen(Launch(self.kernel, grid, arguments, keywords))


class Package:
    """The modules of a package that the tuner works with."""

    def __init__(self, folder: Path, spec: Spec) -> None:
        sys.path.insert(0, str(folder.parent))
        self.spec = spec
        self.public = importlib.import_module(folder.name)
        names = ("operators", "launch", "machine", "tuning", "arguments")
        modules: list[Any] = [importlib.import_module(f"{folder.name}.{name}") for name in names]
        self.operators, self.host, self.machine, self.tuning, arguments = modules
        self._offsets_check = mock.patch.object(arguments, "check_offsets", lambda offsets, tokens: None)
        self.span: int = getattr(self.host, "SPAN", 0)  # tokens of a segment; 0: sequences are never split
        self.kernels: tuple[str, ...] = (*self.tuning.TUNING, *(["combine"] if self.span else []))
        self.segments: Any = SimpleNamespace()
        if self.span:
            self.segments = importlib.import_module(f"{folder.name}.segments")
        self.segments.PROCESSORS_PER_HEAD = math.inf  # only calls that ask for it are split: times are of whole ones

    def force(self, choices: Mapping[str, Choice]) -> None:
        """From now on these kernels run with these choices, all others with the cost model's."""
        self.tuning.forced.clear()
        self.tuning.forced.update({kernel: self.tuning.Tuning(**choice) for kernel, choice in choices.items()})

    def key(self, dtype: Any, device: str) -> str:
        """The row of the tuning table that calls of this dtype read, such as sm_90/2."""
        return str(self.machine.machine_of(self._prepared(dtype, device)).key)

    def sharing(self, dtype: str, device: str) -> list[str]:
        """The dtypes whose calls read the row of this one, itself first: its decisions serve them too."""
        import torch

        own = self.key(getattr(torch, dtype), device)
        others = [(name, getattr(torch, name)) for name in BUDGETS if name != dtype]
        # Interpreted, bf16 is another dtype's call.
        others = [(name, other) for name, other in others if self._prepared(other, device).dtype == other]
        return [dtype, *(name for name, other in others if self.key(other, device) == own)]

    def _prepared(self, dtype: Any, device: str) -> Any:
        import torch

        return self.machine.prepared({"q": torch.empty(1, 1, 1, 1, dtype=dtype, device=device)})["q"]

    @contextlib.contextmanager
    def watched(self, seen: Callable[[str, Launch], None]) -> Iterator[None]:
        """Inside, launches of kernels go to ``seen`` and happen only if it makes them."""
        originals = {name: getattr(self.host, name) for name in self.kernels}
        for name, kernel in originals.items():
            setattr(self.host, name, _Watched(kernel, lambda launch, name=name: seen(name, launch)))  # type: ignore[misc]
        try:
            yield
        finally:
            vars(self.host).update(originals)

    @contextlib.contextmanager
    def noted(self, function: str, seen: Callable[[tuple[Any, ...]], None]) -> Iterator[None]:
        """Inside, ``seen`` hears the arguments of each call of a function of launch.py."""
        original = getattr(self.host, function)

        def noting(*given: Any) -> Any:
            seen(given)
            return original(*given)

        with mock.patch.object(self.host, function, noting):
            yield

    @contextlib.contextmanager
    def recomputing(self) -> Iterator[None]:
        """Inside, the backward operator is not given what the forward one kept, and computes it again."""
        original = self.host.chunk_backward
        with mock.patch.object(self.host, "chunk_backward", lambda *given: original(*given[:-1])):
            yield

    def call(self, operator: str, x: Mapping[str, Any], case: Case) -> list[Any]:
        """The results of the public operator: o, then the final states."""
        form = FORMS[operator]
        public = getattr(self.public, calls.operator_name(self.spec, form))
        with self._split(case):
            o, state = public(**calls.keywords(self.spec, form, x, case))
        return [o, *(state if isinstance(state, tuple) else (state,))]

    def _split(self, case: Case) -> Any:
        """Inside, sequences are split if the case says so."""
        enough = 1e-9 if case.segmented else math.inf
        return mock.patch.object(self.segments, "PROCESSORS_PER_HEAD", enough)

    def rehearse(self, operator: str, case: Case, dtype: Any, heads: tuple[int, int]) -> None:
        """Run the host code of an operator on tensors that nobody reads: only inside ``watched``, where no launch is.

        They are on the CPU: their addresses are aligned as on a GPU, and memory that is not touched costs nothing.
        """
        import torch

        form, shapes = FORMS[operator], calls.inputs(self.spec, case, dtype, heads, "meta")
        x = {name: torch.empty_strided(y.shape, y.stride(), dtype=y.dtype) for name, y in shapes.items()}
        name, keywords = calls.operator_name(self.spec, form), calls.keywords(self.spec, form, x, case)
        hosted = mock.patch.object(
            self.operators, "run", lambda options, call: inspection.run_host(self.host, operator, call)
        )
        with hosted, self._offsets_check, self._split(case):
            getattr(self.operators, name)(**keywords)

    def survey(self, operators: Sequence[str], case: Case, dtype: Any, heads: tuple[int, int]) -> dict[str, Choice]:
        """Kernel -> the choice with which it would be launched now."""
        found: dict[str, Choice] = {}
        chosen, fields = self.host.choice, self.tuning.Tuning._fields

        def choice(kernel: str, *rest: Any, **more: Any) -> Any:
            tuned = chosen(kernel, *rest, **more)
            found[kernel] = {name: int(getattr(tuned, name)) for name in fields}
            return tuned

        self.host.choice = choice
        try:
            with self.watched(lambda name, launch: None):
                for operator in operators:
                    self.rehearse(operator, case, dtype, heads)
        finally:
            self.host.choice = chosen
        return found
