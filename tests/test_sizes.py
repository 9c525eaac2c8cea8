"""Sizes at which kernels once went wrong on a GPU: each of them there, and their machine code and memory without one.

Numbers of the configurations: 1 gave wrong results, 2 accessed memory of others, 3 wanted more shared memory than
there is, 4 missed a budget.
"""

import json
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch
from support import ROOT

from gdngen import inspection
from gdngen.passes import tile
from gdngen.spec import Spec

NORM, RAW, VFIRST = {"qk_norm": True}, {}, {"state_v_first": True}
NOGATE, KEY = {"gate": "none"}, {"gate": "key"}
ADDITIVE = {"rule": "additive"}
SUM = {**ADDITIVE, "gate": "none", "beta": "none"}
FUSED = {**NORM, "fused_gate": "softplus", "beta_logits": True}
PACKED = (0, 1, 1, 40, 100)


def listed(
    number: str, K: int, V: int, options: dict[str, Any] = RAW, heads: tuple[int, int] = (1, 2), T: int = 200,
    offsets: tuple[int, ...] = (), dtype: str = "bfloat16", gates: str = "mild", through: str = "chunk",
    chunk: int = 64, sequences: int = 2, needs: str = "all",
) -> Any:  # fmt: skip
    """A configuration as benchmarks/check_sizes.py takes it, under its number in the list."""
    call: dict[str, Any] = {"gates": gates, "through": through, "tokens": T}
    call |= {"offsets": offsets} if offsets else {"sequences": sequences}
    spec = {"key_dim": K, "value_dim": V, "chunk": chunk, **options}
    made = {"spec": spec, "dtype": dtype, "heads": heads, "strided": False, "stateful": True, "needs": needs, "seed": 1}
    return pytest.param({**made, "calls": [call]}, id=f"{number}-k{K}-v{V}-c{chunk}-{dtype}-{gates}-{through}")


LISTED = [
    # 1: wrong numbers
    listed("1a", 32, 48, NORM, T=75),
    *(listed("1a", 32, 48, NORM, T=75, gates=gates) for gates in ("zero", "strong", "mixed")),
    listed("1b", 32, 48, NORM, (1, 4), T=75),
    listed("1c", 32, 48, NORM, T=100, offsets=PACKED),
    listed("1d", 32, 48, FUSED, T=75),
    listed("1e", 32, 48, NORM, T=75, needs="some"),
    listed("1f", 32, 48, NORM, T=75, through="recurrent"),
    listed("1g", 48, 48, NORM, T=75),
    listed("1h", 60, 48, NORM, T=75, chunk=32),
    listed("1i", 32, 48, NORM | KEY, T=75),
    listed("1j", 32, 200, NORM, T=100, offsets=PACKED),
    listed("1k", 32, 256, NORM, (1, 3), T=100, offsets=PACKED),
    listed("1l", 24, 256, T=100, offsets=PACKED),
    listed("1m", 24, 64, T=33, offsets=(0, 1, 1, 33)),
    listed("1n", 16, 128, VFIRST),
    listed("1o", 32, 200, SUM),
    listed("1p", 32, 16, NOGATE, T=64),
    listed("1q", 32, 16, T=100, offsets=PACKED, chunk=128),
    # 2: illegal memory accesses
    listed("2a", 64, 16, NORM, (1, 3), dtype="float32"),
    listed("2b", 96, 16, NORM | NOGATE, T=150),
    listed("2c", 80, 16, NOGATE | VFIRST, T=33, offsets=(0, 1, 1, 33)),
    listed("2d", 16, 16, ADDITIVE, (1, 3), dtype="float32"),
    listed("2e", 24, 16, ADDITIVE, (2, 6), T=33, dtype="float32"),
    listed("2f", 16, 16, T=17, heads=(2, 2), sequences=35_000),
    listed("2g", 48, 32, SUM | VFIRST, (2, 2), T=64),
    *(listed("2h", size, size, NORM, (2, 4), T=70, dtype="float32") for size in (8, 16, 32)),
    # 3: more shared memory than there is
    listed("3a", 128, 128, dtype="float32", chunk=128),
    listed("3b", 24, 64, NORM, chunk=128),
    listed("3c", 192, 16, NOGATE, T=100, offsets=PACKED, chunk=128),
    listed("3d", 128, 128, dtype="float16", chunk=128),
    listed("3e", 256, 256, dtype="float16", chunk=128),
    *(listed("3f", 256, V, heads=(2, 6), T=100, offsets=PACKED) for V in (200, 256)),
    *(listed("3g", 192, V, dtype="float32") for V in (16, 128)),
    *(listed("3h", 256, V, dtype="float32") for V in (64, 256)),
    # 4: over the budget
    listed("4a", 16, 200, NORM | NOGATE, T=150),
    listed("4b", 40, 200, KEY, T=150),
    listed("4c", 32, 48, NORM | KEY, T=150, gates="weak"),
    listed("4d", 1, 32, NORM | NOGATE | VFIRST, (1, 4), T=128, gates="weak"),
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("config", LISTED)
def test_on_a_gpu(config: dict[str, Any]) -> None:
    """Results and every gradient, twice, both operators, in a process that may die alone."""
    command = [sys.executable, ROOT / "benchmarks" / "check_sizes.py", "--config", json.dumps(config)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and " 1 ok" in done.stdout, done.stdout + done.stderr[-2000:]


def records(config: dict[str, Any], target: str = "sm_90", listed: bool = True) -> list[dict[str, Any]]:
    """Every kernel of a listed configuration, compiled."""
    dtype = next(short for short, name in inspection.DTYPES.items() if name == config["dtype"])
    layout = "packed" if "offsets" in config["calls"][0] else "dense"
    return list(
        inspection.inspect(Spec(**config["spec"]), [target], [dtype], [layout], listed=[target] if listed else [])
    )


SHORT = ("1a-k32-v48-c64-bfloat16-mild-chunk", "1o", "2e")


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(*one.values, id=one.id, marks=() if one.id.startswith(SHORT) else pytest.mark.full)
        for one in LISTED
        if one.id[0] in "12" and one.id.endswith("-mild-chunk")
    ],
)
def test_machine_code(config: dict[str, Any]) -> None:
    """Matrix instructions find their operands."""
    found = records(config)
    assert not [one["kernel"] for one in found if one["miscompiled"]]
    assert all(one["shared_bytes"] <= one["shared_limit"] for one in found)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(*one.values, id=one.id, marks=() if one.id.startswith("3b") else pytest.mark.full)
        for one in LISTED
        if one.id[0] == "3"
    ],
)
def test_shared_memory(config: dict[str, Any]) -> None:
    for one in records(config, listed=False):
        assert one["shared_bytes"] <= one["shared_limit"], one


@pytest.mark.full
@pytest.mark.parametrize("target", ["sm_80", "sm_100", "sm_120", "gfx942"])
@pytest.mark.parametrize("number", ["1o", "2a", "3b", "3g"])
def test_other_targets(number: str, target: str) -> None:
    config = next(one.values[0] for one in LISTED if one.id.startswith(number))
    for one in records(config, target):
        assert one["shared_bytes"] <= one["shared_limit"] and not one["miscompiled"], one


def test_the_fault_itself_is_seen() -> None:
    """Key and value tiles as narrow as they were: two swizzles at one place, and a descriptor without its base."""
    with mock.patch.object(tile, "NARROWEST", 16), mock.patch.object(tile, "narrowest", lambda *_: 16):
        found = records(next(one.values[0] for one in LISTED if one.id.startswith("1o")))
    assert [one["kernel"] for one in found if one["miscompiled"]]
