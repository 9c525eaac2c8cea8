"""Measurements of this machine: disposable, one JSON record per key, shared by any number of processes.

    measurements/<digest of the key>.json    a record; appears whole or not at all
    measurements/quarantine/                 records that could not be used
    measurements/locks/                      one lock per key that is being measured

Nothing here fails a caller: whatever cannot be read or written is warned about once a process, and measured again.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from filelock import FileLock
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gdngen import knobs
from gdngen.errors import GdngenWarning, naming

Fields = Mapping[str, int | str]
Differences = dict[str, tuple[int | str, int | str]]  # field: wanted, stored
FORMAT = 1
CLEAR = "gdngen cache clear --measurements"
REASONS = {
    "body": "the kernel's text has changed",
    "gpu": "another GPU",
    "versions": "another version",
    "configuration": "another configuration",
    "shape": "another shape",
}
_FIRM = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Key(BaseModel):
    """What a time depends on.  ``body``: digest of the kernel's text; ``shape``: sizes and dtypes of the launch."""

    model_config = _FIRM

    kernel: str
    body: str
    configuration: dict[str, int]
    shape: dict[str, int | str]
    gpu: str
    versions: dict[str, str]

    def __hash__(self) -> int:
        return hash(self.digest)

    @functools.cached_property
    def digest(self) -> str:
        """32 hex digits, whatever the order of the fields."""
        return hashlib.sha256(json.dumps(self.model_dump(), sort_keys=True).encode()).hexdigest()[:32]

    def fields(self) -> dict[str, int | str]:
        """Every field under its full name: kernel, gpu, configuration.BV, versions.triton, ..."""
        flat: dict[str, int | str] = {}
        for name, value in self.model_dump().items():
            flat |= {f"{name}.{part}": of for part, of in value.items()} if isinstance(value, dict) else {name: value}
        return flat


class Record(BaseModel):
    """What came of measuring a key.  ``spread``: interquartile range over median; ``note``: why it is not ok.

    ``limit``: the seconds within which what hung gave no answer; with more it may give one.
    """

    model_config = _FIRM

    format: int = FORMAT
    key: Key
    outcome: Literal["ok", "wrong", "racy", "hung", "crashed", "unfit"]
    microseconds: float | None = Field(default=None, gt=0)
    spread: float | None = Field(default=None, ge=0)
    note: str = ""
    limit: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _check(self) -> "Record":
        if self.outcome == "ok" and self.microseconds is None:
            raise ValueError("microseconds: an outcome of ok needs a time")
        return self

    def __str__(self) -> str:
        time = "" if self.microseconds is None else f" {self.microseconds:.1f} us"
        return f"{self.outcome}{time}{f' ({self.note})' * bool(self.note)}"


class Counts(NamedTuple):
    """Of an import: lines taken, lines that were here already, and (number, reason) of each line refused."""

    taken: int
    known: int
    refused: tuple[tuple[int, str], ...]


class Fault(ValueError):
    """Why a text is not a record that can be used."""


def read_record(text: str | bytes) -> Record:
    """The record, or Fault: cut short, not JSON, of the future, or with wrong fields."""
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise Fault(f"it is cut short or not JSON ({error})") from None
    written = raw.get("format") if isinstance(raw, dict) else None
    if isinstance(written, int) and written > FORMAT:
        raise Fault(f"a newer gdngen wrote it (format {written}, this one reads {FORMAT})")
    if written != FORMAT:
        raise Fault(f"its format is {written!r}, this gdngen reads {FORMAT}")
    try:
        return Record.model_validate_json(text)
    except ValidationError as error:
        said = {".".join(map(str, fault["loc"])): fault for fault in error.errors()}
        if unknown := [name for name, fault in said.items() if fault["type"] == "extra_forbidden"]:
            raise Fault(f"it has fields that this gdngen does not know ({', '.join(unknown)})") from None
        raise Fault("; ".join(f"{name}: {fault['msg']}".lstrip(": ") for name, fault in said.items())) from None


_said: set[tuple[Path, str]] = set()  # a process says each thing once
_unstored: dict[Path, dict[str, Record]] = {}  # by folder and digest: what this process could not store


