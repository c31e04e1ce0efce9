"""Steps of sessions as a backend sees them: tasks that run alone, and the memory of a module's caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType

from torch import Tensor, nn

from anabranch.experts.server.batching.task_pool import Task

__all__ = ["StepTask", "bytes_held", "makes_caches", "run_steps"]


class StepTask(Task):
    """A step that waits for the device; it never shares a batch, because each session has its own cache.

    Attributes:
        take: takes the step.
    """

    take: Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]] = tuple


def run_steps(batch: Sequence[Task]) -> list[Sequence[Tensor | None]]:
    """Take the steps of a batch, one after the other."""
    return [task.take(task.inputs) for task in batch if isinstance(task, StepTask)]


def makes_caches(module: nn.Module) -> bool:
    """Return True if ``module`` can continue sequences: it has ``make_cache``."""
    return callable(getattr(module, "make_cache", None))


def bytes_held(*structures: object) -> int:
    """Return the bytes of the tensors in ``structures``: in containers and in attributes; shared memory counts once.

    >>> import torch
    >>> whole = torch.zeros(4, 8)
    >>> bytes_held({"keys": whole[:2], "values": [whole[2:]]}, None, 7)
    128
    """
    storages: dict[int, int] = {}
    seen: set[int] = set()
    waiting = list(structures)
    while waiting:
        part = waiting.pop()
        if isinstance(part, Tensor):
            storage = part.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif part is not None and id(part) not in seen:
            seen.add(id(part))
            waiting += _parts_of(part)
    return sum(storages.values())


def _parts_of(part: object) -> Iterator[object]:
    # A cache may refer to its module, which exists anyway.
    if isinstance(part, (str, bytes, int, float, type, ModuleType, nn.Module)):
        return
    if isinstance(part, Mapping):
        yield from part.values()
    elif isinstance(part, (list, tuple, set, frozenset)):
        yield from part
    yield from getattr(part, "__dict__", {}).values()
    for kind in type(part).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(part, name, None)
