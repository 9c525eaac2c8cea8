"""The command line: arguments, tables, exit codes.  0 done, 1 a check failed, 2 usage, 3 environment."""

import functools
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from gdngen import __version__, knobs, presets
from gdngen import target as targets
from gdngen.errors import GdngenError
from gdngen.spec import CHUNKS, Spec

Pins = tuple[str, ...]
OPTIONS: dict[str, tuple[Any, str]] = {
    "rule": (["delta", "additive"], "How a token is written: over what the state predicts, or added."),
    "gate": (str, "none, or scalar, key, value; several are joined by +."),
    "beta": (["none", "head", "value", "dt"], "Write strength: per head, per value channel, Mamba-2's dt."),
    "key_dim": (int, "Head dim of q and k, up to 256."),
    "value_dim": (int, "Head dim of v."),
    "head_ratio": (str, "Value heads per query/key head; any: bound at launch."),
    "chunk": ([*map(str, CHUNKS), "auto"], "Tokens per chunk."),
    "state_v_first": (bool, "States are [V, K] in memory, not [K, V]."),
    "fused_gate": (["softplus", "bounded"], "Compute the gate from its raw input in the operator."),
    "lower_bound": (float, "Of the bounded gate, in [-5, 0); -5 if not given."),
    "beta_logits": (bool, "beta comes as logits; the sigmoid is applied in the operator."),
    "neg_eigval": (bool, "Twice the sigmoid of beta's logits."),
    "qk_norm": (bool, "Normalise q and k in the operator."),
    "normalize": (bool, "Divide o by the sum of the weights; states are then pairs."),
    "feature_map": (["identity", "elu1"], "Applied to q and k in the operator."),
    "varlen": (bool, "Without packed sequences."),
    "backward": (bool, "Without gradients."),
}


class Group(click.Group):
    """Turns gdngen's errors into one message and their exit code; GDNGEN_DEBUG=2 shows the traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (GdngenError, ImportError, OSError) as error:
            if knobs.debug() >= 2 or isinstance(error, BrokenPipeError):
                raise
            hint = "" if isinstance(error, GdngenError) else " (see gdngen doctor)"
            click.echo(f"gdngen: {error}{hint}", err=True)
            ctx.exit(getattr(error, "exit_code", 3))


def flag(name: str) -> str:
    return ("--no-" if Spec.model_fields[name].default is True else "--") + name.replace("_", "-")


def asks_for_a_spec(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --preset, the Spec's options, --target and --pin; hands on ``spec``, ``target`` and ``pins``."""

    @functools.wraps(command)
    def wrapped(preset: str | None, target: str, **options: Any) -> Any:
        given = {name: value for name in OPTIONS if (value := options.pop(name)) is not None}
        if preset and given:
            named = ", ".join(map(flag, given))
            raise click.UsageError(
                f"--preset {preset} is a whole Spec and leaves nothing for {named}: give one of them"
            )
        given |= {n: int(given[n]) for n in ("chunk", "head_ratio") if given.get(n, "").isdigit()}
        spec = presets.get(preset).spec if preset else Spec(**given)
        return command(spec=spec, target=targets.get(target).name, **options)

    shared = click.option("--pin", "pins", multiple=True, metavar="KEY=VALUE", help="Force a decision of the plan.")
    known = f"{', '.join(targets.TARGETS)}.  [{targets.DEFAULT_TARGET}]"
    wrapped = shared(click.option("--target", default=targets.DEFAULT_TARGET, metavar="T", help=known)(wrapped))
    for name, (kind, text) in reversed(OPTIONS.items()):
        default = Spec.model_fields[name].default
        if kind is bool:
            wrapped = click.option(flag(name), name, flag_value=not default, default=None, help=text)(wrapped)
            continue
        shown = "" if default is None else f"  [{'+'.join(default) if isinstance(default, tuple) else default}]"
        kind = click.Choice(kind) if isinstance(kind, list) else kind
        wrapped = click.option(flag(name), name, type=kind, help=text + shown)(wrapped)
    return click.option("--preset", metavar="NAME", help="The Spec of a published model (gdngen list).")(wrapped)


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")


