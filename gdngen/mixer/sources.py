"""Spec -> Source: every file of a member's package, name -> text."""

from pathlib import Path

from gdngen.codegen.environment import TEMPLATES, render
from gdngen.codegen.torch_version import StepWriter, as_tuple
from gdngen.ir.graph import Graph, Node, Ref
from gdngen.ir.text import value_names
from gdngen.mixer.emit import Emitter, KernelLines, RowEmitter, TokenEmitter
from gdngen.mixer.graphs import backward_graph, forward_graph, in_kernels
from gdngen.mixer.specs import Convolution, MixerSpec, RowNorm

RUNTIME = Path(__file__).parents[1] / "runtime"
# Steps whose loads are under way at once: so many are unrolled, or moves would wait for the loads.
FETCHED = 8
FETCHED_BACKWARD = 4
GATES = ("odds_against", "share", "softplus")
NUMBERS = {"eps": "call.number", "lower_bound": "call.number", "inverse_dim": "1.0 / D"}


def sources(spec: MixerSpec, name: str) -> dict[str, str]:
    """All Python files of the package, in sorted order: same Spec, same bytes."""
    made = _Tokens(spec, name) if isinstance(spec, Convolution) else _Rows(spec, name)
    files = {
        "__init__.py": render("mixer/__init__.py", name=name, spec=f"Spec: {spec}"),
        "spec.py": _spec_text(spec, name),
        **{f"{file}.py": (RUNTIME / f"{file}.py").read_text() for file in ("arguments", "compilers")},
        "dispatch.py": (TEMPLATES / "mixer/dispatch.py").read_text(),
        "machine.py": (TEMPLATES / "mixer/machine.py").read_text(),
        "registration.py": (TEMPLATES / "mixer/registration.py").read_text(),
        "kernels/__init__.py": '"""One Triton kernel per file."""\n',
    }
    if has_gates(made.forward):
        files["gates.py"] = (TEMPLATES / "mixer/gates.py").read_text()
    return dict(sorted((files | made.files()).items()))


def has_gates(graph: Graph) -> bool:
    return any(node.op in ("sigmoid", "softplus") for node in graph.nodes)


def gates_in(lines: KernelLines) -> str:
    """The device functions of gates.py that a kernel calls."""
    text = "\n".join(lines.setup + lines.body + lines.finish)
    return ", ".join(name for name in GATES if f"{name}(" in text)


def inputs_of(spec: MixerSpec) -> list[str]:
    """The tensors that a call of the member has, by the names of the operators' arguments."""
    if isinstance(spec, Convolution):
        return ["x", "weight", *(["bias"] * spec.bias), *(["residual"] * spec.residual), "h0"]
    graph = forward_graph(spec)
    return [name for name in graph.inputs if name not in graph.scalars]


def outputs_of(spec: MixerSpec) -> list[str]:
    own = [name for name, _ in forward_graph(spec).outputs]
    return [*own, "ht"] if isinstance(spec, Convolution) else own


def _spec_text(spec: MixerSpec, name: str) -> str:
    rows = ", ".join(f'"{key}": {_literal(value)}' for key, value in spec.model_dump().items())
    return render(
        "mixer/spec.py",
        name=_literal(name),
        spec="{" + rows + "}",
        inputs=as_tuple(inputs_of(spec)),
        outputs=as_tuple(outputs_of(spec)),
    )


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _loaded(emitter: Emitter) -> list[Node]:
    """The declared inputs that the kernel reads."""
    return [emitter.graph.nodes[i] for i in emitter.live if emitter.graph.nodes[i].op in ("input", "carry_in")]


def _target(names: list[str]) -> str:
    """Names to unpack to, or a tuple of them."""
    return ", ".join(names) if len(names) > 1 else f"({names[0]},)"


class _Reference(StepWriter):
    """Statements of the PyTorch version, with offsets as functions."""

    def right(self, node: Node) -> str:
        if node.op in ("lag", "ending"):
            return f"{node.op}({node.attrs[0]}, {', '.join(self.names[ref.value] for ref in node.args)})"
        return super().right(node)