class Measurements:
    """The records of one folder.  Safe for threads and processes; what cannot be stored is kept for this process."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or knobs.cache_dir() / "measurements"

    def path(self, digest: str) -> Path:
        """Where the record of a key is stored."""
        return self.root / f"{digest}.json"

    def get(self, key: Key) -> Record | None:
        """The record of a key, or None.  A file that is no record of it is quarantined, with one warning."""
        with contextlib.suppress(Fault):
            return self._read(key.digest)
        with self.lock(key.digest):  # so that nobody's new record is moved in place of the broken one
            return self._get_locked(key)

    def measured(
        self, key: Key, measure: Callable[[], Record], counts: Callable[[Record], bool] = lambda record: True
    ) -> Record:
        """The record of a key, measured now where there is none that ``counts``.  Of processes that ask at once, one
        measures."""
        with contextlib.suppress(Fault):
            if (record := self._read(key.digest)) and counts(record):
                return record
        with self.lock(key.digest):
            record, stored = self._get_locked(key), True
            if record is None or not counts(record):
                record = measure()
                if record.key != key:
                    raise ValueError(f"the record of {key.kernel} is of another key than the one asked for: {record}")
                stored = self.put(record)
            if stored:  # whoever waits for the lock, or comes later, finds the record
                with contextlib.suppress(OSError):
                    self._lock_path(key.digest).unlink()
        return record

    def records(self) -> Iterator[Record]:
        """Every record that can be used; others are warned about and left where they are."""
        found = dict(_unstored.get(self.root, {}))
        for path in sorted(self.root.glob("*.json")):
            try:
                if path.stem not in found and (record := self._read(path.stem)):
                    found[path.stem] = record
            except Fault as fault:
                self._warn(path.name, f"{path}: not used: {fault}; it is measured again when needed, or: {CLEAR}")
        yield from (found[digest] for digest in sorted(found))

    def explain_miss(self, wanted: Fields, whole: bool = False) -> list[str]:
        """Why no record has the fields wanted (``whole``: and no others): the nearest one and where it differs."""
        nearest = self.nearest(wanted, whole)
        if nearest is None:
            return [f"miss: {self.root} holds no measurements"]
        record, differing = nearest
        lines = [f"miss; the nearest record is {record.key.digest}, {record}"]
        for name, (asked, held) in differing.items():
            reason = REASONS.get(name.partition(".")[0])
            lines.append(f"  {name}: wanted {asked}, stored {held}" + (f" ({reason})" if reason else ""))
        return lines

    def nearest(self, wanted: Fields, whole: bool = False) -> tuple[Record, Differences] | None:
        """The record, of the kernel wanted if there is one, that differs in the fewest fields, and in which."""
        stored = [(record, differences(wanted, record.key.fields(), whole)) for record in self.records()]
        return min(stored, key=lambda one: ("kernel" in one[1], len(one[1])), default=None)

    def matching(self, wanted: Fields) -> list[Record]:
        """The records that have all of the fields wanted."""
        return [record for record in self.records() if not differences(wanted, record.key.fields())]

    def files(self, wanted: Fields | None = None) -> list[Path]:
        """Files of the records that have the fields wanted; without any, every file but locks."""
        if wanted:
            return [self.path(record.key.digest) for record in self.matching(wanted)]
        return [path for glob in ("*.json", ".*.part", "quarantine/*.json") for path in sorted(self.root.glob(glob))]

    def clear(self, wanted: Fields | None = None) -> int:
        """Remove the files of the fields wanted; without any, every file but locks.  How many went."""
        removed = sum([self._removed(path) for path in self.files(wanted)])
        kept = _unstored.get(self.root, {})
        for digest in [d for d, record in kept.items() if not differences(wanted or {}, record.key.fields())]:
            del kept[digest]
        return removed

    def export_to(self, file: Path) -> int:
        """Write every record as a line of JSON; how many.  OSError where the file cannot be written."""
        lines = [record.model_dump_json() + "\n" for record in self.records()]
        _write(file, "".join(lines))
        return len(lines)

    def import_from(self, file: Path) -> Counts:
        """Take each line that is a record of a key not stored yet.  OSError where the file cannot be read."""
        taken, known, refused = 0, 0, []
        for number, line in enumerate(file.read_bytes().splitlines(), 1):
            try:
                if line.strip() and self._taken(read_record(line)):
                    taken += 1
                elif line.strip():
                    known += 1
            except Fault as fault:
                refused.append((number, str(fault)))
        return Counts(taken, known, tuple(refused))

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Only one process at a time holds a name.  Where no lock can be had, none is held, with one warning.

        A process that dies lets go of what it holds.
        """
        path = self._lock_path(name)
        lock = FileLock(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
            self._warn_of_folder(error)
        try:
            yield
        finally:
            lock.release()

    def _lock_path(self, name: str) -> Path:
        return self.root / "locks" / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}.lock"

    def _read(self, digest: str) -> Record | None:
        """The record stored under a digest; None where there is none, Fault where it cannot be used."""
        if record := _unstored.get(self.root, {}).get(digest):
            return record
        try:
            text = self.path(digest).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn_of_folder(error)
            return None
        record = read_record(text)
        if record.key.digest != digest:
            raise Fault(f"its key belongs to {record.key.digest}.json: it was renamed or altered")
        return record

    def _get_locked(self, key: Key) -> Record | None:
        """The record of a key whose lock is held; what stands in its place is moved out of the way."""
        path, aside = self.path(key.digest), self.root / "quarantine" / f"{key.digest}.json"
        try:
            return self._read(key.digest)
        except Fault as fault:
            try:
                aside.parent.mkdir(exist_ok=True)
                os.replace(path, aside)
                what = f"moved to {aside}"
            except OSError as error:
                what = f"ignored (it cannot be moved to {aside.parent}: {error.strerror})"
            self._warn(path.name, f"{path}: {what}: {fault}; {key.kernel} is measured again")
        return None

    def put(self, record: Record) -> bool:
        """Store a record, in place of an older one of its key; False where only this process remembers it."""
        kept = _unstored.setdefault(self.root, {})
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            _write(self.path(record.key.digest), record.model_dump_json(indent=1) + "\n")
        except OSError as error:
            kept[record.key.digest] = record
            self._warn_of_folder(error)
            return False
        kept.pop(record.key.digest, None)
        return True

    def _taken(self, record: Record) -> bool:
        """Whether an imported record is new here; Fault where another one is stored or it cannot be."""
        with self.lock(record.key.digest):
            here = self._get_locked(record.key)
            if here is None and not self.put(record):
                raise Fault("it could not be stored")
            if here not in (None, record):
                raise Fault(f"its key has another record here, which stays ({here}; the line says {record})")
        return here is None

    def _removed(self, path: Path) -> bool:
        try:
            path.unlink()
        except FileNotFoundError:  # somebody else was faster
            return False
        except OSError as error:
            self._warn_of_folder(error)
            return False
        return True

    def _warn_of_folder(self, error: Exception) -> None:
        text = (
            f"measurements cannot be read or stored in {self.root}: {error}; what is measured lasts for this process "
            "only; make room there or set GDNGEN_CACHE_DIR to a folder that can be written"
        )
        self._warn("", text)

    def _warn(self, topic: str, text: str) -> None:
        if (self.root, topic) not in _said:
            _said.add((self.root, topic))
            warnings.warn(text, GdngenWarning, stacklevel=2)


def differences(wanted: Fields, stored: Fields, whole: bool = False) -> Differences:
    """(wanted, stored) of each field of those wanted that is stored otherwise; ``whole``: of every field."""
    names = [*wanted, *(name for name in stored if whole and name not in wanted)]
    values = {name: (wanted.get(name, "nothing"), stored.get(name, "nothing")) for name in names}
    return {name: pair for name, pair in values.items() if pair[0] != pair[1]}


def _write(path: Path, text: str) -> None:
    """The file appears with all of its text, or stays as it was."""
    part = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        with naming(path), open(part, "x") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # a disk that is full says so here at the latest
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
