"""What the whole test run shares: Triton's interpreter, repeatable hypothesis, packages built once.

Triton decides when it is imported whether kernels are interpreted, so one process has one back end: here it is the
interpreter.  The PyTorch version of a package is reached inside ``support.pytorch_version()``.  GPU tests need compiled
kernels and so a process of their own: ``pytest -m gpu``.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

Packages = Callable[..., ModuleType]


def pytest_configure(config: pytest.Config) -> None:
    settings.register_profile(
        "repeatable",
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
        print_blob=True,
    )
    settings.load_profile("repeatable")
    if config.getoption("markexpr") == "gpu":
        return
    if "not full" in config.getoption("markexpr"):
        os.environ["SHORT_RUN"] = "1"  # for what decides when test modules are imported
    if "triton" in sys.modules:
        raise pytest.UsageError("triton was imported before the tests could choose its interpreter")
    os.environ["TRITON_INTERPRET"] = "1"
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim:DeprecationWarning")
    _patch_language_once_per_launch()


def _patch_language_once_per_launch() -> None:
    """Halve the interpreter's time: it patches triton.language again at every call of a device function."""
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def patch_once(function):
        module = id(function.__globals__)
        if module in patched:
            return interpreter._LangPatchScope()
        patched.add(module)
        return patch(function)

    def launch_afresh(self, *args, **kwargs):
        patched.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_afresh


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    """``packages(spec, "cut=X+P", ...)`` is the package of a Spec under pins, built on first use."""
    from gdngen import api

    folder = tmp_path_factory.mktemp("packages")
    made: dict[tuple[object, ...], ModuleType] = {}

    def load(spec, *pins: str) -> ModuleType:
        key = (spec, pins)
        if key not in made:
            path = api.build(spec, folder, name=f"package_{len(made)}", pins=pins)
            made[key] = api.import_folder(Path(path), path.name)
        return made[key]

    return load
