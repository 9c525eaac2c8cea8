"""A sample of the matrix of docs/versions.md, with the oldest and the newest Triton; versions of Python."""

import ast
import re
from pathlib import Path

import pytest
import versions
from test_style import tracked_files

from gdngen import requirements

DOCS = versions.ROOT / "docs" / "versions.md"

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("version", requirements.TRITON)
def test_other_tritons(version: str) -> None:
    try:
        records = versions.run(version, few=True)
    except versions.IndexUnreachable as error:
        pytest.skip(f"the package index does not answer: {error}")
    assert {record["where"] for record in records} == {"interpreter", "sm_90"}
    assert not [fault for record in records for fault in record["faults"]]


def test_only_an_index_that_does_not_answer_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="no such option") as fault:
        versions.pip("install", "--no-such-option")
    assert not isinstance(fault.value, versions.IndexUnreachable)
    for name, value in (("CONFIG_FILE", "/dev/null"), ("INDEX_URL", "http://127.0.0.1:9/simple"), ("RETRIES", "0")):
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(versions.IndexUnreachable, match=r"triton==3\.9\.0"):
        versions.pip("download", "--no-deps", "triton==3.9.0")


def test_the_range_is_measured() -> None:
    text = DOCS.read_text()
    rows = {
        line.split("|")[1].strip(): line for line in text.partition("<!-- measured -->")[2].splitlines() if "|" in line
    }
    assert set(versions.VERSIONS) <= set(rows) and set(requirements.TRITON) <= set(versions.VERSIONS)
    oldest = versions.VERSIONS.index(requirements.TRITON[0])
    assert not [version for version in versions.VERSIONS[oldest:] if "fails" in rows[version]]


def test_the_table() -> None:
    record = versions.record_of("sm_90", "small", 0.0, [], "10 kernels", spills=["scan 8"])
    bad = versions.record_of("sm_90", "large", 0.0, ["scan is miscompiled"], "9 kernels")
    lines = list(versions.table({"3.5.1": [record], "3.9.0": [record, bad]}))
    assert lines[2] == "| 3.5.1 | ok, 10 kernels; spills small: scan 8 |"
    assert "**fails**: large" in lines[3] and lines[-1] == "- Triton 3.9.0, sm_90, large: scan is miscompiled"


# ------------------------------------------------------------------------------------------------ Python

OLDEST_PYTHON = (3, 10)


def is_plain(file: Path) -> bool:
    """Templates of kernels are checked as the packages made of them, which are among the tracked files."""
    return file.suffix == ".py" and not {"skeletons", "tiles"} & set(file.parts)


def test_every_source_is_one_for_the_oldest_python() -> None:
    with pytest.raises(SyntaxError):
        ast.parse("try: ...\nexcept* OSError: ...", feature_version=OLDEST_PYTHON)
    for file in filter(is_plain, tracked_files()):
        ast.parse(file.read_bytes(), str(file), feature_version=OLDEST_PYTHON)


def test_versions_of_python_are_those_that_were_tried() -> None:
    project = (versions.ROOT / "pyproject.toml").read_text()
    oldest, _, newest = re.search(r"## Python\n\n(3\.\d+)( to )(3\.\d+)\.", DOCS.read_text()).groups()  # type: ignore[union-attr]
    minors = range(int(oldest.partition(".")[2]), int(newest.partition(".")[2]) + 1)
    assert re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project) == [f"3.{minor}" for minor in minors]
    assert f'requires-python = ">={oldest}"' in project and oldest == ".".join(map(str, OLDEST_PYTHON))
