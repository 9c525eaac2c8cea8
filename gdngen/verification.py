"""Is a package right?  Digests, import without gdngen, and numbers against the float64 recurrence.

A copy of the package runs in processes that cannot import gdngen: its PyTorch version on the CPU, and its kernels on
the GPU, or where there is none in Triton's interpreter on small shapes.
"""

import itertools
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gdngen import calls, kept, package, standalone
from gdngen.calls import Case
from gdngen.mixer import verification as mixer_verification
from gdngen.oracle import rms_ratio
from gdngen.spec import Spec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BUDGETS = {"fp32": 5e-4, "bf16": 5e-3, "fp16": 5e-3}  # contract section 5, o and states
GRADIENTS = {"fp32": 1e-4, "bf16": 8e-3, "fp16": 8e-3}  # the strictest ones of section 5 for all gradients
LAST_LINES = 12
Inputs = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """One line of the report; ``measured`` and ``budget`` are None where the check is a yes or no."""

    where: str
    what: str
    passed: bool
    detail: str = ""
    measured: float | None = None
    budget: float | None = None

    def __str__(self) -> str:
        against = "" if self.measured is None else f"{self.measured:.1e} of {self.budget:.0e}"
        line = f"{'ok' if self.passed else 'FAILED':6}  {against:16}  {self.where}: {self.what}"
        return line + (f"\n        {self.detail}" if self.detail else "")


@dataclass(frozen=True)
class Place:
    """What runs, and on which device."""

    name: str
    device: str = "cpu"
    interpreted: bool = False
    dtypes: tuple[str, ...] = ("fp32",)


TORCH = Place("PyTorch version")
INTERPRETER = Place("kernels in Triton's interpreter, products in fp32", interpreted=True, dtypes=("fp32", "fp16"))


