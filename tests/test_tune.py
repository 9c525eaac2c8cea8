"""gdngen tune without a GPU: the whole path in Triton's interpreter, planted faults, kills, many at once."""

import importlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from gdngen import api, calls, kept, knobs, package
from gdngen.autotune import compiling, decisions, space, timing, tuner, worker
from gdngen.autotune.compiling import Compiler, CompilingPool, unfit
from gdngen.autotune.decisions import Decision, winner
from gdngen.autotune.gate import Gate, cotangents_of
from gdngen.autotune.handle import Package
from gdngen.autotune.space import Candidate, Device, Point, Shape
from gdngen.autotune.store import Key, Measurements, Record
from gdngen.autotune.timing import Time
from gdngen.autotune.worker import Crashed, Examined, Failed, Hung, Servant, examined
from gdngen.cli import main
from gdngen.errors import ArgumentError, EnvironmentProblem
from gdngen.passes.pipeline import compile_spec
from gdngen.spec import Spec
from gdngen.target import get as target_of

ROOT = Path(__file__).resolve().parent.parent
SMALL: dict[str, Any] = {"key_dim": 16, "value_dim": 16, "chunk": 16}
PLAIN = Spec(rule="additive", gate="none", beta="none", backward=False, **SMALL)
POINT = Point(Shape(16, 1, 1, 1), "float32")
H200 = Device("NVIDIA H200", "nvidia_h200", "0", False, "cuda", 90, 32, 132, {"float32": "sm_90/4"}, {"triton": "3"})
OPTIONS = ["--shapes", "16x1:1/1", "--dtypes", "float32", "--kernels", "scan", "--interpreted"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package that nobody alters."""
    return api.build(PLAIN, tmp_path_factory.mktemp("plain"), name="plain")


@pytest.fixture
def copied(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, and measurements of its own."""
    monkeypatch.setenv("GDNGEN_CACHE_DIR", str(tmp_path / "cache"))
    return Path(shutil.copytree(plain, tmp_path / "copied", ignore=shutil.ignore_patterns("__pycache__")))


def run(arguments: list[str], exit_code: int = 0) -> Result:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == exit_code, (result.output, result.exception)
    return result


# ------------------------------------------------------------------------------------------------ planted faults

PLANTED = '''

class Planted:
    """A kernel that misbehaves with some choices, which makes it fast: every other launch sleeps."""

    def __init__(self, kernel, faults, slow=0.01):
        self.kernel, self.faults, self.slow, self.calls = kernel, faults, slow, 0
        self.names = list(inspect.signature(kernel.fn).parameters)

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.launch(grid, arguments, options)

    def launch(self, grid, arguments, options):
        fault = self.faults.get((options["num_warps"], options["num_stages"]))
        state = dict(zip(self.names, arguments)).get("ht")
        self.calls += 1
        if fault == "hung":
            while True:
                time.sleep(60)
        if fault == "left":
            os._exit(3)
        if fault == "crashed":
            ctypes.string_at(0)
        self.kernel[grid](*arguments, **options)
        if fault == "wrong":
            state.mul_(1.5)
        elif fault == "racy":
            state.mul_(1 + 1e-5 * self.calls)
        elif fault != "fast":
            time.sleep(self.slow)


'''


def plant(folder: Path, faults: dict[tuple[int, int], str], slow: float = 0.01, kernel: str = "scan") -> None:
    """Wrap a kernel of a copied package in its launch code."""
    file = folder / "launch.py"
    text = "import ctypes\nimport inspect\nimport os\nimport time\n" + file.read_text()
    file.write_text(f"{text}{PLANTED}{kernel} = Planted({kernel}, {faults!r}, {slow})\n")


def test_planted_faults_are_rejected_and_the_best_right_choice_wins(copied: Path, tmp_path: Path) -> None:
    faults = {(2, 2): "wrong", (4, 1): "racy", (2, 3): "hung", (2, 1): "crashed", (4, 3): "fast"}
    plant(copied, faults, slow=0.05)
    found = json.loads(run(["tune", str(copied), *OPTIONS, "--limit", "4", "--json"]).stdout)
    (row,) = found["rows"]
    outcomes = {tuple(map(int, one["choice"].replace("=", " ").split()[3:6:2])): one for one in row["rejected"]}
    expected = {place: fault for place, fault in faults.items() if fault != "fast"}
    assert {place: one["outcome"] for place, one in outcomes.items()} == expected
    assert "state is off by 5.0e-01" in outcomes[2, 2]["note"] and "other bits" in outcomes[4, 1]["note"]
    assert "no answer within 4 s" in outcomes[2, 3]["note"] and "exit code -11" in outcomes[2, 1]["note"]
    assert row["model"] == {"BV": 16, "num_warps": 4, "num_stages": 2, "descriptors": 0}
    assert row["winner"] == {"BV": 16, "num_warps": 4, "num_stages": 3, "descriptors": 0} and row["ratio"] > 1.5
    stored = list(Measurements(tmp_path / "cache" / "measurements").records())
    times = {r.outcome for r in stored if r.microseconds is not None}
    assert times == {"ok"} and {"wrong", "racy", "hung", "crashed"} <= {r.outcome for r in stored}
    assert found["device"]["interpreted"] and found["measured"] == 6 and found["totals"][0]["ratio"] > 1

    # Again: everything is in the store; said in plain lines, as this is no terminal.
    printed = run(["tune", str(copied), *OPTIONS, "--limit", "4"]).output
    assert "6 measurements, 6 of them found in the store" in printed and "0 measured, 6 found in the store" in printed
    assert "on the CPU, in Triton's interpreter" in printed and "these decisions are never used on a GPU" in printed
    assert "an untuned package takes" in printed and f"wrote {copied / 'tuned' / 'interpreter.json'}" in printed
    assert_only_for_the_interpreter(copied)


def assert_only_for_the_interpreter(folder: Path) -> None:
    record = json.loads((folder / "tuned" / "interpreter.json").read_text())
    (decision,) = record["decisions"]
    assert record["gpu"] == "interpreter" and (decision["kernel"], decision["bytes"]) == ("scan", 4)
    assert (
        decision["choice"] == {"BV": 16, "num_warps": 4, "num_stages": 3, "descriptors": 0}
        and decision["microseconds"] > 0
    )
    digests = kept.kernel_digests({"kernels/scan.py": (folder / "kernels/scan.py").read_text(), "device.py":
                                      (folder / "device.py").read_text()})  # fmt: skip
    assert record["kernels"] == digests
    api.import_folder(folder, "tuned_in_the_interpreter")
    tuning = importlib.import_module("tuned_in_the_interpreter.tuning")
    gpu = SimpleNamespace(key="sm_90/4", processors=1, gpu="NVIDIA H200")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert tuning.choice("scan", gpu, 2) == tuning.TUNING["scan"]["sm_90/4"]
    assert len(said) == 1 and "gdngen tune" in str(said[0].message)


# ------------------------------------------------------------------------------------------------ kills, many at once


def command(folder: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "gdngen", "tune", str(folder), *OPTIONS, *more, "--json"]


@pytest.mark.full
def test_a_killed_tuning_is_resumed_and_leaves_no_process(copied: Path, tmp_path: Path) -> None:
    plant(copied, {}, slow=0.1)
    launch = copied / "launch.py"
    launch.write_text(launch.read_text() + f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n")
    first = subprocess.Popen(command(copied), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    records = tmp_path / "cache" / "measurements"
    wait_for(lambda: len(list(records.glob("*.json"))) >= 2 or first.poll() is not None)
    first.send_signal(signal.SIGKILL)
    first.wait()
    stored, pid = len(list(records.glob("*.json"))), int((tmp_path / "pid").read_text())
    assert 2 <= stored < 6, "the tuning was over before it was killed"
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2])
    found = json.loads(run(["tune", str(copied), *OPTIONS, "--json"]).stdout)
    assert (found["found"], found["measured"]) == (stored, 6 - stored) and found["rows"][0]["winner"]


def wait_for(condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


AT_ONCE = """
import os, sys
from gdngen.autotune import tuner
from gdngen.cli import main
pids = []
for number in range(int(sys.argv[2])):
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(f"{sys.argv[1]}.{number}", os.O_CREAT | os.O_WRONLY), 1)
        main(sys.argv[3:], prog_name="gdngen")
    pids.append(pid)
sys.exit(max(os.waitpid(pid, 0)[1] for pid in pids) != 0)
"""


@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.full)])
def test_many_at_once_measure_each_candidate_once(copied: Path, tmp_path: Path, count: int) -> None:
    arguments = [sys.executable, "-c", AT_ONCE, str(tmp_path / "out"), str(count), *command(copied)[3:]]
    subprocess.run(arguments, cwd=ROOT, check=True, stderr=subprocess.DEVNULL, timeout=300)
    found = [json.loads((tmp_path / f"out.{number}").read_text()) for number in range(count)]
    assert sorted(one["measured"] for one in found) == [0] * (count - 1) + [6]
    assert len({json.dumps(one["rows"]) for one in found}) == 1, "they decided differently"
    assert len(json.loads((copied / "tuned" / "interpreter.json").read_text())["decisions"]) == 1


