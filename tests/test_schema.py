"""The schema: rows of the family, of members from outside, and that nothing behind it goes by names."""

from inspect import signature

import pytest
from graphs import family
from members import SMALL, DeltaProduct

from gdngen.calls import operator_name
from gdngen.errors import SpecError
from gdngen.ir.builder import Builder
from gdngen.ir.family import Family, forward_graph, schema_of
from gdngen.ir.graph import Carry
from gdngen.ir.schema import NUMBERS, make
from gdngen.runtime import operators
from gdngen.spec import Spec


@pytest.mark.parametrize("spec", family(), ids=lambda spec: spec.name)
def test_every_tensor_has_a_row_and_every_input_a_gradient(spec):
    graph, schema = forward_graph(spec), schema_of(spec)
    inputs = [row.name for row in schema.tensors]
    assert inputs == [name for name in graph.inputs if name not in graph.scalars]
    assert {row.of for row in schema.of_role("gradient")} == set(inputs)
    assert {row.of for row in schema.of_role("cotangent")} == {"o", *(carry.final for carry in graph.carries)}
    assert not schema.of_role("input", "parameter"), "the family names the role of each of its inputs"


def test_the_layout_of_states_is_the_callers():
    plain, turned = (schema_of(Spec(state_v_first=way)) for way in (False, True))
    assert (plain["h0"].letters, turned["ht"].letters) == ("[N, HV, K, V]", "[N, HV, V, K]")
    assert schema_of(Spec(rule="additive", normalize=True, state_v_first=True))["z0"].letters == "[N, HV, K]"


def test_what_callers_know_inputs_as():
    mamba2 = schema_of(Spec(rule="additive", beta="dt"))
    assert [mamba2[name].argument for name in ("q", "k", "v", "dt", "dt_min")] == ["C", "B", "x", "dt", "dt_limit[0]"]
    assert schema_of(Spec(gate="key"))["gk"].argument == schema_of(Spec(fused_gate="softplus"))["a"].argument == "g"
    assert schema_of(Spec(gate="key", rule="additive"))["gk"].argument == "gk"
    assert schema_of(Spec(beta_logits=True))["b"].argument == "beta"


def test_of_a_member_from_outside():
    """What it has in common with the family, and inputs of its own: data in any dtype until it says more."""
    schema = schema_of(DeltaProduct(**SMALL))
    assert schema["k"].is_operand and not schema["k2"].is_operand
    assert (schema["k2"].role, schema["k2"].dtype, schema["k2"].layout) == ("input", "float", "strided")
    assert schema["dv2"].of == "v2" and schema.query.name == "q" and schema.value.name == "v"


def graph_of(inputs, outputs=1):
    """A graph that reads these inputs, given as (name, axes, grid)."""
    b = Builder()
    read = b.mul(*(b.input(*one) for one in inputs), b.input("v", "iv", "bnhr"))
    state = b.carry_in("S", "kv")
    total = b.add(state, b.ein([read, b.input("k", "ik", "bnh")], "kv"))
    return b.finish([(f"o{n}", read) for n in range(outputs)], [Carry("S", total, b.input("h0", "kv", "bhr"), "ht")])


def rows_of(*inputs, **more):
    return make(graph_of(inputs, **more), Family.roles, str, False)


def test_roles_that_nobody_named():
    schema = rows_of(("w", "i", "bnhr"), ("bias", "v", "hr"), ("scale", "", ""))
    assert [schema[name].role for name in ("w", "bias", "scale")] == ["input", "parameter", "number"]
    assert schema["bias"].letters == "[HV, V]" and not schema["bias"].is_optional
    assert NUMBERS["scale"] == "scale"


@pytest.mark.parametrize(
    "inputs, outputs, fragment",
    [
        (
            [("tau", "", "")],
            1,
            "declares the number 'tau', but a call brings only scale, dt_min, dt_max; declare it per",
        ),
        ([("dv", "i", "bnhr")], 1, "'dv' names two tensors .* rename one of them"),
        ([("lambda", "i", "bnhr")], 1, "'lambda' is the name of a tensor, expected one that Python can have"),
        ([], 2, r"the graph has outputs o0\[i,v\] @bnhr, o1\[i,v\] @bnhr; operators give one"),
    ],
)
def test_what_operators_cannot_have(inputs, outputs, fragment):
    with pytest.raises(SpecError, match=fragment):
        rows_of(*inputs, outputs=outputs)


def test_a_member_without_an_input_to_take_sizes_from():
    b = Builder()
    v, state = b.input("v", "iv", "bnhr"), b.carry_in("S", "kv")
    total = b.add(state, b.ein([v, b.input("w", "ik", "bnhr")], "kv"))
    schema = make(b.finish([("o", v)], [Carry("S", total, b.input("h0", "kv", "bhr"), "ht")]), {}, str, False)
    assert schema.value.name == "v"
    with pytest.raises(
        SpecError, match=r"no input \[i,k\] @bnh to take sizes from; declare one and name its role 'query'"
    ):
        schema.query  # noqa: B018


@pytest.mark.parametrize("spec", family(), ids=lambda spec: spec.name)
def test_arguments_are_those_of_the_public_operators(spec):
    taken = {word for form in ("chunk", "recurrent")
             for word in signature(getattr(operators, operator_name(spec, form))).parameters}  # fmt: skip
    asked = {row.argument.partition("[")[0] for row in schema_of(spec).rows.values() if row.role != "number"}
    given = {argument for argument in asked if argument not in ("o", "final_state") and not argument.startswith("d")}
    assert given - {"dt"} <= taken
