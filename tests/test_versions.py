"""A sample of the matrix of docs/versions.md, with the oldest and the newest Triton that gdngen takes."""

import pytest
import versions

from gdngen import requirements

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("version", requirements.TRITON)
def test_other_tritons(version: str) -> None:
    records = versions.run(version, few=True)
    assert {record["where"] for record in records} == {"interpreter", "sm_90"}
    assert not [fault for record in records for fault in record["faults"]]


def test_the_range_is_measured() -> None:
    text = (versions.ROOT / "docs" / "versions.md").read_text()
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