def emit(as_json: bool, value: Any, lines: Iterable[str]) -> None:
    """The JSON document, or the lines as they come."""
    for line in [json.dumps(value, indent=2)] if as_json else lines:
        click.echo(line)


def table(rows: Iterable[Sequence[object]]) -> list[str]:
    """Columns as wide as their widest cell."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in texts]


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, message="%(prog)s %(version)s")
def main() -> None:
    """Write Triton packages for the gated delta rule family: gdngen build --gate scalar --chunk 64 --state-v-first"""


@main.command()
@asks_for_a_spec
@click.option("--name", metavar="NAME", help="The package's name; by default made from the Spec.")
@click.option("--out", default="generated", metavar="DIR", help="Parent folder of the package.  [generated]")
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if the package on disk would change.")
def build(spec: Spec, target: str, pins: Pins, name: str | None, out: str, check: bool) -> None:
    """Write a stand-alone package to DIR/NAME."""
    started = time.perf_counter()
    from gdngen import api, calls

    folder = api.build(spec, out, name=name, target_name=target, pins=pins, check=check)
    if check:
        return click.echo(f"{folder} is up to date")
    plan, files = api.compilation(spec, target, pins).plan, list(folder.rglob("*.py"))
    lines = sum(len(file.read_text().splitlines()) for file in files)
    click.echo(f"{folder}: {len(files)} modules, {lines} lines, {time.perf_counter() - started:.1f} s")
    names = []
    for operator in plan.operators:
        form, _, backward = operator.name.partition("_")
        public, kernels = calls.operator_name(spec, form), ", ".join(kernel.name for kernel in operator.kernels)
        names += [] if backward else [public]
        click.echo(f"  {public}{' backward' * bool(backward)}: cut {operator.cut} for {target}, kernels {kernels}")
    for note in plan.notes:
        click.echo(f"  note: {note}")
    click.echo(f"with {folder.parent} on PYTHONPATH:\n  from {folder.name} import {', '.join(names)}")
    click.echo(f"next:\n  gdngen verify {folder}\n  gdngen explain {' '.join(spec.flags())}")


@main.command("list")
@json_option
def list_(as_json: bool) -> None:
    """Presets, targets and the options of a Spec."""
    named = [asdict(p) | {"spec": p.spec.model_dump(), "package": p.spec.name} for p in presets.PRESETS.values()]
    options = {flag(name): text for name, (_, text) in OPTIONS.items()}
    rows = [
        (p["name"], f"{p['q_heads']}/{p['v_heads']}" if p["q_heads"] else "any", p["package"], p["note"]) for p in named
    ]
    lines = ["presets: query/key and value heads, package", *table(rows), "targets"]
    lines += table(
        (t.name, f"{t.processors} processors", f"{t.shared_bytes >> 10} KiB") for t in targets.TARGETS.values()
    )
    sizes = {name: asdict(target) for name, target in targets.TARGETS.items()}
    lines += ["options of build, explain, show and inspect", *table(options.items())]
    emit(as_json, {"presets": named, "targets": sizes, "options": options}, lines)


@main.command()
@click.argument("stage", type=click.Choice(["spec", "graph", "plan", "source"]))
@click.option("--after", metavar="PASS", help="The graph or plan that this pass made.")
@click.option("--kernel", metavar="NAME", help="source: one kernel, or another module: launch, reference, ...")
@asks_for_a_spec
@json_option
def show(stage: str, after: str, kernel: str, as_json: bool, spec: Spec, target: str, pins: Pins) -> None:
    """Print a stage of a build: spec, graph, plan or source."""
    if stage == "spec":
        record = {"name": spec.name, "digest": spec.digest, "command": spec.command} | spec.model_dump(mode="json")
        return emit(as_json, record, table((record | {"gate": "+".join(spec.gate) or "none"}).items()))
    from gdngen import api
    from gdngen.codegen.sources import sources

    found = api.compilation(spec, target, pins)
    if stage == "source":
        files = {Path(file).stem: (file, text) for file, text in sources(found.plan, spec.name).items()}
        kernels = [kernel.name for operator in found.plan.operators for kernel in operator.kernels]
        chosen = dict(files[_known("kernel", name, files)] for name in ([kernel] if kernel else kernels))
        return emit(as_json, chosen, (f"# {file}\n{text}" for file, text in chosen.items()))
    stages = {name: value for name, value in found.stages.items() if hasattr(value, "nodes") == (stage == "graph")}
    name = _known("after", after or ("graph" if stage == "graph" else list(stages)[-1]), stages)
    value: Any = stages[name]
    record = {"after": name, "digest": value.digest, "text": str(value)}
    emit(as_json, record if stage == "graph" else record | value.model_dump(mode="json"), str(value).splitlines())


def _known(option: str, name: str, names: Iterable[str]) -> str:
    if name not in names:
        raise click.UsageError(f"--{option} {name}: not one of {', '.join(names)}")
    return name


@main.command()
@asks_for_a_spec
@json_option
def explain(spec: Spec, target: str, pins: Pins, as_json: bool) -> None:
    """The chosen plan, the rejected ones, bytes, FLOPs, time."""
    from gdngen import api, explanation

    record = explanation.explain(api.compilation(spec, target, pins))
    emit(as_json, record, explanation.text(record))


@main.command()
@click.option(
    "--dtype", "dtypes", multiple=True, type=click.Choice(["bf16", "fp16", "fp32"]), help="Of q, k, v.  [bf16]"
)
@asks_for_a_spec
@json_option
def inspect(dtypes: tuple[str, ...], spec: Spec, target: str, pins: Pins, as_json: bool) -> None:
    """Compile the kernels: registers, spills, shared memory."""
    from gdngen import inspection

    records = inspection.inspect(spec, [target], dtypes or ("bf16",), pins=pins)
    emit(as_json, list(records) if as_json else (), inspection.text(records))


@main.command()
@click.argument("path", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--preset", metavar="NAME", help="Build this preset in a temporary folder and check that.")
@json_option
@click.pass_context
def verify(ctx: click.Context, path: Path | None, preset: str | None, as_json: bool) -> None:
    """Check a package: digests, stand-alone import, numbers."""
    if (path is None) == (preset is None):
        raise click.UsageError("give the PATH of a package or --preset NAME, one of them")
    from gdngen import api, verification

    checks: list[verification.Check] = []
    with tempfile.TemporaryDirectory(prefix="gdngen_") as scratch:
        path = path or api.build(str(preset), scratch)
        for check in verification.verify(path, functools.partial(click.echo, err=True)):
            checks.append(check)
            if not as_json:
                click.echo(str(check))
    failed = sum(not check.passed for check in checks)
    record = {"package": path.name, "passed": not failed, "checks": [asdict(check) for check in checks]}
    emit(as_json, record, [f"{path.name}: {len(checks)} checks, {failed} failed"])
    ctx.exit(1 if failed else 0)


@main.command()
@json_option
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """What this machine has and what is missing."""
    from gdngen import doctor as ward

    record = ward.report()
    emit(as_json, record, ward.text(record))
    ctx.exit(3 if record["problems"] else 0)


@main.group()
def cache() -> None:
    """The packages that gdngen.ops and gdngen.load have built."""


@cache.command("ls")
@json_option
def cache_ls(as_json: bool) -> None:
    """List them."""
    from gdngen import doctor as ward

    rows = ward.cached_packages()
    lines = table((row["package"], row["gdngen"], f"{row['bytes'] >> 10} KiB") for row in rows)
    emit(as_json, rows, [*lines, f"{len(rows)} packages in {knobs.cache_dir()}"])


@cache.command("clear")
@click.option("--yes", is_flag=True, help="Do not ask.")
def cache_clear(yes: bool) -> None:
    """Remove them; each is built again when next needed."""
    from gdngen import doctor as ward

    rows = ward.cached_packages()
    if rows and not yes:
        click.confirm(f"Remove {len(rows)} packages from {knobs.cache_dir()}?", abort=True)
    for row in rows:
        shutil.rmtree(row["folder"], ignore_errors=True)
    click.echo(f"removed {len(rows)} packages from {knobs.cache_dir()}")
