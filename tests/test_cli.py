"""The command line as its users meet it: exit codes, JSON, messages, what is written."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest
from click.testing import CliRunner, Result

import gdngen
from gdngen import api, doctor, package, requirements, verification
from gdngen.cli import main
from gdngen.commands.common import OPTIONS, flag
from gdngen.passes import pipeline
from gdngen.presets import PRESETS
from gdngen.spec import Spec
from gdngen.target import TARGETS

SMALL = "--key-dim 16 --value-dim 16 --chunk 16"
SMALL_NAME = "gdn_scalar_k16_v16_c16"


def run(arguments: str, exit_code: int = 0, given: str | None = None) -> Result:
    result = CliRunner().invoke(main, arguments.split(), input=given)
    assert result.exit_code == exit_code, (result.output, result.exception)
    return result


def read(arguments: str, exit_code: int = 0):
    """The one JSON document that a command prints."""
    return json.loads(run(f"{arguments} --json", exit_code).stdout)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small package that nobody alters."""
    out = tmp_path_factory.mktemp("small")
    run(f"build {SMALL} --out {out}")
    return out / SMALL_NAME


# ------------------------------------------------------------------------------------------------ build


def test_the_command_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = run("build --gate scalar --chunk 64 --state-v-first").output
    name = "gdn_scalar_k128_v128_c64_vfirst"
    assert (tmp_path / "generated" / name / "manifest.json").exists()
    for text in (f"generated/{name}: ", "chunk_gated_delta_rule: cut ", f"from {name} import chunk_gated_delta_rule, "):
        assert text in printed
    assert (
        f"gdngen verify generated/{name}\n" in printed and "gdngen explain --gate scalar --state-v-first\n" in printed
    )


def test_what_cannot_be_built_is_said(tmp_path: Path) -> None:
    printed = run(f"build {SMALL} --beta value --out {tmp_path}").output
    assert "note: no chunk operator: " in printed
    assert "fused_recurrent_gated_delta_rule" in printed and "chunk_gated_delta_rule" not in printed


def test_name_and_target(tmp_path: Path) -> None:
    run(f"build {SMALL} --name mine --target gfx942 --out {tmp_path}")
    manifest = json.loads((tmp_path / "mine" / "manifest.json").read_text())
    assert (manifest["name"], manifest["target"]) == ("mine", "gfx942")


def test_check(small: Path, tmp_path: Path) -> None:
    assert "is up to date" in run(f"build {SMALL} --out {small.parent} --check").output
    assert (
        f"{tmp_path / SMALL_NAME} is not there; run gdngen" in run(f"build {SMALL} --out {tmp_path} --check", 1).output
    )
    assert not list(tmp_path.iterdir())
    run(f"build {SMALL} --out {tmp_path}")
    (tmp_path / SMALL_NAME / "launch.py").write_text("")
    assert "is not up to date: launch.py; run" in run(f"build {SMALL} --out {tmp_path} --check", 1).output
    assert (tmp_path / SMALL_NAME / "launch.py").read_text() == ""


def test_pins(tmp_path: Path) -> None:
    run(f"build {SMALL} --value-dim 64 --name pinned --pin cut=none --pin BV=32 --out {tmp_path}")
    assert json.loads((tmp_path / "pinned" / "manifest.json").read_text())["cuts"]["chunk"] == "none"
    assert "BV=32" in (tmp_path / "pinned" / "tuning.py").read_text()


