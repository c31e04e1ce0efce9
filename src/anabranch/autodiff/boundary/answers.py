"""``Crossed``: the answer of a boundary; ``Answers``: those of one run, to be given again in a second of the same step.

Answers belong to a thread, and are carried to the threads that help it: crossings that another executor, or a server in
this process, makes at the same time are not part of this step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

Tensors: TypeAlias = "Sequence[Tensor | None]"
"""Inputs, outputs or gradients of a boundary; ``None`` in place of one that is not there."""
_Answer: TypeAlias = "tuple[list[Tensor | None], Sequence[int]]"


@dataclass(slots=True)
class Crossed:
    """The result of a crossing.

    Attributes:
        outputs: in their own memory, not shared with an input.
        state: the values that backward needs in addition to the inputs; freed when backward has run or is impossible.
        no_gradient: which outputs have none.
        fresh: the outputs are known to be in newly allocated contiguous memory, so no check is needed.
        reads_inputs: backward reads the inputs, which are saved for it.
        differentiable_again: backward is itself made of crossings and torch's operations, to be recorded.
    """

    outputs: Sequence[Tensor]
    state: object = None
    no_gradient: Sequence[int] = ()
    fresh: bool = False
    reads_inputs: bool = True
    differentiable_again: bool = False


class AnswersDiffer(Exception):
    """A second run asks a boundary for something else than the first one did."""


class Answers:
    """The answers of boundaries in one run, replayed in a second run that must have no effect on the remote side.

    A request is identified by its boundary and direction and by the bits of the tensors sent; concurrent calls may
    arrive in any order.

    Attributes:
        active: whether a block notes or gives them now.
        replaying: whether they are given.
    """

    def __init__(self) -> None:
        self.active = self.replaying = False
        self._noted: list[tuple[tuple[str, ...], list[Tensor | None], _Answer]] = []
        self._left = self._noted
        self._lock = threading.Lock()

    @contextmanager
    def noted(self, *, replaying: bool = False) -> Iterator[None]:
        """Note the crossings of a block."""
        self.active, self.replaying = True, replaying
        try:
            with replay_from(self):
                yield
        finally:
            self.active = False

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Answer the crossings of a block with the recorded answers; nothing is sent.

        Raises:
            AnswersDiffer: it requests something else, or for less.
        """
        self._left = list(self._noted)
        with self.noted(replaying=True):
            yield
        if self._left:
            raise AnswersDiffer("the second run crosses fewer boundaries")

    def note(self, key: tuple[str, ...], request: Tensors, answer: Tensors, no_gradient: Sequence[int] = ()) -> None:
        """Keep the answer to a request to the boundary and direction ``key``."""
        entry = key, _copied(request), (_copied(answer), no_gradient)
        with self._lock:
            self._noted.append(entry)

    def replay(self, key: tuple[str, ...], request: Tensors) -> _Answer:
        """Return the answer that was kept, and which outputs have no gradient."""
        with self._lock:
            for index, (of, before, (answer, no_gradient)) in enumerate(self._left):
                if of == key and _same_bits(request, before):
                    del self._left[index]
                    return _copied(answer), no_gradient
        raise AnswersDiffer(f"the second run makes a different request to {key[0]} {key[1]!r}")


class FirstForward:
    """The answers of experts in a forward that will run again: in the second one experts would have changed, by their
    own statistics at least, so that it is given the answers of the first, in their order.
    """

    def __init__(self) -> None:
        self._crossed: list[Crossed] = []
        self._left: list[Crossed] | None = None

    @contextmanager
    def current(self, *, again: bool) -> Iterator[None]:
        """Keep the answers to this thread's calls in the block, or answer them ``again``."""
        self._left = list(self._crossed) if again else None
        before, _own.first = _own.first, self
        try:
            yield
        finally:
            _own.first = before

    def note(self, crossed: Crossed) -> None:
        """Keep an answer."""
        if self._left is None:
            self._crossed.append(_with_copies(crossed))

    def answer(self) -> Crossed | None:
        """Return the next answer; ``None`` in the first forward, or for a call that the first one did not make."""
        return _with_copies(self._left.pop(0)) if self._left else None


def _with_copies(crossed: Crossed) -> Crossed:
    return replace(crossed, outputs=[output.clone() for output in crossed.outputs])


def _copied(values: Tensors) -> list[Tensor | None]:
    return [None if value is None else value.detach().clone() for value in values]


def _same_bits(some: Tensors, others: Tensors) -> bool:
    return len(some) == len(others) and all(map(_are_same, some, others))


def _are_same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and bool((torch.eq(one, other) | (torch.isnan(one) & torch.isnan(other))).all())


class _OfThread(threading.local):
    answers: Answers | None = None
    first: FirstForward | None = None
    depth = 0  # boundaries in progress: crossings inside one are part of its answer


_own = _OfThread()


def current_answers() -> Answers | None:
    """Return those of the calling thread; ``None`` without any, and in the middle of a boundary."""
    return None if _own.depth else _own.answers


def current_first_forward() -> FirstForward | None:
    """Return that of the calling thread; ``None`` without any, and in the middle of a boundary."""
    return None if _own.depth else _own.first


@contextmanager
def replay_from(answers: Answers | None) -> Iterator[None]:
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
