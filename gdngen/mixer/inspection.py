"""What the kernels of a mixer's member need on a GPU that need not be there: registers, spills, shared memory."""

import multiprocessing
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from gdngen import target as targets
from gdngen.inspection import DTYPES, _source, compile_only, machine_code
from gdngen.mixer.specs import Convolution, MixerSpec

SHAPE = (2, 256, 512)  # batch, tokens, channels


def inspect(
    spec: MixerSpec, target_names: Iterable[str] = (targets.DEFAULT_TARGET,), dtypes: Iterable[str] = ("bf16",)
) -> Iterator[dict[str, Any]]:
    """One record per target, dtype and kernel, as the package launches it: for dense and for packed sequences."""
    from gdngen.mixer.packages import build

    tasks = [(target, dtype) for target in target_names for dtype in dtypes]
    with tempfile.TemporaryDirectory(prefix="gdngen_inspect_") as scratch:
        folder = build(spec, scratch, f"inspected_{spec.name}")
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context, compile_only) as pool:
            for found in pool.map(_compiled, *zip(*((spec, folder, *task) for task in tasks), strict=True)):
                yield from found


def _compiled(spec: MixerSpec, folder: Path, target_name: str, dtype: str) -> list[dict[str, Any]]:
    """In a worker: compile every kernel that the host code starts."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget

    from gdngen.api import import_folder

    target, package = targets.get(target_name), import_folder(folder, folder.name)
    records = []
    for packed in (False, True) if isinstance(spec, Convolution) else (False,):
        for name, launch in _launches(package, spec, getattr(torch, DTYPES[dtype]), packed):
            gpu = GPUTarget(target.backend, target.arch, target.warp_size)
            kernel = triton.compile(_source(launch, target.backend), target=gpu, options=launch.options)
            record = {"kernel": name, "target": target_name, "dtype": dtype, "packed": packed, **launch.options}
            record |= machine_code(kernel, target.backend)
            records.append(record | {"shared_bytes": kernel.metadata.shared})
    return records


def _launches(package: ModuleType, spec: MixerSpec, dtype: Any, packed: bool) -> list[tuple[str, Any]]:
    """What the host code hands to Triton, forward, backward and update."""
    import torch

    from gdngen.mixer import calls

    found: list[tuple[str, Any]] = []

    def start(kernel: Any, name: str, programs: int, **arguments: Any) -> None:
        options = {key: arguments.pop(key) for key in list(arguments) if key not in kernel.arg_names}
        found.append((name, SimpleNamespace(function=kernel, arguments=arguments, options=options)))

    import importlib

    launch: Any = importlib.import_module(f"{package.__name__}.launch")
    launch.start = start
    inputs = calls.inputs(spec, SHAPE, dtype=dtype, sequences=3 if packed else None)
    offsets = torch.tensor([0, 100, 100, SHAPE[1]]) if packed else None
    if packed:
        inputs = {name: x if x.ndim < 3 or name == "h0" else x[:1] for name, x in inputs.items()}
    call = package.Call(inputs, calls.number_of(spec), offsets, None, isinstance(spec, Convolution))
    outputs = launch.forward(call)
    launch.backward(call, dict(zip(package.OUTPUTS, outputs, strict=True)))
    if isinstance(spec, Convolution) and not packed:
        x = {**inputs, "x": inputs["x"][:, :1]}
        residual = x["residual"][:, :1] if "residual" in x else None
        launch.update(x["x"], x["h0"], x["weight"], x.get("bias"), residual, None)
    return found
