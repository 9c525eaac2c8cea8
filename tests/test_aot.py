"""Kernels compiled ahead of time: they are what launches look up, and never a reason to fail where they do not fit."""

import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from gdngen import api, package
from gdngen.autotune import aot
from gdngen.cli import main
from gdngen.errors import SpecError
from gdngen.spec import Spec

ROOT = Path(__file__).resolve().parent.parent
SPEC = Spec(gate="none", key_dim=64, value_dim=16, chunk=16, varlen=False, backward=False)
HEADS = (2, 2)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = api.build(SPEC, tmp_path_factory.mktemp("ahead"), name="ahead")
    made = aot.build(aot.Job(folder, "sm_90", ("bfloat16",), (HEADS,)))
    assert made.kernels >= 9 and made.launchers >= 9  # prepare, scan and recurrence with and without states
    return folder


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "ahead", ignore=shutil.ignore_patterns("__pycache__")))


LOOKED_UP = """
import json, sys
from pathlib import Path

import triton
from gdngen.autotune.launches import Recorder, Shape
from gdngen.target import TARGETS
from triton.runtime.jit import JITFunction

folder, dtype = Path(sys.argv[1]), sys.argv[2]
recorder = Recorder(folder, TARGETS["sm_90"])
given = sys.modules[f"{folder.name}.compiled"].install(90)
for function in vars(recorder.host).values():
    if isinstance(function, JITFunction):  # as launches do it, up to the driver
        del function._do_compile
        function.run = lambda *a, f=function, grid, warmup, **k: JITFunction.run(f, *a, grid=grid, warmup=True, **k)
found = []
triton.knobs.compilation.listener = lambda *, src, cache_hit, **rest: found.append((src.fn.__name__, cache_hit))
for operator in ("chunk", "recurrent"):
    for states in ((False, False), (True, True), (True, False)):
        recorder.record(Shape(operator, dtype, (2, 2), 77, 3, "", *states))
print(json.dumps([given, found]))
"""


LAUNCHERS = """
import json, sys
from pathlib import Path

from gdngen.autotune.launches import Recorder, Shape
from gdngen.target import TARGETS
from triton.backends.nvidia import driver
from triton.runtime import build

folder, loaded, described = Path(sys.argv[1]), [], 0
recorder = Recorder(folder, TARGETS["sm_90"])
sys.modules[f"{folder.name}.compiled"].install(90)
build._load_module_from_path = lambda name, path: loaded.append(path)
def refuse(*arguments, **options):
    raise AssertionError("a C compiler was called")
build._build = refuse
for states in ((False, False), (True, True)):
    for wanted in recorder.record(Shape("chunk", "DTYPE", (2, 2), 77, 3, "", *states)).values():
        target, options = wanted.function.device_caches[0][2], wanted.options.__dict__
        about = wanted.function.compile(wanted.source, target=target, options=options).metadata
        described += any(kind.startswith("tensordesc") for kind in wanted.signature.values())
        text = driver.make_launcher(wanted.constants, wanted.signature, about.tensordesc_meta)
        build.compile_module_from_src(text, "__triton_launcher")
build.compile_module_from_src((Path(driver.dirname) / "driver.c").read_text(), "cuda_utils")
assert described > 0  # launchers that hand over tensor descriptors are among them
print(json.dumps(loaded))
"""


