"""What builds do not make of a package but keep: tuned/, decisions measured on GPUs, and aot/, compiled kernels.

Decisions for presets ship with gdngen; those that a user measured are his own.  A rebuild keeps both folders as long as
the kernels are the same.
"""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from gdngen.errors import naming

FORMAT = 1  # of decisions
TUNED, AOT = "tuned", "aot"
STORE = Path(__file__).parent / TUNED  # decisions shipped with gdngen: <package name>/<gpu>.json


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def kernel_digests(files: Mapping[str, str]) -> dict[str, str]:
    """Kernel -> digest of what it is compiled from, as in decisions and in the package's own tuning.py."""
    kernels = {Path(file).stem: text for file, text in files.items() if Path(file).parent.name == "kernels"}
    shared = files.get("device.py", "")
    return {name: digest_of(text + shared)[:16] for name, text in kernels.items() if name != "__init__"}


def shipped(name: str, digests: Mapping[str, str]) -> dict[str, str]:
    """The decisions that gdngen ships for a package, as far as they were measured with these kernels."""
    found = {path.name: current_decisions(path.read_text(), digests) for path in (STORE / name).glob("*.json")}
    return {f"{TUNED}/{file}": text for file, text in found.items() if text}


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


def carry_over(folder: Path, stage: Path, digests: Mapping[str, str], listed: Mapping[str, str]) -> None:
    """Carry over what the build of these kernels did not make: own decisions, kernels compiled ahead of time."""
    for file in own_decisions(folder, listed):
        if text := current_decisions(text_of(folder / file), digests):
            (stage / file).parent.mkdir(exist_ok=True)
            with naming(stage / file):
                (stage / file).write_text(text)
    for index in folder.glob(f"{AOT}/*/index.json"):
        with contextlib.suppress(ValueError, LookupError, TypeError):
            if json.loads(index.read_text())["kernels"] == digests:
                shutil.copytree(index.parent, stage / AOT / index.parent.name)


def listed(manifest: Path) -> dict[str, str]:
    """What a manifest says of the files beside it, name -> digest; nothing where it cannot be read."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        return dict(json.loads(manifest.read_text())["files"])
    return {}


def is_source(path: Path, folder: Path) -> bool:
    """Whether a file of a package is one that builds answer for."""
    parts = path.relative_to(folder).parts
    return path.is_file() and "__pycache__" not in parts and parts[0] != AOT


def own_decisions(folder: Path, listed: Mapping[str, str]) -> list[str]:
    """Decisions that no build wrote: their digest is not the one that the manifest lists."""
    found = {f"{TUNED}/{path.name}": text_of(path) for path in sorted(folder.glob(f"{TUNED}/*.json"))}
    return [file for file, text in found.items() if listed.get(file) != digest_of(text)]


def text_of(file: Path) -> str:
    """Of a file that may be damaged: bytes that are no text become signs that are none of JSON."""
    return file.read_text(errors="replace")


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
