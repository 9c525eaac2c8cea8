"""Passes: every legal cut computes the graph, pins are honoured, plans are legal and repeatable, faults are caught."""

import hashlib
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from graphs import SMALL, TARGET, cuts_of, family, graph_data, graph_results, has_chunk_form, run_kernels
from support import ROOT, answer, case, errors

from gdngen import package
from gdngen.errors import GraphError, PinError
from gdngen.ir import Graph, Node, evaluate, forward_graph, verify
from gdngen.ir.builder import rebuild
from gdngen.ir.ops import is_elementwise
from gdngen.ir.text import value_names
from gdngen.passes.backward import Backward
from gdngen.passes.check import check_graph, check_plan
from gdngen.passes.fuse import pinned
from gdngen.passes.pipeline import compile_spec, no_chunk_form, read_pins
from gdngen.passes.plan import Kernel, Plan
from gdngen.passes.regroup import Regroup
from gdngen.passes.rewrite import FoldToTokens
from gdngen.spec import Spec
from gdngen.target import TARGETS

EXACT = 1e-11  # float64
LENGTH, CHUNK = 11, 4

CUT_IN_FULL = [
    Spec(**SMALL),
    Spec(gate="none", beta="none", **SMALL),
    Spec(qk_norm=True, fused_gate="softplus", beta_logits=True, **SMALL),
    Spec(gate="key", **SMALL),
    Spec(gate="scalar+value", **SMALL),
    Spec(rule="additive", beta="dt", **SMALL),
    Spec(rule="additive", normalize=True, feature_map="elu1", **SMALL),
]
PLANNED = [
    Spec(),
    Spec(gate="none"),
    Spec(key_dim=16, value_dim=40, chunk=16),
    Spec(qk_norm=True, fused_gate="bounded", beta_logits=True, neg_eigval=True, state_v_first=True),
    Spec(rule="additive", beta="dt", value_dim=64),
    Spec(rule="additive", gate="none", beta="none"),
    Spec(gate="key"),
    Spec(beta="value"),
]


def named(spec: Spec) -> str:
    return spec.name


# ---- cuts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", CUT_IN_FULL, ids=named)
def test_every_cut_computes_the_graph(spec):
    graph = forward_graph(spec)
    data = graph_data(case(spec, T=LENGTH, H=2, decays="mixed"))
    wanted = graph_results(graph, evaluate(graph, data, LENGTH, CHUNK))
    cuts = cuts_of(spec)
    assert len({(cut.name, cut.forms) for _, cut in cuts}) == len(cuts) > 20
    for _, cut in cuts:
        found = graph_results(graph, run_kernels(cut.kernels, data, LENGTH, CHUNK))
        assert max(errors(found, wanted)) < EXACT, (cut.name, cut.forms)


@pytest.mark.parametrize("spec", CUT_IN_FULL, ids=named)
def test_cuts_are_legal(spec):
    declared = set(forward_graph(spec).inputs)
    for form, cut in cuts_of(spec):
        written: list[str] = []
        for kernel in cut.kernels:
            graph = verify(kernel.graph)
            assert set(graph.inputs) <= declared | set(written), (cut.name, kernel.name)
            assert bool(graph.carries) == bool(graph.carry_ids) == (kernel.name == "scan")
            written += [name for name, _ in graph.outputs]
        stored = [name for _, name in cut.written()]
        assert sorted(written) == sorted([name for name, _ in form.outputs] + stored)
        read = {name for kernel in cut.kernels for name in kernel.graph.inputs}
        assert set(stored) <= read, cut.name


def tiles_written(kernel: Kernel) -> list[str]:
    """What a kernel writes that has two axes: vectors may go along."""
    return sorted(name for name, ref in kernel.graph.outputs if len(ref.axes) == 2)


def test_the_cuts_that_must_be_reachable():
    """All in one scan; the inverse ahead; W and U ahead, then the scan, then the output."""
    expected = {
        "cut=none": [("scan", ["o"])],
        "cut=X+P": [("prepare", ["P", "X"]), ("scan", ["o"])],
        "cut=S+U+W+r": [("prepare", ["U", "W"]), ("scan", ["S", "r"]), ("output", ["o"])],
    }
    offered = {frozenset(c.cut.name.split("+")) for c in compile_spec(Spec(), TARGET).choices["chunk"].front}
    for pin, kernels in expected.items():
        plan = compile_spec(Spec(), TARGET, (pin,)).plan
        made = plan.operator("chunk").kernels
        assert [(kernel.name, tiles_written(kernel)) for kernel in made] == kernels
        assert frozenset(pin.removeprefix("cut=").split("+")) in offered


