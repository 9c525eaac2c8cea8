"""Only cuts that can be written are chosen; with no backward that can, a package is forward-only and says why."""

import ast
import dataclasses
import importlib
import json
import math
import re
import time
from unittest import mock

import pytest
import torch
from graphs import TARGET, family, has_chunk_form
from members import SMALL, Cubic, DeltaProduct, SquaredValues, TwoInverses

from gdngen import api, oracle
from gdngen.codegen.kernel import KernelWriter
from gdngen.errors import PinError
from gdngen.explanation import explain
from gdngen.ir import Builder, forward_graph
from gdngen.passes import fuse, pipeline
from gdngen.passes.fuse import Cut, Cutter, IllegalCut
from gdngen.passes.pipeline import BACKWARD, REGROUP, compile_spec
from gdngen.passes.plan import Kernel, Operator, Plan, Stored
from gdngen.passes.precision import Precision
from gdngen.passes.price import WORKLOADS, extents, price
from gdngen.passes.tile import Tile
from gdngen.passes.writable import obstacle
from gdngen.spec import Spec

MEMBERS = [
    Spec(gate="value", **SMALL),
    Spec(gate="key", qk_norm=True, **SMALL),
    TwoInverses(gate="value", **SMALL),
    Cubic(**SMALL),
    SquaredValues(rule="additive", **SMALL),
]


def some_cuts(spec: Spec) -> list[Cut]:
    """Of forward and backward every few cuts, legal ones whether they can be written or not."""
    forward = forward_graph(spec)
    joint = REGROUP.run(BACKWARD.run(forward, TARGET), TARGET)
    return [cut for graph in (forward, joint) for cut in list(Cutter(graph).all())[::12]]


def written(spec: Spec, cut: Cut) -> list[str]:
    """The kernels' texts."""
    nodes = cut.graph.nodes
    stored = tuple(
        Stored(name=name, axes=nodes[i].axes, heads="value" if "r" in nodes[i].grid else "group", format="input",
               writer=cut.writers[i])
        for i, name in cut.written()
    )  # fmt: skip
    totals = tuple(name for name, ref in cut.graph.outputs if "n" in cut.graph[ref].summed)
    name = "chunk_backward" if any(carry.reverse for carry in cut.graph.carries) else "chunk"
    operator = Operator(name=name, graph=str(cut.graph), cut=cut.name, forms=(), stored=stored, kernels=cut.kernels,
                        totals=totals)  # fmt: skip
    plan = Plan(spec=spec, target=TARGET.name, chunk=16, operators=(operator,))
    plan = Tile().run(Precision().run(plan, TARGET), TARGET)
    return [KernelWriter(plan, plan.operators[0], kernel).text() for kernel in plan.operators[0].kernels]


@pytest.mark.parametrize("spec", MEMBERS, ids=lambda spec: f"{type(spec).__name__} {spec.name}")
def test_what_has_no_obstacle_can_be_written(spec):
    """Every name that a text reads is defined in it, and no cut without an obstacle fails."""
    sizes, count = extents(spec, 16), 0
    for cut in some_cuts(spec):
        if any(obstacle(kernel, sizes, TARGET) for kernel in cut.kernels):
            continue
        count += 1
        for text in written(spec, cut):
            names = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)]
            read, defined = ({n.id for n in names if isinstance(n.ctx, ast.Load) is way} for way in (True, False))
            assert {name for name in read if name[:2] in ("b_", "o_", "m_", "p_")} <= defined, cut.name
    assert count


def kernel_of(b: Builder, result, loop: str = "chunks") -> Kernel:
    return Kernel(name="prepare", loop=loop, text=str(b.finish([("y", result)], [])))


def three_axes(b, x, y):
    return b.apply(
        "exp", b.ein([b.ein([x, x.renamed({"i": "j"})], "ij"), b.ein([x, x.renamed({"i": "l"})], "il")], "ijl")
    )


