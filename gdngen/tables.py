"""Tuned tables of packages: decisions measured on GPUs, tied to the kernels they were measured with.

tuned/<gpu>.json in a package; those of presets ship with gdngen, as data beside this module.
"""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

FORMAT = 1
TUNED, AOT = "tuned", "aot"  # folders of a package that its build did not make
STORE = Path(__file__).parent / TUNED  # decisions shipped with gdngen: <package name>/<gpu>.json


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def kernel_digests(files: Mapping[str, str]) -> dict[str, str]:
    """Kernel -> digest of what it is compiled from, as in decisions and in the package's own tuning.py."""
    kernels = {Path(file).stem: text for file, text in files.items() if Path(file).parent.name == "kernels"}
    return {name: digest(text + files["device.py"])[:16] for name, text in kernels.items() if name != "__init__"}


def shipped(name: str, digests: Mapping[str, str]) -> dict[str, str]:
    """Decisions that gdngen ships for a package, as its files; only what was measured with these kernels."""
    found = {path.name: current_decisions(path.read_text(), digests) for path in (STORE / name).glob("*.json")}
    return {f"{TUNED}/{file}": text for file, text in sorted(found.items()) if text}


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


def not_among(listed: Mapping[str, str], folder: Path) -> list[str]:
    """Decisions in a package's folder whose digest is not the listed one."""
    found = {f"{TUNED}/{path.name}": path.read_text() for path in sorted(folder.glob(f"{TUNED}/*.json"))}
    return [file for file, text in found.items() if listed.get(file) != digest(text)]


def keep(folder: Path, stage: Path, own: Iterable[str], digests: Mapping[str, str]) -> None:
    """Carry over what the build of these kernels did not make: own decisions, kernels compiled ahead of time."""
    for file in own:
        if text := current_decisions((folder / file).read_text(), digests):
            (stage / file).parent.mkdir(exist_ok=True)
            (stage / file).write_text(text)
    for index in folder.glob(f"{AOT}/*/index.json"):
        with contextlib.suppress(ValueError, LookupError, TypeError):
            if json.loads(index.read_text())["kernels"] == digests:
                shutil.copytree(index.parent, stage / AOT / index.parent.name)


def faulty_decisions(folder: Path) -> list[str]:
    """What is wrong with the decisions in tuned/: files that cannot be read, or measured with other kernels alone."""
    files = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.py")}
    digests, faults = kernel_digests(files), list[str]()
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
