"""Is a package right?  Digests, import without gdngen, and numbers against the float64 recurrence.

The package is copied to a temporary folder and runs in processes that cannot import gdngen: its PyTorch version on the
CPU, and its kernels on the GPU, or where there is none in Triton's interpreter on small shapes.
"""

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gdngen import calls, package, standalone
from gdngen.calls import Case
from gdngen.oracle import rms_ratio
from gdngen.spec import Spec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RESULTS = {"fp32": 5e-4, "bf16": 5e-3, "fp16": 5e-3}  # contract section 5: budgets of o and states ...
GRADIENTS = 2e-3  # ... and of gradients, in fp32
LAST_LINES = 12


@dataclass(frozen=True)
class Check:
    """One line of the report; ``measured`` and ``budget`` are None where the check is a yes or no."""

    where: str
    what: str
    passed: bool
    detail: str = ""
    measured: float | None = None
    budget: float | None = None


@dataclass(frozen=True)
class Place:
    """Where calls run: the PyTorch version, the kernels on the GPU, or the kernels in Triton's interpreter."""

    name: str
    device: str = "cpu"
    interpret: bool = False
    dtypes: tuple[str, ...] = ("fp32",)
    gradients: bool = False

    @property
    def kernels(self) -> bool:
        return self.interpret or self.device == "cuda"


def places(spec: Spec) -> list[Place]:
    """The PyTorch version everywhere; the kernels on the GPU, else in the interpreter."""
    torch_version = Place("PyTorch version", gradients=spec.backward)
    if torch.cuda.is_available():
        return [torch_version, Place(torch.cuda.get_device_name(), "cuda", dtypes=("bf16", "fp32"))]
    return [torch_version, Place("kernels, interpreted", interpret=True, dtypes=("fp32", "fp16"))]


