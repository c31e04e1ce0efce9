"""The contents of an optimizer at one moment: tensors, and Python's lists, dicts and numbers around them.

Optimizers of other libraries count steps in ``param_groups[0]``, keep numbers and lists in their state and attributes,
and replace the tensors of their state instead of changing them. All of it is restored with the same objects.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Contents", "held_by"]

_DICTS = (dict, OrderedDict, defaultdict)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_SAID_BY_SCHEDULERS = "_opt_called"


class Contents:
    """The containers reachable from some optimizers, with their current contents.

    Attributes:
        tensors: the tensors found in them.
        objects: the ids of the optimizers, and of the containers.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._containers: list[tuple[Any, Callable[[Any], object], Any]] = []
        self._leaves: list[object] = []
        self.tensors: list[Tensor] = []
        self.objects: set[int] = set()
        for leaf in self._walk(self._optimizers, self.objects):
            self._leaves.append(leaf)
            if isinstance(leaf, Tensor):
                self.tensors.append(leaf)

    def restore(self) -> None:
        """Put the same objects back into the same containers; the tensors' values are left alone."""
        for container, fill, kept in self._containers:
            container.clear()
            fill(kept)

    def differs(self, alike: Callable[[Tensor, Tensor], bool]) -> str | None:
        """Return a description of the first difference from the optimizers' current contents.

        Args:
            alike: returns true if a current tensor, the second, is an acceptable replacement for a recorded one.
        """
        now = Contents(self._optimizers)._leaves
        if len(now) != len(self._leaves):
            return "an optimizer holds different Python values"
        for old, new in zip(self._leaves, now, strict=True):
            if isinstance(old, Tensor) and isinstance(new, Tensor):
                if not alike(old, new):
                    return f"an optimizer's tensor of shape {tuple(old.shape)} has a different result"
            elif type(old) is not type(new) or not _equal(old, new):
                return f"an optimizer keeps {_shown(new)} in Python where the tape has {_shown(old)}"
        return None

    def _walk(self, value: Any, seen: set[int]) -> Iterator[object]:
        if isinstance(value, (Tensor, *_PLAIN)):
            yield value
            return
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, Optimizer):
            yield from self._walk(vars(value), seen)
        elif type(value) in _DICTS:
            self._containers.append((value, value.update, dict(value)))
            for key, item in list(value.items()):
                if key == _SAID_BY_SCHEDULERS:
                    continue
                if isinstance(key, str):
                    yield key
                yield from self._walk(item, seen)
        elif type(value) is list:
            self._containers.append((value, value.extend, list(value)))
            for item in list(value):
                yield from self._walk(item, seen)
        elif type(value) is set:
            self._containers.append((value, value.update, set(value)))
            yield len(value)
        elif isinstance(value, tuple):
            for item in value:
                yield from self._walk(item, seen)


def held_by(optimizers: Iterable[Optimizer]) -> set[int]:
    """Return the ids of the optimizers, their groups and all other containers that they hold."""
    return Contents(optimizers).objects


def _equal(old: object, new: object) -> bool:
    if isinstance(old, float) and isinstance(new, float) and math.isnan(old):
        return math.isnan(new)
    return old == new


def _shown(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:40]
