"""Package -> wheel: the folder as pip installs it, NAME-VERSION-py3-none-any.whl.  Same files, same bytes."""

import base64
import hashlib
import re
import zipfile
from pathlib import Path

from gdngen import package
from gdngen.errors import naming
from gdngen.requirements import RUNTIME

EPOCH = (1980, 1, 1, 0, 0, 0)  # the first that a zip file can hold


def write(folder: Path) -> Path:
    """Write the wheel of a package beside it, in place of an older one; its path.

    The version is that of gdngen, and after a + a digest of the manifest, which lists every file: pip tells two
    builds apart.  What was compiled ahead of time and what was tuned are in it.
    """
    manifest = package.read_manifest(folder)
    name, digest = str(manifest["name"]), hashlib.sha256((folder / package.MANIFEST).read_bytes()).hexdigest()[:8]
    version = f"{manifest.get('gdngen')}+{digest}"
    stem = f"{re.sub(r'[-_.]+', '_', name).lower()}-{version}"
    files = {f"{name}/{file}": (folder / file).read_bytes() for file in package.everything(folder)}
    info = f"{stem}.dist-info"
    files[f"{info}/METADATA"] = _metadata(name, version, str(manifest["build"])).encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: gdngen\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = "".join(f"{file},{_digest(content)},{len(content)}\n" for file, content in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    for old in folder.parent.glob(f"{stem.partition('-')[0]}-*-py3-none-any.whl"):
        old.unlink()
    path = folder.parent / f"{stem}-py3-none-any.whl"
    with naming(path), zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, content in files.items():
            entry = zipfile.ZipInfo(file, EPOCH)
            entry.external_attr, entry.compress_type = 0o100644 << 16, zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    return path


def _metadata(name: str, version: str, command: str) -> str:
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", f"Summary: Operators made by: {command}"]
    lines += ["Requires-Python: >=3.10", *(f"Requires-Dist: {requirement}" for requirement in RUNTIME)]
    return "\n".join(lines) + "\n"


def _digest(content: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
