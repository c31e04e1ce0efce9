"""``RestartBudget``: how often a service may be restarted, in any stretch of this many seconds.

A service that crashes occasionally is restarted as long as the job runs; one that crashes at every start uses up its
budget, with increasing pauses, and ends.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0
_FORM = re.compile(r"(\d+)/(\d+(?:\.\d+)?)s")


@dataclass(eq=False)
class RestartBudget:
    """One service's restarts.

    >>> now = [0.0]
    >>> budget = RestartBudget(3, 600.0, clock=lambda: now[0])
    >>> [budget.take() for _ in range(4)]
    [0.0, 0.5, 1.0, None]
    >>> now[0] = 600.8
    >>> budget.take()
    0.5

    Args:
        times: how many, in any stretch of
        seconds: this length.
        clock: the time.
    """

    times: int = 3
    seconds: float = 600.0
    clock: Callable[[], float] = time.monotonic
    _taken: deque[float] = field(default_factory=deque, init=False)

    @classmethod
    def parse(cls, text: str) -> RestartBudget:
        """Return the budget for ``"N/SECONDSs"``.

        >>> str(RestartBudget.parse("3/600s"))
        '3/600s'

        Raises:
            ValueError: text of another form.
        """
        form = _FORM.fullmatch(text)
        if form is None or not float(form[2]):
            raise ValueError(f"restarts are N/SECONDSs, as in 3/600s for three in any ten minutes; got {text!r}")
        return cls(int(form[1]), float(form[2]))

    @property
    def used(self) -> int:
        """The number of restarts in the stretch up to now."""
        while self._taken and self._taken[0] <= self.clock() - self.seconds:
            self._taken.popleft()
        return len(self._taken)

    def take(self) -> float | None:
        """Seconds to wait before the next start, more with each in the stretch; ``None`` if there is none left."""
        used = self.used
        if used >= self.times:
            return None
        pause = min(_FIRST_PAUSE * 2 ** (used - 1), _LONGEST_PAUSE) if used else 0.0
        self._taken.append(self.clock() + pause)
        return pause

    def __str__(self) -> str:
        return f"{self.times}/{self.seconds:g}s"
