"""Guards that Dynamo omits.

It compares numbers by ``==``, which treats 0.0 and -0.0 as equal; and if only the truth of a dict is read, it checks
only its type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

__all__ = ["guard_emptiness", "guard_signs"]


def guard_signs(guard: Any, value: object) -> None:
    """Add to one of Dynamo's guards that zeros in ``value`` keep their signs, if there are any.

    Args:
        guard: a ``torch._guards.Guard``, which makes its check again each time that guards are built.
        value: the value it compares with: a number, or a nested tuple or list of them.
    """
    signs = list(_signs(value))
    if signs:
        guard.create_fn = partial(_with_signs, guard.create_fn, signs)


def guard_emptiness(guard: Any, value: Mapping[Any, Any]) -> None:
    """Add to one of Dynamo's guards on a dict that it stays empty, or stays filled."""
    guard.create_fn = partial(_with_emptiness, guard.create_fn, len(value) == 0)


def _with_emptiness(create: Callable[[Any, Any], None], empty: bool, builder: Any, guard: Any) -> None:
    create(builder, guard)
    said = [f"{guard.name} is {'empty' if empty else 'not empty'}"]
    builder.get_guard_manager(guard).add_lambda_guard(lambda now: (len(now) == 0) is empty, said, guard.user_stack)


def _with_signs(create: Callable[[Any, Any], None], signs: list[object], builder: Any, guard: Any) -> None:
    create(builder, guard)
    said = [f"the signs of zeros in {guard.name}"]
    builder.get_guard_manager(guard).add_lambda_guard(lambda now: list(_signs(now)) == signs, said, guard.user_stack)


def _signs(value: object) -> Iterator[object]:
    """Yield the sign of every zero within, and of sets the numbers, for 1 and 1.0 are equal too."""
    if isinstance(value, float):
        if value == 0.0:
            yield math.copysign(1.0, value)
    elif isinstance(value, complex):
        yield from _signs(value.real)
        yield from _signs(value.imag)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _signs(each)
    elif isinstance(value, (set, frozenset)):
        numbers = sorted(repr(each) for each in value if isinstance(each, (bool, int, float, complex)))
        if numbers:
            yield numbers
