"""gdngen.ops: derive the Spec from a call, build and load its package once, and hand the call over.

In a generated package the module of this name is another file (templates/package/dispatch.py), with the same ``run``.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import torch

from .arguments import Call, Options

_packages: dict[Options, ModuleType] = {}
_loading = threading.Lock()


def run(options: Options, call: Call) -> Any:
    """(o, final_state) of one call, from the package of the member that the call asks for."""
    if torch.compiler.is_compiling():
        _has_package(*options)
    package = _packages.get(options)
    if package is None:
        package = _load(options)
    return package.dispatch.run(options, call)


@torch.compiler.assume_constant_result
def _has_package(*options: Any) -> bool:
    """Called, not traced, by torch.compile: it cannot trace how a package is built, but can trace into it."""
    return _load(Options(*options)) is not None


def _load(options: Options) -> ModuleType:
    """The package for these options: one thread builds and loads it, the others wait and find it.

    That is a thread of its own, which modes and transforms that the call is made under do not reach: building computes.
    """
    # The compiler is needed only here; imported at the top it would import this module in a circle.
    from gdngen.api import load
    from gdngen.spec import Spec

    with _loading:
        if options not in _packages:
            with ThreadPoolExecutor(1) as elsewhere:
                _packages[options] = elsewhere.submit(load, Spec(**options.said())).result()
        return _packages[options]


class Launches(Mapping[str, int]):
    """Kernel launches by kernel name, over all packages that gdngen.ops has loaded: a live view of their counters.

    A kernel that was never launched counts 0, as in collections.Counter.
    """

    def __getitem__(self, kernel: str) -> int:
        return sum(counter[kernel] for counter in self._counters())

    def __iter__(self) -> Iterator[str]:
        return iter(self.copy())

    def __len__(self) -> int:
        return len(self.copy())

    def __contains__(self, kernel: object) -> bool:
        return any(kernel in counter for counter in self._counters())

    def __repr__(self) -> str:
        return f"Launches({dict(self)})"

    def copy(self) -> Counter[str]:
        """The counts of this moment."""
        return sum(self._counters(), Counter())

    def total(self) -> int:
        return sum(counter.total() for counter in self._counters())

    def clear(self) -> None:
        """Set every count back to 0."""
        for counter in self._counters():
            counter.clear()

    @staticmethod
    def _counters() -> list[Counter[str]]:
        # Several options may share one package; each counter counts once.
        from gdngen.mixer.operators import _packages as _mixer

        modules = [*_packages.values(), *_mixer.values()]
        return list({id(module): module.LAUNCHES for module in modules}.values())


LAUNCHES = Launches()
