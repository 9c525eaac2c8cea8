"""Templates and the text they become: valid Python on disk, no unused field, clean and stand-alone packages."""

import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest
import torch
from graphs import TARGET
from jinja2 import meta, nodes
from support import ROOT, call, case, pytorch_version, same

from gdngen import package
from gdngen.codegen.environment import TEMPLATES, WIDTH, environment, read_template, wrapped
from gdngen.codegen.sources import sources
from gdngen.mixer.sources import sources as mixer_sources
from gdngen.mixer.specs import Convolution, RowNorm
from gdngen.passes.pipeline import compile_spec
from gdngen.spec import Spec

FILES = sorted(path.relative_to(TEMPLATES).as_posix() for path in TEMPLATES.rglob("*.py"))
WITH_FIELDS = [name for name in FILES if "{{" in read_template(name) or "#%" in read_template(name)]
MACROS = [name for name in FILES if name.startswith("tiles/")]

MEMBERS = [
    (Spec(), ()),
    (Spec(), ("cut=S+U+W+r",)),
    (Spec(key_dim=20, value_dim=300, chunk=128), ("cut=none",)),
    (Spec(key_dim=5, value_dim=4, chunk=16, qk_norm=True, beta_logits=True, neg_eigval=True, state_v_first=True), ()),
    (Spec(key_dim=96, value_dim=60, fused_gate="bounded", chunk=32), ("cut=X+P",)),
    (Spec(gate="none", fused_gate="none", beta="none"), ()),
    (Spec(gate="scalar+key+value", beta="value", beta_logits=True), ()),
    (Spec(gate="key", fused_gate="softplus", qk_norm=True), ()),
    (Spec(rule="additive", beta="dt", value_dim=64), ()),
    (Spec(rule="additive", gate="none", beta="none", feature_map="elu1", normalize=True), ()),
]
IDS = [" ".join((spec.name, *pins)) for spec, pins in MEMBERS]


@pytest.fixture(scope="module")
def texts() -> list[dict[str, str]]:
    """Every file of every member's package."""
    return [
        package.render(compile_spec(spec, TARGET, pins).plan, f"member_{n}") for n, (spec, pins) in enumerate(MEMBERS)
    ]


# ---- templates -------------------------------------------------------------------------------------------------------


def test_the_templates_are_found():
    assert len(FILES) > 12 and len(MACROS) >= 3 and len(WITH_FIELDS) > len(MACROS)


@pytest.mark.parametrize("name", FILES)
def test_raw_templates_are_python(name):
    ast.parse((TEMPLATES / name).read_text())


@pytest.mark.parametrize("name", MACROS)
def test_macros_use_every_argument(name):
    tree = environment().parse(read_template(name))
    macros = list(tree.find_all(nodes.Macro))
    assert macros
    for macro in macros:
        body = nodes.Template(macro.body, lineno=macro.lineno).set_environment(environment())
        used = meta.find_undeclared_variables(body)  # what a loop of the macro binds is its own
        assert {argument.name for argument in macro.args} == used, macro.name


@pytest.mark.parametrize("name", WITH_FIELDS)
def test_loops_use_every_name(name):
    for loop in environment().parse(read_template(name)).find_all(nodes.For):
        bound = {found.name for found in [loop.target, *loop.target.find_all(nodes.Name)] if hasattr(found, "name")}
        read = {found.name for part in loop.body for found in part.find_all(nodes.Name) if found.ctx == "load"}
        assert bound and bound <= read, f"unused: {bound - read}"


def test_every_field_of_every_context_is_used(monkeypatch):
    """What codegen hands to a template is what the template reads, no more and no less."""
    given: dict[str, set[str]] = {}
    render = jinja2.Template.render

    def record(self, *args, **context):
        given.setdefault(self.name, set()).update(context)
        return render(self, *args, **context)

    monkeypatch.setattr(jinja2.Template, "render", record)
    for spec, pins in MEMBERS[:2]:
        sources(compile_spec(spec, TARGET, pins).plan, "any")
    for member in (Convolution(bias=True), RowNorm(weight="plain")):
        mixer_sources(member, "any")
    assert set(given) == set(WITH_FIELDS) - set(MACROS)
    for name, fields in given.items():
        assert fields == meta.find_undeclared_variables(environment().parse(read_template(name))), name


