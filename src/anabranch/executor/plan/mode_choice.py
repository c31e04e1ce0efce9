"""``choose``: the cheapest of several plans, and the sentence with the reason; for ``comm_mode="auto"``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from anabranch.executor.plan.step_plan import Plan
from anabranch.executor.routes import CommMode

__all__ = ["ModeChoice", "choose"]


@dataclass(frozen=True, slots=True)
class ModeChoice:
    """A mode that was taken.

    Attributes:
        mode: which.
        why: one line.
    """

    mode: CommMode
    why: str


def choose(plans: Mapping[CommMode, Plan]) -> ModeChoice:
    """Return the mode with the fastest plan; the first of equal ones."""
    mode = min(plans, key=lambda name: plans[name].step_seconds)
    taken = plans[mode]
    others = [f"{_plan_in_words(plan)} with {name!r}" for name, plan in plans.items() if name != mode]
    crossing = " and ".join(f"{size:,} bytes with {name}" for name, size in taken.bytes.items())
    why = f"a step should take {_plan_in_words(taken)}, exchanging {crossing or 'nothing'}"
    return ModeChoice(mode, f"{why}; {', '.join(others)}" if others else why)


def _plan_in_words(plan: Plan) -> str:
    return f"{1000 * plan.step_seconds:.3g} ms"
