"""Products with a decay per channel between their tokens, as text.

For blocks of 2, 4, .. C tokens the pairs of second and first half: there the decay is one factor per row times one
per column, neither above 1.  Products of one gate share the loop over block lengths, the factors and their parts.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from gdngen.codegen.environment import tiles
from gdngen.codegen.memory import Memory
from gdngen.ir.graph import CHANNELS, TOKENS, Ref
from gdngen.ir.text import comment
from gdngen.passes.tile import read_order

PRODUCTS_WITH_DECAYS = ("decayed", "crossing")
Factors = tuple[Ref, ...]


@dataclass(frozen=True)
class Pairs:
    """m[i,j] x[i,c] y[j,c] for i after j: the factors of the three and of all; whether only j < i count."""

    matrix: Factors
    late: Factors
    early: Factors
    scalars: Factors
    coef: float
    strict: bool


@dataclass(frozen=True)
class Part:
    """Of pairs the sum over the earlier tokens, for each later one (``late``), or the other way round."""

    matrix: Factors
    tile: Factors
    late: bool
    dtype: str


@dataclass(frozen=True)
class Loop:
    """The lines of one loop over block lengths; ``turned``: its tiles are held as [channel,token]."""

    gate: str
    turned: bool = False
    lines: list[str] = field(default_factory=list)
    known: dict[str, str] = field(default_factory=dict)
    uses: dict[Part, list[str]] = field(default_factory=dict)  # statements that read a part, directly behind it
    last: list[str] = field(default_factory=list)

    def value(self, text: str, name: str = "") -> str:
        """The name of a helper value, which is computed once."""
        if text not in self.known:
            self.known[text] = name or f"b_at{len(self.known)}"
            self.lines.append(f"{self.known[text]} = {text}")
        return self.known[text]

    def decay(self, turned: bool) -> str:
        """Decays between the tokens and the middles of their blocks."""
        name = "b_decay_turned" if turned != self.turned else "b_decay"
        return self.value(f"decay_to_middle({self.gate}, level, {turned}, C, PRECISION)", name)

    def meeting(self, late: bool) -> str:
        """Which pairs meet, the later token along the rows or along the columns."""
        return self.value(f"meeting(level, {late}, C)", "m_late" if late else "m_early")

    def order(self, token: str, channel: str) -> str:
        return channel + token if self.turned else token + channel


class DecayedProducts(Memory):
    """Adds the statements of products with decays."""

    # ---------------------------------------------------------------------------------------- grouping

    def batches(self, values: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """The values in order, products with decays of one gate together behind the operands of all of them."""
        placed: set[int] = set()
        for i in values:
            group = self._group(i, [value for value in values if value not in placed])
            for value in values:
                if group and value not in placed and value not in group and self._feeds(value, group):
                    placed.add(value)
                    yield (value,)
            if i not in placed:
                placed |= set(group) or {i}
                yield group or (i,)

    def _group(self, i: int, waiting: list[int]) -> tuple[int, ...]:
        """The products that are computed with this one, and sums of nothing but them."""
        if self.graph.kind(i) not in PRODUCTS_WITH_DECAYS or i not in waiting:
            return ()
        members: list[int] = []
        for value in waiting:
            if self.graph.kind(value) in PRODUCTS_WITH_DECAYS and self._key(value) == self._key(i):
                if not any(self._feeds(member, (value,)) for member in members):
                    members.append(value)
        return *members, *(value for value in waiting if self._is_sum_of(value, members))

    def _key(self, i: int) -> tuple[int, bool, bool, Factors]:
        """Gate, kind, orientation and matrix: what products of one group have in common."""
        node = self.graph.nodes[i]
        if node.op == "crossing":
            return node.args[3].value, False, self.order(i)[0] != "i", self._pairs(i).matrix
        found = self.graph.decayed(i)
        if found.is_gram:
            return found.gate, True, False, ()
        return found.gate, False, self.order(i)[0] != found.axes[0], self._pairs(i).matrix

    def _feeds(self, value: int, group: tuple[int, ...]) -> bool:
        return any(value in self._behind[member] for member in group)

    @cached_property
    def _behind(self) -> list[set[int]]:
        """Of each value all that it is computed from."""
        found: list[set[int]] = []
        for node in self.graph.nodes:
            found.append(set().union(*({ref.value} | found[ref.value] for ref in node.args)))
        return found

    def _is_sum_of(self, i: int, members: list[int]) -> bool:
        """An add of crossings that nothing else reads: one running sum serves all of them."""
        terms = {ref.value for ref in self.graph.nodes[i].args}
        crossings = {member for member in members if self.graph.kind(member) == "crossing"}
        if self.graph.nodes[i].op != "add" or not terms <= crossings or self.order(i) != self.order(min(terms)):
            return False
        return all(list(self.graph.dataflow.successors(t)) == [i] and t not in self.ends for t in terms)

    # ---------------------------------------------------------------------------------------- factors

    def _expanded(self, ref: Ref) -> tuple[list[Ref], float]:
        """A nested elementwise product as its factors and a number, where they may be read in either order."""
        node = self.graph[ref]
        if self.graph.kind(ref.value) != "product":
            return [ref], 1.0
        names = dict(zip(node.axes, ref.axes, strict=True))
        found: list[Ref] = []
        coef = float(node.attrs[0])
        for arg in node.args:
            factors, number = self._expanded(arg.renamed(names))
            found, coef = found + factors, coef * number
        free = all(len(f.axes) < 2 or self.graph[f].op in ("input", "decay", "tri") for f in found)
        return (found, coef) if free else ([ref], 1.0)

    @cached_property
    def absorbed(self) -> set[int]:
        """Elementwise products that only products with decays read, which take their factors."""
        found: set[int] = set()
        for i in reversed(range(len(self.graph.nodes))):
            readers = list(self.graph.dataflow.successors(i))
            taken = all(self.graph.kind(reader) in PRODUCTS_WITH_DECAYS or reader in found for reader in readers)
            whole = Ref(i, self.graph.nodes[i].axes)
            if readers and taken and i not in self.ends and self._expanded(whole) != ([whole], 1.0):
                found.add(i)
        return found

    def _pairs(self, i: int) -> Pairs:
        """What a crossing or a decayed sum goes over; of a sum the tile of the summed tokens alone."""
        node = self.graph.nodes[i]
        if node.op == "crossing":
            matrix, late, early = node.args[0], self._expanded(node.args[1]), self._expanded(node.args[2])
        else:
            found = self.graph.decayed(i)
            token, summed = found.axes[0], node.summed
            names = {token: "j", summed: "i"} if found.later else {token: "i", summed: "j"}
            matrix, tile = found.first.renamed(names), self._expanded(found.second.renamed(names))
            late, early = (tile, ([], 1.0)) if found.later else (([], 1.0), tile)
        factors, coef = self._expanded(matrix)
        strict = any(self.graph[f].op == "tri" and self.graph[f].attrs == ("strict",) for f in factors)
        if any(self.graph[f].op == "tri" and self.graph[f].attrs == ("same",) for f in factors):
            factors, coef = [matrix], 1.0
        factors = [f for f in factors if self.graph[f].op != "tri"]
        own = [f for f in factors if {"i", "j"} <= set(f.axes)]
        rows, columns = ([f for f in factors if f not in own and axis in f.axes] for axis in "ij")
        scalars = [f for f in factors if not set(f.axes) & set(TOKENS)]
        return Pairs(
            matrix=_sorted(own),
            late=_sorted(late[0] + rows),
            early=_sorted(early[0] + columns),
            scalars=_sorted(scalars),
            coef=coef * late[1] * early[1] * (1.0 if node.op == "crossing" else float(node.attrs[0])),
            strict=strict,
        )

    # ---------------------------------------------------------------------------------------- text

    def emit_products(self, members: tuple[int, ...]) -> None:
        """The statements of one group."""
        gate, is_gram, turned, _ = self._key(members[0])
        name = f"b_{self.names[gate]}"
        loop = Loop(name if self.order(gate)[0] == "i" else f"tl.trans({name})", turned)
        read = self.absorbed.intersection(*[set().union(*(self._behind[member] for member in members))])
        self.body += [f"# {comment(self.graph, i)}" for i in sorted(read | set(members))]
        nodes = self.graph.nodes
        totals = {ref.value: i for i in members if nodes[i].op == "add" for ref in nodes[i].args}
        after: list[str] = []
        for i in members:
            if is_gram:
                self._gram(i, loop)
            elif self.graph.kind(i) == "decayed":
                after += self._sum(i, loop)
            elif nodes[i].op == "add":
                terms = zip(nodes[i].attrs, nodes[i].args, strict=True)
                self._crossings(i, [(float(coef), ref.value) for coef, ref in terms], loop)
            elif i not in totals:
                self._crossings(i, [(1.0, i)], loop)
        for part, uses in loop.uses.items():
            name = self._part(part, loop)
            loop.lines.extend(use.format(name) for use in uses)
        self.put(tiles("loops").over_levels(loop.lines + loop.last, self.plan.chunk.bit_length() - 1))
        self.body += after

    def _sum(self, i: int, loop: Loop) -> list[str]:
        """A decayed sum; what it is multiplied with behind the loop is returned."""
        pairs, out, later = self._pairs(i), f"b_{self.names[i]}", self.graph.decayed(i).later
        tile, outer = (pairs.late, pairs.early) if later else (pairs.early, pairs.late)
        part = Part(pairs.matrix, tile, not later, self._dtype(i))
        start = self._zero(self.order(i)) if pairs.strict else self._own_term(part, loop)
        self.put(tiles("products").elementwise(out, start))
        loop.uses.setdefault(part, []).append(f"{out} += {{}}")
        rest = tuple(ref.renamed({"j": "i"}) for ref in outer) + pairs.scalars
        if not rest and pairs.coef == 1.0:
            return []
        return [f"{out} = {self._product([out], rest, loop.order('i', _channel(tile)), pairs.coef)}"]

    def _own_term(self, part: Part, loop: Loop) -> str:
        """What a token adds to its own sum."""
        order = "ij" if part.late != loop.turned else "ji"
        same = f"tl.where(o_c[:, None] == o_c[None, :], {self.product_text(part.matrix, order)}, 0.0)"
        own = f"tl.sum({same}, {int(not loop.turned)})"
        return f"{own}[{'None, :' if loop.turned else ':, None'}] * {self._tile_text(part, loop)}"

    def _crossings(self, total: int, terms: list[tuple[float, int]], loop: Loop) -> None:
        """The gradient of a log decay.  A pair that meets at a level crosses the tokens up to i of the second half and
        those after j of the first: running sums inside the halves, in which every term holds the token's own decay."""
        out, dtype = f"b_{self.names[total]}", self._dtype(terms[0][1])
        self.put(tiles("products").elementwise(out, self._zero(self.order(total))))
        begun = False
        for coef, i in terms:
            pairs = self._pairs(i)
            for axis, own, other in (("i", pairs.late, pairs.early), ("j", pairs.early, pairs.late)):
                part, order = Part(pairs.matrix, other, axis == "i", self._dtype(i)), loop.order(axis, _channel(own))
                number = coef * pairs.coef
                text = self._product(["{}"], own + pairs.scalars, order, abs(number))
                assign = f"{out}_now {'-' if number < 0 else '+'}= " if begun else f"{out}_now = {'-' * (number < 0)}"
                loop.uses.setdefault(part, []).append(assign + text)
                begun = True
        loop.last.append(f"{out} += running_sum({out}_now, level, {loop.turned}, C, {dtype}, PRECISION)")

    def _gram(self, i: int, loop: Loop) -> None:
        found, node, out = self.graph.decayed(i), self.graph.nodes[i], f"b_{self.names[i]}"
        turned, dtype, channel = self.order(i) != found.axes, self._dtype(i), node.summed
        refs = [ref.renamed({axis: "i"}) for ref, axis in zip((found.first, found.second), found.axes, strict=True)]
        (left, a), (right, b) = (self._expanded(ref) for ref in (refs[::-1] if turned else refs))
        coef = a * b * float(node.attrs[0])
        one = f"({loop.decay(False)} * {self.product_text(_sorted(left), 'i' + channel)}).to({dtype})"
        two = f"({loop.decay(True)} * {self.product_text(_sorted(right), channel + 'i')}).to({dtype})"
        product = f"tl.dot({loop.value(one)}, {loop.value(two)}, input_precision=PRECISION)"
        loop.lines.append(
            f"{out} += tl.where({loop.meeting(not turned)}, {self._product([product], (), '', coef)}, 0.0)"
        )
        straight = all(self.order(ref.value)[0] == "i" for ref in right if len(ref.axes) == 2)
        own = self._product([], _sorted(left + right), "i" + channel if straight else channel + "i", coef)
        own = f"tl.sum({own}, {int(straight)})[{':, None' if straight else 'None, :'}]"
        own = f"tl.where(o_c[:, None] == o_c[None, :], {own}, 0.0)"
        products = tiles("products")
        self.put(products.add_onto(out, "+", own) if self.is_accumulated(i) else products.elementwise(out, own))

    def _part(self, part: Part, loop: Loop) -> str:
        """A part at one level, by its name: products share it."""
        wanted = "ij" if part.late != loop.turned else "ji"
        lies = read_order(self.graph, part.matrix[0], self.order(part.matrix[0].value))
        matrix = self._operand_text(part.matrix, lies, part.dtype)
        met = loop.value(f"tl.where({loop.meeting(lies == 'ij')}, {matrix}, 0.0).to({part.dtype})")
        tile = loop.value(f"({loop.decay(loop.turned)} * {self._tile_text(part, loop)}).to({part.dtype})")
        operands = [met if lies == wanted else f"tl.trans({met})", tile]
        first, second = operands[::-1] if loop.turned else operands
        return loop.value(f"{loop.decay(loop.turned)} * tl.dot({first}, {second}, input_precision=PRECISION)")

    def _operand_text(self, refs: Factors, order: str, dtype: str) -> str:
        """Factors as one tile, in the operand dtype as they are where nothing is computed."""
        if len(refs) == 1 and dtype == "DOT" and self.is_operand_dtype(refs[0].value):
            return f"b_{self.names[refs[0].value]}"
        return self.product_text(refs, order)

    def _tile_text(self, part: Part, loop: Loop) -> str:
        return self.product_text(part.tile, loop.order("j" if part.late else "i", _channel(part.tile)))

    def _product(self, texts: list[str], refs: Factors, order: str, coef: float) -> str:
        """What varies with the level comes first: a product without it would be kept in registers across the loop."""
        more = [self.product_text(refs, order)] if refs else []
        return " * ".join([*texts, *more, *([repr(coef)] if coef != 1.0 else [])])

    def _dtype(self, i: int) -> str:
        return "tl.float32" if self.names[i] in self.kernel.wide_dots else "DOT"


def _channel(refs: Factors) -> str:
    return next(axis for ref in refs for axis in ref.axes if axis in CHANNELS)


def _sorted(refs: Iterable[Ref]) -> Factors:
    """Factors in one order, so that equal products are spelled alike."""
    return tuple(sorted(refs, key=lambda ref: (-len(ref.axes), ref.value, ref.axes)))
