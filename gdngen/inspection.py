"""What the kernels of a Spec need on a GPU that need not be there: registers, spills, shared memory, instructions.

Worker processes import the package and let its own host code start the kernels; a recorder in their place takes down
the arguments, which are then compiled for the target with the package's launch choices.
"""

import functools
import importlib
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from gdngen import target as targets
from gdngen.errors import EnvironmentProblem, PlanError
from gdngen.spec import Spec

DTYPES = ("bf16", "fp16", "fp32")
TOKENS, Q_HEADS = 256, 16
POINTERS = {
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.float32": "fp32",
    "torch.int32": "i32",
    "torch.int64": "i64",
}
NVIDIA_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", re.MULTILINE)
NVIDIA_NOTED = """HGMMA HMMA UTCHMMA FFMA FFMA2 FMUL FMUL2 FADD FADD2 MUFU LDG STG LDGSTS UTMALDG LDS LDSM STS STSM
                  LDTM STTM LDL STL SHFL BAR""".split()
AMD_INSTRUCTION = re.compile(
    r"^\s+(v_mfma|v_fma|v_pk_fma|v_exp|ds_read|ds_write|buffer_load|buffer_store|global_load|global_store"
    r"|scratch_load|scratch_store|v_accvgpr|s_barrier)\w*",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Task:
    """One kernel to compile; packed: as called with cu_seqlens."""

    folder: Path
    spec: Spec
    target: str
    operator: str
    kernel: str
    dtype: str
    packed: bool


def inspect(
    spec: Spec,
    target_names: Iterable[str] = (targets.DEFAULT_TARGET,),
    dtypes: Iterable[str] = ("bf16",),
    layouts: Iterable[str] = ("dense", "packed"),
    pins: Iterable[str] = (),
    workers: int | None = None,
) -> Iterator[dict[str, Any]]:
    """One record per kernel, target, dtype and layout, in that order, as they are compiled."""
    from gdngen import api  # here, because it imports torch before a worker can say whether Triton interprets

    dtypes, layouts = list(dtypes), [layout for layout in layouts if spec.varlen or layout == "dense"]
    with tempfile.TemporaryDirectory(prefix="gdngen_inspect_") as scratch:
        tasks = []
        for name in target_names:
            out = Path(scratch) / name
            folder = api.build(spec, out, name=f"inspected_{name}", target_name=name, pins=pins)
            plan = api.compilation(spec, name, pins).plan
            launched = [(operator.name, kernel.name) for operator in plan.operators for kernel in operator.kernels]
            tasks += [
                Task(folder, spec, name, *kernel, dtype, layout == "packed")
                for kernel in launched
                for dtype in dtypes
                for layout in layouts
            ]
        workers = workers or min(8, os.cpu_count() or 1, len(tasks))
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, context, _compile_only) as pool:
            yield from pool.map(compiled, tasks)


def _compile_only() -> None:
    """In a worker, before Triton is imported: kernels are to be compiled, not interpreted."""
    os.environ.pop("TRITON_INTERPRET", None)


# ------------------------------------------------------------------------------------------------ in a worker


def compiled(task: Task) -> dict[str, Any]:
    """Compile one kernel and report on it."""
    import triton
    from triton.backends.compiler import GPUTarget

    target = targets.get(task.target)
    try:
        launch = _launch_of(task)
        source, options = _source(launch, target.backend)
        gpu = GPUTarget(target.backend, target.arch, target.warp_size)
        kernel = triton.compile(source, target=gpu, options=options)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise PlanError(f"kernel {task.kernel} does not compile for {task.target}: {lines[-1]}") from error
    layout = "packed" if task.packed else "dense"
    record = {"kernel": task.kernel, "operator": task.operator, "target": task.target, "dtype": task.dtype}
    record |= {"layout": layout, **options, "BV": launch.constants.get("BV")}
    record |= _nvidia(kernel.asm["cubin"]) if target.backend == "cuda" else _amd(kernel.asm["amdgcn"])
    return record | {"shared_bytes": kernel.metadata.shared, "shared_limit": target.shared_bytes}


@dataclass(frozen=True)
class Launch:
    """A recorded launch: the kernel, its arguments by name, constants and launch options."""

    function: Any
    arguments: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, int]