def cases(spec: Spec, few: bool) -> Iterator[Case]:
    """Shapes and data that break kernels; ``few`` and small ones for the interpreter, which is slow."""
    C = 64 if spec.chunk == "auto" else int(spec.chunk)
    yield Case("ragged tail, initial state", C + 9, 1 if few else 2)
    yield Case("one token", 1, 2)
    if spec.varlen:
        ends = (0, 5, 5, C + 7) if few else (0, 5, 5, C + 20, 2 * C + 20, 2 * C + 20)
        yield Case("packed, empty sequences, rows past the end", ends[-1] + 9, offsets=ends)
    yield Case("q, k, v split from one tensor, no state", C - 3 if few else 2 * C + 3, strided=True, stateful=False)
    if spec.fused_gate != "none" or spec.beta == "dt":
        yield Case("raw gate inputs of 20", C + 2 if few else 2 * C, marks=(1, 4, 20.0))
    elif spec.gate:
        yield Case("gates of -20", C + 2 if few else 2 * C, marks=(1, 4, -20.0))
        yield Case("gates of -inf", C // 2 if few else 2 * C, marks=(4, 9, -math.inf))
    if spec.beta == "dt":
        yield Case("dt clamped to (0.1, 0.5)", C // 2, dt_limit=(0.1, 0.5))
    if not few:
        yield Case("no tokens", 0, 2)
        yield Case("many chunks", 4 * C + 1)
        yield Case("many sequences", C // 2, 40)


def verify(folder: Path, tell: Callable[[str], object] = lambda text: None) -> Iterator[Check]:
    """Every check of a package, as it is made; ``tell`` hears what is running."""
    manifest: dict[str, Any] = package.read_manifest(folder)
    faults = package.faults(folder)
    detail = f"{', '.join(faults)}: not as built; build the package again" if faults else ""
    yield Check("files", f"digests of {len(manifest['files'])} files, and no others", not faults, detail)
    if measured := sorted(folder.glob(f"{kept.TUNED}/*.json")):
        faults = kept.faulty_decisions(folder)
        yield Check("decisions", ", ".join(path.stem for path in measured), not faults, "; ".join(faults))
    if "member" in manifest["spec"]:  # of the mixer
        tell("running a mixer's member in PyTorch and in kernels")
        yield from (Check(*found) for found in mixer_verification.verify(folder))
        return
    spec, places, threads = Spec(**manifest["spec"]), [TORCH, INTERPRETER], torch.get_num_threads()
    if torch.cuda.is_available():
        places = [TORCH, Place(f"kernels on {torch.cuda.get_device_name()}", "cuda", dtypes=("bf16", "fp16", "fp32"))]
    with tempfile.TemporaryDirectory(prefix="gdngen_verify_") as scratch:
        copy = Path(scratch) / "elsewhere" / str(manifest["name"])
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("__pycache__"))
        for place in places:
            torch.set_num_threads(1)  # the recurrence is many small steps: more threads only wait for each other
            asked = list(_questions(place, spec, sorted(manifest["cuts"])))
            torch.set_num_threads(threads)
            tell(f"running {len(asked)} calls: {place.name}")
            answers, trouble = _run(copy, [one.call for one in asked], place)
            yield Check(place.name, f"import and {len(asked)} calls without gdngen", not trouble, trouble)
            yield from (_compare(place, one, answer) for one, answer in zip(asked, answers))


@dataclass(frozen=True)
class _Question:
    """A call, the right values by name, and how far they may be missed."""

    what: str
    call: dict[str, Any]
    answer: dict[str, torch.Tensor]
    budget: float


def _questions(place: Place, spec: Spec, forms: list[str]) -> Iterator[_Question]:
    groups = 4 if place.device == "cuda" else 1
    heads = (groups, groups * (2 if spec.head_ratio == "any" else spec.head_ratio))
    for dtype in place.dtypes:
        for case in itertools.islice(
            cases(spec, place.interpreted), 1 if dtype == "fp16" and place.interpreted else None
        ):
            x = calls.inputs(spec, case, DTYPES[dtype], heads, place.device)
            answer = dict(zip(("o", "final_state", "z"), calls.expected(spec, x, case)))
            for form in forms:
                if not form.endswith("_backward"):
                    yield _question(f"{dtype}, {case.name}", spec, form, x, case, place, answer, BUDGETS[dtype])
                elif case.stateful and case.tokens > 1:
                    yield _gradients(f"gradients, {dtype}, {case.name}", spec, x, case, place, GRADIENTS[dtype])


def _question(
    what: str, spec: Spec, form: str, x: Inputs, case: Case, place: Place, answer: Inputs, budget: float
) -> _Question:
    operator, keywords = calls.operator_name(spec, form), calls.keywords(spec, form, x, case)
    call = {"operator": operator, "keywords": keywords, "twice": not place.interpreted, "gradients": []}
    return _Question(f"{operator}, {what}", call, answer, budget)


def _gradients(what: str, spec: Spec, x: Inputs, case: Case, place: Place, budget: float) -> _Question:
    """Gradients from all results together, of every input that is one tensor, by autograd of the recurrence."""
    one = _question(what, spec, "chunk", x, case, place, {}, budget)
    names = {key: name for key, value in one.call["keywords"].items() for name in x if value is x[name]}
    names = {key: name for key, name in names.items() if x[name].is_floating_point()}
    leaves = {name: value.detach().requires_grad_() if name in names.values() else value for name, value in x.items()}
    right = calls.expected(spec, leaves, case)
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(y.shape, generator=generator).to(y.device) for y in right]
    exact = torch.autograd.grad(right, [leaves[name] for name in names.values()], [d.double() for d in given])
    cotangents = [given[0].to(x["v"].dtype), *given[1:]]
    call = one.call | {"gradients": list(names), "cotangents": cotangents}
    return _Question(one.what, call, {f"d{key}": d for key, d in zip(names, exact)}, budget)


def _run(folder: Path, asked: list[dict[str, Any]], place: Place) -> tuple[list[dict[str, Any]], str]:
    """(answers, "") or ([], the end of the error output)."""
    home = folder.parent
    script = shutil.copy(standalone.__file__, home / "standalone.py")
    torch.save(asked, home / "calls.pt")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": str(int(place.interpreted))}
    command = [sys.executable, script, folder, home / "calls.pt", home / "results.pt"]
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True)
    if done.returncode:
        return [], "\n".join(done.stderr.strip().splitlines()[-LAST_LINES:])
    return torch.load(home / "results.pt", weights_only=True), ""


def _compare(place: Place, asked: _Question, found: dict[str, Any]) -> Check:
    """Errors against the budget; whether kernels ran, and whether a second call gave the same bits."""
    pairs = {name: (x, right) for (name, right), x in zip(asked.answer.items(), found["results"])}
    faults = [f"{name} is {list(x.shape)}, not {list(y.shape)}" for name, (x, y) in pairs.items() if x.shape != y.shape]
    errors = {name: rms_ratio(x, y) for name, (x, y) in pairs.items() if x.shape == y.shape and y.numel()}
    faults += [f"{name} is off by {error:.1e}" for name, error in errors.items() if not error <= asked.budget]
    if place is not TORCH and not found["launches"] and found["results"][0].numel():
        faults.append("no kernel was launched")
    if not found["same_bits"]:
        faults.append("a second call gave other bits")
    worst = max((error if math.isfinite(error) else sys.float_info.max for error in errors.values()), default=0.0)
    return Check(place.name, asked.what, not faults, "; ".join(faults), worst, asked.budget)
