"""gdngen as its users have it: a wheel, installed where there is no clone."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from test_style import ROOT, tracked_files

SMALL = "--rule additive --gate none --beta none --key-dim 16 --value-dim 16 --chunk 16"
SMALL_NAME = "add_nogate_k16_v16_c16_betanone"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def ran(*command: object, cwd: Path) -> str:
    """What a command printed.  Without PYTHONPATH: nothing of the clone is to be found by accident."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of what git tracks, built as pip builds it, beside the clone (setuptools leaves things behind)."""
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for path in tracked_files():
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    ran(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", made, source, cwd=made)
    (found,) = made.glob("gdngen-*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel; torch, triton and the rest are those of the tested environment."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    ran(*PIP, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    (own,) = folder.glob("lib/python*/site-packages")
    # Files named *.pth in there are not read, so an editable gdngen of the tested environment stays unknown.
    (own / "tested.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    return python


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {path.parent for path in tracked_files() if path.suffix == ".py" and path.is_relative_to(ROOT / "gdngen")}
    folders = {folder for folder in folders if "templates" not in folder.relative_to(ROOT).parts}
    assert folders and not [folder for folder in folders if not (folder / "__init__.py").exists()]


def test_the_wheel_holds_every_file(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    files = [path.relative_to(ROOT).as_posix() for path in tracked_files() if path.is_relative_to(ROOT / "gdngen")]
    assert len(files) > 100 and not [file for file in files if file not in held]
    assert {name.partition("/")[0] for name in held} == {
        "gdngen",
        wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info",
    }


def test_an_installed_wheel_builds_and_verifies(installed: Path, tmp_path: Path) -> None:
    found = ran(installed, "-c", "import gdngen.api; print(gdngen.api.__file__)", cwd=tmp_path)
    assert Path(found.strip()).is_relative_to(installed.parents[1])
    command = installed.with_name("gdngen")
    assert SMALL_NAME in ran(command, "build", *SMALL.split(), cwd=tmp_path)
    assert "0 failed" in ran(command, "verify", f"generated/{SMALL_NAME}", cwd=tmp_path)
    use = f"import torch, {SMALL_NAME} as p; x = torch.ones(1, 3, 1, 16); print(p.chunk_linear_attn(x, x, x)[0].shape)"
    assert "[1, 3, 1, 16]" in ran(installed, "-c", use, cwd=tmp_path / "generated")


@pytest.mark.full
def test_an_installed_wheel_builds_every_preset(installed: Path, tmp_path: Path) -> None:
    for preset in ("qwen3-next", "kimi-linear", "mamba2-2.7b", "deltanet", "linear-attention"):
        ran(installed.with_name("gdngen"), "build", "--preset", preset, cwd=tmp_path)
        ran(installed.with_name("gdngen"), "build", "--preset", preset, "--check", cwd=tmp_path)
