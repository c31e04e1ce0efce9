"""The ``Answers`` that the boundaries a thread crosses are noted in, or given from; carried to threads that help it.

Of a thread, not of the process: what another executor, or a server in this process, does at the same time on its own
threads is no part of this one's step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anabranch.autodiff.boundary import Answers

__all__ = ["answered_by", "answers_of_thread", "inside_a_boundary"]


class _OfThread(threading.local):
    answers: Answers | None = None
    depth = 0  # boundaries that it is in the middle of: what one crosses inside is part of its answer


_own = _OfThread()


def answers_of_thread() -> Answers | None:
    """Return those of the calling thread; ``None`` without any, and in the middle of a boundary."""
    return None if _own.depth else _own.answers


@contextmanager
def answered_by(answers: Answers | None) -> Iterator[None]:
    """Have the calling thread's crossings noted or answered until the block ends."""
    before, _own.answers = _own.answers, answers
    try:
        yield
    finally:
        _own.answers = before


@contextmanager
def inside_a_boundary() -> Iterator[None]:
    """Note nothing that the block crosses: it is part of the answer of the boundary that runs it."""
    _own.depth += 1
    try:
        yield
    finally:
        _own.depth -= 1
