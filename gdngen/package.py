"""Source -> Package: stage, manifest, atomic swap, digests."""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from gdngen import kept
from gdngen.codegen.sources import sources
from gdngen.errors import EnvironmentProblem, PackageError, naming
from gdngen.kept import TUNED, digest_of, kernel_digests
from gdngen.passes.plan import Plan
from gdngen.target import DEFAULT_TARGET

MANIFEST = "manifest.json"
FORMAT = 1
FIELDS = frozenset(("build", "cuts", "files", "name", "plan_digest", "spec", "target"))  # that gdngen reads


def render(plan: Plan, name: str) -> dict[str, str]:
    """Every file of the package, the manifest included."""
    files = sources(plan, name)
    files |= kept.shipped(plan.spec.name, kernel_digests(files))
    files[MANIFEST] = _manifest(plan, name, files)
    return dict(sorted(files.items()))


def _manifest(plan: Plan, name: str, files: Mapping[str, str]) -> str:
    from gdngen import __version__

    record = {
        "format": FORMAT,
        "name": name,
        "gdngen": __version__,
        "build": build_command(plan, name),
        "spec": plan.spec.model_dump(mode="json"),
        "target": plan.target,
        "plan_digest": plan.digest,
        "cuts": {operator.name: operator.cut for operator in plan.operators},
        "notes": plan.notes,
        "files": {file: digest_of(text) for file, text in files.items()},
    }
    return json.dumps(record, indent=2, sort_keys=True) + "\n"


def build_command(plan: Plan, name: str) -> str:
    """The command that builds this very package."""
    return " ".join([plan.spec.command, *plan_options(plan), *([f"--name {name}"] if name != plan.spec.name else [])])


def plan_options(plan: Plan) -> list[str]:
    """What was asked of the command line beside the Spec: pins, another target."""
    return [f"--pin {pin}" for pin in plan.pins] + [f"--target {plan.target}"] * (plan.target != DEFAULT_TARGET)


def write(files: Mapping[str, str], folder: Path) -> Path:
    """Write the package beside its place and swap it in, so that readers see the old one or the new one, never a mix.

    An existing folder is replaced only when it is a package (holds a manifest) or empty; PackageError otherwise.
    """
    check_place(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for file, text in files.items():
            path = stage / file
            path.parent.mkdir(parents=True, exist_ok=True)
            with naming(path):
                path.write_text(text)
        kept.carry_over(folder, stage, kernel_digests(files), kept.listed(folder / MANIFEST))
        stage.chmod(0o755)
        swap(stage, folder)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return folder


def check_place(folder: Path) -> None:
    """An error where a package could not be written to this folder, whatever it holds."""
    above = folder
    while not (above.exists() or above.is_symlink()):
        above = above.parent
    if not above.is_dir():
        raise EnvironmentProblem(f"{above} is no folder; choose another --out")
    if above == folder and any(folder.iterdir()) and not (folder / MANIFEST).exists():
        raise PackageError(
            f"{folder} exists and is not a gdngen package (no {MANIFEST}); choose another --out or --name"
        )
    if not os.access(above if above != folder else folder.parent, os.W_OK | os.X_OK):
        raise EnvironmentProblem(f"{above} cannot be written; choose another --out")


def swap(stage: Path, folder: Path) -> None:
    """Replace ``folder`` by ``stage``.  Another process may do the same at the same time: the last one stays."""
    while True:
        try:
            os.replace(stage, folder)
            return
        except OSError:
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
            if folder.exists():
                with contextlib.suppress(FileNotFoundError):  # somebody else just moved it
                    os.replace(folder, old / "was")
            shutil.rmtree(old, ignore_errors=True)


def differences(files: Mapping[str, str], folder: Path) -> list[str]:
    """Files that a build would add, change or remove; empty when the folder is up to date."""
    if not folder.is_dir():
        return sorted(files)
    own = set(kept.own_decisions(folder, kept.listed(folder / MANIFEST)))
    present = {str(path.relative_to(folder)) for path in folder.rglob("*") if kept.is_source(path, folder)}
    changed = {file for file, text in files.items() if _digest(folder / file) != digest_of(text)}
    return sorted((changed | (present - set(files))) - own)


def read_manifest(folder: Path) -> dict[str, object]:
    """The manifest; PackageError when it is missing or cannot be read."""
    path = folder / MANIFEST
    if not path.is_file():
        raise PackageError(f"{folder} is not a gdngen package: {MANIFEST} is missing; build one with gdngen build")
    try:
        record = json.loads(path.read_bytes())
    except ValueError as error:
        raise PackageError(f"{path}: not valid JSON ({error}); build the package again") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        found = record.get("format") if isinstance(record, dict) else record
        raise PackageError(f"{path}: format {found!r:.40}, this gdngen reads {FORMAT}; build the package again")
    if lacking := sorted(FIELDS - set(record)):
        raise PackageError(f"{path}: {', '.join(lacking)} missing; build the package again")
    return record


def altered(folder: Path) -> list[str]:
    """Files that differ from the manifest's digests, or are missing; decisions may have been measured anew."""
    files = _listed(folder)
    built = {file: digest for file, digest in files.items() if not file.startswith(f"{TUNED}/")}
    return sorted(file for file, digest in built.items() if _digest(folder / file) != digest)


def added(folder: Path) -> list[str]:
    """Files that the manifest does not list; kernels compiled ahead of time and decisions may come later."""
    files = _listed(folder)
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if kept.is_source(path, folder)}
    return sorted(file for file in found - {MANIFEST, *files} if not file.startswith(f"{TUNED}/"))


def everything(folder: Path) -> list[str]:
    """The files that belong to a package, those compiled ahead of time and decisions too."""
    found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return sorted(path.relative_to(folder).as_posix() for path in found)


def faults(folder: Path) -> list[str]:
    """What keeps a folder from being the package that was built there; nothing where it is that."""
    try:
        return [*altered(folder), *(f"{file} added" for file in added(folder))]
    except PackageError:
        return [MANIFEST]


def _listed(folder: Path) -> dict[str, str]:
    """Name -> digest, as the manifest has it."""
    files = read_manifest(folder)["files"]
    if not isinstance(files, dict):
        raise PackageError(
            f"{folder / MANIFEST}: files is {type(files).__name__}, not an object; build the package again"
        )
    return files


def _digest(file: Path) -> str:
    """Of the bytes; "" where the file cannot be read."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""
