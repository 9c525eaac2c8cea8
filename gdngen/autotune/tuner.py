"""The tuner: every kernel of a package at every point, one kernel at a time, each measurement stored when made.

Candidates are compiled by many processes at once, in the order in which one worker gates and times them.
"""

import contextlib
import itertools
import shlex
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gdngen import kept, package
from gdngen import target as targets
from gdngen.autotune import decisions
from gdngen.autotune.compiling import CompilingPool, unfit
from gdngen.autotune.decisions import Decision, winner
from gdngen.autotune.handle import Choice
from gdngen.autotune.report import Report, Row
from gdngen.autotune.space import Candidate, Device, Effort, Point, candidates, operators_at, spelled
from gdngen.autotune.store import Key, Measurements, Record
from gdngen.autotune.worker import Bench, BenchJob, Examined, Servant, environment, guarded
from gdngen.errors import ArgumentError, PackageError
from gdngen.passes.pipeline import compile_spec
from gdngen.passes.plan import Kernel, Operator, Plan
from gdngen.spec import Spec

PREPARE_LIMIT = 600.0  # seconds for the float64 recurrence
PATIENCE = 2.0  # seconds
LONGER = 10  # times the limit for the cost model's own choice where it hung: rather a busy machine than a fault


@dataclass(frozen=True)
class Wish:
    """What is to be tuned and how hard; effort "none": the cost model's choices alone, as whole operators.

    ``limit``: seconds of a candidate in the worker; ``budget``: of it all."""

    folder: Path
    points: tuple[Point, ...]
    effort: Effort = "quick"
    kernels: tuple[str, ...] = ()
    limit: float = 60.0
    budget: float | None = None


class Task(NamedTuple):
    """One measurement to come; ``rank`` 0 is the cost model's choice."""

    rank: int
    point: Point
    candidate: Candidate
    key: Key


class Progress(NamedTuple):
    """What the tuner tells while it works: a line of text, or a measurement."""

    done: int
    total: int
    text: str = ""
    task: Task | None = None
    record: Record | None = None


def plan_of(folder: Path) -> Plan:
    """The plan that a package was made from; PackageError where this gdngen makes another one."""
    manifest: dict[str, Any] = package.read_manifest(folder)
    words = shlex.split(manifest["build"])
    pins = tuple(word for flag, word in itertools.pairwise(words) if flag == "--pin")
    plan = compile_spec(Spec(**manifest["spec"]), targets.get(manifest["target"]), pins).plan
    if plan.digest != manifest["plan_digest"]:
        raise PackageError(f"{folder} was built by another gdngen; build it again: {manifest['build']}")
    return plan