# -------------------------------------------------------------------------------------------- no time without the gate


@pytest.mark.parametrize("outcome", ["wrong", "racy", "hung", "crashed", "unfit"])
def test_no_time_counts_without_the_gate(outcome: Any) -> None:
    def clock() -> Time:
        raise AssertionError("timed before the gate had passed")

    assert examined(lambda: (outcome, "why"), clock) == Examined(outcome, None, None, "why")
    record = tuner.Tuner._as_record(key(4), Examined(outcome, 1.0, 0.0, "a time that nobody may count"))
    assert record.outcome == outcome and record.microseconds is None and record.spread is None
    forged = record.model_copy(update={"microseconds": 1e-3})  # as somebody might write it into the store
    right = Record(key=key(8), outcome="ok", microseconds=50.0, spread=0.0)
    best = winner([({"num_warps": 4}, [forged]), ({"num_warps": 8}, [right])])
    assert best == ({"num_warps": 8}, pytest.approx(50.0), 0.0)
    assert winner([({"num_warps": 4}, [right, forged])]) is None  # right at one shape of two


def key(warps: int) -> Key:
    return Key(kernel="scan", body="0", configuration={"num_warps": warps}, shape={}, gpu="", versions={})


def test_a_time_after_the_gate() -> None:
    order: list[str] = []
    judge, clock = (lambda: order.append("judge") or ("ok", "")), (lambda: order.append("clock") or Time(2.0, 0.1))
    assert examined(judge, clock) == Examined("ok", 2.0, 0.1) and order == ["judge", "clock"]


