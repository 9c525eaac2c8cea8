"""The plan as a page: per operator its kernels in order of launch, and how long each value lives between them.

One HTML file that loads nothing, made of the record that ``explain`` prints; light or dark as the reader's browser is.
"""

from collections.abc import Iterator
from html import escape
from typing import Any

from gdngen.passes.price import WORKLOADS

Record = dict[str, Any]

COLUMN, ROW, LEFT, TOP = 150, 22, 240, 78  # pixels: a kernel, a value, the values' names, the kernels' heads
BAR = 110  # of a kernel that takes all the time

STYLE = """
:root { color-scheme: light dark; --ink: #1d2330; --paper: #fcfcfa; --faint: #8a909c; --line: #d8dade;
        --in: #2b6cb0; --kept: #b7791f; --out: #2f855a; --bar: #cbd5e8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e6eb; --paper: #16181d; --faint: #8b919d; --line: #343842;
          --in: #7fb2ea; --kept: #e0b15c; --out: #75c79a; --bar: #35425c; } }
body { margin: 2rem auto; max-width: 76rem; padding: 0 1rem; background: var(--paper); color: var(--ink);
       font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.1rem; margin-top: 2.5rem; }
pre, svg text, td, th { font-family: ui-monospace, monospace; font-size: 12px; }
.figure, pre, .table { overflow-x: auto; } pre { border-left: 3px solid var(--line); padding-left: .8rem; }
svg text { fill: var(--ink); } svg .faint { fill: var(--faint); } svg .grid { stroke: var(--line); }
svg .bar { fill: var(--bar); } svg .in { stroke: var(--in); fill: var(--in); }
svg .kept { stroke: var(--kept); fill: var(--kept); } svg .out { stroke: var(--out); fill: var(--out); }
table { border-collapse: collapse; } td, th { padding: .15rem .7rem; text-align: right; }
td:first-child, th:first-child, td:last-child, th:last-child { text-align: left; } .chosen { font-weight: 700; }
.in { color: var(--in); } .kept { color: var(--kept); } .out { color: var(--out); }
"""


def page(record: Record) -> str:
    """The whole HTML document of an explanation."""
    title = f"{record['name']} on {record['target']}"
    return "\n".join(
        [
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
            f"<style>{STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>\n<p>{escape(record['spec'])}, in chunks of {record['chunk']} tokens.</p>",
            *_notes(record["notes"]),
            '<p>Kernels from left to right as they are launched. A line is a value in memory: a dot writes it, '
            'a circle reads it; <span class="in">inputs</span>, <span class="kept">values handed on</span>, '
            f'<span class="out">results</span>. Times are predicted, of {escape(str(WORKLOADS[0]))}.</p>',
            *(line for operator in record["operators"] for line in _operator(operator, record)),
            "</body></html>\n",
        ]
    )  # fmt: skip


def _notes(notes: list[str]) -> list[str]:
    return ["<ul>", *(f"<li>{escape(note)}</li>" for note in notes), "</ul>"] if notes else []


def _operator(operator: Record, record: Record) -> Iterator[str]:
    """Heading, figure, loop nests, and the cuts that were weighed."""
    yield f"<h2>{escape(operator['name'])}</h2>\n<p>Cut {escape(operator['cut'])}.</p>"
    yield f'<div class="figure">{_lifelines(operator)}</div>'
    for kernel in operator["kernels"]:
        launch = ", ".join(f"{key} {value}" for key, value in kernel["launch"].items() if value)
        first, *others = kernel["nest"]
        yield f"<pre>{escape(chr(10).join([f'{first}   ({launch})', *others]))}</pre>"
    prefix = "backward_" if operator["name"].endswith("_backward") else ""
    if operator["name"] != "recurrent" and f"{prefix}cuts" in record:
        yield from _cuts(record[f"{prefix}cuts"])


def _lifelines(operator: Record) -> str:
    """Columns are kernels, rows values: where each is written and read."""
    kernels = {kernel["name"]: n for n, kernel in enumerate(operator["kernels"])}
    rows = list(_rows(operator, kernels))
    width, height = LEFT + COLUMN * (len(kernels) + 1), TOP + ROW * len(rows) + 10
    parts = [*_heads(operator["kernels"], height), *(part for n, row in enumerate(rows) for part in _line(n, *row))]
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>{"".join(parts)}</svg>'


