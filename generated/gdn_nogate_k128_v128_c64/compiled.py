"""Kernels compiled ahead of time, aot/<target>/: put into Triton's cache when a GPU is first used.

Only where Triton would make the very same: its version, ptxas and all else that it keeps kernels apart by.  Otherwise
it compiles as ever, and why is logged once, at debug level.  The launchers beside them are for one version of Python.
"""

import functools
import hashlib
import json
import logging
import sysconfig
import threading
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "aot"
FORMAT = 1
LOG = logging.getLogger("gdngen")
_reading: list[threading.Thread] = []


def read_ahead() -> None:
    """Triton's key is a digest of 400 MB of Triton: where kernels are at hand, begin with it while others import."""
    if FOLDER.is_dir():
        _reading.append(threading.Thread(target=_triton_key, daemon=True))
        _reading[0].start()


def _triton_key() -> str:
    try:
        from triton.runtime.cache import triton_key
    except ImportError:  # another version of Triton, or none
        return ""
    return str(triton_key())


@functools.cache
def install(arch: int) -> int:
    """Hand kernels for GPUs of an architecture to Triton; how many it did not have yet."""
    folder = FOLDER / f"sm_{arch}"
    if not FOLDER.is_dir():
        return 0
    for thread in _reading:
        thread.join()
    try:
        index = json.loads((folder / "index.json").read_text())
        reason = _mismatch(index, arch)
        if not reason:
            return _hand_over(folder, index)
    except Exception as error:  # Triton compiles then: never a reason to fail
        reason = f"{type(error).__name__}: {error}"
    LOG.debug("%s is not used, kernels are compiled: %s", folder, reason)
    return 0


def _mismatch(index: dict[str, Any], arch: int) -> str:
    """Why the kernels are not what Triton would make here; "" if they are."""
    import triton
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    here = {"format": FORMAT, "triton": triton.__version__}
    here["backend"] = make_backend(GPUTarget("cuda", arch, 32)).hash()  # the version of ptxas
    here["environment"] = str(sorted(get_cache_invalidating_env_vars().items()))
    return "; ".join(f"{name} {index[name]!r}, here {value!r}" for name, value in here.items() if index[name] != value)


def _hand_over(folder: Path, index: dict[str, Any]) -> int:
    from triton.runtime.cache import get_cache_manager

    key, count = _triton_key(), 0
    for name, entry in index["entries"].items():
        parts = (key, entry["source"], index["backend"], entry["options"], index["environment"])
        digest = hashlib.sha256("-".join(parts).encode()).hexdigest()
        cache, about = get_cache_manager(digest), f"{entry['kernel']}.json"
        if not cache.get_group(about):
            record = json.loads((folder / name / about).read_text())
            files = {about: cache.put(json.dumps(record | {"hash": digest}), about, binary=False)}
            for binary in (folder / name).glob("*.cubin"):
                files[binary.name] = cache.put(binary.read_bytes(), binary.name)
            cache.put_group(about, files)
            count += 1
    if index["python"] != sysconfig.get_config_var("EXT_SUFFIX"):
        LOG.debug("%s: its launchers are for %s; Triton builds them", folder, index["python"])
        return count
    for file in (folder / "launchers").glob("*/*.so"):
        cache = get_cache_manager(file.parent.name)
        if not cache.get_file(file.name):
            cache.put(file.read_bytes(), file.name)
    return count
