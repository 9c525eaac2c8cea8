"""What the kernels of a Spec need on a GPU that need not be there: registers, spills, shared memory, instructions.

Worker processes import the package and let its own host code start the kernels.  A recorder in the kernels' place takes
the arguments down, and they are compiled for the target with the package's launch choices.
"""

import contextlib
import functools
import importlib
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from gdngen import sass
from gdngen import target as targets
from gdngen.errors import EnvironmentProblem, PlanError
from gdngen.runtime.compilers import leaks_a_lane
from gdngen.spec import Spec

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
POINTERS = {f"torch.{name}": short for short, name in [*DTYPES.items(), ("i32", "int32"), ("i64", "int64")]}
LAYOUTS = ("dense", "packed")
TOKENS, Q_HEADS = 256, 16
NVIDIA_CODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", re.MULTILINE)
AMD_CODE = re.compile(r"^\s+([a-z]+_(?:pk_)?[a-z]+)", re.MULTILINE)
SHOWN = "HGMMA HMMA UTCHMMA FFMA LDGSTS LDG LDL STL v_mfma v_fma global_load buffer_load scratch_load".split()


@dataclass(frozen=True)
class Task:
    """One kernel to compile, as its operator launches it."""

    folder: Path
    spec: Spec
    target: str
    operator: str
    kernel: str
    dtype: str
    layout: str
    programs: str
    listed: bool = True


def inspect(
    spec: Spec,
    target_names: Iterable[str] = (targets.DEFAULT_TARGET,),
    dtypes: Iterable[str] = ("bf16",),
    layouts: Iterable[str] = LAYOUTS,
    pins: Iterable[str] = (),
    *,
    few: Collection[str] = tuple(targets.TARGETS),
    listed: Collection[str] = tuple(targets.TARGETS),
) -> Iterator[dict[str, Any]]:
    """One record per target, kernel, dtype and layout, in that order, as they are compiled.

    ``few``: targets whose choices for launches of few programs, which are narrower, are compiled as well; ``listed``:
    targets whose machine code is listed, which takes as long as compiling it (others: no instructions).
    """
    from gdngen import api  # imports torch, which workers import only after compile_only

    dtypes, layouts = list(dtypes), [layout for layout in layouts if spec.varlen or layout == "dense"]
    tasks = []
    with tempfile.TemporaryDirectory(prefix="gdngen_inspect_") as scratch:
        for target in target_names:
            folder = api.build(spec, scratch, name=f"inspected_{target}", target_name=target, pins=pins)
            for operator in api.compilation(spec, target, pins).plan.operators:
                tasks += [
                    Task(folder, spec, target, operator.name, kernel.name, dtype, layout, programs, target in listed)
                    for kernel in operator.kernels
                    for dtype in dtypes
                    for programs in _kinds_of_launch(dict(kernel.tuning), f"{target}/{4 if dtype == 'fp32' else 2}")
                    if programs == "many" or target in few
                    for layout in layouts
                ]
        context, workers = multiprocessing.get_context("spawn"), min(8, os.cpu_count() or 1, len(tasks))
        with ProcessPoolExecutor(workers, context, compile_only) as pool:
            yield from pool.map(compiled, tasks)


def _kinds_of_launch(tuning: dict[str, Any], key: str) -> list[str]:
    """Whether launches of few programs have a choice of their own."""
    return ["many"] + (["few"] if tuning.get(f"{key}/few", tuning[key]) != tuning[key] else [])


def compile_only() -> None:
    """In a worker, before Triton is imported: kernels are to be compiled, not interpreted."""
    os.environ["TRITON_INTERPRET"] = "0"


def compiled(task: Task) -> dict[str, Any]:
    """Compile one kernel with the first choice that fits, as the package does on a GPU, and report on it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.errors import PTXASError

    target = targets.get(task.target)
    gpu = GPUTarget(target.backend, target.arch, target.warp_size)
    while True:
        launch = None
        try:
            launch = _launch(task)
            kernel = triton.compile(_source(launch, target.backend), target=gpu, options=launch.options)
        except Exception as error:
            if isinstance(error, PTXASError) and launch and launch.refuse():
                continue
            cause: BaseException = error
            while cause.__cause__:
                cause = cause.__cause__
            reason = (str(cause).strip() or repr(cause)).splitlines()[-1]
            raise PlanError(f"kernel {task.kernel} does not compile for {task.target}: {reason}") from error
        leaks = target.backend == "cuda" and leaks_a_lane(kernel.asm["ptx"])
        fits = kernel.metadata.shared <= target.shared_bytes and not leaks
        if fits or not launch.refuse(too_many_warps=leaks):
            break
    record = {name: getattr(task, name) for name in ("kernel", "target", "operator", "dtype", "layout", "programs")}
    record |= {"BV": launch.arguments.get("BV"), "chunk": launch.arguments.get("C", launch.chunk), **launch.options}
    record |= machine_code(kernel, target.backend, task.listed)
    return record | {"shared_bytes": kernel.metadata.shared, "shared_limit": target.shared_bytes}


@dataclass(frozen=True)
class Launch:
    """A kernel as its operator launches it; ``refuse`` makes the package take a smaller choice, if there is one."""

    function: Any
    arguments: dict[str, Any]
    options: dict[str, Any]
    chunk: int
    refuse: Callable[..., bool]


class _Recorder:
    """Stands where launch.py has a kernel: ``kernel[grid](...)`` takes the arguments down."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __getitem__(self, grid: object) -> Any:
        return self

    def __call__(self, *arguments: Any, **keywords: Any) -> None:
        names = self.function.arg_names
        self.arguments = dict(zip(names, arguments)) | {n: value for n, value in keywords.items() if n in names}
        self.options = {name: value for name, value in keywords.items() if name not in names}