def test_times_are_medians() -> None:
    assert timing.summary([3.0, 1.0, 2.0, 100.0, 2.0]) == Time(2.0, 0.5)
    calls: list[int] = []
    assert timing.measured(lambda: calls.append(1), "cpu").microseconds >= 0 and len(calls) == timing.INTERPRETED


def test_the_gate_judges_gradients(tmp_path: Path) -> None:
    """A wrong gradient, a gradient of other bits each time; results stay right."""
    spec = Spec(rule="additive", gate="none", beta="none", **SMALL)
    mine = Package(api.build(spec, tmp_path, name="gradients_judged"), spec)
    gate = Gate(mine, 16, "cpu")
    assert gate.verdict("chunk_backward", POINT, True) == ("ok", "")
    original, calls = mine.host.chunk_backward, itertools.count(1)
    for spoiled, outcome in ((lambda: 1.1, "wrong"), (lambda: 1 + 1e-6 * next(calls), "racy")):

        def altered(*arguments: Any, spoiled: Any = spoiled) -> Any:
            found = original(*arguments)
            return found | {"k": found["k"] * spoiled()}

        mine.host.chunk_backward = altered
        verdict = gate.verdict("chunk_backward", POINT, True)
        assert verdict.outcome == outcome and (outcome == "racy" or "dk is off by 1.0e-01" in verdict.note), verdict
        assert gate.verdict("chunk", POINT, False).outcome == "ok"


def test_the_gate_asks_every_dtype_that_the_decision_serves(tmp_path: Path) -> None:
    """float16 calls read the row that float32 was tuned for."""
    spec = Spec(rule="additive", gate="none", beta="none", backward=False, **SMALL)
    mine = Package(api.build(spec, tmp_path, name="gate_of_two_dtypes"), spec)
    assert mine.sharing("float32", "cpu") == ["float32", "float16"]
    original = mine.host.chunk

    def spoiled(call: Any, *rest: Any) -> Any:
        o, *states = original(call, *rest)
        return (o * 2 if o.dtype == torch.float16 else o), *states

    mine.host.chunk = spoiled
    verdict = Gate(mine, 16, "cpu").verdict("chunk", POINT, False)
    assert verdict.outcome == "wrong" and "float16: o is off by" in verdict.note


@pytest.mark.full
def test_kernels_that_autograd_does_not_launch(tmp_path: Path) -> None:
    """Where forward keeps values, the kernels that compute them again are measured in calls without what was kept."""
    spec, pins = Spec(key_dim=64, value_dim=64, chunk=32), ("cut=X+P", "save=speed")
    plan = compile_spec(spec, target_of("sm_90"), pins).plan
    backward = plan.operator("chunk_backward")
    assert backward is not None and backward.saved
    again = [kernel.name for kernel in backward.kernels if set(kernel.stores) & set(backward.saved)]
    folder = api.build(spec, tmp_path, name="kept_for_backward", pins=pins)
    assert tuner.plan_of(folder) == plan
    bench = worker.Bench(worker.BenchJob(folder, spec, 32, tuple(again)))
    own = bench.survey(["chunk_backward"], POINT)
    for name in again:
        found = bench.examine(Candidate("chunk_backward", name, tuple(own[name].items())), POINT, True)
        assert found.outcome == "ok" and found.microseconds
        assert bench.package.host.chunk_backward.__name__ == "chunk_backward"


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"rule": "additive", "beta": "dt"},
        {"rule": "additive", "normalize": True, "feature_map": "elu1"},
        {"fused_gate": "softplus", "beta_logits": True, "qk_norm": True, "state_v_first": True, "backward": False},
        {"gate": "key", "qk_norm": True, "backward": False},
        {"varlen": False, "backward": False},
    ],
    ids=str,
)
def test_the_gate_passes_what_is_right(options: dict[str, Any], tmp_path: Path) -> None:
    spec = Spec(**SMALL, **options)
    plan = compile_spec(spec, target_of("sm_90"), ()).plan
    name = f"gated_{spec.digest}"
    gate = Gate(Package(api.build(spec, tmp_path, name=name), spec), 16, "cpu")
    for point in (POINT, Point(Shape(1, 2, 1, 1), "float32")):
        for operator in space.operators_at(plan, point.shape):
            assert gate.verdict(operator, point, operator == "chunk_backward") == ("ok", "")


