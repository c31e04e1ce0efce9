"""Small models, a step of the plain loop, a clock that is set, a sink that keeps, servers, and jobs of functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from anabranch.parameter_server import ParameterServer
from anabranch.testing import JobResult, LocalJob


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


def assert_same(model: nn.Module, other: nn.Module) -> None:
    """Two modules have the same numbers, bit for bit, buffers included."""
    for (name, value), expected in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(value, expected), name


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


_IN_JOB = """
import json, sys

sys.path[:0] = {folders}
import {module} as module

print(json.dumps({{"returned": module.{function}(*{arguments})}}))
"""


def run_in_job(function: Callable[..., Any], workers: int, *arguments: object, **options: Any) -> JobResult:
    """Run a test module's function in each worker of a job; arguments and results are JSON's."""
    folders = [str(Path(inspect.getfile(function)).parent), str(Path(__file__).parent)]
    source = _IN_JOB.format(
        folders=folders, module=function.__module__, function=function.__name__, arguments=arguments
    )
    return LocalJob(workers, **options).run_source(source)


def in_job(function: Callable[..., Any], workers: int, *arguments: object, **options: Any) -> list[Any]:
    """What the function returns in each worker."""
    return [result["returned"] for result in run_in_job(function, workers, *arguments, **options).check().results]  # type: ignore[index]
