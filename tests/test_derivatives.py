"""A build compares derived gradients with autograd: a wrong or missing derivative of any op is an error naming it."""

from dataclasses import replace

import pytest
import torch
from graphs import TARGET
from members import SMALL, Cubic, SquaredValues, TwoInverses

from gdngen.errors import GraphError
from gdngen.ir import Builder, Ref, evaluate, forward_graph
from gdngen.ir.offsets import OFFSETS
from gdngen.ir.ops import OPS
from gdngen.passes.check import check_gradients
from gdngen.passes.pipeline import compile_spec
from gdngen.passes.regroup import Regroup
from gdngen.spec import Spec

USERS = (  # of every op that has a derivative
    Spec(qk_norm=True, **SMALL),
    Spec(fused_gate="softplus", beta_logits=True, **SMALL),
    Spec(fused_gate="bounded", beta_logits=True, neg_eigval=True, **SMALL),
    Spec(rule="additive", beta="dt", **SMALL),
    Spec(rule="additive", normalize=True, feature_map="elu1", **SMALL),
    TwoInverses(**SMALL),
)
OF_BACKWARD = ("cumsum",)  # appears in gradients alone
DERIVED = [name for name, op in OPS.items() if op.derive and name not in (*OF_BACKWARD, *OFFSETS)]


def user_of(op: str) -> Spec:
    """The inverse is derived with the product that reads it, but where it stands on the right."""
    return (
        USERS[-1]
        if op == "uli"
        else next(spec for spec in USERS if op in {node.op for node in forward_graph(spec).nodes})
    )


def altered(derive):
    """A derivative that is half as large again."""

    def wrong(build, me, adjoint, node):
        for operand, contribution in derive(build, me, adjoint, node):
            yield operand, build.mul(contribution, coef=1.5)

    return wrong


@pytest.mark.parametrize("fault", ["altered", "deleted", "empty"])
@pytest.mark.parametrize("op", DERIVED)
def test_a_build_finds_a_fault_in_the_derivative_of_any_op(monkeypatch, op, fault):
    spec = user_of(op)
    derive = {"altered": altered(OPS[op].derive), "deleted": None, "empty": lambda *_: iter(())}[fault]
    monkeypatch.setitem(OPS, op, replace(OPS[op], derive=derive))
    with pytest.raises(GraphError) as error:
        compile_spec.__wrapped__(spec, TARGET)
    message = str(error.value)
    assert message.startswith("backward: ")
    if fault == "altered":
        assert "is not the derivative of the ops' evaluation: largest difference" in message
        assert op in message.split("correct the derivative of ")[1]


def test_the_message_names_the_gradient_and_the_op(monkeypatch):
    monkeypatch.setitem(OPS, "softplus", replace(OPS["softplus"], derive=altered(OPS["softplus"].derive)))
    with pytest.raises(GraphError) as error:
        check_gradients(forward_graph(user_of("softplus")))
    assert "the derived da is not" in str(error.value)
    assert str(error.value).endswith(
        "by itself value sp is derived wrongly too: correct the derivative of softplus (op table)"
    )


def drop_by_value(self, operands):
    while len(operands) > 2:
        small, large = (operands[place] for place in next(self._absorbing_pairs(operands)))
        operands = [ref for ref in operands if ref not in (small, large)] + [self.mul(small, large)]
    return operands


def mixed_axes(build, me, adjoint, node):
    """The derivative of a product with an inverse that gives only two of three token axes new names."""
    position = next(
        (p for p, ref in enumerate(node.args) if build[ref].op == "uli" and ref.axes[1] == node.summed), None
    )
    if position is None:
        yield from RIGHT(build, me, adjoint, node)
        return
    inverse, right = node.args[position], node.args[1 - position]
    solution = build.ein([adjoint, inverse], right.axes)
    yield right, solution
    row, column = inverse.axes
    pair = [solution.renamed({column: "i", row: "j"}), me.renamed({row: "j", column: "i"})]
    yield build[inverse].args[0], build.ein([*pair, build.tri("strict")], "ij", -1.0)


RIGHT = OPS["ein"].derive


