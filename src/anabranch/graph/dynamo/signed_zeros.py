"""Guards that tell 0.0 from -0.0: Dynamo compares numbers by ``==``, which treats the two as equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

__all__ = ["guard_signs"]


def guard_signs(guard: Any, value: object) -> None:
    """Adds to one of Dynamo's guards that zeros in ``value`` keep their signs, if there are any.

    Args:
        guard: a ``torch._guards.Guard``, which makes its check anew each time that guards are built.
        value: the value it compares with: a number, or a nested tuple or list of them.
    """
    signs = list(_signs(value))
    if signs:
        guard.create_fn = partial(_with_signs, guard.create_fn, signs)


def _with_signs(create: Callable[[Any, Any], None], signs: list[float], builder: Any, guard: Any) -> None:
    create(builder, guard)
    said = [f"the signs of zeros in {guard.name}"]
    builder.get_guard_manager(guard).add_lambda_guard(lambda now: list(_signs(now)) == signs, said, guard.user_stack)


def _signs(value: object) -> Iterator[float]:
    """The sign of every zero within."""
    if isinstance(value, float):
        if value == 0.0:
            yield math.copysign(1.0, value)
    elif isinstance(value, complex):
        yield from _signs(value.real)
        yield from _signs(value.imag)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _signs(each)