@pytest.mark.full  # test_passes asks the same of two Specs, without the command
def test_same_bytes_whatever_the_hash_seed(small: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(gdngen.__file__).parents[1])}
    command = [sys.executable, "-m", "gdngen", "build", *SMALL.split(), "--out"]
    builds = [
        subprocess.Popen([*command, str(tmp_path / seed)], env=environment | {"PYTHONHASHSEED": seed}, cwd=tmp_path)
        for seed in ("0", "4711")
    ]
    assert [build.wait() for build in builds] == [0, 0]
    files = {path.relative_to(small) for path in small.rglob("*") if path.suffix in (".py", ".json")}
    for seed in ("0", "4711"):
        built = tmp_path / seed / SMALL_NAME
        assert files and all((built / file).read_bytes() == (small / file).read_bytes() for file in files)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ("build --gate nope", 2, "gdngen: --gate: 'nope' is not one of none, scalar, key, value (several"),
        (
            "build --gate scalar+nope+no",
            2,
            "--gate: 'nope' in 'scalar+nope+no' is not one of none, scalar",
        ),
        ("build --gate none+key", 2, "--gate: 'none' in 'none+key' is not one of none, scalar"),
        ("build --gate scalar+", 2, "--gate: '' in 'scalar+' is not one of none, scalar"),
        ("build --beta none --beta-logits", 2, "--beta-logits: needs --beta head or --beta value, got --beta none"),
        ("build --normalize", 2, "needs --rule additive and --gate none or --gate scalar"),
        ("build --neg-eigval", 2, "gdngen: --neg-eigval: 2 * sigmoid(b) needs --beta-logits (the logits"),
        ("build --beta dt", 2, "--beta: 'dt' is Mamba-2's write strength and needs --rule additive with --gate scalar"),
        ("build --gate none --fused-gate softplus", 2, "computes exactly one gate, but --gate is none; choose scalar"),
        (
            "build --lower-bound -1",
            2,
            "--lower-bound: -1.0 belongs to --fused-gate bounded, but --fused-gate is 'none'",
        ),
        ("build --key-dim 257", 2, "gdngen: --key-dim: Input should be less than or equal to 256 (got 257)\n"),
        ("build --chunk 48", 2, "'48' is not one of '16', '32', '64', '128', 'auto'"),
        ("build --head-ratio many", 2, "--head-ratio: 'many' is neither any nor a whole number of at least 1\n"),
        ("build --head-ratio 0", 2, "--head-ratio: 0 is neither any nor"),
        ("build --preset nope", 2, "gdngen: --preset: unknown 'nope'; known presets are qwen3-next, "),
        ("build --preset deltanet --qk-norm", 2, "--preset deltanet is a whole Spec and leaves nothing for --qk-norm"),
        ("build --target sm_70", 2, "gdngen: --target: unknown 'sm_70'; known targets are sm_80, "),
        ("build --name 2fast", 2, "gdngen: --name: '2fast' is not a valid Python identifier"),
        ("build --name class", 2, "--name: 'class' is a keyword of Python"),
        ("build --name torch", 2, "--name: 'torch' is the name of another module"),
        ("build --name abc", 2, "--name: 'abc' is the name of another module"),
        ("build --aot-heads 1/1", 2, "--aot-heads is about --aot, which is not given"),
        ("build --aot-dtypes float32", 2, "--aot-dtypes is about --aot, which is not given"),
        ("build --aot gfx942 --aot-heads 1/1", 2, "'--aot': 'gfx942' is not one of sm_80, "),
        (f"build {SMALL} --pin speed=9", 2, "pin 'speed=9': expected KEY=VALUE with KEY one of cut, "),
        (f"build {SMALL} --pin cut=Y", 2, "pin cut=Y: no such cut of this graph; the cuts are "),
        (f"build {SMALL} --pin BV=9", 2, "pin BV=9: "),
        (f"build {SMALL} --pin BV=16 --pin BV=32", 2, "pin BV=32: BV=16 is pinned as well; give one of them"),
        (
            f"build {SMALL} --rule additive --pin inverse=tf32",
            2,
            "pin inverse=tf32: kernels of this Spec invert nothing",
        ),
        (f"build {SMALL} --beta value --pin inverse=tf32", 2, "kernels of this Spec invert nothing"),
        ("explain --html nowhere/plan.html", 2, "'--html': nowhere/plan.html: there is no folder nowhere"),
        ("cache export nowhere/all", 2, "nowhere/all: there is no folder nowhere"),
        ("build --aot sm_90 --aot-dtypes int8", 2, "'--aot-dtypes': 'int8' is not one of bfloat16, "),
        (f"build {SMALL} --check", 1, f"gdngen: generated/{SMALL_NAME} is not there; run gdngen build "),
        ("build --out /proc/nobody", 3, "No such file or directory: '/proc/nobody'\n"),
        (f"build {SMALL} --out {__file__}", 3, f"{__file__} is no folder; choose another --out"),
        (f"show graph {SMALL} --after tile", 2, "--after tile: not one of graph, "),
        (f"show source {SMALL} --kernel nope", 2, "--kernel nope: not one of "),
        ("verify", 2, "give the PATH of a package or --preset NAME"),
        ("verify /nowhere", 2, "does not exist"),
    ],
)
def test_mistakes(arguments: str, code: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(arguments, code)
    assert text in result.output
    assert "Traceback" not in result.output and not list(tmp_path.iterdir())


def with_a_value(command: click.Command, *above: str) -> Iterator[tuple[str, ...]]:
    """The words of every option that takes a value, behind those of its command and of the arguments that it needs."""
    for own in command.commands.values() if isinstance(command, click.Group) else ():
        yield from with_a_value(own, *above, str(own.name))
    needed = ["source" if one.name == "stage" else "file" for one in command.params if one.required]
    needed += ["--interpreted"] * (command.name == "tune")  # else the GPU that is missing comes first
    for one in command.params:
        if isinstance(one, click.Option) and not one.is_flag and one.name != "help":
            yield (*above, *needed, one.opts[0])


WITH_A_VALUE = list(with_a_value(main))


@pytest.mark.parametrize("words", WITH_A_VALUE, ids=" ".join)
def test_an_option_that_is_empty_is_not_left_out(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in --preset "$PRESET" where nobody set it."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, [*words, ""])
    option = "pin ''" if words[-1] == "--pin" else words[-1]
    assert result.exit_code == 2 and option in result.output and not list(tmp_path.iterdir()), result.output


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "fp32", "float32"])
def test_dtypes_have_two_names(name: str) -> None:
    assert "--target: unknown" in run(f"bench --dtype {name} --target nowhere", 2).output
    assert "--target: unknown" in run(f"inspect --dtype {name} --target nowhere", 2).output
    assert "--shapes: got '8'" in run(f"tune --dtypes {name} --shapes 8", 2).output
    assert "--aot-dtypes is about --aot" in run(f"build --aot-dtypes {name}", 2).output


