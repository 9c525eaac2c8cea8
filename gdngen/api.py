"""What users call: build a package, load one, look at the stages in between."""

import atexit
import contextlib
import hashlib
import importlib
import importlib.util
import keyword
import logging
import os
import shlex
import shutil
import sys
import sysconfig
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from filelock import FileLock

from gdngen import __version__, kept, knobs, package, target
from gdngen.errors import EnvironmentProblem, GdngenWarning, PackageError, SpecError, naming
from gdngen.passes.pipeline import Compilation, compile_spec
from gdngen.presets import get as preset_of
from gdngen.spec import Spec

OUT = "generated"  # parent folder of packages, from where one is
LOG = logging.getLogger("gdngen")
PROCESS = uuid.uuid4().hex


def as_spec(spec: Spec | str) -> Spec:
    """A Spec, or the Spec of a preset's name; SpecError for anything else."""
    if not isinstance(spec, (Spec, str)):
        raise SpecError(f"spec: got a {type(spec).__name__}, expected a gdngen.Spec or the name of a preset")
    return preset_of(spec).spec if isinstance(spec, str) else spec


def compilation(spec: Spec | str, target_name: str = target.DEFAULT_TARGET, pins: Iterable[str] = ()) -> Compilation:
    """Every stage from Spec to Plan, checked after each pass."""
    found = compile_spec(as_spec(spec), target.get(target_name), tuple(pins))
    if folder := knobs.dump():
        _dump(found, folder)
    return found


def _dump(found: Compilation, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"spec": f"{found.spec}\n", **{name: str(stage) for name, stage in found.stages.items()}}
    for number, (name, text) in enumerate(texts.items()):
        file = folder / f"{number:02}_{name}.txt"
        with naming(file):
            file.write_text(text)


def package_name(spec: Spec, name: str | None) -> str:
    """The package's name: the Spec's, or a given one that Python can import and that hides no other module."""
    if name is None:
        return spec.name
    if not name.isidentifier():
        raise SpecError(f"name: {name!r} is not a valid Python identifier; the package is imported under it")
    if keyword.iskeyword(name):
        raise SpecError(f"name: {name!r} is a keyword of Python: `import {name}` cannot be written; choose another")
    if _is_taken(name):
        raise SpecError(f"name: {name!r} is the name of another module, which the package would hide; choose another")
    return name


