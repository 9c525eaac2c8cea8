"""The first call compiles its kernels side by side, and computes nothing while it does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

from gdngen import api
from gdngen.spec import Spec

PINS = ["cut=X+P", "backward_cut=S+X+e+r+P+dS+dy", "save=speed"]  # forward hands X and P over to backward
# With a stand-in for the driver of a GPU: Triton binds arguments and compiles, nothing can run.
SCRIPT = """
import json, sys, threading, torch
from pathlib import Path
from gdngen.autotune.launches import Recorder, Shape
from gdngen.target import get
folder = Path(sys.argv[1])
recorder = Recorder(folder, get("sm_90"))
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
launchers, workers = [], set()
def zeros(name, size, dtype):
    return torch.zeros(size, dtype=dtype)
def launcher(source, metadata):
    launchers.append(metadata.name)
    workers.add(threading.current_thread().name)
driver.active.launcher_cls = launcher
host = recorder.host
kernels = [x for x in vars(host).values() if isinstance(x, JITFunction)]
for kernel in kernels:
    del kernel._do_compile  # the recorder's: here kernels are compiled
rehearsal = sys.modules[folder.name + ".rehearsal"]
call, states = recorder._call(Shape("chunk", "bfloat16", (1, 2), tokens=40, final=True), zeros)
given = [name for name, x in call.inputs.items() if x is not None]
found, kept = {}, []
for name, rest in (("chunk", (kept,)), ("chunk_backward", (given, call.inputs["v"], *states))):
    first, again = (rehearsal.compile_together(getattr(host, name).__wrapped__, call, rest)[0] for _ in range(2))
    found[name] = [sorted(kernel.name for kernel in made) for made in (first, again)]
def one_that_fails(call):
    host.LAUNCHES["recurrence"] += 1
    host.recurrence[(1,)]()  # without its arguments
fails = type(host.chunk)(one_that_fails.__code__, vars(host) | {"host": host})
rehearsal.rehearse(fails, call, ())
found["after a failure"] = len(rehearsal.compile_together(host.chunk.__wrapped__, call, ())[0])
found["kept"] = len(kept)
rehearsal.rehearse(host.chunk.__wrapped__, call, ())  # final states, none to begin with
other, _ = recorder._call(Shape("chunk", "bfloat16", (1, 2), tokens=40, initial=True), zeros)
before = len(launchers)
rehearsal.rehearse(host.chunk.__wrapped__, other, ())
found["another kind"] = len(launchers) - before
long, _ = recorder._call(Shape("chunk", "bfloat16", (1, 2), tokens=2000, initial=True), zeros)
found["its long calls"] = len(rehearsal.compile_together(host.chunk.__wrapped__, long, ())[0])
found["launches"] = sum(sys.modules[folder.name + ".dispatch"].LAUNCHES.values())
found["left"] = [kernel.__name__ for kernel in kernels if "run" in vars(kernel)]
found["launchers"], found["in the main thread"] = sorted(launchers), "MainThread" in workers
print(json.dumps(found))
"""


def test_kernels_of_a_first_call_are_compiled_together(tmp_path: Path) -> None:
    folder = api.build(Spec(key_dim=16, value_dim=16, chunk=16), tmp_path, name="rehearsed", pins=PINS)
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    kernels = {path.stem for path in (folder / "kernels").glob("*.py")} - {"__init__", "recurrence"}
    (forward, again), (backward, again_too) = found["chunk"], found["chunk_backward"]
    assert {*forward, *backward} == kernels and set(forward).isdisjoint(backward)
    assert forward.count("scan") == 3, "whole, and two passes over the segments of a long sequence"
    assert not again and not again_too  # what is compiled is compiled once
    assert found["launches"] == found["kept"] == 0 and not found["left"]
    assert found["after a failure"] == 0, "Triton compiles on in this thread"
    assert found["another kind"] == 4, "scan whole and in two passes, combine from a given state"
    assert found["its long calls"] == 0, "no length compiles anything"
    every = [*forward, *backward, "combine", "scan", "scan", "scan"]
    assert found["launchers"] == sorted(every) and not found["in the main thread"]


ROOM = """
import json, sys, torch
from pathlib import Path
from unittest import mock
from gdngen.autotune.launches import Recorder, Shape
from gdngen.target import get
folder = Path(sys.argv[1])
recorder = Recorder(folder, get("sm_90"))
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
host = recorder.host
for kernel in [x for x in vars(host).values() if isinstance(x, JITFunction)]:
    del kernel._do_compile
