"""gdngen as its users have it: a wheel, installed where there is no clone."""

import base64
import hashlib
import importlib
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from test_style import ROOT, tracked_files

import gdngen.wheel
from gdngen import api, requirements
from gdngen.spec import Spec

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


USE = """
import sys, torch
import NAME as package
assert "gdngen" not in sys.modules
x = torch.ones(1, 3, 1, 16)
print(package.__file__, package.chunk_linear_attn(x, x, x, normalize=False)[0].shape)
"""


def test_an_installed_wheel_builds_and_verifies(installed: Path, tmp_path: Path) -> None:
    """Outside of the clone: build, verify, import the package; then from its own wheel, where no folder of it is."""
    found = ran(installed, "-c", "import gdngen.api; print(gdngen.api.__file__)", cwd=tmp_path)
    assert Path(found.strip()).is_relative_to(installed.parents[1])
    command, use = installed.with_name("gdngen"), USE.replace("NAME", SMALL_NAME)
    assert SMALL_NAME in ran(command, "build", *SMALL.split(), "--wheel", cwd=tmp_path)
    assert "0 failed" in ran(command, "verify", f"generated/{SMALL_NAME}", cwd=tmp_path)
    assert "[1, 3, 1, 16]" in ran(installed, "-c", use, cwd=tmp_path / "generated")
    (own,) = (tmp_path / "generated").glob("*.whl")
    ran(*PIP, "--python", installed, "install", "--no-deps", "--no-index", own, cwd=tmp_path)
    elsewhere = ran(installed, "-c", use, cwd=tmp_path)
    assert "[1, 3, 1, 16]" in elsewhere and Path(elsewhere.split()[0]).is_relative_to(installed.parents[1])
    ran(*PIP, "--python", installed, "check", cwd=tmp_path)


def test_the_wheel_of_a_package(tmp_path: Path) -> None:
    """The same bytes each time, another version for other files, and a RECORD that is true."""
    folder = api.build(Spec(key_dim=16, value_dim=16, chunk=16, backward=False), tmp_path, name="Mine")
    first = gdngen.wheel.write(folder)
    content = first.read_bytes()
    assert first.name.startswith(f"mine-{gdngen.__version__}+") and gdngen.wheel.write(folder).read_bytes() == content
    with zipfile.ZipFile(first) as archive:
        (record,) = (name for name in archive.namelist() if name.endswith("/RECORD"))
        rows = [row.split(",") for row in archive.read(record).decode().splitlines()]
        assert [row[0] for row in rows] == archive.namelist() and "Mine/manifest.json" in archive.namelist()
        for name, digest, size in rows[:-1]:
            raw = hashlib.sha256(archive.read(name)).digest()
            assert digest == "sha256=" + base64.urlsafe_b64encode(raw).decode().rstrip("=")
            assert int(size) == len(archive.read(name))
        metadata = archive.read(record.replace("RECORD", "METADATA")).decode()
    assert f"Name: Mine\nVersion: {first.name.split('-')[1]}\n" in metadata
    assert all(f"Requires-Dist: {requirement}\n" in metadata for requirement in requirements.RUNTIME)
    (folder / "manifest.json").write_text((folder / "manifest.json").read_text() + "\n")
    assert gdngen.wheel.write(folder) != first and not first.exists(), "an older build stays beside the new one"


@pytest.mark.parametrize("name", ["parallel", "serve"])
def test_what_is_not_there_yet_says_so(name: str) -> None:
    for code in (lambda: importlib.import_module(f"gdngen.{name}"), lambda: getattr(gdngen, name)):
        with pytest.raises(ImportError, match=rf"in gdngen yet \(gdngen\.{name}\); "):
            code()


@pytest.mark.full
def test_an_installed_wheel_builds_every_preset(installed: Path, tmp_path: Path) -> None:
    for preset in ("qwen3-next", "kimi-linear", "mamba2-2.7b", "deltanet", "linear-attention"):
        ran(installed.with_name("gdngen"), "build", "--preset", preset, cwd=tmp_path)
        ran(installed.with_name("gdngen"), "build", "--preset", preset, "--check", cwd=tmp_path)
