"""Decisions of a package: which choice a launch gets, what unusable files cost, what builds keep and ship."""

import importlib.util
import json
import shutil
import threading
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from gdngen import api, kept, package, presets, verification
from gdngen.errors import PackageError
from gdngen.spec import Spec

SPEC = Spec(gate="scalar", key_dim=16, value_dim=32, chunk=16)
GPU = "NVIDIA H200"
AT = SimpleNamespace(key="sm_90/2", gpu=GPU, processors=132)
CPU = SimpleNamespace(key="sm_90/4", gpu="", processors=1)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return api.build(SPEC, tmp_path_factory.mktemp("decided"), name="decided")


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "decided", ignore=shutil.ignore_patterns("__pycache__")))


def tuning(folder: Path) -> ModuleType:
    """The tuning module of a package, as a new process would have it."""
    spec = importlib.util.spec_from_file_location("tuning_alone", folder / "tuning.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record(folder: Path, *decisions: tuple[str, int, int, int], **changes: object) -> dict[str, object]:
    """A decisions file: (kernel, bytes, heads, BV) each."""
    digests = kept.kernel_digests({str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*.py")})
    listed = [
        {
            "kernel": k,
            "bytes": b,
            "heads": h,
            "choice": {"BV": bv, "num_warps": 2, "num_stages": 3},
            "microseconds": 1.5,
        }
        for k, b, h, bv in decisions
    ]
    kernels = {kernel: digests[kernel] for kernel, *_ in decisions}
    return {"format": 1, "gpu": GPU, "versions": {}, "kernels": kernels, "decisions": listed} | changes


def put(folder: Path, content: object, gpu: str = "nvidia_h200") -> Path:
    path = folder / "tuned" / f"{gpu}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def quiet(module: ModuleType, *arguments: object) -> object:
    """A choice that warns of nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return module.choice(*arguments)


# ---------------------------------------------------------------------------------------------------- the package


def test_nearest_number_of_heads_in_log_space(folder: Path) -> None:
    put(folder, record(folder, ("scan", 2, 8, 8), ("scan", 2, 64, 64), ("scan", 4, 8, 4)))
    found = {heads: quiet(tuning(folder), "scan", AT, heads).BV for heads in (0, 1, 8, 22, 23, 64, 10**6)}
    assert found == {0: 8, 1: 8, 8: 8, 22: 8, 23: 64, 64: 64, 10**6: 64}


def test_without_a_decision_for_the_kernel_the_cost_model_decides(folder: Path) -> None:
    put(folder, record(folder, ("scan", 2, 8, 8)))
    module = tuning(folder)
    assert quiet(module, "prepare", AT, 8) == module.TUNING["prepare"]["sm_90/2"]
    assert (
        quiet(module, "scan", SimpleNamespace(key="sm_90/4", gpu=GPU, processors=1), 8)
        == module.TUNING["scan"]["sm_90/4"]
    )


def test_few_programs_of_scans_side_by_side(folder: Path) -> None:
    module = tuning(folder)
    table = module.TUNING["states"] = {"sm_90/4": module.Tuning(16, 4, 1), "sm_90/4/few": module.Tuning(8, 4, 1)}
    at = SimpleNamespace(key="sm_90/4", gpu="", processors=10)
    assert quiet(module, "states", at, 2) == table["sm_90/4/few"]  # 8 programs of narrow tiles
    assert quiet(module, "states", at, 3) == table["sm_90/4"]  # 12
    module._chosen.clear()
    assert module.choice("states", at, 2, scans=2) == table["sm_90/4"]  # twice 8 at once
    assert '"reverse", at, N * HV, scans=2' in (folder / "launch.py").read_text()


def test_another_gpu_has_its_own(folder: Path) -> None:
    put(folder, record(folder, ("scan", 2, 8, 8)))
    put(folder, record(folder, ("scan", 2, 8, 16)), "nvidia_b200")
    module = tuning(folder)
    other = SimpleNamespace(key="sm_100/2", gpu="NVIDIA B200", processors=148)
    assert (quiet(module, "scan", AT, 8).BV, quiet(module, "scan", other, 8).BV) == (8, 16)


def test_batch_invariance(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One choice for every number of heads: measured ones of most heads, the cost model's for many programs."""
    monkeypatch.setenv("GDNGEN_BATCH_INVARIANT", "1")
    put(folder, record(folder, ("scan", 2, 8, 8), ("scan", 2, 64, 32)))
    module = tuning(folder)
    assert quiet(module, "scan", AT, 1).BV == quiet(module, "scan", AT, 9000).BV == 32
    at = SimpleNamespace(key="sm_90/4", gpu="", processors=10)
    assert quiet(module, "states", at, 2) == module.TUNING["states"]["sm_90/4"]


def test_forced(folder: Path) -> None:
    module = tuning(folder)
    module.forced["scan"] = module.Tuning(4, 1, 1)
    assert quiet(module, "scan", AT, 8) == quiet(module, "scan", CPU, 8) == module.Tuning(4, 1, 1)
    module.forced.clear()
    assert quiet(module, "scan", CPU, 8) == module.TUNING["scan"]["sm_90/4"]


@pytest.mark.parametrize(("name", "file"), [(GPU, "nvidia_h200"), ("AMD Instinct MI300X (x)", "amd_instinct_mi300x_x")])
def test_slug(folder: Path, name: str, file: str) -> None:
    assert tuning(folder).slug(name) == file


def broken(folder: Path) -> dict[str, tuple[object, str]]:
    good = record(folder, ("scan", 2, 8, 8))
    choice = {"choice": {"BV": 8, "num_warps": 2, "num_stages": 3, "CLUSTER": 2}}
    return {
        "none": (None, "no launch choices measured on NVIDIA H200"),
        "truncated": (json.dumps(good)[:-30], "cannot be used (JSONDecodeError"),
        "of the future": ({**good, "format": 2}, "format 2, this package reads 1"),
        "field of the future": ({**good, "decisions": [good["decisions"][0] | choice]}, "CLUSTER"),
        "not a record": ([], "cannot be used"),
        "text for a number": ({**good, "decisions": [good["decisions"][0] | {"heads": "8"}]}, "not a decision"),
        "other kernels": ({**good, "kernels": {"scan": "0" * 16}}, "measured with other kernels (scan)"),
    }


@pytest.mark.parametrize("fault", ["none", "truncated", "of the future", "field of the future", "not a record",
                                   "text for a number", "other kernels"])  # fmt: skip
def test_unusable_decisions_cost_one_warning(folder: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content, text = broken(folder)[fault]
    if content is not None:
        put(folder, content)
    module = tuning(folder)
    assert quiet(module, "scan", CPU, 8)  # without a GPU nothing is read
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert module.choice("scan", AT, 1000) == module.TUNING["scan"]["sm_90/2"]
        module.choice("scan", AT, 16), module.choice("prepare", AT, 8)
    assert len(caught) == 1 and text in str(caught[0].message)
    assert f"gdngen tune {folder}" in str(caught[0].message)
    monkeypatch.setenv("GDNGEN_ASSERT_TUNED", "1")
    with pytest.raises(RuntimeError, match="kernel scan has no decision for operands of 2 bytes"):
        module.choice("scan", AT, 32)
    assert quiet(module, "scan", CPU, 32)


def test_threads_are_warned_once(folder: Path) -> None:
    module = tuning(folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=module.choice, args=("scan", AT, heads)) for heads in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(caught) == 1


def test_decisions_are_read_once(folder: Path) -> None:
    path = put(folder, record(folder, ("scan", 2, 8, 8)))
    module = tuning(folder)
    assert quiet(module, "scan", AT, 8).BV == 8
    path.unlink()
    assert quiet(module, "scan", AT, 16).BV == 8


# ------------------------------------------------------------------------------------------------------ builds


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kept, "STORE", tmp_path / "store")
    (tmp_path / "store" / SPEC.name).mkdir(parents=True)
    return tmp_path / "store" / SPEC.name


def test_builds_ship_decisions_of_the_same_kernels(folder: Path, store: Path) -> None:
    good = record(folder, ("scan", 2, 8, 8), ("prepare", 2, 8, 0))
    (store / "nvidia_h200.json").write_text(json.dumps(good))
    (store / "nvidia_b200.json").write_text(json.dumps(good | {"kernels": {"scan": "0" * 16, "prepare": "0" * 16}}))
    half = good | {"kernels": good["kernels"] | {"scan": "0" * 16}}
    (store / "amd.json").write_text(json.dumps(half))
    with pytest.raises(PackageError, match=r"manifest.json, tuned/amd.json, tuned/nvidia_h200.json"):
        api.build(SPEC, folder.parent, name="decided", check=True)
    api.build(SPEC, folder.parent, name="decided")
    api.build(SPEC, folder.parent, name="decided", check=True)
    assert (folder / "tuned" / "nvidia_h200.json").read_text() == (store / "nvidia_h200.json").read_text()
    assert not (folder / "tuned" / "nvidia_b200.json").exists()
    kept = json.loads((folder / "tuned" / "amd.json").read_text())
    assert [one["kernel"] for one in kept["decisions"]] == list(kept["kernels"]) == ["prepare"]
    assert "tuned/amd.json" in package.read_manifest(folder)["files"] and not package.altered(folder)
    first = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    shutil.rmtree(folder)
    api.build(SPEC, folder.parent, name="decided")
    assert first == {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    (store / "nvidia_h200.json").unlink()  # an older gdngen shipped it: it is not the user's own
    api.build(SPEC, folder.parent, name="decided")
    assert not (folder / "tuned" / "nvidia_h200.json").exists()


def test_own_decisions_survive_a_rebuild(folder: Path, store: Path) -> None:
    own = put(folder, record(folder, ("scan", 2, 8, 8)))
    theirs = json.dumps(record(folder, ("scan", 2, 8, 16)))
    (store / "nvidia_h200.json").write_text(theirs)
    text = own.read_text()
    for _ in range(2):
        (folder / "launch.py").write_text("")
        api.build(SPEC, folder.parent, name="decided")
        assert own.read_text() == text and (folder / "launch.py").read_text()
    api.build(SPEC, folder.parent, name="decided", check=True)
    assert not package.altered(folder) and not kept.faulty_decisions(folder)
    own.unlink()  # the way back to what gdngen ships
    api.build(SPEC, folder.parent, name="decided")
    assert own.read_text() == theirs


def test_own_decisions_of_other_kernels_go(folder: Path) -> None:
    own = put(folder, record(folder, ("scan", 2, 8, 8), kernels={"scan": "0" * 16}))
    (folder / "launch.py").write_text("")
    assert "other kernels" in kept.faulty_decisions(folder)[0]
    api.build(SPEC, folder.parent, name="decided")
    assert not own.exists()


def test_verify_reads_decisions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "_questions", lambda *_: [])
    put(folder, record(folder, ("scan", 2, 8, 8)))
    assert all(check.passed for check in verification.verify(folder))
    put(folder, json.dumps(record(folder, ("scan", 2, 8, 8)))[:-9], "nvidia_b200")
    failed = [str(check) for check in verification.verify(folder) if not check.passed]
    assert len(failed) == 1 and "nvidia_b200.json: cannot be read (JSONDecodeError" in failed[0]


def test_shipped_decisions_are_of_the_kernels_that_are_built() -> None:
    """Else a change of the compiler would silently untune the presets."""
    names = {preset.spec.name: preset.name for preset in presets.PRESETS.values()}
    for path in kept.STORE.glob("*/*.json"):
        files = package.render(api.compilation(names[path.parent.name]).plan, path.parent.name)
        assert files.get(f"tuned/{path.name}") == path.read_text(), f"{path}: of other kernels; run gdngen tune again"
