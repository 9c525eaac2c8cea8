"""The compiler stays small: lines of the core, of what packages ship, tools and tuner; of each module and function.

Blank lines do not count, but in a module.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "gdngen"
CORE_LINES, TEMPLATE_LINES, MODULE_LINES, FUNCTION_LINES = 5000, 1900, 400, 60

SHIPPED = ("templates", "runtime")  # what packages are made of
TOOLS = ("api.py", "ops.py", "cli.py", "__main__.py", "calls.py", "knobs.py", "presets.py",
         "standalone.py", "verification.py", "inspection.py", "explanation.py",
         "doctor.py", "oracle.py", "integrate")  # fmt: skip
AUTOTUNE = ("autotune", "commands", "kept.py")
TOOL_LINES, AUTOTUNE_LINES, RUNTIME_LINES = 1500, 3000, 800
TEMPLATES = sorted(p for p in (ROOT / "templates").rglob("*") if p.is_file() and "__pycache__" not in p.parts)
MODULES = sorted(p for p in ROOT.rglob("*.py") if "templates" not in p.parts)
CORE = [p for p in MODULES if p.relative_to(ROOT).parts[0] not in (*SHIPPED, *TOOLS, *AUTOTUNE)]


def lines(path: Path) -> int:
    return sum(1 for line in path.read_text().splitlines() if line.strip())


def test_core() -> None:
    assert sum(map(lines, CORE)) < CORE_LINES


@pytest.mark.parametrize(
    ("rooms", "limit"), [(TOOLS, TOOL_LINES), (AUTOTUNE, AUTOTUNE_LINES), (("runtime",), RUNTIME_LINES)]
)
def test_around_the_core(rooms: tuple[str, ...], limit: int) -> None:
    assert sum(lines(p) for p in MODULES if p.relative_to(ROOT).parts[0] in rooms) < limit


def test_templates() -> None:
    assert sum(map(lines, TEMPLATES)) < TEMPLATE_LINES


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_module(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MODULE_LINES
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            length = node.end_lineno - node.lineno + 1
            assert length <= FUNCTION_LINES, f"{path.name}:{node.lineno} {node.name} has {length} lines"