# ------------------------------------------------------------------------------------------------ pruning


def row(**changes: Any) -> dict[str, Any]:
    return {
        "registers": 200,
        "spill_bytes": 0,
        "shared_bytes": 1000,
        "shared_limit": 2000,
        "miscompiled": False,
    } | changes


def test_what_is_not_launched() -> None:
    assert unfit(row(), row()) is None and unfit(row(spill_bytes=8), row(spill_bytes=8)) is None
    assert "spills 16 bytes a thread, the cost model's choice 8" in str(unfit(row(spill_bytes=16), row(spill_bytes=8)))
    assert "spills" in str(unfit(row(spill_bytes=8), {"failed": "does not compile"}))
    assert "2001 bytes of shared memory of 2000" in str(unfit(row(shared_bytes=2001), row(shared_bytes=3000)))
    assert "lost an operand" in str(unfit(row(miscompiled=True), row(miscompiled=True)))
    assert unfit({"failed": "does not compile: why"}, row()) == "does not compile: why"


class OutOfResources(Failed):
    """As a worker would tell of it."""

    def __str__(self) -> str:
        return f"OutOfResources: {super().__str__()}"


class FakeWorker:
    """Answers as a worker on a GPU would; every candidate is right, and the faster the fewer warps it has."""

    total = Examined("ok", 1.0, 0.0)

    def __init__(self, own: dict[str, dict[str, int]], mood: Any = None) -> None:
        self.own, self.examined, self.mood, self.stops = own, [], mood, 0

    def ask(self, method: str, *arguments: Any, limit: float) -> Any:
        if method == "examine":
            self.examined.append(arguments[0])
            if self.mood:
                raise self.mood("as planted")
            return Examined("ok", 10.0 * arguments[0].choice["num_warps"], 0.0)
        answers = {"about": H200, "survey": self.own, "total": self.total, "compiled_late": []}
        return answers.get(method)

    def stop(self) -> None:
        self.stops += 1


OWN = {name: {"BV": 16, "num_warps": 8, "num_stages": 2} for name in ("prepare", "scan", "output")}


def tuned(folder: Path, fake: FakeWorker, monkeypatch: pytest.MonkeyPatch, **wishes: Any) -> tuple[Any, list[Any]]:
    """(report, what was told) of tuning the scan with a worker and compilers that are not there."""
    monkeypatch.setattr(tuner.Tuner, "_worker", lambda self, copy: fake)
    monkeypatch.setattr(tuner, "CompilingPool", FakePool)
    told: list[tuner.Progress] = []
    wish = tuner.Wish(folder, (POINT,), kernels=("scan",), **wishes)
    return tuner.Tuner(wish, Measurements(), told.append).run(), told


class FakePool:
    """Rows as if compiled: 4 warps spill, 3 stages need too much shared memory, 1 stage loses an operand."""

    def __init__(self, *job: Any) -> None:
        self.job = job

    def row(self, candidate: Candidate, point: Point) -> dict[str, Any]:
        choice = candidate.choice
        stages, spilled = choice["num_stages"], 8 * (choice["num_warps"] == 4)
        return row(spill_bytes=spilled, shared_bytes=1000 + 2000 * (stages == 3), miscompiled=stages == 1)

    def submit(self, *task: Any) -> None:
        pass

    drop_waiting = wait_for_first = stop = submit


