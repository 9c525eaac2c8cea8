"""Why this plan: the chosen cut as a loop nest, the others and what each costs more, and the time the target allows."""

from collections.abc import Iterator
from typing import Any

from gdngen import target as targets
from gdngen.ir.text import value_names
from gdngen.passes.pipeline import Compilation
from gdngen.passes.plan import Kernel, Operator, describe_kernel
from gdngen.passes.price import WORKLOADS, Price, Workload, price

FORMATS = {"f32": "fp32"}
MOST_CUTS = 12  # lines of text; the JSON has all

Record = dict[str, Any]


def explain(found: Compilation) -> Record:
    """One JSON-ready dict; ``text`` prints it."""
    plan = found.plan
    record: Record = {"name": plan.spec.name, "spec": str(plan.spec), "target": plan.target, "chunk": plan.chunk}
    record |= {"notes": list(plan.notes), "pins": dict(found.pins)}
    record["operators"] = [_operator(operator, plan.target) for operator in plan.operators]
    if chunk := plan.operator("chunk"):
        prices = [price(found.choices["chunk"].cut, found.spec, found.chunk, found.target, workload) for workload in WORKLOADS]
        record["cuts"] = _cuts(chunk, prices, found)
        record["workloads"] = [_time(*pair, found) for pair in zip(WORKLOADS, prices)]
    return record


def _operator(operator: Operator, target: str) -> Record:
    """The kernels, and what they hand to each other."""
    stored = [
        {
            "value": f"{value.name}[{','.join(value.axes)}]",
            "format": FORMATS.get(value.format, "the input dtype"),
            "writer": value.writer,
            "readers": [kernel.name for kernel in operator.kernels if value.name in kernel.graph.inputs],
        }
        for value in operator.stored
    ]
    kernels = [
        {"name": kernel.name, "nest": _nest(kernel), "launch": dict(kernel.tuning)[f"{target}/2"].model_dump()}
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


def _cuts(chunk: Operator, chosen: list[Price], found: Compilation) -> list[Record]:
    """Every cut that is best in some respect, in order of predicted time, compared with the chosen one."""
    records = []
    for candidate in [*found.candidates, *found.rejected]:
        cut, first = candidate.cut, candidate.prices[0]
        record: Record = {"cut": cut.name, "forms": cut.forms, "kernels": [kernel.name for kernel in cut.kernels]}
        record |= {"chosen": (cut.name, cut.forms) == (chunk.cut, chunk.forms), "seconds": candidate.seconds}
        record |= {"bytes_ratio": first.bytes / chosen[0].bytes, "flops_ratio": first.flops / chosen[0].flops}
        record |= {"chain": first.chain, "scan_products": first.scan_products}
        record["time_ratios"] = {str(w): p.seconds / c.seconds for w, p, c in zip(WORKLOADS, candidate.prices, chosen)}
        records.append(record | {"why": _why(record, chosen[0])})
    return records


def _why(other: Record, chosen: Price) -> str:
    """What speaks against a cut, most telling first."""
    if other["chosen"]:
        return "chosen"
    longer = (other["scan_products"] + other["chain"]) / max(1, chosen.scan_products + chosen.chain)
    against = [
        (other["bytes_ratio"], "more bytes"),
        (other["flops_ratio"], "more FLOPs"),
        (longer, "a longer scan step"),
    ]
    return ", ".join(reason for ratio, reason in sorted(against, reverse=True) if ratio > 1.01) or "about equal"


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
    if "cuts" in record:
        yield from _cut_lines(record["cuts"], "pinned" if "cut" in record["pins"] else "predicted fastest")
        yield from _time_lines(record)


def _cut_lines(cuts: list[Record], how: str) -> Iterator[str]:
    """The cuts as a table; A, B, ... are the workloads of the next one."""
    yield f"\ncuts of the chunk operator, by what they store; the chosen one is {how}"
    letters = "ABCDEFGHIJ"[: len(WORKLOADS)]
    heads = ["time", *letters, "bytes", "FLOPs", "step", "chain"]
    yield f"  {'':12} {'':24}" + "".join(f"{head:>6}" for head in heads)
    base = next((cut["seconds"] for cut in cuts if cut["chosen"]), cuts[0]["seconds"])
    for cut in cuts[:MOST_CUTS] + [cut for cut in cuts[MOST_CUTS:] if cut["chosen"]]:
        ratios = [cut["seconds"] / base, *cut["time_ratios"].values(), cut["bytes_ratio"], cut["flops_ratio"]]
        cells = "".join(f"{ratio:6.2f}" for ratio in ratios) + f"{cut['scan_products']:6}{cut['chain']:6}"
        yield f"  {cut['cut']:12} {' > '.join(cut['kernels']):24}{cells}  {cut['why']}"
    yield "  Times, bytes, FLOPs are ratios; step: products in a step of the scan; chain: those that wait for another."
    hidden = f"{len(cuts) - MOST_CUTS} slower ones (--json has them), and " if len(cuts) > MOST_CUTS else ""
    yield f"  Left out: {hidden}cuts that one of these beats in every respect. --pin cut=NAME takes any."


def _time_lines(record: Record) -> Iterator[str]:
    """Least and predicted times of the chosen cut, in microseconds."""
    target = targets.get(record["target"])
    rates = f"{target.bandwidth / 1e12:.1f} TB/s, {target.matrix_flops / 1e12:.0f} TFLOP/s"
    yield f"\ntime of the chosen cut in us on {target} ({rates}), 16-bit inputs"
    columns = {"memory": "memory_seconds", "products": "matrix_seconds", "roofline": "roofline_seconds"}
    columns["predicted"] = "predicted_seconds"
    yield f"  {'':34}{'GB':>8}{'GFLOP':>9}" + "".join(f"{name:>11}" for name in columns)
    for letter, row in zip("ABCDEFGHIJ", record["workloads"]):
        times = "".join(f"{row[key] * 1e6:11.0f}" for key in columns.values())
        yield f"  {letter}  {row['workload']:31}{row['bytes'] / 1e9:8.2f}{row['flops'] / 1e9:9.0f}{times}"
