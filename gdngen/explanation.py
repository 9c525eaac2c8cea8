"""Why this plan: the chosen cuts as loop nests, the others and what each costs more, and the time the target allows."""

import math
from collections.abc import Iterator
from typing import Any

from gdngen import target as targets
from gdngen.ir.text import value_names
from gdngen.passes.fuse import Cut
from gdngen.passes.pipeline import Candidate, Choice, Compilation
from gdngen.passes.plan import Kernel, Operator, Plan, describe_kernel
from gdngen.passes.price import (
    WORKLOADS,
    Price,
    Workload,
    extents,
    kernel_price,
    price,
    seconds_overall,
    wide_values,
)

FORMATS = {"f32": "fp32"}
PREFIXES = {"chunk": "", "chunk_backward": "backward_"}  # of the keys and of the pin of an operator that is cut
LETTERS = "ABCDEFGHIJ"  # in the text: capitals for workloads, small ones for lists of kernels
MOST_CUTS = 12  # lines of text; the JSON has all

Record = dict[str, Any]


def explain(found: Compilation) -> Record:
    """One JSON-ready dict; ``text`` prints it."""
    plan = found.plan
    record: Record = {"name": plan.spec.name, "spec": str(plan.spec), "target": plan.target, "chunk": plan.chunk}
    record |= {"notes": [*_gone(plan), *_lengths(plan), *plan.notes, *found.notes], "pins": dict(found.pins)}
    record["operators"] = [_operator(operator, plan) for operator in plan.operators]
    for name, choice in found.choices.items():
        candidates, chosen = _candidates(choice, found)
        prices = _kernel_prices(chosen.cut, found)
        for kernel in next(one for one in record["operators"] if one["name"] == name)["kernels"]:
            kernel["price"] = prices[kernel["name"]]
        record[f"{PREFIXES[name]}cuts"] = [_cut(candidate, chosen) for candidate in candidates]
        record[f"{PREFIXES[name]}workloads"] = [_time(*pair, found) for pair in zip(WORKLOADS, chosen.prices)]
    return record


def _gone(plan: Plan) -> list[str]:
    """What this member does without: as a factor or matrix of ones it folded away when the graph was built."""
    notes = [] if plan.spec.gate else ["no decay: without a gate it is 1 and gone from every kernel"]
    if plan.spec.rule == "additive" and plan.operator("chunk"):
        notes.append("no inverse: the additive rule does not read what it writes, so it is the identity and gone")
    return notes


def _lengths(plan: Plan) -> list[str]:
    """Chunk lengths by what operands take, where they depend on it: the package takes the first whose kernels fit."""
    notes, operands = [], {2: "2-byte operands (bf16)", 4: "4-byte operands (fp32, fp16)"}
    for operator in (one for one in plan.operators if one.chunks):
        for width, what in operands.items():
            first, *others = dict(operator.chunks)[f"{plan.target}/{width}"]
            then = f", of {' or '.join(map(str, others))} where those do not fit (gdngen inspect)" if others else ""
            notes.append(f"{operator.name}, {what}: in chunks of {first} tokens{then}")
    return notes


def _kernel_prices(cut: Cut, found: Compilation) -> dict[str, Record]:
    """What each kernel moves, computes and is predicted to take at the first workload."""
    workload, wide = WORKLOADS[0], wide_values(cut)
    heads, prices = workload.sequences * workload.length * workload.v_heads, {}
    for kernel in cut.kernels:
        one = kernel_price(kernel, found.spec, found.chunk, found.target, workload, wide)
        prices[kernel.name] = {"bytes": one.bytes * heads, "flops": one.flops * heads, "seconds": one.seconds}
    return prices