@pytest.mark.parametrize("spec", PLANNED, ids=named)
def test_the_front_holds_no_cut_that_another_beats(spec):
    found = compile_spec(spec, TARGET)
    if no_chunk_form(spec):
        assert not found.choices and any("no chunk operator" in note for note in found.plan.notes)
        return
    assert list(found.choices) == ["chunk", "chunk_backward"]
    for name, choice in found.choices.items():
        seconds = [candidate.seconds for candidate in choice.front]
        assert seconds == sorted(seconds) and found.plan.operator(name).cut == choice.front[0].cut.name
        keys = [candidate.prices[0].key for candidate in choice.front]
        for a in keys:
            assert not any(b != a and all(x <= y for x, y in zip(b, a)) for b in keys)


def test_the_gate_leaves_the_inverse_only_where_the_operator_normalises_keys():
    """Contract section 4: with raw keys the gate-free inverse may overflow where the gated one does not."""
    for norm in (False, True):
        found = compile_spec(Spec(qk_norm=norm), TARGET)
        forms = {rule for c in found.choices["chunk"].front for rule in c.cut.forms}
        assert ("gate_out_of_inverse" in forms) <= norm


# ---- pins ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", PLANNED[:3], ids=named)
def test_every_cut_can_be_pinned(spec):
    found = compile_spec(spec, TARGET)
    for name, key in (("chunk", "cut"), ("chunk_backward", "backward_cut")):
        offered = [candidate.cut for candidate in found.choices[name].front]
        for cut in offered:
            assert pinned(offered, cut.name) is cut, f"{cut.name} is the name of two cuts"
        operator = compile_spec(spec, TARGET, (f"{key}={offered[-1].name}",)).plan.operator(name)
        assert (operator.cut, operator.forms) == (offered[-1].name, offered[-1].forms)


def test_pins_name_stored_values_in_any_order():
    cuts = [cut for _, cut in cuts_of(Spec())]
    assert pinned(cuts, "P+X") is pinned(cuts, "X+P")
    with pytest.raises(PinError) as error:
        pinned(cuts, "X+nonsense")
    message = str(error.value)
    assert message.startswith("pin cut=X+nonsense: no such cut of this graph; the cuts are ")
    listed, more = message.split("the cuts are ")[1].split(" and ")
    names = list(dict.fromkeys(cut.name for cut in cuts))
    assert listed.split(", ") == names[:40] and more == f"{len(names) - 40} more"


@pytest.mark.parametrize(
    ("spec", "pin", "fragment"),
    [
        (Spec(), "cut=Y", "pin cut=Y: no such cut of this graph; the cuts are X+P, "),
        (Spec(), "warps=4", "pin 'warps=4': expected KEY=VALUE with KEY one of cut, backward_cut, save, inverse, BV"),
        (Spec(), "cut", "pin 'cut': expected KEY=VALUE"),
        (Spec(), "save=time", "pin save=time: keep for backward as little as possible (memory) or what saves time"),
        (
            Spec(),
            "backward_cut=S+dS",
            "pin backward_cut=S+dS: it cannot be written; kernel pairs, value ",
        ),
        (Spec(backward=False), "save=speed", "pin save=speed: a package of this Spec has no backward kernels"),
        (
            Spec(beta="value"),
            "backward_cut=S+dS",
            "pin backward_cut=S+dS: a package of this Spec has no backward kernels",
        ),
        (
            Spec(rule="additive", normalize=True),
            "BV=16",
            "pin BV=16: kernel scan sums over v, it takes all 128 columns",
        ),
        (Spec(), "backward_cut=Y", "pin backward_cut=Y: no such cut of this graph; the cuts are S+"),
        (Spec(), "BV=48", "pin BV=48: the tile of v is 16, 32, 64, 128 or 256"),
        (Spec(), "BV=wide", "pin BV=wide: the tile of v is"),
        (Spec(beta="value"), "cut=X", "pin cut=X: a write strength per value channel under the delta rule"),
    ],
)
def test_a_pin_that_cannot_be_honoured_says_why(spec, pin, fragment):
    with pytest.raises(PinError) as error:
        compile_spec(spec, TARGET, (pin,))
    assert fragment in str(error.value)


