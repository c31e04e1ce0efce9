"""Sampled neighbours: of the graph, each once, every subset as likely, the same whoever asks and after a restart."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import anabranch as ab
from anabranch.loaders import NeighborSampler, SampledNodes


def random_graph(nodes: int = 300, seed: int = 0) -> tuple[Any, Any]:
    draw = np.random.default_rng(seed)
    degrees = draw.integers(0, 12, nodes)
    indices = np.concatenate([draw.choice(nodes, degree, replace=False) for degree in degrees])
    return np.concatenate([[0], np.cumsum(degrees)]), indices


INDPTR, INDICES = random_graph()


def shown(batch: SampledNodes, hop: int) -> dict[int, list[int]]:
    """The neighbours that each node shows at a hop, in global ids."""
    indptr, indices = batch.blocks[hop]
    return {
        int(batch.nodes[k]): batch.nodes[indices[indptr[k] : indptr[k + 1]]].tolist() for k in range(len(indptr) - 1)
    }


def test_batches_are_subgraphs_of_distinct_nodes() -> None:
    fanouts = [4, -1]
    sampler = NeighborSampler(INDPTR, INDICES, fanouts, 32)
    seen: list[int] = []
    for batch in sampler:
        seen += batch.seeds.tolist()
        assert torch.equal(batch.nodes[: len(batch.seeds)], batch.seeds)
        assert len(batch.nodes.unique()) == len(batch.nodes)
        known = batch.seeds.tolist()
        for hop, fanout in enumerate(fanouts):
            sampled = shown(batch, hop)
            assert list(sampled) == known
            for node, neighbours in sampled.items():
                whole = set(INDICES[INDPTR[node] : INDPTR[node + 1]].tolist())
                assert len(neighbours) == (len(whole) if fanout == -1 else min(fanout, len(whole)))
                assert len(set(neighbours)) == len(neighbours)
                assert set(neighbours) <= whole
            known = list(dict.fromkeys([*known, *sorted({n for ns in sampled.values() for n in ns})]))
        assert sorted(known) == sorted(batch.nodes.tolist())
    assert sorted(seen) == list(range(300))
    assert len(sampler) == 10


@pytest.mark.slow
def test_every_subset_is_as_likely() -> None:
    star = NeighborSampler([0, 6, *[6] * 6], np.arange(1, 7), [3], 1)
    subsets = Counter(tuple(star.sample([0], key=key).nodes[1:].tolist()) for key in range(8000))
    assert len(subsets) == 20
    assert 320 < min(subsets.values()) <= max(subsets.values()) < 480  # 400 expected, deviation 19.5


def equal(one: SampledNodes, two: SampledNodes) -> bool:
    tensors = ([*each[:2], *itertools.chain(*each.blocks)] for each in (one, two))
    return all(map(torch.equal, *tensors))


def test_the_same_seed_gives_the_same_batches_and_another_one_others() -> None:
    one, two, other = (NeighborSampler(INDPTR, INDICES, [3, 2], 64, seed=seed) for seed in (1, 1, 2))
    assert all(map(equal, [*one, *one], [*two, *two]))
    assert not any(map(equal, one, other))
    first, second = [*two], [*two]
    assert not torch.equal(first[0].seeds, second[0].seeds)  # another order each epoch


def test_workers_together_compute_the_same_as_one() -> None:
    whole = NeighborSampler(INDPTR, INDICES, [3, 2], 50)
    parts = [NeighborSampler(INDPTR, INDICES, [3, 2], 50, rank=rank, world_size=3) for rank in range(3)]
    for batch, *shares in zip(whole, *parts, strict=True):
        assert torch.equal(torch.cat([share.seeds for share in shares]), batch.seeds)
        for hop in range(2):
            together = shown(batch, hop)
            for share in shares:
                assert all(sorted(together[node]) == sorted(ns) for node, ns in shown(share, hop).items())


def test_it_resumes_where_it_was() -> None:
    one, two = (NeighborSampler(INDPTR, INDICES, [3], 64) for _ in range(2))
    batches = iter(one)
    for _ in range(3):
        next(batches)
    two.load_state_dict(one.state_dict())
    assert [equal(*both) for both in zip(batches, two, strict=True)] == [True] * 2
    for change in ({"seed": 3}, {"batch_size": 32}, {"seeds": [1, 2]}):
        three = NeighborSampler(INDPTR, INDICES, [3], **{"batch_size": 64} | change)
        with pytest.raises(ab.CheckpointError, match=f"NeighborSampler has {next(iter(change))}="):
            three.load_state_dict(one.state_dict())
    with pytest.raises(ab.CheckpointError, match="has a number of 'batches', got {}"):
        two.load_state_dict({})


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"indptr": [0, 5]}, ValueError, "ends with 2, the indices"),
        ({"indptr": [0, 2, 1]}, ValueError, "never falls"),
        ({"indices": [0, 7]}, ValueError, "indices are ids of 2 nodes, 0 to 1; got 0 to 7"),
        ({"indices": [0.5, 1.0]}, TypeError, "indices is a list of whole numbers"),
        ({"fanouts": []}, ValueError, r"neighbours of each hop, .* got \[\]"),
        ({"fanouts": [0]}, ValueError, "at least 1, or -1 for all"),
        ({"batch_size": 0}, ValueError, "batch_size is at least 1"),
        ({"seeds": [3]}, ValueError, "seeds are ids of 2 nodes"),
        ({"seeds": [1, 1]}, ValueError, "contains a node twice"),
        ({"rank": 1}, ValueError, "rank is from 0 to below world_size=1"),
    ],
)
def test_mistakes(change: dict[str, Any], error: type[Exception], text: str) -> None:
    right: dict[str, Any] = {"indptr": [0, 1, 2], "indices": [1, 0], "fanouts": [1], "batch_size": 1}
    with pytest.raises(error, match=text):
        NeighborSampler(**{**right, **change})


def test_a_graph_without_nodes_has_no_batches() -> None:
    assert list(NeighborSampler([0], [], [2], 4)) == []
