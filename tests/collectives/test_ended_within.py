"""A look at a collective that is under way: whether it has ended, and how."""

from __future__ import annotations

from datetime import timedelta

import pytest

from anabranch.collectives.messages import ended_within


class Work:
    """A collective that ends after so many waits, with this error if there is one."""

    def __init__(self, waits: int, error: str = "") -> None:
        self._left = waits
        self._error = error

    def wait(self, timeout: timedelta) -> None:
        late = self._left > 0
        if late:
            self._left -= 1
        if late or self._error:
            raise RuntimeError("Timed out waiting" if late else self._error)

    def is_completed(self) -> bool:
        return self._left == 0


def test_it_has_ended_or_not() -> None:
    assert ended_within(Work(0), 1.0)
    assert not ended_within(Work(2), 1.0)


def test_one_that_ends_just_after_its_time_has_ended_well() -> None:
    assert ended_within(Work(1), 1.0)


@pytest.mark.parametrize("waits", [0, 1])
def test_a_failed_one_gives_the_reason(waits: int) -> None:
    with pytest.raises(RuntimeError, match="connection reset"):
        ended_within(Work(waits, "connection reset"), 1.0)
