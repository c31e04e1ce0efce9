"""The contents of an optimizer at one moment: tensors, and Python's lists, dicts and numbers around them.

Optimizers of other libraries count steps in ``param_groups[0]``, keep numbers and lists in their state and attributes,
and replace the tensors of their state instead of changing them. All of it is restored with the same objects.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Contents", "held_by"]

_DICTS = (dict, OrderedDict, defaultdict)


class Contents:
    """The containers reachable from some optimizers, with their current contents.

    Attributes:
        objects: the ids of the optimizers, of the containers, and of what these hold.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._containers: list[tuple[Any, Callable[[Any], object], Any]] = []
        self.objects: set[int] = set()
        self._walk(list(optimizers))

    def restore(self) -> None:
        """Put the same objects back into the same containers; the tensors' values are left alone."""
        for container, fill, kept in self._containers:
            container.clear()
            fill(kept)

    def _walk(self, value: Any) -> None:
        if isinstance(value, Tensor) or id(value) in self.objects:
            return
        self.objects.add(id(value))
        if isinstance(value, Optimizer):
            self._walk(vars(value))
        elif type(value) in _DICTS:
            self._containers.append((value, value.update, dict(value)))
            for item in list(value.values()):
                self._walk(item)
        elif type(value) is list:
            self._containers.append((value, value.extend, list(value)))
            for item in list(value):
                self._walk(item)
        elif type(value) is set:
            self._containers.append((value, value.update, set(value)))
        elif isinstance(value, tuple):
            for item in value:
                self._walk(item)


def held_by(optimizers: Iterable[Optimizer]) -> set[int]:
    """Return the ids of the optimizers, their groups and all other containers that they hold."""
    return Contents(optimizers).objects
