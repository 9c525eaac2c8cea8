"""The pages say what is: links, commands, what they print, the code they show, the kernels in the picture."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest
from click.testing import CliRunner

from gdngen import api
from gdngen.cli import main
from gdngen.passes.plan import Operator
from gdngen.presets import PRESETS
from gdngen.spec import Spec

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLE = "--gate none --key-dim 64 --value-dim 64"


def commands(program: str) -> Iterator[str]:
    """What pages show: lines of code blocks, and code inside of sentences."""
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        shown = re.findall(rf"^    ({program} .*)$", text, re.MULTILINE) + re.findall(rf"`({program} [^`]*)`", text)
        yield from (" ".join(one.partition("  #")[0].split()) for one in shown)


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_can_be_found() -> None:
    linked = set(re.findall(r"\]\(docs/([\w.]+)", (ROOT / "README.md").read_text()))
    assert {page.name for page in (ROOT / "docs").iterdir()} == linked


def test_commands_of_the_pages_are_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsed as the command line parses them; names in capitals and lists of choices are no arguments."""
    monkeypatch.chdir(tmp_path)
    parsed = 0
    for text in commands("gdngen"):
        name, *arguments = shlex.split(text)[1:]
        command = main.commands[name]
        if not arguments or "|" in text or re.search(r"\b[A-Z]{3,}\b|\.\.\.", text):
            continue
        for argument in arguments:
            if argument.startswith("generated/"):
                (tmp_path / argument).mkdir(parents=True, exist_ok=True)
        if isinstance(command, click.Group):
            command, arguments = command.commands[arguments[0]], arguments[1:]
        with command.make_context(name, arguments) as context:
            assert context.params.get("preset") in (None, *PRESETS), text
        parsed += 1
    assert parsed > 15


def test_make_knows_its_targets() -> None:
    known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    asked = {text.split()[1] for text in commands("make")}
    assert {"demo", "test"} <= asked <= set(known)


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", ["README.md", "docs/guide.md"])
def test_code_of_the_pages_runs(page: str, tmp_path: Path) -> None:
    code = blocks(page)[0]
    if page != "README.md":
        (name,) = re.findall(r"^from (gdn_\w+) import", code, re.MULTILINE)
        spec = Spec(key_dim=96, value_dim=160, qk_norm=True)
        assert name == spec.name
        api.build(spec, tmp_path)
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT), "GDNGEN_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_worked_example_is_what_show_prints() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text().partition("## One example")[2].partition("\n## ")[0]
    stages = ["schema", "graph", "graph --after backward", "graph --after fold_to_tokens", "plan"]
    printed = {
        line.strip()
        for stage in [*stages, "source --kernel scan"]
        for line in CliRunner().invoke(main, f"show {stage} {EXAMPLE}".split()).output.splitlines()
    }
    shown = [line.strip() for line in re.findall(r"^    +(.*)$", text, re.MULTILINE)]
    assert len(shown) > 40 and not [line for line in shown if line not in printed | {"..."}]
    assert set(re.findall(r"--pin cut=(\S+?)`", text)) <= offered()


def offered() -> set[str]:
    found = api.compilation(Spec(gate="none", key_dim=64, value_dim=64))
    return {candidate.cut.name for candidate in found.choices["chunk"].front}


def test_the_picture_has_the_kernels_of_the_plan() -> None:
    texts = [
        one.text for one in ElementTree.parse(ROOT / "docs" / "stages.svg").iter("{http://www.w3.org/2000/svg}text")
    ]

    def names(operator: Operator) -> list[str]:
        return [kernel.name for kernel in operator.kernels]

    operators = api.compilation("qwen3-next").plan.operators
    shown = texts[texts.index("forward") : texts.index("Package")]
    kernels = [text for text in shown if text in {name for operator in operators for name in names(operator)}]
    assert kernels == [name for operator in operators for name in names(operator)]
    assert operators[0].cut == "X+P" and "X, P, ..." in shown
