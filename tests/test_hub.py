"""gdngen build --hub: repositories of the library kernels, loaded with it where it is installed."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from gdngen import api, hub, oracle
from gdngen.cli import main
from gdngen.errors import EnvironmentProblem, PackageError
from gdngen.spec import Spec

SPEC = Spec(key_dim=16, value_dim=16, chunk=16, backward=False)
FLAGS = "--gate scalar --key-dim 16 --value-dim 16 --chunk 16 --no-backward".split()


def built(tmp_path: Path, name: str = "gdn_of_mine", target: str = "sm_90") -> Path:
    return api.build(SPEC, tmp_path / "generated", name=name, target_name=target)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def metadata(variant: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((variant / "metadata.json").read_text())
    return found


def test_kernels_loads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("kernels", reason="needs the library kernels: pip install kernels")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = CliRunner().invoke(main, ["build", *FLAGS, "--out", str(tmp_path), "--hub", str(tmp_path / "hub")])
    assert done.exit_code == 0, done.output
    assert "torch-cuda and torch-cpu, for kernels.get_local_kernel(" in done.output
    package = kernels.get_local_kernel(tmp_path / "hub", backend="cpu")
    assert Path(package.__file__).parent == tmp_path / "hub" / "build" / "torch-cpu"
    q, k, v = torch.randn(3, 1, 20, 2, 16)
    g, beta = -torch.rand(1, 20, 2), torch.rand(1, 20, 2)
    o, state = package.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    wanted, final = oracle.recurrence(q, k, v, g=g, beta=beta)
    assert oracle.rms_ratio(o, wanted) < 1e-5 and oracle.rms_ratio(state, final) < 1e-5


def test_variants_are_the_package(tmp_path: Path) -> None:
    folder, repository = built(tmp_path), tmp_path / "hub"
    first = hub.write(folder, repository)
    assert [variant.name for variant in first] == ["torch-cuda", "torch-cpu"]
    for variant in first:
        said, files = metadata(variant), contents(variant)
        del files["metadata.json"]
        assert files == contents(folder)
        assert said["name"] == "gdn-of-mine" and {"type": variant.name.removeprefix("torch-")} == said["backend"]
    (first[0] / "left_over.py").write_text("")
    hub.write(folder, repository)
    assert not (first[0] / "left_over.py").exists()
    assert metadata(first[0])["id"] != metadata(first[1])["id"]


def test_another_kind_of_gpu_is_added(tmp_path: Path) -> None:
    repository = tmp_path / "hub"
    for target in ("sm_90", "gfx942"):
        hub.write(built(tmp_path, target=target), repository)
    assert {path.name for path in (repository / "build").iterdir()} == {"torch-cuda", "torch-rocm", "torch-cpu"}
    ids = {str(metadata(variant)["id"]) for variant in (repository / "build").iterdir()}
    assert len(ids) == 3 and all(name.isidentifier() for name in ids)


def test_what_is_in_the_way_stays(tmp_path: Path) -> None:
    folder, repository = built(tmp_path), tmp_path / "hub"
    hub.write(folder, repository)
    before = metadata(repository / "build" / "torch-cuda")
    with pytest.raises(PackageError, match="is of the kernel gdn-of-mine, and this is another; choose another --hub"):
        hub.write(built(tmp_path, "another"), repository)
    assert metadata(repository / "build" / "torch-cuda") == before
    (tmp_path / "mine" / "build" / "torch-cpu").mkdir(parents=True)
    with pytest.raises(PackageError, match=r"torch-cpu is no variant of a kernel \(no metadata.json\)"):
        hub.write(folder, tmp_path / "mine")
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="file is no folder; choose another --hub"):
        hub.write(folder, tmp_path / "file")
    with pytest.raises(PackageError, match=r"Mine: a kernel's name has .* give one with --name"):
        hub.write(built(tmp_path, "Mine"), tmp_path / "other")


def test_check_writes_no_repository(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["build", *FLAGS, "--check", "--hub", str(tmp_path / "hub")])
    assert done.exit_code == 2 and "--check writes nothing, --hub does" in done.output
    assert not (tmp_path / "hub").exists()
