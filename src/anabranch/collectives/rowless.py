"""Workers without rows, named where the others wait for them.

A worker without rows does not call the model, so a collective in the others' forward waits for it::

    with rows      ── forward: all_reduce of the loss ..... its wait ends ── says why ──> error
    without rows   ── says that ── header ......................... sees the end of a rank ──> error

Nothing but its timeout ends a wait of gloo's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from anabranch.errors import BoundaryError, DeadlineExceeded, PeerLost, PipelineError
from anabranch.liveness.group import Group, rank_names

_ENDED = "ended without rows"


class Rowless:
    """The workers of a group that have no rows in the run in progress.

    Args:
        store: of this group alone.
        group: the workers; they see an end within half a heartbeat.
        timeout: seconds that a wait may last.
    """

    def __init__(self, store: Store, group: Group, timeout: float) -> None:
        self._store, self._group = store, group
        # Before the workers without rows give up, with the time to look for a rank that is lost.
        self._limit = timedelta(seconds=max(timeout / 2, min(0.9 * timeout, timeout - 3 * group.heartbeat)))
        self._groups: tuple[int, list[tuple[dist.ProcessGroupGloo, timedelta]]] = 0, []

    @contextmanager
    def here(self) -> Iterator[None]:
        """Let the others know that this worker has no rows, until the block ends without an error."""
        self._store.set(_key(self._group.peers.rank), "yes")
        yield
        self._store.set(_key(self._group.peers.rank), "")

    @contextmanager
    def bounded(self) -> Iterator[None]:
        """End waits of gloo's groups among these workers in time while the block runs."""
        count = len(dist.distributed_c10d._world.pg_map)
        if count != self._groups[0]:
            groups = [(group, group.options._timeout) for group in _gloo_among(self._group.ranks)]
            self._groups = count, [(group, old) for group, old in groups if old > self._limit]
        for group, _ in self._groups[1]:
            group._set_default_timeout(self._limit)
        try:
            yield
        finally:
            for group, old in self._groups[1]:
                group._set_default_timeout(old)

    def close(self) -> None:
        """Let go of the groups, whose threads end with the last reference."""
        self._groups = 0, []

    def explain(self, error: BaseException, step: int) -> BoundaryError | None:
        """Return the error that names the workers without rows, if a wait for them failed."""
        of_another = isinstance(error, PeerLost | PipelineError)  # which may itself have ended because of the rows
        if isinstance(error, DeadlineExceeded | PeerLost):
            waited = (error.peer or "").startswith("rank")  # not for a server or an expert
        else:
            waited = of_another or (isinstance(error, RuntimeError) and "gloo" in str(error))
        with suppress(RuntimeError):  # the process that held the store has ended
            if waited and (ranks := self._missed(lost=of_another)):
                self._store.set(_ENDED, "yes")
                return BoundaryError(
                    f"{rank_names(ranks)} had no rows in this run and did not call the model, whose forward on the "
                    "others waits for all workers; give every worker rows in each run, or leave out the collective of "
                    "the loss or the model",
                    peer=rank_names(ranks),
                    operation="run",
                    step=step,
                )
        return None

    def _missed(self, *, lost: bool) -> list[int]:
        """Return the ranks without rows; after the loss of a rank only if that is why the run has ended there."""
        if lost and not self._store.check([_ENDED]):
            return []
        known = [rank for rank in self._group.ranks if self._store.check([_key(rank)])]
        return [rank for rank in known if self._store.get(_key(rank)) == b"yes"]


def _key(rank: int) -> str:
    return f"without rows/{rank}"


def _gloo_among(ranks: Sequence[int]) -> Iterator[dist.ProcessGroupGloo]:
    for group in dist.distributed_c10d._world.pg_map:
        if set(dist.get_process_group_ranks(group)) <= set(ranks):
            with suppress(RuntimeError):  # a group of NCCL has nothing for the CPU
                backend = group._get_backend(torch.device("cpu"))
                if isinstance(backend, dist.ProcessGroupGloo):
                    yield backend
