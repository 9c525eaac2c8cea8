"""Every module imports only from its own room or from lower ones; imports inside functions count as well."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "gdngen"
ROOMS = {
    **dict.fromkeys(("errors", "knobs", "requirements", "sass", "__version__"), 0),
    **dict.fromkeys(("spec", "presets", "target", "oracle"), 1),
    "ir": 2,
    "passes": 3,
    "codegen": 4,
    **dict.fromkeys(("hub", "kept", "package", "wheel"), 5),
    **dict.fromkeys(
        (
            "api",
            "ops",
            "runtime",
            "integrate",
            "calls",
            "standalone",
            "verification",
            "inspection",
            "explanation",
            "figure",
            "doctor",
            "autotune",
            "layers",
            "mixer",
            "parallel",
            "serve",
        ),
        6,
    ),
    **dict.fromkeys(("cli", "commands", "__init__", "__main__"), 7),
}
MODULES = sorted(p for p in ROOT.rglob("*.py") if "templates" not in p.parts)


def imported(path: Path) -> set[str]:
    """The rooms that a module imports from; a relative import is resolved against the module's own package."""
    package = ("gdngen", *path.relative_to(ROOT).parts[:-1])
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            names |= {".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("gdngen.")}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_only_from_its_own_room_or_lower(path: Path) -> None:
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert own in ROOMS, f"gdngen/{own} has no room: add it to ROOMS"
    above = {name for name in imported(path) if ROOMS.get(name, 7) > ROOMS[own]}
    assert not above, f"{path.name} (room {ROOMS[own]}) imports {sorted(above)} from rooms above it"


def test_the_tuner_does_not_build() -> None:
    """It is given a package: only commands and the interface for users know of both."""
    own = [path for path in MODULES if path.relative_to(ROOT).parts[0] == "autotune"]
    assert own and not any({"api", "ops", "cli", "commands"} & imported(path) for path in own)