def _launch(task: Task) -> Launch:
    """Call the package's operator as on the target."""
    import torch

    from gdngen import calls

    operators, host, machine, tuning, kernels = _recording(task.folder)
    machine_of = functools.partial(_machine_on, machine, targets.get(task.target), task.programs)
    vars(host)["machine_of"] = machine_of
    chosen: dict[str, Any] = {}

    def choice(kernel: str, *rest: Any, **more: Any) -> Any:
        chosen[kernel] = tuning.choice(kernel, *rest, **more)
        return chosen[kernel]

    vars(host)["choice"] = choice
    case = calls.Case("inspect", TOKENS, offsets=(0, TOKENS // 2, TOKENS) if task.layout == "packed" else ())
    heads = (Q_HEADS, Q_HEADS * (2 if task.spec.head_ratio == "any" else task.spec.head_ratio))
    x = calls.inputs(task.spec, case, getattr(torch, DTYPES[task.dtype]), heads)
    form = task.operator.removesuffix("_backward")
    vars(operators)["run"] = lambda options, call: run_host(host, task.operator, call)
    getattr(operators, calls.operator_name(task.spec, form))(**calls.keywords(task.spec, form, x, case))
    kernel, at = kernels[task.kernel], machine_of(x["q"])
    refuse = functools.partial(tuning.refuse, task.kernel, at, chosen[task.kernel])
    return Launch(kernel.function, kernel.arguments, kernel.options, getattr(host, "C", 0), refuse)


@functools.cache
def _recording(folder: Path) -> tuple[ModuleType, ModuleType, ModuleType, ModuleType, dict[str, _Recorder]]:
    """The package's operators, host code, machine and tuning modules, with recorders in place of the kernels."""
    from triton.runtime.jit import JITFunction

    sys.path.insert(0, str(folder.parent))
    names = ("operators", "launch", "machine", "tuning")
    operators, host, machine, tuning = (importlib.import_module(f"{folder.name}.{name}") for name in names)
    kernels = {name: _Recorder(value) for name, value in vars(host).items() if isinstance(value, JITFunction)}
    vars(host).update(kernels)
    return operators, host, machine, tuning, kernels


def run_host(host: ModuleType, operator: str, call: Any) -> Any:
    """The host code of an operator, a backward one with every gradient wanted."""
    if not operator.endswith("_backward"):
        return getattr(host, operator)(call)
    given = {name: x for name, x in call.inputs.items() if x is not None}
    getattr(host, operator)(call, list(given), given["v"], *(given[name] for name in ("h0", "z0") if name in given))
    return given["v"], None


def _machine_on(machine: ModuleType, target: targets.Target, programs: str, tensor: Any) -> Any:
    """What the package's machine_of says of a tensor on the target, or on one with more processors than any launch."""
    there = SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=programs), dtype=tensor.dtype)
    with on_gpu(target.backend, target.arch, 1 if programs == "many" else sys.maxsize):
        return machine.machine_of(there)


@contextlib.contextmanager
def on_gpu(backend: str, arch: int | str, processors: int, name: str = "") -> Iterator[None]:
    """Inside, torch says that every device is such a GPU; one without a name has the cost model's choices."""
    import torch

    size = SimpleNamespace(multi_processor_count=processors, name=name)
    hip = mock.patch.object(torch.version, "hip", arch if backend == "hip" else None)
    architecture = mock.patch.object(torch.cuda, "get_device_capability", lambda index: divmod(int(arch), 10))
    with hip, architecture, mock.patch.object(torch.cuda, "get_device_properties", lambda index: size):
        yield


