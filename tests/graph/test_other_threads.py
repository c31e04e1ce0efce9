"""Threads that train while another one captures: nothing of the capture is seen there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from anabranch.graph import StepProgram
from anabranch.graph.dynamo.front import DynamoFront, TracedCall, mark
from anabranch.graph.dynamo.guards.watched_code import WatchedCode
from anabranch.graph.trace.make_fx import one_at_a_time


def told_elsewhere() -> bool:
    """What another thread is told when it asks whether anything compiles; torch's optimizers ask."""
    said: list[bool] = []
    thread = threading.Thread(target=lambda: said.append(torch.compiler.is_compiling()))
    thread.start()
    thread.join(30)
    return said[0]


def test_a_capture_is_seen_in_its_own_thread_alone() -> None:
    seen: list[bool] = []

    def make(call: TracedCall) -> Callable[..., Sequence[object]]:
        seen.append(told_elsewhere())
        return lambda *args: [torch.ones(())]

    def function(x: Tensor) -> Tensor:
        return mark("y", x * (2 if torch.compiler.is_compiling() else 1))

    DynamoFront(function, make).run((), torch.ones(2))
    assert seen == [False]


def test_a_compilation_of_the_users_own_is_announced_as_ever() -> None:
    seen: list[bool] = []
    waiting, done = threading.Event(), threading.Event()

    def make(call: TracedCall) -> Callable[..., Sequence[object]]:
        waiting.set()
        assert done.wait(60)
        return lambda *args: [torch.ones(())]

    def capture() -> None:
        DynamoFront(lambda x: mark("y", x + 1), make).run((), torch.ones(2))

    def announce() -> None:
        with torch.compiler._compile_session_context():
            seen.append(told_elsewhere())

    thread = threading.Thread(target=capture)
    thread.start()
    try:
        assert waiting.wait(60)
        announce()
    finally:
        done.set()
        thread.join(60)
    announce()
    assert seen == [True, True]
    assert not torch.compiler.is_compiling()


@contextmanager
def captures_here() -> Iterator[None]:
    """Do to others what a capture does: PyTorch's tracer replaces methods of nn.Module for the whole process."""
    usual = nn.Module.__call__
    with one_at_a_time, pytest.MonkeyPatch.context() as traced:
        traced.setattr(nn.Module, "__call__", lambda *args, **kwargs: usual(*args, **kwargs))
        yield


def test_a_capture_in_another_thread_does_not_cost_this_one_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    model, unchanged = nn.Linear(2, 2), WatchedCode.unchanged
    program = StepProgram(
        model, lambda model, x: model(x).square().mean(), [torch.optim.SGD(model.parameters(), lr=0.1)]
    )
    program.run(torch.ones(1, 2))
    noticed = threading.Event()

    def look(code: WatchedCode) -> bool:
        found = unchanged(code)
        if not found:
            noticed.set()
        return found

    monkeypatch.setattr(WatchedCode, "unchanged", look)
    thread = threading.Thread(target=program.run, args=(torch.ones(1, 2),))
    with captures_here():
        thread.start()
        assert noticed.wait(60)
    thread.join(60)
    assert not thread.is_alive()
    assert program.captures == 1
