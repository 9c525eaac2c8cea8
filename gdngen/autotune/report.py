"""What comes of a tuning: a row for each kernel and bucket, totals of whole operators, what a user has to know."""

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gdngen.autotune.handle import Choice
from gdngen.autotune.space import Device


@dataclass
class Row:
    """A line of the final table: a kernel at a bucket, the cost model's choice and the winner over its shapes."""

    kernel: str
    bytes: int
    heads: int
    shapes: list[str]
    model: Choice
    model_us: float | None
    winner: Choice | None
    winner_us: float | None
    spread: float | None
    rejected: list[dict[str, str]] = field(default_factory=list)

    @property
    def ratio(self) -> float | None:
        return self.model_us / self.winner_us if self.model_us and self.winner_us else None


@dataclass
class Report:
    """What came of a tuning; ``problems`` are what a user has to know; ``failed``: a kernel has no right choice."""

    package: str
    device: Device
    measured: int
    found: int
    skipped: int
    rows: list[Row]
    totals: list[dict[str, Any]]
    file: Path | None
    problems: list[str]
    failed: bool
    seconds: float

    @property
    def mean_ratio(self) -> float | None:
        """How much slower the untuned package is: geometric mean over operators and shapes."""
        ratios = [total["ratio"] for total in self.totals if total["ratio"]]
        return statistics.geometric_mean(ratios) if ratios else None