def looked_up(folder: Path, cache: Path, dtype: str = "bfloat16", **more: str) -> tuple[int, list[tuple[str, bool]]]:
    """In a new process: (entries handed to Triton, [kernel, whether Triton found it] of some launches)."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache)} | more
    command = [sys.executable, "-c", LOOKED_UP, str(folder), dtype]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    given, found = json.loads(done.stdout)
    return given, [(kernel, hit) for kernel, hit in found]


def test_launches_find_every_kernel(folder: Path, tmp_path: Path) -> None:
    given, found = looked_up(folder, tmp_path / "cache")
    assert given == len(json.loads((folder / "aot/sm_90/index.json").read_text())["entries"])
    assert {kernel for kernel, _ in found} == {"prepare", "scan", "combine", "output", "recurrence"}
    assert all(hit for _, hit in found)
    again, found = looked_up(folder, tmp_path / "cache")
    assert again == 0 and all(hit for _, hit in found)


def test_other_kernels_are_compiled(folder: Path, tmp_path: Path) -> None:
    kernel = folder / "kernels" / "prepare.py"
    kernel.write_text(kernel.read_text().replace("pid = tl.program_id(0)", "pid = tl.program_id(0) + 0"))
    _, found = looked_up(folder, tmp_path / "cache")
    assert {hit for name, hit in found if name == "prepare"} == {False}
    assert {hit for name, hit in found if name == "scan"} == {True}


def alone(folder: Path) -> ModuleType:
    """compiled.py as a new process would have it."""
    spec = importlib.util.spec_from_file_location("compiled_alone", folder / "compiled.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def changed(folder: Path, **fields: Any) -> None:
    index = folder / "aot" / "sm_90" / "index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | fields))


@pytest.mark.parametrize("field", ["triton", "backend", "environment", "format"])
def test_other_versions_fall_back(
    folder: Path, empty_cache: Path, caplog: pytest.LogCaptureFixture, field: str
) -> None:
    changed(folder, **{field: "3.5.9"})
    module = alone(folder)
    with caplog.at_level(logging.DEBUG, "gdngen"):
        assert [module.install(90), module.install(90)] == [0, 0]
    assert len(caplog.records) == 1 and caplog.records[0].levelno == logging.DEBUG  # once
    assert f"{field} '3.5.9', here" in caplog.text
    assert not list(empty_cache.glob("*/*"))


def test_a_truncated_index_falls_back(folder: Path, empty_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    index = folder / "aot" / "sm_90" / "index.json"
    index.write_text(index.read_text()[:-20])
    with caplog.at_level(logging.DEBUG, "gdngen"):
        assert alone(folder).install(90) == 0
    assert "JSONDecodeError" in caplog.text


def test_another_gpu_falls_back(folder: Path, empty_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "gdngen"):
        assert alone(folder).install(103) == 0
    assert "sm_103 is not used" in caplog.text


def test_a_read_only_cache_falls_back(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.DEBUG, "gdngen"):
        assert alone(folder).install(90) == 0
    assert "NotADirectoryError" in caplog.text


def test_without_kernels_nothing_is_said(folder: Path, empty_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.rmtree(folder / "aot")
    with caplog.at_level(logging.DEBUG, "gdngen"):
        assert alone(folder).install(90) == 0
    assert not caplog.records


def test_launchers_are_for_one_python(folder: Path, empty_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert alone(folder).install(90) > 0
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    libraries = {path.name for path in empty_cache.glob("*/*.so")}
    assert libraries == {f"__triton_launcher{suffix}", f"cuda_utils{suffix}"}
    shutil.rmtree(empty_cache)
    changed(folder, python=".cpython-39-x86_64-linux-gnu.so")
    with caplog.at_level(logging.DEBUG, "gdngen"):
        assert alone(folder).install(90) > 0
    assert "its launchers are for .cpython-39" in caplog.text and not list(empty_cache.glob("*/*.so"))


def test_triton_finds_the_launchers(folder: Path, tmp_path: Path) -> None:
    """Triton's own look-up, up to loading them, which needs a driver."""
    script = LAUNCHERS.replace("DTYPE", "bfloat16")
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": str(ROOT),
        "TRITON_CACHE_DIR": str(tmp_path / "c"),
    }
    done = subprocess.run([sys.executable, "-c", script, str(folder)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    loaded = json.loads(done.stdout)
    assert {Path(path).name.split(".")[0] for path in loaded} == {"__triton_launcher", "cuda_utils"}
    assert len(set(loaded)) >= 5


def test_rebuilds_keep_kernels_while_they_fit(folder: Path) -> None:
    api.build(SPEC, folder.parent, name="ahead", check=True)
    (folder / "launch.py").write_text("")
    api.build(SPEC, folder.parent, name="ahead")
    assert (folder / "aot/sm_90/index.json").exists() and not package.altered(folder)
    changed(folder, kernels={"scan": "0" * 16})
    (folder / "launch.py").write_text("")
    api.build(SPEC, folder.parent, name="ahead")
    assert not (folder / "aot").exists()


def test_gpus_of_a_target(tmp_path: Path) -> None:
    (tmp_path / "tuned").mkdir()
    for number, gpu in enumerate(("NVIDIA H200", "NVIDIA B200", "Something new")):
        (tmp_path / "tuned" / f"{number}.json").write_text(json.dumps({"gpu": gpu}))
    (tmp_path / "tuned" / "broken.json").write_text("{")
    assert aot.gpus(tmp_path, "sm_90") == ["NVIDIA H200", "Something new"]
    assert aot.gpus(tmp_path, "sm_100") == ["NVIDIA B200", "Something new"]


def test_only_cuda(built: Path) -> None:
    with pytest.raises(SpecError, match="aot: gfx942 is no CUDA target"):
        aot.build(aot.Job(built, "gfx942", ("float16",), (HEADS,)))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--gate", "none", "--aot", "sm_90"], "--aot: no preset says how many heads: give --aot-heads"),
        (["--preset", "qwen3-next", "--aot", "sm_90", "--check"], "--check writes nothing, --aot does"),
        (["--preset", "qwen3-next", "--aot", "sm_91"], "'sm_91' is not one of sm_80, sm_90, sm_100, sm_120"),
        (
            ["--preset", "qwen3-next", "--aot", "sm_90", "--aot-dtypes", "fp8"],
            "'fp8' is not one of bfloat16, float16, float32",
        ),
        (["--preset", "qwen3-next", "--aot", ""], "got '', expected sm_80 sm_90"),
        (["--preset", "qwen3-next", "--aot", "sm_90", "--aot-heads", "16/24"], "'16/24' is no H/HV"),
    ],
)
def test_options(options: list[str], text: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["build", "--out", str(tmp_path), *options])
    assert done.exit_code == 2 and text in done.output


def test_heads_come_from_the_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[aot.Job] = []
    monkeypatch.setattr(aot, "build", lambda job: asked.append(job) or aot.Summary(job.folder, 1, 1, 2**20))
    for options in (["--preset", "kimi-linear"], ["--gate", "scalar", "--qk-norm", "--aot-dtypes", "float16"]):
        done = CliRunner().invoke(main, ["build", "--out", str(tmp_path), *options, "--aot", "sm_90,sm_100"])
        assert done.exit_code == 0, done.output
        assert "1 kernels for" in done.output
    assert [(job.target, job.dtypes, job.heads) for job in asked[:2]] == [
        (target, ("bfloat16",), ((32, 32),)) for target in ("sm_90", "sm_100")
    ]
    assert asked[2].heads == ((16, 32), (16, 64), (16, 48), (16, 16)) and asked[2].dtypes == ("float16",)
