"""gdngen.load: threads, targets, damaged packages, cache folders that cannot be used, and what a first call says."""

import logging
import shutil
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import torch

import gdngen
from gdngen import api, knobs, package
from gdngen.errors import GdngenWarning, PackageError, SpecError
from gdngen.spec import Spec

SPEC = Spec(rule="additive", gate="none", beta="none", key_dim=16, value_dim=16, chunk=16, backward=False)


@pytest.fixture
def forgotten() -> Iterator[None]:
    """As a new process: nothing is loaded."""
    kept, api._loaded = api._loaded, {}
    yield
    api._loaded = kept


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the package, built once; to be copied."""
    folder = tmp_path_factory.mktemp("filled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GDNGEN_CACHE_DIR", str(folder))
        gdngen.load(SPEC)
    return folder


@pytest.fixture
def cache(filled: Path, tmp_path: Path, forgotten: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GDNGEN_CACHE_DIR", str(tmp_path / "cache"))
    return Path(shutil.copytree(filled, tmp_path / "cache"))


def folder_of(module: ModuleType) -> Path:
    return Path(str(module.__file__)).parent


def works(module: ModuleType) -> bool:
    x = torch.ones(1, 3, 1, 16)
    return bool(module.chunk_linear_attn(x, x, x, normalize=False)[0].shape == x.shape)


def loaded(recwarn_text: str = "") -> ModuleType:
    """What load gives, with exactly the warning expected."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        module = gdngen.load(SPEC)
    texts = [str(one.message) for one in said if issubclass(one.category, GdngenWarning)]
    assert len(texts) == bool(recwarn_text) and all(recwarn_text in text for text in texts), texts
    return module


# ------------------------------------------------------------------------------------------------ threads, targets


def test_no_thread_sees_a_half_imported_module(cache: Path) -> None:
    found: list[ModuleType] = []
    for _ in range(20):
        api._loaded.clear()
        start = threading.Barrier(16)

        def one(start: threading.Barrier = start) -> ModuleType:
            start.wait()
            module = gdngen.load(SPEC)
            assert module.SPEC["rule"] == "additive" and callable(module.chunk_linear_attn)
            return module

        with ThreadPoolExecutor(16) as pool:
            calls = [pool.submit(one) for _ in range(16)]
            found += {id(call.result()): call.result() for call in calls}.values()
    assert len(found) == 20, "threads of one round got different modules"


def test_a_folder_is_imported_by_one_thread_at_a_time(tmp_path: Path) -> None:
    """import_folder itself: what another thread has begun is not taken apart."""
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "__init__.py").write_text("from . import part\n")
    (tmp_path / "slow" / "part.py").write_text("import time\ntime.sleep(0.02)\nDONE = True\n")
    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(api.import_folder, tmp_path / "slow", "slow_to_import") for _ in range(8)]
    assert all(one.result().part.DONE for one in found)
    with pytest.raises(PackageError, match=r"__init__\.py is missing"):
        api.import_folder(tmp_path, "nothing_there")
    assert "nothing_there" not in sys.modules


def test_each_target_has_its_package(cache: Path) -> None:
    modules = [gdngen.load(SPEC, target) for target in ("sm_90", "sm_120")]
    targets = [package.read_manifest(folder_of(module))["target"] for module in modules]
    assert targets == ["sm_90", "sm_120"] and gdngen.load(SPEC, "sm_120") is modules[1]


@pytest.mark.parametrize("what", [None, {}, 3, b"qwen3-next"])
def test_what_is_no_spec(what: object) -> None:
    for code in (gdngen.load, api.build, api.compilation):
        with pytest.raises(SpecError, match=r"spec: got a \w+, expected a gdngen\.Spec or the name of a preset"):
            code(what)  # type: ignore[operator]


