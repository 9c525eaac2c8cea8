"""Spec -> package: written with a manifest, kept in the cache folder, loaded once a process."""

import hashlib
import json
import shutil
import threading
import warnings
from os import PathLike
from pathlib import Path
from types import ModuleType

from filelock import FileLock

from gdngen import __version__, api, knobs, package
from gdngen.errors import EnvironmentProblem, GdngenWarning
from gdngen.kept import digest_of
from gdngen.mixer.sources import sources
from gdngen.mixer.specs import MixerSpec

_loaded: dict[MixerSpec, ModuleType] = {}
_loading = threading.RLock()


def render(spec: MixerSpec, name: str) -> dict[str, str]:
    """Every file of the package, the manifest included."""
    files = sources(spec, name)
    record = {
        "format": package.FORMAT,
        "name": name,
        "gdngen": __version__,
        "build": f"gdngen.mixer.packages.build({type(spec).__name__}(...), out)",
        "spec": {"member": type(spec).__name__, **spec.model_dump(mode="json")},
        "target": "any",
        "plan_digest": hashlib.sha256("".join(files.values()).encode()).hexdigest()[:16],
        "cuts": {},
        "notes": [],
        "files": {file: digest_of(text) for file, text in files.items()},
    }
    files[package.MANIFEST] = json.dumps(record, indent=2, sort_keys=True) + "\n"
    return dict(sorted(files.items()))


def build(spec: MixerSpec, out: str | PathLike[str], name: str | None = None) -> Path:
    """Write the package of a Spec to out/<name>/ and return its folder; the name is the Spec's own by default."""
    folder = Path(out) / api.package_name(spec, name)  # type: ignore[arg-type]
    return package.write(render(spec, folder.name), folder)


def load(spec: MixerSpec) -> ModuleType:
    """The package of a Spec as a module; built into the cache folder when it is not there yet.

    Any number of processes and threads may load at once: one builds, the others wait for it.
    """
    with _loading:
        if spec not in _loaded:
            name = f"{spec.name}_{api._tool_digest()}"
            _loaded[spec] = api.import_folder(_stored(spec, name), f"gdngen_package_{name}")
        return _loaded[spec]


def _stored(spec: MixerSpec, name: str) -> Path:
    try:
        return _whole(spec, knobs.cache_dir() / "packages" / __version__ / name)
    except (OSError, EnvironmentProblem) as error:
        root = api._private_folder()
        text = (
            f"packages cannot be kept in the cache folder: {error}; they are built for this process alone, in {root}. "
        )
        warnings.warn(text + "Set GDNGEN_CACHE_DIR to a folder that can be written", GdngenWarning, stacklevel=4)
        return _whole(spec, root / name)


def _whole(spec: MixerSpec, folder: Path) -> Path:
    """The folder with every file as built; built now where anything is missing or damaged."""
    if folder.exists() and not package.faults(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        if folder.exists() and package.faults(folder):
            if not (folder / package.MANIFEST).is_file():  # build replaces packages alone
                shutil.rmtree(folder)
            return build(spec, folder.parent, folder.name)
        return folder if folder.exists() else build(spec, folder.parent, folder.name)
