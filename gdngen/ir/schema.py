"""Schema: one row for each tensor that a member has: inputs, states, numbers, outputs, and their gradients.

Axes and grid are those that the graph declares.  What a graph cannot say, the role of an input, stands beside the
member's Family; dtype, layout and everything else follow from both.  Whoever needs to know of a tensor more than its
name reads its row: codegen, the checks on arguments, calls made from a Spec, registration, tuner and verification.
"""

import keyword
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from gdngen.errors import SpecError
from gdngen.ir.graph import CHANNELS, Graph, Node

Role = Literal[
    "query",  # what the state is read with
    "key",  # what the state is written and read under
    "value",  # what is written
    "gate",  # the natural logarithm of a decay
    "raw_gate",  # what a gate is computed from
    "strength",  # of a write
    "logits",  # of a write strength
    "input",  # any other per-token input
    "log_rate",  # of each value head: the logarithm of what its gate is multiplied with
    "bias",  # of each value head: added to a per-token input; may be absent
    "parameter",  # any other tensor of each value head
    "number",  # one for the whole call
    "state",
    "output",
    "final",  # the state that is left
    "cotangent",  # the gradient that arrives for an output or a final state
    "gradient",
]
# operand: the dtype of the call, in which tiles are multiplied.  float: float32, bfloat16 or float16, read as float32;
# models hold it in the dtype of the call.  f32: the same, but models hold it in float32, as the operators give it.
Dtype = Literal["operand", "float", "f32"]
# rows: channels lie side by side, batches, tokens and heads anywhere.
Layout = Literal["rows", "strided", "contiguous"]

OPERANDS: tuple[Role, ...] = ("query", "key", "value")
OF_TOKENS = (*OPERANDS, "gate", "raw_gate", "strength", "logits", "input")
OF_HEADS = ("log_rate", "bias", "parameter")
DTYPES: Mapping[Role, Dtype] = {
    **dict.fromkeys(OPERANDS, "operand"),
    **dict.fromkeys(("raw_gate", "strength", "logits", "input"), "float"),
}
# Where a call has its numbers: the field of Call, and of the operators' keyword.
NUMBERS = {"scale": "scale", "dt_min": "dt_limit[0]", "dt_max": "dt_limit[1]"}
SIZES = {"b": "B", "n": "T", "h": "H", "k": "K", "v": "V"}


@dataclass(frozen=True)
class Row:
    """A tensor: ``argument`` is what callers know it as, ``dims`` are its dimensions in memory by name, ``of`` is what
    a cotangent or a gradient belongs to."""

    name: str
    role: Role
    axes: str
    grid: str
    dims: tuple[str, ...]
    dtype: Dtype
    layout: Layout
    argument: str
    is_optional: bool = False
    of: str = ""

    @property
    def is_operand(self) -> bool:
        """In the dtype of the call, its channels side by side: a tile that products take as it is."""
        return self.dtype == "operand" and self.layout == "rows"

    @property
    def is_of_tokens(self) -> bool:
        return self.role in OF_TOKENS

    @property
    def is_of_heads(self) -> bool:
        return self.role in OF_HEADS

    @property
    def letters(self) -> str:
        """The dimensions as error messages write them: [B, T, H, K]."""
        return f"[{', '.join(self.dims)}]"

    def cells(self) -> tuple[str, ...]:
        """The row as printed."""
        axes = f"[{','.join(self.axes)}] @{self.grid}"
        notes = [f"of {self.of}"] if self.of else []
        notes += ["may be absent"] if self.is_optional else []
        return self.name, self.role, axes, self.letters, self.dtype, self.layout, self.argument, ", ".join(notes)


@dataclass(frozen=True)
class Schema:
    """All rows, by name: what goes in, in the graph's order, what comes out, then the same for gradients.

    ``decays`` holds the channel axis of each gate that the graph has a decay of, "" for one per token.
    """

    rows: Mapping[str, Row]
    decays: frozenset[str]

    def __getitem__(self, name: str) -> Row:
        return self.rows[name]

    def __str__(self) -> str:
        cells = [row.cells() for row in self.rows.values()]
        widths = [max(map(len, column)) for column in zip(*cells)]
        return "".join("  ".join(map(str.ljust, row, widths)).rstrip() + "\n" for row in cells)

    def of_role(self, *roles: Role) -> list[Row]:
        return [row for row in self.rows.values() if row.role in roles]

    @cached_property
    def tensors(self) -> list[Row]:
        """What a call brings as tensors: inputs of tokens and of heads, and states, in the graph's order."""
        return self.of_role(*OF_TOKENS, *OF_HEADS, "state")  # type: ignore[arg-type]

    @cached_property
    def states(self) -> list[Row]:
        return self.of_role("state")

    @cached_property
    def finals(self) -> list[Row]:
        return self.of_role("final")

    @cached_property
    def output(self) -> Row:
        return self.of_role("output")[0]

    @cached_property
    def query(self) -> Row:
        """The input whose shape says B, T, H and K."""
        return next(self._sized("query", "ik", "bnh"))

    @cached_property
    def value(self) -> Row:
        """The input whose shape says HV and V, like that of the output."""
        return next(self._sized("value", "iv", "bnhr"))

    def _sized(self, role: Role, axes: str, grid: str) -> Iterator[Row]:
        """Inputs with these axes, those of the role first."""
        fitting = [row for row in self.rows.values() if row.is_of_tokens and (row.axes, row.grid) == (axes, grid)]
        yield from sorted(fitting, key=lambda row: row.role != role)
        raise SpecError(
            f"schema: the graph declares no input [{','.join(axes)}] @{grid} to take sizes from; "
            f"declare one and name its role {role!r} in the Family's roles"
        )