def test_pruned_candidates_are_never_launched(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWorker(OWN)
    report, told = tuned(copied, fake, monkeypatch)
    assert [str(candidate) for candidate in fake.examined] == ["scan BV=16 num_warps=8 num_stages=2"]
    (line,) = report.rows
    notes = {one["choice"]: one["note"] for one in line.rejected}
    assert len(notes) == 5 and {one["outcome"] for one in line.rejected} == {"unfit"}
    assert "lost an operand" in notes["BV=16 num_warps=8 num_stages=1"]
    assert "shared memory" in notes["BV=16 num_warps=8 num_stages=3"]
    assert "spills 8 bytes" in notes["BV=16 num_warps=4 num_stages=2"]
    assert report.file == copied / "tuned" / "nvidia_h200.json" and line.winner == line.model
    assert [p.done for p in told if p.record] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("mood", "outcome"), [(Hung, "hung"), (Crashed, "crashed"), (Failed, "crashed"), (OutOfResources, "unfit")]
)
def test_without_a_right_candidate_nothing_is_decided(
    copied: Path, monkeypatch: pytest.MonkeyPatch, mood: Any, outcome: str
) -> None:
    report, _ = tuned(copied, fake := FakeWorker(OWN, mood), monkeypatch)
    (line,) = report.rows
    assert line.rejected[0]["outcome"] == outcome and "as planted" in line.rejected[0]["note"]
    assert len(fake.examined) == (2 if outcome == "hung" else 1), "the cost model's own choice gets more time"
    assert line.winner is None and report.file is None and report.totals == [] and not (copied / "tuned").exists()
    assert report.failed and any("no candidate is right" in text for text in report.problems)
    assert fake.stops == 1 + (outcome == "crashed"), "after an exception the GPU may be unusable for that process"


def hung_within(seconds: float) -> Any:
    def hung(text: str) -> Hung:
        error = Hung(text)
        error.limit = seconds
        return error

    return hung


