"""The store of measurements: what it keeps, who waits for whom, and what happens when a disk or a record is bad."""

import errno
import json
import multiprocessing
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from gdngen.autotune import store
from gdngen.autotune.store import Fault, Key, Measurements, Record, read_record
from gdngen.cli import main

SPAWN = multiprocessing.get_context("spawn")
pytestmark = pytest.mark.filterwarnings("error::gdngen.errors.GdngenWarning")


def key(**changes: Any) -> Key:
    given = {
        "kernel": "scan",
        "body": "0123456789abcdef",
        "configuration": {"BV": 64, "num_warps": 4, "num_stages": 3},
        "shape": {"heads": 64, "bytes": 2, "gates": "fp32"},
        "gpu": "NVIDIA H200",
        "versions": {"triton": "3.6.0", "torch": "2.11.0+cu130"},
    }
    return Key(**given | changes)


def record(microseconds: float = 810.2, **changes: Any) -> Record:
    return Record(key=key(**changes), outcome="ok", microseconds=microseconds, spread=0.01)


@contextmanager
def one_warning(*texts: str) -> Iterator[None]:
    """Exactly one warning, which has all of the texts."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    (said,) = [str(warning.message) for warning in caught]
    assert all(text in said for text in texts), said


@pytest.fixture
def held(tmp_path: Path) -> Measurements:
    return Measurements(tmp_path / "measurements")


# ------------------------------------------------------------------------------------------------ keys and records


def test_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDNGEN_CACHE_DIR", str(tmp_path))
    assert Measurements().root == tmp_path / "measurements"


def test_a_digest_depends_on_every_field_and_no_order() -> None:
    other = key(configuration={"num_stages": 3, "num_warps": 4, "BV": 64})
    assert other.digest == key().digest and other == key()
    changed = [
        key(kernel="carry"),
        key(body="1" * 16),
        key(configuration={"BV": 32, "num_warps": 4, "num_stages": 3}),
        key(shape={"heads": 64, "bytes": "2", "gates": "fp32"}),
        key(gpu="NVIDIA B200"),
        key(versions={"triton": "3.6.1", "torch": "2.11.0+cu130"}),
    ]
    assert len({one.digest for one in [*changed, key()]}) == 7


def test_what_is_put_is_got(held: Measurements) -> None:
    assert held.get(key()) is None
    held.put(record())
    assert held.get(key()) == record() and held.get(key(gpu="NVIDIA B200")) is None
    held.put(record(700.0))
    assert Measurements(held.root).get(key()) == record(700.0)
    assert [path.name for path in held.root.glob("*") if path.is_file()] == [f"{key().digest}.json"]


def test_a_rejected_candidate_is_kept_too(held: Measurements) -> None:
    wrong = Record(key=key(), outcome="wrong", note="o is off by 3e-02")
    assert held.measured(key(), lambda: wrong) == wrong == held.measured(key(), lambda: pytest.fail("again"))


def test_records_are_strict() -> None:
    for changes in ({"outcome": "fine"}, {"microseconds": None}, {"microseconds": float("nan")}, {"spread": -1.0}):
        with pytest.raises(ValueError):
            Record(**{"key": key(), "outcome": "ok", "microseconds": 1.0} | changes)


# ------------------------------------------------------------------------------------------------ many processes


def note(file: Path) -> None:
    with open(file, "a") as log:
        log.write(f"{os.getpid()}\n")


def measure_once(root: Path, log: Path, start: Any) -> None:
    def measure() -> Record:
        note(log)
        time.sleep(0.3)
        return record(float(os.getpid()))

    start.wait()
    found = Measurements(root).measured(key(), measure)
    (root / f"{os.getpid()}.seen").write_text(str(found.microseconds))


def measure_forever(root: Path, log: Path) -> None:
    def measure() -> Record:
        note(log)
        time.sleep(60)
        raise AssertionError("it was not killed")

    Measurements(root).measured(key(), measure)


@pytest.mark.parametrize("before", ["", "{"])
def test_eight_processes_measure_once(before: str, held: Measurements, tmp_path: Path) -> None:
    """Also when they find a broken record: one moves it out of the way and measures."""
    held.root.mkdir()
    if before:
        held.path(key().digest).write_text(before)
    log, start = tmp_path / "log", SPAWN.Barrier(8)
    workers = [SPAWN.Process(target=measure_once, args=(held.root, log, start)) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0] * 8
    (measurer,) = log.read_text().split()
    assert {path.read_text() for path in held.root.glob("*.seen")} == {str(float(measurer))}
    assert len(list(held.root.glob("*.seen"))) == 8


def test_a_process_killed_while_it_measures(held: Measurements, tmp_path: Path) -> None:
    log = tmp_path / "log"
    victim = SPAWN.Process(target=measure_forever, args=(held.root, log))
    victim.start()
    while not log.exists():
        assert victim.is_alive()
        time.sleep(0.01)
    assert victim.pid
    os.kill(victim.pid, signal.SIGKILL)
    victim.join(10)
    assert not list(held.root.glob("*.*"))
    assert held.measured(key(), lambda: record(1.0)) == record(1.0) == held.get(key())


def fill_the_disk(root: Path, result: Any) -> None:
    """Files may not grow beyond 100 bytes: the record is cut off in the middle of its write."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    with one_warning("measurements cannot be read or stored", "GDNGEN_CACHE_DIR"):
        Measurements(root).put(record())
    result.put((Measurements(root).get(key()) == record(), [path.name for path in root.glob("*") if path.is_file()]))