@pytest.mark.parametrize("name", [name for name in WITH_FIELDS if name not in MACROS])
def test_an_undefined_field_is_an_error(name):
    assert environment().undefined is jinja2.StrictUndefined
    with pytest.raises(jinja2.UndefinedError):
        environment().get_template(name).render()


LONG = " + ".join(f"b_value_{n} * tl.exp(b_gate_{n}, {n}.0)" for n in range(8))


@pytest.mark.parametrize(
    "text",
    [
        f"tl.where({LONG}, {LONG})",
        f"({LONG})",
        f"({LONG}) * 2.0",
        f"1.0 / ({LONG})",
        f"({LONG})[:, None] * tl.where(m_i, {LONG}, 0.0)",
        f"(b_x).to(DOT) * ({LONG})",
        f"tl.load(p_x, mask=m_i) * ({LONG} - (b_y + b_z))",
        f"({LONG.replace(' + ', ' * ')})",
        f"(({LONG}) * ({LONG}))",
        f"({'b_name' * 30})",
        f"(b_x if {LONG} else b_y)",
        f"(m_{' & m_'.join(LONG.split()[0] for _ in range(20))})",
    ],
)
def test_a_long_statement_means_the_same_on_several_lines(text):
    """Brackets that only group get no comma behind what they hold: it would be a tuple."""
    line = f"b_out = {text}"
    assert len(line) > WIDTH
    assert ast.dump(ast.parse("\n".join(wrapped(line)))) == ast.dump(ast.parse(line))