UNWRITTEN = {
    "three token axes": (three_axes, "there are no tiles with axes i,j,l"),
    "a parameter per group": (
        lambda b, x, y: b.mul(x, b.input("w", "k", "h")),
        "a parameter is one for all or one per",
    ),
    "two loops": (
        lambda b, x, y: b.mul(b.ein([y], "i"), y),
        "it goes over v and reads a sum over v, which is two loops",
    ),
}


@pytest.mark.parametrize("what", UNWRITTEN)
def test_what_cannot_be_written_is_named(what):
    make, fragment = UNWRITTEN[what]
    b = Builder()
    kernel = kernel_of(b, make(b, b.input("x", "ik", "bnh"), b.input("y", "iv", "bnhr")))
    found = obstacle(kernel, extents(Spec(**SMALL), 16), TARGET)
    assert fragment in found and found.startswith("kernel prepare, value ")


def test_a_package_without_backward_says_which_value_stood_in_the_way(monkeypatch, tmp_path):
    def of_last(kernel, sizes, target):
        return f"kernel {kernel.name}, value t1[i,j]: planted" if kernel.name == "gradients" else ""

    monkeypatch.setattr(pipeline, "obstacle", of_last)
    spec = TwoInverses(state_v_first=True, **SMALL)
    found = compile_spec(spec, TARGET)
    ((operator, reason),) = found.plan.missing
    assert operator == "chunk_backward" and found.plan.operator("chunk") and not found.plan.operator(operator)
    kernel, value = reason.split("; ")[1].split(", ")[:2]
    assert kernel.startswith("kernel ") and value.startswith("value ")
    assert any(reason in note for note in explain(found)["notes"])
    folder = api.build(spec, tmp_path, name="forward_only")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["notes"] == [f"no chunk backward operator: {reason}"]
    with pytest.raises(PinError, match="no cut of this graph can be written; kernel "):
        compile_spec(spec, TARGET, ("backward_cut=S+dS",))
    package = api.import_folder(folder, "forward_only")
    q, k, v, g, beta = tokens()
    with pytest.raises(ValueError, match=re.escape(reason)):
        package.chunk_gated_delta_rule(q.requires_grad_(), k, v, g, beta, chunk_size=16, state_v_first=True)


def tokens():
    q, k = torch.nn.functional.normalize(torch.randn(2, 1, 37, 2, 16), dim=-1)
    return q, k, torch.randn(1, 37, 2, 16), -torch.rand(1, 37, 2), torch.rand(1, 37, 2)


def test_where_no_cut_can_be_written_more_is_stored(packages):
    """Two inverses: gradients turn accumulators around unless four more products go through memory."""
    package = packages(TwoInverses(**SMALL))
    torch.manual_seed(0)
    x = [value.requires_grad_() for value in tokens()]
    q, k, v, g, beta = x
    package.LAUNCHES.clear()
    o, exact = package.chunk_gated_delta_rule(*x, chunk_size=16)[0], oracle.recurrence(q, k, v, g=g, beta=beta)[0]
    cotangent = torch.randn(o.shape)
    found, wanted = (torch.autograd.grad(y, x, cotangent.to(y.dtype)) for y in (o, exact))
    assert oracle.rms_ratio(o, exact) < 1e-5 and "gradients" in package.LAUNCHES
    assert max(map(oracle.rms_ratio, found, wanted)) < 1e-4


def test_where_a_cut_is_not_legal_the_kernel_and_the_carried_value_are_named():
    cutter = Cutter(REGROUP.run(BACKWARD.run(forward_graph(Spec(**SMALL)), TARGET), TARGET))
    assert cutter.why_not() == "" and cutter.cut(()) is None
    with pytest.raises(IllegalCut, match=r"kernel \w+ would need the carried value d?S, which it does not hold"):
        cutter._cut(())


# ---- many values that could be stored --------------------------------------------------------------------------------


def test_two_writes_a_token_are_planned_in_seconds():
    """Of 17 values that may be stored there are thousands of sets; of axis orders of its gradients even more."""
    spec = DeltaProduct(**SMALL)
    start = time.process_time()
    found = compile_spec.__wrapped__(spec, TARGET)
    assert time.process_time() - start < 30
    assert len(Cutter(found.stages["graph"]).candidates) == 17
    assert len(found.plan.operator("chunk").stored) > 1
    assert found.plan.operator("chunk_backward") and not found.plan.missing


