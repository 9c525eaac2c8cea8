"""Runs a package's operators in a process that cannot import gdngen: ``python standalone.py PACKAGE CALLS RESULTS``.

CALLS and RESULTS are files of torch.save.  A copy of this file runs beside a copy of the package, elsewhere.
"""

import importlib
import importlib.abc
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


class Refuse(importlib.abc.MetaPathFinder):
    """Makes every import of gdngen an error."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname.partition(".")[0] == "gdngen":
            raise ModuleNotFoundError(f"{fullname} was imported: a package must stand alone", name=fullname)


def flat(result: Any) -> list[torch.Tensor]:
    """(o, S) or (o, (S, z)) as a list."""
    o, state = result
    return [o, *(state if isinstance(state, tuple) else (state,))]


def answer(package: ModuleType, call: dict[str, Any]) -> dict[str, Any]:
    """One call: results, launches; whether a second call gave the same bits, and gradients, where wanted."""
    operator, keywords, sent = getattr(package, call["operator"]), call["keywords"], call.get("cotangents")
    before = sum(package.LAUNCHES.values())
    results = flat(operator(**keywords))
    launches = sum(package.LAUNCHES.values()) - before
    found = {"results": [x.detach() for x in results], "launches": launches}
    if sent is not None:
        torch.autograd.backward(results, sent)
        leaves = {name: x for name, x in keywords.items() if isinstance(x, torch.Tensor) and x.requires_grad}
        found["gradients"] = {name: x.grad for name, x in leaves.items()}
    elif call["twice"]:
        found["same_bits"] = all(map(torch.equal, results, flat(operator(**keywords))))
    return found


def main(package: str, calls: str, results: str) -> None:
    """Import the package, answer every call."""
    sys.path.insert(0, str(Path(package).parent))
    sys.meta_path.insert(0, Refuse())
    module = importlib.import_module(Path(package).name)
    torch.save([answer(module, call) for call in torch.load(calls, weights_only=True)], results)


if __name__ == "__main__":
    main(*sys.argv[1:])
