"""Loads and stores: per-token inputs, parameters, what kernels hand to each other, states, outputs."""

import re
from functools import cached_property

from gdngen.codegen.environment import tiles
from gdngen.codegen.phases import SLICE
from gdngen.codegen.values import EXTENTS, SIZES, TILES, Values
from gdngen.ir.graph import CHANNELS, Carry, Node, Ref
from gdngen.passes.plan import Stored
from gdngen.passes.segment import is_write
from gdngen.passes.tile import read_order


class Memory(Values):
    """Adds the statements that move tiles between memory and registers."""

    def _input(self, i: int, node: Node) -> None:
        name = self.names[i]
        stored = self.loaded(i)
        if stored is not None:
            self._load_stored(i, stored)
        elif "n" in node.grid:
            self._load_tokens(i, node)
        elif name not in self.graph.scalars:
            self._load_parameter(name, node)
        if self.kernel.is_segmented and is_write(node):
            left_out = [f"b_{name} = tl.where(is_w, b_{name}, 0.0)"]
            self.put(tiles("memory").under('PASS == "maps"', left_out))

    def _load_tokens(self, i: int, node: Node) -> None:
        """A per-token input: rows past the end read as 0."""
        name, order = self.names[i], self.order(i)
        head = "i_hv" if "r" in node.grid else "i_h"
        if name in self.described:
            place = f"i_b, first + start, {head}, {self._first(node.axes[1])}"
            shape = f"m_i, C, {EXTENTS[node.axes[1]]}, {SIZES[node.axes[1]]}, cu_seqlens is not None"
            text = f"load_tokens({name}, {place}, {name}_sb, {name}_st, {name}_sh, {shape}).to(DOT)"
            self._put_tile(name, text, node.axes, order)
            return
        batch = f"i_b * {name}_sb"
        if self.has_channel(node):
            batch = f"batch_start(i_b, {name}_sb, {f'{name}_st' if self.chunked else 'ROW'})"
        base = f"{name} + {batch} + first * {name}_st + {head} * {name}_sh"
        self._base(node, f"p_{name} = {base}")
        if self.chunked:
            pointer = f"p_{name} + start * {name}_st + {self.offsets(order, self.token_strides(name, node))}"
        else:
            tail = f" + {self.offsets(order, self.token_strides(name, node))}" if order else ""
            pointer = f"p_{name} + o_i * {name}_st{tail}"
        mask = self.row_mask(order)
        dtype = "tl.float32" if not self.is_operand_dtype(i) else "DOT" if self.chunked else ""
        self._load(name, pointer, mask, dtype)

    def _load(self, name: str, pointer: str, mask: str, dtype: str) -> None:
        """A tile; in a loop over slices of k that of the next slice, while this one is worked on."""
        if self.parts[-1][0] != SLICE:
            self.put(tiles("memory").load(f"b_{name}", pointer, mask, dtype))
            return
        pointer, mask = (re.sub(r"\b([om])_k\b", r"\1_next", text) for text in (pointer, mask))
        self.put(tiles("memory").load(f"b_{name}_next", pointer, mask, ""), self.fetched)
        self.taken.append(f"b_{name} = b_{name}_next" + (f".to({dtype})" if dtype else ""))

    def _base(self, node: Node, line: str) -> None:
        if line not in self.bases(node):  # a value of two loops has one base address
            self.bases(node).append(line)

    @staticmethod
    def has_channel(node: Node) -> bool:
        return any(axis in CHANNELS for axis in node.axes)

    def token_strides(self, name: str, node: Node) -> dict[str, str]:
        channel = "1" if name in TILES else f"{name}_sc"
        return {"i": f"{name}_st", "k": channel, "v": channel}

    def _load_parameter(self, name: str, node: Node) -> None:
        """A per-head parameter; dt_bias may be absent."""
        width = {"k": "K", "v": "V"}.get(node.axes, "")
        pointer = f"{name} + i_hv * {width} + o_{node.axes}" if width else f"{name} + i_hv"
        mask, memory = self.mask(node.axes), tiles("memory")
        where = self.body if self.is_looped(node.axes) else self.bases(node)
        if name == "dt_bias":
            self.put(memory.load_if_given(f"b_{name}", name, pointer, mask, self._zero(node.axes)), where)
        else:
            self.put(memory.load(f"b_{name}", pointer, mask, "tl.float32"), where)

    def _tile_base(self, stored: Stored) -> str:
        sizes = [SIZES[axis] for axis in stored.axes]
        size = f" * ({' * '.join(sizes)})" if len(sizes) > 1 else f" * {sizes[0]}" if sizes else ""
        return f"({self._tile_number(stored)}){size}" if size else self._tile_number(stored)

    def _tile_number(self, stored: Stored) -> str:
        slot = "(i_slot + i_t)" if self.kernel.loop == "scan" else "i_slot"
        return f"{slot} * HV + i_hv" if stored.heads == "value" else f"{slot} * (HV // R) + i_h"

    def _tile_pointer(self, stored: Stored, order: str) -> str:
        if not stored.axes:
            return f"p_{stored.name}"
        strides = {stored.axes[0]: SIZES[stored.axes[-1]], stored.axes[-1]: "1"}
        return f"p_{stored.name} + {self.offsets(order, strides)}"

    @cached_property
    def described(self) -> dict[str, list[str]]:
        """Tiles that a scan loads through tensor descriptors, where the GPU has them -> block extents: one instruction
        each, without registers for addresses.  Vectors it loads by pointers: the barriers would cost more."""
        found = {}
        for name, i in self.graph.inputs.items():
            axes, stored = self.graph.nodes[i].axes, self.loaded(i) is not None
            if self.kernel.loop == "scan" and len(axes) == 2 and (stored or name in TILES):
                found[name] = [EXTENTS[axis] for axis in axes]
        return found

    def _first(self, axis: str) -> str:
        """Where a program's tile starts along an axis."""
        return "i_v * BV" if axis == "v" and self.kernel.split_v else "0"

    def _put_tile(self, name: str, text: str, own: str, order: str) -> None:
        self.put(tiles("products").elementwise(f"b_{name}", text if own == order else f"tl.trans({text})"))

    def _load_described(self, i: int, stored: Stored) -> None:
        shape = [EXTENTS[axis] for axis in stored.axes] + [SIZES[axis] for axis in stored.axes]
        place = ", ".join([stored.name, self._tile_number(stored), *map(self._first, stored.axes), *shape])
        self._put_tile(stored.name, f"load_tile({place})", stored.axes, self.order(i))

    def _load_stored(self, i: int, stored: Stored) -> None:
        if stored.name in self.described:
            self._load_described(i, stored)
            return
        order = self.order(i)
        mask = self.mask(order, tokens="")
        where = self.before_loop if self.parts[-1][0] == SLICE else self.body
        self.put(f"p_{stored.name} = {stored.name} + {self._tile_base(stored)}", where)
        self._load(stored.name, self._tile_pointer(stored, order), mask, "")

    def _carry(self, i: int, node: Node) -> None:
        name, order = self.names[i], self.order(i)
        carry = next(c for c in self.graph.carries if c.name == name)
        init = self.names[carry.init.value]
        pointer = f"{init} + {self._state_offsets(order)}"
        mask = self.mask(order)
        self.put(tiles("memory").load_if_given(f"b_{name}", init, pointer, mask, self._zero(order)), self.setup)
        if self.kernel.is_segmented:
            self._map(name, order)
        if carry in self.finals:
            wanted = f"{carry.final} is not None"
            if self.kernel.is_segmented:
                wanted += ' and PASS != "maps"'
                self.put(tiles("loops").at_end_of_sequence(), self.finish)
            stored = self._stored(f"{carry.final} + {self._state_offsets(order)}", f"b_{name}", mask)
            self.put(tiles("memory").under(wanted, stored), self.finish)

    def _map(self, name: str, order: str) -> None:
        """The pass that finds maps: w starts as 0 and M as the unit matrix; both are stored after the last chunk."""
        columns, keys = (self._index(axis, order) for axis in "vk")
        unit = f"tl.where(o_map{columns} - tl.cdiv(V, BV) * BV == o_k{keys}, 1.0, 0.0)"
        pointer = f"maps + i_nh.to(tl.int64) * (tiles * BV * K) + (o_map{columns} * K + o_k{keys})"
        stored = self._stored(pointer, f"b_{name}", f"m_k{keys}" if self.masks("k") else "")
        self.put(tiles("memory").under('PASS == "maps"', [f"b_{name} = {unit}"]), self.setup)
        self.put(tiles("memory").under('PASS == "maps"', stored), self.finish)

    @property
    def finals(self) -> list[Carry]:
        """Carries whose last value leaves: not that of a scan that backward repeats."""
        return [c for c in self.graph.carries if c.reverse or not self.operator.is_backward]

    def _state_offsets(self, order: str) -> str:
        """A state tile in the caller's layout: [K, V], or [V, K] with state_v_first."""
        if len(order) == 1:
            return f"i_nh.to(tl.int64) * K + {self.offsets(order, {'k': '1'})}"
        strides = {"k": "1", "v": "K"} if self.plan.spec.state_v_first else {"k": "V", "v": "1"}
        return f"i_nh.to(tl.int64) * (K * V) + {self.offsets(order, strides)}"

    def _advance(self, name: str, out: Ref) -> None:
        own = read_order(self.graph, out, self.order(out.value))
        target = self.order(self.graph.carry_ids[name])
        text = self.view(out, target) if own == target else f"tl.trans({self.view(out, own)})"
        self.body += [f"# carried to the next {'chunk' if self.chunked else 'token'}", f"b_{name} = {text}"]

    def _store(self, name: str, ref: Ref) -> None:
        order = self.order(ref.value)
        if name in self.kernel.stores:
            self._store_tile(self.stored[name], ref, order)
            return
        if name in self.operator.totals:
            self._store_term(name, ref, order)
            return
        node = self.graph[ref]
        head, heads = ("i_hv", "HV") if "r" in node.grid else ("i_h", "(HV // R)")
        width = "".join({"k": " * K", "v": " * V"}.get(axis, "") for axis in node.axes)
        scan, value = self.kernel.loop == "scan", self.view(ref, order)
        if not scan:
            inside = "m_i" + (self._index("i", order) if len(order) > 1 and self.chunked else "")
            value = f"tl.where({inside}, {value}, 0.0)"
        row = f"({heads}{width})" if width or heads != "HV" else heads
        if self.chunked:
            pointer = f"p_{name} + start * {row} + {self.offsets(order, {'i': row, 'k': '1', 'v': '1'})}"
        else:
            pointer = f"p_{name} + o_i * {row}" + (f" + {self.offsets(order, {'k': '1', 'v': '1'})}" if order else "")
        base = f"p_{name} = {name} + ((i_b * T + first) * {heads} + {head}){width}"
        if not self.operator.is_backward:
            self._base(node, base)
        mask = self.mask(order, tokens="m_i" if scan else "m_o")
        self.body += self._if_given(name, base, self._stored(pointer, f"{value}.to({name}.dtype.element_ty)", mask))
        if scan:  # rows past the sequences in a loop of their own: masks of values are a tenth of the main one's work
            past = tiles("loops").past_sequences(self._stored(pointer, "0.0", self.mask(order, tokens="m_past")))
            self.finish[:0] = self._of_pass(str(past).splitlines())  # ahead of the state, which is the last segment's

    def _if_given(self, name: str, base: str, stores: list[str]) -> list[str]:
        """Stores of an output; of a gradient only where it is asked for."""
        if not self.operator.is_backward:
            return self._of_pass(stores)
        return str(tiles("memory").under(f"{name} is not None", [base, *stores])).splitlines()

    def _of_pass(self, stores: list[str]) -> list[str]:
        """Stores of tokens; a pass that only finds maps leaves them out."""
        return str(tiles("memory").under('PASS != "maps"', stores)).splitlines() if self.kernel.is_segmented else stores

    def _store_term(self, name: str, ref: Ref, order: str) -> None:
        """One chunk's term of a total, in a slot of its own."""
        width = {"k": "K", "v": "V"}.get(order, "")
        pointer = f"{name} + (i_slot * HV + i_hv)" + (f" * {width} + o_{order}" if width else " + tl.arange(0, 1)")
        stored = self._stored(pointer, self.view(ref, order), self.mask(order))
        self.put(tiles("memory").under(f"{name} is not None", stored))

    def _stored(self, pointer: str, value: str, mask: str) -> list[str]:
        return str(tiles("memory").store(pointer, value, mask)).splitlines()

    def _store_tile(self, stored: Stored, ref: Ref, order: str) -> None:
        self.put(f"p_{stored.name} = {stored.name} + {self._tile_base(stored)}")
        pointer, mask = self._tile_pointer(stored, order), self.mask(order, tokens="")
        value = f"{self.view(ref, order)}.to({stored.name}.dtype.element_ty)"
        if self.is_operand_dtype(ref.value):
            value = f"b_{self.names[ref.value]}"
        lines = self._stored(pointer, value, mask)
        if stored.heads == "group" and not self.kernel.is_grouped:  # the first head of a group stores for all
            lines = str(tiles("memory").under("i_hv % R == 0", lines)).splitlines()
        self.body += self._of_pass(lines)
