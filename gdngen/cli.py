"""The command line: commands and exit codes.  0 done, 1 a check failed, 2 usage, 3 environment, 130 interrupted."""

import functools
import os
import tempfile
import time
import warnings
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from gdngen import __version__, knobs, presets
from gdngen import target as targets
from gdngen.commands.ahead import Ahead, aot_options
from gdngen.commands.bench import bench
from gdngen.commands.cache import cache
from gdngen.commands.common import OPTIONS, Pins, asks_for_a_spec, emit, flag, in_options, json_option, table
from gdngen.commands.kinds import Dtype, NewFile, Some
from gdngen.commands.tune import tune
from gdngen.errors import ArgumentError, GdngenError, GdngenWarning, SpecError, naming
from gdngen.spec import Spec

INTERRUPTED = 130  # as shells say it of a program that SIGINT ended


class Group(click.Group):
    """Turns gdngen's errors and warnings into one message, errors into exit codes; GDNGEN_DEBUG=2 shows tracebacks."""

    def invoke(self, ctx: click.Context) -> Any:
        shown = warnings.showwarning
        try:
            knobs.debug()
            with warnings.catch_warnings():
                warnings.showwarning = lambda text, category, *rest: (
                    click.echo(f"gdngen: {text}", err=True)
                    if issubclass(category, GdngenWarning)
                    else shown(text, category, *rest)
                )
                return super().invoke(ctx)
        except (GdngenError, ImportError, OSError) as error:
            if os.environ.get("GDNGEN_DEBUG") in ("2", "3", "4") or isinstance(error, BrokenPipeError):
                raise
            hint = " (see gdngen doctor)" if isinstance(error, ImportError) else ""
            said = in_options(str(error)) if isinstance(error, (ArgumentError, SpecError)) else str(error)
            click.echo(f"gdngen: {said}{hint}", err=True)
            ctx.exit(getattr(error, "exit_code", 3))
        except (KeyboardInterrupt, click.Abort):  # the second from a question
            click.echo("gdngen: interrupted", err=True)
            ctx.exit(INTERRUPTED)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, message="%(prog)s %(version)s")
def main() -> None:
    """Write Triton packages for the gated delta rule family: gdngen build --gate scalar --chunk 64 --state-v-first"""


@main.command()
@asks_for_a_spec
@click.option("--name", metavar="NAME", help="The package's name; by default made from the Spec.")
@click.option("--out", default="generated", metavar="DIR", help="Parent folder of the package.  [generated]")
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if the package on disk would change.")
@click.option("--wheel", is_flag=True, help="Also write a wheel beside the package, for pip.")
@click.option(
    "--hub", type=Some(), metavar="DIR", help="Also write it into DIR as a repository of the library kernels."
)
@aot_options
def build(
    spec: Spec,
    target: str,
    pins: Pins,
    name: str | None,
    out: str,
    check: bool,
    wheel: bool,
    hub: str | None,
    ahead: Ahead,
) -> None:
    """Write a stand-alone package to DIR/NAME."""
    started = time.perf_counter()
    from gdngen import api, calls, package
    from gdngen import hub as repositories
    from gdngen import wheel as wheels

    if check and (ahead.targets or wheel or hub):
        option = "--aot" if ahead.targets else "--wheel" if wheel else "--hub"
        raise click.UsageError(f"--check writes nothing, {option} does: give one of them")
    if hub is not None:
        repositories.check(Path(hub), name or spec.name)
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
    for text in ahead.compile(folder):
        click.echo(text)
    if wheel:
        file = wheels.write(folder)
        click.echo(f"{file}: {file.stat().st_size / 2**10:.0f} KiB, for pip install")
    if hub is not None:
        variants = repositories.write(folder, Path(hub))
        names_of = " and ".join(variant.name for variant in variants)
        click.echo(f"{hub}: {names_of}, for kernels.get_local_kernel(Path({hub!r}))")
    click.echo(f"with {folder.parent} on PYTHONPATH:\n  from {folder.name} import {', '.join(names)}")
    same = package.plan_options(plan)
    click.echo(f"next:\n  gdngen verify {folder}\n  gdngen explain {' '.join([*spec.flags(), *same])}")


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
    lines += ["options of build, explain, show, inspect, tune and bench", *table(options.items())]
    emit(as_json, {"presets": named, "targets": sizes, "options": options}, lines)


@main.command()
@click.argument("stage", type=click.Choice(["spec", "schema", "graph", "plan", "source"]))
@click.option("--after", type=Some(), metavar="PASS", help="The graph or plan that this pass made.")
@click.option(
    "--kernel", type=Some(), metavar="NAME", help="source: one kernel, or another module: launch, reference, ..."
)
@asks_for_a_spec
@json_option
def show(stage: str, after: str | None, kernel: str | None, as_json: bool, spec: Spec, target: str, pins: Pins) -> None:
    """Print a stage of a build: spec, schema, graph, plan or source."""
    if stage == "spec":
        record = {"name": spec.name, "digest": spec.digest, "command": spec.command} | spec.model_dump(mode="json")
        return emit(as_json, record, table((record | {"gate": "+".join(spec.gate) or "none"}).items()))
    if stage == "schema":
        from gdngen.ir.family import schema_of

        schema = schema_of(spec)
        return emit(as_json, [asdict(row) for row in schema.rows.values()], str(schema).splitlines())
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
@click.option("--html", type=NewFile(), help="Write it as a page with a figure instead.")
@json_option
def explain(spec: Spec, target: str, pins: Pins, html: Path | None, as_json: bool) -> None:
    """The chosen plan, the rejected ones, bytes, FLOPs, time."""
    from gdngen import api, explanation, figure

    if html is not None and as_json:
        raise click.UsageError("--html and --json: give one of them")
    record = explanation.explain(api.compilation(spec, target, pins))
    if html is not None:
        with naming(html):
            html.write_text(figure.page(record))
        click.echo(html)
    else:
        emit(as_json, record, explanation.text(record))


@main.command()
@click.option("--dtype", "dtypes", multiple=True, type=Dtype(), help="Of q, k, v.  [bf16]")
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


for command in (bench, cache, tune):
    main.add_command(command)
