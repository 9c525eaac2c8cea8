"""After a first call no length, batch or offset asks for another kernel.

Triton compiles anew for an argument that is 1 or a multiple of 16, for an aligned address, for another type.  Here its
own binder tells what each launch asks for, in a process that records launches instead of compiling them.
"""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gdngen import api
from gdngen.spec import Spec

ROOT = Path(__file__).resolve().parent.parent
SPECS = {
    "scalar": Spec(gate="scalar", key_dim=32, value_dim=64, chunk=16, qk_norm=True),
    "key and value": Spec(gate="key+value", key_dim=16, value_dim=16, chunk=16),
    "odd channels": Spec(rule="additive", gate="scalar", beta="none", key_dim=24, value_dim=20, chunk=16),
    "dt": Spec(rule="additive", beta="dt", key_dim=32, value_dim=16, chunk=16),
}
HEADS, CALLS = (2, 4), 200


def whole(name: str, size: tuple[int, ...], dtype: torch.dtype, start: int) -> torch.Tensor:
    return torch.empty(size, dtype=dtype)


def part_of_longer(name: str, size: tuple[int, ...], dtype: torch.dtype, start: int) -> torch.Tensor:
    """Tokens, or offsets, from ``start`` on."""
    if name == "cu_seqlens":
        return torch.empty(size[0] + start, dtype=dtype)[start:]
    if is_per_token(name):
        return torch.empty((size[0], start + size[1], *size[2:]), dtype=dtype)[:, start:]
    return torch.empty(size, dtype=dtype)


def columns(name: str, size: tuple[int, ...], dtype: torch.dtype, start: int) -> torch.Tensor:
    """Some columns of a projection whose rows are no multiple of 16."""
    if name not in "qkv":
        return whole(name, size, dtype, start)
    width = size[2] * size[3]
    return torch.empty((*size[:2], width + 24), dtype=dtype)[..., 8 : 8 + width].unflatten(2, size[2:])


def head_first(name: str, size: tuple[int, ...], dtype: torch.dtype, start: int) -> torch.Tensor:
    if not is_per_token(name):
        return torch.empty(size, dtype=dtype)
    return torch.empty((size[0], size[2], size[1], *size[3:]), dtype=dtype).transpose(1, 2)


def channels_before_tokens(name: str, size: tuple[int, ...], dtype: torch.dtype, start: int) -> torch.Tensor:
    """Gates as a convolution leaves them; q, k and v are copied before any launch."""
    if name in "qkv" or not is_per_token(name) or len(size) < 4:
        return torch.empty(size, dtype=dtype)
    return torch.empty((size[0], size[2], size[3], size[1]), dtype=dtype).permute(0, 3, 1, 2)


def is_per_token(name: str) -> bool:
    return name in ("q", "k", "v", "g", "gk", "gv", "beta", "b", "a", "dt")


VIEWS = (whole, part_of_longer, columns, head_first, channels_before_tokens)


