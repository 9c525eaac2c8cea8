"""Checks between passes: a tiny instance, evaluated in float64 before and after.

Plans are compared with the graph and with the gradient graph derived from it.  What that derivation makes of the ops'
derivatives is compared with autograd of the ops' evaluation, which knows nothing of it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gdngen.errors import GraphError
from gdngen.ir.builder import Builder, copy_into, emit
from gdngen.ir.evaluate import evaluate
from gdngen.ir.graph import TOKENS, Graph, Node, Ref, is_virtual, ordered
from gdngen.ir.text import value_names
from gdngen.ir.verify import verify
from gdngen.passes.backward import Backward
from gdngen.passes.plan import Operator, Plan
from gdngen.target import DEFAULT_TARGET, TARGETS

TOLERANCE = 1e-9
OF_GRADIENTS = 1e-5  # an op may be evaluated by a series and derived in closed form
LENGTH, CHUNK = 7, 4  # of the tiny instance: ragged
WHOLE = 2 * CHUNK
SIZES = {"b": 2, "h": 2, "r": 2, "k": 3, "v": 2}
Values = dict[str, Tensor]


def tiny_data(graph: Graph, length: int, seed: int = 0) -> Values:
    """Random float64 inputs of a tiny instance for every declared input of the graph."""
    generator = torch.Generator().manual_seed(seed)
    gates = {ref.value for node in graph.nodes if node.op == "decay" for ref in node.args}
    bounds = {ref.value: place for node in graph.nodes if node.op == "clamp" for place, ref in enumerate(node.args)}
    data = {}
    for name, i in graph.inputs.items():
        node = graph.nodes[i]
        shape = [SIZES[axis] for axis in "bhr" if axis in node.grid] + ([length] if "n" in node.grid else [])
        shape += [SIZES[axis] for axis in node.axes if axis in "kv"]
        value = torch.randn(shape, dtype=torch.float64, generator=generator)
        if i in gates:
            value = -value.abs()
            value[..., length // 2 : length // 2 + 1] = -torch.inf
        if bounds.get(i) and i in map(graph.inputs.get, graph.scalars):  # some values between them, some not
            value = value.abs() / 4 + (bounds[i] - 1)
        data[name] = value
    return data


def check_graph(graph: Graph, reference: Graph) -> Graph:
    """Structure, and equal results in float64 at a ragged length; GraphError names the output that changed."""
    verify(graph)
    data, expected = expected_results(reference)
    _compare(_evaluated(graph, data), expected, "a rewrite")
    return graph


def check_joint(joint: Graph, reference: Graph) -> Graph:
    """A graph of both scans: structure, and the gradients that the derived graph gives."""
    verify(joint)
    carries = {carry.name for carry in joint.carries if not carry.reverse}
    build = Builder(joint.chunked)

    def entered(build: Builder, node: Node, operands: list[Ref]) -> Ref | None:
        taken = node.op == "carry_in" and str(node.attrs[0]) in carries
        return build.input(str(node.attrs[0]), node.axes, node.grid) if taken else None

    made = copy_into(build, joint, entered)
    reverse = [replace(c, out=made(c.out), init=made(c.init)) for c in joint.carries if c.reverse]
    graph = build.finish([(name, made(ref)) for name, ref in joint.outputs], reverse)
    states = {name: expected_results(reference)[1][f"{name}@chunks"] for name in carries}
    data, expected = expected_gradients(reference)
    _compare(_evaluated(graph, data | states), expected, "a rewrite")
    return joint


def _evaluated(graph: Graph, data: Values) -> Values:
    try:
        return evaluate(graph, data, LENGTH, CHUNK)
    except (RuntimeError, ValueError) as error:  # torch: shapes that do not fit
        raise GraphError(f"a rewrite gives what cannot be evaluated: {error}") from None


def check_plan(plan: Plan, reference: Graph) -> Plan:
    """Every operator, evaluated kernel by kernel, gives what the Spec's graph gives."""
    kept: Values = {}
    for operator in plan.operators:
        known, wanted = (expected_gradients if operator.is_backward else expected_results)(reference)
        known = known | {name: kept[name] for name in operator.saved}
        found = kept = evaluate_operator(operator, known)
        _compare(found, wanted, f"the plan of operator {operator.name}")
    return plan


