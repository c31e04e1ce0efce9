"""Pairs of communicators between ranks, one for each direction: created, tested and abandoned together.

NCCL connects two ranks at the first operation between them, and the host waits for that. So each communicator carries a
byte when it is created, while all ranks are present. If a rank reports that it cannot connect, none uses them.

The groups of two are backends without a name in ``torch.distributed``: ``new_group`` is a collective of the whole job,
or uses names that each rank counts for itself. Their keys in the job's store are drawn by the first rank.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from time import sleep
from typing import Protocol, TypeAlias, cast, runtime_checkable

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from anabranch.deadline import Deadline

__all__ = ["Backend", "Ends", "MAKERS", "Work", "abort", "connect", "other", "reached"]

_log = logging.getLogger("anabranch.pipeline")

_PAUSE = 0.001
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class Work(Protocol):
    """The methods used of an operation."""

    def is_completed(self) -> bool:
        """Return True if it is done; a backend of the host may know only after a wait."""
        ...

    def block_current_stream(self) -> None:
        """Let the current stream wait for it; the host continues."""
        ...


class Backend(Protocol):
    """The methods used of a ``torch.distributed`` backend over two ranks."""

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Work:
        """Start sending."""
        ...

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Work:
        """Start receiving into a tensor."""
        ...

    def abort(self) -> None:
        """End all operations, done or not."""
        ...


@runtime_checkable
class _Grouping(Protocol):
    """NCCL's backend, which accepts operations of several communicators together."""

    def _group_start(self) -> None: ...

    def _group_end(self) -> None: ...


def _make_nccl(store: Store, rank: int, seconds: float) -> Backend:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timedelta(seconds=seconds)
    with _errors_left_to_us():
        return cast(Backend, ProcessGroupNCCL(store, rank, 2, options))


@contextmanager
def _errors_left_to_us() -> Iterator[None]:
    """Backends created in this block do not end the process when a peer is gone: they read the setting when created."""
    before = os.environ.get(_ERROR_HANDLING)
    os.environ[_ERROR_HANDLING] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ERROR_HANDLING]
        else:
            os.environ[_ERROR_HANDLING] = before


MAKERS: dict[str, Callable[[Store, int, float], Backend]] = {"nccl": _make_nccl}
"""Makes one end of a link, by the backend's name: from a store, this end's rank of the two, and a limit in seconds."""

Ends: TypeAlias = dict[int, tuple[Backend, Backend]]
"""For each peer the backends to send to it and to receive from it."""


def other(rank: int, peer: int) -> int:
    """Return the rank of ``peer`` in its group of two with ``rank``."""
    return int(peer > rank)


def abort(backends: Sequence[Backend]) -> None:
    """End all operations, done or not; of NCCL's communicators together, because one may wait for another."""
    with ExitStack() as stack:
        for nccl in [backend for backend in backends if isinstance(backend, _Grouping)][:1]:
            nccl._group_start()
            stack.callback(nccl._group_end)
        for backend in backends:
            backend.abort()


def reached(tensor: Tensor) -> Callable[[], bool]:
    """Return a function that is true once the current stream has reached this point; on CPU always."""
    if not tensor.is_cuda:
        return lambda: True
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensor.device))
    return cast(Callable[[], bool], event.query)


def connect(
    rank: int,
    pairs: Iterable[tuple[int, int]],
    device: torch.device,
    backend: str,
    gather: Callable[[str], list[str]],
    store: Store,
    timeout: float,
    patience: float,
) -> Ends:
    """Connect this rank to those it exchanges tensors with; a collective of all ranks.

    Args:
        rank: this process's rank.
        pairs: of ranks that exchange tensors, the same on all ranks.
        device: of this rank's stages.
        backend: for tensors of that device; empty if this rank has none, or shall not use it.
        gather: returns the strings of all ranks.
        store: common to all ranks.
        timeout: seconds that an operation may take.
        patience: seconds that the first one may take.

    Returns:
        The ends of this rank; empty on all ranks if some pair could not be connected.
    """
    told = [text.split(" ") for text in gather(f"{backend if backend in MAKERS else ''} {uuid.uuid4().hex}")]
    names, key = [name for name, _ in told], told[0][1]
    links = sorted({(min(pair), max(pair)) for pair in pairs})
    links = [(low, high) for low, high in links if low != high and names[low] and names[low] == names[high]]
    if not links:
        return {}
    mine = [low if rank == high else high for low, high in links if rank in (low, high)]
    ends: Ends = {}

    def make(peer: int) -> None:
        low, high = sorted((rank, peer))
        stores = [PrefixStore(f"anabranch/pipe/{key}/{a}-{b}", store) for a, b in ((low, high), (high, low))]
        up, down = (MAKERS[backend](each, int(rank == high), timeout) for each in stores)
        ends[peer] = (up, down) if rank == low else (down, up)

    def try_out(peer: int) -> None:
        _try_out(rank, peer, ends, device, Deadline.after(patience))

    for attempt in (make, try_out):
        problem = _problem(attempt, mine)
        if problem is not None:
            _log.warning("rank %d of a pipe sends tensors over the host, not over %s: %s", rank, backend, problem)
        if not all(answer == "yes" for answer in gather("yes" if problem is None else "no")):
            break
    else:
        return ends
    abort([end for pair in ends.values() for end in pair])
    return {}


def _problem(attempt: Callable[[int], None], peers: Sequence[int]) -> Exception | None:
    """Return the exception for a peer; each is attempted, because each waits for this rank."""
    problem = None
    for peer in peers:
        try:
            attempt(peer)
        except Exception as error:  # noqa: BLE001 - whatever a backend raises, the other ranks continue and ask
            problem = error
    return problem


def _try_out(rank: int, peer: int, ends: Ends, device: torch.device, deadline: Deadline) -> None:
    """Send a byte each way, the lower rank's first."""
    out, into = ends[peer]
    here, there = (torch.full((1,), value, dtype=torch.uint8, device=device) for value in (7, 0))
    order = [partial(out.send, [here]), partial(into.recv, [there])]
    works = [begin(other(rank, peer), 0) for begin in (order if rank < peer else order[::-1])]
    for work in works:
        work.block_current_stream()
    is_there = reached(there)
    while not is_there():
        if deadline.expired():
            raise TimeoutError(f"a byte to or from rank {peer} took longer than {deadline.elapsed():.0f} s")
        sleep(_PAUSE)
    if int(there) != 7:
        raise RuntimeError(f"a byte from rank {peer} arrived as {int(there)}, not as 7")
