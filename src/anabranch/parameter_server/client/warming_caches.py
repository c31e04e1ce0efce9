"""Compiles the kernels of a worker's cached tables before a step needs them: about ten seconds, once on a machine.

A worker that compiles in its first step keeps all others waiting. The kernels depend on the dtype of the rows and
on the kind of their optimizer, so it is done once the tables are known; shards, which cache nothing, need none of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import TypeVar, cast

import torch
from torch import Tensor

from anabranch.parameter_server.client.parameter_client import ParameterClient, Pulled
from anabranch.parameter_server.client.remote_embedding import RemoteEmbedding
from anabranch.parameter_server.client.remote_tables import RemoteTables
from anabranch.parameter_server.client.row_messages import Layout, Pull, Push
from anabranch.tables.cache import Cache
from anabranch.tables.kernels.row_versions import WITH_STATE
from anabranch.tables.optimizers.row_optimizers import RowOptimizer
from anabranch.tables.shard_placement import Placement
from anabranch.tables.table_spec import TableSpec

__all__ = ["compile_cache_kernels"]

_T = TypeVar("_T")
_ROWS, _WIDTH = 64, 2
_done: set[tuple[object, ...]] = set()


class _NullClient:
    """A client without shards: every row is zeros and has just changed."""

    worker = None
    rank = 0
    timeout = 60.0
    compression = None

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def init_table(self, spec: TableSpec, rule: RowOptimizer) -> None:
        pass

    def pull_many(
        self, wanted: Mapping[str, Tensor], *, widths: Mapping[str, int] | None = None, **others: object
    ) -> dict[str, Pulled]:
        placement = Placement(_ROWS, 2, 7)
        layout = Layout.of(dict.fromkeys(wanted, (placement, self._dtype, _WIDTH)))
        known = [torch.full((len(ids),), WITH_STATE, device="cpu") for ids in wanted.values()]
        Pull(layout, list(wanted.values()), known, [_WIDTH] * len(wanted), [(0, 0)] * 2, None)
        wide = widths or {}
        return {
            name: Pulled(
                torch.arange(len(ids), device="cpu"),
                torch.ones(len(ids), dtype=torch.int64, device="cpu"),
                torch.zeros(len(ids), wide.get(name, _WIDTH), dtype=self._dtype, device="cpu"),
            )
            for name, ids in wanted.items()
        }

    def push_many(self, gradients: Mapping[str, tuple[Tensor, Tensor]], **others: object) -> None:
        placement = Placement(_ROWS, 2, 7)
        layout = Layout.of(dict.fromkeys(gradients, (placement, self._dtype, _WIDTH)))
        Push(layout, gradients, {}, 2, None)

    def wait_for(self, future: Future[_T], operation: str, *, step: int | None = None) -> _T:
        return future.result(timeout=self.timeout)


def compile_cache_kernels(cache: Cache, rule: RowOptimizer, dtype: torch.dtype) -> None:
    """Compiles, or loads, the kernels of tables of ``dtype`` under ``rule`` with such a cache.

    Only the first call in a process for a kind of rule and cache does so.

    >>> from anabranch.tables import Family
    >>> compile_cache_kernels(Cache(), RowOptimizer(Family.SGD, lr=0.1), torch.float32)
    """
    kind = (rule.number, dtype, bool(cache.push_bound))
    if kind in _done:
        return
    tables = RemoteTables(
        cast(ParameterClient, _NullClient(dtype)),
        cache=Cache(cache.policy, 8, min(cache.pull_bound, 1), min(cache.push_bound, 1)),
    )
    modules = [RemoteEmbedding(name, _ROWS, _WIDTH, dtype=dtype) for name in ("first", "second")]
    for module in modules:
        module.attach(tables._add(module.spec, lambda: rule))
    draw = torch.Generator().manual_seed(0)
    batches = [torch.randint(_ROWS, (24,), generator=draw, device="cpu") for _ in range(6)]
    with tables:
        for step, ids in enumerate(batches):
            tables.begin(step, training=step != 4)
            tables.expect({module.name: ids for module in modules})
            tables.prefetch({module.name: batches[(step + 1) % len(batches)] for module in modules})
            rows = [module(ids) for module in modules]
            if step != 4:
                torch.autograd.backward(torch.cat(rows).float().sum())
                tables.push()
    _done.add(kind)