EARLY = [
    "--name torch",
    "--pin BV=9",
    "--pin save=nope",
    "--pin inverse=fp64",
    "--no-backward --pin save=speed",
    f"--out {__file__}",
    "--aot sm_90,nope --aot-heads 1/1",
    "--aot gfx942 --aot-heads 1/1",
]


@pytest.mark.parametrize("arguments", EARLY)
def test_mistakes_are_said_before_the_search(arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def searched(*given: object) -> None:
        raise AssertionError("the search had begun")

    monkeypatch.setattr(pipeline, "forward_graph", searched)
    printed = run(f"build --key-dim 24 {arguments}", 3 if "--out" in arguments else 2).output
    assert arguments.split()[-1].partition("=")[0].partition(",")[0] in printed or "--aot" in printed


def test_check_names_the_folder_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "a folder"
    result = CliRunner().invoke(main, ["build", *SMALL.split(), "--out", str(out), "--check"])
    assert result.exit_code == 1 and result.output.endswith(f"run gdngen build --gate scalar {SMALL} --out '{out}'\n")
    assert run(f"build {SMALL} --check", 1).output.endswith(f"run gdngen build --gate scalar {SMALL}\n")


@pytest.mark.parametrize("options", ["--pin BV=16", "--target sm_80 --pin cut=none", ""])
def test_the_next_command_explains_this_very_plan(options: str, tmp_path: Path) -> None:
    printed = run(f"build {SMALL} {options} --out {tmp_path}").output
    command = printed.splitlines()[-1].strip().removeprefix("gdngen ")
    manifest = package.read_manifest(tmp_path / SMALL_NAME)
    assert read(f"show plan {command.removeprefix('explain ')}")["digest"] == manifest["plan_digest"]


def test_a_full_disk_is_said_with_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(package.Path, "write_text", full)
    printed = run(f"build {SMALL} --out {tmp_path}", 3).output
    assert re.search(rf"No space left on device: '{tmp_path}/\.{SMALL_NAME}\.\w+/\w+\.py'", printed), printed
    printed = run(f"explain {SMALL} --html {tmp_path}/plan.html", 3).output
    assert f"No space left on device: '{tmp_path}/plan.html'" in printed


def test_an_interrupt_is_no_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "forward_graph", interrupted)
    assert "gdngen: interrupted" in run("build --key-dim 28", 130).output


