"""Tiles: the order of axes in registers, what a product may read, where the value channels may be shared out."""

import ast
import functools

import pytest
import torch
from graphs import SMALL, TARGET, cuts_of, graph_data
from support import case

from gdngen.codegen.sources import sources
from gdngen.ir import Graph, evaluate, parse, verify
from gdngen.ir.text import value_names
from gdngen.passes.pipeline import compile_spec
from gdngen.passes.plan import Plan
from gdngen.passes.tile import _Orders, dot_operands, may_split_v, read_order
from gdngen.spec import Spec

LENGTH, CHUNK = 11, 4
PLANNED = [
    (Spec(), ()),
    (Spec(), ("cut=S+U+W+r",)),
    (Spec(key_dim=16, value_dim=40, chunk=16), ()),
    (Spec(key_dim=16, value_dim=40, chunk=16), ("cut=U+W+P",)),
    (Spec(key_dim=16, value_dim=40, chunk=16), ("cut=none",)),
    (Spec(qk_norm=True, fused_gate="bounded", beta_logits=True, neg_eigval=True, state_v_first=True), ()),
    (Spec(gate="none"), ("cut=X+P",)),
    (Spec(rule="additive", beta="dt", value_dim=64), ()),
    (Spec(gate="scalar+key+value", beta="value"), ()),
    (Spec(gate="key", qk_norm=True), ()),
    (Spec(gate="value"), ()),
]
SPLIT = [
    Spec(**SMALL),
    Spec(qk_norm=True, fused_gate="softplus", beta_logits=True, **SMALL),
    Spec(gate="scalar+value", **SMALL),
    Spec(rule="additive", normalize=True, feature_map="elu1", **SMALL),
]


@functools.cache
def plans() -> list[Plan]:
    return [compile_spec(spec, TARGET, pins).plan for spec, pins in PLANNED]


def test_no_product_reads_a_transposed_accumulator():
    """NO_TRANSPOSED_ACCUMULATOR in the plan: what a product, an inverse or a carry left is read as it lies."""
    products = 0
    for kernel in (k for plan in plans() for operator in plan.operators for k in operator.kernels):
        graph, orders = kernel.graph, dict(kernel.orders)
        names, accumulators = value_names(graph), _Orders(graph).accumulators
        for i, node in enumerate(graph.nodes):
            if graph.kind(i) == "dot" and len(node.axes) == 2:
                for ref, wanted in dot_operands(node, orders[names[i]]):
                    products += 1
                    own = orders.get(names[ref.value], graph[ref].axes)
                    assert ref.value not in accumulators or read_order(graph, ref, own) == wanted, names[i]
    assert products > 50


def transposed_accumulators(text: str) -> list[str]:
    """Products of a kernel's text that read a transposed value that came out of a product or an inverse.

    Not what out_of_product and turned_bits lay out: synchronous instructions read it (test_inspection: no HGMMA there).
    """
    products = ("dot", "block_product", "synchronous_product")
    tree, accumulates = ast.parse(text), (*products, "unit_lower_inverse", "decay_to_middle", "running_sum")
    assignments = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    targets = [[n.id for n in ast.walk(a.targets[0]) if isinstance(n, ast.Name)] for a in assignments]

    def calls(node: ast.AST, names: tuple[str, ...]) -> list[ast.Call]:
        """Calls of functions whose names start so: dot, dot_left, ..."""
        found = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
        return [n for n in found if getattr(n.func, "attr", getattr(n.func, "id", "")).startswith(names)]

    def reads(node: ast.AST, names: set[str]) -> bool:
        return any(isinstance(n, ast.Name) and n.id in names for n in ast.walk(node))

    accumulators: set[str] = set()
    turned: set[str] = set()
    before = -1
    while before != len(accumulators) + len(turned):  # values are carried round the loop: until nothing is added
        before = len(accumulators) + len(turned)
        for assignment, names in zip(assignments, targets):
            value = assignment.value
            if not calls(value, ("load",)) and (calls(value, accumulates) or reads(value, accumulators)):
                accumulators |= set(names)
            if any(reads(t, accumulators) for t in calls(value, ("trans",))) or reads(value, turned):
                turned |= set(names) if not calls(value, accumulates) else set()
    guilty = []
    for product in calls(tree, products):
        for operand in product.args:
            if any(reads(t, accumulators) for t in calls(operand, ("trans",))) or reads(operand, turned):
                guilty.append(ast.unparse(product))
    return guilty


