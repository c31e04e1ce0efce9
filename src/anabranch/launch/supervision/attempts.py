"""Restarts of a failed job from its last complete checkpoint, which its script finds where it saved it.

The whole job restarts: workers that lost a step together with a server go back together. Parameter servers begin empty,
so they hold only the state that the script loads; a script that loads nothing starts from the beginning.
"""

from __future__ import annotations

from collections.abc import Callable

from anabranch.launch.supervision.outcome import JobOutcome

__all__ = ["run_attempts"]


def run_attempts(attempt: Callable[[int], JobOutcome], max_restarts: int, tell: Callable[[str], None]) -> JobOutcome:
    """Call ``attempt`` with 0, and again with the next number as long as it fails on its own and restarts are left.

    Raises:
        ValueError: a number of restarts below 0.
    """
    if max_restarts < 0:
        raise ValueError(f"max_restarts must be at least 0, got {max_restarts}")
    for number in range(max_restarts + 1):
        outcome = attempt(number)
        failure = outcome.first_failure
        if failure is None or outcome.interrupted is not None or outcome.timed_out or number == max_restarts:
            break
        tell(f"{failure.describe()}; restarting the job ({number + 1} of {max_restarts})")
    return outcome
