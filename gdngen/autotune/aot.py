"""Kernels compiled ahead of time, without a GPU: aot/<target>/ of a package, so that a first call compiles nothing.

Worker processes record what the launches of usual calls ask Triton for (launches.py), compile that, and build the
launchers, small C libraries through which Triton starts kernels.  Kept is what Triton's own cache keeps of a kernel, by
the parts of its key that do not depend on the machine; the package's compiled.py puts it there.
"""

import base64
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gdngen import kept, package
from gdngen import target as targets
from gdngen.autotune.launches import Recorder, Shape, Wanted
from gdngen.errors import EnvironmentProblem, PlanError, SpecError, naming
from gdngen.runtime.compilers import leaks_a_lane

FORMAT = 1  # of index.json
SEQUENCES = tuple(2**i for i in range(7))  # launches of 1 .. 64 sequences pick among the choices of a kernel
STATES = ((False, False), (False, True), (True, True), (True, False))  # initial state given, final state asked for
# What GPUs of an architecture call themselves.  Decisions for a GPU with none of these names count for every target.
GPUS = {"sm_80": r"\bA(100|30|800)\b", "sm_90": r"\b(H20|H100|H200|H800|GH200)\b", "sm_100": r"\b(G?B200)\b",
        "sm_120": r"\bRTX (50\d\d|PRO \d+)\b"}  # fmt: skip
LAUNCHER = "__triton_launcher"


@dataclass(frozen=True)
class Job:
    """Kernels of a package for one target."""

    folder: Path
    target: str
    dtypes: tuple[str, ...]
    heads: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Summary:
    """What was put into ``folder``; ``launchers``: 0 where no C compiler could build them, or Triton needs none."""

    folder: Path
    kernels: int
    launchers: int
    size: int


def build(job: Job) -> Summary:
    """Compile and swap in aot/<target>/ of the package.  PlanError where a kernel does not compile."""
    if targets.get(job.target).backend != "cuda":
        raise SpecError(f"aot: {job.target} is no CUDA target; Triton's cache is prepared for NVIDIA GPUs only")
    place = job.folder / kept.AOT
    place.mkdir(exist_ok=True)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="gdngen_aot_") as scratch:
        workers = min(16, os.cpu_count() or 1)
        with ProcessPoolExecutor(workers, context, _compile_only, (scratch,)) as pool:
            about, names = pool.submit(listed, job).result()
            done = [one for one in pool.map(compiled, [job] * len(names), names) if one]
            shared = pool.submit(utilities).result()
        stage = Path(tempfile.mkdtemp(prefix=f".{job.target}.", dir=place))
        entries = {name: entry for name, entry, _, _ in done}
        for name, _, files, launcher in done:
            _copy(files, stage / name)
            _copy_libraries(launcher, stage)
        _copy_libraries(shared, stage)
        texts = {str(path.relative_to(job.folder)): path.read_text() for path in job.folder.rglob("*.py")}
        index = about | {"kernels": kept.kernel_digests(texts), "entries": dict(sorted(entries.items()))}
        with naming(stage / "index.json"):
            (stage / "index.json").write_text(json.dumps(index, indent=1) + "\n")
        stage.chmod(0o755)
        package.swap(stage, place / job.target)
    libraries = list((place / job.target).glob("launchers/*/*"))
    size = sum(path.stat().st_size for path in (place / job.target).rglob("*") if path.is_file())
    return Summary(place / job.target, len(entries), len(libraries), size)


def _copy(files: list[Path], folder: Path) -> None:
    for file in files:
        folder.mkdir(parents=True, exist_ok=True)
        with naming(folder / file.name):
            shutil.copy(file, folder / file.name)


def _copy_libraries(files: list[Path], stage: Path) -> None:
    for file in files:  # under the digest by which Triton knows it; folders of its cache are named in base 32
        padded = file.parent.name + "=" * (-len(file.parent.name) % 8)
        _copy([file], stage / "launchers" / base64.b32decode(padded).hex())


