"""Compiles the kernels of a worker's cached tables before a step needs them: about ten seconds, once on a machine.

A worker that compiles in its first step keeps all others waiting. The kernels depend on the dtype of the rows and
on the kind of their optimizer, so it is done once the tables are known; shards, which cache nothing, need none of it.
"""

from __future__ import annotations

import torch

from anabranch.parameter_server.client.cache_group import CacheGroup, CacheQuery
from anabranch.parameter_server.client.distinct_ids import distinct_ids
from anabranch.parameter_server.client.row_messages import Layout, Pull, Pulled
from anabranch.tables.cache import Cache
from anabranch.tables.kernels.row_versions import WITH_STATE
from anabranch.tables.optimizers.row_optimizers import RowOptimizer
from anabranch.tables.shard_placement import Placement

__all__ = ["compile_cache_kernels"]

_ROWS, _WIDTH = 64, 2
_done: set[tuple[object, ...]] = set()


def compile_cache_kernels(cache: Cache, rule: RowOptimizer, dtype: torch.dtype) -> None:
    """Compiles, or loads, the kernels of tables of ``dtype`` under ``rule`` with such a cache.

    Only the first call in a process for a kind of rule and cache does so. It takes a few steps of two small tables, of
    which every row has changed and is zeros.

    >>> from anabranch.tables import Family
    >>> compile_cache_kernels(Cache(), RowOptimizer(Family.SGD, lr=0.1), torch.float32)
    """
    kind = (rule.number, dtype, bool(cache.push_bound))
    if kind in _done:
        return
    names, wide = ["first", "second"], rule.row_width(_WIDTH) if cache.push_bound else _WIDTH
    small = Cache(cache.policy, 8, min(cache.pull_bound, 1), min(cache.push_bound, 1))
    group = CacheGroup(names, small, _WIDTH, dtype, [lambda: rule] * 2)
    layout = Layout.of(dict.fromkeys(names, (Placement(_ROWS, 2, 7), dtype, _WIDTH)), [{}, {}])

    def came(query: CacheQuery) -> dict[str, Pulled]:
        counts = {name: len(ids) for name, ids in query.ids.items()}
        return {
            name: Pulled(
                torch.arange(count, device="cpu"),
                torch.ones(count, dtype=torch.int64, device="cpu"),
                torch.zeros(count, wide, dtype=dtype, device="cpu"),
            )
            for name, count in counts.items()
        }

    draw = torch.Generator().manual_seed(0)
    for step in range(6):
        batch = {name: torch.randint(_ROWS, (24,), generator=draw, device="cpu") for name in names}
        ids = {name: one.ids for name, one in distinct_ids(batch, dict.fromkeys(names, _ROWS)).items()}
        known = [torch.full((len(some),), WITH_STATE, device="cpu") for some in ids.values()]
        Pull(layout, list(ids.values()), known, [wide] * 2, [(0, 0)] * 2, None)
        query = group.ask(ids, step, training=step != 4)
        group.answer(query, came(query))
        ahead = group.start_prefetch({name: some[::2].contiguous() for name, some in ids.items()}, step, training=True)
        group.write({name: (some, torch.ones(len(some), _WIDTH, device="cpu")) for name, some in ids.items()}, step)
        group.finish_prefetch(ahead, came(ahead))
    group.waiting()
    _done.add(kind)
