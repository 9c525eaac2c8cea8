"""gdngen with other versions of Triton: ``python tests/versions.py [VERSION ...] [--few] [--table FILE]``.

pip installs each Triton into a folder of build/versions, which goes before the tested environment on the path of a
process of its own.  There, packages run in the interpreter against the float64 recurrence, kernels of presets are
compiled and their machine code is looked at, and what is compiled ahead of time must be found by launches.  ``--few``
is a sample of that in seconds.  Results are lines of JSON in build/versions/<version>.json.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / "build" / "versions"
VERSIONS = ("3.4.0", "3.5.1", "3.6.0", "3.7.1", "3.8.0", "3.9.0")
# What is compiled where: a change of compiler shows on every target, a member's own products on one.
PRESETS = {"sm_90": ("qwen3-next", "kimi-linear", "mamba2-2.7b", "deltanet", "linear-attention")}
ELSEWHERE = ("qwen3-next",)
SMALL = {"key_dim": 12, "value_dim": 20, "chunk": 16}
MEMBERS: dict[str, dict[str, Any]] = {  # each reads masks, gates and states in its own way
    "scalar gate": {},
    "key gate": {"gate": "key", "qk_norm": True, "fused_gate": "bounded", "beta_logits": True},
    "value gate": {"gate": "value", "state_v_first": True},
    "normaliser": {"rule": "additive", "beta": "none", "gate": "none", "normalize": True, "feature_map": "elu1"},
    "dt": {"rule": "additive", "beta": "dt"},
}
MIXER: list[tuple[str, str, dict[str, Any]]] = [
    ("convolution", "Convolution", {"activation": "silu"}),
    ("gated norm", "RowNorm", {"gate": "silu", "weight": "plain"}),
]
FEW_CALLS = 8
UNANSWERED = ("(from versions: none)", "HTTPConnectionPool", "HTTPSConnectionPool")  # in the words of pip
Record = dict[str, Any]


class IndexUnreachable(RuntimeError):
    """The package index does not answer; any other failure of pip is a fault."""


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        unanswered = any(words in done.stderr for words in UNANSWERED)
        said = f"pip {' '.join(arguments)}: {done.stderr.strip()}"
        raise IndexUnreachable(said) if unanswered else RuntimeError(said)


# ------------------------------------------------------------------------------------------------ one version


def installed(version: str) -> Path:
    """The folder that holds this Triton, installed by pip where it is not there yet."""
    if metadata.version("triton") == version:  # the tested environment's own
        return Path(str(metadata.distribution("triton").locate_file("")))
    folder = PLACE / f"triton-{version}"
    if not folder.exists():
        PLACE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=PLACE) as scratch:
            made = Path(scratch) / "triton"
            pip("install", "--no-deps", "--target", str(made), f"triton=={version}")
            made.rename(folder)
    return folder


def run(version: str, few: bool) -> list[Record]:
    """Everything under one Triton, in a process of its own."""
    file = PLACE / f"{version}{'.few' * few}.json"
    path = os.pathsep.join([str(installed(version)), str(ROOT)])
    with tempfile.TemporaryDirectory() as cache:  # what an earlier run compiled proves nothing
        settings = {"PYTHONPATH": path, "TRITON_CACHE_DIR": cache, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", __file__, version, "--inside", str(file), *["--few"] * few]
        subprocess.run(command, check=True, env=os.environ | settings)
    return [json.loads(line) for line in file.read_text().splitlines()]


def inside(version: str, file: Path, few: bool) -> None:
    """In that process: write the records, one by one."""
    import triton

    assert triton.__version__ == version, f"{triton.__version__} is imported, not {version}"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as lines, tempfile.TemporaryDirectory() as scratch:
        for record in itertools.chain(compiled(few), interpreted(Path(scratch), few), ahead(Path(scratch), few)):
            lines.write(json.dumps(record) + "\n")
            lines.flush()
            print(f"{version}  {record['where']:12} {record['what']:18} {said(record)}", flush=True)


def interpreted(scratch: Path, few: bool) -> Iterator[Record]:
    """Results and gradients of small packages in the interpreter, on the calls of gdngen verify."""
    from gdngen import api, standalone, verification
    from gdngen.spec import Spec

    for name, options in list(MEMBERS.items())[: 1 if few else None]:
        spec, started = Spec(**(SMALL | options)), time.perf_counter()
        folder = api.build(spec, scratch)
        package, faults, count = api.import_folder(folder, folder.name), [], 0
        forms = [form for form in ("chunk", "chunk_backward", "recurrent") if form not in package.spec.MISSING]
        questions = verification._questions(verification.INTERPRETER, spec, forms)
        for asked in itertools.islice(questions, FEW_CALLS if few else None):
            count += 1
            try:
                answer = standalone.answer(package, asked.call)
                check = verification._compare(verification.INTERPRETER, asked, answer)
                faults += [] if check.passed else [str(check)]
            except Exception as error:
                faults.append(f"{asked.what}: {type(error).__name__}: {error}")
        yield record_of("interpreter", name, started, faults, f"{count} calls")
    for name, member, options in MIXER[: 1 if few else None]:
        yield around(name, member, options, scratch)


def around(name: str, member: str, options: dict[str, Any], scratch: Path) -> Record:
    """A member of the mixer, on the calls of gdngen verify."""
    from gdngen.mixer import packages, specs, verification

    started = time.perf_counter()
    folder = packages.build(getattr(specs, member)(**options), scratch)
    checks = list(verification.verify(folder))
    faults = [f"{where}: {what} {detail}" for where, what, passed, detail, *_ in checks if not passed]
    return record_of("interpreter", name, started, faults, f"{len(checks)} calls")


def compiled(few: bool) -> Iterator[Record]:
    """Kernels of presets for every target: they compile, fit, and no known fault shows in their machine code."""
    from gdngen.presets import PRESETS as KNOWN
    from gdngen.spec import Spec
    from gdngen.target import TARGETS

    if few:
        yield cell("sm_90", "small", Spec(key_dim=16, value_dim=16, chunk=16))
        return
    for target in TARGETS:
        for name in PRESETS.get(target, ELSEWHERE):
            yield cell(target, name, KNOWN[name].spec)


def cell(target: str, name: str, spec: Any) -> Record:
    from gdngen import inspection

    started, rows, faults = time.perf_counter(), [], []
    try:
        for row in inspection.inspect(spec, [target], layouts=["packed"], few=[], listed=["sm_90"]):
            rows.append(row)
    except Exception as error:
        faults.append(f"{type(error).__name__}: {error}")
    faults += [f"{row['kernel']} is miscompiled" for row in rows if row["miscompiled"]]
    over = [row for row in rows if row["shared_bytes"] > row["shared_limit"]]
    faults += [f"{row['kernel']} needs {row['shared_bytes']} bytes of shared memory" for row in over]
    spills = [f"{row['kernel']} {row['spill_bytes']}" for row in rows if row["spill_bytes"]]
    return record_of(target, name, started, faults, f"{len(rows)} kernels", spills=spills)


def ahead(scratch: Path, few: bool) -> Iterator[Record]:
    """Kernels compiled ahead of time: launches find them all in Triton's cache."""
    if few:
        return
    from test_aot import HEADS, SPEC, looked_up

    from gdngen import api
    from gdngen.autotune import aot

    started, folder = time.perf_counter(), api.build(SPEC, scratch, name="ahead")
    try:
        made = aot.build(aot.Job(folder, "sm_90", ("bfloat16",), (HEADS,)))
        _, launches = looked_up(folder, scratch / "cache", PYTHONPATH=os.environ["PYTHONPATH"])
        count = f"{made.kernels} kernels, {made.launchers} launchers"
        faults = [f"{kernel} was compiled again" for kernel, found in launches if not found]
    except Exception as error:
        count, faults = "0 kernels", [f"{type(error).__name__}: {error}"]
    yield record_of("ahead of time", "sm_90", started, faults, count)


