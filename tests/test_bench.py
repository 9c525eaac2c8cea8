"""gdngen bench on the CPU: what is timed, what peers can and cannot do, what a wrong result does, files."""

import csv
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support import pytorch_version

from gdngen import oracle, package
from gdngen.autotune import clock
from gdngen.cli import main
from gdngen.commands import comparison
from gdngen.commands.comparison import Peer

SMALL = "--key-dim 8 --value-dim 8 --chunk 16"
SHAPES = ["--shapes", "20x2:1/2 1x3:1/2"]
DISTRIBUTION = "pytest"  # one that is installed


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    with pytorch_version():
        yield


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("small")
    result = CliRunner().invoke(main, ["build", *SMALL.split(), "--name", "small", "--out", str(out)])
    assert not result.exit_code
    return out / "small"


def run(*arguments: object, exit_code: int = 0) -> str:
    result = CliRunner().invoke(main, ["bench", *map(str, arguments)])
    assert result.exit_code == exit_code, (result.output, result.exception)
    return result.output


def read(*arguments: object, exit_code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*arguments, "--json", exit_code=exit_code))
    return found


def timed(found: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["operation"], row["side"]): row for row in found["rows"] if "ms" in row}


# ------------------------------------------------------------------------------------------------ the command


def test_rows_and_environment(small: Path) -> None:
    found = read(small, *SHAPES)
    rows = timed(found)
    assert list(rows) == [("forward", "gdngen"), ("training", "gdngen"), ("decode", "gdngen")]
    assert {row["shape"] for (name, _), row in rows.items() if name != "decode"} == {"20x2:1/2"}
    assert rows["decode", "gdngen"]["shape"] == "1x3:1/2"
    for row in rows.values():
        assert row["ms"] > 0 and row["spread"] >= 0 and row["first_s"] > 0 and row["how"] == "host"
        assert 0 < row["error"] <= row["budget"] and row["times_ours"] == 1
    told = found["environment"]
    assert told["measured"] == "CPU times of the PyTorch version: they say nothing about kernels"
    assert (told["GPU"], told["package"], told["dtype"]) == ("none", "small", "fp32")
    assert told["torch"] == torch.__version__ and found["failures"] == []


def test_lines() -> None:
    printed = run(*SMALL.split(), "--shapes", "20x1:1/2 9x1:1/2", "--only", "forward")
    assert "measured      CPU times of the PyTorch version" in printed and "training  " not in printed
    assert "forward   20x1:1/2          gdngen  " in printed and "forward   9x1:1/2           gdngen  " in printed
    if comparison.PEERS[0].version is None:
        assert printed.count("not installed: pip install fla-core") == 1