def test_a_name_that_is_a_package_of_ours_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a package that pip installed, which may be built again, but not of another library there."""
    for name, file in (("ours", "manifest.json"), ("theirs", "__init__.py")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        (tmp_path / name / file).write_text("")
    monkeypatch.setattr(api.sysconfig, "get_path", lambda kind: str(tmp_path))
    assert api.package_name(Spec(), "ours") == "ours" and api.package_name(Spec(), "nobodys") == "nobodys"
    with pytest.raises(gdngen.errors.SpecError, match="'theirs' is the name of another module"):
        api.package_name(Spec(), "theirs")


@pytest.mark.parametrize("level", ["yes", "5", "-1", "12"])
def test_a_wrong_level_is_refused(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDNGEN_DEBUG", level)
    assert f"GDNGEN_DEBUG is '{level}', expected a number from 0 to 4" in run("list", 3).output


def test_not_a_package(tmp_path: Path) -> None:
    assert "is not a gdngen package: manifest.json is missing" in run(f"verify {tmp_path}", 1).output


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDNGEN_DEBUG", "2")
    result = run("build --gate nope", 1)
    assert isinstance(result.exception, gdngen.errors.SpecError)


# ------------------------------------------------------------------------------------------------ reading


def test_list_and_help_import_neither_torch_nor_triton() -> None:
    for arguments in ("['list']", "['build', '--help']", "['list', '--json']"):
        code = f"import sys; from gdngen.cli import main; main({arguments}, standalone_mode=False)"
        code += "; sys.exit(bool({'torch', 'triton', 'networkx'} & set(sys.modules)))"
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_module_and_version() -> None:
    done = subprocess.run([sys.executable, "-m", "gdngen", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"gdngen {gdngen.__version__}\n"


def test_list() -> None:
    found, text = read("list"), run("list").output
    assert [preset["name"] for preset in found["presets"]] == list(PRESETS)
    assert {preset["package"] for preset in found["presets"]} == {preset.spec.name for preset in PRESETS.values()}
    assert list(found["targets"]) == list(TARGETS)
    assert all(name in text for name in [*PRESETS, *TARGETS, *map(flag, OPTIONS)])


def test_every_spec_field_is_an_option() -> None:
    assert list(OPTIONS) == list(Spec.model_fields)
    spec = Spec(rule="additive", gate="scalar+key", beta="value", key_dim=24, value_dim=40, head_ratio=3, chunk="auto")
    spec = spec.model_copy(update={"state_v_first": True, "beta_logits": True, "neg_eigval": True, "qk_norm": True})
    spec = spec.model_copy(update={"feature_map": "elu1", "varlen": False, "backward": False})
    assert read(f"show spec {' '.join(spec.flags())}")["digest"] == spec.digest
    for other in (Spec(fused_gate="bounded", lower_bound=-2.5), Spec(rule="additive", normalize=True, gate="none")):
        assert read(f"show spec {' '.join(other.flags())}")["command"] == other.command


def test_show() -> None:
    assert read("show spec --preset kimi-linear")["gate"] == ["key"]
    graph = read(f"show graph {SMALL}")
    assert run(f"show graph {SMALL}").output == graph["text"] and graph["after"] == "graph"
    folded = read(f"show graph {SMALL} --after fold_to_tokens")
    assert folded["digest"] != graph["digest"] and "uli" in graph["text"] and "uli" not in folded["text"]
    assert read(f"show plan {SMALL}")["operators"][0]["name"] == "chunk"
    assert run(f"show plan {SMALL} --after fuse").output.startswith(f"plan for {SMALL_NAME} on sm_90")


def test_show_source(small: Path) -> None:
    kernels = read(f"show source {SMALL}")
    assert all(file.startswith("kernels/") and (small / file).read_text() == text for file, text in kernels.items())
    assert list(read(f"show source {SMALL} --kernel recurrence")) == ["kernels/recurrence.py"]
    assert (small / "launch.py").read_text() in run(f"show source {SMALL} --kernel launch").output


@pytest.mark.parametrize("preset", ["qwen3-next", "deltanet", "mamba2-2.7b"])
def test_explain(preset: str) -> None:
    found, text = read(f"explain --preset {preset}"), run(f"explain --preset {preset}").output
    operators = {operator["name"]: operator for operator in found["operators"]}
    assert list(operators) == ["chunk", "chunk_backward", "recurrent"]
    for name, prefix in (("chunk", ""), ("chunk_backward", "backward_")):
        cuts, workloads = found[f"{prefix}cuts"], found[f"{prefix}workloads"]
        (chosen,) = (cut for cut in cuts if cut["chosen"])
        assert chosen["cut"] == operators[name]["cut"] and chosen["forms"] == operators[name]["forms"]
        assert chosen["kernels"] == [kernel["name"] for kernel in operators[name]["kernels"]]
        assert chosen["why"] == "chosen" and chosen["bytes_ratio"] == chosen["flops_ratio"] == 1
        assert {chosen["time_ratio"], *chosen["time_ratios"].values()} == {1}
        assert cuts == sorted(cuts, key=lambda cut: cut["seconds"]) and cuts[0] is chosen
        assert all(cut["why"] and len(cut["time_ratios"]) == len(workloads) for cut in cuts)
        assert all(0 < row["roofline_seconds"] <= row["predicted_seconds"] for row in workloads)
        for line in (f"operator {name}: cut {chosen['cut']}", f"  a: {' > '.join(chosen['kernels'])}"):
            assert line in text
        assert re.search(rf"cuts of operator {name}, .*; the chosen one is predicted fastest\n", text)
        assert re.search(rf"^  {re.escape(chosen['cut'])} +a( 1\.00)+ .*  chosen$", text, re.MULTILINE)
        assert f"time of the chosen cut of {name} in us on sm_90 " in text
    for words in ("for each chunk, first to last:", "for each chunk, last to first:", "for each token, first to last:"):
        assert words in text
    assert "more bytes" in text and "roofline" in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize(
    ("preset", "gone"), [("qwen3-next", []), ("deltanet", ["decay"]), ("linear-attention", ["decay", "inverse"])]
)
def test_explain_says_what_a_member_does_without(preset: str, gone: list[str]) -> None:
    found, text = read(f"explain --preset {preset}"), run(f"explain --preset {preset}").output
    assert [note.split(":")[0] for note in found["notes"]] == [f"no {what}" for what in gone]
    steps = "\n".join(line for o in found["operators"] for kernel in o["kernels"] for line in kernel["nest"])
    assert ("uli(" in steps) == ("inverse" not in gone) and ("eG" in str(found)) == ("decay" not in gone)
    assert all(f"note: no {what}: " in text for what in gone)


@pytest.mark.parametrize(
    ("operator", "prefix", "cut"),
    [("chunk", "", "none"), ("chunk", "", "P"), ("chunk_backward", "backward_", "S+X+dS+dy")],
)
def test_explain_pinned(operator: str, prefix: str, cut: str) -> None:
    """A pinned cut is the measure of the others, whether it is one of those worth offering or not."""
    arguments = f"explain {SMALL} --pin {prefix}cut={cut}"
    found, text = read(arguments), run(arguments).output
    offered = {row["cut"] for row in read(f"explain {SMALL}")[f"{prefix}cuts"]}
    rows = found[f"{prefix}cuts"]
    (chosen,) = (row for row in rows if row["chosen"])
    assert chosen["cut"] == cut and {row["cut"] for row in rows} == offered | {cut}
    assert rows == sorted(rows, key=lambda row: row["seconds"])
    assert all(row["time_ratio"] == row["seconds"] / chosen["seconds"] for row in rows) and rows[0]["time_ratio"] < 1
    assert f"operator {operator}: cut {cut}" in text
    assert re.findall(r"cuts of operator (\w+), .* is pinned", text) == [operator]
    assert re.search(rf"^  {re.escape(cut)} .*  chosen$", text, re.MULTILINE)


def test_explain_as_a_page(tmp_path: Path) -> None:
    """One file that loads nothing; its figure has every kernel, and every value with who writes and who reads it."""
    file = tmp_path / "plan.html"
    assert run(f"explain --preset qwen3-next --html {file}").output == f"{file}\n"
    text, record = file.read_text(), read("explain --preset qwen3-next")
    assert not re.search(r"src=|href=|@import|url\(", text)
    for figure, operator in zip(re.findall(r"<svg.*?</svg>", text, re.DOTALL), record["operators"], strict=True):
        found, names = ElementTree.fromstring(figure), {kernel["name"] for kernel in operator["kernels"]}
        said = [one.text for one in found.iter("{http://www.w3.org/2000/svg}text")]
        assert [kernel["name"] for kernel in operator["kernels"]] == [one for one in said if one in names]
        dots = sum(len(value["readers"]) + 1 for value in operator["stored"])
        kept = [one for one in found.iter("{http://www.w3.org/2000/svg}circle") if one.get("class") == "kept"]
        assert len(kept) == dots and all(any(v["value"] in line for line in said) for v in operator["stored"])
        assert max(float(one.get("cx")) for one in found.iter("{http://www.w3.org/2000/svg}circle")) < float(
            found.get("width")
        )
    assert text.count('<tr class="chosen">') == 2 and all(note in text for note in record["notes"])
    assert "give one of them" in run(f"explain --preset qwen3-next --html {file} --json", exit_code=2).output


def test_explain_says_the_chunk_lengths_of_each_dtype() -> None:
    notes = read("explain --chunk 128")["notes"]
    assert (
        "chunk, 2-byte operands (bf16): in chunks of 128 tokens, of 64 or 32 or 16 where those do not fit"
        in "".join(notes)
    )
    assert any(
        note.startswith("chunk_backward, 4-byte operands (fp32, fp16): in chunks of 64 tokens") for note in notes
    )
    assert not any("operands" in note for note in read("explain")["notes"])


def test_explain_without_some_operators() -> None:
    recurrent = read("explain --beta value")
    assert not {"cuts", "workloads", "backward_cuts", "backward_workloads"} & set(recurrent)
    assert recurrent["notes"][0].startswith("no chunk operator: ")
    forward = read(f"explain {SMALL} --no-backward")
    assert "cuts" in forward and "workloads" in forward
    assert "backward_cuts" not in forward and "backward_workloads" not in forward


def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    found = read("doctor")
    assert found["versions"]["gdngen"] == gdngen.__version__ and not found["problems"]
    assert {"amd", "nvidia"} <= set(found["triton_backends"])
    monkeypatch.setitem(vars(doctor), "_version", lambda name: "missing" if name == "networkx" else "9.9")
    assert "problem: networkx is missing: pip install networkx" in run("doctor", 3).output


def test_known_bad_combinations() -> None:
    def said(triton: str, numpy: str, *gpu_targets: str) -> str:
        return "\n".join(doctor.warnings({"triton": triton, "numpy": numpy}, list(gpu_targets)))

    assert "on Hopper" in said("3.6.0", "2.3.5", "sm_90") and "on Hopper" in said("3.7.0", "2.3.5", "sm_90")
    assert "on Hopper" not in said("3.7.1", "2.3.5", "sm_90") and "on Hopper" not in said("3.6.0", "2.3.5", "sm_80")
    assert "newer than what gdngen is tested with" in said("3.10.0", "2.4.0") and "newer" not in said("3.9.2", "2.4.0")
    assert "on Blackwell" in said("3.6.0", "2.3.5", "sm_100")
    assert "no GPU" in said("3.6.0", "2.3.5")


def test_the_range_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Doctor's range is the one that pip goes by, and an older Triton is a problem."""
    (oldest, newest), text = requirements.TRITON, (Path(__file__).parents[1] / "pyproject.toml").read_text()
    major, minor = map(int, newest.split(".")[:2])
    assert f"{major}.{minor + 1}" == requirements.TRITON_BELOW and f'"torch>={requirements.TORCH}"' in text
    assert f'"triton>={oldest},<{requirements.TRITON_BELOW}"' in text
    assert f"problem: Triton 3.4.0 cannot compile every kernel; gdngen takes {oldest} to {newest}" in said_by_doctor(
        monkeypatch, triton="3.4.0"
    )
    assert not doctor.too_old("missing") and not doctor.too_old(oldest) and not doctor.too_old("3.10.0")