@lru_cache(maxsize=16)
def expected_results(forward: Graph) -> tuple[Values, Values]:
    """(random inputs, results); the same for every check against this graph, and not to be changed."""
    data = tiny_data(forward, LENGTH)
    return data, evaluate(forward, data, LENGTH, CHUNK)


@lru_cache(maxsize=16)
def expected_gradients(forward: Graph) -> tuple[Values, Values]:
    """(inputs with random cotangents, gradients by the derived graph before it is cut)."""
    return _derived(forward, *expected_results(forward), LENGTH)


def _derived(forward: Graph, data: Values, results: Values, length: int) -> tuple[Values, Values]:
    graph = Backward().run(forward, TARGETS[DEFAULT_TARGET])
    generator = torch.Generator().manual_seed(1)
    names = [name for name, _ in forward.outputs] + [carry.final for carry in forward.carries]
    more = {f"d{n}": torch.randn(results[n].shape, dtype=torch.float64, generator=generator) for n in names}
    states = {carry.name: results[f"{carry.name}@chunks"] for carry in forward.carries}
    return data | more, evaluate(graph, {**data, **more, **states}, length, CHUNK)


def evaluate_operator(operator: Operator, data: Values) -> Values:
    """Run the kernels' graphs one after the other; each sees only inputs and what earlier kernels stored."""
    known = dict(data)
    for kernel in operator.kernels:
        if set(kernel.stores) & set(operator.saved):
            continue  # the forward operator ran it
        known.update(evaluate(kernel.graph, known, LENGTH, CHUNK, per_chunk=kernel.stores + operator.totals))
    return known | {name: torch.stack(list(known[name])).sum((0, 1)) for name in operator.totals}


def _compare(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    for name, value in expected.items():
        if "@" in name:
            continue  # states per chunk: plans need not keep them
        if name not in found:
            raise GraphError(f"{what} does not give {name}")
        difference = float((found[name] - value).abs().max())
        if not difference <= TOLERANCE * (1 + float(value.abs().max())):
            raise GraphError(f"{what} changes {name}: largest difference {difference:.3g}")


# ------------------------------------------------------------------------------------------------ derivatives


def check_gradients(forward: Graph) -> None:
    """The derived gradients of all inputs, against autograd; GraphError names the gradient and the op to blame.

    At a ragged length, and without padding: an op may have no finite derivative where an operand is padding."""
    checked: set[str] = set()
    with torch.enable_grad():  # a package may be built inside no_grad
        for length in (LENGTH, WHOLE):
            for name, found, wanted in _gradients(forward, length):
                if bool(wanted.isfinite().all()):
                    checked.add(name)
                    _compare_gradient(forward, name, found, wanted)
    if missing := {name for name in forward.inputs if name not in forward.scalars} - checked:
        names = ", ".join(f"d{name}" for name in sorted(missing))
        raise GraphError(
            f"backward: {names} cannot be checked, autograd of the ops' evaluation gives no finite number; write the "
            "evaluation of each op so that it is differentiable where it is finite"
        )


def _gradients(forward: Graph, length: int) -> Iterator[tuple[str, Tensor | None, Tensor]]:
    """Of every input its name, the derived gradient and autograd's."""
    data = tiny_data(forward, length)
    gates = {ref.value for node in forward.nodes if node.op == "decay" for ref in node.args}
    for name, i in forward.inputs.items():
        if forward.nodes[i].axes == "i" and i not in gates:  # a write strength, or logits of one: never out of bounds
            data[name] = data[name].abs()
    names = [name for name in forward.inputs if name not in forward.scalars]
    results = evaluate(forward, data, length, CHUNK)
    known, found = _derived(forward, data, results, length)
    leaves = {name: data[name].clone().requires_grad_() for name in names}
    results = evaluate(forward, data | leaves, length, CHUNK)
    loss = sum((results[name.removeprefix("d")] * known[name]).sum() for name in known.keys() - data.keys())
    wanted = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)  # type: ignore[arg-type]
    yield from ((name, found.get(f"d{name}"), gradient) for name, gradient in zip(names, wanted, strict=True))


def _compare_gradient(forward: Graph, name: str, found: Tensor | None, wanted: Tensor) -> None:
    found = torch.zeros_like(wanted) if found is None else found.expand_as(wanted)
    difference, largest = float((found - wanted).abs().max()), float(wanted.abs().max())
    if not difference <= OF_GRADIENTS * (1 + largest):
        raise GraphError(
            f"backward: the derived d{name} is not the derivative of the ops' evaluation: largest difference "
            f"{difference:.3g} where autograd gives up to {largest:.3g}; {_blame(forward)}"
        )


