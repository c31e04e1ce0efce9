"""Caches that are worked on in one call against the simple form, a cache for each table."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from anabranch.parameter_server.client.cache_group import CacheGroup, Caches, CachesOneByOne
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


def grouped(cache: Cache, rule: RowOptimizer, dtype: torch.dtype) -> Caches:
    return CacheGroup(NAMES, cache, WIDTH, dtype, [lambda: rule] * len(NAMES))


def one_by_one(cache: Cache, rule: RowOptimizer, dtype: torch.dtype) -> Caches:
    caches = CachesOneByOne(cache)
    for name in NAMES:
        caches.add(name, WIDTH, dtype, rule=lambda: rule, kind="plain")
    return caches


def run(make: object, cache: Cache, rule: RowOptimizer, dtype: torch.dtype, steps: int) -> list[object]:
    """What so many steps of reading, writing, prefetching, evaluating, flushing and forgetting come to."""
    draw, log = torch.Generator().manual_seed(1), list[object]()
    servers = Servers(rule, dtype, cache)
    caches: Caches = make(cache, rule, dtype)  # type: ignore[operator]

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
        question = caches.ask(ids, step, training=training)
        leaving = question.leaving
        log.extend([question.ids, question.known])
        rows, more = caches.answer(question, servers.pull(question.ids, question.known))
        assert not (leaving and more), "what leaves is said once"
        log.append(rows)
        note("left", leaving or more)

    for step in range(steps):
        ids = some_ids()
        read(ids, training=True)
        if chance(4):
            read(some_ids(), training=False)
        ahead = caches.start_prefetch(some_ids(), step, training=not chance(5)) if chance(2) else None
        came = servers.pull(ahead.ids, ahead.known) if ahead else {}
        grads = {name: (some, torch.randn(len(some), WIDTH, generator=draw, dtype=dtype)) for name, some in ids.items()}
        note("due", caches.write(grads, step))
        if chance(10):
            note("waited", caches.waiting())
        if ahead:
            log.extend([ahead.ids, ahead.known])
            note("left", caches.finish_prefetch(ahead, came))
        for name in NAMES:
            others = torch.unique(torch.randint(ROWS, (3,), generator=draw))
            servers.change(name, others, torch.full((len(others), servers.wide), 0.25, dtype=dtype))
        if chance(15):
            note("waited", caches.waiting())
        if chance(20):
            note("waited", caches.waiting())
            caches.drop()
        log.append(caches.statistics())
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
    found, wanted = (run(make, cache, RULES[rule], dtype, steps) for make in (grouped, one_by_one))
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


def test_without_squares_the_rows_are_the_same_to_the_bit() -> None:
    """No row that waits is read anew within the bounds, so nothing depends on squares."""
    ids = {name: torch.arange(6) for name in NAMES}
    draw = torch.Generator().manual_seed(2)
    steps = [{name: (ids[name], torch.randn(6, WIDTH, generator=draw)) for name in NAMES} for _ in range(5)]
    cache, read = Cache("LRU", 10, 50, 50), []
    for make in (grouped, one_by_one):
        servers = Servers(RULES["Adam"], torch.float32, cache)
        caches = make(cache, RULES["Adam"], torch.float32)
        answers = []
        for step, grads in enumerate(steps):
            question = caches.ask(ids, step, training=True)
            answers.append(caches.answer(question, servers.pull(question.ids, question.known))[0])
            caches.write(grads, step)
        read.append(answers)
    assert all(torch.equal(a[n], b[n]) for a, b in zip(*read, strict=True) for n in NAMES)
    assert not torch.equal(read[0][1]["a"], read[0][4]["a"])
