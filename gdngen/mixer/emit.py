"""Graph -> lines of a kernel.  Row-wise graphs compute tiles of rows by channels, those with token offsets roll.

A rolling kernel goes over the tokens of its block once and holds of each value only as many earlier ones as somebody
reads: x[i - 2] is what x was two steps ago.  A value that reads ahead, dz[i + 3], is computed so many steps later: its
delay.  So x and do are read from memory once, whatever the width.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from gdngen.errors import PlanError
from gdngen.ir.graph import Graph, Node, Ref
from gdngen.ir.ops import OPS
from gdngen.ir.text import comment, signed_sum, value_names

LEAVES = ("input", "carry_in", "const")
GATHERED = ("first",)  # what a row of the loop leaves behind it


@dataclass
class KernelLines:
    """The lines of one kernel: before the loop over tokens or rows, at the start of a step, in it, and behind it."""

    setup: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    shift: list[str] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)
    delay: int = 0


def shown(name: str, offset: int) -> str:
    """name + offset as source."""
    return name if offset == 0 else f"{name} {'+' if offset > 0 else '-'} {abs(offset)}"


class Emitter:
    """What both kinds share: the values of a graph that some results need, and how they are spelled."""

    def __init__(self, graph: Graph, results: Iterable[Ref]) -> None:
        self.graph, self.names = graph, value_names(graph)
        self.results = list(results)
        self.lines = KernelLines()

    @cached_property
    def live(self) -> list[int]:
        """The values to compute, operands first."""
        found: set[int] = set()
        todo = [ref.value for ref in self.results]
        while todo:
            value = todo.pop()
            if value not in found:
                found.add(value)
                todo += [ref.value for ref in self.graph.nodes[value].args]
        return sorted(found)

    def is_group_sum(self, node: Node) -> bool:
        """A sum over sequences and blocks: programs store their parts, which are added up in a fixed order."""
        return node.op == "ein" and "n" in node.summed

    def is_total(self, node: Node) -> bool:
        """A sum over tokens."""
        return node.op == "ein" and "i" in node.summed

    def part(self, ref: Ref) -> int:
        """The value of one program that a result is, or is the sum of."""
        node = self.graph[ref]
        return node.args[0].value if self.is_group_sum(node) else ref.value

    def read(self, ref: Ref, axes: str) -> str:
        raise NotImplementedError

    def factors(self, refs: Iterable[Ref], axes: str) -> list[str]:
        return [self.read(ref, axes) for ref in refs]

    def product(self, node: Node, factors: list[str]) -> str:
        """An ``ein``'s coefficient times factors."""
        coef = float(node.attrs[0])
        text = " * ".join(([repr(coef)] if abs(coef) != 1.0 else []) + factors)
        return f"-{text}" if coef == -1.0 else text

    def expression(self, node: Node) -> str:
        """The right side of an elementwise op, a product or a sum over channels."""
        axes = "".join(sorted({axis for ref in node.args for axis in ref.axes}))
        if node.op == "add":
            return signed_sum((coef, self.read(ref, axes)) for coef, ref in zip(node.attrs, node.args, strict=True))
        if node.op == "ein":
            text = self.product(node, self.factors(node.args, axes))
            return f"tl.sum({text}, 1)" if node.summed == "v" else text
        if not OPS[node.op].kernel:
            raise PlanError(f"codegen: {node.op} has no text in a kernel of the mixer")
        return OPS[node.op].kernel.format(*(self.read(ref, axes) for ref in node.args))