def _blame(forward: Graph) -> str:
    """The first value whose op, by itself, is not derived as it is evaluated."""
    names = value_names(forward)
    for i, node in enumerate(forward.nodes):
        if node.args and not is_virtual(node.axes):
            alone = _alone(forward, node)
            if not _is_derived_rightly(alone):
                ops = " or ".join(sorted({n.op for n in alone.nodes} - {"input", "const", "tri"}))
                return f"by itself value {names[i]} is derived wrongly too: correct the derivative of {ops} (op table)"
    return "every value by itself is derived rightly: at fault is how the derivatives are put together"


def _is_derived_rightly(alone: Graph) -> bool:
    """Whether a graph without carry has autograd's gradients, one chunk long."""
    generator = torch.Generator().manual_seed(0)

    def random(value: Node) -> Tensor:
        sizes = SIZES | dict.fromkeys(TOKENS, CHUNK)
        shape = [sizes[axis] for axis in value.grid + value.axes if axis != "n"]
        return torch.rand(shape, dtype=torch.float64, generator=generator) + 0.5

    gates = {ref.value for value in alone.nodes if value.op == "decay" for ref in value.args}
    leaves = {n: (-1 if i in gates else 1) * random(alone.nodes[i]) for n, i in alone.inputs.items()}
    leaves |= {n: torch.tensor(0.75 + 0.5 * at, dtype=torch.float64) for at, n in enumerate(alone.scalars)}  # as bounds
    leaves = {name: value.requires_grad_() for name, value in leaves.items()}

    result, _ = _one_chunk(alone, leaves)["y"]
    cotangent = random(alone[alone.outputs[0][1]])
    wanted = torch.autograd.grad((result * cotangent).sum(), list(leaves.values()), materialize_grads=True)
    derived = Backward().run(alone, TARGETS[DEFAULT_TARGET])
    found = _one_chunk(derived, {name: value.detach() for name, value in leaves.items()} | {"dy": cotangent})
    for name, gradient in zip(leaves, wanted, strict=True):
        own, axes = found.get(f"d{name}", (torch.zeros_like(gradient), ""))
        if f"d{name}" in found:
            own = _spread(own, axes, _dims(alone.nodes[alone.inputs[name]]))
        if name not in alone.scalars and not torch.allclose(own.expand_as(gradient), gradient, atol=OF_GRADIENTS):
            return False
    return True


def _dims(node: Node) -> str:
    return "".join(axis for axis in node.grid + ordered(node.axes) if axis != "n")


def _one_chunk(graph: Graph, data: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, str]]:
    """Outputs of a single chunk, each with the names of its dimensions."""
    chunks = {n: [data[n]] if "n" in graph.nodes[i].grid else data[n] for n, i in graph.inputs.items()}
    found: dict[str, Any] = {**evaluate(graph, chunks, CHUNK, CHUNK, per_chunk=[name for name, _ in graph.outputs])}
    values = {name: value[0] if isinstance(value, list) else value for name, value in found.items()}
    return {name: (values[name], _dims(graph[ref])) for name, ref in graph.outputs}


def _spread(value: Tensor, source: str, target: str) -> Tensor:
    """A value with a dimension of length 1 for each that it lacks."""
    return value[tuple(slice(None) if axis in source else None for axis in target)]


def _alone(graph: Graph, node: Node) -> Graph:
    """A value whose operands are inputs, but for what products are derived together with (masks, numbers, inverses,
    and decays per channel between tokens), and what would be 0 past the end without ``valid`` if it were an input."""
    build = Builder(graph.chunked)

    def operand(ref: Ref, inside: bool = False) -> Ref:
        own = graph[ref]
        whole = own.op in ("const", "tri", "uli") or is_virtual(own.axes) or (node.op == "valid" and not inside)
        if whole and own.op != "input":
            made = emit(build, own, [operand(inner, True) for inner in own.args])
        else:
            made = build.input(f"x{ref.value}", own.axes, own.grid)
        return made.renamed(dict(zip(own.axes, ref.axes, strict=True)))

    return build.finish([("y", emit(build, node, [operand(ref) for ref in node.args]))], [])