def _is_taken(name: str) -> bool:
    """Whether a module of Python or of an installed library, other than a package of gdngen, has this name."""
    if name in sys.stdlib_module_names or name == "gdngen":
        return True
    found = PathFinder.find_spec(name, [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    places = (found.submodule_search_locations or [""]) if found else []
    return any(not place or not (Path(place) / package.MANIFEST).is_file() for place in places)


def build(
    spec: Spec | str,
    out: str | os.PathLike[str] = OUT,
    *,
    name: str | None = None,
    target_name: str = target.DEFAULT_TARGET,
    pins: Iterable[str] = (),
    check: bool = False,
) -> Path:
    """Write the package of a Spec (or preset name) to out/<name>/ and return its folder.

    With ``check`` nothing is written: PackageError lists the files that would change.
    """
    spec, pins = as_spec(spec), tuple(pins)
    if not os.fspath(out):
        raise SpecError("out: got '', expected a folder; . is the one you are in")
    folder = Path(out) / package_name(spec, name)
    if not check:
        package.check_place(folder)
    found = compilation(spec, target_name, pins)
    files = package.render(found.plan, folder.name)
    changed = package.differences(files, folder)
    if check:
        if changed:
            command = package.build_command(found.plan, folder.name)
            command += "" if os.fspath(out) == OUT else f" --out {shlex.quote(os.fspath(out))}"
            fault = f"is not up to date: {', '.join(changed)}" if folder.is_dir() else "is not there"
            raise PackageError(f"{folder} {fault}; run {command}")
        return folder
    return package.write(files, folder) if changed else folder


_loaded: dict[str, ModuleType] = {}  # what load has imported, by module name
_loading, _importing = threading.RLock(), threading.RLock()


def load(spec: Spec | str, target_name: str = target.DEFAULT_TARGET) -> ModuleType:
    """The package of a Spec for a target as a module; built into the cache folder when it is not there yet.

    Any number of processes and threads may load at once: one builds, the others wait for it.  What is in the cache is
    compared with its manifest, once a process, and built again where it is damaged.
    """
    spec, target_name = as_spec(spec), target.get(target_name).name
    name = f"{spec.name}{member_suffix(type(spec))}_{target_name}_{_tool_digest()}"
    module_name = f"gdngen_package_{name}"
    with _loading:
        if module_name not in _loaded:
            _loaded[module_name] = import_folder(_stored(spec, target_name, name), module_name)
        return _loaded[module_name]


def _stored(spec: Spec, target_name: str, name: str) -> Path:
    """The folder of the package in the cache, or in one for this process where the cache cannot be used."""
    try:
        return _whole(spec, target_name, knobs.cache_dir() / "packages" / __version__ / name)
    except (OSError, EnvironmentProblem) as error:
        root = _private_folder()
        warnings.warn(
            f"packages cannot be kept in the cache folder: {error}; they are built for this process alone, in {root}. "
            "Set GDNGEN_CACHE_DIR to a folder that can be written",
            GdngenWarning,
            stacklevel=3,
        )
        return _whole(spec, target_name, root / name)


@cache
def _private_folder() -> Path:
    """A temporary folder that is there until the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="gdngen_packages_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _whole(spec: Spec, target_name: str, folder: Path) -> Path:
    """The folder with every file as built; built now where anything is missing or damaged."""
    if folder.exists() and not package.faults(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        if os.path.lexists(folder):
            faults = package.faults(folder)
            if not faults:  # another process built it meanwhile
                return folder
            text = f"{folder} is damaged ({', '.join(faults)}) and is built again"
            warnings.warn(text, GdngenWarning, stacklevel=5)
            if folder.is_symlink() or not folder.is_dir():
                folder.unlink()
            elif not (folder / package.MANIFEST).is_file():  # build replaces packages alone
                shutil.rmtree(folder)
        with _announced(spec, folder):
            return build(spec, folder.parent, name=folder.name, target_name=target_name)


@contextlib.contextmanager
def _announced(spec: Spec, folder: Path) -> Iterator[None]:
    """Says that a first call takes its time: in the log, and to who waits at a terminal."""
    started, terminal = time.perf_counter(), sys.stderr is not None and sys.stderr.isatty()
    LOG.info("building the package of %s, needed for the first time, into %s", spec, folder)
    if terminal:
        print(
            f"gdngen: building the package of {spec}, needed for the first time ...",
            end="",
            file=sys.stderr,
            flush=True,
        )
    try:
        yield
    finally:
        if terminal:
            print(f" {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)


def member_suffix(member: type[Spec]) -> str:
    """Nothing for a Spec; for a member from outside, whose name may be a plain Spec's, a digest of what makes it.

    That is its class and its Family, with all that they inherit: names and the text of their modules (ops are defined
    beside them).  A module without a file, as at a prompt, is told from itself in another process."""
    if member is Spec:
        return ""
    digest = hashlib.sha256()
    for own in (*member.__mro__, *getattr(member, "family", object).__mro__):
        file = getattr(sys.modules.get(own.__module__), "__file__", None)
        if not issubclass(Spec, own) and own.__module__.partition(".")[0] != __name__.partition(".")[0]:
            source = Path(file).read_bytes() if file and Path(file).exists() else f"{PROCESS} {id(own)}".encode()
            digest.update(f"{own.__module__}.{own.__qualname__}".encode() + source)
    return f"_{digest.hexdigest()[:8]}"


def _tool_digest() -> str:
    """A digest of sizes and times of gdngen's sources: a package of another state of the compiler is not reused."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*root.rglob("*.py"), *kept.STORE.rglob("*.json")]):
        stat = path.stat()
        digest.update(f"{path.relative_to(root)} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:8]


def import_folder(folder: Path, module_name: str) -> ModuleType:
    """Import a package's folder under a given top-level name; one thread at a time."""
    spec = importlib.util.spec_from_file_location(
        module_name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None or not (folder / "__init__.py").is_file():
        raise PackageError(f"{folder} cannot be imported: __init__.py is missing; build the package again")
    module = importlib.util.module_from_spec(spec)
    with _importing:
        for name in [name for name in sys.modules if name.startswith(f"{module_name}.")]:
            del sys.modules[name]  # of an earlier package of this name
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            sys.modules.pop(module_name, None)
            raise
    return module