def test_two_writes_a_token_and_their_gradients_are_right(packages):
    """In kernels of which one computes values twice, as they are wanted in both orders of axes."""
    package = packages(DeltaProduct(**SMALL))
    kernels = compile_spec(DeltaProduct(**SMALL), TARGET).plan.operator("chunk_backward").kernels
    (pairs,) = (kernel.graph.nodes for kernel in kernels if kernel.name == "pairs")
    assert len({node for node in pairs if node.op == "tri"}) < sum(node.op == "tri" for node in pairs)
    torch.manual_seed(0)
    names = ("q", "k", "v", "g", "beta", "k2", "v2", "beta2")
    x = dict(zip(names, tokens() + tuple(tokens()[n] for n in (1, 2, 4))))
    call = called_with(package, x)
    o, state = host_of(package).chunk(call)
    exact = {name: value.double().requires_grad_() for name, value in x.items()}
    wanted = two_writes(**exact)
    given = [torch.randn(y.shape, dtype=torch.float64) for y in wanted]
    found = host_of(package).chunk_backward(call, list(x), *(d.float() for d in given))
    slopes = dict(zip(x, torch.autograd.grad(wanted, list(exact.values()), given)))
    assert oracle.rms_ratio(o, wanted[0]) < 1e-5 and oracle.rms_ratio(state, wanted[1]) < 1e-5
    assert max(oracle.rms_ratio(found[name], slopes[name]) for name in x) < 1e-4


def two_writes(q, k, v, g, beta, k2, v2, beta2):
    """Token by token: o [1, T, H, V] and the state behind the last one."""
    state, rows = torch.zeros(2, 16, 16, dtype=torch.float64), []
    for t in range(q.shape[1]):
        state = state * g[0, t].exp()[:, None, None]
        for key, value, strength in ((k, v, beta), (k2, v2, beta2)):
            left = value[0, t] - torch.einsum("hk,hkv->hv", key[0, t], state)
            state = state + torch.einsum("hk,hv->hkv", key[0, t], strength[0, t][:, None] * left)
        rows.append(torch.einsum("hk,hkv->hv", q[0, t], state) / 4)
    return torch.stack(rows)[None], state[None]


def host_of(package):
    return importlib.import_module(f"{package.__name__}.launch")


def called_with(package, x):
    """The Call of the public operator, with the inputs that it has no parameters for."""
    operators, calls = importlib.import_module(f"{package.__name__}.operators"), []

    def run(options, call):
        calls.append(call)
        return call.inputs["v"], None

    with mock.patch.object(operators, "run", run):
        given = [x[name] for name in ("q", "k", "v", "g", "beta")]
        package.chunk_gated_delta_rule(*given, chunk_size=16, output_final_state=True)
    return dataclasses.replace(calls[0], inputs=calls[0].inputs | x)


def test_sets_are_grown_from_the_cheapest_where_there_are_too_many(monkeypatch):
    """What the bounded search finds is among all cuts, and its best is nearly the best."""
    graph = forward_graph(Spec(**SMALL))
    costs = {cut.name: price(cut, Spec(), 64, TARGET, WORKLOADS[0]).seconds for cut in Cutter(graph).all()}
    monkeypatch.setattr(fuse, "MOST_SETS", 0)
    found = [cut.name for cut in Cutter(graph).all(lambda cut: costs[cut.name])]
    assert set(found) <= set(costs) and len(set(found)) == len(found) and found[0] == "none"
    assert min(map(costs.get, found)) <= 1.01 * min(costs.values())


def test_no_member_of_the_family_has_too_many_sets():
    """So that its choices do not depend on the bound."""
    for spec in [spec for spec in family() if has_chunk_form(spec)][::17]:
        count = len(Cutter(forward_graph(spec)).candidates)
        assert sum(math.comb(count, stored) for stored in range(fuse.MOST_STORED + 1)) < fuse.MOST_SETS
