"""``gdngen bench``: times of a package's operators beside those of installed peers, with their errors."""

import csv
import importlib.util
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from gdngen import __version__, presets
from gdngen.commands.common import OPTIONS, Pins, asks_for_a_spec, emit, json_option
from gdngen.commands.kinds import Dtype, NewFile, Seconds, Several
from gdngen.errors import EnvironmentProblem, naming
from gdngen.spec import Spec

if TYPE_CHECKING:
    from gdngen.autotune.space import Shape
    from gdngen.commands.comparison import Comparison

SIZES = "32768x1 8192x4 8192x1 1024x8 1x1 1x32 1x256"
CPU_SIZES, INTERPRETER_SIZES = "256x1 100x2 1x4", "20x1 1x2"
COLUMNS = ("operation", "shape", "side", "ms", "spread", "how", "first_s", "error", "budget", "times_ours")
Row = dict[str, Any]


@click.command()
@click.argument("path", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--shapes", type=Several(), metavar="LIST", help="LENGTHxSEQUENCES:Q_HEADS/V_HEADS ...; of length 1: decode."
)
@click.option("--only", multiple=True, type=click.Choice(["forward", "training", "decode"]), help="[all]")
@click.option("--dtype", type=Dtype(), help="Of q, k, v.  [bf16; fp32 on the CPU]")
@click.option(
    "--budget", default=480.0, type=Seconds(), metavar="SECONDS", help="Start nothing new after these.  [480]"
)
@click.option("--csv", "csv_file", type=NewFile(), help="Also write the rows here.")
@click.option("--plot", type=NewFile(), help="Also draw the times, as PNG.")
@asks_for_a_spec
@json_option
@click.pass_context
def bench(
    ctx: click.Context, path: Path | None, shapes: tuple[str, ...] | None, only: Sequence[str], dtype: str | None,
    budget: float, csv_file: Path | None, plot: Path | None, spec: Spec, target: str, pins: Pins, as_json: bool,
) -> None:  # fmt: skip
    """Time a package (PATH, --preset or a Spec) and the peers that are installed: forward, training, decode."""
    given = [name for name in (*OPTIONS, "preset", "target", "pins") if _is_given(ctx, name)]
    if path and given:
        raise click.UsageError(f"PATH is a built package and leaves nothing for {', '.join(given)}: give one of them")
    if plot and not importlib.util.find_spec("matplotlib"):
        raise EnvironmentProblem("matplotlib is missing and --plot needs it: pip install 'gdngen[bench]'")
    with tempfile.TemporaryDirectory(prefix="gdngen_") as scratch:
        from gdngen import api

        folder = (path or api.build(spec, scratch, target_name=target, pins=pins)).resolve()
        compared, device = _comparison(folder, dtype)
        parsed = _shapes(shapes, compared, ctx.params.get("preset"))
        told = environment(compared, device)
        emit(False, None, () if as_json else [*(f"{name:14}{value}" for name, value in told.items()), HEADER])
        rows = []
        for row in _rows(compared, parsed, only or ("forward", "training", "decode"), budget):
            rows.append(row)
            emit(False, None, () if as_json else _line(row, rows[:-1]))
    if csv_file:
        _write_csv(csv_file, rows, told)
    if plot:
        draw(plot, rows, told)
    wrong = [row for row in rows if row["side"] == "gdngen" and "ms" in row and not row["error"] <= row["budget"]]
    said = [f"FAILED: {row['operation']} {row['shape']} is off by {row['error']:.1e}" for row in wrong]
    emit(as_json, {"environment": told, "rows": rows, "failures": said}, said)
    ctx.exit(1 if wrong else 0)


def _is_given(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) not in (None, ParameterSource.DEFAULT)


def _comparison(folder: Path, dtype: str | None) -> tuple["Comparison", str]:
    """What is compared, and what its times are times of."""
    import torch

    from gdngen import api, package
    from gdngen.commands import comparison

    manifest: dict[str, Any] = package.read_manifest(folder)
    has_gpu = torch.cuda.is_available()
    if has_gpu and _interpreted():
        raise EnvironmentProblem("TRITON_INTERPRET is set, so kernels would run on the CPU: unset it to time the GPU")
    how = "times of the GPU"
    if not has_gpu:
        how = "CPU times of the PyTorch version: they say nothing about kernels"
        how = "CPU times of Triton's interpreter: they say nothing about kernels" if _interpreted() else how
    module = api.import_folder(folder, f"gdngen_bench_{folder.name}")
    dtype, device = dtype or ("bf16" if has_gpu else "fp32"), "cuda" if has_gpu else "cpu"
    spec, forms = Spec(**manifest["spec"]), tuple(manifest["cuts"])
    return comparison.Comparison(module, spec, forms, dtype, device, comparison.PEERS), how


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def _shapes(given: tuple[str, ...] | None, compared: "Comparison", preset: str | None) -> list["Shape"]:
    from gdngen.autotune.space import Shape

    on_gpu, ratio = compared.device == "cuda", compared.spec.head_ratio
    q_heads, v_heads = (16, 32 if ratio == "any" else 16 * ratio) if on_gpu else (1, 2 if ratio == "any" else ratio)
    if preset and on_gpu and presets.get(preset).q_heads:
        q_heads, v_heads = presets.get(preset).q_heads, presets.get(preset).v_heads
    sizes = SIZES if on_gpu else INTERPRETER_SIZES if _interpreted() else CPU_SIZES
    texts = given or [f"{size}:{q_heads}/{v_heads}" for size in sizes.split()]
    return [Shape.parse(text, compared.spec) for text in texts]