def later_kernels(folder: Path, calls: int) -> dict[str, Any]:
    """How many kernels the first calls ask for, and those that later calls add, by what is called."""
    from gdngen.autotune.launches import Recorder, Shape
    from gdngen.target import TARGETS

    recorder, numbers = Recorder(folder, TARGETS["sm_90"]), random.Random(0)
    tuning = sys.modules[f"{folder.name}.tuning"]
    for kernel, table in tuning.TUNING.items():  # the choice depends on the number of sequences, and may
        tuning.forced[kernel] = table["sm_90/2"]
    forms = [("chunk", False), ("recurrent", False)] + [("chunk", True)] * hasattr(recorder.host, "chunk_backward")
    first, added = 0, []
    for operator, backward in forms:
        for offsets in ("", "int64"):
            for view in VIEWS:
                known: set[str] = set()
                for number in range(calls if view in (whole, columns) else max(10, calls // 8)):
                    T, N, start = numbers.randint(1, 700), numbers.randint(1, 6), numbers.randint(0, 40)
                    T, N = {0: (64, 2), 1: (1, 1), 2: (67, 1)}.get(number, (T, N))
                    if view in (columns, channels_before_tokens):
                        T = max(T, 2)  # the stride of a single token is open: such a view may be one of another layout
                    shape = Shape(operator, "bfloat16", HEADS, T, N, offsets, True, True, backward)
                    found = recorder.record(shape, lambda *of, view=view, start=start: view(*of, start))
                    new = {f"{one.kernel} {one.signature} {one.facts} {one.constants}" for one in found.values()}
                    if number == 0:
                        known, first = new, first + len(new)
                    elif new - known:
                        added.append(f"{operator} {offsets} {view.__name__} T={T} N={N}: {sorted(new - known)[0]}")
                        known |= new
    return {"first": first, "added": added}


def recorded(folder: Path, calls: int, cache: Path | None = None) -> dict[str, Any]:
    """later_kernels of so many calls, wide_loads for 0, in a process that does not interpret kernels."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {"TRITON_CACHE_DIR": str(cache)} if cache else {}
    command = [sys.executable, __file__, str(folder), str(calls)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("specialized")
    return {what: api.build(spec, out) for what, spec in SPECS.items()}


@pytest.mark.parametrize("what", SPECS)
def test_no_length_asks_for_another_kernel(folders: dict[str, Path], what: str) -> None:
    found = recorded(folders[what], CALLS)
    assert found["first"] >= 20 and found["added"] == []


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("kernels/prepare.py", '"g_sb", ', ""),  # T * HV, a multiple of 16 or not
        ("kernels/prepare.py", '"beta", ', ""),  # an address
        ("kernels/scan.py", '"v_sb", ', ""),
        ("kernels/states.py", '"T", "N"', '"N"'),
        ("kernels/recurrence.py", '"cu_seqlens",', ""),
        ("launch.py", "            N,\n", "            2**31 * (T % 2),\n"),  # the type
        ("machine.py", "return len(strides) < 4 or", "return True or"),
    ],
)
def test_a_planted_argument_is_found(folders: dict[str, Path], tmp_path: Path, file: str, old: str, new: str) -> None:
    what = "key and value" if file == "machine.py" else "scalar"
    folder = shutil.copytree(folders[what], tmp_path / "planted", ignore=shutil.ignore_patterns("__pycache__"))
    text = (folder / file).read_text()
    planted = text.replace(old, new).replace(f"    {old}\n", "")
    assert planted != text
    (folder / file).write_text(planted)
    assert recorded(folder, 20)["added"]


def wide_loads(folder: Path) -> dict[str, int]:
    """Loads of 16 bytes in the machine-independent code of prepare and scan, for equal lengths and for offsets.

    Of a target without tensor descriptors, which load tiles whatever is known of addresses.
    """
    from gdngen.autotune.launches import Recorder, Shape
    from gdngen.target import TARGETS

    recorder, found = Recorder(folder, TARGETS["sm_80"]), {}
    for offsets in ("", "int64"):
        for wanted in recorder.record(Shape("chunk", "bfloat16", (1, 2), 257, 3, offsets)).values():
            target, options = wanted.function.device_caches[0][2], wanted.options.__dict__
            text = wanted.function.compile(wanted.source, target=target, options=options).asm["ptx"]
            wide = re.findall(r"ld\.global\S*\.v4\.b32|cp\.async\.cg\.shared\.global .*, 0x10", text)
            found[f"{wanted.kernel} {offsets or 'dense'}"] = len(wide)
    return found


@pytest.mark.full
def test_wide_loads_stay_wide(tmp_path: Path) -> None:
    """The stride of batches is not known to be a multiple of 16, but where it is kernels say so."""
    built = api.build(Spec(gate="scalar", key_dim=64, value_dim=64, backward=False), tmp_path, name="wide")
    found = recorded(built, 0, tmp_path / "cache")
    assert found["prepare dense"] == found["prepare int64"] > 0
    assert found["scan dense"] == found["scan int64"] > 0
    folder = shutil.copytree(built, tmp_path / "narrow", ignore=shutil.ignore_patterns("__pycache__"))
    device = (folder / "device.py").read_text()
    (folder / "device.py").write_text(device.replace("16 if ROW % 16 == 0 else 8 if ROW % 8 == 0 else 1", "1"))
    narrow = recorded(folder, 0, tmp_path / "cache")
    assert narrow["prepare dense"] < narrow["prepare int64"] == found["prepare int64"]


if __name__ == "__main__":
    where, count = Path(sys.argv[1]), int(sys.argv[2])
    print(json.dumps(later_kernels(where, count) if count else wide_loads(where)))