# ---- packages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(len(MEMBERS)), ids=IDS)
@pytest.mark.parametrize("command", ["check", "format --check --diff"])
def test_packages_are_clean(texts, tmp_path, command, number):
    folder = package.write(texts[number], tmp_path / "member")
    options = ["--no-cache", "--config", str(ROOT / "pyproject.toml"), "."]
    line = [sys.executable, "-m", "ruff", *command.split(), *options]
    run = subprocess.run(line, cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr


@pytest.mark.parametrize("number", range(len(MEMBERS)), ids=IDS)
def test_packages_say_nothing_about_where_and_when(texts, number):
    folders = [f"/{name}/" for name in ("work", "root", "home", "Users", "tmp", "usr", "var")]
    for file, text in texts[number].items():
        assert not [folder for folder in folders if folder in text], file
        assert not re.search(r"\b20\d\d-[01]\d-[0-3]\d\b|\b[0-2]\d:[0-5]\d:[0-5]\d\b", text), file
        assert not [name for name in (os.uname().nodename, str(ROOT)) if len(name) > 3 and name in text], file
        assert "gdngen" not in re.findall(r"^\s*(?:from|import) (\w+)", text, re.MULTILINE), file


@pytest.mark.parametrize("number", range(len(MEMBERS)), ids=IDS)
def test_one_kernel_a_file_under_a_header_of_constant_height(texts, number):
    kernels = {name: text for name, text in texts[number].items() if re.match(r"kernels/\w+\.py", name)}
    for shared in ("__init__", "combine"):  # the same in every package
        kernels.pop(f"kernels/{shared}.py", None)
    assert kernels
    for name, text in kernels.items():
        tree = ast.parse(text)
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        assert [function.name for function in functions] == [Path(name).stem]
        title, blank, spec, plan, body = ast.get_docstring(tree).splitlines()
        assert title.startswith(f"Kernel {Path(name).stem} of ") and blank == "" and plan.startswith("Plan: cut ")
        assert spec == f"Spec: {MEMBERS[number][0]}"
        function = text[text.index("@triton.jit") :]
        assert body == f"Body: {hashlib.sha256(function.encode()).hexdigest()[:16]}"


def test_kernels_hold_no_dead_parameter(texts):
    for files in texts:
        for name, text in files.items():
            if name.startswith("kernels/") and "@triton.jit" in text:
                (kernel,) = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
                read = {node.id for node in ast.walk(kernel) if isinstance(node, ast.Name)}
                unused = {argument.arg for argument in kernel.args.args} - read
                assert unused <= {"T", "N", "R"}, f"{name}: {unused}"  # every launch passes these


def test_no_constant_of_a_module_is_asked_for_at_launches(texts):
    """Triton compares each with what it was compiled with, 1 to 2 us of a launch; a function's own cost nothing."""
    for files in texts:
        assert not [name for name, text in files.items() if re.search(r"^\w+ = tl\.constexpr", text, re.MULTILINE)]


def test_grids_have_one_dimension(texts):
    """More than 65535 sequences times heads fit only there."""
    for files in texts:
        launches = re.findall(r"^ *(\w+)\[(.*)\]\($", files["launch.py"], re.MULTILINE)
        kernels = [name for name in files if name.startswith("kernels/") and not name.endswith("__init__.py")]
        launches += re.findall(r"^ *(combine)\[(.*)\]\($", files.get("segments.py", ""), re.MULTILINE)
        assert sorted(name for name, _ in launches) == sorted(Path(name).stem for name in kernels)
        assert {grid for _, grid in launches} <= {"(programs,)", "(grid,)", "(call.N * HV * cdiv(V, TILE),)"}


ALONE = """
import importlib.abc, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[1].split(","):
            raise ModuleNotFoundError(f"{name} was imported")

sys.meta_path.insert(0, Refuse())
sys.path.insert(0, ".")
import torch, alone

def run(name, x):
    return getattr(alone, name)(**x, initial_state=None, output_final_state=True)

with torch.no_grad():
    x = torch.load("inputs", weights_only=True)
    found = [run(name, x) for name in ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")]
torch.save([y for results in found for y in results] + [torch.tensor(alone.LAUNCHES.total())], "results")
"""
COMPILER = "gdngen,jinja2,networkx,pydantic,click,filelock,rich"


@pytest.mark.parametrize(("interpret", "refused"), [("1", COMPILER), ("0", COMPILER + ",triton")])
def test_a_package_stands_alone(packages, tmp_path, interpret, refused):
    spec = Spec(key_dim=5, value_dim=4, chunk=16)
    module = packages(spec)
    shutil.copytree(Path(module.__file__).parent, tmp_path / "alone", ignore=shutil.ignore_patterns("__pycache__"))
    this = case(spec, T=20, state=False)
    torch.save(dict(this.x), tmp_path / "inputs")
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "TRITON_INTERPRET": interpret
    }
    command = [sys.executable, "-c", ALONE, refused]
    run = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    *results, launches = torch.load(tmp_path / "results", weights_only=True)
    wanted = []
    for form in ("chunk", "recurrent"):
        with torch.no_grad():
            if interpret == "1":
                wanted += call(module, this, form)
            else:
                with pytorch_version():
                    wanted += call(module, this, form)
    assert same(tuple(results), tuple(wanted))
    assert (launches > 0) == (interpret == "1")


@pytest.mark.parametrize("gate, exact", [("scalar", "tf32x3"), ("key", "ieee"), ("value", "ieee"), ("none", "tf32x3")])
def test_float32_products_stay_off_matrix_units_with_decays_per_channel(gate: str, exact: str) -> None:
    """Where tf32x3 spills, ptxas 12.8 loses operand descriptors; and sm_120 has no room for its operands."""
    files = sources(compile_spec(Spec(gate=gate, key_dim=16, value_dim=16, chunk=16), TARGET).plan, "any")
    assert f'FP32_PRODUCTS = "{exact}"' in files["tuning.py"]
    assert 'exact = "ieee" if arch == 120 else FP32_PRODUCTS' in files["machine.py"]
