"""What a kernel's values look like in its text: names, register orders, operands as expressions, tiles as addresses."""

from dataclasses import dataclass, field
from functools import cached_property

from gdngen.codegen.phases import HEAD
from gdngen.ir.graph import CHANNELS, Graph, Node, Ref
from gdngen.ir.text import value_names
from gdngen.passes.plan import Kernel, Operator, Plan, Stored
from gdngen.passes.tile import channels, read_order

# Per-token inputs in the input dtype, with a contiguous last dim.
TILES = ("q", "k", "v", "do")
SIZES = {"i": "C", "j": "C", "k": "K", "v": "V"}  # of an axis in memory
EXTENTS = {"i": "C", "j": "C", "k": "BK", "v": "BV"}  # of an axis in a tile


@dataclass
class Values:
    """The lines of one kernel under construction, and how its values are spelled."""

    plan: Plan
    operator: Operator
    kernel: Kernel
    setup: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)  # the phase being written
    parts: list[tuple[str, list[str]]] = field(default_factory=list)  # kind and lines of each phase
    fetched: list[str] = field(default_factory=list)  # loads of the next slice of k
    taken: list[str] = field(default_factory=list)  # what they loaded becomes the slice to work on
    finish: list[str] = field(default_factory=list)
    ends: dict[int, list[tuple[str, Ref]]] = field(default_factory=dict)  # value -> outputs that it still has to become
    terms: dict[int, list[tuple[str, str, str]]] = field(default_factory=dict)  # value -> totals, signs, texts
    ahead: dict[str, str] = field(default_factory=dict)  # what products with decays read, by phase and text
    behind: dict[int, list[str]] = field(default_factory=dict)  # sum over a loop -> what makes it whole behind it
    made: set[str] = field(default_factory=set)  # helper values already in the body

    def put(self, text: str, where: list[str] | None = None) -> None:
        (self.body if where is None else where).extend(text.rstrip("\n").split("\n"))

    def _once(self, key: str, text: str) -> None:
        """Put a helper value into the body once."""
        if key not in self.made:
            self.made.add(key)
            self.put(text)

    def bases(self, node: Node) -> list[str]:
        """Where base addresses are computed: once, or for each value head."""
        return self.part(HEAD) if self.kernel.is_grouped and "r" in node.grid else self.setup

    def part(self, kind: str) -> list[str]:
        """The lines of the latest phase of a kind."""
        return next(lines for own, lines in reversed(self.parts) if own == kind)

    @property
    def before_loop(self) -> list[str]:
        """The lines before the loop over tiles or slices that is being written."""
        return self.parts[-2][1]

    # ---------------------------------------------------------------------------------------- facts

    @cached_property
    def graph(self) -> Graph:
        return self.kernel.graph

    @cached_property
    def names(self) -> list[str]:
        return value_names(self.graph)

    @cached_property
    def orders(self) -> dict[str, str]:
        return dict(self.kernel.orders)

    @cached_property
    def stored(self) -> dict[str, Stored]:
        return {stored.name: stored for stored in self.operator.stored}

    @property
    def chunked(self) -> bool:
        return self.graph.chunked

    def is_looped(self, channel: str) -> bool:
        """Whether programs of this kernel go over the channel tile by tile."""
        return (channel == "v" and self.kernel.is_tiled) or (channel == "k" and self.kernel.is_sliced)

    def is_accumulated(self, i: int) -> bool:
        """A sum over a loop of this kernel: over tiles of v, slices of k, or the value heads of a group."""
        summed = self.graph.nodes[i].summed
        return "r" in summed or any(self.is_looped(channel) for channel in summed if channel in CHANNELS)

    def order(self, i: int) -> str:
        return self.orders.get(self.names[i], self.graph.nodes[i].axes)

    def loaded(self, i: int) -> Stored | None:
        """The stored value that this input is, if another kernel wrote it."""
        return self.stored.get(self.names[i]) if self.graph.nodes[i].op == "input" else None

    def is_operand_dtype(self, i: int) -> bool:
        """Held in the input dtype: q, k, v tiles, casts, and stored values in the input format."""
        node, stored = self.graph.nodes[i], self.loaded(i)
        if node.op == "cast":
            return self.chunked
        return node.op == "input" and (self.names[i] in TILES or (stored is not None and stored.format == "input"))

    # ---------------------------------------------------------------------------------------- expressions

    def view(self, ref: Ref, order: str) -> str:
        """An operand in fp32, broadcast to the register order of the result."""
        node = self.graph[ref]
        if node.op == "const":
            return repr(float(node.attrs[0]))
        if node.op == "tri":
            return self._masked([ref], "1.0", order)
        name = self.names[ref.value]
        text = name if name in self.graph.scalars else f"b_{name}"
        if self.is_operand_dtype(ref.value):
            text += ".to(tl.float32)"
        own = read_order(self.graph, ref, self.order(ref.value))
        if len(own) == 2 and own != "".join(axis for axis in order if axis in own):
            text, own = f"tl.trans({text})", own[::-1]
        if not own or own == order:
            return text
        return text + "[" + ", ".join(":" if axis in own else "None" for axis in order) + "]"

    def product_text(self, refs: tuple[Ref, ...], order: str, coef: float = 1.0) -> str:
        masks = [ref for ref in refs if self.graph[ref].op == "tri"]
        factors = self._factors(tuple(ref for ref in refs if ref not in masks), order)
        numbers = [repr(coef)] if coef not in (1.0, -1.0) or not factors else []
        text = ("-" if coef == -1.0 and factors else "") + " * ".join(numbers + factors)
        return self._masked(masks, text, order) if masks else text

    def _masked(self, masks: list[Ref], text: str, order: str) -> str:
        """Triangular masks as a choice: what is masked contributes 0 whatever it is."""
        for mask in masks:
            row, column = (f"o_c{self._index(axis, order)}" for axis in mask.axes)
            relation = {"causal": ">=", "strict": ">", "same": "=="}[str(self.graph[mask].attrs[0])]
            text = f"tl.where({row} {relation} {column}, {text}, 0.0)"
        return text

    def _factors(self, refs: tuple[Ref, ...], order: str) -> list[str]:
        """Factors of a product: tiles, then vectors, those along one axis multiplied before they are spread out.
        With a vector first Triton lays the tiles out for it: moves are a tenth of the instructions of prepare."""
        thin: dict[str, list[Ref]] = {}
        for ref in refs:
            thin.setdefault(ref.axes if len(ref.axes) == 1 and len(order) > 1 else "", []).append(ref)
        found = [self.view(ref, order) for ref in thin.pop("", [])]
        for axis, group in thin.items():
            product = " * ".join(self.view(ref, axis) for ref in group)
            found.append(f"({product}){self._index(axis, order)}" if len(group) > 1 else self.view(group[0], order))
        return found

    # ---------------------------------------------------------------------------------------- addresses

    def mask(self, order: str, tokens: str = "m_i") -> str:
        """The mask of a tile with these axes: tokens past the end, channels past the dimension."""
        needs = {"i": tokens, "k": "m_k" if self.masks("k") else "", "v": "m_v" if self.masks("v") else ""}
        parts = []
        for axis in order:
            if needs.get(axis):
                parts.append(needs[axis] + (self._index(axis, order) if len(order) > 1 else ""))
        return " & ".join(parts)

    def row_mask(self, order: str) -> str:
        """The mask of a value that belongs to tokens, be it a tile of a chunk or a vector of one token."""
        return self.mask(order) if self.chunked else " & ".join(filter(None, [self.mask(order), "m_i"]))

    def masks(self, channel: str) -> bool:
        size = self.plan.spec.key_dim if channel == "k" else self.plan.spec.value_dim
        return size != channels(self.kernel, size)

    def offsets(self, order: str, strides: dict[str, str]) -> str:
        """Sum of index times stride over the axes of a tile, in register order."""
        index = {"i": "o_c", "j": "o_c", "k": "o_k", "v": "o_v"}
        parts = []
        for axis in order:
            text = index[axis] + (self._index(axis, order) if len(order) > 1 else "")
            parts.append(text if strides[axis] == "1" else f"{text} * {strides[axis]}")
        return parts[0] if len(parts) == 1 else f"({' + '.join(parts)})"

    def _index(self, axis: str, order: str) -> str:
        return "[" + ", ".join(":" if a == axis else "None" for a in order) + "]"

    def _zero(self, axes: str) -> str:
        return f"tl.zeros([{', '.join(EXTENTS[axis] for axis in axes)}], dtype=tl.float32)" if axes else "0.0"
