"""Processes that may hang or crash: one holds the GPU, gates and times candidates; others compile them.

A process answers one question at a time.  Who asks sets a limit; what hangs or crashes is killed and costs that
question alone: the next one is answered by a new process.
"""

import contextlib
import math
import multiprocessing
import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from gdngen import calls
from gdngen.autotune.handle import Choice, Launch, Package
from gdngen.autotune.space import Candidate, Device, Outcome, Point, timed_case
from gdngen.autotune.timing import Time
from gdngen.errors import EnvironmentProblem
from gdngen.oracle import BUDGETS
from gdngen.spec import Spec

START_LIMIT = 600.0  # seconds for imports, a context on the GPU, answers of the recurrence
NOTE = 300  # characters of an error's text that are kept
JOIN_LIMIT = 30.0  # seconds that a killed process may take to go
STARTING = threading.Lock()  # the environment is the whole process'


class Trouble(EnvironmentProblem):
    """A process of the tuner did not answer; of candidates that is a result, of everything else an error."""


class Hung(Trouble):
    """No answer within the limit; the process is gone."""

    limit: float | None = None  # seconds


class Crashed(Trouble):
    """The process ended while it had a question."""


class Failed(Trouble):
    """The question raised an exception; the process is still there."""


class Servant:
    """A process that holds an object made by ``make(job)`` and calls its methods by name.

    ``environment`` is set for it; what it prints goes to ``log``.
    """

    def __init__(self, make: Callable[[Any], Any], job: Any, environment: Mapping[str, str], log: Path) -> None:
        self.make, self.job, self.environment, self.log = make, job, environment, log
        self.process: Any = None
        self.connection: Any = None
        self.starts = 0

    def start(self) -> None:
        """EnvironmentProblem where the object cannot be made."""
        if self.process is not None:
            return
        self.connection, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=_serve, args=(theirs, self.make, self.job, self.log), daemon=True)
        with STARTING, mock.patch.dict(os.environ, self.environment):
            self.process.start()
        theirs.close()
        self.starts += 1
        try:
            self._answer(START_LIMIT)
        except Trouble as error:
            self.stop()
            raise EnvironmentProblem(f"a process of the tuner did not start: {error}") from None

    def ask(self, method: str, *arguments: Any, limit: float) -> Any:
        """The method's value; Hung, Crashed or Failed."""
        self.start()
        try:
            self.connection.send((method, arguments))
            return self._answer(limit)
        except (Hung, Crashed):
            self.stop()
            raise
        except OSError:
            self.stop()
            raise Crashed("the process ended") from None

    def _answer(self, limit: float) -> Any:
        if not self.connection.poll(limit):
            hung = Hung(f"no answer within {limit:g} s")
            hung.limit = limit
            raise hung
        try:
            good, value = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(5)
            raise Crashed(f"exit code {self.process.exitcode}{_last_line(self.log)}") from None
        if not good:
            raise Failed(value)
        return value

    def stop(self) -> None:
        """Ends the process, whatever it is doing."""
        if self.process is not None:
            self.process.kill()
            self.process.join(JOIN_LIMIT)
            self.connection.close()
            self.process = None


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return f": {lines[-1][:NOTE]}" if lines else ""


