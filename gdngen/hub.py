"""Package -> folder of a kernel repository, as the library ``kernels`` loads it: build/torch-BACKEND with metadata.

https://huggingface.co/docs/kernels/kernel-requirements has the layout.  A package is Python alone, so that it has one
variant for each backend of torch, whatever the versions of torch and CUDA.
"""

import hashlib
import json
import re
import shutil
import tempfile
from pathlib import Path

from gdngen import package
from gdngen import target as targets
from gdngen.errors import EnvironmentProblem, PackageError, naming

METADATA = "metadata.json"
LICENSE = "MIT"  # of the templates that a package is made of
INTERFACE = 1  # of the operators' names and arguments: the version that get_kernel asks for
NAME = re.compile(r"[a-z][-a-z0-9]*[a-z0-9]")  # that kernels allows
BACKENDS = {"cuda": "cuda", "hip": "rocm"}  # of Triton -> of kernels


def write(folder: Path, repository: Path) -> list[Path]:
    """Write a package into a repository, for the GPUs of its target and for CPU tensors; the folders of these variants.

    Files of an earlier build are replaced.  Errors as those of ``check``, before anything is changed.
    """
    manifest = package.read_manifest(folder)
    name = check(repository, str(manifest["name"]))
    backends = (BACKENDS[targets.TARGETS[str(manifest["target"])].backend], "cpu")
    variants = {backend: repository / "build" / f"torch-{backend}" for backend in backends}
    for backend, variant in variants.items():
        _write_variant(folder, variant, _metadata(folder, name, backend))
    return list(variants.values())


def check(repository: Path, package_name: str) -> str:
    """The kernel's name.  PackageError where a package's name cannot be one, or where the repository holds another
    kernel or something else; EnvironmentProblem where it is no folder.
    """
    name = _kernel_name(package_name)
    if repository.exists() and not repository.is_dir():
        raise EnvironmentProblem(f"{repository} is no folder; choose another --hub")
    for variant in repository.glob("build/[!.]*"):
        _check_variant(variant, name)
    return name


def _kernel_name(package_name: str) -> str:
    name = package_name.replace("_", "-")
    if not NAME.fullmatch(name):
        raise PackageError(
            f"{package_name}: a kernel's name has two or more of a-z, 0-9 and _, a letter first and no _ last; give "
            "one with --name"
        )
    return name


def _check_variant(variant: Path, name: str) -> None:
    """A repository holds one kernel."""
    try:
        found = json.loads((variant / METADATA).read_bytes())["name"]
    except (OSError, ValueError, KeyError, TypeError):
        raise PackageError(f"{variant} is no variant of a kernel (no {METADATA}); choose another --hub") from None
    if found != name:
        raise PackageError(f"{variant} is of the kernel {found}, and this is {name}; choose another --hub or --name")


def _write_variant(folder: Path, variant: Path, metadata: str) -> None:
    variant.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=f".{variant.name}.", dir=variant.parent))
    try:
        for file in package.everything(folder):
            (stage / file).parent.mkdir(parents=True, exist_ok=True)
            with naming(stage / file):
                shutil.copyfile(folder / file, stage / file)
        (stage / METADATA).write_text(metadata)
        stage.chmod(0o755)
        package.swap(stage, variant)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _metadata(folder: Path, name: str, backend: str) -> str:
    """The id is the name of the module: one of its own for every content, as other builds may be loaded beside it."""
    digest = hashlib.sha256((folder / package.MANIFEST).read_bytes()).hexdigest()[:8]
    record = {
        "id": f"_{name.replace('-', '_')}_{backend}_{digest}",
        "name": name,
        "version": INTERFACE,
        "license": LICENSE,
        "python-depends": [],
        "backend": {"type": backend},
    }
    return json.dumps(record, indent=2) + "\n"