class _Rows:
    """Files of a row-wise member."""

    def __init__(self, spec: MixerSpec, package: str) -> None:
        self.spec, self.package = spec, package
        self.forward, self.backward = forward_graph(spec), backward_graph(spec)

    def files(self) -> dict[str, str]:
        forward = self._kernel(in_kernels(self.forward), "forward")
        backward = self._kernel(in_kernels(self.backward), "backward")
        gradients = dict(self.backward.outputs)
        summed = [name for name, ref in gradients.items() if "i" not in self.backward[ref].axes]
        rows = [name for name in gradients if name not in summed]
        found = [f'"{name[1:]}": {name}' for name in rows] + [f'"{name[1:]}": {name}.sum(0)' for name in summed]
        launch = render(
            "mixer/launch_rows.py",
            package=self.package,
            label="norm" if isinstance(self.spec, RowNorm) else "gate",
            dtypes=self._dtypes("given"),
            outputs=_target([name for name, _ in self.forward.outputs]),
            forward_arguments=forward[1],
            backward_arguments=backward[1],
            found=", ".join(name for name, _ in self.forward.outputs),
            cotangents=_target([f"d{name}" for name, _ in self.forward.outputs]),
            row_gradients=rows,
            summed=summed,
            shared="cdiv, made, on_device, power_of_2, " + "processors, " * bool(summed) + "readable, start",
            gradients="{" + ", ".join(found) + "}",
        )
        return {
            "kernels/forward.py": forward[0],
            "kernels/backward.py": backward[0],
            "launch.py": launch,
            "reference.py": self._reference(),
        }

    def _dtypes(self, x: str) -> str:
        """Of the outputs: the sum is kept in the residual's."""
        return f"call.dtype or {x}.dtype" + (', call.inputs["residual"].dtype' if len(self.forward.outputs) > 1 else "")

    def _kernel(self, graph: Graph, name: str) -> tuple[str, list[tuple[str, str]]]:
        """The text of a kernel and its arguments as the launcher passes them."""
        emitter = RowEmitter(graph, [ref for _, ref in graph.outputs])
        lines = emitter.write()
        for output, ref in graph.outputs:
            emitter.store(output, ref)
        arguments: list[tuple[str, str]] = []
        for node in _loaded(emitter):
            own = str(node.attrs[0])
            local = own if own in ("do", "ds") else f'x["{own}"]'
            arguments.append((own, NUMBERS.get(own, local)))
            if node.axes == "iv":
                arguments.append((f"{own}_sr", f"{local}.stride(0)"))
        arguments += [(output, output) for output, _ in graph.outputs]
        text = render(
            "mixer/rows.py",
            kernel=name,
            package=self.package,
            spec=f"Spec: {self.spec}",
            gates=gates_in(lines),
            parameters=[name for name, _ in arguments],
            setup=lines.setup,
            body=lines.body,
            finish=lines.finish,
        )
        return text, arguments

    def _reference(self) -> str:
        writer, graph = _Reference(self.forward), self.forward
        return render(
            "mixer/reference_rows.py",
            package=self.package,
            parameters=", ".join(graph.inputs),
            names=as_tuple(list(graph.inputs)),
            results=_target([writer.names[ref.value] for _, ref in graph.outputs]),
            dtypes=self._dtypes("x"),
            lines=writer.lines(),
        )