def record_of(where: str, what: str, started: float, faults: list[str], count: str, **more: Any) -> Record:
    seconds = round(time.perf_counter() - started, 1)
    return {"where": where, "what": what, "count": count, "faults": faults, "seconds": seconds, **more}


def said(record: Record) -> str:
    spills = f", spills {', '.join(record['spills'])} bytes" if record.get("spills") else ""
    return f"{record['count']}{spills}, {record['seconds']} s" + "".join(f"\n    FAILED {f}" for f in record["faults"])


# ------------------------------------------------------------------------------------------------ the table


def table(found: dict[str, list[Record]]) -> Iterator[str]:
    """A row for each Triton, a column for each place, as Markdown; below it the faults in full."""
    columns = list(dict.fromkeys(record["where"] for records in found.values() for record in records))
    yield f"| Triton | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for version, records in found.items():
        cells = ([record for record in records if record["where"] == column] for column in columns)
        yield f"| {version} | {' | '.join(map(summary, cells))} |"
    faults = [(v, r, fault) for v, records in found.items() for r in records for fault in r["faults"]]
    yield ""
    yield from (
        f"- Triton {version}, {r['where']}, {r['what']}: {fault.splitlines()[0]}" for version, r, fault in faults
    )


def summary(records: list[Record]) -> str:
    """ok and how many, or what failed; what spills."""
    if not records:
        return "not run"
    counts = [record["count"].partition(" ") for record in records]
    total = f"{sum(int(number) for number, _, _ in counts)} {counts[0][2].partition(',')[0]}"
    spilled = [f"{record['what']}: {', '.join(record['spills'])}" for record in records if record.get("spills")]
    bad = [record["what"] for record in records if record["faults"]]
    return "; ".join([f"**fails**: {', '.join(bad)}" if bad else f"ok, {total}", *(f"spills {s}" for s in spilled)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", default=list(VERSIONS), metavar="VERSION")
    parser.add_argument("--few", action="store_true", help="a sample")
    parser.add_argument("--table", type=Path, help="put the table into this file, between its two marks")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside(options.versions[0], options.inside, options.few)
        return 0
    found = {version: run(version, options.few) for version in options.versions}
    lines = "\n".join(table(found))
    print(lines)
    if options.table:
        before, mark, rest = options.table.read_text().partition("<!-- measured -->\n")
        after = rest[rest.index("<!-- end -->") :]
        options.table.write_text(f"{before}{mark}{lines.rstrip()}\n{after}")
    from gdngen.doctor import too_old

    return int(any(record["faults"] for version in found if not too_old(version) for record in found[version]))


if __name__ == "__main__":
    sys.exit(main())
