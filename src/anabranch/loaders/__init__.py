"""Loaders that an Executor's steps take their batches from, beside torch's own.

What an Executor does with any loader (epochs of several workers, positions in checkpoints) is in ``executor/loaders``.
"""

from anabranch.loaders.global_batches import GlobalBatches
from anabranch.loaders.neighbor_sampler import NeighborSampler, SampledNodes

__all__ = ["GlobalBatches", "NeighborSampler", "SampledNodes"]