def _serve(connection: Connection, make: Callable[[Any], Any], job: Any, log: Path) -> None:
    """The process: ends with its parent, however that ends."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
    with contextlib.suppress(OSError), log.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    warnings.simplefilter("ignore")  # a package without decisions is what is asked for here
    made: list[Any] = []
    _reply(connection, lambda: made.append(make(job)))
    while made:
        try:
            method, arguments = connection.recv()
        except (EOFError, OSError):
            return
        _reply(connection, lambda: getattr(made[0], method)(*arguments))  # noqa: B023


def _reply(connection: Connection, work: Callable[[], Any]) -> None:
    try:
        answer = (True, work())
    except Exception as error:
        answer = (False, f"{type(error).__name__}: {str(error).strip()[-NOTE:]}")
    connection.send(answer)


# ------------------------------------------------------------------------------------------------ the worker


@dataclass(frozen=True)
class BenchJob:
    """What the worker is told: the package and the plan's chunk length.

    ``recomputing``: backward kernels for calls whose forward kept nothing; autograd alone never launches them.
    """

    folder: Path
    spec: Spec
    chunk: int
    recomputing: tuple[str, ...] = ()


class Examined(NamedTuple):
    """What became of a candidate; there is a time only where the outcome is "ok", a limit only where it is "hung"."""

    outcome: Outcome
    microseconds: float | None = None
    spread: float | None = None
    note: str = ""
    limit: float | None = None


def examined(judge: Callable[[], tuple[Outcome, str]], clock: Callable[[], Time]) -> Examined:
    """The one place where a time is made: after the gate has passed."""
    outcome, note = judge()
    if outcome != "ok":
        return Examined(outcome, note=note)
    time = clock()
    return Examined("ok", time.microseconds, time.spread)


class Bench:
    """Lives in the worker: gate and times of candidates on the GPU, or in Triton's interpreter where there is none."""

    def __init__(self, job: BenchJob) -> None:
        import torch
        import triton

        from gdngen.autotune.gate import Gate

        self.job, self.device = job, "cuda" if torch.cuda.is_available() else "cpu"
        torch.set_num_threads(1)
        self.package = Package(job.folder, job.spec)
        self.gate = Gate(self.package, job.chunk, self.device)
        self._inputs: tuple[Point | None, dict[str, Any]] = (None, {})
        self.late: list[str] = []
        triton.knobs.compilation.listener = self._heard

    def _heard(self, *, src: Any, cache_hit: bool, **rest: Any) -> None:
        if not cache_hit:
            self.late.append(str(src.name))

    def compiled_late(self) -> list[str]:
        """Kernels that this process had to compile, which is what the compiling processes are for."""
        return self.late

    def about(self) -> Device:
        """What this process runs candidates on."""
        import torch
        import triton

        from gdngen import __version__

        versions = {"triton": triton.__version__, "torch": str(torch.__version__), "gdngen": __version__}
        keys = {name: self.package.key(getattr(torch, name), self.device) for name in BUDGETS}
        if self.device == "cpu":
            name, slug = "interpreter", self.package.tuning.slug("interpreter")
            return Device(name, slug, name, True, "cuda", 90, 32, 1, keys, versions)
        index = torch.cuda.current_device()
        name, facts = torch.cuda.get_device_name(index), torch.cuda.get_device_properties(index)
        gpu = triton.runtime.driver.active.get_current_target()
        identity, slug = str(getattr(facts, "uuid", index)), self.package.tuning.slug(name)
        count = facts.multi_processor_count
        return Device(name, slug, identity, False, gpu.backend, gpu.arch, gpu.warp_size, count, keys, versions)

    def survey(self, operators: list[str], point: Point) -> dict[str, Choice]:
        """Kernel -> the cost model's choice at a point."""
        import torch

        self.package.force({})
        host, machine = self.package.host, self.package.machine
        there = torch.empty(0, device=self.device)
        original = host.machine_of
        host.machine_of = lambda tensor: machine.machine_of(there.to(tensor.dtype))
        try:
            case, dtype = timed_case(self.job.spec, point.shape.short), getattr(torch, point.dtype)
            return self.package.survey(operators, case, dtype, point.shape.heads)
        finally:
            host.machine_of = original

    def prepare(self, point: Point, derived: bool) -> None:
        """The gate's answers and the inputs of the timed call, so that no candidate's limit pays for them."""
        self.gate.questions(point, derived)
        self.inputs(point)

    def inputs(self, point: Point) -> dict[str, Any]:
        """Of the timed call: random, a quarter of the heads without decay; those of one point are kept."""
        import torch

        if self._inputs[0] != point:
            self._inputs = (None, {})
            case, dtype = timed_case(self.job.spec, point.shape), getattr(torch, point.dtype)
            x = calls.inputs(self.job.spec, case, dtype, point.shape.heads, self.device)
            for name in {"g", "gk", "gv"} & set(x):
                x[name][:, :, math.ceil(0.75 * point.shape.v_heads) :] = 0
            self._inputs = (point, x)
        return self._inputs[1]

    def examine(self, candidate: Candidate, point: Point, derived: bool) -> Examined:
        """Gate and time of one candidate; the other kernels keep the cost model's choice."""
        self.package.force({candidate.kernel: candidate.choice})
        launches: list[Launch] = []

        def seen(name: str, launch: Launch) -> None:
            launch()
            if name == candidate.kernel:
                launches[:] = [launch]

        def judge() -> tuple[Outcome, str]:
            alone = candidate.kernel in self.job.recomputing
            with self.package.recomputing() if alone else contextlib.nullcontext(), self.package.watched(seen):
                return self.judge(candidate.operator, point, derived)

        return examined(judge, lambda: self.clock(launches[0]))

    def judge(self, operator: str, point: Point, derived: bool) -> tuple[Outcome, str]:
        """The gate's verdict; at the timed shape, where the oracle would take too long, equal bits of two calls."""
        from gdngen.autotune.gate import same_bits

        verdict = self.gate.verdict(operator, point, derived)
        if verdict.outcome != "ok":
            return verdict
        found = [self.whole(operator, point) for _ in range(2)]
        same = all(map(same_bits, *found))
        return ("ok", "") if same else ("racy", f"{point}: a second call gave other bits")

    def whole(self, operator: str, point: Point) -> list[Any]:
        """Results and, of a backward operator, gradients of the timed call."""
        import torch

        from gdngen.autotune.gate import cotangents_of

        x, case = self.inputs(point), timed_case(self.job.spec, point.shape)
        if not operator.endswith("_backward"):
            with torch.no_grad():
                return self.package.call(operator, x, case)
        leaves = {name: value.detach().requires_grad_(value.is_floating_point()) for name, value in x.items()}
        found = self.package.call(operator, leaves, case)
        wanted = [value for value in leaves.values() if value.requires_grad]
        gradients = torch.autograd.grad(found, wanted, cotangents_of(found, x["v"].dtype))
        return [*(y.detach() for y in found), *gradients]

    def clock(self, work: Callable[[], object]) -> Time:
        from gdngen.autotune import timing

        return timing.measured(work, self.device)

    def total(self, operator: str, point: Point, choices: dict[str, Choice], derived: bool) -> Examined:
        """Gate and time of a whole operator with these choices: the kernels on their streams, allocations included."""
        import torch

        self.package.force(choices)
        seen: list[Any] = []

        def note(arguments: tuple[Any, ...]) -> None:
            seen[:] = [arguments]

        def judge() -> tuple[Outcome, str]:
            with self.package.noted(operator, note):
                return self.judge(operator, point, derived)

        def work() -> object:
            with torch.no_grad():
                return getattr(self.package.host, operator)(*seen[0])

        return examined(judge, lambda: self.clock(work))


def cores() -> int:
    """Processors that this process may use."""
    count = getattr(os, "process_cpu_count", None)
    if count is not None:
        return count() or 1
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def guarded(question: Callable[[], Any]) -> Any:
    """The answer, or what became of a question that hung or crashed."""
    try:
        return question()
    except Hung as error:
        return Examined("hung", note=str(error), limit=error.limit)
    except Crashed as error:
        return Examined("crashed", note=str(error))
    except Failed as error:
        if "OutOfMemoryError" in str(error):  # of the machine, not of the candidate: nothing to store
            raise EnvironmentProblem(
                f"the GPU's memory is full, perhaps with another program's data: {error}"
            ) from None
        return Examined("unfit" if "OutOfResources" in str(error) else "crashed", note=str(error))


def environment() -> dict[str, str]:
    """Of the tuner's processes: kernels are compiled where there is a GPU, else interpreted; nothing is insisted on."""
    import torch

    interpreted = not torch.cuda.is_available()
    switches = dict.fromkeys(("GDNGEN_ASSERT_TUNED", "GDNGEN_BATCH_INVARIANT", "GDNGEN_DEBUG"), "0")
    return {"TRITON_INTERPRET": str(int(interpreted)), **switches}
