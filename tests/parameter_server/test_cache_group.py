"""Caches of several tables that are worked on in one call against a call for each table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from anabranch.parameter_server.client.cache_group import CacheGroup
from anabranch.parameter_server.client.parameter_client import Pulled
from anabranch.tables import Cache, Family, RowOptimizer
from anabranch.tables.kernels.row_versions import WITH_STATE
from covering import pairwise

ROWS, WIDTH = 40, 3
NAMES = ["a", "b", "c"]
RULES = {
    "SGD": RowOptimizer(Family.SGD, lr=0.1),
    "momentum": RowOptimizer(Family.SGD, lr=0.1, momentum=0.9),
    "Adagrad": RowOptimizer(Family.ADAGRAD, lr=0.1, eps=1e-10),
    "row-wise Adagrad": RowOptimizer(Family.ROW_WISE_ADAGRAD, lr=0.1, eps=1e-10),
    "Adam": RowOptimizer(Family.ADAM, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8),
}


class Servers:
    """The tables of one worker's servers: every push changes its rows somehow, and others' changes come by chance."""

    def __init__(self, rule: RowOptimizer, dtype: torch.dtype, cache: Cache) -> None:
        draw = torch.Generator().manual_seed(0)
        self.wide = rule.row_width(WIDTH) if cache.push_bound else WIDTH
        self.rows = {name: torch.rand(ROWS, self.wide, generator=draw, dtype=dtype) + 0.5 for name in NAMES}
        self.versions = {name: torch.zeros(ROWS, dtype=torch.int64) for name in NAMES}

    def change(self, name: str, ids: Tensor, by: Tensor) -> None:
        self.rows[name][ids] += by
        self.versions[name][ids] += 1

    def pull(self, ids: dict[str, Tensor], known: dict[str, Tensor]) -> dict[str, Pulled]:
        found = {}
        for name, some in ids.items():
            now = self.versions[name][some]
            positions = torch.nonzero(now != known[name])[:, 0]
            rows = self.rows[name][some[positions]].clone()
            rows[known[name][positions] != WITH_STATE, WIDTH:] = 0
            found[name] = Pulled(positions, now[positions], rows)
        return found


TOGETHER, APART = [NAMES], [[name] for name in NAMES]


class Groups:
    """Groups of these tables, called in turn, as ``RemoteTables`` does."""

    def __init__(self, names: list[list[str]], cache: Cache, rule: RowOptimizer, dtype: torch.dtype) -> None:
        self.groups = [CacheGroup(some, cache, WIDTH, dtype, [lambda: rule] * len(some)) for some in names]

    def each(self, call: Callable[[CacheGroup, dict[str, Any]], Any], given: Mapping[str, Any]) -> list[Any]:
        parts = [(group, {name: given[name] for name in group.names if name in given}) for group in self.groups]
        return [(group, call(group, part)) for group, part in parts if part]


def merged(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}


def run(names: list[list[str]], cache: Cache, rule: RowOptimizer, dtype: torch.dtype, steps: int) -> list[object]:
    """What so many steps of reading, writing, prefetching, evaluating, flushing and forgetting come to."""
    draw, log = torch.Generator().manual_seed(1), list[object]()
    servers = Servers(rule, dtype, cache)
    caches = Groups(names, cache, rule, dtype)

    def chance(of: int) -> bool:
        return int(torch.randint(of, (), generator=draw)) == 0

    def some_ids() -> dict[str, Tensor]:
        found = {}
        for name in NAMES:
            if chance(6):
                continue
            skewed = (torch.rand(int(torch.randint(1, 14, (), generator=draw)), generator=draw) ** 3 * ROWS).long()
            found[name] = torch.unique(skewed)
        return found or {"b": torch.tensor([7])}

    def note(label: str, due: dict[str, tuple[Tensor, Tensor, Tensor | None]]) -> None:
        for name in NAMES:
            if name in due and len(due[name][0]):
                ids, grads, squares = due[name]
                log.extend([label, name, ids, grads, squares])
                servers.change(name, ids, torch.full((len(ids), servers.wide), 0.125, dtype=dtype))

    def read(ids: dict[str, Tensor], *, training: bool) -> None:
        queries = caches.each(lambda group, part: group.ask(part, step, training=training), ids)
        asked, known = merged(query.ids for _, query in queries), merged(query.known for _, query in queries)
        came = servers.pull(asked, known)
        log.extend([asked, known])
        log.append(merged(group.answer(query, came) for group, query in queries))
        note("left", merged(query.leaving for _, query in queries))

    def flush() -> None:
        note("waited", merged(group.waiting() for group in caches.groups))

    for step in range(steps):
        ids = some_ids()
        read(ids, training=True)
        if chance(4):
            read(some_ids(), training=False)
        ahead: list[Any] = []
        if chance(2):
            start = partial(CacheGroup.start_prefetch, step=step, training=not chance(5))
            ahead = caches.each(start, some_ids())
        asked, known = merged(query.ids for _, query in ahead), merged(query.known for _, query in ahead)
        came = servers.pull(asked, known)
        grads = {name: (some, torch.randn(len(some), WIDTH, generator=draw, dtype=dtype)) for name, some in ids.items()}
        parts = [{name: grads[name] for name in group.names if name in grads} for group in caches.groups]
        note("due", merged(group.write(part, step) for group, part in zip(caches.groups, parts, strict=True)))
        if chance(10):
            flush()
        if ahead:
            log.extend([asked, known])
            note("left", merged(group.finish_prefetch(query, came) for group, query in ahead))
        for name in NAMES:
            others = torch.unique(torch.randint(ROWS, (3,), generator=draw))
            servers.change(name, others, torch.full((len(others), servers.wide), 0.25, dtype=dtype))
        if chance(15):
            flush()
        if chance(20):
            flush()
            for group in caches.groups:
                group.drop()
        log.append(merged(group.statistics() for group in caches.groups))
    return log


def same(found: object, wanted: object) -> None:
    if isinstance(wanted, dict):
        assert isinstance(found, dict)
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            same(found[key], value)
    elif isinstance(wanted, Tensor):
        assert isinstance(found, Tensor)
        assert found.dtype == wanted.dtype
        if wanted.dtype == torch.int64:
            assert torch.equal(found, wanted)
        else:  # squares are added up in another order, and move what is applied again
            torch.testing.assert_close(found, wanted, rtol=2e-6, atol=2e-6)
    else:
        assert found == wanted


BOUNDS = [(0, 0), (3, 0), (0, 4), (3, 4), (9, 8)]
POLICIES = ["LRU", "LFU", "LFUOpt"]
DTYPES = [torch.float32, torch.float64]


def compare(policy: str, bounds: tuple[int, int], rule: str, dtype: torch.dtype, steps: int) -> None:
    cache = Cache(policy, 9, *bounds)  # type: ignore[arg-type]
    found, wanted = (run(names, cache, RULES[rule], dtype, steps) for names in (TOGETHER, APART))
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        same(one, other)


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize(("bounds", "rule", "policy"), pairwise(BOUNDS, RULES, POLICIES, slow=False))
def test_caches_in_one_call_are_the_caches_one_by_one(policy: str, bounds: tuple[int, int], rule: str) -> None:
    compare(policy, bounds, rule, torch.float32, 14)


@pytest.mark.slow
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rule", RULES)
def test_caches_in_one_call_are_the_caches_one_by_one_for_long(policy: str, bounds: tuple[int, int], rule: str) -> None:
    for dtype in DTYPES if policy == "LFU" else DTYPES[:1]:
        compare(policy, bounds, rule, dtype, 60)
