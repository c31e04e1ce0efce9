"""The keyword inputs that a module's ``forward`` has parameters for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable

__all__ = ["accepted_keywords"]


def accepted_keywords(
    forward: Callable[..., object], given: Iterable[str], positional: int, *, rest: bool = False
) -> tuple[str, ...]:
    """Return those of the ``given`` names that ``forward`` has a parameter for.

    Its first ``positional`` parameters are taken. ``rest``: one that takes any name takes all of them.
    """
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):  # written in C, or scripted
        return ()
    in_order = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    free = {p.name for p in in_order[positional:] if p.kind is p.POSITIONAL_OR_KEYWORD}
    free.update(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
    if rest and any(p.kind is p.VAR_KEYWORD for p in parameters):
        bound = {p.name for p in in_order[:positional]}
        return tuple(name for name in given if name not in bound)
    return tuple(name for name in given if name in free)