class RowEmitter(Emitter):
    """Tiles [BR, BD] of rows by channels."""

    def factors(self, refs: Iterable[Ref], axes: str) -> list[str]:
        """Tiles, then numbers of rows or channels, multiplied before they are spread out."""
        refs = list(refs)
        found = [self.read(ref, axes) for ref in refs if ref.axes == axes]
        numbers = [self.read(ref, "") for ref in refs if not ref.axes and axes]
        for thin, spread in (("i", "[:, None]"), ("v", "[None, :]")) if len(axes) > 1 else ():
            same = [self.read(ref, thin) for ref in refs if ref.axes == thin]
            if same:
                same, numbers = same + numbers, []
                found.append(f"({' * '.join(same)}){spread}" if len(same) > 1 else same[0] + spread)
        return found + numbers

    def made_of(self, starts: Callable[[Node], bool]) -> set[int]:
        """Values of a kind and all that are made of them."""
        found: set[int] = set()
        for i in self.live:
            node = self.graph.nodes[i]
            if starts(node) or any(ref.value in found for ref in node.args):
                found.add(i)
        return found

    @cached_property
    def behind(self) -> set[int]:
        """Sums over rows and what reads them: computed behind the loop."""
        return self.made_of(self.is_total)

    @cached_property
    def parts(self) -> set[int]:
        """Sums over programs and what reads them: a program has a part of each."""
        return self.made_of(self.is_group_sum)

    def read(self, ref: Ref, axes: str) -> str:
        if self.graph[ref].op == "const":
            return repr(float(self.graph[ref].attrs[0]))
        name = self.names[self.part(ref)]
        if not ref.axes:
            return name
        if ref.axes == axes or len(axes) < 2:
            return f"b_{name}"
        return f"b_{name}[:, None]" if ref.axes == "i" else f"b_{name}[None, :]"

    def write(self) -> KernelLines:
        lines = self.lines
        for i in self.live:
            node, name = self.graph.nodes[i], self.names[i]
            if node.op == "input" and node.axes == "iv":
                lines.body.append(
                    f"b_{name} = tl.load({name} + (o_r[:, None] * {name}_sr + o_d[None, :]), mask=m_rd, other=0.0)"
                    ".to(tl.float32)"
                )
            elif node.op == "input" and node.axes == "v":
                lines.setup.append(f"b_{name} = tl.load({name} + o_d, mask=m_d, other=0.0).to(tl.float32)")
            elif node.op in LEAVES or self.is_group_sum(node):
                continue
            elif self.is_total(node):  # rows are added up once, behind the loop
                lines.setup.append(f"b_{name} = tl.zeros([BR, BD], dtype=tl.float32)")
                lines.body.append(f"# {comment(self.graph, i)}")
                lines.body.append(f"b_{name} += tl.where(m_rd, {self.expression(node)}, 0.0)")
                lines.finish.append(f"b_{name} = tl.sum(b_{name}, 0)")
            else:
                self._check_parts(node)
                where = lines.finish if i in self.behind else lines.body if "i" in node.axes else lines.setup
                where += [f"# {comment(self.graph, i)}", f"b_{name} = {self.expression(node)}"]
        return lines

    def _check_parts(self, node: Node) -> None:
        """A program makes its part of a result from its part of a sum, which the result must be proportional to."""
        sums = [ref for ref in node.args if ref.value in self.parts]
        if sums and (node.op != "ein" or len(sums) > 1):
            raise PlanError(f"codegen: {node.op} of a sum over programs is not the sum of what it makes of their parts")

    def store(self, name: str, ref: Ref) -> None:
        """A result: rows where they are computed, parts of a sum behind the loop."""
        value = self.part(ref)
        if "i" in self.graph.nodes[value].axes:
            pointer = f"{name} + (o_r[:, None] * D + o_d[None, :])"
            text = f"tl.store({pointer}, b_{self.names[value]}.to({name}.dtype.element_ty), mask=m_rd)"
            self.lines.body.append(text)
        else:
            text = f"tl.store({name} + pid.to(tl.int64) * D + o_d, b_{self.names[value]}, mask=m_d)"
            self.lines.finish.append(text)