class _Recorder:
    """Stands where launch.py has a kernel: ``kernel[grid](...)`` takes the arguments down."""

    def __init__(self, function: Any, launches: dict[str, Launch]) -> None:
        self.function, self.launches = function, launches

    def __getitem__(self, grid: object) -> Any:
        return self.record

    def record(self, *arguments: Any, **keywords: Any) -> None:
        names = self.function.arg_names
        constants = {name: value for name, value in keywords.items() if name in names}
        options = {name: value for name, value in keywords.items() if name not in names}
        given = dict(zip(names, arguments))
        self.launches[self.function.__name__] = Launch(self.function, given, constants, options)


def _launch_of(task: Task) -> Launch:
    """Call the package's operator as on the target and return how it launches the kernel."""
    import torch

    from gdngen import calls

    operators, launches = _recorded(task.folder, task.target)
    case = calls.Case("inspect", TOKENS, offsets=(0, TOKENS // 2, TOKENS) if task.packed else ())
    ratio = 2 if task.spec.head_ratio == "any" else task.spec.head_ratio
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[task.dtype]
    x = calls.inputs(task.spec, case, dtype, Q_HEADS, Q_HEADS * ratio)
    keywords = calls.keywords(task.spec, task.operator, x, case)
    getattr(operators, calls.operator_name(task.spec, task.operator))(**keywords)
    return launches[task.kernel]


@functools.cache
def _recorded(folder: Path, target_name: str) -> tuple[ModuleType, dict[str, Launch]]:
    """The package's operators, made to launch as on the target into a dict."""
    from triton.runtime.jit import JITFunction

    sys.path.insert(0, str(folder.parent))
    operators, host, machine = (
        importlib.import_module(f"{folder.name}.{name}") for name in ("operators", "launch", "machine")
    )
    launches: dict[str, Launch] = {}
    kernels = {name: value for name, value in vars(host).items() if isinstance(value, JITFunction)}
    vars(host).update({name: _Recorder(kernel, launches) for name, kernel in kernels.items()})
    vars(host)["machine_of"] = functools.partial(_machine_on, machine, targets.get(target_name))
    vars(operators)["run"] = lambda options, call: getattr(host, call.operator)(call)
    return operators, launches


def _machine_on(machine: ModuleType, target: targets.Target, tensor: Any) -> Any:
    """What the package's machine_of says of a tensor on the target."""
    import torch

    version, cuda = vars(torch.version), vars(torch.cuda)
    real = version["hip"], cuda["get_device_capability"]
    version["hip"] = "pretended" if target.backend == "hip" else None
    cuda["get_device_capability"] = lambda device=None: divmod(int(target.arch), 10)
    try:
        there = SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=0), dtype=tensor.dtype)
        return machine.machine_of(there)
    finally:
        version["hip"], cuda["get_device_capability"] = real


def _source(launch: Launch, backend: str) -> tuple[Any, dict[str, int]]:
    """What Triton's launcher would make of the arguments: types, constants, and which are multiples of 16."""
    from triton.compiler import ASTSource

    signature, constants, facts = {}, {}, {}
    for parameter in launch.function.params:
        name, place = parameter.name, (parameter.num,)
        value = launch.constants.get(name, launch.arguments.get(name))
        special = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (special and value == 1):
            signature[name], constants[place] = "constexpr", value
        elif hasattr(value, "dtype"):
            signature[name] = "*" + POINTERS[str(value.dtype)]
            facts[place] = [["tt.divisibility", 16]] + ([["tt.pointer_range", 32]] if backend == "hip" else [])
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            facts |= {place: [["tt.divisibility", 16]]} if special and value % 16 == 0 else {}
    return ASTSource(fn=launch.function, signature=signature, constexprs=constants, attrs=facts), launch.options


# ------------------------------------------------------------------------------------------------ reading binaries


def _nvidia(cubin: bytes) -> dict[str, Any]:
    """Registers, local memory (spills) and noted instructions, from the cuobjdump inside the triton wheel."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        raise EnvironmentProblem(f"{tool} is missing: this triton wheel ships no cuobjdump; install triton from PyPI")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    return {
        "registers": int(found["REG"]),
        "spill_bytes": int(found["STACK"]) + int(found["LOCAL"]),
        "instructions": _counted(name for name in NVIDIA_INSTRUCTION.findall(code) if name in NVIDIA_NOTED),
    }


def _amd(assembly: str) -> dict[str, Any]:
    """The same from the assembly's metadata; registers are vector registers, accumulation registers included."""
    found = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", assembly))
    return {
        "registers": int(found["vgpr_count"]),
        "spill_bytes": int(found["private_segment_fixed_size"]),
        "instructions": _counted(AMD_INSTRUCTION.findall(assembly)),
    }


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(names).most_common())
