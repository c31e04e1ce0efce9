"""Batches of what is not a table of rows: sampled surroundings of a graph's nodes. Open ``neighbor_sampler.py``.

What an executor does with any loader (prefetching, epochs of several workers, positions in checkpoints) is in
``executor/loaders``.
"""

from anabranch.loaders.neighbor_sampler import NeighborSampler, SampledNodes

__all__ = ["NeighborSampler", "SampledNodes"]
