"""Threads that train while another one captures: nothing of the capture is seen there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from anabranch.graph.dynamo.front import DynamoFront, TracedCall, mark


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