def cases(spec: Spec, chunk: int, few: bool = False) -> Iterator[Case]:
    """Shapes and data that break kernels; ``few`` and small ones for the interpreter, which is slow."""
    C = chunk
    yield Case("ragged tail, initial state", C + 9, 1 if few else 2)
    yield Case("one token", 1, 2)
    if spec.varlen:
        ends = (0, 5, 5, C + 7) if few else (0, 5, 5, C + 20, 2 * C + 20, 2 * C + 20)
        yield Case("packed, empty sequences, rows past the end", ends[-1] + 9, offsets=ends)
    yield Case("q, k, v split from one tensor, no state", C - 3 if few else 2 * C + 3, strided=True, stateful=False)
    if spec.gate:
        plain = spec.fused_gate == "none" and spec.beta != "dt"
        yield Case("gates of -20" if plain else "raw gate input of 20", C + 2 if few else 2 * C, gate="strong")
    if spec.gate and spec.fused_gate == "none" and spec.beta != "dt":
        yield Case("gates of -inf", C // 2 if few else 2 * C, gate="reset")
    if spec.beta == "dt":
        yield Case("dt clamped to (0.1, 0.5)", C // 2, dt_limit=(0.1, 0.5))
    if not few:
        yield Case("no tokens", 0, 2)
        yield Case("many chunks", 4 * C + 1)


def verify(folder: Path) -> Iterator[Check]:
    """Every check of a package, as it is made."""
    manifest: dict[str, Any] = package.read_manifest(folder)
    altered = package.altered(folder)
    detail = f"{', '.join(altered)} differ from {package.MANIFEST}; build the package again" if altered else ""
    yield Check("files", f"digests of {len(manifest['files'])} files", not altered, detail)
    spec = Spec(**manifest["spec"])
    with tempfile.TemporaryDirectory(prefix="gdngen_verify_") as scratch:
        copy = Path(scratch) / "elsewhere" / str(manifest["name"])
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("__pycache__"))
        for place in places(spec):
            with _one_thread():
                asked = _questions(place, spec, sorted(manifest["cuts"]))
            answers, trouble = _run(copy, [one.call for one in asked], place)
            yield Check(place.name, f"{len(asked)} calls where gdngen cannot be imported", not trouble, trouble)
            yield from (_compare(place, one, answer) for one, answer in zip(asked, answers))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """The recurrence is many small steps: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class _Asked:
    """A call, what it is made with, and what it is compared with."""

    what: str
    dtype: str
    call: dict[str, Any]
    answer: list[torch.Tensor]
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


def _questions(place: Place, spec: Spec, forms: list[str]) -> list[_Asked]:
    chunk = 64 if spec.chunk == "auto" else int(spec.chunk)
    ratio = 2 if spec.head_ratio == "any" else spec.head_ratio
    asked = []
    for dtype in place.dtypes:
        for case in itertools.islice(cases(spec, chunk, place.interpret), 1 if dtype == "fp16" else None):
            x = calls.inputs(spec, case, DTYPES[dtype], 1, ratio, place.device)
            answer = list(calls.expected(spec, x, case))
            for form in forms:
                call = _call(spec, form, x, case) | {"twice": not place.interpret}
                asked.append(_Asked(f"{call['operator']}, {dtype}, {case.name}", dtype, call, answer))
    return asked + ([_differentiated(spec, form, chunk + 9, ratio) for form in forms] if place.gradients else [])


def _call(spec: Spec, form: str, x: dict[str, Any], case: Case) -> dict[str, Any]:
    return {"operator": calls.operator_name(spec, form), "keywords": calls.keywords(spec, form, x, case)}


def _differentiated(spec: Spec, form: str, tokens: int, ratio: int) -> _Asked:
    """A call whose gradients are compared, every input's, from o and final state together."""
    case = Case("gradients", tokens)
    x = {name: value.requires_grad_() for name, value in calls.inputs(spec, case, torch.float32, 1, ratio).items()}
    answer, call = calls.expected(spec, x, case), _call(spec, form, x, case)
    draw = torch.Generator().manual_seed(0)
    sent = [torch.randn(value.shape, generator=draw) for value in answer]
    leaves = {name: value for name, value in call["keywords"].items() if getattr(value, "requires_grad", False)}
    found = torch.autograd.grad(answer, list(leaves.values()), [value.double() for value in sent])
    what = f"{call['operator']}, fp32, gradients of {', '.join(leaves)}"
    call |= {"cotangents": sent, "twice": False}
    return _Asked(what, "fp32", call, [value.detach() for value in answer], dict(zip(leaves, found)))


def _run(folder: Path, asked: list[dict[str, Any]], place: Place) -> tuple[list[dict[str, Any]], str]:
    """(answers, "") or ([], the end of the error output)."""
    home = folder.parent
    script = shutil.copy(standalone.__file__, home / "standalone.py")
    torch.save(asked, home / "calls.pt")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_INTERPRET": "1"} if place.interpret else {}
    environment |= {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, script, str(folder), str(home / "calls.pt"), str(home / "results.pt")]
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True)
    if done.returncode:
        return [], "\n".join(done.stderr.strip().splitlines()[-LAST_LINES:])
    return torch.load(home / "results.pt", weights_only=True), ""


def _compare(place: Place, one: _Asked, answer: dict[str, Any]) -> Check:
    """Errors of every result against its budget; then whether kernels ran, and whether a second call gave these bits."""
    if one.gradients:
        pairs, budget = [(f"d{name}", answer["gradients"][name], ref) for name, ref in one.gradients.items()], GRADIENTS
    else:
        names = ("o", "final_state", "final_state z")
        pairs, budget = list(zip(names, answer["results"], one.answer)), RESULTS[one.dtype]
    faults = [f"{name} has shape {list(x.shape)}, not {list(ref.shape)}" for name, x, ref in pairs if x.shape != ref.shape]
    errors = {name: rms_ratio(x, ref) for name, x, ref in pairs if x.shape == ref.shape and ref.numel()}
    faults += [f"{name} is off by {error:.1e}" for name, error in errors.items() if not error <= budget]
    if place.kernels and not answer["launches"] and one.answer[0].numel():
        faults.append("no kernel was launched")
    if not answer.get("same_bits", True):
        faults.append("a second call gave other bits")
    worst = max(errors.values(), key=lambda error: error if error == error else float("inf"), default=0.0)
    return Check(place.name, one.what, not faults, "; ".join(faults), worst, budget)
