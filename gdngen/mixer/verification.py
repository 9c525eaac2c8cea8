"""Is a mixer's package right?  Digests, import without gdngen, and numbers against its graph in float64.

``python -m gdngen.mixer.verification FOLDER DEVICE`` runs the calls in a process of their own, where Triton may
interpret, and prints what each of them was off by.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gdngen import api, package
from gdngen.mixer import calls
from gdngen.mixer.specs import Convolution, Gate, MixerSpec, RowNorm
from gdngen.oracle import rms_ratio

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
BUDGETS = {"fp32": 1e-5, "fp16": 5e-3, "bf16": 5e-3}  # of outputs and gradients
CASES: tuple[tuple[str, tuple[int, int, int], tuple[int, ...] | None], ...] = (
    ("ragged tail", (2, 37, 40), None),
    ("one token", (3, 1, 33), None),
    ("packed, empty sequences, rows past the end", (1, 45, 24), (0, 2, 2, 3, 40)),
)


def spec_of(record: dict[str, Any]) -> MixerSpec:
    """The Spec that a manifest holds."""
    members: dict[str, Any] = {member.__name__: member for member in (Convolution, Gate, RowNorm)}
    return members[record["member"]](**{key: x for key, x in record.items() if key != "member"})


def verify(folder: Path) -> Iterator[tuple[str, str, bool, str, float | None, float | None]]:
    """Where, what, passed, detail, measured and budget of every check."""
    places = [("PyTorch version", "cpu", "0"), ("kernels in Triton's interpreter", "cpu", "1")]
    if torch.cuda.is_available():
        places[1] = (f"kernels on {torch.cuda.get_device_name()}", "cuda", "0")
    for name, device, interpreted in places:
        command = [sys.executable, "-m", "gdngen.mixer.verification", str(folder.resolve()), device]
        environment = os.environ | {"TRITON_INTERPRET": interpreted}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        detail = "\n".join(done.stderr.strip().splitlines()[-12:])
        yield name, "import and calls", done.returncode == 0, detail if done.returncode else "", None, None
        for line in done.stdout.splitlines():
            what, measured, budget, fault = json.loads(line)
            yield name, what, measured <= budget and not fault, fault, measured, budget


def _answers(folder: Path, device: str) -> Iterator[tuple[str, float, float, str]]:
    """What, largest error, budget and fault of every case."""
    spec = spec_of(package.read_manifest(folder)["spec"])  # type: ignore[arg-type]
    made = api.import_folder(folder, f"verified_{folder.name}")
    kernels = device == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    for dtype in DTYPES:
        for name, shape, offsets in CASES:
            if offsets is None or isinstance(spec, Convolution):
                error, fault = _case(made, spec, DTYPES[dtype], shape, offsets, device, kernels)
                yield f"{dtype}, {name}", error, BUDGETS[dtype], fault


def _case(
    made: Any, spec: MixerSpec, dtype: torch.dtype, shape: tuple[int, int, int], offsets: tuple[int, ...] | None,
    device: str, kernels: bool,
) -> tuple[float, str]:  # fmt: skip
    """The largest error of all outputs and gradients, and what else is wrong."""
    sequences = None if offsets is None else len(offsets) - 1
    x = {
        n: y.to(device).requires_grad_() for n, y in calls.inputs(spec, shape, dtype=dtype, sequences=sequences).items()
    }
    cu_seqlens = None if offsets is None else torch.tensor(offsets, device=device)

    def results() -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        found = made.run(made.Call(dict(x), calls.number_of(spec), cu_seqlens, None, isinstance(spec, Convolution)))
        generator = torch.Generator().manual_seed(1)
        given.clear()
        given.update({n: torch.randn(y.shape, generator=generator).to(y) for n, y in zip(made.OUTPUTS, found)})
        return found, torch.autograd.grad(found, list(x.values()), list(given.values()))

    given: dict[str, torch.Tensor] = {}
    made.LAUNCHES.clear()
    found, gradients = results()
    fault = "" if bool(made.LAUNCHES.total()) == kernels else "kernels did not run where they should, or did elsewhere"
    if not all(map(torch.equal, (*found, *gradients), sum(results(), ()))):
        fault = "a second call gave other bits"
    plain: dict[str, Any] = {n: y.detach().cpu() for n, y in x.items()}
    outputs, slopes = calls.answer(spec, plain, calls.number_of(spec), offsets, {n: y.cpu() for n, y in given.items()})
    errors = [rms_ratio(y.cpu(), outputs[n]) for n, y in zip(made.OUTPUTS, found)]
    errors += [rms_ratio(y.cpu(), slopes[n]) for n, y in zip(x, gradients)]
    return max(errors), fault


if __name__ == "__main__":
    for answer in _answers(Path(sys.argv[1]), sys.argv[2]):
        print(json.dumps(answer))