def environment(compared: "Comparison", measured: str) -> Row:
    """What the times depend on: GPU, driver, versions, what the GPU reaches today."""
    import torch
    import triton

    from gdngen.autotune import clock

    on_gpu = compared.device == "cuda"
    found: Row = {"measured": measured, "package": compared.package.__name__.removeprefix("gdngen_bench_")}
    found |= {"GPU": torch.cuda.get_device_name(), "driver": _driver()} if on_gpu else {"GPU": "none"}
    found |= {"dtype": compared.dtype, "gdngen": __version__, "torch": torch.__version__, "triton": triton.__version__}
    found |= {peer.name: peer.version or "not installed" for peer in compared.peers}
    found |= {"python": platform.python_version()}
    return found | ({name: float(f"{value:.4g}") for name, value in clock.ceilings().items()} if on_gpu else {})


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def _rows(compared: "Comparison", shapes: Sequence["Shape"], only: Sequence[str], budget: float) -> Iterator[Row]:
    """Every row as it is measured; a row with ``missing`` says why there is no time."""
    start = time.monotonic()
    for shape in shapes:
        for operation in ("forward", "training", "decode"):
            where: Row = {"operation": operation, "shape": str(shape), "side": "gdngen"}
            if operation not in only or (shape.length == 1) != (operation == "decode"):
                continue
            if operation not in compared.operations(shape):
                yield where | {"missing": f"the package has no operator for {operation}"}
            elif time.monotonic() - start > budget:
                yield where | {"missing": f"--budget {budget:g} s is spent"}
            else:
                for row in compared.rows(operation, shape):
                    yield {name: float(f"{x:.4g}") if isinstance(x, float) else x for name, x in row.items()}


HEADER = f"{'operation':<10}{'shape':<18}{'side':<12}{'median':>12}{'spread':>8}{'first':>9}{'error':>9}  times gdngen"


def _line(row: Row, before: Sequence[Row]) -> list[str]:
    """The row as a line; why a peer has no time is said once."""
    where = f"{row['operation']:<10}{row['shape']:<18}{row['side']:<12}"
    if "missing" in row:
        known = {(other["side"], other.get("missing")) for other in before}
        return [] if (row["side"], row["missing"]) in known and row["side"] != "gdngen" else [where + row["missing"]]
    times = f"{row['ms']:>9.4g} ms{row['spread']:>8.1%}{row['first_s']:>7.2f} s{row['error']:>9.1e}"
    return [f"{where}{times}  {row['times_ours']:.2f}"]


def _write_csv(file: Path, rows: Sequence[Row], told: Mapping[str, Any]) -> None:
    with naming(file), open(file, "w", newline="") as lines:
        writer = csv.DictWriter(lines, [*COLUMNS, "missing", *told], restval="")
        writer.writeheader()
        writer.writerows({**told, **row} for row in rows)


def draw(file: Path, rows: Sequence[Row], told: Mapping[str, Any]) -> None:
    """A PNG of the medians: a group of bars for each operation and shape, one bar a side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timed = [row for row in rows if "ms" in row]
    groups = list(dict.fromkeys((row["operation"], row["shape"]) for row in timed))
    sides = list(dict.fromkeys(row["side"] for row in timed))
    figure = Figure(figsize=(2 + 1.1 * max(len(groups), 4), 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes, width = figure.add_subplot(), 0.8 / max(len(sides), 1)
    for number, side in enumerate(sides):
        own = [row for row in timed if row["side"] == side]
        places = [groups.index((row["operation"], row["shape"])) + (number + 0.5) * width - 0.4 for row in own]
        bars = axes.bar(places, [row["ms"] for row in own], width, label=side)
        axes.bar_label(bars, [f"{row['ms']:.3g}" for row in own], fontsize=7)
    axes.set_xticks(range(len(groups)), ["\n".join(group) for group in groups], fontsize=7)
    axes.set(yscale="log", ylabel="ms (median)", title=f"{told['package']}, GPU: {told['GPU']}\n{told['measured']}")
    if sides:
        axes.legend()
    with naming(file):
        figure.savefig(file, format="png", dpi=150)