rehearsal, tuning = (sys.modules[f"{folder.name}.{n}"] for n in ("rehearsal", "tuning"))
driver.active.launcher_cls = lambda source, metadata: None
shape = Shape("chunk", "bfloat16", (1, 2), tokens=40, final=True)
call, _ = recorder._call(shape, lambda name, size, dtype: torch.zeros(size, dtype=dtype))
at, found = host.machine_of(call.inputs["q"]), {}
for room in (1 << 20, 70 << 10, 20 << 10, 0):
    driver.active.utils.get_device_properties = lambda device: {"max_shared_mem": room}
    rehearsal._done.clear()
    try:
        rehearsal.rehearse(host.chunk.__wrapped__, call, ())
        found[room] = [tuning.chunk_of(at, 'chunk'), *tuning.choice("scan", at, 2)]
    except ValueError as error:
        found[room] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


def test_what_does_not_fit_is_made_smaller_before_it_is_launched(tmp_path: Path) -> None:
    """Less shared memory than the cost model counts on: fewer tiles ahead, shorter chunks; at last a clear error."""
    folder = api.build(Spec(gate="none", rule="additive", chunk=128, key_dim=64, value_dim=64), tmp_path, name="roomy")
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": str(ROOT),
    }
    result = subprocess.run([sys.executable, "-c", ROOM, str(folder)], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    print(found)
    assert found[str(1 << 20)][0] == 128
    assert found[str(20 << 10)][0] < found[str(70 << 10)][0] == 128 and found[str(70 << 10)] != found[str(1 << 20)]
    assert found["0"].startswith("ArgumentError: q: bfloat16 inputs of 64 key and 64 value channels do not fit")


LEAK = """
import json, sys, torch
from pathlib import Path
from gdngen.autotune.launches import Recorder, Shape
from gdngen.target import get
folder = Path(sys.argv[1])
recorder = Recorder(folder, get("sm_90"))
from triton.runtime.driver import driver
host = recorder.host
del host.queries._do_compile  # the recorder's: this one is compiled
rehearsal, tuning = (sys.modules[f"{folder.name}.{n}"] for n in ("rehearsal", "tuning"))
driver.active.launcher_cls = lambda source, metadata: None
def make(name, size, dtype, row):
    if name not in ("q", "k", "v"):
        return torch.zeros(size, dtype=dtype)
    return torch.zeros((*size[:2], row), dtype=dtype)[..., : size[2] * size[3]].unflatten(2, size[2:])
def warps(row):
    shape = Shape("chunk", "bfloat16", (1, 4), tokens=75, final=True)
    call, states = recorder._call(shape, lambda name, size, dtype: make(name, size, dtype, row))
    given = [name for name, x in call.inputs.items() if x is not None]
    rehearsal.rehearse(host.chunk_backward.__wrapped__, call, (given, call.inputs["v"], *states))
    return tuning.choice("queries", host.machine_of(call.inputs["q"]), 4).num_warps
print(json.dumps([warps(row) for row in (1241, 1240)]))
"""


@pytest.mark.full
def test_what_is_compiled_to_wrong_addresses_is_compiled_again(tmp_path: Path) -> None:
    """Where tokens are 1240 elements apart LLVM spoils addresses of q in eight warps; where they are 1241, none."""
    spec = Spec(gate="value", key_dim=30, value_dim=295, chunk=128, state_v_first=True, qk_norm=True)
    folder = api.build(spec, tmp_path, name="leaking")
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": str(ROOT),
    }
    result = subprocess.run([sys.executable, "-c", LEAK, str(folder)], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == [8, 4]
