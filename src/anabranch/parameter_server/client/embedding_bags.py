"""``EmbeddingBagCollection``: one call for the bags of several features, and one message to the servers for their rows.

::

    KeyedJagged ──split──> ids of "user" ──┐                        ┌──> bag of "user" ──> (rows, width)
                           ids of "seen" ──┼──> read all at once ───┼──> bag of "seen" ──> (rows, width)
                           ids of "ad"   ──┘    (tables on servers) └──> bag of "ad"   ──> (rows, width)

Each bag is the module that the user would call alone, so its numbers, modes and gradients are unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from anabranch.autodiff.boundary.crossing import current_tracer
from anabranch.errors import CaptureError, SchemaError
from anabranch.parameter_server.client.remote_embedding import RemoteEmbedding
from anabranch.parameter_server.client.remote_tables import read_together
from anabranch.parameter_server.client.remote_weight import RemoteLookups, WeightSource
from anabranch.tensors import Jagged, bags_of


class EmbeddingBagCollection(nn.Module):
    """Reduces the ids of each feature to one row per row of the batch, with its own bag.

    >>> from anabranch.tensors import KeyedJagged
    >>> bags = EmbeddingBagCollection(
    ...     {
    ...         "user": nn.EmbeddingBag(10, 4, mode="sum"),
    ...         "seen": nn.EmbeddingBag(50, 8, mode="mean"),
    ...     }
    ... )
    >>> pooled = bags(KeyedJagged.from_lists({"user": [[7], [8]], "seen": [[1, 2, 3], []]}))
    >>> {key: tuple(rows.shape) for key, rows in pooled.items()}
    {'user': (2, 4), 'seen': (2, 8)}

    The result for a feature is that of its module on the feature's ids and offsets, gradients included. Rows that live
    on servers (a ``RemoteEmbedding``, or an ``nn.EmbeddingBag`` that an ``Executor`` has moved there) come in one
    message per shard for all features.

    Args:
        bags: for each feature an ``nn.EmbeddingBag``, or a ``RemoteEmbedding`` with a ``mode``; features may share one.

    Raises:
        TypeError, ValueError: a module that is not a bag, or a feature's name that no submodule can have.
    """

    def __init__(self, bags: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.bags = nn.ModuleDict()
        for key, bag in bags.items():
            if not isinstance(bag, nn.EmbeddingBag | RemoteEmbedding):
                kind = type(bag).__name__
                raise TypeError(f"feature {key!r} needs an nn.EmbeddingBag or a RemoteEmbedding, got {kind}")
            if bag.mode is None:
                raise ValueError(f"feature {key!r}: RemoteEmbedding {bag.name} reduces no bags; give it a mode=")
            try:
                self.bags[key] = bag
            except (KeyError, TypeError) as error:
                raise ValueError(f"feature {key!r} names no submodule ({error}); give it another name") from None

    def forward(self, features: Jagged) -> dict[str, Tensor]:
        """Return ``{feature: (rows, width)}`` of a ``KeyedJagged``, or of TorchRec's ``KeyedJaggedTensor``.

        Weights of ids go to bags as ``per_sample_weights``, which need ``mode="sum"``. Features without a bag are
        skipped.

        Raises:
            SchemaError: a feature that has a bag is missing, or has weights and a bag of another mode.
            CaptureError: a graph is being captured, but it cannot read the sizes of features from a batch.
        """
        tracer = current_tracer()
        if tracer is not None and tracer.captures:
            raise CaptureError(
                "EmbeddingBagCollection reads the sizes of its features from each batch, and a graph has fixed "
                "sizes; run the step on the tape: engine='tape'"
            )
        bags = bags_of(features)
        missing = [key for key in self.bags if key not in bags]
        if missing:
            raise SchemaError(f"features {missing} are not among {list(bags)}")
        mine = {key: bags[key] for key in self.bags}
        sources = [(_source_of(self.bags[key]), ids) for key, (ids, _, _) in mine.items()]
        with nullcontext() if tracer is not None else read_together(sources):
            return {key: self._reduce(key, *bag) for key, bag in mine.items()}

    def _reduce(self, key: str, ids: Tensor, starts: Tensor, weights: Tensor | None) -> Tensor:
        bag = self.bags[key]
        if weights is not None and bag.mode != "sum":
            raise SchemaError(f"feature {key!r} has weights, and its bag's mode is {bag.mode!r}; weights need 'sum'")
        if getattr(bag, "include_last_offset", False):
            starts = torch.cat([starts, starts.new_full((1,), len(ids))])
        row: Tensor = bag(ids, starts, per_sample_weights=weights)
        return row


def _source_of(bag: nn.Module) -> WeightSource | None:
    """Return where a bag's rows come from, if that is known before they are requested."""
    if isinstance(bag, RemoteEmbedding):
        return bag.source
    lookups = getattr(bag.weight, "lookups", None)
    return lookups.source if isinstance(lookups, RemoteLookups) else None
