"""What this machine has for gdngen, what is missing, and which combinations are known to be bad."""

import os
import platform
import re
from importlib import metadata
from typing import Any

from gdngen import __version__, knobs, target
from gdngen.errors import EnvironmentProblem
from gdngen.requirements import TRITON

LIBRARIES = ("torch", "triton", "numpy", "networkx", "jinja2", "pydantic", "click", "filelock")


def report() -> dict[str, Any]:
    """Versions, Triton backends, GPUs, the cache; ``problems`` stop gdngen from working, ``warnings`` do not."""
    versions = {"gdngen": __version__, "python": platform.python_version()}
    versions |= installed()
    problems = [f"{name} is missing: pip install {name}" for name, version in versions.items() if version == "missing"]
    problems += filter(None, [too_old(versions["triton"])])
    gpus, backends = [], []
    try:
        gpus = _gpus()
        from triton.backends import backends as found

        backends = sorted(found)
    except Exception as error:
        problems.append(f"torch or triton cannot be imported: {type(error).__name__}: {error}")
    cache = _cache(problems)
    record = {"versions": versions, "triton_backends": backends, "gpus": gpus, "cache_folder": cache}
    return record | {"problems": problems, "warnings": warnings(versions, [gpu["target"] for gpu in gpus])}


def _cache(problems: list[str]) -> str:
    """The cache folder; what is wrong with it goes to the problems."""
    try:
        cache = folder = knobs.cache_dir()
    except EnvironmentProblem as error:
        problems.append(str(error))
        return "none"
    while not (folder.exists() or folder.is_symlink()):
        folder = folder.parent
    if not folder.is_dir():
        problems.append(
            f"{cache} cannot be made, {folder} is no folder: set GDNGEN_CACHE_DIR to one that can be written"
        )
    elif not os.access(folder, os.W_OK):
        problems.append(f"{cache} cannot be written: set GDNGEN_CACHE_DIR to a folder that can")
    return str(cache)


def installed() -> dict[str, str]:
    """Versions of the libraries that gdngen needs; "missing" where one is."""
    return {name: _version(name) for name in LIBRARIES}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"


def _gpus() -> list[dict[str, str]]:
    """Name and target of every visible GPU."""
    import torch

    found = target.detect()
    devices = range(torch.cuda.device_count() if found else 0)
    return [{"name": torch.cuda.get_device_name(i), "target": str(found)} for i in devices]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def too_old(triton: str) -> str:
    """That this Triton cannot compile every kernel; "" where it can, or where there is none."""
    oldest, newest = TRITON
    if triton == "missing" or _numbers(triton) >= _numbers(oldest):
        return ""
    return (
        f"Triton {triton} cannot compile every kernel; gdngen takes {oldest} to {newest}: "
        f"pip install 'triton>={oldest}' (and a torch that goes with it)"
    )


def too_new(triton: str) -> str:
    """That nobody has tried this Triton; "" where it is known."""
    oldest, newest = TRITON
    if _numbers(triton)[:2] <= _numbers(newest)[:2]:
        return ""
    return (
        f"Triton {triton} is newer than what gdngen is tested with ({oldest} to {newest}): run gdngen verify on "
        f"what you use, or pip install triton=={newest}"
    )


def warnings(versions: dict[str, str], gpu_targets: list[str]) -> list[str]:
    """Known-bad combinations, and settings that surprise."""
    numbers, triton = {name: _numbers(text) for name, text in versions.items()}, f"Triton {versions['triton']}"
    found = [*filter(None, [too_new(versions["triton"])])]
    if "sm_90" in gpu_targets and (3, 4) <= numbers["triton"] <= (3, 7, 0):
        found.append(
            f"{triton} miscompiles products of a transposed register tile on Hopper: packages of gdngen never contain "
            "one, kernels of other libraries may"
        )
    if {"sm_100", "sm_120"} & set(gpu_targets):
        found.append("kernels are known to race at some warp counts on Blackwell: run gdngen verify on what you use")
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        found.append("TRITON_INTERPRET is set: kernels run on the CPU, slowly")
    if not gpu_targets:
        found.append("no GPU: operators run as PyTorch on CPU tensors, or as kernels under TRITON_INTERPRET=1")
    return found


def text(record: dict[str, Any]) -> list[str]:
    """The report as lines."""
    gpus = ", ".join(f"{gpu['name']} ({gpu['target']})" for gpu in record["gpus"]) or "none"
    rows = record["versions"] | {"Triton for": ", ".join(record["triton_backends"]), "GPUs": gpus}
    lines = [f"{name:12}{value}" for name, value in (rows | {"cache": record["cache_folder"]}).items()]
    return lines + [f"{kind[:-1]}: {line}" for kind in ("warnings", "problems") for line in record[kind]]


def cached_packages() -> list[dict[str, Any]]:
    """What gdngen.load has built into the cache folder."""
    rows = []
    for manifest in sorted(knobs.cache_dir().glob("packages/*/*/manifest.json")):
        folder = manifest.parent
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        rows.append({"package": folder.name, "gdngen": folder.parent.name, "bytes": size, "folder": str(folder)})
    return rows
