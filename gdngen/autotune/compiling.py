"""Compiling candidates, many at a time and without a GPU: into Triton's cache, and what the machine code says."""

import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gdngen import inspection
from gdngen import target as targets
from gdngen.autotune.handle import Launch, Package
from gdngen.autotune.space import Candidate, Device, Point, gate_cases, timed_case
from gdngen.autotune.worker import Examined, Servant, cores, environment, guarded
from gdngen.passes.plan import Plan
from gdngen.spec import Spec

COMPILE_LIMIT = 120.0  # seconds for one candidate
MOST_PROCESSES = 32


def unfit(row: Mapping[str, Any], own: Mapping[str, Any]) -> str | None:
    """Why a compiled candidate is not worth a launch, None if it is; ``own``: the row of the cost model's choice."""
    if "failed" in row:
        return str(row["failed"])
    if row["miscompiled"]:
        return "the compiler lost an operand or an address (gdngen inspect)"
    if row["shared_bytes"] > row["shared_limit"]:
        return f"needs {row['shared_bytes']} bytes of shared memory of {row['shared_limit']}"
    allowed = int(own.get("spill_bytes", 0))
    if row["spill_bytes"] > allowed:
        return f"spills {row['spill_bytes']} bytes a thread, the cost model's choice {allowed}"
    return None


@dataclass(frozen=True)
class CompilerJob:
    """What a compiling process is told: the package, the device to compile for, the calls to come."""

    folder: Path
    spec: Spec
    chunk: int
    device: Device


class Compiler:
    """Lives in a process that has no GPU: compiles a candidate for a device, into Triton's cache.

    It rehearses the very calls that will be made and asks Triton to prepare each launch, so that the process that
    times finds every kernel compiled.
    """

    def __init__(self, job: CompilerJob) -> None:
        self.job = job
        inspection.stand_in_driver(job.device.backend, job.device.arch, job.device.warp_size)
        self.package = Package(job.folder, job.spec)
        self.package.host.machine_of = self._machine_of

    def _machine_of(self, tensor: Any) -> Any:
        """What the package's machine_of says of a tensor on the device."""
        with inspection.on_gpu(self.job.device.backend, self.job.device.arch, self.job.device.processors):
            there = SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=0), dtype=tensor.dtype)
            return self.package.machine.machine_of(there)

    def _served(self, point: Point) -> list[str]:
        """The dtypes whose calls read the point's row of the table, and pass the gate."""
        keys = self.job.device.keys
        return [dtype for dtype, key in keys.items() if key == keys[point.dtype]]

    def compiled(self, candidate: Candidate, point: Point) -> dict[str, Any]:
        """Registers, spills, shared memory of a candidate: the most over the calls of gate and timing."""
        import torch

        job, rows = self.job, []
        backend, target = job.device.backend, targets.get(job.device.keys[point.dtype].partition("/")[0])

        def compile_it(name: str, launch: Launch) -> None:
            if name in (candidate.kernel, "combine"):  # that one takes no choice
                made = launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.keywords)
            if name == candidate.kernel:
                rows.append({**inspection.machine_code(made, backend), "shared_bytes": made.metadata.shared})

        self.package.force({candidate.kernel: candidate.choice})
        with self.package.watched(compile_it):
            span = self.package.span if candidate.operator == "chunk" else 0
            rehearsed = [
                (dtype, case) for dtype in self._served(point) for case in gate_cases(job.spec, job.chunk, False, span)
            ]
            for dtype, case in [*rehearsed, (point.dtype, timed_case(job.spec, point.shape.short))]:
                self.package.rehearse(candidate.operator, case, getattr(torch, dtype), point.shape.heads)
        most = {name: max(row[name] for row in rows) for name in ("registers", "spill_bytes", "shared_bytes")}
        lost = any(row["miscompiled"] for row in rows)
        return most | {"miscompiled": lost, "shared_limit": target.shared_bytes}


class CompilingPool:
    """Processes that compile candidates; one that hangs or crashes costs its candidate alone."""

    def __init__(self, copy: Path, plan: Plan, device: Device) -> None:
        self.job = CompilerJob(copy, plan.spec, plan.chunk, device)
        self.count = min(cores(), MOST_PROCESSES)
        self.threads = ThreadPoolExecutor(self.count)
        self.local = threading.local()
        self.servants: list[Servant] = []
        self.stopped = False
        self.futures: dict[tuple[Candidate, Point], Future[dict[str, Any]]] = {}
        self.first: dict[Point, list[Future[dict[str, Any]]]] = {}

    def submit(self, candidate: Candidate, point: Point) -> None:
        if (candidate, point) not in self.futures:
            self.futures[candidate, point] = self.threads.submit(self._compiled, candidate, point)
            known = {c.kernel for c, p in self.futures if p == point and c != candidate}
            if candidate.kernel not in known:  # the cost model's choice comes first
                self.first.setdefault(point, []).append(self.futures[candidate, point])

    def row(self, candidate: Candidate, point: Point) -> dict[str, Any]:
        """What compiling said: registers, spills, shared memory, or why it failed."""
        self.submit(candidate, point)
        return self.futures[candidate, point].result()

    def wait_for_first(self, point: Point) -> None:
        for future in self.first.get(point, []):
            future.result()

    def drop_waiting(self) -> None:
        """Forget what no process has begun with."""
        self.futures = {task: future for task, future in self.futures.items() if not future.cancel()}

    def _compiled(self, candidate: Candidate, point: Point) -> dict[str, Any]:
        if self.stopped:
            return {"failed": "not compiled"}
        servant = getattr(self.local, "servant", None)
        if servant is None:
            log = self.job.folder.parent / f"compiler{len(self.servants)}.log"
            servant = self.local.servant = Servant(Compiler, self.job, environment() | {"TRITON_INTERPRET": "0"}, log)
            self.servants.append(servant)
        found = guarded(lambda: servant.ask("compiled", candidate, point, limit=COMPILE_LIMIT))
        if isinstance(found, Examined):
            return {"failed": f"does not compile: {found.note}", "limit": found.limit}
        return dict(found)

    def stop(self) -> None:
        """Gives up what is not compiled yet."""
        self.stopped = True
        self.threads.shutdown(wait=False, cancel_futures=True)
        for servant in list(self.servants):
            servant.stop()
        self.threads.shutdown(wait=True)
