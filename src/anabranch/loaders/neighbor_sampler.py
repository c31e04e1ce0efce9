"""``NeighborSampler``: batches of nodes with sampled neighbours, and theirs, from a graph in memory.

A node's sampled neighbours depend only on the node, the hop, the batch's number and the seed: not on the other nodes of
the batch, nor on the worker. So workers that each take a part of a batch's seeds together give the results of one.

W. Hamilton, R. Ying, J. Leskovec, "Inductive Representation Learning on Large Graphs", NeurIPS 2017.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.errors import CheckpointError
from anabranch.loaders.global_batches import whole

__all__ = ["NeighborSampler", "SampledNodes"]

_Ints = NDArray[np.int64]
_Bits = NDArray[np.uint64]


class SampledNodes(NamedTuple):
    """A batch of a ``NeighborSampler``; everything is int64.

    Attributes:
        seeds: global ids, ``(S,)``.
        nodes: global ids of all nodes of the batch, each once, ``(V,)``: the seeds, then their sampled neighbours, then
            the neighbours of all these.
        blocks: ``(indptr, indices)`` for each fanout, in places of ``nodes``: the k-th of the nodes that were there
            before this hop shows ``indices[indptr[k] : indptr[k + 1]]``. The first block leads into the seeds.
    """

    seeds: Tensor
    nodes: Tensor
    blocks: tuple[tuple[Tensor, Tensor], ...]


class NeighborSampler:
    """Batches of seeds with sampled surroundings; an iterable of one epoch, another order each time.

    >>> indptr, indices = [0, 2, 4, 6, 8], [1, 3, 0, 2, 1, 3, 2, 0]
    >>> ring = NeighborSampler(indptr, indices, fanouts=[1, -1], batch_size=2)
    >>> batch = next(iter(ring))
    >>> len(batch.seeds), bool((batch.nodes[:2] == batch.seeds).all()), len(batch.blocks)
    (2, True, 2)
    >>> indptr, indices = batch.blocks[0]
    >>> indptr.tolist(), len(ring)
    ([0, 1, 2], 2)

    A layer takes the mean over a block's neighbours so, the last block first::

        for layer, (indptr, indices) in zip(layers, reversed(batch.blocks)):
            shown = torch.segment_reduce(hidden[indices], "mean", offsets=indptr, initial=0)
            hidden = layer(hidden[: len(indptr) - 1], shown)

    Nodes come as ids: their features are rows of an ``nn.Embedding``, of a ``RemoteEmbedding`` or of any tensor. As the
    sizes of a batch differ, a ``TrainStep`` takes ``rows=lambda batch: len(batch.seeds)``. ``state_dict`` is the
    position, with which an ``Executor`` resumes exactly.

    Args:
        indptr: the graph in compressed sparse rows: node v leads to ``indices[indptr[v] : indptr[v + 1]]``.
        indices: the neighbours, ids of nodes.
        fanouts: how many neighbours are sampled at each hop, without replacement; all of a node that has fewer; -1
            takes all.
        batch_size: seeds a batch, over all workers; the last of an epoch may have fewer.
        seeds: the nodes to begin from, each once; by default all.
        seed: of the order and the samples; the same one gives the same batches.
        rank: this worker's part of each batch.
        world_size: the number of workers that share the batches.

    Raises:
        ValueError, TypeError: what is not a graph, or an argument out of range; names it.
    """

    def __init__(
        self,
        indptr: Any,
        indices: Any,
        fanouts: Sequence[int],
        batch_size: int,
        seeds: Any = None,
        seed: int = 0,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._indptr = _ints("indptr", indptr)
        nodes, edges = len(self._indptr) - 1, len(indices)
        if nodes < 0 or self._indptr[0] != 0 or (np.diff(self._indptr) < 0).any() or self._indptr[-1] != edges:
            shown = f"{self._indptr[:3].tolist()} ... {self._indptr[-1:].tolist()}"
            raise ValueError(f"indptr begins with 0, never falls and ends with {edges}, the indices; got {shown}")
        self._indices = _ids("indices", indices, nodes)
        self._seeds = np.arange(nodes) if seeds is None else _ids("seeds", seeds, nodes)
        if len(np.unique(self._seeds)) != len(self._seeds):
            raise ValueError("seeds contains a node twice; give each once")
        hops = _ints("fanouts", fanouts)
        if not len(hops) or not ((hops > 0) | (hops == -1)).all():
            raise ValueError(f"fanouts are neighbours of each hop, at least 1, or -1 for all, got {fanouts!r}")
        self._batch_size, self._seed = whole("batch_size", batch_size, 1), whole("seed", seed, 0)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is from 0 to below world_size={world_size}, got {rank!r}")
        self._fanouts: list[int] = hops.tolist()
        self._rank, self._world_size = rank, world_size
        self._batches = 0

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return -(-len(self._seeds) // self._batch_size)

    def __iter__(self) -> Iterator[SampledNodes]:
        """Sample the rest of this epoch, or another epoch."""
        if not len(self):
            return
        epoch, first = divmod(self._batches, len(self))
        order = np.random.default_rng([self._seed, epoch]).permutation(self._seeds)
        for number in range(first, len(self)):
            seeds = order[number * self._batch_size : (number + 1) * self._batch_size]
            self._batches += 1
            yield self.sample(np.array_split(seeds, self._world_size)[self._rank], key=self._batches)

    def sample(self, seeds: Any, *, key: int = 0) -> SampledNodes:
        """Return the surroundings of some nodes; the same ``key`` gives the same neighbours.

        Args:
            seeds: ids of nodes, each once.
            key: any whole number.
        """
        begun = _ids("seeds", seeds, len(self._indptr) - 1)
        nodes, blocks = begun, []
        for hop, fanout in enumerate(self._fanouts):
            keys = np.random.SeedSequence([key % 2**64, self._seed, hop])
            draws = keys.generate_state(max(fanout, 0), np.uint64).astype(np.uint64)
            counts, neighbours = self._neighbours(nodes, draws)
            nodes = np.concatenate([nodes, np.setdiff1d(neighbours, nodes)])
            indptr, order = np.concatenate([[0], np.cumsum(counts)]), np.argsort(nodes)
            places = order[np.searchsorted(nodes[order], neighbours)]
            blocks.append((torch.from_numpy(indptr), torch.from_numpy(places)))
        return SampledNodes(torch.from_numpy(begun), torch.from_numpy(nodes), tuple(blocks))

    def _neighbours(self, nodes: _Ints, draws: _Bits) -> tuple[_Ints, _Ints]:
        """Return how many neighbours each node shows, and which, one node's after another's; all without ``draws``."""
        first = self._indptr[nodes]
        degrees = self._indptr[nodes + 1] - first
        counts = np.minimum(degrees, len(draws)) if len(draws) else degrees
        starts = np.cumsum(counts) - counts
        slots = np.arange(int(counts.sum())) - np.repeat(starts, counts)
        chosen = slots + np.repeat(first, counts)
        many = np.flatnonzero(degrees > counts)
        if len(many):
            where = starts[many][:, None] + np.arange(len(draws))
            chosen[where] = first[many][:, None] + _subsets(degrees[many], nodes[many], draws)
        return counts, self._indices[chosen]

    def state_dict(self) -> dict[str, int]:
        """Return the position: the batches taken over all epochs, and what their order follows from."""
        order = {"seed": self._seed, "batch_size": self._batch_size, "seeds": len(self._seeds)}
        return {"batches": self._batches, **order}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a position.

        Raises:
            CheckpointError: another seed, batch size or number of seeds, or no position.
        """
        if not isinstance(state.get("batches"), int):
            raise CheckpointError(f"a NeighborSampler's state has a number of 'batches', got {state!r}")
        for name, here in self.state_dict().items():
            if name != "batches" and state.get(name, here) != here:
                raise CheckpointError(
                    f"the checkpoint's NeighborSampler has {name}={state.get(name)!r}, but this one has {here!r}: its "
                    "batches are others; load with the data and the arguments that were saved"
                )
        self._batches = state["batches"]


