"""The examples as a newcomer runs them."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
TINY = [sys.executable, str(EXAMPLES / "train_tiny.py"), "--device", "cpu", "--steps"]
HYBRID = [sys.executable, str(EXAMPLES / "train_hybrid.py"), "--device", "cpu", "--steps"]
GENERATE = [sys.executable, str(EXAMPLES / "generate.py"), "--device", "cpu", "--tokens"]
PLAIN = os.environ | {"TRITON_INTERPRET": "0"}


def test_training_prints_as_it_goes() -> None:
    with subprocess.Popen([*TINY, "2"], stdout=subprocess.PIPE, text=True, env=PLAIN) as running:
        assert running.stdout is not None
        lines = [running.stdout.readline() for _ in range(2)]
        assert running.poll() is None, "everything was printed at the end"
        lines += running.stdout.readlines()
    assert running.returncode == 0 and lines[-1] == "the losses agree\n"
    assert lines[0] == "2 steps on cpu; losses are means over 2 of them\n"
    assert [line.split(",")[0] for line in lines[1:4]] == ["recurrence", "generated", "generated"]


def test_a_hybrid_model_is_trained_and_generates(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    trained = subprocess.run([*HYBRID, "12", "--save", str(tmp_path)], capture_output=True, text=True, env=PLAIN)
    lines = trained.stdout.splitlines()
    assert trained.returncode == 0 and lines[-1] == "they agree", trained.stderr
    first = [float(line.partition(" loss ")[2].split()[0]) for line in lines[1:4]]
    assert max(first) - min(first) < 0.05, "the runs do not start alike"
    done = subprocess.run([*GENERATE, "3", "--model", str(tmp_path)], capture_output=True, text=True, env=PLAIN)
    assert done.returncode == 0 and done.stdout.endswith("the same tokens each way\n"), done.stderr


def test_gradients_that_are_wrong_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison that the training ends with: of a gradient that is off, and of one that is no number."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import tiny_hybrid
    import train_hybrid

    model, tokens = tiny_hybrid.model(), next(tiny_hybrid.sequences(1))
    loss = train_hybrid.loss_of(model, tokens)
    loss.backward()
    assert train_hybrid.difference(model, tokens, loss.detach()) == 0
    gradient = model.lm_head.weight.grad
    gradient *= 1.1
    assert train_hybrid.difference(model, tokens, loss.detach()) > train_hybrid.BUDGET
    gradient.fill_(torch.nan)
    assert train_hybrid.difference(model, tokens, loss.detach()).isnan()


def test_a_figure_needs_matplotlib(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    figure = tmp_path / "loss.svg"
    done = subprocess.run([*HYBRID, "1", "--plot", str(figure)], capture_output=True, text=True, env=PLAIN)
    if importlib.util.find_spec("matplotlib"):
        assert done.returncode == 0 and "</svg>" in figure.read_text()
    else:
        assert done.returncode == 2 and "--plot needs matplotlib: pip install 'gdngen[bench]'" in done.stderr


@pytest.mark.parametrize("command", [TINY, HYBRID, GENERATE], ids=["train_tiny", "train_hybrid", "generate"])
@pytest.mark.parametrize("count", ["0", "-3"])
def test_no_steps_are_a_mistake(command: list[str], count: str) -> None:
    if command is not TINY:
        pytest.importorskip("transformers")
    done = subprocess.run([*command, count], capture_output=True, text=True)
    assert done.returncode == 2 and f"{command[-1]} {count}: expected at least 1" in done.stderr
