"""The examples as a newcomer runs them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
TINY = [sys.executable, str(EXAMPLES / "train_tiny.py"), "--device", "cpu", "--steps"]
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


@pytest.mark.parametrize("steps", ["0", "-3"])
def test_no_steps_are_a_mistake(steps: str) -> None:
    done = subprocess.run([*TINY, steps], capture_output=True, text=True)
    assert done.returncode == 2 and f"--steps {steps}: expected at least 1" in done.stderr