def test_kernels_in_the_interpreter(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = read(small, "--shapes", "1x1:1/1")
    assert found["environment"]["measured"].startswith("CPU times of Triton's interpreter")
    assert timed(found)["decode", "gdngen"]["error"] < 5e-4
    assert sys.modules["gdngen_bench_small"].LAUNCHES.total() > 0


MEMBERS = [
    ("--preset mamba2-2.7b --dtype bf16", "33x1:1/2 1x2:1/2", 3),
    (f"{SMALL} --rule additive --gate none --beta none --normalize --feature-map elu1", "20x2:1/1", 2),
    (f"{SMALL} --gate key --fused-gate bounded --beta-logits --state-v-first --no-varlen", "20x2:1/1", 2),
    (f"{SMALL} --beta value", "20x2:1/1 1x2:1/1", 1),
    (f"{SMALL} --no-backward --head-ratio 2", "20x2:2/4", 1),
]


@pytest.mark.parametrize(("options", "shapes", "count"), MEMBERS)
def test_members(options: str, shapes: str, count: int) -> None:
    assert len(timed(read(*options.split(), "--shapes", shapes))) == count


def test_what_a_package_does_not_have_is_said() -> None:
    assert "the package has no operator for training" in run(*SMALL.split(), "--no-backward", "--shapes", "5x1:1/1")


def test_budget(small: Path) -> None:
    rows = read(small, *SHAPES, "--budget", "0")["rows"]
    assert [row["missing"] for row in rows] == ["--budget 0 s is spent"] * 3


def test_a_wrong_result_fails(small: Path, tmp_path: Path) -> None:
    texts = {str(path.relative_to(small)): path.read_text() for path in small.rglob("*.*") if path.is_file()}
    texts = {name: text for name, text in texts.items() if "__pycache__" not in name}
    old, new = '    """One chunk', '    scale = 1.001 * scale\n    """One chunk'
    assert old in texts["reference.py"]
    package.write(texts | {"reference.py": texts["reference.py"].replace(old, new)}, tmp_path / "wrong")
    found = read(tmp_path / "wrong", "--shapes", "20x1:1/1", exit_code=1)
    assert found["failures"][0] == "FAILED: forward 20x1:1/1 is off by 1.0e-03"


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ("--shapes 20x1", 2, "--shapes: got '20x1', expected LENGTHxSEQUENCES:Q_HEADS/V_HEADS, such as 8192x1:16/32"),
        ("--shapes 20x0:1/1", 2, "--shapes: got '20x0:1/1', expected"),
        ("--shapes 20x1:2/3", 2, "value heads must be a multiple of the query/key heads"),
        ("--head-ratio 4 --shapes 20x1:2/4", 2, "value heads must be 4 times the query/key heads"),
        ("--csv /nowhere/rows.csv", 2, "/nowhere/rows.csv: there is no folder /nowhere"),
        (f"{Path(__file__).parent}", 1, "is not a gdngen package"),
        (f"{Path(__file__).parent} --gate key", 2, "leaves nothing for gate: give one of them"),
        (f"{Path(__file__).parent} --preset deltanet", 2, "leaves nothing for preset: give one of them"),
    ],
)
def test_mistakes(arguments: str, code: int, text: str) -> None:
    assert text in run(*arguments.split(), exit_code=code)


def test_csv(small: Path, tmp_path: Path) -> None:
    run(small, *SHAPES, "--only", "decode", "--csv", tmp_path / "rows.csv")
    with open(tmp_path / "rows.csv", newline="") as lines:
        row = next(csv.DictReader(lines))
    assert (row["operation"], row["side"], row["shape"], row["GPU"]) == ("decode", "gdngen", "1x3:1/2", "none")
    assert float(row["ms"]) > 0 and row["torch"] == torch.__version__


def test_plot_needs_the_extra(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name != "matplotlib" and find(name, *rest))
    printed = run(small, *SHAPES, "--plot", tmp_path / "times.png", exit_code=3)
    assert printed == "gdngen: matplotlib is missing and --plot needs it: pip install 'gdngen[bench]'\n"