def _operator(operator: Operator, plan: Plan) -> Record:
    """The kernels, and what they hand to each other; bytes of what is stored are those of a chunk of one head."""
    sizes = extents(plan.spec, plan.chunk)
    stored = [
        {
            "value": f"{value.name}[{','.join(value.axes)}]",
            "format": FORMATS.get(value.format, "the input dtype"),
            "bytes": math.prod(sizes[axis] for axis in value.axes) * (4 if value.format in FORMATS else 2),
            "writer": value.writer,
            "readers": [kernel.name for kernel in operator.kernels if value.name in kernel.graph.inputs],
        }
        for value in operator.stored
    ]
    kernels = [
        {
            "name": kernel.name,
            "nest": _nest(kernel),
            "reads": list(kernel.graph.inputs),
            "writes": [name for name, _ in kernel.graph.outputs],
            "launch": dict(kernel.tuning)[f"{plan.target}/2"].model_dump(),
        }
        for kernel in operator.kernels
    ]
    return {"name": operator.name, "cut": operator.cut, "forms": operator.forms, "stored": stored, "kernels": kernels}


def _nest(kernel: Kernel) -> list[str]:
    """Grid and loop; what is read; matrix products and inverses in order; what is written."""
    graph, names, lines = kernel.graph, value_names(kernel.graph), describe_kernel(kernel)
    heavy = {names[i] for i in range(len(graph.nodes)) if graph.is_heavy(i)}
    head = lines[: 1 if kernel.loop == "chunks" else 2]
    steps = [line for line in lines[len(head) :] if line.strip().split("[")[0] in heavy]
    light = sum(node.op not in ("input", "const", "carry_in") for node in graph.nodes) - len(steps)
    written = [name for name, _ in graph.outputs] + [f"{carry.name} for the next step" for carry in graph.carries]
    rest = [f"{light} steps without a matrix product", f"write {', '.join(written)}"]
    indent = "  " * len(head)
    return [*head, f"{indent}read {', '.join(graph.inputs)}", *steps, *(indent + line for line in rest)]


def _candidates(choice: Choice, found: Compilation) -> tuple[list[Candidate], Candidate]:
    """The cuts by predicted time, each the best in some respect, and the chosen one: a pinned one is added."""
    for candidate in choice.front:
        if candidate.cut == choice.cut:
            return list(choice.front), candidate
    prices = tuple(price(choice.cut, found.spec, found.chunk, found.target, workload) for workload in WORKLOADS)
    chosen = Candidate(choice.cut, seconds_overall(prices), prices)
    return sorted([*choice.front, chosen], key=lambda candidate: candidate.seconds), chosen


def _cut(candidate: Candidate, chosen: Candidate) -> Record:
    """A cut, compared with the chosen one."""
    cut, first, base = candidate.cut, candidate.prices[0], chosen.prices[0]
    record: Record = {"cut": cut.name, "forms": cut.forms, "kernels": [kernel.name for kernel in cut.kernels]}
    record |= {"chosen": candidate is chosen, "seconds": candidate.seconds}
    record["time_ratio"] = candidate.seconds / chosen.seconds
    record |= {"bytes_ratio": first.bytes / base.bytes, "flops_ratio": first.flops / base.flops}
    record |= {"chain": first.chain, "scan_products": first.scan_products}
    pairs = zip(WORKLOADS, candidate.prices, chosen.prices)
    record["time_ratios"] = {str(workload): one.seconds / other.seconds for workload, one, other in pairs}
    return record | {"why": _why(record, base)}


def _why(other: Record, chosen: Price) -> str:
    """What speaks against a cut, most telling first."""
    if other["chosen"]:
        return "chosen"
    longer = (other["scan_products"] + other["chain"]) / max(1, chosen.scan_products + chosen.chain)
    against = [(other["bytes_ratio"], "bytes"), (other["flops_ratio"], "FLOPs"), (longer, "scan work")]
    more = ", ".join(what for ratio, what in sorted(against, reverse=True) if ratio > 1.01)
    return f"more {more}" if more else "about equal"


def _time(workload: Workload, cost: Price, found: Compilation) -> Record:
    """What must be moved and computed, and the least time the target needs for it."""
    heads = workload.sequences * workload.length * workload.v_heads
    moved, work = cost.bytes * heads, cost.flops * heads
    memory, products = moved / found.target.bandwidth, work / found.target.matrix_flops
    record = {"workload": str(workload), "bytes": moved, "flops": work, "memory_seconds": memory}
    record |= {"matrix_seconds": products, "roofline_seconds": max(memory, products)}
    return record | {"predicted_seconds": cost.seconds}