def test_the_tile_of_v_can_be_pinned():
    assert read_pins(("BV=32", "cut=X+P")) == {"BV": "32", "cut": "X+P"}
    plan = compile_spec(Spec(), TARGET, ("BV=32", "cut=X+P")).plan
    scan = plan.operator("chunk").kernels[1]
    assert scan.split_v and {tuning.BV for _, tuning in scan.tuning} == {32}
    free = compile_spec(Spec(), TARGET, ("cut=X+P",)).plan.operator("chunk").kernels[1]
    assert {tuning.BV for _, tuning in free.tuning} != {32}


# ---- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", PLANNED, ids=named)
def test_plans_round_trip(spec):
    plan = compile_spec(spec, TARGET).plan
    again = Plan.model_validate_json(plan.model_dump_json())
    assert again == plan and again.digest == plan.digest and str(again) == str(plan)
    pinned_plan = compile_spec(spec, TARGET, ("BV=16",)).plan
    assert pinned_plan.digest != plan.digest
    for kernel in (k for operator in plan.operators for k in operator.kernels):
        assert str(kernel.graph) == kernel.text
        assert {key.split("/")[0] for key, _ in kernel.tuning} == set(TARGETS)


SOURCES = """
import hashlib, sys
from gdngen import package, target
from gdngen.passes.pipeline import compile_spec
from gdngen.spec import Spec

for fields in ({}, {"gate": "none", "beta_logits": True, "chunk": 16}):
    files = package.render(compile_spec(Spec(key_dim=20, value_dim=24, **fields), target.get("sm_90")).plan, "same")
    print(hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest())
"""


