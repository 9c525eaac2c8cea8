"""The host code of a package: allocation and launches, and the table of launch choices."""

from collections.abc import Collection, Mapping

import networkx as nx

from gdngen.codegen.environment import render
from gdngen.codegen.kernel import KernelWriter
from gdngen.codegen.torch_version import as_tuple
from gdngen.codegen.values import SIZES
from gdngen.ir.family import forward_graph
from gdngen.ir.graph import Carry
from gdngen.passes.plan import Kernel, Operator, OperatorName, Plan, Stored
from gdngen.passes.segment import span
from gdngen.passes.tile import block_k, narrowest
from gdngen.target import TARGETS

SCALARS = {"scale": "call.scale", "dt_min": "call.dt_limit[0]", "dt_max": "call.dt_limit[1]"}


Writers = Mapping[OperatorName, list[KernelWriter]]  # in launch order


def launch_text(plan: Plan, writers: Writers) -> str:
    """The source of launch.py."""
    forward = [_operator(plan, op, writers[op.name]) for op in plan.operators if not op.is_backward]
    backward = plan.operator("chunk_backward")
    kept = [stored for stored in backward.stored if stored.name in backward.saved] if backward else []
    gradients = [_backward(backward, writers[backward.name], plan.is_fixed)] if backward else []
    kernels = [kernel for operator in plan.operators for kernel in operator.kernels]
    segmented = any(kernel.is_segmented for kernel in kernels)
    kernel_names = sorted([kernel.name for kernel in kernels] + ["combine"] * segmented)
    return render("package/launch.py",
        package=plan.spec.name,
        kernel_names=kernel_names,
        operators=forward,
        kept=", ".join(stored.name for stored in kept),
        kept_shapes=[_made(stored, "torch.zeros") for stored in kept],
        kept_heads=sorted({"HV" if stored.heads == "value" else "H" for stored in kept}),
        backward=gradients,
        aside=any(aside for *_, aside in gradients),
        described=sorted({_maker(w, name) for own in writers.values() for w in own for name in w.described}),
        cdiv=any(kernel.split_v for kernel in kernels),
        slots=any(kernel.loop == "chunks" for kernel in kernels),
        chunked=plan.operator("chunk") is not None,
        chunk=plan.chunk,
        varying=not plan.is_fixed,
        names="choice" if plan.is_fixed else "choice, chunk_of",
        span=span(plan) if segmented else 0,
        key_dim=plan.spec.key_dim,
        value_dim=plan.spec.value_dim,
    )  # fmt: skip


def _operator(plan: Plan, operator: Operator, writers: list[KernelWriter]) -> tuple[object, ...]:
    launches = [line for writer in writers for line in _launch(writer)]
    carries = [carry for writer in writers for carry in writer.graph.carries]
    finals = [_final(plan, carry) for carry in carries]
    returned = ", ".join(carry.final for carry in carries)
    if len(finals) > 1:
        returned = f"({returned}) if call.output_final_state else None"
    backward = plan.operator("chunk_backward") if operator.name == "chunk" else None
    allocations = finals + _allocations(operator, backward.saved if backward else ())
    return operator.name, _inputs(writers), allocations, launches, returned


def _inputs(writers: list[KernelWriter], given: Collection[str] = ()) -> list[str]:
    """The lines that name what the kernels read, but for what the function is given."""
    names = [n for w in writers for n in w.graph.inputs if n not in w.stored and n not in w.graph.scalars]
    lines = [f'{name} = x["{name}"]' for name in dict.fromkeys(["q", *names]) if name not in given]
    scalars = {name for writer in writers for name in writer.graph.scalars}
    return lines + [f"{name} = {SCALARS[name]}" for name in sorted(scalars)]


def _backward(operator: Operator, writers: list[KernelWriter], fixed: bool) -> tuple[object, ...]:
    cotangents = [writer.names[c.init.value] for writer in writers for c in writer.graph.carries if c.reverse]
    inputs = _inputs(writers, ["do", *cotangents])
    axes = {name: w.graph[ref].axes for w in writers for name, ref in w.graph.outputs if name not in w.stored}
    allocations = _allocations(operator)
    if operator.saved and not fixed:
        allocations.append(_if_of_this_chunk_length(operator))
    if operator.saved:
        again = "call" if fixed else 'call, "chunk_backward"'
        allocations.append(f"[{', '.join(operator.saved)}] = kept or kept_tensors({again})")
    for name in axes:
        width = {"k": ", K", "v": ", V"}.get(axes[name], "")
        make, shape = ("partial", f", (slots, HV{width})") if name in operator.totals else ("gradient", "")
        allocations.append(f'{name} = {make}("{input_of(name)}"{shape})')
    finals = [carry.final for writer in writers for carry in writer.finals]
    allocations += [f'{name} = gradient("{input_of(name)}")' for name in finals]
    beside = [writer for writer in writers if _may_overlap(writer, writers)]
    launches: list[str] = []
    for writer, names in zip(writers, _needed_for(writers), strict=True):
        lines = _launch(writer, names, scans=2 if beside and writer.kernel.loop == "scan" else 1)
        if writer in beside:  # on another stream, where it alone would leave processors without a program
            lines = [*lines[:2], "with aside.enter(programs):", *(f"    {line}" for line in lines[2:])]
            launches.append("# the two scans do not read each other")
        launches += lines
        if beside and writer.kernel.is_reverse:
            launches.append("aside.join()")
    results = [f'"{input_of(name)}": {name},' for name in [*axes, *finals]]
    given = ", ".join(["do", *cotangents])
    return operator.name, given, inputs, allocations, launches, results, bool(operator.totals), bool(beside)