def test_a_write_that_is_cut_off(held: Measurements) -> None:
    result = SPAWN.Queue()
    worker = SPAWN.Process(target=fill_the_disk, args=(held.root, result))
    worker.start()
    worker.join(30)
    assert worker.exitcode == 0 and result.get(timeout=5) == (True, []) and held.get(key()) is None


def test_a_measurement_that_fails_is_tried_again(held: Measurements) -> None:
    def fail() -> Record:
        raise RuntimeError("no GPU")

    with pytest.raises(RuntimeError, match="no GPU"):
        held.measured(key(), fail)
    assert held.get(key()) is None and held.measured(key(), record) == record()
    with pytest.raises(ValueError, match="is of another key"):
        held.measured(key(gpu="NVIDIA B200"), record)


# ------------------------------------------------------------------------------------------------ bad records


def altered(change: Callable[[dict[str, Any]], object]) -> str:
    raw = record().model_dump()
    change(raw)
    return json.dumps(raw)


WHOLE = record().model_dump_json(indent=1)
BAD = {
    "truncated": (WHOLE[: len(WHOLE) // 2], "cut short or not JSON"),
    "empty": ("", "cut short or not JSON"),
    "not an object": ("[1]", "its format is None, this gdngen reads 1"),
    "of the future": (
        altered(lambda raw: raw.update(format=2)),
        "a newer gdngen wrote it (format 2, this one reads 1)",
    ),
    "unknown field": (altered(lambda raw: raw.update(joules=3)), "fields that this gdngen does not know (joules)"),
    "unknown field of the key": (altered(lambda raw: raw["key"].update(clock=3)), "does not know (key.clock)"),
    "wrong type": (altered(lambda raw: raw.update(microseconds="1")), "microseconds: Input should be a valid number"),
    "another key": (record(kernel="carry").model_dump_json(), f"its key belongs to {key(kernel='carry').digest}.json"),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_record_is_quarantined_and_measured_again(fault: str, held: Measurements) -> None:
    text, why = BAD[fault]
    held.root.mkdir()
    held.path(key().digest).write_text(text)
    with one_warning(why, "moved to", "quarantine", "scan is measured again"):
        assert held.get(key()) is None
    assert (held.root / "quarantine" / f"{key().digest}.json").read_text() == text
    assert held.measured(key(), record) == record() == held.get(key())


def test_a_bad_record_that_cannot_be_moved_is_ignored(held: Measurements) -> None:
    held.root.mkdir()
    held.path(key().digest).write_text("{")
    (held.root / "quarantine").write_text("a file in its way")
    with one_warning("ignored (it cannot be moved to"):
        assert held.measured(key(), record) == record()
    assert Measurements(held.root).get(key()) == record()


def test_a_listing_leaves_bad_records_alone(held: Measurements) -> None:
    held.put(record())
    held.path("0" * 32).write_text("{")
    with one_warning("not used: it is cut short", store.CLEAR):
        assert list(held.records()) == [record()]
    assert held.path("0" * 32).exists() and list(held.records()) == [record()]


# ------------------------------------------------------------------------------------------------ bad folders


def in_memory_only(held: Measurements) -> None:
    """One warning in all, and the record lasts for the process."""
    calls = []
    with one_warning(f"measurements cannot be read or stored in {held.root}", "GDNGEN_CACHE_DIR"):
        for _ in range(3):
            held.measured(key(), lambda: calls.append(1) or record())
        held.put(record(5.0, kernel="carry"))
    assert len(calls) == 1 and Measurements(held.root).get(key()) == record()
    assert set(held.records()) == {record(), record(5.0, kernel="carry")}


def test_something_else_stands_where_the_folder_should(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    in_memory_only(Measurements(tmp_path / "home" / "measurements"))


def live_read_only(root: Path, result: Any) -> None:
    if not os.geteuid():
        os.setuid(65534)  # root may write everywhere
    in_memory_only(Measurements(root))
    result.put(os.access(root, os.W_OK))


@pytest.mark.parametrize("created", [True, False])
def test_a_read_only_home(created: bool) -> None:
    with tempfile.TemporaryDirectory() as home:
        root = Path(home) / "measurements"
        if created:
            root.mkdir(mode=0o555)
        Path(home).chmod(0o555)
        result = SPAWN.Queue()
        worker = SPAWN.Process(target=live_read_only, args=(root, result))
        worker.start()
        worker.join(30)
        assert worker.exitcode == 0 and result.get(timeout=5) is False
        assert not created or not list(root.iterdir())
        Path(home).chmod(0o700)


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_full_disk(name: str, held: Measurements, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(store.os, name, full)
        in_memory_only(held)
    assert not [path for path in held.root.glob("*") if path.is_file()]
    held.put(record(2.0))
    assert read_record(held.path(key().digest).read_text()) == record(2.0) == held.get(key())


# ------------------------------------------------------------------------------------------------ explained, moved


def explained(held: Measurements, asked: Key) -> str:
    return "\n".join(held.explain_miss(asked.fields(), whole=True))


def test_explained(held: Measurements) -> None:
    assert explained(held, key()) == f"miss: {held.root} holds no measurements"
    held.put(record())
    held.put(record(kernel="carry"))
    held.put(record(versions={"triton": "3.5.1", "torch": "2.9.0"}, gpu="NVIDIA B200"))
    assert held.get(key()) == record()
    asked = key(configuration={"BV": 64, "num_warps": 8}, versions={"triton": "3.6.1", "torch": "2.11.0+cu130"})
    assert explained(held, asked).splitlines() == [
        f"miss; the nearest record is {key().digest}, ok 810.2 us",
        "  configuration.num_warps: wanted 8, stored 4 (another configuration)",
        "  versions.triton: wanted 3.6.1, stored 3.6.0 (another version)",
        "  configuration.num_stages: wanted nothing, stored 3 (another configuration)",
    ]
    assert "body: wanted " + "f" * 16 in explained(held, key(body="f" * 16))


def test_clear(held: Measurements) -> None:
    for change in ({}, {"kernel": "carry"}, {"gpu": "NVIDIA B200"}):
        held.put(record(**change))
    assert held.clear({"kernel": "scan", "gpu": "NVIDIA H200"}) == 1
    assert {one.key.kernel for one in held.records()} == {"scan", "carry"}
    (held.root / ".left.part").write_text("by a killed process")
    held.path("0" * 32).write_text("no record")
    assert held.clear() == 4 and not list(held.root.glob("*.*")) and held.clear() == 0


def test_export_and_import(held: Measurements, tmp_path: Path) -> None:
    for kernel in ("scan", "carry", "local"):
        held.put(record(kernel=kernel))
    file, other = tmp_path / "all.jsonl", Measurements(tmp_path / "other")
    assert held.export_to(file) == 3 and len(file.read_text().splitlines()) == 3
    other.put(record(5.0, kernel="carry"))
    with open(file, "a") as lines:
        lines.write("\n{\n" + altered(lambda raw: raw.update(format=9)) + "\n")
    counts = other.import_from(file)
    assert (counts.taken, counts.known) == (2, 0) and other.get(key(kernel="carry")) == record(5.0, kernel="carry")
    reasons = dict(counts.refused)
    assert len(reasons) == 3 and "cut short" in reasons[5] and "format 9" in reasons[6]
    assert any("another record here, which stays (ok 5.0 us; the line says ok 810.2 us)" in r for r in reasons.values())
    assert other.import_from(file)[:2] == (0, 2)
    (again,) = [one for one in other.records() if one.key == key()]
    assert again == record()


@pytest.mark.parametrize("fault", sorted(set(BAD) - {"another key"}))
def test_faults_of_a_text(fault: str) -> None:
    with pytest.raises(Fault) as raised:
        read_record(BAD[fault][0])
    assert BAD[fault][1] in str(raised.value)


def test_a_file_system_without_locks(held: Measurements, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*arguments: object, **options: object) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(store.FileLock, "acquire", no_locks)
    with one_warning("does not appear to support flock"):
        assert held.measured(key(), record) == record()
    assert held.get(key()) == record()


# ------------------------------------------------------------------------------------------------ gdngen cache


def run(*arguments: str, exit_code: int = 0, given: str | None = None) -> str:
    result = CliRunner().invoke(main, ["cache", *arguments], input=given)
    assert result.exit_code == exit_code, (result.output, result.exception)
    return result.output


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measurements:
    """Three measurements in the cache folder of the command line, and a package."""
    monkeypatch.setenv("GDNGEN_CACHE_DIR", str(tmp_path))
    (tmp_path / "packages" / "0" / "name").mkdir(parents=True)
    (tmp_path / "packages" / "0" / "name" / "manifest.json").write_text("{}")
    held = Measurements()
    held.put(record())
    held.put(record(640.0, configuration={"BV": 32, "num_warps": 4, "num_stages": 3}))
    held.put(Record(key=key(kernel="carry", gpu="NVIDIA B200"), outcome="racy", note="bits differ at 8 warps"))
    return held


def test_ls(here: Measurements) -> None:
    rows = json.loads(run("ls", "--json"))
    assert [row["kind"] for row in rows] == ["package", "measurements", "measurements"]
    assert rows[1] == {"kind": "measurements", "gpu": "NVIDIA B200", "kernel": "carry", "ok": 0, "rejected": 1}
    assert (rows[2]["gpu"], rows[2]["kernel"], rows[2]["ok"], rows[2]["rejected"]) == ("NVIDIA H200", "scan", 2, 0)
    printed = run("ls")
    assert "1 packages in" in printed and f"3 measurements in {here.root}" in printed
    assert "NVIDIA H200  scan   2 ok  0 rejected" in printed


def test_a_bad_record_is_one_line_on_the_command_line(here: Measurements) -> None:
    here.path(key().digest).write_text("{")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        result = CliRunner().invoke(main, ["cache", "ls", "--json"])
    assert json.loads(result.stdout)[2]["ok"] == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"gdngen: {here.path(key().digest)}: not used: it is cut short")


def test_explain(here: Measurements) -> None:
    printed = run("explain", "--kernel", "scan")
    assert "BV=32, num_warps=4" in printed and "ok 640.0 us" in printed and "2 measurements have" in printed
    assert "racy (bits differ at 8 warps)" in run("explain", "--gpu", "NVIDIA B200")
    asked = ["--kernel", "scan", "--field", "configuration.BV=16", "--field", "versions.triton=3.6.0"]
    printed = run("explain", *asked)
    assert printed.startswith("miss; the nearest record is ")
    assert printed.splitlines()[1].startswith("  configuration.BV: wanted 16, stored ") and printed.count("\n") == 2
    found = json.loads(run("explain", *asked, "--json"))
    assert found["matching"] == [] and found["nearest"]["key"]["kernel"] == "scan"
    assert found["differences"]["configuration.BV"]["wanted"] == 16
    assert len(json.loads(run("explain", "--field", "shape.heads=64", "--json"))["matching"]) == 3
    for wrong in ("BV=64", "configuration=64", "gpu.x=1", "kernel"):
        assert f"--field {wrong}: expected NAME=VALUE" in run("explain", "--field", wrong, exit_code=2)


def test_explain_here(here: Measurements, monkeypatch: pytest.MonkeyPatch) -> None:
    from gdngen import doctor

    report = {"versions": {"triton": "3.6.0", "torch": "2.12.0"}, "gpus": [{"name": "NVIDIA H200"}]}
    monkeypatch.setattr(doctor, "report", lambda: report)
    lines = run("explain", "--here", "--kernel", "scan").splitlines()
    assert lines[1:] == ["  versions.torch: wanted 2.12.0, stored 2.11.0+cu130 (another version)"]


def test_clear_asks(here: Measurements, tmp_path: Path) -> None:
    package = tmp_path / "packages" / "0" / "name"
    asked = run("clear", given="n\n")
    assert "Remove 1 packages and 3 measurements from" in asked and asked.endswith("nothing is removed\n")
    assert "nobody answers (standard input has ended): give --yes" in run("clear", exit_code=2, given="")
    assert package.exists() and len(list(here.records())) == 3
    assert "removed 0 packages and 1 measurements" in run("clear", "--kernel", "carry", given="y\n")
    assert "leave out --packages" in run("clear", "--kernel", "scan", "--packages", exit_code=2)
    assert "removed 0 packages and 2 measurements" in run("clear", "--measurements", "--yes")
    here.put(record())
    assert "removed 1 packages and 0 measurements" in run("clear", "--packages", "--yes") and not package.exists()
    assert "removed 0 packages and 1 measurements" in run("clear", "--yes") and not list(here.records())


def test_an_interrupted_question_is_no_failed_check(here: Measurements, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(click.termui, "visible_prompt_func", interrupted)
    with pytest.raises(SystemExit) as end:
        main(["cache", "clear"])
    assert end.value.code == 130 and len(list(here.records())) == 3


def test_export_and_import_commands(here: Measurements, tmp_path: Path) -> None:
    file = str(tmp_path / "all.jsonl")
    assert "3 measurements written to" in run("export", file)
    assert "exists: name another file or give --force" in run("export", file, exit_code=2)
    run("export", file, "--force")
    here.clear({"kernel": "carry"})
    assert "1 measurements taken, 2 known, 0 refused" in run("import", file)
    with open(file, "a") as lines:
        lines.write("{}\n")
    assert f"{file}:4: refused: its format is None" in run("import", file, exit_code=1)
    counts = json.loads(run("import", file, "--json", exit_code=1))
    assert counts["known"] == 3 and counts["refused"][0]["line"] == 4