def test_builds_are_byte_identical_under_any_hash_seed():
    runs = []
    for seed in ("0", "4242"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", SOURCES]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        runs.append(run.stdout.split())
    files = package.render(compile_spec(Spec(key_dim=20, value_dim=24), TARGET).plan, "same")
    assert runs[0] == runs[1] and len(set(runs[0])) == 2
    assert runs[0][0] == hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()


# ---- checks between passes -------------------------------------------------------------------------------------------


def drop(graph: Graph, op: str) -> Graph:
    """A pass that forgets an op: a function passes its operand on, a decay or an inverse is 1."""

    def forget(build, node, args):
        return None if node.op != op else args[0] if is_elementwise(op) else build.const(1.0)

    return rebuild(graph, hook=forget)


@pytest.mark.parametrize(
    ("spec", "op"),
    [
        (Spec(), "decay"),
        (Spec(fused_gate="softplus"), "softplus"),
        (Spec(beta_logits=True), "sigmoid"),
        (Spec(qk_norm=True), "rsqrt"),
        (Spec(gate="none"), "uli"),
        (Spec(rule="additive", normalize=True), "reciprocal"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_a_pass_that_forgets_an_op_is_caught(spec, op):
    graph = forward_graph(spec)
    check_graph(rebuild(graph), graph)
    with pytest.raises(GraphError, match="a rewrite changes o: largest difference"):
        check_graph(drop(graph, op), graph)


def test_a_lost_sign_is_caught():
    graph = forward_graph(Spec())
    i = next(i for i, node in enumerate(graph.nodes) if node.op == "add" and -1.0 in node.attrs)
    node = graph.nodes[i]
    lost = Node(node.op, node.args, tuple(abs(float(c)) for c in node.attrs), node.axes, node.grid)
    with pytest.raises(GraphError, match="largest difference"):
        check_graph(replace(graph, nodes=(*graph.nodes[:i], lost, *graph.nodes[i + 1 :])), graph)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_plan_whose_kernel_lies_is_caught(number):
    graph = forward_graph(Spec())
    plan = compile_spec(Spec(), TARGET, ("cut=S+U+W+r",)).plan
    check_plan(plan, graph)
    chunk = plan.operator("chunk")
    kernels = list(chunk.kernels)
    lie = re.sub(r"= sum (\w): ", r"= sum \1: 2.0 * ", kernels[number].text, count=1)
    assert lie != kernels[number].text
    kernels[number] = kernels[number].model_copy(update={"text": lie})
    wrong = chunk.model_copy(update={"kernels": tuple(kernels)})
    operators = tuple(wrong if operator is chunk else operator for operator in plan.operators)
    with pytest.raises(GraphError, match="the plan of operator chunk changes"):
        check_plan(plan.model_copy(update={"operators": operators}), graph)


@pytest.mark.parametrize("gate", ["scalar", "none"])
def test_a_normaliser_reads_of_do_what_the_gradients_of_scores_and_queries_read(gate):
    """Not the rounded o: most of what it adds to dq cancels there, and has to be made of the same sums for that."""
    spec = Spec(rule="additive", gate=gate, normalize=True)
    graph = Regroup().run(Backward(joint=True).run(forward_graph(spec), TARGET), TARGET)
    names = value_names(graph)
    sums = [{names[ref.value] for ref in node.args} for node in graph.nodes if node.op == "ein" and node.summed == "v"]
    assert sorted(sorted(found) for found in sums if "do" in found) == [["S", "do"], ["do", "v"]]


# ---- members that coincide -------------------------------------------------------------------------------------------


def evaluated(spec: Spec, data: dict[str, torch.Tensor], chunk: int) -> tuple[torch.Tensor, ...]:
    graph = forward_graph(spec)
    graph = FoldToTokens().run(graph, TARGET) if chunk == 1 else graph
    return graph_results(graph, evaluate(graph, data, LENGTH, chunk))


@pytest.mark.parametrize("chunk", [1, CHUNK])
@pytest.mark.parametrize("rule", ["delta", "additive"])
def test_members_that_coincide(rule, chunk):
    scalar, plain = Spec(rule=rule, **SMALL), Spec(rule=rule, gate="none", **SMALL)
    data = graph_data(case(scalar, T=LENGTH, H=2, decays="mixed"))
    sizes = {"key": SMALL["key_dim"], "value": SMALL["value_dim"]}

    def same(spec: Spec, changed: dict[str, torch.Tensor], other: Spec, there: dict[str, torch.Tensor]) -> None:
        assert max(errors(evaluated(spec, changed, chunk), evaluated(other, there, chunk))) < EXACT

    same(plain, data, scalar, data | {"g": torch.zeros_like(data["g"])})
    for gate, name in (("key", "gk"), ("value", "gv")):
        wide = data["g"].unsqueeze(-1).expand(*data["g"].shape, sizes[gate])
        same(Spec(rule=rule, gate=gate, **SMALL), data | {name: wide}, scalar, data)
        both = data | {"g": data["g"] / 4, name: wide * 3 / 4}
        same(Spec(rule=rule, gate=f"scalar+{gate}", **SMALL), both, scalar, data)
    same(Spec(rule=rule, beta="none", **SMALL), data, scalar, data | {"beta": torch.ones_like(data["beta"])})
    if chunk == 1 or rule == "additive":
        wide = data["beta"].unsqueeze(-1).expand(*data["beta"].shape, sizes["value"])
        same(Spec(rule=rule, beta="value", **SMALL), data | {"beta": wide}, scalar, data)


def test_a_full_write_with_a_unit_key_replaces_the_value():
    spec = Spec(gate="none", beta="none", **SMALL)
    this = case(spec, T=LENGTH, decays="zero")
    k = torch.nn.functional.normalize(this.x["k"].double(), dim=-1)
    data = graph_data(this.changed(k=k, q=k))
    o, _ = evaluated(spec, data | {"scale": torch.tensor(1.0, dtype=torch.float64)}, CHUNK)
    torch.testing.assert_close(o, this.x["v"].double(), rtol=1e-12, atol=1e-12)


def test_the_family_is_planned_whole():
    """Every member is either cut or told why it is not, and what it is evaluated to is the oracle's answer."""
    for spec in family()[::29]:
        assert bool(no_chunk_form(spec)) >= (not has_chunk_form(spec))
        this = case(spec, T=LENGTH, H=2, decays="resets")
        plan = compile_spec(spec, TARGET).plan
        for operator in plan.operators:
            if operator.name == "chunk_backward":
                continue  # test_backward.py
            found = graph_results(forward_graph(spec), run_kernels(operator.kernels, graph_data(this), LENGTH, CHUNK))
            assert max(errors(found, answer(this))) < EXACT, (spec.name, operator.name)