def said_by_doctor(monkeypatch: pytest.MonkeyPatch, **versions: str) -> str:
    here = doctor.installed()
    monkeypatch.setattr(doctor, "installed", lambda: here | versions)
    return run("doctor", 3).output


def test_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDNGEN_CACHE_DIR", str(tmp_path))
    assert read("cache ls") == []
    gdngen.load(Spec(key_dim=16, value_dim=17, chunk=16))
    (row,) = read("cache ls")
    assert row["package"].startswith("gdn_scalar_k16_v17_c16_") and row["bytes"] > 10_000
    assert "1 packages in" in run("cache ls").output
    assert "nothing is removed" in run("cache clear", given="n\n").output and Path(row["folder"]).exists()
    assert "removed 1 packages" in run("cache clear --yes").output and not Path(row["folder"]).exists()
    assert read("cache ls") == []


# ------------------------------------------------------------------------------------------------ verify


def test_verify(small: Path) -> None:
    found = read(f"verify {small}")
    assert found["passed"] and found["package"] == SMALL_NAME
    places = {check["where"] for check in found["checks"]}
    assert {"files", verification.TORCH.name} < places and len(places) == 3
    cases = " ".join(check["what"] for check in found["checks"])
    for words in ("ragged", "one token", "empty sequences", "-20", "-inf", "split from one tensor", "no tokens"):
        assert words in cases
    assert all(check["measured"] <= check["budget"] for check in found["checks"] if check["budget"])


