"""``KeyedJagged``: several features of a batch, each with any number of ids a row, in one flat tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import optree
import torch
from torch import Tensor


@runtime_checkable
class Jagged(Protocol):
    """The methods of a batch's features: those of ``KeyedJagged``, and of TorchRec's ``KeyedJaggedTensor``."""

    def keys(self) -> Sequence[str]: ...
    def values(self) -> Tensor: ...
    def lengths(self) -> Tensor: ...
    def weights_or_none(self) -> Tensor | None: ...


class KeyedJagged:
    """Ids of several features, for each row of a batch any number of each.

    >>> ids = KeyedJagged.from_lists({"user": [[7], [8]], "seen": [[1, 2, 3], []]})
    >>> ids
    KeyedJagged(keys=['user', 'seen'], rows=2, values=5)
    >>> ids.values(), ids.lengths()
    (tensor([7, 8, 1, 2, 3]), tensor([1, 1, 3, 0]))

    It has the layout and the method names of TorchRec's ``KeyedJaggedTensor``. In a batch its three tensors are leaves,
    so an ``Executor`` moves it to the step's device, and its rows are those of the batch.

    Args:
        keys: the features' names.
        values: integer ``[n]``: all ids of the first feature, row by row, then those of the second.
        weights: of each id, floating ``[n]``, or ``None``.
        lengths: integer ``[len(keys) * rows]``: the number of ids of each feature's rows, in the same order.

    Raises:
        ValueError: sizes that do not fit each other, names the numbers.
    """

    def __init__(self, keys: Sequence[str], values: Tensor, weights: Tensor | None = None, *, lengths: Tensor) -> None:
        self._keys = list(keys)
        if not self._keys or len(set(self._keys)) != len(self._keys):
            raise ValueError(f"keys must be one or more different names, got {self._keys}")
        for label, tensor in {"values": values, "lengths": lengths}.items():
            if tensor.ndim != 1 or not _is_integer(tensor):
                raise ValueError(f"{label} has one dimension of integers, got {tuple(tensor.shape)} {tensor.dtype}")
        if len(lengths) % len(self._keys):
            raise ValueError(f"{len(lengths)} lengths are not a whole number of rows of {len(self._keys)} features")
        if bool((lengths < 0).any()):
            raise ValueError(f"lengths are at least 0, and the least is {int(lengths.min())}")
        if int(lengths.sum()) != len(values):
            raise ValueError(f"lengths add up to {int(lengths.sum())}, but there are {len(values)} values")
        if weights is not None and (weights.shape != values.shape or not weights.is_floating_point()):
            raise ValueError(
                f"{len(values)} values need the same number of floating-point weights, got {tuple(weights.shape)}"
            )
        self._values, self._lengths, self._weights = values, lengths, weights

    @classmethod
    def from_lists(
        cls,
        features: Mapping[str, Sequence[Sequence[int]]],
        weights: Mapping[str, Sequence[Sequence[float]]] | None = None,
    ) -> KeyedJagged:
        """Return the features of ``{name: a list of ids for each row}``; ``weights`` alike, with all features or none.

        Raises:
            ValueError: features of unequal rows, weights of another form, or a fraction for an id; names them.
        """
        rows = {key: len(each) for key, each in features.items()}
        if len(set(rows.values())) > 1:
            raise ValueError(f"features have unequal rows: {rows}")
        form = {key: [len(row) for row in each] for key, each in features.items()}
        given = None
        if weights is not None:
            if {key: [len(row) for row in each] for key, each in weights.items()} != form:
                raise ValueError("weights must have the features' names and one number for each id")
            given = torch.tensor([w for key in features for row in weights[key] for w in row], dtype=torch.float32)
        values = [value for each in features.values() for row in each for value in row]
        broken = [value for value in values if int(value) != value]
        if broken:
            raise ValueError(f"ids are integers, got {broken[0]!r}")
        lengths = [length for each in form.values() for length in each]
        return cls(
            list(features),
            torch.tensor(values, dtype=torch.int64),
            given,
            lengths=torch.tensor(lengths, dtype=torch.int64),
        )

    def keys(self) -> list[str]:
        """Return the features' names."""
        return list(self._keys)

    def values(self) -> Tensor:
        """Return all ids, ``[n]``."""
        return self._values

    def lengths(self) -> Tensor:
        """Return the number of ids of each feature's rows, ``[len(keys) * rows]``."""
        return self._lengths

    def weights_or_none(self) -> Tensor | None:
        """Return the weight of each id, if it has one."""
        return self._weights

    def stride(self) -> int:
        """Return the number of rows of the batch."""
        return len(self._lengths) // len(self._keys)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> KeyedJagged:
        """Return the same on ``device``."""
        return self._with(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> KeyedJagged:
        """Return the same in pinned memory, as a ``DataLoader`` requests it."""
        return self._with(Tensor.pin_memory)

    def _with(self, change: Callable[[Tensor], Tensor]) -> KeyedJagged:
        parts, keys = _leaves_of(self)
        return _of_leaves(keys, [part if part is None else change(part) for part in parts])

    def __len__(self) -> int:
        return self.stride()

    def __repr__(self) -> str:
        return f"KeyedJagged(keys={self._keys}, rows={self.stride()}, values={len(self._values)})"


def bags_of(features: Jagged) -> dict[str, tuple[Tensor, Tensor, Tensor | None]]:
    """Return for each feature its ids, where each row's begin, and their weights, as ``nn.EmbeddingBag`` takes them.

    >>> bags_of(KeyedJagged.from_lists({"a": [[5], []], "b": [[6, 7], [8]]}))["b"]
    (tensor([6, 7, 8]), tensor([0, 2]), None)
    """
    keys, values, weights = features.keys(), features.values(), features.weights_or_none()
    if values.dtype != torch.int32:  # starts have the ids' dtype, and those of a large batch need a wide one
        values = values.long()
    lengths = features.lengths().view(len(keys), -1)
    ends = lengths.sum(1).cumsum(0)[:-1].cpu()
    ids = torch.tensor_split(values, ends)
    parts = [None] * len(keys) if weights is None else torch.tensor_split(weights, ends)
    starts = (lengths.cumsum(1) - lengths).to(values.dtype)
    return dict(zip(keys, zip(ids, starts, parts, strict=True), strict=True))


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _leaves_of(features: KeyedJagged) -> tuple[tuple[Tensor | None, ...], tuple[str, ...]]:
    return (features._values, features._lengths, features._weights), tuple(features._keys)


def _of_leaves(keys: Sequence[str], leaves: Sequence[object]) -> KeyedJagged:
    """Return it unchecked: the leaves may be any stand-ins for its tensors."""
    made = KeyedJagged.__new__(KeyedJagged)
    made._keys = list(keys)
    made._values, made._lengths, made._weights = leaves  # type: ignore[assignment]
    return made


_register: Callable[..., object] = optree.register_pytree_node
_register(
    KeyedJagged,
    lambda features: (*_leaves_of(features), ("values", "lengths", "weights")),
    lambda keys, leaves: _of_leaves(keys, list(leaves)),
    namespace=optree.registry.__GLOBAL_NAMESPACE,
)
