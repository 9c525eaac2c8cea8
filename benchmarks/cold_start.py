"""How long the very first calls of a package take: a fresh process, empty caches.

usage: python benchmarks/cold_start.py --package generated/gdn_scalar_k128_v128_c64_qknorm --heads 16/32 --tokens 4096

Prints one JSON line.  Seconds: import_torch, import_package, context (the GPU's), inputs, forward and backward (the
first calls, synchronised; Triton is imported by the first), second_forward, second_backward.  Counts of the two first
calls: compiled (kernels that Triton compiled), ahead (kernels taken from aot/), launchers (C launchers built by a
compiler), added_later (kernels that any of --lengths other lengths adds, 0 is right).
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


class Clock:
    """Seconds between marks, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.perf_counter()

    def mark(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self.last = round(now - self.last, 4), now


def files(pattern: str) -> int:
    return len(list(Path(os.environ["TRITON_CACHE_DIR"]).glob(pattern)))


def tensors(spec: dict[str, Any], tokens: int, heads: tuple[int, int]) -> dict[str, Any]:
    """Keyword arguments of the chunk operator of any Spec, as models pass them."""
    import torch

    from gdngen import calls
    from gdngen.spec import Spec

    dtype, case = torch.bfloat16, calls.Case("cold", tokens, stateful=False)
    x = calls.inputs(Spec(**spec), case, dtype, heads, "cuda")
    raw = {name: x[name].to(dtype) for name in ("a", "dt") if name in x}  # outputs of a projection
    given = calls.keywords(Spec(**spec), "chunk", x | raw, case) | {"output_final_state": False}
    return {name: y.requires_grad_() if getattr(y, "is_floating_point", bool)() else y for name, y in given.items()}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    clock = Clock()
    import torch

    clock.mark("import_torch")
    folder = arguments.package.resolve()
    sys.path.insert(0, str(folder.parent))
    package = __import__(folder.name)
    clock.mark("import_package")
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    clock.mark("context")
    from gdngen import calls
    from gdngen.spec import Spec

    operator = getattr(package, calls.operator_name(Spec(**package.SPEC), "chunk"))
    x = tensors(package.SPEC, arguments.tokens, arguments.heads)
    torch.cuda.synchronize()
    clock.mark("inputs")
    for turn in ("", "second_"):
        o, _ = operator(**x)
        torch.cuda.synchronize()
        clock.mark(f"{turn}forward")
        o.backward(o.detach())
        torch.cuda.synchronize()
        clock.mark(f"{turn}backward")
    compiled, cubins, launchers = files("*/*.ttir"), files("*/*.cubin"), files("*/__triton_launcher*")
    given = len(list(folder.glob("aot/sm_*/launchers/*/__triton_launcher*"))) if launchers else 0
    numbers = random.Random(0)
    for _ in range(arguments.lengths):
        operator(**tensors(package.SPEC, numbers.randint(1, 5000), arguments.heads))[0].sum().backward()
    record = {"package": folder.name, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    record |= {
        "python": sys.version.split()[0],
        "tokens": arguments.tokens,
        "heads": "/".join(map(str, arguments.heads)),
    }
    record |= clock.seconds | {"first_call": round(clock.seconds["forward"] + clock.seconds["backward"], 4)}
    record |= {"compiled": compiled, "ahead": cubins - compiled, "launchers": max(0, launchers - given)}
    return record | {"added_later": files("*/*.ttir") - compiled}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, required=True, help="folder of a package")
    parser.add_argument("--heads", type=lambda text: tuple(map(int, text.split("/"))), default=(16, 32), metavar="H/HV")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--lengths", type=int, default=0, help="random lengths to call afterwards")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        return print(json.dumps(measure(arguments)))
    with tempfile.TemporaryDirectory(prefix="cold_start_") as empty:
        root = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"TRITON_CACHE_DIR": f"{empty}/triton", "PYTHONPATH": path}
        command = [sys.executable, __file__, *sys.argv[1:], "--here"]
        sys.exit(subprocess.run(command, env=environment).returncode)


if __name__ == "__main__":
    main()
