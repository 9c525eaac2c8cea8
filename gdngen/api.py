"""What users call: build a package, load one, look at the stages in between."""

import hashlib
import importlib
import importlib.util
import os
import sys
import uuid
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from filelock import FileLock

from gdngen import __version__, kept, knobs, package, target
from gdngen.errors import PackageError, SpecError
from gdngen.passes.pipeline import Compilation, compile_spec
from gdngen.presets import get as preset_of
from gdngen.spec import Spec

PROCESS = uuid.uuid4().hex


def as_spec(spec: Spec | str) -> Spec:
    """A Spec, or the Spec of a preset's name."""
    return preset_of(spec).spec if isinstance(spec, str) else spec


def compilation(spec: Spec | str, target_name: str = target.DEFAULT_TARGET, pins: Iterable[str] = ()) -> Compilation:
    """Every stage from Spec to Plan, checked after each pass."""
    found = compile_spec(as_spec(spec), target.get(target_name), tuple(pins))
    if folder := knobs.dump():
        _dump(found, folder)
    return found


def _dump(found: Compilation, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "00_spec.txt").write_text(f"{found.spec}\n")
    for number, (name, stage) in enumerate(found.stages.items(), 1):
        (folder / f"{number:02}_{name}.txt").write_text(str(stage))


def package_name(spec: Spec, name: str | None) -> str:
    """The package's name: the Spec's, or a given valid identifier."""
    if name is not None and not name.isidentifier():
        raise SpecError(f"name: {name!r} is not a valid Python identifier; the package is imported under it")
    return name or spec.name


def build(
    spec: Spec | str,
    out: str | os.PathLike[str] = "generated",
    *,
    name: str | None = None,
    target_name: str = target.DEFAULT_TARGET,
    pins: Iterable[str] = (),
    check: bool = False,
) -> Path:
    """Write the package of a Spec (or preset name) to out/<name>/ and return its folder.

    With ``check`` nothing is written: PackageError lists the files that would change.
    """
    spec = as_spec(spec)
    found = compilation(spec, target_name, pins)
    folder = Path(out) / package_name(spec, name)
    files = package.render(found.plan, folder.name)
    changed = package.differences(files, folder)
    if check:
        if changed:
            command = package.build_command(found.plan, folder.name)
            raise PackageError(f"{folder} is not up to date: {', '.join(changed)}; run {command}")
        return folder
    return package.write(files, folder) if changed else folder


def load(spec: Spec | str, target_name: str = target.DEFAULT_TARGET) -> ModuleType:
    """The package of a Spec as a module; built into the cache folder when it is not there yet.

    Any number of processes and threads may load at once: one builds, the others wait for it.
    """
    spec = as_spec(spec)
    root = knobs.cache_dir() / "packages" / __version__
    folder = root / f"{spec.name}{member_suffix(type(spec))}_{_tool_digest()}"
    module_name = f"gdngen_package_{folder.name}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    if not (folder / package.MANIFEST).exists():
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{folder.name}.lock"):
            if not (folder / package.MANIFEST).exists():
                build(spec, root, name=folder.name, target_name=target_name)
    return import_folder(folder, module_name)


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
    """Import a package's folder under a given top-level name."""
    spec = importlib.util.spec_from_file_location(
        module_name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise PackageError(f"{folder} cannot be imported: __init__.py is missing; build the package again")
    module = importlib.util.module_from_spec(spec)
    for name in [name for name in sys.modules if name.startswith(f"{module_name}.")]:
        del sys.modules[name]  # of an earlier package of this name
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(module_name, None)
        raise
    return module