def text(record: Record) -> Iterator[str]:
    """The explanation as lines."""
    yield f"{record['spec']}\non {record['target']}, in chunks of {record['chunk']} tokens"
    yield from (f"note: {note}" for note in record["notes"])
    for operator in record["operators"]:
        forms = f", after {', '.join(operator['forms'])}" if operator["forms"] else ""
        yield f"\noperator {operator['name']}: cut {operator['cut']}{forms}"
        for value in operator["stored"]:
            yield f"  {value['writer']} stores {value['value']} as {value['format']}, for {', '.join(value['readers'])}"
        for kernel in operator["kernels"]:
            launch = ", ".join(f"{key} {value}" for key, value in kernel["launch"].items() if value)
            yield from (f"  {line}" for line in [f"{kernel['nest'][0]}   ({launch})", *kernel["nest"][1:]])
    for name, prefix in PREFIXES.items():
        if f"{prefix}cuts" in record:
            yield from _cut_lines(name, record[f"{prefix}cuts"], f"{prefix}cut", record["pins"])
            yield from _time_lines(name, record[f"{prefix}workloads"], targets.get(record["target"]))


def _cut_lines(operator: str, cuts: list[Record], pin: str, pins: dict[str, str]) -> Iterator[str]:
    """The cuts as a table; A, B, ... are the workloads of the next one, a, b, ... the kernels listed below it."""
    how = "pinned" if pin in pins else "predicted fastest"
    yield f"\ncuts of operator {operator}, by what they store; the chosen one is {how}"
    shown = cuts[:MOST_CUTS] + [cut for cut in cuts[MOST_CUTS:] if cut["chosen"]]
    kernels = list(dict.fromkeys(" > ".join(cut["kernels"]) for cut in shown))
    rows = [["", "", "time", *LETTERS[: len(WORKLOADS)], "bytes", "FLOPs", "step", "chain"]]
    for cut in shown:
        ratios = [cut["time_ratio"], *cut["time_ratios"].values(), cut["bytes_ratio"], cut["flops_ratio"]]
        letter = LETTERS[kernels.index(" > ".join(cut["kernels"]))].lower()
        cells = [f"{ratio:.2f}" for ratio in ratios]
        rows.append([cut["cut"], letter, *cells, str(cut["scan_products"]), str(cut["chain"])])
    yield from (f"{row}  {why}".rstrip() for row, why in zip(_table(rows), ["", *(cut["why"] for cut in shown)]))
    yield from (f"  {letter.lower()}: {names}" for letter, names in zip(LETTERS, kernels))
    yield "  Times, bytes, FLOPs are ratios; step: products in a step of the scan; chain: those that wait for another."
    hidden = f"{len(cuts) - len(shown)} slower ones (in --json) and " if len(cuts) > len(shown) else ""
    yield f"  Left out: {hidden}cuts beaten in every respect. --pin {pin}=NAME takes others."


def _time_lines(operator: str, workloads: list[Record], target: targets.Target) -> Iterator[str]:
    """Least and predicted times of the chosen cut, in microseconds."""
    rates = f"{target.bandwidth / 1e12:.1f} TB/s, {target.matrix_flops / 1e12:.0f} TFLOP/s"
    yield f"\ntime of the chosen cut of {operator} in us on {target} ({rates}), 16-bit inputs"
    columns = {"memory": "memory_seconds", "products": "matrix_seconds", "roofline": "roofline_seconds"}
    columns["predicted"] = "predicted_seconds"
    rows = [["", "GB", "GFLOP", *columns]]
    for letter, row in zip(LETTERS, workloads):
        cells = [f"{row['bytes'] / 1e9:.2f}", f"{row['flops'] / 1e9:.0f}"]
        rows.append([f"{letter}  {row['workload']}", *cells, *(f"{row[key] * 1e6:.0f}" for key in columns.values())])
    yield from _table(rows)


def _table(rows: list[list[str]]) -> Iterator[str]:
    """Lines of columns as wide as their widest cell: names flush left, then numbers flush right."""
    first, *others = (max(map(len, column)) for column in zip(*rows))
    for name, *cells in rows:
        yield f"  {name:{first}}" + "".join(f" {cell:>{width}}" for cell, width in zip(cells, others))