def test_plot(small: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run(small, *SHAPES, "--only", "decode", "--plot", tmp_path / "times.png")
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")


# ------------------------------------------------------------------------------------------------ peers


def peer_rows(
    monkeypatch: pytest.MonkeyPatch, small: Path, function: Callable[..., Any], *arguments: object, **unnamed: Any
) -> list[dict[str, Any]]:
    """The rows of a peer that has one operator, chunk_gated_delta_rule."""
    home = ModuleType("a_peer")
    home.chunk_gated_delta_rule = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_peer", home)
    peer = Peer(DISTRIBUTION, {"gated_delta_rule": "a_peer"}, unnamed)
    monkeypatch.setattr(comparison, "PEERS", (peer,))
    found = read(*(arguments or [small]), "--shapes", "20x1:1/1", "--only", "forward", "--only", "training")
    assert found["environment"][DISTRIBUTION] == peer.version
    return [row for row in found["rows"] if row["side"] == DISTRIBUTION]


def recurrence(q, k, v, g, beta, initial_state=None, output_final_state=False, cu_seqlens=None, factor=1.0):  # type: ignore[no-untyped-def]
    o, state = oracle.recurrence(q, k, v, g=g, beta=beta, h0=initial_state)
    return factor * o.float(), state.float()


def test_a_peer_is_timed_and_checked(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, training = peer_rows(monkeypatch, small, recurrence)
    for row in (forward, training):
        assert row["ms"] > 0 and row["times_ours"] > 0 and row["error"] < 1e-6


def test_nothing_is_a_number(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(q, k, v, g, beta, initial_state, output_final_state, cu_seqlens=None):  # type: ignore[no-untyped-def]
        return recurrence(q, k, v, g, beta, initial_state, factor=float("nan"))

    forward, training = peer_rows(monkeypatch, small, lost)
    assert forward["error"] == training["error"] > 1e300


def test_the_error_of_a_peer_is_shown(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def off(q, k, v, g, beta, initial_state, output_final_state, cu_seqlens=None):  # type: ignore[no-untyped-def]
        return recurrence(q, k, v, g, beta, initial_state, factor=1.01)

    forward, _ = peer_rows(monkeypatch, small, off)
    assert forward["error"] == pytest.approx(0.01, rel=1e-2)  # and no exit code of ours


def test_a_peer_that_fails_costs_its_row_alone(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(q, k, v, g, beta, initial_state, output_final_state, cu_seqlens=None):  # type: ignore[no-untyped-def]
        raise RuntimeError("out of registers\nat length")

    forward, training = peer_rows(monkeypatch, small, fail)
    assert forward["missing"] == training["missing"] == "failed: RuntimeError: out of registers"


def test_an_option_that_a_peer_lacks(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = [*SMALL.split(), "--fused-gate", "softplus"]
    forward, _ = peer_rows(monkeypatch, small, recurrence, *fused)
    assert forward["missing"] == "chunk_gated_delta_rule has no A_log, dt_bias, use_gate_in_kernel"


def test_options_behind_keywords(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fused(q, k, v, g, beta, initial_state, output_final_state, cu_seqlens=None, **rest):  # type: ignore[no-untyped-def]
        assert set(rest) == {"use_gate_in_kernel", "A_log", "dt_bias"}
        return recurrence(q, k, v, oracle.gate(g, rest["A_log"], rest["dt_bias"]), beta, initial_state)

    behind = {"chunk_gated_delta_rule": ("use_gate_in_kernel", "A_log", "dt_bias")}
    forward, training = peer_rows(monkeypatch, small, fused, *SMALL.split(), "--fused-gate", "softplus", **behind)
    assert forward["error"] < 1e-6 and training["error"] < 1e-5


def test_a_member_that_a_peer_lacks(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, _ = peer_rows(monkeypatch, small, recurrence, *SMALL.split(), "--gate", "key")
    assert forward["missing"] == "has no chunk_kda"


# ------------------------------------------------------------------------------------------------ shapes, clock


@pytest.mark.parametrize("text", comparison.FORMS)
def test_every_operation_needs_a_form(text: str) -> None:
    assert comparison.NEEDS[text].startswith(comparison.FORMS[text])


def test_clock_without_a_gpu() -> None:
    calls = []
    found = clock.timed([lambda: calls.append(time.sleep(0.002))], least_ms=30)
    assert 2 <= found.milliseconds < 20 and found.spread >= 0 and found.how == "host" and len(calls) >= 12
    assert clock.copies_for_cold_cache(1) == 1 and clock.cold_s(lambda: time.sleep(0.01)) >= 0.01


def test_long_calls_are_taken_three_times() -> None:
    calls = []
    clock.timed([lambda: calls.append(time.sleep(0.02))], least_ms=1)
    assert len(calls) == 2 + 3


@pytest.mark.parametrize("how", ["graph", "events"])
def test_clock_of_a_gpu(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of a GPU on a machine without one: a replay is all rounds; where capture fails, events time them."""

    class Graph:
        def replay(self) -> None:
            replays.append(1)

    def capture(calls: Any, rounds: int) -> Graph:
        assert rounds == 5  # 10 ms of rounds of 2 ms
        if how == "events":
            raise RuntimeError("not while capturing")
        return Graph()

    replays: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(clock, "_event_ms", lambda call: (call(), 2.0)[1])
    monkeypatch.setattr(clock, "_capture", capture)
    calls: list[int] = []
    found = clock.timed([lambda: calls.append(1)] * 2, least_ms=30)
    assert found == (2.0 / (5 * 2), 0.0, how)  # 2 ms for 5 rounds of 2 calls
    assert len(replays) == (16 if how == "graph" else 0)
    assert clock.timed([lambda: None], least_ms=30, graph=False) == (2.0, 0.0, "events")