def _if_of_this_chunk_length(operator: Operator) -> str:
    """The line that drops what a forward call kept in longer chunks than backward fits in."""
    place, stored = next((n, x) for n, x in enumerate(x for x in operator.stored if x.name in operator.saved)
                         if "i" in x.axes)  # fmt: skip
    return f"kept = kept if kept and kept[{place}].shape[{2 + stored.axes.index('i')}] == C else None"


def input_of(gradient: str) -> str:
    """The input that a gradient belongs to: dq is that of q."""
    return gradient.removeprefix("d")


def _may_overlap(writer: KernelWriter, writers: list[KernelWriter]) -> bool:
    """A scan that the reverse one, which is launched next, does not wait for."""
    reverse = next(w for w in writers if w.kernel.is_reverse)
    taken = {*reverse.graph.inputs, *reverse.kernel.stores}
    return writer.kernel.loop == "scan" and taken.isdisjoint(writer.kernel.stores)


def _needed_for(writers: list[KernelWriter]) -> list[set[str]]:
    """The inputs whose gradients need each kernel: those it writes, and those that need what it stores."""
    of_stored: dict[str, set[str]] = {}
    found: list[set[str]] = []
    for writer in reversed(writers):
        graph = writer.graph
        ends = [*graph.outputs, *((c.final, c.out) for c in graph.carries if c.reverse)]
        own: set[str] = set()
        for name, ref in ends:
            needed = of_stored.get(name, set()) if name in writer.stored else {input_of(name)}
            own |= needed
            above = nx.ancestors(graph.dataflow, ref.value) | {ref.value}
            if "carry_in" in {graph.nodes[i].op for i in above}:
                above |= set().union(*(nx.ancestors(graph.dataflow, c.out.value) for c in graph.carries))
            for stored in {writer.names[i] for i in above if graph.nodes[i].op == "input"} & set(writer.stored):
                of_stored.setdefault(stored, set()).update(needed)
        found.insert(0, own)
    return found


def _final(plan: Plan, carry: Carry) -> str:
    """The line that allocates a final state."""
    shape = "N, HV, K" if len(carry.out.axes) == 1 else "N, HV, V, K" if plan.spec.state_v_first else "N, HV, K, V"
    text = f"torch.empty(({shape}), dtype=torch.float32, device=q.device)"
    return f"{carry.final} = {text} if call.output_final_state else None"


def _allocations(operator: Operator, kept: Collection[str] = ()) -> list[str]:
    if not any(kernel.loop == "chunks" for kernel in operator.kernels):
        return []
    lines = ["slots = slots_of(call, C)"]
    if kept:
        lines.append("fresh = torch.empty if kept is None else torch.zeros  # no slot that is kept stays unwritten")
    own = [stored for stored in operator.stored if stored.name not in operator.saved]
    return lines + [f"{x.name} = {_made(x, 'fresh' if x.name in kept else 'torch.empty')}" for x in own]


def _made(stored: Stored, make: str) -> str:
    heads = "HV" if stored.heads == "value" else "H"
    rows = ", ".join(["slots", heads, *(SIZES[axis] for axis in stored.axes)])
    dtype = "torch.float32" if stored.format == "f32" else "at.stored"
    return f"{make}(({rows}), dtype={dtype}, device=q.device)"