def _compile_only(scratch: str) -> None:
    """In a worker, before Triton is imported: kernels are compiled, not interpreted, into a cache of their own."""
    os.environ |= {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": f"{scratch}/cache"}


def shapes(job: Job, operators: dict[str, bool], varlen: bool) -> Iterator[Shape]:
    """Usual calls; ``operators``: which there are, and whether they have a backward."""
    layouts = ("", "int32", "int64") if varlen else ("",)
    for operator, differentiable in operators.items():
        for dtype in job.dtypes:
            for heads in job.heads:
                for offsets in layouts:
                    for sequences in SEQUENCES:
                        rest = (operator, dtype, heads, 64, sequences, offsets)
                        yield from (Shape(*rest, *states) for states in STATES)
                        if differentiable:
                            yield from (Shape(*rest, both, both, True) for both in (False, True))


def listed(job: Job) -> tuple[dict[str, Any], list[str]]:
    """In a worker: what the index says of versions, and the names of the kernels."""
    import triton
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    target = targets.get(job.target)
    about = {"format": FORMAT, "target": job.target, "triton": triton.__version__}
    about["backend"] = make_backend(GPUTarget(target.backend, target.arch, target.warp_size)).hash()
    about["environment"] = str(sorted(get_cache_invalidating_env_vars().items()))
    about["python"] = sysconfig.get_config_var("EXT_SUFFIX")
    about["dtypes"], about["heads"] = list(job.dtypes), ["/".join(map(str, pair)) for pair in job.heads]
    return about, list(_wanted(job))


@cache
def _wanted(job: Job) -> dict[str, Wanted]:
    """The kernels of all usual calls by name, with the decisions of every GPU of the target and the cost model's."""
    found: dict[str, Wanted] = {}
    for gpu in [*gpus(job.folder, job.target), ""]:
        recorder = Recorder(job.folder, targets.get(job.target), gpu)
        host = recorder.host
        forms = [form for form in ("chunk", "recurrent") if hasattr(host, form)]
        operators = {form: hasattr(host, f"{form}_backward") for form in forms}
        for shape in shapes(job, operators, recorder.spec.varlen):
            found |= {one.name: one for one in recorder.record(shape).values()}
    return found


def gpus(folder: Path, target: str) -> list[str]:
    """Names of the GPUs of a target that the package has decisions for."""
    names = []
    for path in sorted(folder.glob(f"{kept.TUNED}/*.json")):
        try:
            name = str(json.loads(path.read_text())["gpu"])
        except (ValueError, LookupError, TypeError):
            continue
        known = [target for target, pattern in GPUS.items() if re.search(pattern, name)]
        names += [name] if target in known or not known else []
    return names


def compiled(job: Job, name: str) -> tuple[str, dict[str, str], list[Path], list[Path]] | None:
    """In a worker: (name, its entry in the index, files of the kernel, library of its launcher if one can be built).

    None for one that is compiled wrongly: the first call sees that, and compiles another.
    """
    wanted = _wanted(job)[name]
    target = wanted.function.device_caches[0][2]
    try:
        kernel = wanted.function.compile(wanted.source, target=target, options=wanted.options.__dict__)
    except Exception as error:
        reason = (str(error).strip() or repr(error)).splitlines()[-1]
        raise PlanError(f"kernel {wanted.kernel} does not compile for {job.target}: {reason}") from error
    if leaks_a_lane(kernel.asm["ptx"]):
        return None
    source, options = wanted.parts
    files = [Path(path) for file, path in kernel.metadata_group.items() if file.endswith((".json", ".cubin"))]
    launcher = [*_launcher(wanted, kernel.metadata)]
    return name, {"kernel": wanted.kernel, "source": source, "options": options}, files, launcher


def _launcher(wanted: Wanted, metadata: Any) -> list[Path]:
    """The library through which Triton starts a kernel of this signature, under the name that Triton gives it."""
    from triton.backends.nvidia import driver

    if not hasattr(driver, "make_launcher"):  # from Triton 3.7 on, one library starts every kernel: utilities()
        return []
    text = driver.make_launcher(wanted.constants, wanted.signature, getattr(metadata, "tensordesc_meta", None))
    return library(text, LAUNCHER)


def utilities() -> list[Path]:
    """In a worker: the library through which Triton talks to the driver."""
    from triton.backends.nvidia import driver

    if not hasattr(driver, "compile_module_from_src"):  # from Triton 3.8 on it is kept by folders of its machine
        return []
    return library((Path(driver.dirname) / "driver.c").read_text(), "cuda_utils")


def library(text: str, name: str) -> list[Path]:
    """A C library as Triton builds it: [its file in Triton's cache], [] where there is no C compiler.

    It is linked against a stand-in for libcuda, which machines without a GPU lack.
    """
    from triton.backends.nvidia.driver import include_dirs
    from triton.runtime.build import _build, platform_key
    from triton.runtime.cache import get_cache_manager

    kept = get_cache_manager(hashlib.sha256((text + platform_key()).encode()).hexdigest())
    file = f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if found := kept.get_file(file):
        return [Path(found)]
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return []
    with tempfile.TemporaryDirectory(prefix="gdngen_aot_") as scratch:
        source, driver = Path(scratch) / f"{name}.c", Path(scratch) / "driver.c"
        source.write_text(text)
        called = sorted(set(re.findall(r"\bcu[A-Z]\w+(?=\()", text)))
        driver.write_text("".join(f"void {function}(void) {{}}\n" for function in called))
        stand_in = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", f"{scratch}/libcuda.so"]
        try:
            subprocess.run([compiler, driver, *stand_in], check=True, capture_output=True)
            built = _build(name, str(source), scratch, [scratch], include_dirs, ["cuda"], [])
        except (OSError, subprocess.CalledProcessError) as error:
            raise EnvironmentProblem(f"aot: {compiler} cannot build Triton's {name}: {error}") from error
        return [Path(kept.put(Path(built).read_bytes(), file))]