def make(graph: Graph, roles: Mapping[str, Role], argument: Callable[[str], str], state_v_first: bool) -> Schema:
    """The rows of a forward graph; ``roles`` are those of inputs by name, ``argument`` what a caller knows one as.

    SpecError for a graph that operators cannot have: several outputs, one unlike v, numbers that no call brings.
    """
    found: list[Row] = []
    states = {str(graph[carry.init].attrs[0]): carry.final for carry in graph.carries}
    gates = {ref.value for node in graph.nodes if node.op == "decay" for ref in node.args}
    for name, i in graph.inputs.items():
        node = graph.nodes[i]
        role = "state" if name in states else roles.get(name) or _role(name, node, i in gates)
        found.append(_row(name, role, node.axes, node.grid, argument(name), state_v_first))
    found += [_output(graph)]
    found += [_row(states[row.name], "final", row.axes, row.grid, "final_state", state_v_first)
              for row in found if row.role == "state"]  # fmt: skip
    found += [_derived(row) for row in found if row.role != "number"]
    _check_names([row.name for row in found])
    decays = {graph.nodes[gate].axes.removeprefix("i") for gate in gates}
    return Schema({row.name: row for row in found}, frozenset(decays))


def _check_names(names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SpecError(f"schema: {twice[0]!r} names two tensors (d and a name is its gradient); rename one of them")
    if wrong := next((name for name in names if not name.isidentifier() or keyword.iskeyword(name)), ""):
        raise SpecError(f"schema: {wrong!r} is the name of a tensor, expected one that Python can have as a variable")


def _role(name: str, node: Node, is_gate: bool) -> Role:
    """Of an input that nobody named one for."""
    if node.grid == "":
        if name not in NUMBERS:
            known = ", ".join(NUMBERS)
            raise SpecError(
                f"schema: the graph declares the number {name!r}, but a call brings only {known}; "
                f'declare it per value head: input("{name}", "", "hr")'
            )
        return "number"
    if "n" not in node.grid:
        return "parameter"
    return "gate" if is_gate else "input"


def _row(name: str, role: Role, axes: str, grid: str, argument: str, state_v_first: bool) -> Row:
    heads = grid.replace("hr", "V")  # value heads are one dimension in memory
    is_state = role in ("state", "final")
    sizes = SIZES | {"V": "HV"} | ({"b": "N"} if is_state else {})
    tile = [axis for axis in axes if axis in CHANNELS]
    channels = tile[::-1] if is_state and state_v_first else tile
    layout: Layout = "rows" if role in OPERANDS else "strided" if role in OF_TOKENS else "contiguous"
    dtype = DTYPES.get(role, "f32")
    dims = tuple(sizes[axis] for axis in (*heads, *channels))
    return Row(name, role, axes, grid, dims, dtype, layout, argument, role in ("state", "bias"))


def _output(graph: Graph) -> Row:
    found = [(name, graph[ref].grid, ref.axes) for name, ref in graph.outputs]
    if [place[1:] for place in found] != [("bnhr", "iv")]:
        got = ", ".join(f"{name}[{','.join(axes)}] @{grid}" for name, grid, axes in found) or "none"
        raise SpecError(f"schema: the graph has outputs {got}; operators give one, o[i,v] @bnhr")
    name, grid, axes = found[0]
    return Row(name, "output", axes, grid, ("B", "T", "HV", "V"), "operand", "contiguous", name)


def _derived(row: Row) -> Row:
    """The gradient of an input or a state, or the one that arrives for a result."""
    role: Role = "cotangent" if row.role in ("output", "final") else "gradient"
    layout: Layout = "rows" if row.role == "output" else "contiguous"
    name = f"d{row.name}"
    return Row(name, role, row.axes, row.grid, row.dims, row.dtype, layout, name, role == "cotangent", row.name)