def _subsets(sizes: _Ints, nodes: _Ints, draws: _Bits) -> _Ints:
    """Return as many different numbers as ``draws`` below each of ``sizes``, every such set with the same chance.

    R. Floyd's algorithm, for all rows at once. J. Bentley, R. Floyd, "A Sample of Brilliance", 1987.
    """
    subsets = np.empty((len(sizes), len(draws)), np.int64)
    for k, draw in enumerate(draws):
        top = sizes - len(draws) + k
        drawn = (_hashed(nodes, draw) % (top + 1).astype(np.uint64)).astype(np.int64)
        taken = (subsets[:, :k] == drawn[:, None]).any(1)
        subsets[:, k] = np.where(taken, top, drawn)
    return subsets


def _hashed(nodes: _Ints, draw: np.uint64) -> _Bits:
    """Return 64 bits for each node in a draw (the finisher of SplitMix64)."""
    bits = nodes.astype(np.uint64) ^ draw
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    return bits ^ (bits >> np.uint64(31))


def _ints(name: str, values: Any) -> _Ints:
    array = np.asarray(values.cpu() if isinstance(values, Tensor) else values)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise TypeError(f"{name} is a list of whole numbers, got an array of {array.dtype} with shape {array.shape}")
    return array.astype(np.int64)


def _ids(name: str, values: Any, nodes: int) -> _Ints:
    ids = _ints(name, values)
    if ids.size and not 0 <= ids.min() <= ids.max() < nodes:
        raise ValueError(f"{name} are ids of {nodes} nodes, 0 to {nodes - 1}; got {ids.min()} to {ids.max()}")
    return ids
