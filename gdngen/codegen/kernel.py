"""One kernel of a Plan as Triton text: its values in order, each placed by the macro of its op family."""

import hashlib
import re

from gdngen.codegen.environment import folded, render, tiles
from gdngen.codegen.memory import Memory
from gdngen.errors import PlanError
from gdngen.ir.graph import CHANNELS, Node, Ref
from gdngen.ir.text import comment
from gdngen.passes.plan import Kernel, Operator, Plan
from gdngen.passes.tile import block, dot_operands, read_order

UNARY_TEXT = {
    "exp": "tl.exp(tl.minimum({x}, SATURATION))",
    "sigmoid": "tl.sigmoid({x})",
    "sigmoid2": "2.0 * tl.sigmoid({x})",
    "softplus": "softplus({x})",
    "elu1": "elu1({x})",
    "rsqrt": "tl.rsqrt({x})",
    "reciprocal": "1.0 / {x}",
    "cast": "{x}.to(DOT)",
}
DEVICE_NAMES = (
    "SATURATION", "cumulative_gate", "decay_between", "decay_between_turned", "elu1", "find_sequence", "softplus",
    "total_gate", "unit_lower_inverse",
)  # fmt: skip


class KernelWriter(Memory):
    """Walks the kernel's graph and emits every value."""

    def emit(self) -> None:
        inits = {carry.init.value for carry in self.graph.carries}
        for i, node in enumerate(self.graph.nodes):
            if i in inits:
                continue
            self._emit_value(i, node)
            for name, ref in self.graph.outputs:
                if ref.value == i:
                    self._store(name, ref)  # at once: what is stored need not stay in registers
        for carry in self.graph.carries:
            self._advance(carry.name, carry.out)

    def _emit_value(self, i: int, node: Node) -> None:
        match node.op:
            case "input":
                self._input(i, node)
            case "carry_in":
                self._carry(i, node)
            case "const" | "tri":
                pass
            case _:
                self.body.append(f"# {comment(self.graph, i)}")
                self._compute(i, node)

    def _compute(self, i: int, node: Node) -> None:
        out, order, products = f"b_{self.names[i]}", self.order(i), tiles("products")
        kind = self.graph.kind(i)
        if kind == "dot":
            self._dot(i, node)
        elif kind == "product":
            self.put(products.elementwise(out, self.product_text(node.args, order, float(node.attrs[0]))))
        elif kind == "reduce":
            wide = max(node.args, key=lambda ref: len(ref.axes))
            inner = read_order(self.graph, wide, self.order(wide.value))
            axis = inner.index(node.summed)
            self.put(products.reduce(out, self.product_text(node.args, inner, float(node.attrs[0])), axis))
        elif kind == "add":
            self.put(products.elementwise(out, self.sum_text(node, order)))
        elif kind == "decay":
            self._decay(i, node)
        elif kind == "uli":
            self.put(products.uli(out, self.view(node.args[0], order), order == "ji"))
        elif kind == "clamp":
            value, low, high = (self.view(ref, order) for ref in node.args)
            self.put(products.elementwise(out, f"tl.minimum(tl.maximum({value}, {low}), {high})"))
        elif kind == "valid":
            self._valid(out, node, order)
        elif kind in UNARY_TEXT:
            text = "{x}" if kind == "cast" and not self.chunked else UNARY_TEXT[kind]
            self.put(products.elementwise(out, text.format(x=self.view(node.args[0], order))))
        else:
            raise PlanError(f"codegen: no macro places {kind} ({self.names[i]})")

    def _valid(self, out: str, node: Node, order: str) -> None:
        self.put(
            tiles("products").elementwise(
                out, f"tl.where({self.row_mask(order)}, {self.view(node.args[0], order)}, 0.0)"
            )
        )

    def _decay(self, i: int, node: Node) -> None:
        gate, decays = f"b_{self.names[node.args[0].value]}", tiles("decays")
        out, over = f"b_{self.names[i]}", node.attrs[0]
        if over in ("ij", "i0", "1i"):
            self._once(f"{gate}_c", str(decays.cumulative(gate)))
        if over in ("1i", "10"):
            self._once(f"{gate}_tc", str(decays.total(gate)))
        text = {
            "ij": lambda: decays.between(out, gate, self.order(i) == "ji"),
            "i0": lambda: decays.from_start(out, gate),
            "1i": lambda: decays.to_end(out, gate),
            "10": lambda: decays.whole(out, gate),
        }[str(over)]()
        self.put(text)

    def _dot(self, i: int, node: Node) -> None:
        first, second = dot_operands(node, self.order(i))
        wide = self.names[i] in self.kernel.wide_dots
        operands = [self._operand(ref, wanted, wide) for ref, wanted in (first, second)]
        self.put(tiles("products").dot(f"b_{self.names[i]}", *operands))

    def _operand(self, ref: Ref, wanted: str, wide: bool) -> str:
        """A tile in the operand dtype, in fp32 for a wide product; turned where its register order is the other one."""
        own = read_order(self.graph, ref, self.order(ref.value))
        narrow = f"b_{self.names[ref.value]}" + ("" if self.is_operand_dtype(ref.value) else ".to(DOT)")
        text = self.view(ref, own) if wide else narrow
        return f"tl.trans({text})" if own != wanted else text

    # ---------------------------------------------------------------------------------------- the whole text

    def tensor_parameters(self) -> list[str]:
        """Tensor arguments in order: inputs, stored values, outputs, finals."""
        inputs = [n for n in self.graph.inputs if n not in self.graph.scalars and n not in self._stored_inputs()]
        stored = [*self._stored_inputs(), *self.kernel.stores]
        outputs = [name for name, _ in self.graph.outputs if name not in self.kernel.stores]
        return inputs + stored + outputs + [carry.final for carry in self.graph.carries]

    def _stored_inputs(self) -> list[str]:
        return [name for name, i in self.graph.inputs.items() if self.loaded(i) is not None]

    def stride_parameters(self) -> dict[str, list[str]]:
        """Per-token input -> its stride arguments (batch, token, head, and channel where it may not be 1)."""
        found = {}
        for name, i in self.graph.inputs.items():
            node = self.graph.nodes[i]
            if "n" in node.grid and self.loaded(i) is None:
                channel = any(axis in CHANNELS for axis in node.axes) and name not in ("q", "k", "v")
                found[name] = [f"{name}_sb", f"{name}_st", f"{name}_sh"] + ([f"{name}_sc"] if channel else [])
        return found

    def is_constant(self, stride: str) -> bool:
        """Token strides are compiled into chunk kernels: rows of a tile then differ by constants, not by registers."""
        return self.chunked and stride.endswith("_st")

    def constexpr_parameters(self) -> list[str]:
        tuned = ["BV"] if self._uses("v") else []
        dtypes = ["DOT"] if any("DOT" in line for line in self.body) else []
        precision = ["PRECISION"] if any("PRECISION" in line for line in self.body) else []
        return ["R", *tuned, *dtypes, *precision] + (["STAGES"] if self.kernel.loop == "scan" else [])

    def _uses(self, channel: str) -> bool:
        return any(channel in node.axes or channel in node.summed for node in self.graph.nodes)

    def _index_setup(self) -> list[str]:
        lines = ["o_c = tl.arange(0, C)"] if self.chunked else []
        for channel, size in (("k", "K"), ("v", "V")):
            if self._uses(channel):
                start = "i_v * BV + " if channel == "v" and self.kernel.split_v else ""
                lines.append(f"o_{channel} = {start}tl.arange(0, B{size})")
                if self.masks(channel):
                    lines.append(f"m_{channel} = o_{channel} < {size}")
        return lines

    def text(self) -> str:
        """The file of this kernel."""
        self.emit()
        body, rest = self.body, self.body + self.setup + self.finish
        indices = [line for line in self._index_setup() if self._mentions(line.split(" ")[0], rest)]
        setup = indices + self.setup
        parameters = [f"{name}," for name in [*self.tensor_parameters(), "cu_seqlens", *self.graph.scalars]]
        strides = [stride for strides in self.stride_parameters().values() for stride in strides]
        parameters += [f"{name}: tl.constexpr," if self.is_constant(name) else f"{name}," for name in strides]
        parameters += ["T,", "N,", "HV: tl.constexpr,"]
        parameters += [f"{name}: tl.constexpr," for name in self.constexpr_parameters()]
        kernel_text = render(
            f"skeletons/{self.kernel.loop}.py",
            name=self.kernel.name,
            parameters=parameters,
            description=self._description(),
            split_v=self.kernel.split_v,
            grouped=self._mentions("i_h", body + setup),
            setup=setup,
            body=body,
            **({"slotted": self._mentions("i_slot", body)} if self.kernel.loop == "scan" else {}),
            **({} if self.kernel.loop == "chunks" else {"finish": self.finish}),
            **({"rows_of_chunk": self._rows_of_chunk()} if self.chunked else {}),
        )
        return f"{self._header(kernel_text)}\n\n{kernel_text}"

    @staticmethod
    def _mentions(name: str, lines: list[str]) -> bool:
        return re.search(rf"\b{name}\b", "\n".join(lines)) is not None

    def _rows_of_chunk(self) -> list[str]:
        """First row of the chunk and the mask of its rows inside the sequence, where anything reads them."""
        masked = self._mentions("m_i", self.body)
        lines = ["start = i_t * C"] if masked or self._mentions("start", self.body) else []
        return lines + (["m_i = o_c < tl.minimum(length - start, C).to(tl.int32)"] if masked else [])

    def _description(self) -> list[str]:
        tasks = {
            "prepare": "What does not depend on the state, chunk by chunk.",
            "scan": "The state from chunk to chunk, and what is read from it.",
            "output": "What is read from the stored states, chunk by chunk.",
            "recurrence": "The state from token to token, and what is read from it.",
        }
        return [f'"""{tasks[self.kernel.name]}"""']

    def _header(self, kernel_text: str) -> str:
        helpers = [name for name in DEVICE_NAMES if f"{name}(" in kernel_text or f"{name})" in kernel_text]
        spec = self.plan.spec
        constants = [f"C = tl.constexpr({self.plan.chunk})"] if self.chunked else []
        constants += [f"K = tl.constexpr({spec.key_dim})", f"V = tl.constexpr({spec.value_dim})"]
        constants += [f"BK = tl.constexpr({block(spec.key_dim)})"] if self._uses("k") else []
        return render(
            "skeletons/header.py",
            kernel=self.kernel.name,
            package=spec.name,
            spec=folded("Spec: ", str(spec)),
            plan=f"cut {self.operator.cut}, target {self.plan.target}",
            digest=hashlib.sha256(kernel_text.encode()).hexdigest()[:16],
            helpers=helpers,
            constants=constants,
        )


def kernel_text(plan: Plan, operator: Operator, kernel: Kernel) -> str:
    """The Python source of one kernel file."""
    return KernelWriter(plan, operator, kernel).text()