def test_no_kernel_text_transposes_an_accumulator_into_a_product():
    """NO_TRANSPOSED_ACCUMULATOR in the text: Triton 3.4 - 3.7.0 miscompiles that on Hopper."""
    planted = "b_a = tl.dot(b_k, b_q)\nb_c = b_a * b_g[:, None]\n"
    assert transposed_accumulators(planted + "b_o = tl.dot(tl.trans(b_c.to(DOT)), b_k)") != []
    assert (
        transposed_accumulators(planted + "b_t = tl.trans(b_c)\nb_h, b_s = half(b_t)\nb_o = dot_half(b_h, b_s)") != []
    )
    assert transposed_accumulators("b_o = tl.dot(tl.trans(b_S), b_k)\nb_S = b_o + b_S") != []
    assert transposed_accumulators(planted + "b_o = block_product(tl.trans(b_c, (0, 2, 1)), b_k)") != []
    assert transposed_accumulators(planted + "b_o = tl.dot(b_c.to(DOT), tl.trans(b_k))") == []
    texts = {  # packages share most of device.py
        text
        for plan in plans()
        for file, text in sources(plan, "any").items()
        if file.startswith(("kernels/", "device"))
    }
    assert sum("tl.trans(" in text for text in texts) > 10  # operands from memory may be turned
    assert [fault for text in texts for fault in transposed_accumulators(text)] == []


@pytest.mark.parametrize("spec", SPLIT, ids=lambda spec: spec.name)
def test_v_is_split_only_where_its_channels_do_not_meet(spec):
    """A kernel that may split v gives the same on half of the channels."""
    data = graph_data(case(spec, T=LENGTH, H=2, decays="resets"))
    split = {True: 0, False: 0}
    for _, cut in cuts_of(spec):
        known = dict(data)
        for kernel in cut.kernels:
            assert not (kernel.name == "scan" and spec.normalize and may_split_v(kernel))  # its z has no v axis
            found = evaluate(kernel.graph, known, LENGTH, CHUNK, per_chunk=kernel.stores)
            split[may_split_v(kernel)] += 1
            if may_split_v(kernel):
                half = evaluate(kernel.graph, half_of_v(kernel.graph, known), LENGTH, CHUNK, per_chunk=kernel.stores)
                for name in [name for name, _ in kernel.graph.outputs] + [c.final for c in kernel.graph.carries]:
                    assert_half(half[name], found[name])
            known |= found
    assert split[False] > 0 and (split[True] > 0) != spec.normalize


def half_of_v(graph: Graph, data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    half = SMALL["value_dim"] // 2
    found = {}
    for name, i in graph.inputs.items():
        value = data[name]
        if graph.nodes[i].axes.endswith("v"):
            value = [part[..., :half] for part in value] if isinstance(value, list) else value[..., :half]
        found[name] = value
    return found


def assert_half(half, whole) -> None:
    for a, b in zip(half, whole) if isinstance(half, list) else [(half, whole)]:
        torch.testing.assert_close(a, b[..., : SMALL["value_dim"] // 2], rtol=1e-12, atol=1e-12)


def test_a_sum_over_v_forbids_the_split():
    scan = compile_spec(Spec(), TARGET, ("cut=X+P",)).plan.operator("chunk").kernels[1]
    assert may_split_v(scan)
    summed = scan.text.replace("output o", "w[i] @bnhr = sum v: r[i,v] * v[i,v]\noutput w = w[i]\noutput o")
    lines = summed.splitlines()
    extra = next(line for line in lines if line.startswith("w[i]"))
    carry = next(n for n, line in enumerate(lines) if line.startswith("carry"))
    lines.remove(extra)
    with_sum = "\n".join([*lines[:carry], extra, *lines[carry:]]) + "\n"
    verify(parse(with_sum))
    assert not may_split_v(scan.model_copy(update={"text": with_sum}))
    prepare = compile_spec(Spec(), TARGET, ("cut=X+P",)).plan.operator("chunk").kernels[0]
    assert not may_split_v(prepare)  # what it stores has no v axis: programs would all write it