class _Tokens:
    """Files of a convolution."""

    def __init__(self, spec: Convolution, package: str) -> None:
        self.spec, self.package = spec, package
        self.forward, self.backward = forward_graph(spec), backward_graph(spec)

    def files(self) -> dict[str, str]:
        forward, backward = self._forward(), self._backward()
        return {
            **{f"{file}.py": (TEMPLATES / f"mixer/{file}.py").read_text() for file in ("device", "in_place")},
            "kernels/forward.py": forward[0],
            "kernels/backward.py": backward[0],
            "kernels/final.py": self._static("final", columns=self.spec.columns),
            "kernels/update.py": self._update(),
            "launch.py": render(
                "mixer/launch_tokens.py",
                package=self.package,
                forward_arguments=forward[1],
                backward_arguments=backward[1],
            ),
            "reference.py": self._reference(),
        }

    def _static(self, template: str, /, **more: object) -> str:
        given: dict[str, object] = {"package": self.package, "spec": f"Spec: {self.spec}", **more}
        return render(f"mixer/{template}.py", **given)

    def _forward(self) -> tuple[str, list[tuple[str, str]]]:
        graph = in_kernels(self.forward)
        (output,) = graph.outputs
        emitter = TokenEmitter(graph, [output[1]], FETCHED)
        emitter.write()
        emitter.store(*output)
        return self._kernel(emitter, "forward", [("o", "o")])

    def _backward(self) -> tuple[str, list[tuple[str, str]]]:
        graph = in_kernels(self.backward)
        results = {name: ref for name, ref in graph.outputs if name != "dresidual"}
        emitter = TokenEmitter(graph, [*results.values(), *(carry.out for carry in graph.carries)], FETCHED_BACKWARD)
        emitter.write()
        for name, ref in results.items():
            lag = name[2:]
            place = f"(i_slot.to(tl.int64) * W + {lag}) * D" if name.startswith("dw") else "i_slot.to(tl.int64) * D"
            pointer = "dweight" if name.startswith("dw") else name
            emitter.store(name, ref, f"tl.store({pointer} + {place} + o_v, {{}}, mask=m_v)")
        emitter.gathered()
        if graph.carries:
            emitter.lines.finish.append("if dh0 is not None:")
        for carry in graph.carries:
            column = f"(i_s * D + o_v) * S + (S - {carry.name[2:]})"
            emitter.store("dh0", carry.out, f"    tl.store(dh0 + {column}, {{}}, mask=m_v & (i_t == 0))")
        outputs = [("dx", "dx"), ("dweight", "dweight"), *([("dbias", "dbias")] * self.spec.bias), ("dh0", "dh0")]
        return self._kernel(emitter, "backward", outputs)

    def _kernel(
        self, emitter: TokenEmitter, name: str, outputs: list[tuple[str, str]]
    ) -> tuple[str, list[tuple[str, str]]]:
        arguments: dict[str, str] = {}
        for node in _loaded(emitter):
            own = str(node.attrs[0])
            if "i" in node.axes:
                local = "do" if own == "do" else f'x["{own}"]'
                arguments |= {own: local, f"{own}_sb": f"{local}.stride(0)", f"{own}_st": f"{local}.stride(1)"}
            elif own.startswith("w"):
                arguments["weight"] = 'x["weight"]'
            elif own == "bias":
                arguments["bias"] = 'x["bias"]'
            else:
                local = "dht" if own.startswith("d") else "h0"
                value = "dht" if local == "dht" else 'x["h0"]'
                arguments[local] = value
                arguments |= {f"{local}_s{c}": f'strides({value})["h0_s{c}"]' for c in "nvw"}
        arguments |= dict(outputs)
        delay = emitter.lines.delay
        text = self._static(
            "tokens",
            kernel=name,
            gates=gates_in(emitter.lines),
            width=self.spec.width,
            columns=self.spec.columns,
            parameters=list(arguments),
            setup=emitter.lines.setup,
            body=emitter.lines.body,
            shift=emitter.lines.shift,
            finish=emitter.lines.finish,
            steps=f"tl.where(rows > 0, rows + {delay}, 0)" if delay else "rows",
            unroll=emitter.fetched,
        )
        return text, list(arguments.items())

    def _update(self) -> str:
        graph = in_kernels(self.forward)
        (output,) = graph.outputs
        emitter = TokenEmitter(graph, [output[1]])
        emitter.write()
        emitter.store(*output)
        lines = emitter.lines
        return self._static(
            "update",
            gates=gates_in(lines),
            width=self.spec.width,
            setup=lines.setup,
            body=lines.body,
            shift=lines.shift,
        )

    def _reference(self) -> str:
        graph, writer = self.forward, _Reference(self.forward)
        taps = [f"w{d}" for d in range(self.spec.width)]
        past = [carry.name for carry in graph.carries]
        more = [name for name in ("bias", "residual") if name in graph.inputs]
        spelled = {"bias": 'shared["bias"]', "residual": "residual"}
        results: list[Ref] = [graph.outputs[0][1], *(carry.out for carry in graph.carries)]
        return render(
            "mixer/reference_tokens.py",
            package=self.package,
            parameters=", ".join(["x", *taps, *past, *more]),
            results=", ".join(value_names(graph)[ref.value] for ref in results),
            lines=writer.lines(),
            columns=self.spec.columns,
            arguments=", ".join(["x", "*taps", f"*past[:{self.spec.columns}]", *(spelled[name] for name in more)]),
        )