def test_a_mixed_up_axis_in_a_solve_is_caught(monkeypatch):
    graph = forward_graph(TwoInverses(**SMALL))
    check_gradients(graph)
    monkeypatch.setitem(OPS, "ein", replace(OPS["ein"], derive=mixed_axes))
    check_gradients(forward_graph(Spec(**SMALL)))  # where the right side has no other token axis it is the same
    with pytest.raises(GraphError, match="is not the derivative"):
        check_gradients(graph)


def test_a_lost_operand_is_caught(monkeypatch):
    graph = forward_graph(SquaredValues(rule="additive", **SMALL))
    check_gradients(graph)
    monkeypatch.setattr(Builder, "_premultiplied", drop_by_value)
    with pytest.raises(GraphError, match="is not the derivative"):
        check_gradients(graph)


@pytest.mark.parametrize("spec", [Cubic(**SMALL), Cubic(gate="key", **SMALL)], ids=["scalar", "key"])
def test_a_product_of_equal_operands_is_planned_whole(spec):
    compile_spec(spec, TARGET)


# ---- operands are found by their place, equal ones included ----------------------------------------------------------


def values_of(b: Builder, result: Ref, data: dict[str, torch.Tensor]) -> torch.Tensor:
    return evaluate(b.finish([("y", result)], []), data, 4, 4)["y"]


@pytest.mark.parametrize("letters", ["xkk", "kkx", "kxk", "kkk", "xxkk", "kkkk"])
def test_products_keep_operands_that_are_equal(letters):
    b = Builder()
    operands = {name: b.input(name, "ik", "bnh") for name in "xk"}
    data = {name: torch.randn(1, 2, 4, 3, dtype=torch.float64) for name in "xk"}
    found = values_of(b, b.ein([operands[name] for name in letters], "i"), data)
    torch.testing.assert_close(found, torch.stack([data[name] for name in letters]).prod(0).sum(-1))


@pytest.mark.parametrize("shared", [True, False])
def test_terms_are_merged_by_their_place(shared):
    """sum j: x[j] M[i,j] + sum j: x[j] x[j]: the second holds what both share twice."""
    b = Builder()
    x, matrix, y = b.input("x", "i", "bnh"), b.input("M", "ij", "bnh"), b.input("y", "i", "bnh")
    column = x.renamed({"i": "j"})
    one = b.ein([column, matrix], "i")
    two = b.ein([matrix.renamed({"i": "j", "j": "i"}), column if shared else y.renamed({"i": "j"})], "i")
    graph = b.finish([("y", b.add(one, two, one))], [])
    names = {"x": [1, 2, 4], "M": [1, 2, 4, 4], "y": [1, 2, 4]}
    data = {n: [torch.randn(shape, dtype=torch.float64)] for n, shape in names.items() if n in graph.inputs}
    merged = Regroup().run(graph, TARGET)
    torch.testing.assert_close(*(evaluate(g, data, 4, 4)["y"] for g in (graph, merged)))


def test_a_parameter_that_is_used_twice_has_one_total():
    """A kernel writes a chunk's terms of totals, and cannot add totals."""
    b = Builder()
    totals = [b.ein([b.input(name, "i", "bnhr")], "", grid="hr") for name in "xy"]
    graph = b.finish([("dw", b.add(*totals))], [])
    merged = Regroup().run(graph, TARGET)
    assert "n" in merged[merged.outputs[0][1]].summed and sum("n" in node.summed for node in merged.nodes) == 1
    data = {name: torch.randn(2, 1, 2, 7, dtype=torch.float64) for name in "xy"}
    torch.testing.assert_close(*(evaluate(g, data, 7, 4)["dw"] for g in (graph, merged)))


def test_an_inverse_of_nothing_is_the_unit_matrix():
    b = Builder()
    x = b.input("x", "ik", "bnh")
    data = {"x": torch.randn(1, 2, 4, 3, dtype=torch.float64)}
    same = b.ein([b.inverse(b.const(0.0)), x.renamed({"i": "j"})], "ik")
    torch.testing.assert_close(values_of(b, same, data), data["x"])