class Tuner:
    """One tuning of one package."""

    def __init__(self, wish: Wish, measurements: Measurements, tell: Callable[[Progress], object]) -> None:
        self.wish, self.measurements, self.tell = wish, measurements, tell
        self.plan = plan_of(wish.folder)
        self.digests = kept.kernel_digests(
            {str(path.relative_to(wish.folder)): path.read_text() for path in wish.folder.rglob("*.py")}
        )
        self.operators: dict[str, Operator] = {operator.name: operator for operator in self.plan.operators}
        self._check_kernels()
        self.measured = self.found = self.skipped = self.done = self.total = 0
        self.problems: list[str] = []
        self.failed = False
        self.records: dict[str, Record] = {}
        self.started = time.monotonic()

    def _check_kernels(self) -> None:
        known = [kernel.name for operator in self.plan.operators for kernel in operator.kernels]
        if unknown := sorted(set(self.wish.kernels) - set(known)):
            raise ArgumentError(
                f"kernels: {self.wish.folder} has no kernel {', '.join(unknown)}; it has {', '.join(known)}"
            )

    def run(self) -> Report:
        """Measure what is not measured yet, decide, write."""
        with tempfile.TemporaryDirectory(prefix="gdngen_tune_") as scratch, contextlib.ExitStack() as stack:
            copy = Path(scratch) / self.wish.folder.name  # without decisions, so that the cost model's choices show
            ignored = shutil.ignore_patterns("__pycache__", kept.TUNED, kept.AOT)
            shutil.copytree(self.wish.folder, copy, ignore=ignored)
            self.worker = self._worker(copy)
            stack.callback(self.worker.stop)
            self.device: Device = self.worker.ask("about", limit=PREPARE_LIMIT)
            self._say(f"tuning {copy.name} on {self._where()}")
            stack.enter_context(self._alone())
            self.started = time.monotonic()
            tasks = self._tasks()
            self.compiling = CompilingPool(copy, self.plan, self.device)
            stack.callback(self.compiling.stop)
            self._measure(tasks)
            rows = self._rows(tasks)
            totals = self._totals(rows)
            file = self._write(rows)
            if late := self.worker.ask("compiled_late", limit=PREPARE_LIMIT):
                self.problems.append(f"compiled while timing, not ahead: {', '.join(sorted(set(late)))}")
        counts, seconds = (self.measured, self.found, self.skipped), time.monotonic() - self.started
        return Report(
            self.wish.folder.name, self.device, *counts, rows, totals, file, self.problems, self.failed, seconds
        )

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One tuning at a time on a device: times are not to be disturbed, nor is anything to be measured twice."""
        waiting = threading.Timer(PATIENCE, lambda: self._say("waiting for another gdngen tune on this device"))
        waiting.daemon = True
        waiting.start()
        try:
            with self.measurements.lock(f"tune {self.device.slug} {self.device.identity}"):
                waiting.cancel()
                yield
        finally:
            waiting.cancel()

    def _worker(self, copy: Path) -> Servant:
        backward = self.operators.get("chunk_backward")
        again = [k.name for k in backward.kernels if set(k.stores) & set(backward.saved)] if backward else []
        job = BenchJob(copy, self.plan.spec, self.plan.chunk, tuple(again))
        return Servant(Bench, job, environment(), copy.parent / "worker.log")

    def _where(self) -> str:
        return "the CPU, in Triton's interpreter" if self.device.interpreted else self.device.name

    def _say(self, text: str) -> None:
        self.tell(Progress(self.done, self.total, text))

    # -------------------------------------------------------------------------------------------- what there is to do

    def _tasks(self) -> list[Task]:
        """All measurements, point by point, the cost model's choices first; says how many were found."""
        tasks: list[Task] = []
        self.own: dict[tuple[Point, str], Choice] = {}
        for point in self.wish.points:
            names = operators_at(self.plan, point.shape)
            surveyed = self.worker.ask("survey", names, point, limit=PREPARE_LIMIT) if names else {}
            for operator in (self.operators[name] for name in names):
                for kernel in operator.kernels:
                    self.own[point, kernel.name] = surveyed[kernel.name]
                    tasks += self._tasks_of(point, operator, kernel, surveyed[kernel.name])
        place = {point: n for n, point in enumerate(self.wish.points)}
        tasks.sort(key=lambda task: (place[task.point], task.rank))
        self.total = len(tasks)
        for task in tasks:
            if (record := self.measurements.get(task.key)) and self._counts(record, task.rank == 0):
                self.records[task.key.digest] = record
        self.found = self.done = len(self.records)
        self._say(f"{self.total} measurements, {self.found} of them found in the store")
        return tasks

    def _tasks_of(self, point: Point, operator: Operator, kernel: Kernel, own: Choice) -> Iterator[Task]:
        if self.wish.effort == "none" or (self.wish.kernels and kernel.name not in self.wish.kernels):
            return
        source = (self.wish.folder / "kernels" / f"{kernel.name}.py").read_text()
        for rank, choice in enumerate(candidates(kernel, source, self.plan, own, self.wish.effort)):
            candidate = Candidate(operator.name, kernel.name, tuple(choice.items()))
            yield Task(rank, point, candidate, self._key(kernel.name, self.digests[kernel.name], choice, point))

    def _counts(self, record: Record, own: bool, limit: float | None = None) -> bool:
        """Whether a stored record says enough: what hung may answer within a longer limit, and the cost model's own
        choice, the one that runs untuned, is asked again each time."""
        given = self.wish.limit if limit is None else limit
        return record.outcome != "hung" or (not own and record.limit is not None and record.limit >= given)

    def _key(self, kernel: str, body: str, configuration: Mapping[str, int], point: Point) -> Key:
        shape: dict[str, int | str] = {**point.shape._asdict(), "dtype": point.dtype}
        return Key(
            kernel=kernel,
            body=body,
            configuration=dict(configuration),
            shape=shape,
            gpu=self.device.name,
            versions=self.device.versions,
        )

    def _derived(self, operator: str, kernel: str | None = None) -> bool:
        """Whether the gate needs gradients: for backward operators, and for what hands values over to them."""
        backward = self.operators.get("chunk_backward")
        if operator == "chunk_backward" or backward is None:
            return operator == "chunk_backward"
        stores = {name for k in self.operators[operator].kernels if kernel in (None, k.name) for name in k.stores}
        return bool(stores & set(backward.saved))

    # -------------------------------------------------------------------------------------------- measuring

    def _measure(self, tasks: list[Task]) -> None:
        missing = [task for task in tasks if task.key.digest not in self.records]
        if missing and not self.device.interpreted:
            self._compile(missing)
        for task in missing:
            if self._spent():
                self.skipped += 1
                continue
            record = self.measurements.measured(
                task.key,
                lambda task=task: self._record(task),  # type: ignore[misc]
                lambda record, task=task: self._counts(record, task.rank == 0),  # type: ignore[misc]
            )
            self.records[task.key.digest] = record
            self.done += 1
            self.tell(Progress(self.done, self.total, "", task, record))
        if self.skipped:
            self.compiling.drop_waiting()
            self.problems.append(f"the budget is spent: {self.skipped} measurements were left out")

    def _spent(self) -> bool:
        return self.wish.budget is not None and time.monotonic() - self.started > self.wish.budget

    def _compile(self, missing: list[Task]) -> None:
        """The cost model's choices of every kernel that will run, then the candidates, in the order of use."""
        for point in dict.fromkeys(task.point for task in missing):
            used = {task.candidate.operator for task in missing if task.point == point}
            used |= {"chunk"} if "chunk_backward" in used else set()
            used |= {"chunk_backward"} if any(self._derived(name) for name in used) else set()
            for name in sorted(used):
                for kernel in self.operators[name].kernels:
                    own = tuple(self.own[point, kernel.name].items())
                    self.compiling.submit(Candidate(name, kernel.name, own), point)
        for task in missing:
            self.compiling.submit(task.candidate, task.point)

    def _record(self, task: Task) -> Record:
        """Measure one candidate."""
        self.measured += 1
        found = self._fitness(task) or self._examined(task)
        if found.outcome == "hung" and task.rank == 0:
            found = self._examined(task, LONGER * self.wish.limit)
        return self._as_record(task.key, found)

    @staticmethod
    def _as_record(key: Key, found: Examined) -> Record:
        time_counts = found.outcome == "ok"
        return Record(
            format=1,
            key=key,
            outcome=found.outcome,
            microseconds=found.microseconds if time_counts else None,
            spread=found.spread if time_counts else None,
            note=found.note,
            limit=found.limit if found.outcome == "hung" else None,
        )

    def _fitness(self, task: Task) -> Examined | None:
        """Why a candidate is not launched at all; waits until it, and all that runs beside it, is compiled."""
        if self.device.interpreted:
            return None
        self.compiling.wait_for_first(task.point)
        own = Candidate(task.candidate.operator, task.candidate.kernel, tuple(self._own(task).items()))
        row = self.compiling.row(task.candidate, task.point)
        if row.get("limit"):  # it took too long: no verdict, and the cost model's own choice is compiled when launched
            return None if task.rank == 0 else Examined("hung", note=row["failed"], limit=row["limit"])
        model = self.compiling.row(own, task.point)
        reason = unfit(row, row if model.get("limit") else model)
        return Examined("unfit", note=reason) if reason else None

    def _own(self, task: Task) -> Choice:
        return self.own[task.point, task.candidate.kernel]

    def _examined(self, task: Task, limit: float | None = None) -> Examined:
        candidate = task.candidate
        derived = self._derived(candidate.operator, candidate.kernel)
        return self._asked("examine", task.point, derived, candidate, limit=limit)

    def _asked(self, method: str, point: Point, derived: bool, *arguments: Any, limit: float | None = None) -> Examined:
        """The worker's answer; what it needs beforehand does not count towards the limit."""
        self.worker.ask("prepare", point, derived, limit=PREPARE_LIMIT)
        seconds = self.wish.limit if limit is None else limit
        call = (method, arguments[0], point, *arguments[1:], derived)
        found: Examined = guarded(lambda: self.worker.ask(*call, limit=seconds))
        if found.outcome == "crashed":
            self.worker.stop()  # after an error of the GPU nothing more works in that process
        return found

    # -------------------------------------------------------------------------------------------- deciding

    def _rows(self, tasks: list[Task]) -> list[Row]:
        """A row for each kernel, bytes per element and bucket."""
        groups: dict[tuple[str, int, int], list[Task]] = {}
        for task in tasks:
            width = int(self.device.keys[task.point.dtype].rpartition("/")[2])
            groups.setdefault((task.candidate.kernel, width, task.point.shape.bucket), []).append(task)
        return [self._row(place, group) for place, group in groups.items()]

    def _row(self, place: tuple[str, int, int], group: list[Task]) -> Row:
        measured = [task for task in group if task.key.digest in self.records]
        points = list(dict.fromkeys(task.point for task in measured))
        found: dict[tuple[tuple[str, int], ...], list[Record]] = {}
        for task in measured:
            found.setdefault(task.candidate.fields, []).append(self.records[task.key.digest])
        whole = [(dict(fields), records) for fields, records in found.items() if len(records) == len(points)]
        own = self._own(group[0])
        best, model = winner(whole), winner([(choice, records) for choice, records in whole if choice == own])
        bad = [(fields, r) for fields, records in found.items() for r in records if r.outcome != "ok"]
        rejected = [{"choice": spelled(dict(f)), "outcome": r.outcome, "note": r.note} for f, r in bad]
        row = Row(*place, [str(p) for p in points], own, model[1] if model else None, None, None, None, rejected)
        if best:
            row.winner, row.winner_us, row.spread = best
        elif found:
            self._fail(f"kernel {row.kernel}, {row.heads} heads: no candidate is right and measured")
        return row

    def _fail(self, text: str) -> None:
        self.failed = True
        self.problems.append(text)

    def _totals(self, rows: list[Row]) -> list[dict[str, Any]]:
        """Whole operators with the cost model's choices and with the winners, which must pass the gate together."""
        totals = []
        for point in self.wish.points:
            width = int(self.device.keys[point.dtype].rpartition("/")[2])
            here = {r.kernel: r for r in rows if (r.bytes, r.heads) == (width, point.shape.bucket)}
            for name in operators_at(self.plan, point.shape):
                won = {k.name: here[k.name].winner for k in self.operators[name].kernels if k.name in here}
                choices = {kernel: choice for kernel, choice in won.items() if choice is not None}
                if self.wish.effort == "none":
                    choices = {kernel.name: self.own[point, kernel.name] for kernel in self.operators[name].kernels}
                if choices:
                    totals.append(self._total(name, point, choices, here))
        return totals

    def _total(self, name: str, point: Point, choices: dict[str, Choice], here: Mapping[str, Row]) -> dict[str, Any]:
        own = {kernel.name: self.own[point, kernel.name] for kernel in self.operators[name].kernels}
        untuned, tuned = (self._whole(name, point, one, one == own) for one in (own, own | choices))
        if untuned.outcome != "ok":
            self._fail(f"{name} at {point}: the cost model's choices are {untuned.outcome} ({untuned.note})")
        if tuned.outcome != "ok":
            self._fail(f"{name} at {point}: the winners together are {tuned.outcome} ({tuned.note})")
            for kernel, choice in ((k, c) for k, c in choices.items() if k in here):
                reason = {"choice": spelled(dict(choice)), "outcome": tuned.outcome, "note": f"together: {tuned.note}"}
                here[kernel].rejected.append(reason)
                here[kernel].winner = None
        ratio = None
        if untuned.microseconds and tuned.microseconds:
            ratio = untuned.microseconds / tuned.microseconds
        values = {"untuned_us": untuned.microseconds, "tuned_us": tuned.microseconds, "ratio": ratio}
        return {"operator": name, "shape": str(point.shape), "dtype": point.dtype} | values

    def _whole(self, name: str, point: Point, choices: dict[str, Choice], own: bool) -> Record:
        body = "".join(self.digests[kernel] for kernel in choices)
        fields = {f"{kernel}.{n}": value for kernel, choice in choices.items() for n, value in choice.items()}
        key, limit = self._key(f"operator {name}", body, fields, point), LONGER * self.wish.limit

        def measure() -> Record:
            if not self.device.interpreted:
                made = [Candidate(name, kernel, tuple(choice.items())) for kernel, choice in choices.items()]
                for candidate in made:
                    self.compiling.submit(candidate, point)
                for candidate in made:
                    self.compiling.row(candidate, point)
            found = self._asked("total", point, self._derived(name), name, choices, limit=limit)
            return self._as_record(key, found)

        return self.measurements.measured(key, measure, lambda record: self._counts(record, own, limit))

    def _write(self, rows: list[Row]) -> Path | None:
        """tuned/<gpu>.json of the package, or None where nothing was decided."""
        made = [
            Decision(row.kernel, row.bytes, row.heads, row.winner, row.winner_us)
            for row in rows
            if row.winner is not None and row.winner_us is not None
        ]
        rejected = {(r.kernel, r.bytes, r.heads, bad["choice"]) for r in rows if r.winner is None for bad in r.rejected}
        file = self.wish.folder / kept.TUNED / f"{self.device.slug}.json"
        with self.measurements.lock(f"decide {self.wish.folder.resolve()}"):
            old = decisions.read(file, self.digests)
            right = [one for one in old if (*one.place, spelled(dict(one.choice))) not in rejected]
            if not made and right == old:
                return None
            every = decisions.merged(right, made)
            decisions.write(file, decisions.text(self.device.name, self.device.versions, self.digests, every))
        return file
