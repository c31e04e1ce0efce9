"""``Answers``: the answers of boundaries in one run, noted to be given again in a second run of the same step.

They belong to a thread, and are carried to the threads that help it: crossings that another executor, or a server in
this process, makes at the same time are not part of this step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from anabranch.autodiff.boundary.types import Boundary, Crossed


class AnswersDiffer(Exception):
    """A second run asks a boundary for something else than the first one did."""


class Answers:
    """The answers of boundaries in one run, replayed in a second run that must have no effect on the remote side.

    A request is identified by the boundary, the direction and the bits of the tensors sent; concurrent calls may arrive
    in any order.

    Attributes:
        active: whether a block notes or gives them now.
        replaying: whether they are given.
    """

    def __init__(self) -> None:
        self.active = self.replaying = False
        self._kept: dict[tuple[str, str, str], list[tuple[list[Tensor | None], object]]] = {}
        self._left: dict[tuple[str, str, str], list[tuple[list[Tensor | None], object]]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the crossings of a block."""
        with self._during(replaying=False):
            yield

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Answer the crossings of a block with the recorded answers; nothing is sent.

        Raises:
            AnswersDiffer: it requests something else, or for less.
        """
        self._left = {key: list(kept) for key, kept in self._kept.items()}
        with self._during(replaying=True):
            yield
        if any(self._left.values()):
            raise AnswersDiffer("the second run crosses fewer boundaries")

    @contextmanager
    def _during(self, *, replaying: bool) -> Iterator[None]:
        self.active, self.replaying = True, replaying
        try:
            with replay_from(self):
                yield
        finally:
            self.active = False

    def note_forward(self, boundary: Boundary, inputs: Sequence[Tensor | None], crossed: Crossed) -> None:
        """Keep an answer."""
        outputs = [output.detach().clone() for output in crossed.outputs]
        self._note((boundary.kind, boundary.name, "forward"), inputs, (outputs, list(crossed.no_gradient)))

    def note_backward(
        self, boundary: Boundary, gradients: Sequence[Tensor | None], answer: Sequence[Tensor | None]
    ) -> None:
        """Record the received gradients."""
        self._note((boundary.kind, boundary.name, "backward"), gradients, _copied(answer))

    def _note(self, key: tuple[str, str, str], request: Sequence[Tensor | None], answer: object) -> None:
        with self._lock:
            self._kept.setdefault(key, []).append((_copied(request), answer))

    def replay_forward(self, boundary: Boundary, inputs: Sequence[Tensor | None]) -> Crossed:
        """Return the answer that was kept."""
        kept = self._again((boundary.kind, boundary.name, "forward"), inputs)
        outputs, no_gradient = cast("tuple[list[Tensor], list[int]]", kept)
        return Crossed([output.clone() for output in outputs], None, no_gradient, fresh=True)

    def replay_backward(
        self, boundary: Boundary, gradients: Sequence[Tensor | None], wants: Sequence[bool]
    ) -> list[Tensor | None]:
        """Return the gradients that were kept."""
        kept = cast("list[Tensor | None]", self._again((boundary.kind, boundary.name, "backward"), gradients))
        return [value.clone() if want and value is not None else None for value, want in zip(kept, wants, strict=True)]

    def _again(self, key: tuple[str, str, str], request: Sequence[Tensor | None]) -> object:
        with self._lock:
            left = self._left.get(key, [])
            for index, (before, answer) in enumerate(left):
                if _same_bits(request, before):
                    del left[index]
                    return answer
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


def _copied(values: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if value is None else value.detach().clone() for value in values]


def _same_bits(some: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> bool:
    if len(some) != len(others):
        return False
    for one, other in zip(some, others, strict=True):
        if one is None or other is None:
            if one is not other:
                return False
        elif (
            one.shape != other.shape
            or one.dtype != other.dtype
            or not bool((torch.eq(one, other) | (torch.isnan(one) & torch.isnan(other))).all())
        ):
            return False
    return True


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
