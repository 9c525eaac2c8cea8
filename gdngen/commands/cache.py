"""``gdngen cache``: what gdngen keeps on this machine."""

import shutil

import click

from gdngen import knobs
from gdngen.commands.common import emit, json_option, table


@click.group()
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
