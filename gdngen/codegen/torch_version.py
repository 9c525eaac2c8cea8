"""The same graph as plain PyTorch: one step function per operator, value by value, for any device."""

from collections.abc import Callable

from gdngen.codegen.environment import render
from gdngen.errors import PlanError
from gdngen.ir.graph import Graph, Node, Ref
from gdngen.ir.ops import OPS
from gdngen.ir.text import comment, parse, signed_sum, value_names
from gdngen.passes.plan import Plan

MASKS = {"causal": ".tril(0)", "strict": ".tril(-1)", "same": ".tril().triu()"}
DECAYS = {"ij": "decay_between", "i0": "decay_from_start", "1i": "decay_to_end", "10": "decay_of_chunk"}
HELPERS = (*sorted(DECAYS.values()), "run", "unit_lower_inverse", "where_valid")


class StepWriter:
    """Values of one graph as torch statements; dimensions are grid axes among b h r, then tile axes."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.names = value_names(graph)

    def dims(self, node: Node, axes: str | None = None) -> str:
        return "".join(axis for axis in "bhr" if axis in node.grid) + (node.axes if axes is None else axes)

    def operand(self, ref: Ref, target: str) -> str:
        """An operand permuted and expanded to the dimensions of the result."""
        node = self.graph[ref]
        if node.op == "const":
            return repr(float(node.attrs[0]))
        text, own = self.names[ref.value], self.dims(node, ref.axes)
        wanted = "".join(axis for axis in target if axis in own)
        if own != wanted:
            text += f".permute({', '.join(str(own.index(axis)) for axis in wanted)})"
        if wanted == target or not wanted:
            return text
        missing_front = target.endswith(wanted)
        return text if missing_front else text + "[" + ", ".join(":" if a in own else "None" for a in target) + "]"

    def right(self, node: Node) -> str:
        """The expression that computes a node."""
        target = self.dims(node)
        if node.op == "ein":
            return self._ein(node, target)
        if node.op == "add":
            return signed_sum((c, self.operand(ref, target)) for c, ref in zip(node.attrs, node.args, strict=True))
        source = self.graph[node.args[0]] if node.args else node
        x = self.names[node.args[0].value] if node.args else ""
        dim = len(self.dims(source, ""))
        forms: dict[str, Callable[[], str]] = {
            "decay": lambda: f"{DECAYS[str(node.attrs[0])]}({x}, {dim})",
            "uli": lambda: f"unit_lower_inverse({x})",
            "tri": lambda: f"torch.ones_like(valid[:, None] * valid){MASKS[str(node.attrs[0])]}",
            "valid": lambda: f"where_valid(valid, {x}, {dim})" if self.graph.chunked else x,
        }
        if node.op in forms:
            return forms[node.op]()
        if OPS[node.op].torch:
            return OPS[node.op].torch.format(*(self.operand(ref, target) for ref in node.args))
        raise PlanError(f"codegen: the PyTorch version has no text for {node.op}")

    def _ein(self, node: Node, target: str) -> str:
        coef = float(node.attrs[0])
        refs = [ref for ref in node.args if self.names[ref.value] not in self.graph.scalars]
        factors = [self.names[ref.value] for ref in node.args if ref not in refs]
        factors += [repr(coef)] if coef not in (1.0, -1.0) else []
        operands = [self.dims(self.graph[ref], ref.axes) for ref in refs]
        if refs == [] or (len(refs) == 1 and operands[0] == target):
            factors += [self.names[ref.value] for ref in refs]
        else:
            texts = ", ".join(self.names[ref.value] for ref in refs)
            factors.append(f'torch.einsum("{",".join(operands)}->{target}", {texts})')
        return ("-" if coef == -1.0 else "") + " * ".join(factors)

    def lines(self) -> list[str]:
        """A comment and a statement per computed value."""
        found = []
        for i, node in enumerate(self.graph.nodes):
            if node.op in ("input", "carry_in", "const"):
                continue
            found.append(f"# {comment(self.graph, i)}")
            found.append(f"{self.names[i]} = {self.right(node)}")
        return found


def _step(plan: Plan, name: str, graph: Graph) -> tuple[str, str, str, list[str], str, list[str]]:
    """One step for the template: name, unit, parameters, lines, results, fields."""
    writer = StepWriter(graph)
    inits = [writer.names[carry.init.value] for carry in graph.carries]
    inputs = [n for n in graph.inputs if n not in inits and n not in graph.scalars]
    results = [ref for _, ref in graph.outputs] + [carry.out for carry in graph.carries]
    tokens = [n for n in inputs if "n" in graph.nodes[graph.inputs[n]].grid]
    grouped = [n for n in tokens if "r" not in graph.nodes[graph.inputs[n]].grid]
    fields = [
        f"{name}_step,",
        f"chunk={plan.chunk if graph.chunked else 0},",
        f"inputs={as_tuple(inputs)},",
        f"tokens={as_tuple(tokens)},",
        f"grouped={as_tuple(grouped)},",
        f"inits={as_tuple(inits)},",
        f"scalars={as_tuple(graph.scalars)},",
        f"state_v_first={plan.spec.state_v_first},",
    ]
    parameters = ", ".join([*inputs, *(carry.name for carry in graph.carries), *graph.scalars, "valid"])
    unit = "chunk" if graph.chunked else "token"
    return name, unit, parameters, writer.lines(), ", ".join(writer.names[ref.value] for ref in results), fields


def as_tuple(names: list[str]) -> str:
    """A tuple of strings as source text."""
    inner = ", ".join(f'"{name}"' for name in names)
    return f"({inner},)" if len(names) == 1 else f"({inner})"


def reference_text(plan: Plan) -> str:
    """The source of reference.py.  The chunk step comes from the graph that the chunk kernels were cut from."""
    steps = [
        _step(plan, operator.name, parse(operator.graph)) for operator in plan.operators if not operator.is_backward
    ]
    text = "\n".join(line for step in steps for line in step[3])
    helpers = [name for name in HELPERS if name == "run" or f"{name}(" in text]
    return render("package/reference.py", steps=steps, package=plan.spec.name, helpers=helpers)