# ------------------------------------------------------------------------------------------------ damage


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("reference.py", ""),
        ("spec.py", None),
        ("operators.py", "half"),
        ("manifest.json", None),
        ("manifest.json", "{}"),
    ],
)
def test_a_damaged_package_is_built_again(file: str, text: str | None, cache: Path) -> None:
    (folder,) = cache.glob("packages/*/add_*")
    content = (folder / file).read_text()
    (folder / file).write_text(content[: len(content) // 2] if text == "half" else text or "")
    if text is None:
        (folder / file).unlink()
    assert works(loaded(f"is damaged ({file})")) and (folder / file).read_text() == content
    api._loaded.clear()
    assert works(loaded())


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


@pytest.mark.parametrize("damage", ["no text", "a folder"])
@pytest.mark.parametrize("file", ["reference.py", "manifest.json"])
def test_damage_of_any_kind(file: str, damage: str, cache: Path) -> None:
    (folder,) = cache.glob("packages/*/add_*")
    remove(folder / file)
    (folder / file).mkdir() if damage == "a folder" else (folder / file).write_bytes(b"\xff\xfe\x00")
    assert works(loaded(f"is damaged ({file})"))
    api._loaded.clear()
    assert works(loaded())


@pytest.mark.parametrize("other", ["file", "broken link", "link", "empty folder"])
def test_something_else_in_the_place_of_a_package(other: str, cache: Path, tmp_path: Path) -> None:
    (folder,) = cache.glob("packages/*/add_*")
    remove(folder)
    (tmp_path / "elsewhere").mkdir()
    if other == "file":
        folder.write_text("")
    elif other == "empty folder":
        folder.mkdir()
    else:
        folder.symlink_to(tmp_path / ("elsewhere" if other == "link" else "nowhere"))
    assert works(loaded("is damaged (manifest.json)")) and not folder.is_symlink()
    assert (tmp_path / "elsewhere").is_dir(), "what a link points to is not ours"
    api._loaded.clear()
    assert works(loaded())


def test_decisions_that_are_no_text(cache: Path) -> None:
    (folder,) = cache.glob("packages/*/add_*")
    (folder / "tuned").mkdir()
    (folder / "tuned" / "gpu.json").write_bytes(b"\xff")
    (folder / "launch.py").unlink()
    assert works(loaded("launch.py"))


def test_what_was_tuned_stays(cache: Path) -> None:
    """Decisions are no damage, and a repair keeps them."""
    (folder,) = cache.glob("packages/*/add_*")
    (folder / "tuned").mkdir()
    (folder / "tuned" / "gpu.json").write_text('{"kernels": {}, "decisions": []}')
    loaded()
    api._loaded.clear()
    (folder / "launch.py").write_text("")
    loaded("launch.py")
    assert (folder / "tuned" / "gpu.json").exists()


# ------------------------------------------------------------------------------------------------ folders


def test_a_cache_folder_that_cannot_be_made(forgotten: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("GDNGEN_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    module = loaded("Set GDNGEN_CACHE_DIR to a folder that can be written")
    assert works(module) and "gdngen_packages_" in str(folder_of(module)) and loaded() is module
    assert folder_of(module).parent.stat().st_mode & 0o077 == 0, "others may read or write it"


def test_a_user_without_a_home(forgotten: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("GDNGEN_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(knobs.Path, "home", staticmethod(homeless))
    assert works(loaded("there is no cache folder: Could not determine home directory.; set GDNGEN_CACHE_DIR"))


# ------------------------------------------------------------------------------------------------ what is said


def test_a_first_call_says_that_it_builds(
    forgotten: None, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal:
        text = ""

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            self.text += text
            return len(text)

        def flush(self) -> None:
            pass

    terminal = Terminal()
    monkeypatch.setenv("GDNGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "stderr", terminal)
    with caplog.at_level(logging.INFO, "gdngen"):
        for _ in range(2):
            gdngen.load(SPEC)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "gdngen"]
    assert line.startswith(f"building the package of {SPEC}, needed for the first time, into {tmp_path}")
    assert terminal.text.startswith(f"gdngen: building the package of {SPEC}, needed for the first time ... ")
    assert terminal.text.endswith(" s\n") and terminal.text.count("\n") == 1
