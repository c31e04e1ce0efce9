"""Small models, a step of the plain loop, a clock that is set, a sink that keeps, servers, and jobs of functions."""

from __future__ import annotations

import errno
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from anabranch.launch import Patience
from anabranch.parameter_server import ParameterServer
from anabranch.testing import JobResult, LocalJob
from plain_loop import mean_square


def plain_step(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    optimizer: torch.optim.Optimizer,
    batch: Any,
    clip: float | None = None,
) -> Tensor:
    """One step of the loop that everybody knows; its loss."""
    optimizer.zero_grad()
    value = loss(model, batch)
    value.backward()  # type: ignore[no-untyped-call]
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return value.detach()


def step_of(
    model: nn.Module, optimizer: Any = torch.optim.SGD, loss: Any = mean_square, *, lr: float = 0.1, **options: Any
) -> ab.TrainStep:
    """A training step whose optimizer has all parameters of the model."""
    return ab.TrainStep(model, loss, optimizer(model.parameters(), lr=lr), **options)


def look_of(model: nn.Module) -> ab.EvalStep:
    """An evaluation that returns what the model does, as ``out``."""
    return ab.EvalStep(model, lambda model, batch: {"out": model(batch)})


def plain_window(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    batches: Sequence[Any],
    rows: Callable[[Any], int],
    *,
    mean: bool = True,
    clip: float | None = None,
    then: Iterable[Any] = (),
) -> list[float]:
    """One optimizer step of the plain loop on several batches; ``then`` are the optimizers and the schedulers."""
    model.zero_grad()
    losses, total = [], sum(map(rows, batches))
    for batch in batches:
        value = loss(model, batch)
        (value * (rows(batch) / total if mean else 1)).backward()  # type: ignore[no-untyped-call]
        losses.append(value.item())
    moved = [p for p in model.parameters() if p.grad is not None]
    for p in moved:
        p.grad = p.grad.coalesce() if p.grad.is_sparse else p.grad  # type: ignore[union-attr]
    if clip is not None:
        values: Any = [p.grad.values() if p.grad.is_sparse else p.grad for p in moved]  # type: ignore[union-attr]
        factor = min(1.0, clip / (nn.utils.get_total_norm(values).item() + 1e-6))
        for p in moved:
            p.grad = p.grad * factor  # type: ignore[operator]
    for one in then:
        one.step()
    return losses


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference, as a share of the largest number."""
    return ((a - b).abs().max() / b.abs().max().clamp_min(1e-300)).item()


def assert_same(model: nn.Module, other: nn.Module) -> None:
    """Two modules have the same numbers, bit for bit, buffers included."""
    for (name, value), expected in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(value, expected), name


def assert_near(model: nn.Module, other: nn.Module, tolerance: float = 1e-12) -> None:
    """Two modules have the same parameters, but for rounding."""
    for one, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, expected, rtol=0, atol=tolerance)


class Tabled(nn.Module):
    """A table, and a layer on the sum of a sample's rows; the same numbers each time."""

    def __init__(self, rows: int = 8, width: int = 3, out: int = 1, *, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(rows, width, sparse=sparse), nn.Linear(width, out)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.table(ids)
        return self.head(rows if rows.ndim == 2 else rows.sum(1))  # type: ignore[no-any-return]


class Users(nn.Module):
    """A table whose rows are made on the servers when training first uses them."""

    def __init__(self, capacity: int | None, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        optimizer = lambda rows: torch.optim.SGD(rows, lr=1.0)  # noqa: E731
        self.users = ab.RemoteEmbedding("users", None, 2, init=0.0, capacity=capacity, optimizer=optimizer, **options)
        self.head = nn.Linear(2, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.users(ids)  # type: ignore[no-any-return]

    @staticmethod
    def loss(model: Any, ids: Tensor) -> Tensor:
        """The sum of the rows, which a step then lowers by one."""
        return model(ids).sum() + 0 * model.head.weight.sum()  # type: ignore[no-any-return]


class Seconds:
    """A clock that is set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Kept:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.events: list[tuple[str, dict[str, object]]] = []
        self.closed = 0

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self.steps.append((step, values))

    def event(self, name: str, facts: dict[str, object]) -> None:
        self.events.append((name, facts))

    def close(self) -> None:
        self.closed += 1


@contextmanager
def job_servers(count: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ParameterServer]]:
    """So many shards, which the job then has; 0: none, so that what is on servers is in this process."""
    with ExitStack() as stack:
        servers = [stack.enter_context(ParameterServer(shard, count)) for shard in range(count)]
        monkeypatch.setenv("ANABRANCH_SERVERS", ",".join(server.endpoint for server in servers))
        yield servers


def forbid(path: Path, monkeypatch: pytest.MonkeyPatch, call: str = "open") -> None:
    """As for a user who may not open or list it; root may, who runs many a test."""
    real = getattr(os, call)

    def refuse(name: str | Path, *rest: int, **named: int) -> object:
        if os.fspath(name) == str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(name))
        return real(name, *rest, **named)

    monkeypatch.setattr(os, call, refuse)


def interrupted_at(line: int, act: Callable[[], object], files: Sequence[str] = ("anabranch",), but: str = "") -> bool:
    """Call ``act`` with Ctrl-C at that line of such files; return False if it has fewer."""
    left = line

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        name = frame.f_code.co_filename
        if name == but or not any(one in name for one in files):
            return None
        left -= event == "line"
        if left == 0:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        act()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return left <= 0


def messages_of(logger: str = "anabranch") -> list[str]:
    """What is logged there from here on, until the end of the process."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger(logger)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    return messages


_IN_JOB = """
import json, sys

sys.path[:0] = {folders}
import {module} as module

print(json.dumps({{"returned": module.{function}(*{arguments})}}))
"""


def run_in_job(function: Callable[..., Any], workers: int, *arguments: object, **options: Any) -> JobResult:
    """Run a test module's function in each worker of a job; arguments and results are JSON's.

    Where one fails, the others end by themselves.
    """
    folders = [str(Path(inspect.getfile(function)).parent), str(Path(__file__).parent)]
    source = _IN_JOB.format(
        folders=folders, module=function.__module__, function=function.__name__, arguments=arguments
    )
    return LocalJob(workers, patience=Patience(failure=60.0), **options).run_source(source)


def in_job(function: Callable[..., Any], workers: int, *arguments: object, **options: Any) -> list[Any]:
    """What the function returns in each worker."""
    return [result["returned"] for result in run_in_job(function, workers, *arguments, **options).check().results]  # type: ignore[index]
