"""``gdngen tune``: measure launch choices on this machine and write the best into a package."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gdngen.commands.common import Pins, asks_for_a_spec, emit, json_option, published_heads, table
from gdngen.commands.kinds import DTYPES, Dtypes, Seconds, Several
from gdngen.errors import EnvironmentProblem
from gdngen.spec import Spec

if TYPE_CHECKING:  # they import torch
    from gdngen.autotune.plans import Comparison
    from gdngen.autotune.report import Report, Row
    from gdngen.autotune.tuner import Progress

LENGTH, DECODED = 8192, 32  # tokens of the default prefill shape, sequences of the decode shape
HEADS = (16, 32)
PLAN_COLUMNS = ("plan", "operator", "at", "us", "ratio")
COMMITTED = "gdngen/tuned"  # of the repository: decisions that gdngen ships for presets


@click.command()
@click.argument("path", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@asks_for_a_spec
@click.option("--out", default="generated", metavar="DIR", help="Where a package given by its Spec is.  [generated]")
@click.option(
    "--shapes", type=Several(), metavar="LIST", help='LENGTHxSEQUENCES:Q_HEADS/V_HEADS ...; "8192x1:16/32 1x32:16/32".'
)
@click.option(
    "--dtypes", default="bfloat16", type=Dtypes(), metavar="LIST", help=f"Of q, k, v: {', '.join(DTYPES)}.  [bfloat16]"
)
@click.option("--effort", default="quick", type=click.Choice(["quick", "full"]), help="How many choices.  [quick]")
@click.option("--plans", is_flag=True, help="First compare other cuts and inverses; build again with what is faster.")
@click.option("--kernels", type=Several(), metavar="LIST", help="Only these kernels.")
@click.option(
    "--budget",
    type=Seconds(),
    metavar="SECONDS",
    help="Then measure no further candidate, decide by what is there.",
)
@click.option(
    "--limit", default=60.0, type=Seconds(some=True), metavar="SECONDS",
    help="A candidate that takes longer hangs.  [60]",
)  # fmt: skip
@click.option("--interpreted", is_flag=True, help="Without a GPU: time Triton's interpreter, to try tuning itself out.")
@json_option
@click.pass_context
def tune(
    ctx: click.Context, /, path: Path | None, spec: Spec, target: str, pins: Pins, out: str, **options: Any
) -> None:
    """Measure launch choices of the package at PATH, of a preset or of a Spec: its tuned/<gpu>.json."""
    from gdngen import api, package
    from gdngen.autotune import plans
    from gdngen.autotune.store import Measurements
    from gdngen.autotune.tuner import Tuner, Wish

    given = {name for name, value in ctx.params.items() if value is not None} & {"preset", *Spec.model_fields}
    given |= {n for n in ("target", "out") if ctx.get_parameter_source(n) is not click.core.ParameterSource.DEFAULT}
    if path and (given or pins):
        raise click.UsageError(f"{path} is a package with a Spec of its own: give PATH, or a preset or Spec")
    if options["plans"] and options["kernels"]:
        raise click.UsageError("--plans may give the package other kernels than --kernels names: tune them afterwards")
    own = Spec(**package.read_manifest(path)["spec"]) if path else spec  # type: ignore[arg-type]
    points = _points(options["shapes"], options["dtypes"], own, ctx.params.get("preset"))
    _needs_a_gpu(options["interpreted"])
    folder = path or api.build(spec, out, target_name=target, pins=pins)
    wish = Wish(
        folder.resolve(), points, options["effort"], options["kernels"] or (), options["limit"], options["budget"]
    )
    with _display(options["as_json"]) as tell:
        compared = plans.compare(wish, Measurements(), tell) if options["plans"] else None
        report = Tuner(wish, Measurements(), tell).run()
    record, lines = _record(report), _lines(report, folder, ctx.params.get("preset"))
    if compared:
        record["plans"] = [dict(zip(PLAN_COLUMNS, row)) for row in _plan_rows(compared)]
        lines = itertools.chain(_plan_lines(compared), lines)
    emit(options["as_json"], record, lines)
    ctx.exit(1 if report.failed else 0)


def _needs_a_gpu(interpreted: bool) -> None:
    """EnvironmentProblem without one: candidates in the interpreter take minutes and decide nothing for a GPU."""
    import torch

    if not interpreted and not torch.cuda.is_available():
        raise EnvironmentProblem(
            "no GPU is visible to torch (gdngen doctor): tuning times kernels on one. Tune on the machine that has it, "
            "or try tuning itself out in Triton's interpreter: --interpreted"
        )


def _points(shapes: tuple[str, ...] | None, dtypes: tuple[str, ...], spec: Spec, preset: str | None) -> tuple[Any, ...]:
    """Every shape with every dtype; by default at the published head counts of the preset, or of those of this Spec."""
    from gdngen.autotune.space import Point, Shape

    if "float16" in dtypes and "float32" not in dtypes:
        raise click.UsageError(
            "--dtypes float16: its decisions serve float32 too and have to be right for both; add float32"
        )
    if shapes:
        found = [Shape.parse(text, spec) for text in shapes]
    else:
        heads = published_heads(preset, spec) or [_heads(spec)]
        found = [Shape(*sizes, *own) for own in heads for sizes in ((LENGTH, 1), (1, DECODED))]
    return tuple(dict.fromkeys(Point(shape, name) for name in dtypes for shape in found))


def _heads(spec: Spec) -> tuple[int, int]:
    return HEADS if spec.head_ratio == "any" else (HEADS[0], HEADS[0] * spec.head_ratio)


# ------------------------------------------------------------------------------------------------ the result


def _record(report: "Report") -> dict[str, Any]:
    device = {"name": report.device.name, "interpreted": report.device.interpreted, "versions": report.device.versions}
    record = asdict(report) | {"device": device, "file": str(report.file) if report.file else None}
    record["rows"] = [asdict(row) | {"ratio": row.ratio} for row in report.rows]
    return record | {"mean_ratio": report.mean_ratio}


def _lines(report: "Report", folder: Path, preset: str | None) -> Iterator[str]:
    head = ("kernel", "bytes", "heads", "cost model's choice", "us", "winner", "us", "spread", "ratio")
    yield from table([head, *(_cells(row) for row in report.rows)])
    rejected = [(row.kernel, *one.values()) for row in report.rows for one in row.rejected]
    if rejected:
        yield "not measured, or not right:"
        yield from table(rejected)
    titles = ("operator", "shape", "dtype", "untuned us", "tuned us", "ratio")
    totals = [(t["operator"], t["shape"], t["dtype"], _us(t["untuned_us"]), _us(t["tuned_us"]), _ratio(t["ratio"]))
              for t in report.totals]  # fmt: skip
    yield from table([titles, *totals])
    if report.mean_ratio is not None:
        mean, count = report.mean_ratio, len(report.totals)
        yield f"geometric mean of {count}: an untuned package takes {mean:.3f} times as long as the tuned one"
    if report.device.interpreted:
        yield "timed in Triton's interpreter, as there is no GPU: these decisions are never used on a GPU"
    yield from (f"note: {problem}" for problem in report.problems)
    yield f"{report.measured} measured, {report.found} found in the store, {report.seconds:.0f} s"
    if report.file is None:
        yield "nothing was decided, nothing is written"
        return
    yield f"wrote {report.file}"
    if preset and not report.device.interpreted:
        yield f"to ship it, commit it as {COMMITTED}/{folder.name}/{report.file.name}"


def _plan_rows(compared: "Comparison") -> Iterator[tuple[Any, ...]]:
    for pins, times in compared.times.items():
        for operator, at in times.items():
            for point, us in at.items():
                yield " ".join(pins), operator, point, us, compared.ratio(pins, operator)


def _plan_lines(compared: "Comparison") -> Iterator[str]:
    """A row for each plan, operator and shape (ratios are means over the shapes), then what was taken."""
    rows = [
        (pins or "as built", *place, _us(us) or "not right", _ratio(r)) for pins, *place, us, r in _plan_rows(compared)
    ]
    yield from table([PLAN_COLUMNS, *rows])
    if compared.taken:
        yield f"built again with {' '.join(f'--pin {pin}' for pin in compared.taken)}"
    else:
        yield "no other plan is faster: the package keeps the one it has"


def _cells(row: "Row") -> tuple[object, ...]:
    winner = _choice(row.winner) if row.winner else "none"
    spread = "" if row.spread is None else f"{100 * row.spread:.1f}%"
    model = (_choice(row.model), _us(row.model_us))
    return row.kernel, row.bytes, row.heads, *model, winner, _us(row.winner_us), spread, _ratio(row.ratio)


def _choice(choice: dict[str, int]) -> str:
    from gdngen.autotune.space import spelled

    return spelled(choice)


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


# ------------------------------------------------------------------------------------------------ progress


@contextlib.contextmanager
def _display(as_json: bool) -> Iterator[Callable[["Progress"], object]]:
    """A bar and a live table on a terminal that rich can draw on, else a line for each measurement."""
    try:
        from rich.console import Console
    except ImportError:
        console = None
    else:
        console = Console(stderr=as_json)
    if console is None or not console.is_terminal:
        yield lambda progress: click.echo(_line(progress), err=as_json)
        return
    from rich.live import Live

    view = _View()
    with Live(console=console, get_renderable=view.drawn, refresh_per_second=4):
        yield view.add


def _line(progress: "Progress") -> str:
    task, record = progress.task, progress.record
    if task is None or record is None:
        return progress.text
    time = f"{record.microseconds:10.1f} us" if record.microseconds is not None else f"{record.outcome:>13}"
    note = f"  {record.note}" if record.note else ""
    return f"{progress.done:4}/{progress.total}  {time}  {task.candidate}  at {task.point}{note}"


class _View:
    """What is known so far, drawn by rich."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bar = Bar(*columns)
        self.job = self.bar.add_task("tuning", total=None)
        self.rows: dict[tuple[str, str], list[Any]] = {}  # (kernel, point) -> measured, first time, best, its choice

    def add(self, progress: "Progress") -> None:
        if progress.text:
            self.bar.update(self.job, description=progress.text)
        self.bar.update(self.job, completed=progress.done, total=progress.total or None)
        if progress.task is None or progress.record is None:
            return
        task, found = progress.task, progress.record
        row = self.rows.setdefault((task.candidate.kernel, str(task.point)), [0, None, None, ""])
        row[0] += 1
        if found.outcome == "ok" and found.microseconds is not None:
            row[1] = found.microseconds if task.rank == 0 else row[1]
            if row[2] is None or found.microseconds < row[2]:
                row[2:] = [found.microseconds, _choice(task.candidate.choice)]

    def drawn(self) -> Any:
        from rich.console import Group
        from rich.table import Table

        grid = Table("kernel", "at", "measured", "cost model us", "best us", "its choice")
        for (kernel, point), (count, first, best, choice) in self.rows.items():
            grid.add_row(kernel, point, str(count), _us(first), _us(best), choice)
        return Group(grid, self.bar)
