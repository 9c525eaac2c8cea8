"""``gdngen cache``: what gdngen keeps on this machine, packages and measurements."""

import functools
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gdngen import knobs
from gdngen.commands.common import emit, json_option, table
from gdngen.commands.kinds import NewFile, Some

if TYPE_CHECKING:
    from gdngen.autotune.store import Measurements, Record

Wanted = dict[str, int | str]
PLAIN, PARTED = ("kernel", "body", "gpu"), ("configuration", "shape", "versions")
FIELDS = ", ".join([*PLAIN, *(f"{name}.NAME" for name in PARTED)])
SHOWN = 40  # lines of records; --json prints them all


def measurements() -> "Measurements":
    from gdngen.autotune.store import Measurements

    return Measurements()


def asks_for_fields(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --kernel, --gpu and --field; hands on ``wanted``, the fields that a measurement should have."""

    @functools.wraps(command)
    def wrapped(kernel: str | None, gpu: str | None, fields: tuple[str, ...], **options: Any) -> Any:
        named = [("kernel", kernel), ("gpu", gpu), *map(_field, fields)]
        return command(wanted={name: value for name, value in named if value is not None}, **options)

    wrapped = click.option("--field", "fields", multiple=True, metavar="NAME=VALUE", help=f"{FIELDS}.")(wrapped)
    wrapped = click.option("--gpu", type=Some(), metavar="NAME", help="As torch names it: NVIDIA H200.")(wrapped)
    return click.option("--kernel", type=Some(), metavar="NAME", help="As gdngen inspect names it.")(wrapped)


def _field(text: str) -> tuple[str, int | str]:
    name, equals, value = text.partition("=")
    group, _, part = name.partition(".")
    if not equals or group not in (PARTED if part else PLAIN):
        raise click.UsageError(f"--field {text}: expected NAME=VALUE with NAME one of {FIELDS}")
    return name, int(value) if group in ("configuration", "shape") and value.lstrip("-").isdigit() else value


@click.group()
def cache() -> None:
    """What is kept on this machine: packages that gdngen.ops and gdngen.load built, measurements of gdngen tune."""


@cache.command("ls")
@json_option
def cache_ls(as_json: bool) -> None:
    """List packages, and measurements by GPU and kernel."""
    from gdngen import doctor as ward

    packages, records = ward.cached_packages(), list(measurements().records())
    counted = Counter((record.key.gpu, record.key.kernel, record.outcome == "ok") for record in records)
    rows = [
        {"gpu": gpu, "kernel": kernel, "ok": counted[gpu, kernel, True], "rejected": counted[gpu, kernel, False]}
        for gpu, kernel in sorted({pair[:2] for pair in counted})
    ]
    lines = table((row["package"], row["gdngen"], f"{row['bytes'] >> 10} KiB") for row in packages)
    lines += [f"{len(packages)} packages in {knobs.cache_dir()}"]
    lines += table((row["gpu"], row["kernel"], f"{row['ok']} ok", f"{row['rejected']} rejected") for row in rows)
    lines += [f"{len(records)} measurements in {measurements().root}"]
    kinds = [{"kind": "package"} | row for row in packages] + [{"kind": "measurements"} | row for row in rows]
    emit(as_json, kinds, lines)


@cache.command("explain")
@asks_for_fields
@click.option("--here", is_flag=True, help="With the GPU and the versions of this machine.")
@json_option
def cache_explain(wanted: Wanted, here: bool, as_json: bool) -> None:
    """Which measurements have these fields, or why none has: the nearest one and where it differs."""
    store = measurements()
    wanted = _here(list(store.records())) | wanted if here else wanted
    found, nearest = store.matching(wanted), store.nearest(wanted)
    record: dict[str, Any] = {"wanted": wanted, "matching": [one.model_dump() for one in found]}
    record |= {"nearest": None, "differences": {}}
    if nearest and not found:
        pairs = {name: dict(zip(("wanted", "stored"), pair)) for name, pair in nearest[1].items()}
        record |= {"nearest": nearest[0].model_dump(), "differences": pairs}
    emit(as_json, record, _matches(found) if found else store.explain_miss(wanted))


def _here(records: Sequence["Record"]) -> Wanted:
    """The GPU of this machine, and its versions of what records name a version of."""
    from gdngen import doctor

    found: dict[str, Any] = doctor.report()
    names = {name for record in records for name in record.key.versions}
    versions = {f"versions.{name}": found["versions"].get(name, "unknown") for name in sorted(names)}
    return versions | {"gpu": found["gpus"][0]["name"] if found["gpus"] else "none"}


def _matches(records: Sequence["Record"]) -> list[str]:
    texts = [
        [", ".join(f"{name}={value}" for name, value in values.items()) for values in (key.configuration, key.shape)]
        for key in (record.key for record in records)
    ]
    rows = [(record.key.kernel, *text, record.key.gpu, record) for record, text in zip(records, texts)]
    more = [f"  ... {len(rows) - SHOWN} more (--json prints all)"] if len(rows) > SHOWN else []
    return [*table(rows[:SHOWN]), *more, f"{len(records)} measurements have these fields"]


@cache.command("clear")
@click.option("--packages", is_flag=True, help="Packages only; each is built again when next needed.")
@click.option("--measurements", "measured", is_flag=True, help="Measurements only; decisions in packages stay.")
@asks_for_fields
@click.option("--yes", is_flag=True, help="Do not ask.")
def cache_clear(packages: bool, measured: bool, wanted: Wanted, yes: bool) -> None:
    """Remove packages and measurements; with fields, the measurements that have them."""
    from gdngen import doctor as ward

    if wanted and packages:
        raise click.UsageError("--kernel, --gpu and --field choose measurements: leave out --packages")
    both, store = packages == measured and not wanted, measurements()
    rows = ward.cached_packages() if packages or both else []
    files = store.files(wanted) if measured or wanted or both else []
    if (rows or files) and not yes:
        what = f"{len(rows)} packages and {len(files)} measurements from {knobs.cache_dir()}"
        if not _confirmed(f"Remove {what}?"):
            return click.echo("nothing is removed")
    for row in rows:
        shutil.rmtree(row["folder"], ignore_errors=True)
    removed = store.clear(wanted) if files else 0
    click.echo(f"removed {len(rows)} packages and {removed} measurements from {knobs.cache_dir()}")


def _confirmed(question: str) -> bool:
    """What was answered; UsageError where nobody can answer, as in a script."""
    try:
        return click.confirm(question)
    except click.Abort as end:
        if isinstance(end.__context__, EOFError):
            raise click.UsageError("nobody answers (standard input has ended): give --yes") from None
        raise


@cache.command("export")
@click.argument("file", type=NewFile())
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
def cache_export(file: Path, force: bool) -> None:
    """Write every measurement to FILE, one JSON record a line."""
    if file.exists() and not force:
        raise click.UsageError(f"{file} exists: name another file or give --force")
    click.echo(f"{measurements().export_to(file)} measurements written to {file}")


@cache.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@json_option
@click.pass_context
def cache_import(ctx: click.Context, file: Path, as_json: bool) -> None:
    """Take the measurements of FILE that are not here yet; exit with 1 if a line was refused."""
    counts = measurements().import_from(file)
    lines = [f"{file}:{number}: refused: {reason}" for number, reason in counts.refused]
    refused = [{"line": number, "reason": reason} for number, reason in counts.refused]
    told = f"{counts.taken} measurements taken, {counts.known} known, {len(refused)} refused"
    emit(as_json, {"taken": counts.taken, "known": counts.known, "refused": refused}, [*lines, told])
    ctx.exit(1 if refused else 0)
