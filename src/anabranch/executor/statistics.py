"""What an executor has done so far, as a frozen record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

__all__ = ["Statistics"]


@dataclass(frozen=True, slots=True)
class Statistics:
    """What an executor has done since it was made, or since it last said so.

    Attributes:
        steps: optimizer steps.
        runs: runs of any step, by the step's name.
        rows: rows that this worker's training runs were given.
        bytes: bytes that this worker handed to collectives.
        run_seconds: seconds inside ``run``.
        wait_seconds: of these, seconds spent waiting for other workers.
        load_seconds: of these, seconds spent waiting for batches.
    """

    steps: int = 0
    runs: Mapping[str, int] = field(default_factory=dict)
    rows: float = 0
    bytes: int = 0
    run_seconds: float = 0.0
    wait_seconds: float = 0.0
    load_seconds: float = 0.0

    def since(self, earlier: Statistics) -> Statistics:
        """What was done between ``earlier`` and this record."""
        return Statistics(
            steps=self.steps - earlier.steps,
            runs={name: count - earlier.runs.get(name, 0) for name, count in self.runs.items()},
            rows=self.rows - earlier.rows,
            bytes=self.bytes - earlier.bytes,
            run_seconds=self.run_seconds - earlier.run_seconds,
            wait_seconds=self.wait_seconds - earlier.wait_seconds,
            load_seconds=self.load_seconds - earlier.load_seconds,
        )

    def as_dict(self) -> dict[str, object]:
        """The same as plain values, for JSON."""
        return asdict(self)