class TokenEmitter(Emitter):
    """Vectors of channels [BV], rolling over tokens; step o_i computes a value of delay d for token o_i - d.

    Inputs are loaded ``fetched`` steps before they are needed, so that so many loads of each are under way.
    """

    def __init__(self, graph: Graph, results: Iterable[Ref], fetched: int = 0) -> None:
        super().__init__(graph, results)
        self.fetched = fetched

    def base(self, ref: Ref) -> tuple[int, int]:
        """The value that is read, and at which offset from the reader's token."""
        node = self.graph[ref]
        if node.op == "lag":
            return node.args[0].value, -int(node.attrs[0])
        if node.op == "lead":
            return node.args[0].value, int(node.attrs[0])
        return ref.value, 0

    def rolls(self, node: Node) -> bool:
        """Whether the value is computed at every token and may be read from another one."""
        return "i" in node.axes and node.op not in ("lag", "lead")

    def steps_in_loop(self, node: Node) -> bool:
        return self.rolls(node) or self.is_total(node) or node.op in GATHERED

    @cached_property
    def delays(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for i in self.live:
            node = self.graph.nodes[i]
            if self.steps_in_loop(node):
                reads = [self.base(ref) for ref in node.args]
                found[i] = max([0, *(found[value] + offset for value, offset in reads if value in found)])
        for i in reversed(found):
            self._put_off(i, found)
        return found

    def _put_off(self, value: int, delays: dict[int, int]) -> None:
        """A product of one rolling value waits for its readers: then that one alone is held, and products are not."""
        node = self.graph.nodes[value]
        rolling = {base for base, _ in map(self.base, node.args) if base in delays}
        if not self.rolls(node) or node.op in LEAVES or len(rolling) > 1:
            return
        readers = [
            delays[i] - offset
            for i in delays
            for base, offset in map(self.base, self.graph.nodes[i].args)
            if base == value
        ]
        if readers:
            delays[value] = max(delays[value], min(readers))

    @cached_property
    def depths(self) -> dict[int, int]:
        """How many earlier ones of each value are read."""
        found = dict.fromkeys(self.delays, 0)
        for i in self.delays:
            for value, offset in map(self.base, self.graph.nodes[i].args):
                if value in found:
                    found[value] = max(found[value], self.delays[i] - self.delays[value] - offset)
        return found

    @cached_property
    def ahead(self) -> set[int]:
        """Values read at a later token: past the end of the sequence they count 0."""
        reads = (self.base(ref) for i in self.delays for ref in self.graph.nodes[i].args)
        return {value for value, offset in reads if offset > 0}

    def read(self, ref: Ref, axes: str) -> str:
        node, delay = self.graph[ref], self.reader_delay
        if node.op == "const":
            return repr(float(node.attrs[0]))
        value, offset = self.base(ref)
        if value not in self.delays or not self.rolls(self.graph.nodes[value]):
            return f"b_{self.names[value]}"
        return self.spelled(value, delay - self.delays[value] - offset)

    def spelled(self, value: int, steps: int) -> str:
        return f"b_{self.names[value]}" + (f"_{steps}" if steps else "")

    def own(self, delay: int) -> str:
        """The mask of a token of this program's block and of the sequence."""
        return f"(o_i >= {delay}) & (o_i - {delay} < count)" if delay else "o_i < count"

    def write(self) -> KernelLines:
        lines = self.lines
        for i in self.live:
            node, name = self.graph.nodes[i], self.names[i]
            self.reader_delay = self.delays.get(i, 0)
            text = f"# {comment(self.graph, i)}"
            if node.op in ("input", "carry_in"):
                self._leaf(node, name)
            elif node.op in ("const", "lag", "lead") or self.is_group_sum(node):
                continue
            elif self.is_total(node):
                lines.setup.append(f"b_{name} = tl.zeros([BV], dtype=tl.float32)")
                lines.body += [*self._owned(node), text, f"b_{name} += {self._term(node)}"]
            elif node.op == "first":
                lines.setup.append(f"b_{name} = tl.zeros([BV], dtype=tl.float32)")
                row = int(node.attrs[0]) + self.reader_delay
                taken = f"tl.where((o_i == {row}) & (i_t == 0), {self.read(node.args[0], 'v')}, b_{name})"
                lines.body += [text, f"b_{name} = {taken}"]
            elif node.op == "passed":
                operand = self.read(node.args[0], "v")
                lines.finish += [text, f"b_{name} = tl.where(length == {node.attrs[0]}, {operand}, 0.0)"]
            elif node.op == "placed":
                here = shown("left", self.reader_delay - int(node.attrs[0]))
                placed = f"tl.where(o_i == {here}, {self.read(node.args[0], 'v')}, 0.0)"
                lines.body += [text, f"b_{name} = {placed} if dht is not None else -0.0"]  # + -0.0 costs nothing
            elif self.rolls(node):
                lines.body += [text, f"b_{name} = {self._within(i, self.expression(node))}"]
            else:
                lines.finish += [text, f"b_{name} = {self.expression(node)}"]
        self._roll()
        return lines

    def _owner(self, node: Node) -> Ref:
        """The factor of a sum over tokens that is 0 outside of the block: the latest value, which many sums share."""
        return max(node.args, key=lambda ref: self.base(ref)[0])

    def _owned(self, node: Node) -> list[str]:
        text = self.read(self._owner(node), "v")
        line = f"{text}_own = tl.where({self.own(self.reader_delay)}, {text}, 0.0)"
        return [] if line in self.lines.body else [line]

    def _term(self, node: Node) -> str:
        owner = self._owner(node)
        factors = [self.read(ref, "v") + ("_own" if ref == owner else "") for ref in node.args]
        return self.product(node, factors)

    def _within(self, value: int, text: str) -> str:
        here = shown("o_i", -self.delays[value])
        return f"tl.where({here} < left, {text}, 0.0)" if value in self.ahead else text

    def _leaf(self, node: Node, name: str) -> None:
        lines = self.lines
        if "i" in node.axes:
            lines.setup.append(f"p_{name} = {name} + i_b * {name}_sb + (first + i_t) * {name}_st + o_v")
            coming = [self._token(name, str(k)) for k in range(self.fetched)] + [
                self._token(name, shown("o_i", self.fetched))
            ]
            for k, load in enumerate(coming[:-1], 1):
                lines.setup.append(f"b_{name}_in_{k} = {load}")
            queue = [f"b_{name}_in_{k}" for k in range(1, self.fetched + 1)] + [coming[-1]]
            lines.body.append(f"b_{name} = {queue[0]}.to(tl.float32)")
            lines.body += [f"{here} = {after}" for here, after in pairwise(queue)]
        elif name[:1] == "w" and name[1:].isdigit():
            text = f"tl.load(weight + o_v * W + (W - 1 - {name[1:]}), mask=m_v, other=0.0)"
            lines.setup.append(f"b_{name} = {text}.to(tl.float32)")
        elif name == "bias":
            lines.setup.append("b_bias = tl.load(bias + o_v, mask=m_v, other=0.0).to(tl.float32)")
        else:  # a token of the window before the sequence, or its gradient behind it
            window, lag = ("dht", name[2:]) if name.startswith("dh") else ("h0", name[1:])
            mask = "m_v" if window == "dht" else "m_v & (i_t == 0)"
            pointer = f"{window} + i_s * {window}_sn + o_v * {window}_sv + (S - {lag}) * {window}_sw"
            lines.setup += [
                f"b_{name} = tl.zeros([BV], dtype=tl.float32)",
                f"if {window} is not None:",
                f"    p_{name} = {pointer}",
                f"    b_{name} = tl.load(p_{name}, mask={mask}, other=0.0).to(tl.float32)",
            ]

    def _token(self, name: str, place: str) -> str:
        """A token of an input, 0 past the end of the sequence."""
        step = place if place.isidentifier() or place.isdigit() else f"({place})"
        return f"tl.load(p_{name} + {step} * {name}_st, mask=m_v & (left > {place}), other=0.0)"

    def _roll(self) -> None:
        """What earlier tokens are before the first step, and how they move up behind each."""
        lines = self.lines
        for value, depth in self.depths.items():
            name = self.names[value]
            for k in range(1, depth + 1):
                if name == "x":
                    past = self._past(k)
                    load = f"tl.load(p_x - {k} * x_st, mask=m_v & (i_t > 0), other=0.0).to(tl.float32)"
                    lines.setup.append(f"b_x_{k} = {load}" + (f" + b_{past}" if past else ""))
                else:
                    lines.setup.append(f"b_{name}_{k} = tl.zeros([BV], dtype=tl.float32)")
            for k in range(depth, 0, -1):
                lines.shift.append(f"b_{name}_{k} = {self.spelled(value, k - 1)}")

    def _past(self, place: int) -> str:
        name = f"h{place}"
        return name if name in self.names and self.names.index(name) in self.live else ""

    def store(self, name: str, ref: Ref, slot: str = "") -> None:
        """A result: tokens while rolling, sums and rows of the window behind the loop (``slot``: where in memory)."""
        value = self.part(ref)
        node, text = self.graph.nodes[value], f"b_{self.names[value]}"
        if "i" in node.axes:
            delay = self.delays[value]
            self.lines.delay = max(self.lines.delay, delay)
            here = shown("o_i", -delay)
            mask = "m_v & " + (f"(o_i >= {delay}) & ({here} < rows)" if delay else "(o_i < rows)")
            valid = f"tl.where({here} < left, {text}, 0.0)"
            here = f"({here})" if delay else here
            self.lines.body.append(f"tl.store(p_{name} + {here} * D, {valid}.to({name}.dtype.element_ty), mask={mask})")
            self.lines.setup.append(f"p_{name} = {name} + (i_b * T + first + i_t) * D + o_v")
        else:
            self.lines.finish.append(slot.format(text))

    def gathered(self) -> None:
        """Sums are over the tokens of the block; what is taken later than at its own token makes the loop longer."""
        self.lines.setup.insert(0, "count = tl.minimum(left, rows)")
        late = [self.delays[i] for i in self.delays if not self.rolls(self.graph.nodes[i])]
        self.lines.delay = max([self.lines.delay, *late])
