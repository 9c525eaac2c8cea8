"""Source -> Package: stage, manifest, atomic swap, digests.

Two folders of a package are not made by its build: tuned/ holds decisions measured on GPUs, those that gdngen ships for
presets and a user's own, and aot/ kernels compiled ahead of time.  A rebuild keeps them while the kernels are the same.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from gdngen.codegen.sources import sources
from gdngen.errors import PackageError
from gdngen.passes.plan import Plan
from gdngen.target import DEFAULT_TARGET

MANIFEST = "manifest.json"
FORMAT = 1
TUNED, AOT = "tuned", "aot"
STORE = Path(__file__).parent / TUNED  # decisions shipped with gdngen: <package name>/<gpu>.json


def render(plan: Plan, name: str) -> dict[str, str]:
    """Every file of the package, the manifest included."""
    files = sources(plan, name)
    digests = kernel_digests(files)
    for path in sorted((STORE / plan.spec.name).glob("*.json")):
        if text := current_decisions(path.read_text(), digests):
            files[f"{TUNED}/{path.name}"] = text
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
        "files": {file: _digest(text) for file, text in files.items()},
    }
    return json.dumps(record, indent=2, sort_keys=True) + "\n"


def build_command(plan: Plan, name: str) -> str:
    """The command that builds this very package."""
    parts = [plan.spec.command] + [f"--pin {pin}" for pin in plan.pins]
    parts += [f"--target {plan.target}"] if plan.target != DEFAULT_TARGET else []
    return " ".join(parts + ([f"--name {name}"] if name != plan.spec.name else []))


def kernel_digests(files: Mapping[str, str]) -> dict[str, str]:
    """Kernel -> digest of what it is compiled from, as in decisions and in the package's own tuning.py."""
    kernels = {Path(file).stem: text for file, text in files.items() if Path(file).parent.name == "kernels"}
    return {name: _digest(text + files["device.py"])[:16] for name, text in kernels.items() if name != "__init__"}


def current_decisions(text: str, digests: Mapping[str, str]) -> str:
    """A decisions file without what was measured with other kernels; "" if nothing is left.

    A file that cannot be read stays as it is: the package says so when it is used.
    """
    try:
        record = json.loads(text)
        fitting = {name: digest for name, digest in record["kernels"].items() if digests.get(name) == digest}
        kept = [one for one in record["decisions"] if one["kernel"] in fitting]
        if len(kept) == len(record["decisions"]):
            return text
    except (ValueError, LookupError, TypeError, AttributeError):
        return text
    return json.dumps(record | {"kernels": fitting, "decisions": kept}, indent=2) + "\n" if kept else ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write(files: Mapping[str, str], folder: Path) -> Path:
    """Write the package beside its place and swap it in, so that readers see the old one or the new one, never a mix.

    An existing folder is replaced only when it is a package (holds a manifest) or empty; PackageError otherwise.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / MANIFEST).exists():
        raise PackageError(
            f"{folder} exists and is not a gdngen package (no {MANIFEST}); choose another --out or --name"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for file, text in files.items():
            path = stage / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        _keep_own(folder, stage, kernel_digests(files))
        stage.chmod(0o755)
        swap(stage, folder)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return folder


def _keep_own(folder: Path, stage: Path, digests: Mapping[str, str]) -> None:
    """Carry over what the build of these kernels did not make: own decisions, kernels compiled ahead of time."""
    for file in _own_decisions(folder):
        if text := current_decisions((folder / file).read_text(), digests):
            (stage / file).parent.mkdir(exist_ok=True)
            (stage / file).write_text(text)
    for index in folder.glob(f"{AOT}/*/index.json"):
        with contextlib.suppress(ValueError, LookupError, TypeError):
            if json.loads(index.read_text())["kernels"] == digests:
                shutil.copytree(index.parent, stage / AOT / index.parent.name)


def _own_decisions(folder: Path) -> list[str]:
    """Decisions that no build wrote: their digest is not the manifest's."""
    listed: object = {}
    with contextlib.suppress(PackageError):
        listed = read_manifest(folder)["files"]
    assert isinstance(listed, dict)
    found = {f"{TUNED}/{path.name}": path.read_text() for path in sorted(folder.glob(f"{TUNED}/*.json"))}
    return [file for file, text in found.items() if listed.get(file) != _digest(text)]


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
    own = set(_own_decisions(folder))
    present = {str(path.relative_to(folder)) for path in folder.rglob("*") if _is_source(path, folder)}
    changed = {
        file for file, text in files.items() if not (folder / file).exists() or (folder / file).read_text() != text
    }
    return sorted((changed | (present - set(files))) - own)


def _is_source(path: Path, folder: Path) -> bool:
    parts = path.relative_to(folder).parts
    return path.is_file() and "__pycache__" not in parts and parts[0] != AOT


def read_manifest(folder: Path) -> dict[str, object]:
    """The manifest; PackageError when it is missing or cannot be read."""
    path = folder / MANIFEST
    if not path.exists():
        raise PackageError(f"{folder} is not a gdngen package: {MANIFEST} is missing; build one with gdngen build")
    try:
        record = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise PackageError(f"{path}: not valid JSON ({error}); build the package again") from None
    if record.get("format") != FORMAT:
        raise PackageError(
            f"{path}: format {record.get('format')!r}, this gdngen reads {FORMAT}; build the package again"
        )
    return record


def altered(folder: Path) -> list[str]:
    """Files that differ from the manifest's digests, or are missing; decisions may have been measured anew."""
    files = read_manifest(folder)["files"]
    assert isinstance(files, dict)
    built = {file: digest for file, digest in files.items() if not file.startswith(f"{TUNED}/")}
    return sorted(
        f for f, digest in built.items() if not (folder / f).exists() or _digest((folder / f).read_text()) != digest
    )


def faulty_decisions(folder: Path) -> list[str]:
    """What is wrong with the decisions in tuned/: files that cannot be read, or measured with other kernels alone."""
    files = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.py")}
    digests, faults = kernel_digests(files), []
    for path in sorted(folder.glob(f"{TUNED}/*.json")):
        try:
            record = json.loads(path.read_text())
            if record["format"] != FORMAT:
                faults.append(f"{path.name}: format {record['format']!r}, this gdngen reads {FORMAT}")
            elif record["decisions"] and not current_decisions(path.read_text(), digests):
                faults.append(f"{path.name}: measured with other kernels; run gdngen tune {folder}")
        except (ValueError, LookupError, TypeError) as error:
            faults.append(f"{path.name}: cannot be read ({type(error).__name__}: {error})")
    return faults
