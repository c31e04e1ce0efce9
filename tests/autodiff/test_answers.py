"""Answers of boundaries, noted in one run and given again in another: those of the run's own threads alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from anabranch.autodiff.boundary.crossing import Answers, AnswersDiffer, Form, RecordedBoundary, cross
from anabranch.autodiff.parallel import run_at_once
from waiting import running

asked: list[float] = []
FORM = Form((2,), torch.float32, torch.device("cpu"))


@pytest.fixture(autouse=True)
def _nobody_asked() -> None:
    asked.clear()


def boundary(name: str = "doubled") -> RecordedBoundary:
    def doubled(entry: Tensor | None, x: Tensor) -> Sequence[Tensor]:
        asked.append(x.sum().item())
        return [2 * x]

    return RecordedBoundary("example", name, doubled, lambda inputs: [FORM])


def far(value: float) -> Callable[[], Tensor]:
    """A run that crosses, forward and backward; returns the gradient."""

    def run() -> Tensor:
        x = torch.full((2,), value, requires_grad=True)
        cross(boundary(), x)[0].sum().backward()
        assert x.grad is not None
        return x.grad

    return run


def elsewhere(run: Callable[[], Tensor]) -> Tensor:
    found: list[Tensor] = []
    with running(lambda: found.append(run())):
        pass
    return found[0]


def test_the_second_run_sends_no_request() -> None:
    answers = Answers()
    with answers.noted():
        first = far(1.0)()
    with answers.replayed():
        assert torch.equal(far(1.0)(), first)
    assert asked == [2.0]
    with pytest.raises(AnswersDiffer, match="different"), answers.replayed():
        far(3.0)()
    with pytest.raises(AnswersDiffer, match="fewer"), answers.replayed():
        pass


def test_crossings_of_another_thread_are_not_part_of_it() -> None:
    """Two executors on two threads: one failed with AnswersDiffer while the other tried its graph."""
    answers = Answers()
    with answers.noted():
        far(1.0)()
        elsewhere(far(5.0))
    with answers.replayed():
        far(1.0)()
        elsewhere(far(7.0))
    assert asked == [2.0, 10.0, 14.0]


def test_threads_that_help_the_run_are_part_of_it() -> None:
    def run() -> list[Tensor]:
        calls = [lambda index=index: far(float(index))() for index in range(4)]
        return run_at_once(calls, max_workers=None, describe=str)

    answers = Answers()
    with answers.noted():
        first = run()
    with answers.replayed():
        assert all(map(torch.equal, run(), first))
    assert sorted(asked) == [0.0, 2.0, 4.0, 6.0]


def test_a_backward_on_another_thread_has_the_answers_of_its_forward() -> None:
    """Autograd runs that of CUDA tensors on threads of its own."""

    class Counted(RecordedBoundary):
        def backward(self, *given: Any, updates: bool) -> list[Tensor | None]:
            backwards.append("asked")
            return super().backward(*given, updates=updates)

    def run() -> Tensor:
        x = torch.ones(2, requires_grad=True)
        plain = boundary()
        (out,) = cross(Counted("example", "counted", plain.function, plain.forms), x)
        return elsewhere(lambda: torch.autograd.grad(out.sum(), x)[0])

    backwards: list[str] = []
    answers = Answers()
    with answers.noted():
        first = run()
    with answers.replayed():
        assert torch.equal(run(), first)
    assert (asked, backwards) == ([2.0], ["asked"])
    run()  # outside of the block nothing is kept
    assert len(backwards) == 2
