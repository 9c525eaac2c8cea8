"""Plans as tuned choices: which are compared, which is taken, what becomes of the package."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from gdngen import api, package
from gdngen.autotune import plans
from gdngen.autotune.plans import fastest, rivals
from gdngen.autotune.space import Point, Shape
from gdngen.autotune.store import Measurements
from gdngen.autotune.tuner import Wish, plan_of
from gdngen.cli import main
from gdngen.errors import PinError
from gdngen.passes.pipeline import compile_spec
from gdngen.spec import Spec
from gdngen.target import DEFAULT_TARGET, get

SMALL = {"key_dim": 16, "value_dim": 16, "chunk": 16}
PLAIN = Spec(rule="additive", gate="none", beta="none", backward=False, **SMALL | {"chunk": 32})  # one other cut
POINT = Point(Shape(32, 1, 1, 1), "float32")


def plan(spec: Spec, *pins: str):
    return compile_spec(spec, get(DEFAULT_TARGET), pins).plan


def test_rivals_are_the_kept_cuts_and_the_other_inverse():
    spec = Spec(backward=False)
    found = rivals(plan(spec), None)
    kept = compile_spec(spec, get(DEFAULT_TARGET)).choices["chunk"].kept
    named = [pin.removeprefix("cut=") for pins in found for pin in pins if pin.startswith("cut=")]
    assert named == list(dict.fromkeys(c.cut.name for c in kept))[1:] and len(named) > 2
    assert found[-1] == ("inverse=tf32",)
    assert len(rivals(plan(spec), 1)) == 2  # one other cut, and the inverse


def test_what_is_pinned_is_not_compared():
    found = rivals(plan(Spec(**SMALL), "cut=X+P", "inverse=tf32"), None)
    assert found and all(pin.startswith("backward_cut=") for pins in found for pin in pins)
    key = Spec(gate="key", backward=False, **SMALL)
    assert not any("inverse=tf32" in pins for pins in rivals(plan(key), 1)), "it is in tf32 there"


def test_an_inverse_in_tf32_is_other_code_and_nothing_else_can_be_pinned():
    spec = Spec(**SMALL)
    own, other = (package.render(plan(spec, *pins), "any") for pins in ((), ("inverse=tf32",)))
    changed = {file for file, text in own.items() if file.startswith("kernels/") and other[file] != text}
    assert changed == {"kernels/prepare.py", "kernels/prepare_backward.py"}
    with pytest.raises(PinError, match=r"pin inverse=fp16: only tf32 \(fp32 operands\) can be pinned"):
        plan(spec, "inverse=fp16")


def times(chunk, backward=(100.0, 100.0)):
    return {"chunk": dict(zip("ab", chunk)), "chunk_backward": dict(zip("ab", backward))}


@pytest.mark.parametrize(
    ("other", "pins", "expected"),
    [
        (times((50.0, 50.0)), ("cut=S", "backward_cut=S+dS"), ("cut=S",)),  # operator by operator
        (times((50.0, 250.0)), ("cut=S",), ()),  # better at one point, worse over all
        (times((99.0, 99.0)), ("cut=S",), ()),  # within what times vary by
        (times((50.0, None)), ("cut=S",), ()),  # not right at one point
        (times((98.5, 98.5), (98.5, 98.5)), ("inverse=tf32",), ()),
        (times((50.0, 50.0), (190.0, 190.0)), ("inverse=tf32",), ("inverse=tf32",)),  # of both operators
        (times((50.0, 50.0), (210.0, 210.0)), ("inverse=tf32",), ()),
    ],
)
def test_fastest(other, pins, expected):
    assert fastest({(): times((100.0, 100.0)), pins: other}) == expected


def test_the_fastest_plan_is_built_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = api.build(PLAIN, tmp_path, name="planned")
    other = rivals(plan_of(folder), 1)[0]

    def measured(one, *rest):
        return {"chunk": {"here": 1.0 if other[0] in one.pins else 2.0}}

    monkeypatch.setattr(plans, "measured", measured)
    wish = Wish(folder, (POINT,))
    found = plans.compare(wish, Measurements(tmp_path / "store"), lambda progress: None)
    assert found.taken == other and found.ratio(other, "chunk") == 2.0
    built = plan_of(folder)
    assert built.pins == other and f"cut={built.operator('chunk').cut}" == other[0]
    assert f"--pin {other[0]}" in package.read_manifest(folder)["build"]
    assert plans.compare(wish, Measurements(tmp_path / "store"), lambda progress: None).times.keys() == {()}
    decode = Wish(folder, (Point(Shape(1, 4, 1, 1), "float32"),))
    assert plans.compare(decode, Measurements(tmp_path / "store"), lambda progress: None).taken == ()


@pytest.mark.full
def test_plans_are_measured_and_gated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GDNGEN_CACHE_DIR", str(tmp_path / "cache"))
    folder = api.build(PLAIN, tmp_path, name="planned")
    options = ["--shapes", "32x1:1/1", "--dtypes", "float32", "--plans", "--interpreted"]
    result = CliRunner().invoke(main, ["tune", str(folder), *options, "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["plans"]
    assert [row["plan"] for row in rows] == ["", "cut=S"]
    assert all(row["operator"] == "chunk" and row["us"] > 0 and row["ratio"] > 0 for row in rows)
    assert plan_of(folder).pins == (("cut=S",) if rows[1]["ratio"] > plans.GAIN else ())
    printed = CliRunner().invoke(main, ["tune", str(folder), *options]).output
    assert "as built" in printed and ("no other plan is faster" in printed or "built again with --pin" in printed)
