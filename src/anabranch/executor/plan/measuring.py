"""Short measurements of this machine and its links, while all workers make them at the same time, as steps do.

Each takes a few milliseconds. The servers are measured with separate tables, which are dropped at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anabranch.collectives import Workers
from anabranch.executor.plan.machine_profile import LinkSpeed, Profile, Update
from anabranch.parameter_server import ParameterClient
from anabranch.parameter_server.client.distinct_ids import unique_of
from anabranch.tables import RowOptimizer
from anabranch.tables.table_spec import TableSpec

__all__ = ["RowKind", "measure"]

_TIMES = 15
_FEW = 5  # of what takes milliseconds
_COPIED = 4 << 20  # numbers: more than a processor's cache holds
_FRESH = 12 << 20  # numbers: more than an allocator keeps for the next time
_IDS = 8192
_SMALL, _LARGE = 64, 4096  # rows
_WIDE = 4  # times as wide
_MISSED = 4  # steps that a row was not touched
_NUMBERS = 1 << 18
_FEW_BYTES, _MANY_BYTES = 1 << 10, 4 << 20


@dataclass(frozen=True, slots=True)
class RowKind:
    """The kind of table that the servers are asked about.

    Attributes:
        width, dtype: of its rows.
        rule: their optimizer.
        every_row_moves: the optimizer moves rows without a gradient, too: a row has steps to catch up when it is read.
    """

    width: int
    dtype: torch.dtype
    rule: RowOptimizer
    every_row_moves: bool


def measure(
    optimizers: Iterable[Optimizer],
    device: torch.device,
    workers: Workers | None,
    rows: RowKind | None,
    whole: RowOptimizer | None,
    *,
    timeout: float,
) -> Profile:
    """Return the profile; every worker calls it.

    Args:
        optimizers: their updates are timed.
        device: of the model.
        workers: of the job; ``None`` is alone.
        rows: of the tables that may live on the servers; ``None`` if none may.
        whole: the optimizer of parameters that may live there whole; ``None`` if none may.
        timeout: seconds that a call of the servers may take.
    """
    wait = torch.cuda.current_stream(device).synchronize if device.type == "cuda" else _nothing
    links = dict.fromkeys(("pull", "push", "pull_whole", "push_whole"), None)
    if rows is not None or whole is not None:
        rank = 0 if workers is None else workers.rank
        with ParameterClient(timeout=timeout) as client:
            links |= _measure_servers(client, f"anabranch.plan.{rank}", rows, whole, workers)
    return Profile(
        copy=_measure_copy(device, wait),
        fresh=_seconds(lambda: torch.empty(_FRESH, device=device).zero_(), wait, times=_FEW) / (4 * _FRESH),
        distinct=_measure_distinct(),
        updates={type(one).__name__: _measure_update(one, device, wait) for one in optimizers},
        workers=None if workers is None else _measure_workers(workers),
        **links,
    )


def _nothing() -> None:
    pass


def _seconds(
    call: Callable[[], object],
    wait: Callable[[], None] = _nothing,
    before: Callable[[], None] = _nothing,
    times: int = _TIMES,
) -> float:
    """Return the usual seconds of a call, after one that warms up."""
    found: list[float] = []
    for _ in range(times + 1):
        before()
        began = time.perf_counter()
        call()
        wait()
        found.append(time.perf_counter() - began)
    return median(found[1:])


def _measure_copy(device: torch.device, wait: Callable[[], None]) -> float:
    source = torch.ones(_COPIED, device=device)
    target = torch.empty_like(source)
    return _seconds(lambda: target.copy_(source), wait, times=_FEW) / source.nbytes


def _measure_distinct() -> float:
    ids = torch.arange(_IDS, device="cpu") * 7919 % _IDS  # in no order; the generators are the user's
    return _seconds(lambda: unique_of(ids)) / _IDS


def _measure_update(optimizer: Optimizer, device: torch.device, wait: Callable[[], None]) -> Update:
    """Time another optimizer of the kind, on one large parameter and on many small ones."""
    large = _another(optimizer, [_with_gradient(_COPIED, device)])
    small = _another(optimizer, [_with_gradient(1, device) for _ in range(32)])
    per_parameter = _seconds(lambda: small.step(), wait) / 32
    return Update(per_parameter, max(0.0, _seconds(lambda: large.step(), wait, times=_FEW) - per_parameter) / _COPIED)


def _with_gradient(count: int, device: torch.device) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(count, device=device))
    parameter.grad = torch.ones_like(parameter)
    return parameter


def _another(optimizer: Optimizer, parameters: list[nn.Parameter]) -> Optimizer:
    """Return an optimizer like ``optimizer``; plain SGD for one that is not made of its defaults."""
    if type(optimizer) is torch.optim.SparseAdam:
        return torch.optim.Adam(parameters)
    try:
        return type(optimizer)(parameters, **optimizer.defaults)
    except Exception:  # noqa: BLE001 - a user's class may require any arguments
        return torch.optim.SGD(parameters, lr=0.0)


def _measure_workers(workers: Workers) -> LinkSpeed | None:
    if workers.size == 1:
        return None

    def reduce(count: int) -> float:
        tensor = torch.zeros(count, device=workers.device)
        return _seconds(lambda: workers.all_reduce(tensor, operation="measure the workers' link"))

    return LinkSpeed.through([(count * 4, reduce(count)) for count in (_FEW_BYTES // 4, _MANY_BYTES // 4)])


def _measure_servers(
    client: ParameterClient, name: str, rows: RowKind | None, whole: RowOptimizer | None, workers: Workers | None
) -> dict[str, LinkSpeed | None]:
    names = [f"{name}.{kind}" for kind in ("rows", "wide", "small", "large")]
    client.drop_some(names)
    together = _nothing if workers is None else partial(workers.barrier, operation="measure the servers together")
    found: dict[str, LinkSpeed | None] = {}
    try:
        if rows is not None:
            found |= _measure_rows(client, names[0], names[1], rows, together)
        if whole is not None:
            found |= _measure_whole(client, names[2], names[3], whole, together)
    finally:
        client.drop_some(names)
    return found


def _measure_rows(
    client: ParameterClient, plain: str, wide: str, kind: RowKind, together: Callable[[], None]
) -> dict[str, LinkSpeed | None]:
    for name, width in ((plain, kind.width), (wide, _WIDE * kind.width)):
        spec = TableSpec(name, 4 * _LARGE, width, kind.dtype, every_row_moves=kind.every_row_moves)
        client.init_table(spec, kind.rule)

    def gradients(name: str, count: int) -> tuple[Tensor, Tensor]:
        width = kind.width * (_WIDE if name == wide else 1)
        return torch.arange(0, 4 * count, 4, device="cpu"), torch.zeros(count, width, dtype=kind.dtype, device="cpu")

    def push(name: str, count: int) -> float:
        ids, grads = gradients(name, count)
        return _seconds(lambda: client.push_many({name: (ids, grads)}), before=together)

    def pull(name: str, count: int) -> float:
        ids, _ = gradients(name, count)
        return _seconds(lambda: client.pull_many({name: ids}), before=partial(miss, name))

    def miss(name: str) -> None:
        width = kind.width * (_WIDE if name == wide else 1)
        for _ in range(_MISSED if kind.every_row_moves else 0):
            client.push_many(
                {name: (torch.tensor([1], device="cpu"), torch.zeros(1, width, dtype=kind.dtype, device="cpu"))}
            )
        together()

    found: dict[str, LinkSpeed | None] = {}
    for label, ask in (("push", push), ("pull", pull)):
        small, large = (_SMALL, ask(plain, _SMALL)), (_LARGE, ask(plain, _LARGE))
        found[label] = LinkSpeed.of_rows(4 + kind.width * kind.dtype.itemsize, small, large, ask(wide, _LARGE))
    return found


def _measure_whole(
    client: ParameterClient, small: str, large: str, rule: RowOptimizer, together: Callable[[], None]
) -> dict[str, LinkSpeed | None]:
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    values = {small: torch.zeros(_FEW_BYTES // 4, device="cpu"), large: torch.zeros(_MANY_BYTES // 4, device="cpu")}
    for name, value in values.items():
        client.init_dense(name, value, rule)

    def pull(name: str) -> float:
        return _seconds(lambda: client.pull_many({name: none}), before=together)

    def push(name: str) -> float:
        return _seconds(lambda: client.push_many({name: (none, values[name])}), before=together)

    return {
        label: LinkSpeed.through([(value.nbytes, ask(name)) for name, value in values.items()])
        for label, ask in (("pull_whole", pull), ("push_whole", push))
    }