def test_what_hung_is_asked_again_within_a_longer_limit(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the cost model's own choice each time: a busy machine must not exclude what runs untuned."""
    monkeypatch.setattr(tuner, "unfit", lambda row, own: None)
    slow = FakeWorker(OWN, hung_within(2.0))
    report, _ = tuned(copied, slow, monkeypatch, limit=2.0)
    assert {row["outcome"] for row in report.rows[0].rejected} == {"hung"} and report.measured == 6
    assert {record.limit for record in Measurements().records() if record.outcome == "hung"} == {2.0}
    for limit, asked in ((1.0, 1), (2.0, 0), (3.0, 5)):
        report, _ = tuned(copied, again := FakeWorker(OWN), monkeypatch, limit=limit)
        assert report.measured == len(again.examined) == asked, limit
    assert not report.rows[0].rejected and report.file


@pytest.mark.parametrize("rank", [0, 1])
def test_what_took_too_long_to_compile_is_no_verdict(rank: int) -> None:
    """Of others it is stored with its limit; the cost model's own choice is compiled when it is launched."""

    class Slow(FakePool):
        def row(self, candidate: Candidate, point: Point) -> dict[str, Any]:
            return {"failed": "does not compile: no answer within 120 s", "limit": 120.0}

    one = SimpleNamespace(device=H200, compiling=Slow(), _own=lambda task: OWN["scan"])
    task = tuner.Task(rank, POINT, Candidate("chunk", "scan", tuple(OWN["scan"].items())), key(8))
    found = tuner.Tuner._fitness(one, task)  # type: ignore[arg-type]
    assert found is None if rank == 0 else (found.outcome, found.limit) == ("hung", 120.0)


def test_without_a_gpu_tuning_ends_at_once(copied: Path) -> None:
    printed = run(["tune", str(copied), *OPTIONS[:-1]], 3).output
    assert "no GPU is visible to torch" in printed and "--interpreted" in printed
    assert not (copied / "tuned").exists()


def test_a_full_gpu_is_no_verdict(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWorker(OWN, lambda text: Failed(f"torch.OutOfMemoryError: {text}"))
    with pytest.raises(EnvironmentProblem, match="memory is full"):
        tuned(copied, fake, monkeypatch)
    assert not list(Measurements().records())


def test_winners_that_fail_together_are_not_decided(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWorker(OWN)
    fake.total = Examined("racy", note="as planted")
    report, _ = tuned(copied, fake, monkeypatch)
    assert report.failed and report.file is None and report.rows[0].winner is None and report.mean_ratio is None
    assert "chunk at 16x1:1/1 float32: the winners together are racy (as planted)" in report.problems


def test_a_decision_that_is_found_wrong_does_not_stay(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, _ = tuned(copied, FakeWorker(OWN), monkeypatch)
    file, winner = report.file, report.rows[0].winner
    assert file and winner and json.loads(file.read_text())["decisions"]
    shutil.rmtree(knobs.cache_dir() / "measurements")
    report, _ = tuned(copied, FakeWorker(OWN, Failed), monkeypatch)
    assert report.rows[0].winner is None and json.loads(file.read_text())["decisions"] == []


def test_a_spent_budget(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured decides; the rest is left for the next time."""
    report, _ = tuned(copied, FakeWorker(OWN), monkeypatch, budget=-1.0)
    assert (report.measured, report.skipped, report.file) == (0, 6, None)
    assert "the budget is spent: 6 measurements were left out" in report.problems
    report, _ = tuned(copied, FakeWorker(OWN), monkeypatch)
    assert (report.measured, report.skipped) == (6, 0) and report.file


def test_the_decisions_are_what_the_package_reads(copied: Path) -> None:
    digests = kept.kernel_digests({str(p.relative_to(copied)): p.read_text() for p in copied.rglob("*.py")})
    choices = [{"BV": 16, "num_warps": warps, "num_stages": 1} for warps in (1, 2)]
    made = [Decision("scan", 4, heads, choice, 12.345) for heads, choice in zip((8, 64), choices)]
    file = copied / "tuned" / "nvidia_h200.json"
    decisions.write(file, decisions.text("NVIDIA H200", {"triton": "3.6.0"}, digests, made))
    assert [d.choice for d in decisions.read(file, digests)] == choices
    mine = Package(copied, PLAIN)
    gpu = SimpleNamespace(key="sm_90/4", processors=132, gpu="NVIDIA H200")
    assert [mine.tuning.choice("scan", gpu, heads).num_warps for heads in (1, 8, 20, 30, 64, 999)] == [1, 1, 1, 2, 2, 2]
    mine.force({"scan": {"BV": 16, "num_warps": 16, "num_stages": 4}})
    assert mine.tuning.choice("scan", gpu, 8) == mine.tuning.Tuning(16, 16, 4)


def test_decisions_are_merged(tmp_path: Path) -> None:
    old = [Decision("scan", 2, 32, {"BV": 16}, 1.0), Decision("scan", 2, 64, {"BV": 32}, 2.0)]
    new = [Decision("scan", 2, 32, {"BV": 64}, 0.5), Decision("prepare", 2, 32, {"BV": 0}, 3.0)]
    both = decisions.merged(old, new)
    assert [(d.kernel, d.heads, d.choice["BV"]) for d in both] == [
        ("prepare", 32, 0),
        ("scan", 32, 64),
        ("scan", 64, 32),
    ]
    file, digests = tmp_path / "tuned" / "gpu.json", {"scan": "1", "prepare": "2"}
    assert decisions.read(file, digests) == []
    decisions.write(file, decisions.text("gpu", {}, digests, both))
    assert decisions.read(file, digests) == both and not list(file.parent.glob(".*"))
    assert [d.kernel for d in decisions.read(file, {"scan": "1", "prepare": "3"})] == ["scan", "scan"]
    for text in ("", "[]", '{"format": 2}', file.read_text()[:-9], '{"format": 1, "decisions": [{"a": 1}]}'):
        file.write_text(text)
        assert decisions.read(file, digests) == []


# ------------------------------------------------------------------------------------------------ compiling


def test_compiling_without_a_gpu(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes; what one compiled the other finds in Triton's cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(compiling, "cores", lambda: 1)
    copy = Path(shutil.copytree(plain, tmp_path / "copy" / "plain"))
    plan = compile_spec(PLAIN, target_of("sm_90"), ()).plan
    candidate = Candidate("chunk", "scan", (("BV", 16), ("num_warps", 4), ("num_stages", 2)))
    bad = Candidate("chunk", "scan", (("BV", 16), ("num_warps", 3), ("num_stages", 2)))
    found, stored = [], []
    for _ in range(2):
        pool = CompilingPool(copy, plan, H200)
        try:
            found.append(pool.row(candidate, POINT))
            failed = pool.row(bad, POINT)
        finally:
            pool.stop()
        stored.append(sorted(str(path) for path in (tmp_path / "triton").rglob("*.cubin")))
    assert found[0] == found[1] and found[0]["registers"] > 0 and found[0]["shared_limit"] == 227 << 10
    assert stored[0] == stored[1] and len(stored[0]) == 5, "packed, dense, segments in two passes and between"
    assert "does not compile" in str(unfit(failed, found[0]))


class Checked(Compiler):
    """Compiles, then makes the gate's and the timed calls in earnest, but for the launches themselves."""

    def late(self, names: list[str], point: Point) -> tuple[int, list[str]]:
        """(kernels compiled ahead, kernels that calls with tensors of their own still had to compile)."""
        import triton

        made: list[str] = []
        triton.knobs.compilation.listener = lambda *, src, cache_hit, **rest: cache_hit or made.append(src.name)
        timed = space.timed_case(self.job.spec, point.shape)
        own = self.package.survey(names, timed, torch.bfloat16, point.shape.heads)
        plan = compile_spec(self.job.spec, target_of("sm_90"), ()).plan
        for operator in filter(None, map(plan.operator, names)):
            for kernel in operator.kernels:
                self.compiled(Candidate(operator.name, kernel.name, tuple(own[kernel.name].items())), point)
        ahead = len(made)
        self.package.force({})
        os.environ["TRITON_INTERPRET"] = "1"  # so that tensors on the CPU go to the launch code
        with self.package.watched(lambda name, launch: launch.kernel.warmup(
            *launch.arguments, grid=launch.grid, **launch.keywords)):  # fmt: skip
            gated = {n: space.gate_cases(self.job.spec, 16, False, self.package.span * (n == "chunk")) for n in names}
            for name, case in [(n, case) for n in names for case in [*gated[n], timed]]:
                x = calls.inputs(self.job.spec, case, torch.bfloat16, point.shape.heads)
                leaves = [y.requires_grad_(name == "chunk_backward") for y in x.values() if y.is_floating_point()]
                results = self.package.call(name, x, case)
                if name == "chunk_backward":
                    torch.autograd.grad(results, leaves, cotangents_of(results, x["v"].dtype))
        return ahead, made[ahead:]


@pytest.mark.full
@pytest.mark.parametrize("text", ["400x2:2/4", "1x3:2/4"])
def test_calls_find_every_kernel_compiled(text: str, tmp_path: Path) -> None:
    """What is compiled on shapes alone is what calls ask for, tensor descriptors included: two kernels a candidate, and
    two passes of the scan over segments with what comes between."""
    spec, point = Spec(rule="additive", gate="none", beta="none", **SMALL), Point(Shape.parse(text), "bfloat16")
    folder = api.build(spec, tmp_path, name="compiled_ahead")
    plan = compile_spec(spec, target_of("sm_90"), ()).plan
    device = H200._replace(keys={"bfloat16": "sm_90/2"})
    environment = worker.environment() | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    servant = Servant(Checked, compiling.CompilerJob(folder, spec, 16, device), environment, tmp_path / "log")
    names = space.operators_at(plan, point.shape)
    kernels = [kernel for operator in plan.operators if operator.name in names for kernel in operator.kernels]
    try:
        assert servant.ask("late", names, point, limit=500) == (2 * len(kernels) + 3 * ("chunk" in names), [])
    finally:
        servant.stop()


# ------------------------------------------------------------------------------------------------ processes


class Moody:
    """What a servant holds in these tests."""

    def __init__(self, mood: str) -> None:
        if mood == "bad":
            raise ValueError("not today")

    def add(self, a: int, b: int) -> int:
        return a + b

    def sleep(self) -> None:
        time.sleep(600)

    def leave(self) -> None:
        print("goodbye", file=sys.stderr, flush=True)
        os._exit(7)


def test_a_servant_is_started_anew(tmp_path: Path) -> None:
    servant = Servant(Moody, "good", {}, tmp_path / "log")
    try:
        assert servant.ask("add", 1, 2, limit=60) == 3
        with pytest.raises(Failed, match="TypeError"):
            servant.ask("add", 1, limit=60)
        with pytest.raises(Hung, match=r"no answer within 0\.2 s"):
            servant.ask("sleep", limit=0.2)
        with pytest.raises(Crashed, match="exit code 7: goodbye"):
            servant.ask("leave", limit=60)
        assert servant.starts == 2, "an exception costs no process"
    finally:
        servant.stop()
    with pytest.raises(EnvironmentProblem, match="not today"):
        Servant(Moody, "bad", {}, tmp_path / "log").start()


# ------------------------------------------------------------------------------------------------ the space


def test_shapes() -> None:
    shape = Shape.parse("8192x4:16/32", Spec())
    assert (shape, str(shape), shape.bucket, shape.heads) == ((8192, 4, 16, 32), "8192x4:16/32", 128, (16, 32))
    for text in ("8192", "8192x1:16", "0x1:1/1", "8x1:1/0"):
        with pytest.raises(ArgumentError, match="8192x1:16/32"):
            Shape.parse(text, Spec())
    for text in ("8x1:2/3", "8x1:2/1"):
        with pytest.raises(ArgumentError, match="must be a multiple of"):
            Shape.parse(text, Spec())
    assert Shape.parse("8x1:2/8", Spec(head_ratio=4)).heads == (2, 8)
    with pytest.raises(ArgumentError, match="shapes: got '8x1:2/4', but value heads must be 4 times"):
        Shape.parse("8x1:2/4", Spec(head_ratio=4))


@pytest.mark.parametrize(
    "spec", [Spec(qk_norm=True), Spec(gate="key"), Spec(state_v_first=True, value_dim=64)], ids=str
)
def test_candidates(spec: Spec) -> None:
    plan = compile_spec(spec, target_of("sm_90"), ()).plan
    files = package.render(plan, spec.name)
    for kernel in (kernel for operator in plan.operators for kernel in operator.kernels):
        own = dict(dict(kernel.tuning)["sm_90/2"])
        source = files[f"kernels/{kernel.name}.py"]
        quick, full = (space.candidates(kernel, source, plan, own, effort) for effort in ("quick", "full"))
        for found in (quick, full):
            assert found[0] == own and all(set(choice) == set(own) for choice in found)
            assert len({tuple(choice.items()) for choice in found}) == len(found)
        assert len(quick) <= space.QUICK and all(choice in full for choice in quick)
        assert len(quick) >= min(2, len(full))
        tiles = {choice["BV"] for choice in full}
        assert tiles == {own["BV"]} or (max(tiles) == spec.value_dim and min(tiles) in (8, 16))
        if kernel.has_decayed_products:
            assert {choice["num_warps"] for choice in full} == {own["num_warps"]}
    more = space.candidates(kernel, source, plan, own | {"unknown": 5}, "full")
    assert all(choice["unknown"] == 5 for choice in more), "a field that is not known keeps its value"


def test_tiles_are_widened_with_their_warps() -> None:
    """A scan of many heads is fastest with all of v in one tile: 818 us in place of 943 with 256 heads on an H200."""
    plan = compile_spec(Spec(qk_norm=True), target_of("sm_90"), ()).plan
    scan = next(kernel for operator in plan.operators for kernel in operator.kernels if kernel.name == "scan")
    own = dict(dict(scan.tuning)["sm_90/2"])
    quick = space.candidates(scan, package.render(plan, "x")["kernels/scan.py"], plan, own, "quick")
    assert own | {"BV": 128, "num_warps": 8} in quick, (own, quick)


def test_default_points() -> None:
    from gdngen.commands.tune import _points

    def shapes(*arguments: Any) -> list[str]:
        return [str(point.shape) for point in _points(*arguments)]

    assert shapes(None, ("bfloat16",), Spec(), None) == ["8192x1:16/32", "1x32:16/32"]
    assert shapes(None, ("bfloat16",), Spec(qk_norm=True), "qwen3.5-397b") == ["8192x1:16/64", "1x32:16/64"]
    assert "8192x1:16/48" in shapes(None, ("bfloat16",), Spec(qk_norm=True), None)
    assert [str(p) for p in _points(("9x1:1/1",), ("bfloat16", "float32"), Spec(), None)] == [
        "9x1:1/1 bfloat16",
        "9x1:1/1 float32",
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ("tune {path} --chunk 16", 2, "a package with a Spec of its own"),
        (
            "tune {path} --kernels nothing --interpreted",
            2,
            "--kernels: {path} has no kernel nothing; it has prepare, ",
        ),
        ("tune {path} --shapes 8", 2, "gdngen: --shapes: got '8', expected LENGTHxSEQUENCES"),
        ("tune {path} --dtypes int8", 2, "'int8' is not one of bfloat16, "),
        ("tune {path} --dtypes float16", 2, "serve float32 too"),
        ("tune {path} --target sm_80", 2, "give PATH, or a preset or Spec"),
        ("tune {path}/kernels", 1, "is not a gdngen package"),
        ("tune {path} --limit 0", 2, "not in the range x>0"),
        ("tune {path} --limit nan", 2, "nan is not a finite number of seconds"),
        ("tune {path} --budget nan", 2, "nan is not a finite number of seconds"),
        ("bench {path} --budget -1", 2, "not in the range x>=0"),
    ],
)
def test_mistakes_are_said(plain: Path, arguments: str, code: int, text: str) -> None:
    assert text.format(path=plain) in run(arguments.format(path=plain).split(), code).output


def test_a_package_of_another_compiler(copied: Path) -> None:
    manifest = json.loads((copied / "manifest.json").read_text())
    (copied / "manifest.json").write_text(json.dumps(manifest | {"plan_digest": "0"}))
    assert "build it again: gdngen build" in run(["tune", str(copied), "--interpreted"], 1).output


def test_the_view_of_a_terminal() -> None:
    """A table that keeps the cost model's time and the best, and a bar."""
    from rich.console import Console

    from gdngen.commands.tune import _display, _View

    view, console = _View(), Console(width=150, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    for rank, (outcome, taken) in enumerate([("ok", 20.0), ("ok", 10.0), ("wrong", None)]):
        candidate = Candidate("chunk", "scan", (("num_warps", 4 + rank),))
        record = Record(key=key(4 + rank), outcome=outcome, microseconds=taken)
        view.add(tuner.Progress(rank + 1, 7, "", tuner.Task(rank, POINT, candidate, record.key), record))
    view.add(tuner.Progress(3, 7, "waiting"))
    console.print(view.drawn())
    drawn = console.export_text()
    assert all(text in drawn for text in ("waiting", "3/7", "20.0", "10.0", "num_warps=5", "16x1:1/1 float32"))
    with _display(False) as tell:
        assert not isinstance(tell, type(view.add)), "this is no terminal"


def test_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from gdngen.commands.tune import _display

    monkeypatch.setitem(sys.modules, "rich.console", None)
    with _display(True) as tell:
        tell(tuner.Progress(0, 6, "6 measurements"))
    assert capsys.readouterr() == ("", "6 measurements\n")


def test_cores() -> None:
    assert 1 <= worker.cores() <= (os.cpu_count() or 1)