def _launch(writer: KernelWriter, needed: Collection[str] = (), scans: int = 1) -> list[str]:
    """Two lines for the grid, then the launch, unless it has no programs or no gradient needs it."""
    kernel = writer.kernel
    unless = " and not kept" if set(kernel.stores) & set(writer.operator.saved) else ""
    heads = "H" if kernel.is_grouped else "HV"
    programs = f"slots * {heads}" if kernel.loop == "chunks" else "N * HV"
    if kernel.split_v:
        programs += " * cdiv(V, tuned.BV)"
    arguments = [_tensor(writer, name) for name in writer.tensor_parameters()]
    arguments += ["cu_seqlens", *writer.graph.scalars]
    arguments += [f"*{name}.stride()[:{len(strides)}]" for name, strides in writer.stride_parameters().items()]
    arguments += ["T", "N", "HV"]
    constants = {"R": "HV // H", "BV": "tuned.BV", "DOT": "at.DOT", "PRECISION": "at.PRECISION", "PASS": "kind"}
    stages, grid = ("stages", "grid") if kernel.is_segmented else ("tuned.num_stages", "programs")
    constants |= {"C": "C", "STAGES": stages, "ROW": f"row({', '.join(writer.rows_of())})"}
    keywords = [f"{name}={constants[name]}" for name in writer.constexpr_parameters()]
    keywords += ["num_warps=tuned.num_warps", f"num_stages={stages}"]
    beside = f", scans={scans}" if scans > 1 else ""
    wanted = f" and not needs.isdisjoint({as_tuple(sorted(needed))})" if needed else ""
    call = [
        f'LAUNCHES["{kernel.name}"] += 1',
        f"{kernel.name}[({grid},)](",
        *(f"    {text}," for text in arguments + keywords),
        ")",
    ]
    count = "N * HV"
    if kernel.is_segmented:
        count += " * (AS_IF if segments else 1)"
        given = f"combine, call, at, segments, SPAN, tuned, {_initial(writer)}"
        call = [f"for kind, state, maps, grid, stages in passes({given}):", *(f"    {line}" for line in call)]
    return [
        f'tuned = choice("{kernel.name}", at, {count}{beside})',
        f"programs = {programs}",
        f"if programs > 0{unless}{wanted}:",
        *(f"    {line}" for line in call),
    ]


def _initial(writer: KernelWriter) -> str:
    """The state that a scan with one carry begins with."""
    return writer.names[writer.graph.carries[0].init.value]


def _tensor(writer: KernelWriter, name: str) -> str:
    """A tensor argument: as a descriptor of the tiles that are loaded from it, or as it is."""
    if writer.kernel.is_segmented and name == _initial(writer):
        return "state"
    if name not in writer.described:
        return name
    extents = {"BK": str(block_k(writer.kernel, writer.plan.spec.key_dim)), "BV": "tuned.BV"}
    block = [extents.get(extent, extent) for extent in writer.described[name]]
    text = f"({', '.join(block)})" if len(block) > 1 else f"({block[0]},)"
    return f"{_maker(writer, name)}({name}, {text}, tuned.descriptors)"


def _maker(writer: KernelWriter, name: str) -> str:
    return "tiles_of" if name in writer.stored else "tokens_of"


def tuning_text(plan: Plan) -> str:
    """The source of tuning.py: launch choices by kernel, target and bytes per element."""
    rows = []
    for operator in plan.operators:
        for kernel in operator.kernels:
            rows.append(f'    "{kernel.name}": {{')
            for key, t in kernel.tuning:
                chosen = ", ".join(f"{name}={value}" for name, value in t if value or name != "descriptors")
                rows.append(f'        "{key}": Tuning({chosen}),')
            rows.append("    },")
    kernels = [kernel for operator in plan.operators for kernel in operator.kernels]
    lengths = []
    for operator in filter(lambda operator: operator.chunks, plan.operators):
        lengths += [f'    "{operator.name}": {{', *(f'        "{key}": {of},' for key, of in operator.chunks), "    },"]
    backward = [kernel.name for operator in plan.operators if operator.is_backward for kernel in operator.kernels]
    rows_of_v = [f'    "{kernel.name}": {least},' for kernel in kernels if (least := _narrowest(kernel))]
    # With gates per channel tf32x3 spills so much that ptxas 12.8 loses operands (docs/compilers.md).
    exact = "ieee" if any(kernel.has_channel_gate for kernel in kernels) else "tf32x3"
    return render("package/tuning.py",
        rows=rows,
        lengths=lengths,
        backward=backward,
        rows_of_v=rows_of_v,
        chunk=plan.chunk,
        value_dim=plan.spec.value_dim,
        exact=exact,
    )  # fmt: skip


def _narrowest(kernel: Kernel) -> int:
    """Bytes of the narrowest row of a tile of v on sm_90; 0 where programs hold all of v, or none."""
    if not any("v" in node.axes for node in kernel.graph.nodes) or not (kernel.split_v or kernel.is_tiled):
        return 0
    return 2 * narrowest(kernel, 2, TARGETS["sm_90"])


def registration_text(plan: Plan) -> str:
    """The source of registration.py."""
    graph, backward = forward_graph(plan.spec), plan.operator("chunk_backward")
    return render("package/registration.py",
        differentiable=backward is not None,
        inputs=as_tuple([name for name in graph.inputs if name not in graph.scalars]),
        finals=as_tuple([carry.final for carry in graph.carries]),
        kept=as_tuple(list(backward.saved)) if backward else "()",
        state_v_first=plan.spec.state_v_first,
    )  # fmt: skip
