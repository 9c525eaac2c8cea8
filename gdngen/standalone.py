"""Runs a package's operators where gdngen cannot be imported: ``python standalone.py PACKAGE CALLS RESULTS``.

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


def answer(package: ModuleType, call: dict[str, Any]) -> dict[str, Any]:
    """One call: results or gradients, kernel launches, whether a second call (where asked for) gave the same bits."""
    keywords = dict(call["keywords"])
    wanted = [keywords[name].requires_grad_() for name in call["gradients"]]

    def results() -> list[torch.Tensor]:
        o, state = getattr(package, call["operator"])(**keywords)
        found = [o, *(state if isinstance(state, tuple) else (state,))]
        return list(torch.autograd.grad(found, wanted, call["cotangents"])) if wanted else found

    before, found = sum(package.LAUNCHES.values()), results()
    launches = sum(package.LAUNCHES.values()) - before
    same = all(map(torch.equal, found, results())) if call["twice"] else True
    return {"results": found, "launches": launches, "same_bits": same}


if __name__ == "__main__":
    folder, calls, answers = sys.argv[1:]
    sys.path.insert(0, str(Path(folder).parent))
    sys.meta_path.insert(0, Refuse())
    module = importlib.import_module(Path(folder).name)
    torch.save([answer(module, call) for call in torch.load(calls, weights_only=True)], answers)
