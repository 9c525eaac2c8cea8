"""The linters are tests, and no file of the repository names a folder of the machine it was written on."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LOCAL_FOLDERS = [f"/{name}/" for name in ("work", "root", "home", "Users")]


def tracked_files() -> list[Path]:
    """The repository's files as git sees them: committed ones and new ones that it does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in found.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.parametrize("arguments", ["ruff check .", "ruff format --check .", "mypy"])
def test_linter(arguments: str) -> None:
    result = subprocess.run([sys.executable, "-m", *arguments.split()], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_no_local_paths() -> None:
    guilty = []
    for path in tracked_files():
        text = path.read_bytes().decode("utf-8", errors="replace")
        guilty += [f"{path.relative_to(ROOT)}: {folder}" for folder in LOCAL_FOLDERS if folder in text]
    assert not guilty, guilty