def stand_in_driver(backend: str, arch: int | str, warp_size: int) -> None:
    """From now on Triton binds and compiles launches for such a GPU in this process, and can run none."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    there = GPUTarget(backend, arch, warp_size)
    room = max((t.shared_bytes for t in targets.TARGETS.values() if t.arch == arch), default=sys.maxsize)
    utilities = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": room})
    answers: dict[str, Any] = {"utils": utilities}
    answers |= {"get_current_device": lambda: 0, "get_current_stream": lambda device: 0}
    driver.set_active(SimpleNamespace(get_current_target=lambda: there, **answers))


def _source(launch: Launch, backend: str) -> Any:
    """What Triton's launcher would make of the arguments: types, constants, and which are multiples of 16."""
    from triton.compiler import ASTSource

    signature, constants, facts = {}, {}, {}
    for parameter in launch.function.params:
        name, place, value = parameter.name, (parameter.num,), launch.arguments.get(parameter.name)
        special = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (special and value == 1):
            signature[name], constants[place] = "constexpr", value
        elif hasattr(value, "block_shape"):
            signature[name] = f"tensordesc<{POINTERS[str(value.base.dtype)]}{value.block_shape}>"
        elif hasattr(value, "dtype"):
            signature[name] = "*" + POINTERS[str(value.dtype)]
            facts[place] = [["tt.divisibility", 16]] + ([["tt.pointer_range", 32]] if backend == "hip" else [])
        else:
            signature[name] = "fp32" if isinstance(value, float) else parameter.annotation_type or "i32"
            facts |= {place: [["tt.divisibility", 16]]} if special and value % 16 == 0 else {}
    return ASTSource(fn=launch.function, signature=signature, constexprs=constants, attrs=facts)


def machine_code(kernel: Any, backend: str, listed: bool = True) -> dict[str, Any]:
    """Registers, spills and instructions of a compiled kernel, and whether a known fault of compilers shows in it."""
    if backend != "cuda":
        return amd(kernel.asm["amdgcn"]) | {"miscompiled": False}
    found = nvidia(kernel.asm["cubin"], listed)
    return found | {"miscompiled": found["miscompiled"] or leaks_a_lane(kernel.asm["ptx"])}


def nvidia(cubin: bytes, listed: bool = True) -> dict[str, Any]:
    """Registers, local memory (where spills go) and instructions, from the cuobjdump inside the triton wheel."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        raise EnvironmentProblem(f"{tool} is missing from this triton; inspect needs a triton wheel from PyPI")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        options = ["-res-usage", "-sass"] if listed else ["-res-usage"]
        commands = [[str(tool), option, file.name] for option in options]
        usage, *code = (subprocess.run(c, capture_output=True, text=True, check=True).stdout for c in commands)
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    text = "".join(code)
    numbers = _numbers(found["REG"], found["STACK"] + found["LOCAL"], NVIDIA_CODE.findall(text))
    return numbers | {"miscompiled": bool(sass.lost_descriptors(text))}


def amd(assembly: str) -> dict[str, Any]:
    """The same from the assembly and its metadata; vector registers, those for accumulation included."""
    found = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", assembly))
    return _numbers(found["vgpr_count"], found["private_segment_fixed_size"], AMD_CODE.findall(assembly))


def _numbers(registers: int | str, spilled: int | str, code: list[str]) -> dict[str, Any]:
    mix = dict(Counter(code).most_common())
    return {"registers": int(registers), "spill_bytes": int(spilled), "instructions": mix}


def text(records: Iterable[dict[str, Any]]) -> Iterator[str]:
    """A line per kernel, as they come; then one per dtype and target: it runs, or what stands in the way."""
    columns = "kernel dtype layout programs BV num_warps num_stages registers spill_bytes shared_bytes".split()
    yield "  ".join(f"{column:>10}" for column in columns) + "  instructions"
    found = []
    for record in records:
        found.append(record)
        cells = (f"{record[column] or 0!s:>{max(10, len(column))}}" for column in columns)
        mix = [f"{name} {count}" for name, count in record["instructions"].items() if name in SHOWN]
        yield (
            "  ".join(cells)
            + f"  {' '.join(mix)}"
            + (f"  (over {record['shared_limit']} bytes)" if _over(record) else "")
        )
    yield from runs(found)


def runs(records: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Per target and dtype: the chunk length of each operator, or the kernels that fit in no way."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["target"], record["dtype"]), []).append(record)
    for (target, dtype), group in groups.items():
        over = {
            r["kernel"]: f"{r['kernel']} needs {r['shared_bytes']} bytes of {r['shared_limit']}"
            for r in filter(_over, group)
        }
        lengths = {r["operator"]: r["chunk"] for r in group if r["operator"] != "recurrent"}
        said = ", ".join(f"{operator} in chunks of {length} tokens" for operator, length in lengths.items())
        answer = f"does not run: {'; '.join(over.values())}" if over else f"runs{': ' if said else ''}{said}"
        yield f"{dtype} on {target} {answer}"


def _over(record: dict[str, Any]) -> bool:
    return bool(record["shared_bytes"] > record["shared_limit"])