def _rows(operator: Record, kernels: dict[str, int]) -> Iterator[tuple[str, str, int, list[int]]]:
    """(what it is, its label, the column that writes it, the columns that read it); an input is written left of all."""
    stored = {value["value"].partition("[")[0]: value for value in operator["stored"]}
    inputs = dict.fromkeys(name for kernel in operator["kernels"] for name in kernel["reads"] if name not in stored)
    for name in inputs:
        yield "in", name, -1, [n for kernel, n in kernels.items() if name in _named(operator, kernel)["reads"]]
    for value in stored.values():
        size = f"{value['bytes'] / 1024:g} KiB" if value["bytes"] >= 1024 else f"{value['bytes']} B"
        label = f"{value['value']} {'fp32 ' if value['format'] == 'fp32' else ''}{size}"
        yield "kept", label, kernels[value["writer"]], [kernels[reader] for reader in value["readers"]]
    for kernel in operator["kernels"]:
        for name in kernel["writes"]:
            if name not in stored:
                yield "out", name, kernels[kernel["name"]], [len(kernels)]


def _named(operator: Record, kernel: str) -> Record:
    return next(one for one in operator["kernels"] if one["name"] == kernel)


def _heads(kernels: list[Record], height: int) -> Iterator[str]:
    """Names, predicted times as bars, and a line down from each."""
    total = sum(kernel["price"]["seconds"] for kernel in kernels if "price" in kernel)
    for n, kernel in enumerate(kernels):
        x = _x(n)
        yield f'<line class="grid" x1="{x}" y1="{TOP - 12}" x2="{x}" y2="{height}"/>'
        yield f'<text x="{x}" y="16" text-anchor="middle">{escape(kernel["name"])}</text>'
        if "price" in kernel:
            price, long = kernel["price"], BAR * kernel["price"]["seconds"] / total
            said = f"{price['seconds'] * 1e6:.0f} us, {price['bytes'] / 1e9:.2f} GB, {price['flops'] / 1e9:.0f} GFLOP"
            yield f'<rect class="bar" x="{x - long / 2:.1f}" y="24" width="{long:.1f}" height="10"/>'
            for line, text in enumerate(said.split(", ", 1)):
                yield f'<text class="faint" x="{x}" y="{48 + 13 * line}" text-anchor="middle">{text}</text>'


def _line(row: int, kind: str, label: str, writer: int, readers: list[int]) -> Iterator[str]:
    y, last = TOP + ROW * row + ROW // 2, max([writer, *readers])
    yield f'<text x="{LEFT - 76}" y="{y + 4}" text-anchor="end">{escape(label)}</text>'
    yield f'<line class="{kind}" x1="{_x(writer)}" y1="{y}" x2="{_x(last)}" y2="{y}" stroke-width="1.5"/>'
    yield f'<circle class="{kind}" cx="{_x(writer)}" cy="{y}" r="4"/>'
    for reader in readers:
        yield f'<circle class="{kind}" cx="{_x(reader)}" cy="{y}" r="4" style="fill: var(--paper)" stroke-width="1.5"/>'


def _x(column: int) -> int:
    """The middle of a kernel's column; -1 and the number of kernels are where inputs come from and results go."""
    return LEFT + COLUMN * column + COLUMN // 2 if column >= 0 else LEFT - 60


def _cuts(cuts: list[Record]) -> Iterator[str]:
    """The cuts as a table, the chosen one in bold."""
    yield '<div class="table"><table><tr><th>cut</th><th>time</th><th>bytes</th><th>FLOPs</th><th>why not</th></tr>'
    for cut in cuts:
        ratios = "".join(f"<td>{cut[key]:.2f}</td>" for key in ("time_ratio", "bytes_ratio", "flops_ratio"))
        mark = ' class="chosen"' if cut["chosen"] else ""
        yield f"<tr{mark}><td>{escape(cut['cut'])}</td>{ratios}<td>{escape(cut['why'])}</td></tr>"
    yield "</table></div>"
