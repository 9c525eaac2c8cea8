"""Products with a decay per channel between their tokens, as text.

For blocks of 2, 4, .. C tokens the pairs of second and first half: there the decay is one factor per row times one
per column, neither above 1.  Products of one gate share the loops over block lengths, the factors and their parts.
Tiles are [block,token,channel] with 16 tokens a block: blocks up to 16 tokens take small products, and no product but
the inverse's is made of asynchronous instructions: with as many values in registers ptxas 12.8 loses their descriptors
(rule NO_ASYNCHRONOUS_PRODUCT_WITH_DECAYS).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import networkx as nx

from gdngen.codegen.environment import tiles
from gdngen.codegen.memory import Memory
from gdngen.codegen.values import EXTENTS
from gdngen.errors import PlanError
from gdngen.ir.graph import CHANNELS, TOKENS, Ref
from gdngen.ir.text import comment
from gdngen.passes.plan import Plan
from gdngen.passes.rewrite import factors
from gdngen.passes.tile import read_order

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
    """Of pairs the sum over the earlier tokens for each later one (``late``), or the reverse; without its own decay."""

    matrix: Factors
    tile: Factors
    late: bool
    dtype: str


@dataclass(frozen=True)
class Loop:
    """The lines of one loop over block lengths: up to 16 tokens, or ``wide``; the gate in blocks of 16 tokens."""

    gate: str
    wide: bool
    lines: list[str] = field(default_factory=list)
    known: dict[str, str] = field(default_factory=dict)
    # what reads a part directly behind it: variable, sign, text in which {} stands for the part
    uses: dict[Part, list[tuple[str, str, str]]] = field(default_factory=dict)
    last: list[str] = field(default_factory=list)
    anew: set[str] = field(default_factory=set)  # variables that start anew at every level

    @property
    def size(self) -> str:
        return "C" if self.wide else "16"

    def levels(self, plan: Plan) -> tuple[int, int | str]:
        """First level and end: blocks of 2 << level tokens."""
        if not self.wide:
            return 0, 4
        return 4, plan.chunk.bit_length() - 1 if plan.is_fixed else "4 + (C > 16) + (C > 32) + (C > 64)"

    def value(self, text: str, name: str = "") -> str:
        """The name of a helper value, which is computed once."""
        if text not in self.known:
            self.known[text] = name or f"b_at{len(self.known)}"
            self.lines.append(f"{self.known[text]} = {text}")
        return self.known[text]

    def decay(self) -> str:
        return self.value(f"decay_to_middle({self.gate}, level, {self.wide}, C, PRECISION)", "b_decay")

    def decay_turned(self) -> str:
        return self.value(f"decay_to_middle_turned({self.gate}, level, {self.wide}, C, PRECISION)", "b_decay_turned")

    def meeting(self, late: bool) -> str:
        """Which pairs meet, the later token along the rows or along the columns."""
        return self.value(f"meeting(level, {late}, {self.size})", "m_late" if late else "m_early")


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
        if not self.graph.has_decay(i) or i not in waiting:
            return ()
        members: list[int] = []
        for value in waiting:
            if self.graph.has_decay(value) and self._key(value) == self._key(i):
                if not any(self._feeds(member, (value,)) for member in members):
                    members.append(value)
        return *members, *(value for value in waiting if self._is_sum_of(value, members))

    def _key(self, i: int) -> tuple[int, bool]:
        """Gate, and whether channels are summed: what products of one group have in common."""
        if self.graph.kind(i) == "crossing":
            return self.graph.nodes[i].args[3].value, False
        found = self.graph.decayed(i)
        return found.gate, found.is_gram

    def _feeds(self, value: int, group: tuple[int, ...]) -> bool:
        return any(value in self._behind[member] for member in group)

    @cached_property
    def _behind(self) -> list[set[int]]:
        """Of each value all that it is computed from."""
        return [nx.ancestors(self.graph.dataflow, i) for i in range(len(self.graph.nodes))]

    def _is_sum_of(self, i: int, members: list[int]) -> bool:
        """An add of crossings that nothing else reads: one running sum serves all of them."""
        terms = {ref.value for ref in self.graph.nodes[i].args}
        crossings = {member for member in members if self.graph.kind(member) == "crossing"}
        if self.graph.nodes[i].op != "add" or not terms <= crossings:
            return False
        return all(list(self.graph.dataflow.successors(t)) == [i] and t not in self.ends for t in terms)

    # ---------------------------------------------------------------------------------------- factors

    def _expanded(self, ref: Ref) -> tuple[list[Ref], float]:
        """A nested elementwise product as its factors and a number, where they may be read in either order."""
        found, coef = factors(self.graph, ref)
        free = all(len(f.axes) < 2 or self.graph[f].op in ("input", "decay") or self._is_mask(f) for f in found)
        return (found, coef) if free else ([ref], 1.0)

    def _is_mask(self, ref: Ref, kinds: tuple[str, ...] = ("causal", "strict")) -> bool:
        """A mask of pairs, which the blocks obey anyway."""
        return self.graph[ref].op == "tri" and self.graph[ref].attrs[0] in kinds

    @cached_property
    def absorbed(self) -> set[int]:
        """Elementwise products that only products with decays or an inverse read, which take their factors."""
        graph, found = self.graph, set[int]()
        products = filter(graph.has_decay, range(len(graph.nodes)))
        whole_values = {self._key(i)[0] for i in products} | {ref.value for ref in graph.roots()}
        for i in reversed(range(len(graph.nodes))):
            readers = list(self.graph.dataflow.successors(i))
            taken = all(self.graph.has_decay(reader) or reader in found for reader in readers)
            whole = Ref(i, self.graph.nodes[i].axes)
            gated = any(graph[factor].op == "decay" for factor in factors(graph, whole)[0])
            inverted = gated and all(graph.kind(reader) == "uli" for reader in readers)
            if readers and i not in whole_values and (inverted or (taken and self._expanded(whole) != ([whole], 1.0))):
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
        every, coef = self._expanded(matrix)
        if any(self._is_mask(f) and f.axes != "ij" for f in every):
            raise PlanError(f"codegen: {self.names[i]} is masked against the direction of its decay")
        strict = any(self._is_mask(f, ("strict",)) for f in every)
        unmasked = [f for f in every if not self._is_mask(f)]
        own = [f for f in unmasked if {"i", "j"} <= set(f.axes)]
        rows, columns = ([f for f in unmasked if f not in own and axis in f.axes] for axis in "ij")
        scalars = [f for f in unmasked if not set(f.axes) & set(TOKENS)]
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
        nodes = self.graph.nodes
        gate, is_gram = self._key(members[0])
        read = self.absorbed.intersection(set().union(*(self._behind[member] for member in members)))
        self.body += [f"# {comment(self.graph, i)}" for i in sorted(read | set(members))]
        totals = {ref.value: i for i in members if nodes[i].op == "add" for ref in nodes[i].args}
        blocks, after = self._blocks(Ref(gate, nodes[gate].axes)), list[str]()
        loops = [Loop(blocks, wide) for wide in (False, True) if self.plan.chunk > 16 or not wide]
        for i in members:
            if is_gram:
                after += self._gram(i, loops)
            elif self.graph.kind(i) == "decayed":
                after += self._sum(i, loops)
            elif nodes[i].op == "add":
                terms = zip(nodes[i].attrs, nodes[i].args, strict=True)
                after += self._crossings(i, [(float(coef), ref.value) for coef, ref in terms], loops)
            elif i not in totals:
                after += self._crossings(i, [(1.0, i)], loops)
        for loop in loops:
            begun: set[str] = set()
            for part, uses in loop.uses.items():
                name = self._part(part, loop)
                for variable, sign, text in uses:
                    starts = variable in loop.anew - begun
                    assign = f"{variable} = {sign.strip('+')}" if starts else f"{variable} {sign}= "
                    loop.lines.append(assign + text.format(name))
                    begun.add(variable)
            self.put(tiles("loops").over_levels(loop.lines + loop.last, *loop.levels(self.plan)))
        self.body += after

    def _sum(self, i: int, loops: list[Loop]) -> list[str]:
        """A decayed sum; the statements behind the loops are returned."""
        pairs, out, later = self._pairs(i), f"b_{self.names[i]}", self.graph.decayed(i).later
        tile, outer = (pairs.late, pairs.early) if later else (pairs.early, pairs.late)
        part, channel = Part(pairs.matrix, tile, not later, self._dtype(i)), _channel(tile)
        self._begin(f"{out}_16", channel)
        for loop in loops:
            loop.uses.setdefault(part, []).append((f"{out}_16", "+", f"{loop.decay()} * {{}}"))
        after = [f"{out} = tl.reshape({out}_16, [C, {EXTENTS[channel]}])"]
        after += [] if pairs.strict else [f"{out} += {self._own_term(part)}"]
        rest = tuple(ref.renamed({"j": "i"}) for ref in outer) + pairs.scalars
        if rest or pairs.coef != 1.0:
            after.append(f"{out} *= {self.product_text(rest, 'i' + channel, pairs.coef)}")
        return after

    def _own_term(self, part: Part) -> str:
        """What a token adds to its own sum."""
        same = f"tl.where(o_c[:, None] == o_c[None, :], {self.product_text(part.matrix, 'ij')}, 0.0)"
        own = self._ahead(f"tl.sum({same}, 1)")
        return f"{own}[:, None] * {self.product_text(part.tile, ('j' if part.late else 'i') + _channel(part.tile))}"

    def _crossings(self, total: int, terms: list[tuple[float, int]], loops: list[Loop]) -> list[str]:
        """The gradient of a log decay.  A pair that meets at a level crosses the tokens up to i of the second half and
        those after j of the first: running sums inside the halves, in which every term holds the token's own decay."""
        out, dtypes = f"b_{self.names[total]}", {self._dtype(i) for _, i in terms}
        dtype = max(dtypes)  # of two fp32
        channel = self.graph.nodes[total].axes[-1]
        self._begin(f"{out}_16", channel)
        for loop in loops:
            loop.anew.add(f"{out}_now")
            for coef, i in terms:
                pairs = self._pairs(i)
                for late, own, other in ((True, pairs.late, pairs.early), (False, pairs.early, pairs.late)):
                    part, number = Part(pairs.matrix, other, late, self._dtype(i)), coef * pairs.coef
                    text = self._in_blocks("{}", own + pairs.scalars, abs(number))
                    loop.uses.setdefault(part, []).append((f"{out}_now", "-" if number < 0 else "+", text))
            now = f"{loop.decay()} * {out}_now"
            loop.last.append(f"{out}_16 += running_sum({now}, level, {loop.wide}, C, {dtype}, PRECISION)")
        return [f"{out} = tl.reshape({out}_16, [C, {EXTENTS[channel]}])"]

    def _gram(self, i: int, loops: list[Loop]) -> list[str]:
        """A sum over channels; the statements behind the loops are returned."""
        found, node, out = self.graph.decayed(i), self.graph.nodes[i], f"b_{self.names[i]}"
        late, dtype, channel = self.order(i) == found.axes, self._dtype(i), node.summed
        refs = [ref.renamed({axis: "i"}) for ref, axis in zip((found.first, found.second), found.axes, strict=True)]
        (rows, a), (columns, b) = (self._expanded(ref) for ref in (refs if late else refs[::-1]))
        accumulated = self.is_accumulated(i)
        before = self.before_loop if accumulated else self.body
        behind = [f"{out} = on_diagonal({out}_16, C)"]
        for loop in loops:
            name, shape = f"{out}_{'wide' if loop.wide else '16'}", f"[C // 16, 16, {loop.size}]"
            self.put(tiles("products").elementwise(name, f"tl.zeros({shape}, dtype=tl.float32)"), before)
            one = loop.value(f"({self._in_blocks(loop.decay(), _sorted(rows))}).to({dtype})")
            two = loop.value(f"({self._turned(loop, _sorted(columns))}).to({dtype})")
            met = f"tl.broadcast_to({loop.meeting(late)}[None, :, :], {shape})"
            if loop.wide:
                two = loop.value(f"tl.broadcast_to({two}[None, :, :], [C // 16, {EXTENTS[channel]}, C])")
                met = f"tl.reshape({loop.meeting(late)}, {shape})"
                behind.append(f"{out} += tl.reshape({name}, [C, C])")
            product = loop.value(f"tl.dot({one}, {two}, input_precision=PRECISION)")
            loop.lines.append(f"{name} += tl.where({loop.value(met)}, {product}, 0.0)")
        if accumulated:
            self.put(tiles("products").elementwise(f"{out}_own", "tl.zeros([C], dtype=tl.float32)"), before)
        own = f"tl.sum({self.product_text(_sorted(rows + columns), 'i' + channel)}, 1)"
        self.put(f"{out}_own {'+' * accumulated}= {own}")
        behind.append(f"{out} += tl.where(o_c[:, None] == o_c[None, :], {out}_own[:, None], 0.0)")
        coef = a * b * float(node.attrs[0])
        behind += [] if coef == 1.0 else [f"{out} *= {coef!r}"]
        if accumulated:  # whole behind the loop over slices or tiles
            self.behind[i] = behind
        return [] if accumulated else behind

    def _part(self, part: Part, loop: Loop) -> str:
        """A part at one level, by its name: products share it."""
        matrix = self._operand_text(part.matrix, "ij", part.dtype)
        if not loop.wide:
            name = f"b_{self.names[part.matrix[0].value]}_16" if len(part.matrix) == 1 else ""
            matrix = self._ahead(f"diagonal_blocks({matrix}, C)", name)
        met = f"{loop.meeting(True)}{'' if loop.wide else '[None, :, :]'}"
        met = loop.value(f"tl.where({met}, {matrix}, 0.0).to({part.dtype})")
        if not part.late:
            met = f"tl.trans({met})" if loop.wide else f"tl.trans({met}, (0, 2, 1))"
        if loop.wide:
            met = f"tl.reshape({met}, [C // 16, 16, C])"
        decay = loop.decay()
        tile = loop.value(f"({self._in_blocks(decay, part.tile)}).to({part.dtype})")
        return loop.value(f"block_product({met}, {tile}, C, PRECISION)")

    def _operand_text(self, refs: Factors, order: str, dtype: str) -> str:
        """Factors as one tile, in the operand dtype as they are where nothing is computed."""
        if len(refs) == 1 and dtype == "DOT" and self.is_operand_dtype(refs[0].value):
            name, loaded = f"b_{self.names[refs[0].value]}", self.graph[refs[0]].op == "input"
            text = f"tl.trans({name})" if read_order(self.graph, refs[0], self.order(refs[0].value)) != order else name
            return self._ahead(f"out_of_product({text}, C)", f"{name}_out") if loaded else text
        return self.product_text(refs, order)

    # ---------------------------------------------------------------------------------------- tiles in blocks

    def _begin(self, name: str, channel: str) -> None:
        zeros = f"tl.zeros([C // 16, 16, {EXTENTS[channel]}], dtype=tl.float32)"
        self.put(tiles("products").elementwise(name, zeros))

    def _ahead(self, text: str, name: str = "") -> str:
        """The name of a value computed before the loops, once in a phase."""
        key = f"{len(self.parts)} {text}"
        if key not in self.ahead:
            taken = {own for other, own in self.ahead.items() if other.startswith(f"{len(self.parts)} ")}
            self.ahead[key] = name if name and name not in taken else f"b_ahead{len(self.ahead)}"
            self.body.append(f"{self.ahead[key]} = {text}")
        return self.ahead[key]

    def _blocks(self, ref: Ref) -> str:
        """A factor as [block,token,channel]."""
        name, axes = f"b_{self.names[ref.value]}", "".join("i" if axis in TOKENS else axis for axis in ref.axes)
        if not axes:
            return self.view(ref, "")
        if axes in CHANNELS:
            return f"{self.view(ref, axes)}[None, None, :]"
        if axes == "i":
            return self._ahead(f"tl.reshape({name}, [C // 16, 16, 1])", f"{name}_16")
        turned = read_order(self.graph, ref, self.order(ref.value)) != ref.axes
        text = f"tl.trans({name})" if turned else name
        blocks = self._ahead(f"tl.reshape({text}, [C // 16, 16, {EXTENTS[axes[1]]}])", f"{name}_16")
        return f"{blocks}.to(tl.float32)" if self.is_operand_dtype(ref.value) else blocks

    def _turned(self, loop: Loop, refs: Factors) -> str:
        """A product of factors and decays as [block,channel,token], or of all tokens as [channel,token]."""
        texts = [loop.decay_turned()]
        for ref in refs:
            if loop.wide:
                texts.append(self.product_text((ref,), _channel(refs) + "i"))
            elif len(ref.axes) == 2:
                texts.append(f"tl.trans({self._blocks(ref)}, (0, 2, 1))")
            elif ref.axes == "i":
                texts.append(f"tl.reshape(b_{self.names[ref.value]}, [C // 16, 1, 16])")
            else:
                texts.append(self._blocks(ref).replace("[None, None, :]", "[None, :, None]"))
        return " * ".join(texts)

    def _in_blocks(self, text: str, refs: Factors, coef: float = 1.0) -> str:
        """A product of tiles in blocks.  What varies with the level comes first: a product without it would be kept in
        registers across the loop."""
        return " * ".join([text, *(self._blocks(ref) for ref in refs), *([repr(coef)] if coef != 1.0 else [])])

    def _dtype(self, i: int) -> str:
        return "tl.float32" if self.names[i] in self.kernel.wide_dots else "DOT"


def _channel(refs: Factors) -> str:
    return next(axis for ref in refs for axis in ref.axes if axis in CHANNELS)


def _sorted(refs: Iterable[Ref]) -> Factors:
    """Factors in one order, so that equal products are spelled alike."""
    return tuple(sorted(refs, key=lambda ref: (-len(ref.axes), ref.value, ref.axes)))