def broken(folder: Path, out: Path, file: str, old: str, new: str, digest: bool) -> Path:
    """A copy of the package with one text replaced, and its digest too when that is not what should be noticed."""
    copy = package.write({str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*.*") if p.is_file()}, out)
    text = (copy / file).read_text()
    assert old in text
    (copy / file).write_text(text.replace(old, new))
    if not digest:
        manifest = package.read_manifest(copy)
        manifest["files"][file] = package.digest_of((copy / file).read_text())  # type: ignore[index]
        (copy / "manifest.json").write_text(json.dumps(manifest))
    return copy


FAULTS = {
    "altered": ("launch.py", "import torch", "import  torch", "launch.py: not as built; build the package again"),
    "not alone": (
        "dispatch.py",
        "import torch",
        "import gdngen, torch",
        "gdngen was imported: a package must stand alone",
    ),
    "another member": ("spec.py", '"scalar"', '"key"', "FAILED"),
    "wrong": ("reference.py", '    """One chunk', '    scale = 1.001 * scale\n    """One chunk', "o is off by 1.0e-03"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_verify_notices(fault: str, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(verification), "INTERPRETER", replace(verification.TORCH, dtypes=()))
    file, old, new, text = FAULTS[fault]
    copy = broken(small, tmp_path / "broken", file, old, new, digest=fault == "altered")
    printed = run(f"verify {copy}", 1).output
    assert text in printed and "FAILED" in printed


@pytest.mark.parametrize("what", ["added", "emptied"])
def test_faults_of_the_file_list(what: str, small: Path, tmp_path: Path) -> None:
    """What nobody built is no part of a package, and a manifest that lists nothing vouches for nothing."""
    copy = Path(shutil.copytree(small, tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__")))
    assert package.faults(copy) == []
    if what == "added":
        (copy / "kernels" / "mine.py").write_text("")
        assert package.faults(copy) == ["kernels/mine.py added"]
        return
    manifest = package.read_manifest(copy)
    (copy / "manifest.json").write_text(json.dumps(manifest | {"files": {}}))
    assert {"launch.py added", "kernels/scan.py added"} <= set(package.faults(copy))
    for files in ([], None):
        (copy / "manifest.json").write_text(json.dumps(manifest | {"files": files}))
        assert package.faults(copy) == ["manifest.json"]
    (copy / "manifest.json").write_text("[]")
    with pytest.raises(gdngen.errors.PackageError, match=r"format \[\], this gdngen reads 1"):
        package.read_manifest(copy)


EVERY_OPTION = [
    Spec(chunk=16, fused_gate="bounded", beta_logits=True, neg_eigval=True, state_v_first=True, head_ratio=3),
    Spec(chunk=16, gate="key", fused_gate="softplus"),
    Spec(chunk=16, gate="value", fused_gate="bounded", lower_bound=-3.0),
    Spec(chunk=16, gate="scalar+key+value", beta="value"),
    Spec(gate="none", beta="none", qk_norm=True, chunk="auto"),
    Spec(chunk=16, gate="none", feature_map="elu1", beta_logits=True),
    Spec(chunk=16, rule="additive", beta="value", varlen=False),
    Spec(chunk=16, rule="additive", gate="none", beta="none", normalize=True, feature_map="elu1"),
    Spec(chunk=16, rule="additive", beta="none", normalize=True, state_v_first=True),
    Spec(chunk=16, rule="additive", gate="none", beta="none", normalize=True, qk_norm=True, backward=False),
    Spec(chunk=16, rule="additive", beta="dt"),
]


@pytest.mark.parametrize("wanted", EVERY_OPTION, ids=str)
def test_verify_asks_about_every_option(wanted: Spec, tmp_path: Path) -> None:
    """The PyTorch version of every member agrees with the recurrence on every case."""
    spec = wanted.model_copy(update={"key_dim": 12, "value_dim": 10})
    folder, place = gdngen.build(spec, tmp_path), verification.TORCH
    asked = list(verification._questions(place, spec, sorted(package.read_manifest(folder)["cuts"])))
    answers, trouble = verification._run(folder, [one.call for one in asked], place)
    assert not trouble
    checks = [verification._compare(place, one, answer) for one, answer in zip(asked, answers)]
    assert len(checks) >= 6
    assert all(check.passed for check in checks), "\n".join(str(check) for check in checks if not check.passed)
