"""One kernel of a Plan as Triton text: its values in order, each placed by the macro of its op family."""

import hashlib
import itertools
import re
from dataclasses import dataclass
from functools import cached_property, partial

from gdngen.codegen.decayed import DecayedProducts
from gdngen.codegen.environment import WIDTH, folded, read_template, render, tiles
from gdngen.codegen.phases import AFTER, BEFORE, END, HEAD, LAST, SLICE, TILE, arranged
from gdngen.codegen.values import TILES
from gdngen.errors import PlanError
from gdngen.ir.graph import Node, Ref, is_virtual
from gdngen.ir.ops import OPS
from gdngen.ir.text import comment, signed, signed_sum
from gdngen.passes.plan import TASKS
from gdngen.passes.rewrite import factors
from gdngen.passes.segment import span
from gdngen.passes.tile import block_k, dot_operands, extents_of, is_turned, read_order

DEVICE_NAMES = sorted(re.findall(r"^(?:def )?(\w+)(?:\(| = )", read_template("package/device.py"), re.MULTILINE))


@dataclass
class KernelWriter(DecayedProducts):
    """Walks the kernel's graph and emits every value."""

    def __post_init__(self) -> None:
        inits = {carry.init.value for carry in self.graph.carries}
        for name, ref in self.graph.outputs:
            self.ends.setdefault(ref.value, []).append((name, ref))
        sizes = extents_of(self.kernel, self.plan.spec, self.plan.chunk)
        waiting: dict[str, list[int]] = {END: [], LAST: [], AFTER: []}
        for phase in arranged(self.kernel, sizes):
            self.body = []
            self.parts.append((phase.kind, self.body))
            if phase.kind == BEFORE:
                self._begin_totals()
            whole, waiting[phase.kind] = waiting.get(phase.kind, []), []
            for i in whole:
                self.body += self.behind.pop(i, [])
                self._leave(i)
            values = [i for i in phase.values if i not in inits | self.dissolved | self.absorbed]
            if self.kernel.loop == "chunks" and phase.kind != TILE:
                values = self._early(values)
            for batch in self.batches(tuple(values)):
                self._emit(batch)
                for i in batch:
                    summed = self.graph.nodes[i].summed  # a sum over a loop is whole behind the loop
                    channel, then = {TILE: ("v", END), SLICE: ("k", LAST)}.get(phase.kind, ("-", ""))
                    later = AFTER if "r" in summed else then if channel in summed else ""
                    waiting[later].append(i) if later else self._leave(i)
        self.body = self.part(HEAD)
        for carry in self.graph.carries:
            self._advance(carry.name, carry.out)

    def _early(self, values: list[int]) -> list[int]:
        """Loads ahead of what reads the loads before them, to be on their way while that is computed; not ahead of
        decays per channel, fp32 tiles that leave no registers for it.  (Loads of tiles of v Triton pipelines.)"""
        nodes = self.graph.nodes
        runs = [(load, list(run)) for load, run in itertools.groupby(values, lambda i: nodes[i].op == "input")]
        for n in range(len(runs) - 2):
            if runs[n + 1][0] and not any(nodes[i].op == "decay" and nodes[i].axes in ("ik", "iv") for i in runs[n][1]):
                runs[n], runs[n + 1] = runs[n + 1], runs[n]
        return [i for _, run in runs for i in run]

    def _leave(self, i: int) -> None:
        """Store a value and add it to totals at once: it need not stay in registers for that."""
        for name, ref in self.ends.pop(i, []):
            self._store(name, ref)
        for total, sign, text in self.terms.get(i, []):
            self.put(tiles("products").add_onto(total, sign, text))

    def _emit(self, batch: tuple[int, ...]) -> None:
        if self.graph.has_decay(batch[0]):
            self.emit_products(batch)
        else:
            self._emit_value(batch[0], self.graph.nodes[batch[0]])

    def _emit_value(self, i: int, node: Node) -> None:
        match node.op:
            case "input":
                self._input(i, node)
            case "carry_in":
                self._carry(i, node)
            case "const" | "tri":
                pass
            case "decay" if is_virtual(node.axes):
                pass  # part of the products that read it
            case _ if node.args[0].value not in self.dissolved or not self.is_accumulated(i):
                self.body.append(f"# {comment(self.graph, i)}")
                self._compute(i, node)

    def _compute(self, i: int, node: Node) -> None:
        out, order, products = f"b_{self.names[i]}", self.order(i), tiles("products")
        kind = self.graph.kind(i)
        if self.is_accumulated(i):
            self._accumulate(i, node)
        elif kind == "dot" and self.kernel.has_decayed_products:
            self.put(products.elementwise(out, str(products.synchronous(*self._dot_operands(i, node))).strip()))
        elif kind == "dot":
            self.put(products.dot(out, *self._dot_operands(i, node)))
        elif kind == "decay":
            self._decay(i, node)
        elif kind == "uli":
            self._inverse(out, node.args[0], order)
        elif kind == "cumsum":
            self.put(self._cumsum(out, self.view(node.args[0], order), str(node.attrs[0]), order))
        else:
            self.put(products.elementwise(out, self._expression(i, node, order)))

    def _inverse(self, out: str, matrix: Ref, order: str) -> None:
        """fp16 has no room for decays: those of a scalar gate are applied to the inverse, those of keys rule it out."""
        found, coef = factors(self.graph, matrix) if matrix.value in self.absorbed else ([matrix], 1.0)
        between, rest = (tuple(f for f in found if (self.graph[f].op == "decay") == own) for own in (True, False))
        if between:
            self.body.insert(-1, f"# {comment(self.graph, matrix.value)}")
        decays, gates = self.product_text(between, order) if between else "None", self.plan.spec.gate
        narrow = not {"key", "inverse=tf32"} & {*gates, *self.plan.pins} and (between != () or "scalar" not in gates)
        self.put(tiles("products").uli(out, self.product_text(rest, order, coef), decays, order == "ji", narrow))

    def _expression(self, i: int, node: Node, order: str) -> str:
        """What one statement computes without a matrix product."""
        kind = self.graph.kind(i)
        if kind == "product":
            return self.product_text(node.args, order, float(node.attrs[0]))
        if kind == "reduce":
            return self._reduced(node)
        views = [self.view(ref, order) for ref in node.args]
        if kind == "add":
            return signed_sum(zip(node.attrs, views, strict=True))
        if kind == "valid":
            return f"tl.where({self.row_mask(order)}, {views[0]}, 0.0)"
        if not OPS[kind].kernel:
            raise PlanError(f"codegen: no macro places {kind} ({self.names[i]})")
        return views[0] if kind == "cast" and not self.chunked else OPS[kind].kernel.format(*views)

    @staticmethod
    def _cumsum(out: str, x: str, direction: str, order: str) -> str:
        """A running sum; an exclusive one leaves the token out instead of subtracting it, which would cancel."""
        decays, reverse = tiles("decays"), direction.startswith("rev")
        if direction.endswith("incl"):
            return str(decays.cumsum(out, x, order.index("i"), reverse))
        relation = ">" if reverse else "<"
        before = f"o_c[None, :] {relation} o_c[:, None]"  # summed tokens along the columns
        if len(order) == 1 or order[0] != "i":
            before = f"o_c[:, None] {relation} o_c[None, :]"
        if len(order) == 1:
            return str(decays.exclusive(out, x, before))
        return str(decays.exclusive_tile(out, x, before, order[0] != "i"))

    def _decay(self, i: int, node: Node) -> None:
        gate, decays = f"b_{self.names[node.args[0].value]}", tiles("decays")
        out, over = f"b_{self.names[i]}", str(node.attrs[0])
        if len(self.order(node.args[0].value)) == 2:  # tokens first, then channels
            self.put(decays.of_channels(out, gate, over))
            return
        if over in ("ij", "i0", "1i"):
            self._once(f"{gate}_c", str(decays.cumulative(gate)))
        if over in ("1i", "10"):
            self._once(f"{gate}_tc", str(decays.total(gate)))
        text = {
            "ij": lambda: decays.between(out, gate, self.order(i) == "ji"),
            "i0": lambda: decays.from_start(out, gate),
            "1i": lambda: decays.to_end(out, gate),
            "10": lambda: decays.whole(out, gate),
        }[over]()
        self.put(text)

    @cached_property
    def dissolved(self) -> set[int]:
        """Sums that only a sum over value heads reads: each term goes to the total by itself and is not kept."""
        flow, nodes, ends = self.graph.dataflow, self.graph.nodes, {ref.value for _, ref in self.graph.outputs}
        readers = {i: list(flow.successors(i)) for i, node in enumerate(nodes) if node.op == "add" and i not in ends}
        return {i for i, found in readers.items() if len(found) == 1 and "r" in nodes[found[0]].summed}

    def _begin_totals(self) -> None:
        for total, node in enumerate(self.graph.nodes):
            if "r" in node.summed and node.args[0].value in self.dissolved:
                inner, name, order = self.graph[node.args[0]], f"b_{self.names[total]}", self.order(total)
                self.body += [f"# {comment(self.graph, i)}" for i in (total, node.args[0].value)]
                self.put(tiles("products").elementwise(name, self._zero(order)))
                for coef, ref in zip(inner.attrs, inner.args, strict=True):
                    self.terms.setdefault(ref.value, []).append((name, *signed(coef, self.view(ref, order))))

    def _accumulate(self, i: int, node: Node) -> None:
        out, products = f"b_{self.names[i]}", tiles("products")
        outside = self.part(BEFORE) if "r" in node.summed else self.before_loop
        self.put(products.elementwise(out, self._zero(self.order(i))), outside)
        if self.graph.kind(i) == "dot" and self.kernel.has_decayed_products:
            text = str(products.synchronous(*self._dot_operands(i, node))).strip()
            self.put(products.add_onto(out, "+", text))
        elif self.graph.kind(i) == "dot":
            self.put(products.dot_onto(out, *self._dot_operands(i, node)))
        else:
            grouped = self.graph.kind(i) == "group_sum"
            text = self.view(node.args[0], self.order(i)) if grouped else self._reduced(node)
            self.put(products.add_onto(out, "+", text))

    def _reduced(self, node: Node) -> str:
        """A product summed along one axis, or along both."""
        wide = max(node.args, key=lambda ref: (len(ref.axes), self.graph[ref].op != "tri"))
        inner = read_order(self.graph, wide, self.order(wide.value))
        text = self.product_text(node.args, inner, float(node.attrs[0]))
        # As a row, to a block of one number: Triton 3.6 fails on sm_100 where a vector made of a product is reduced.
        if len(inner) == 1 and self.chunked:
            text, inner = f"({text})[None, :]", "_" + inner
        axis = inner.index(node.summed) if len(node.summed) == 1 else None
        return str(tiles("products").reduced(text, axis)).strip()

    def _dot_operands(self, i: int, node: Node) -> list[str]:
        wide = self.names[i] in self.kernel.wide_dots
        return [self._operand(ref, wanted, wide) for ref, wanted in dot_operands(node, self.order(i))]

    def _operand(self, ref: Ref, wanted: str, wide: bool) -> str:
        """A tile in the operand dtype, in fp32 for a wide product; turned where its register order is the other one."""
        if self.graph[ref].op == "tri":
            return self.view(ref, wanted) + ("" if wide else ".to(DOT)")
        own = self.order(ref.value)
        turned = is_turned(self.graph, ref, own, wanted)
        own = read_order(self.graph, ref, own)
        narrow = f"b_{self.names[ref.value]}" + ("" if self.is_operand_dtype(ref.value) else ".to(DOT)")
        text = self.view(ref, own) if wide else narrow
        return f"tl.trans({text})" if turned else text

    # ---------------------------------------------------------------------------------------- the whole text

    def tensor_parameters(self) -> list[str]:
        """Tensor arguments in order: inputs, stored values, outputs, finals."""
        inputs = [n for n in self.graph.inputs if n not in self.graph.scalars and n not in self._stored_inputs()]
        stored = [*self._stored_inputs(), *self.kernel.stores]
        outputs = [name for name, _ in self.graph.outputs if name not in self.kernel.stores]
        finals = [carry.final for carry in self.finals] + (["maps"] if self.kernel.is_segmented else [])
        return inputs + stored + outputs + finals

    def _stored_inputs(self) -> list[str]:
        return [name for name, i in self.graph.inputs.items() if self.loaded(i) is not None]

    def stride_parameters(self) -> dict[str, list[str]]:
        """Per-token input -> its stride arguments (batch, token, head, and channel where it may not be 1)."""
        found = {}
        for name, i in self.graph.inputs.items():
            node = self.graph.nodes[i]
            if "n" in node.grid and self.loaded(i) is None:
                channel = self.has_channel(node) and name not in TILES
                found[name] = [f"{name}_sb", f"{name}_st", f"{name}_sh"] + ([f"{name}_sc"] if channel else [])
        return found

    def is_constant(self, stride: str) -> bool:
        """Token strides are compiled into chunk kernels: rows of a tile then differ by constants, not by registers."""
        return self.chunked and stride.endswith("_st")

    def unspecialized(self) -> list[str]:
        """Arguments that vary with length, batch or offsets: what is compiled for one value has to serve every other.

        Triton else compiles anew for a 1, for a multiple of 16 and for an aligned address.  Wide loads need those of
        tiles: their addresses and head strides are multiples of 16 at every length where their channels are."""
        found: list[str] = []
        for name, (batch, token, head, *_) in self.stride_parameters().items():
            node = self.graph.nodes[self.graph.inputs[name]]
            width = {"k": self.plan.spec.key_dim, "v": self.plan.spec.value_dim}.get(node.axes[-1:], 0)
            if width == 0:
                found += [name] + ([] if self.is_constant(token) else [token])
            found += [batch] + ([] if width and width % 16 == 0 else [head])
        return [f'"{name}"' for name in [*found, "cu_seqlens", "T", "N"]]

    def _is_long(self) -> bool:
        return len(", ".join(self.unspecialized())) > WIDTH - len("    do_not_specialize=[]")

    def constexpr_parameters(self) -> list[str]:
        lines = [line for _, part in self.parts for line in part]
        tuned = ["BV"] if self._uses("v") else []
        dtypes = ["DOT"] if any("DOT" in line for line in lines) else []
        precision = ["PRECISION"] if any("PRECISION" in line for line in lines) else []
        row = ["ROW"] if self.rows_of() else []
        scan = ["STAGES"] if self.kernel.loop == "scan" else []
        length = ["C"] if self.takes_chunk else []
        return [*length, "R", *tuned, *dtypes, *precision, *row, *scan] + (["PASS"] if self.kernel.is_segmented else [])

    @property
    def takes_chunk(self) -> bool:
        """Whether the chunk length is an argument: it differs by target and dtype."""
        return bool(self.operator.chunks)

    def rows_of(self) -> list[str]:
        """Inputs with channels whose token strides are not compiled in: only what divides all of them is."""
        nodes = {name: self.graph.nodes[i] for name, i in self.graph.inputs.items()}
        return [] if self.chunked else [name for name in self.stride_parameters() if self.has_channel(nodes[name])]

    def _uses(self, channel: str) -> bool:
        return any(channel in node.axes or channel in node.summed for node in self.graph.nodes)

    def _index_setup(self) -> tuple[list[str], dict[str, list[str]]]:
        """Indices and masks of tokens and channels; apart, by channel, those of a loop over tiles or slices."""
        lines = ["o_c = tl.arange(0, C)"] if self.chunked else []
        loops: dict[str, list[str]] = {"k": [], "v": []}
        for channel, size in (("k", "K"), ("v", "V")):
            if self._uses(channel):
                looped = self.is_looped(channel)
                start = f"i_{channel} * B{size} + " if looped or (channel == "v" and self.kernel.split_v) else ""
                found = [f"o_{channel} = {start}tl.arange(0, B{size})"]
                if channel == "v" and self.kernel.is_segmented:
                    found.append("o_map = i_tile * BV + tl.arange(0, BV)")
                found += [f"m_{channel} = o_{channel} < {size}"] if self.masks(channel) else []
                (loops[channel] if looped else lines).extend(found)
        return lines, loops

    def text(self) -> str:
        """The file of this kernel."""
        indices, of_loops = self._index_setup()
        body = self._nested(of_loops)
        rows = self._rows_of_chunk(body) if self.chunked else []
        rest = rows + body + self.setup + self.finish
        setup = [line for line in indices if self._mentions(line.split(" ")[0], rest)] + self.setup
        parameters = [f"{name}," for name in [*self.tensor_parameters(), "cu_seqlens", *self.graph.scalars]]
        strides = [stride for strides in self.stride_parameters().values() for stride in strides]
        kinds = {"_st": ": tl.constexpr" if self.chunked else "", "_sb": ": tl.int64"}
        parameters += [f"{name}{kinds.get(name[-3:], '')}," for name in strides]
        parameters += ["T,", "N,", "HV: tl.constexpr,"]
        parameters += [f"{name}: tl.constexpr," for name in self.constexpr_parameters()]
        own: dict[str, object] = {"finish": self.finish}
        if self.kernel.loop == "chunks":
            own = {"by_group": self.kernel.is_grouped}
        elif self.kernel.loop == "scan":
            own |= {"reverse": self.kernel.is_reverse, "slotted": self._mentions("i_slot", body)}
            own |= {"segmented": self.kernel.is_segmented}
        fill = partial(
            render,
            f"skeletons/{self.kernel.loop}.py",
            name=self.kernel.name,
            unspecialized="VARYING" if self._is_long() else f"[{', '.join(self.unspecialized())}]",
            parameters=parameters,
            split_v=self.kernel.split_v,
            grouped=self._mentions("i_h", body + setup),
            setup=setup,
            body=body,
            **own,
            **({"rows_of_chunk": rows} if self.chunked else {}),
        )
        K, V = self.plan.spec.key_dim, self.plan.spec.value_dim
        sizes = {} if self.takes_chunk else {"C": self.plan.chunk}
        sizes |= {"SPAN": span(self.plan), "K": K, "V": V, "BK": block_k(self.kernel, K)}
        used = fill(head=[]).splitlines()
        own_sizes = [f"{name}: tl.constexpr = {size}" for name, size in sizes.items() if self._mentions(name, used)]
        kernel_text = fill(head=[f'"""{TASKS[self.kernel.name]}"""', *own_sizes])
        return f"{self._header(kernel_text)}\n\n{kernel_text}"

    def _nested(self, indices: dict[str, list[str]]) -> list[str]:
        """The phases as one text, loops around the inner ones where there are any."""
        loops = tiles("loops")
        lines: dict[str, list[str]] = {BEFORE: [], HEAD: [], AFTER: []}
        for kind, part in self.parts:
            if kind == TILE:
                part = str(loops.over_values(indices["v"] + part)).rstrip("\n").split("\n")
            elif kind == SLICE:
                own = indices["k"] if self._mentions("[om]_k", part) else []
                ahead = (self.masks("k"), self.taken, self.fetched)
                part = str(loops.over_keys(own, *ahead, part)).rstrip("\n").split("\n")
            lines[HEAD if kind in (TILE, END, SLICE, LAST) else kind] += part
        heads = lines[HEAD]
        if self.kernel.is_grouped:
            heads = str(loops.over_heads(heads)).rstrip("\n").split("\n")
        return lines[BEFORE] + heads + lines[AFTER]

    @staticmethod
    def _mentions(name: str, lines: list[str]) -> bool:
        return re.search(rf"\b{name}\b", "\n".join(lines)) is not None

    def _rows_of_chunk(self, body: list[str]) -> list[str]:
        """First row of the chunk, masks of its rows inside the sequence and of those to write, where they are read."""
        inside, written = (self._mentions(name, body) for name in ("m_i", "m_o"))
        lines = ["start = i_t * C"] if inside or written or self._mentions("start", body) else []
        lines += ["m_i = o_c < tl.minimum(length - start, C).to(tl.int32)"] if inside else []
        return lines + (["m_o = o_c < tl.minimum(rows - start, C).to(tl.int32)"] if written else [])

    def _header(self, kernel_text: str) -> str:
        helpers = [name for name in DEVICE_NAMES if self._mentions(name, [kernel_text])]
        spec = self.plan.spec
        return render(
            "skeletons/header.py",
            kernel=self.kernel.name,
            package=spec.name,
            spec=folded("Spec: ", str(spec)),
            plan=f"cut {self.operator.cut}, target {self.plan.target}",
            digest=hashlib.sha256(kernel_text.encode()).hexdigest()[:16],
            helpers=helpers,
            varying=self.unspecialized() if self._is_long() else [],
        )
