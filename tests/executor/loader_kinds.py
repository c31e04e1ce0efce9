"""Loaders of every kind, and the plain loop that their batches are compared with."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from anabranch.executor.loaders.loading import ENDED, BoundLoader
from anabranch.loaders import GlobalBatches


def bound(loader: Iterable[object], rank: int = 0, world_size: int = 1) -> BoundLoader:
    return BoundLoader(loader, worker=lambda: (rank, world_size))


def numbers(batch: object) -> list[float]:
    """What is in a batch, flat."""
    if isinstance(batch, Tensor):
        return [float(value) for value in batch.reshape(-1).tolist()]
    if isinstance(batch, list | tuple):
        return [value for part in batch for value in numbers(part)]
    return [float(batch)]  # type: ignore[arg-type]


def train(batch: object) -> list[float]:
    """Stands for a step: it draws from every global generator."""
    draws = [torch.rand(()).item(), random.random(), float(np.random.random())]
    return [*numbers(batch), *draws]


def take(loader: BoundLoader, count: int) -> list[list[float]]:
    """Trains for ``count`` steps, as an executor on one worker would."""
    steps = []
    while len(steps) < count:
        batch = loader.next_batch()
        if batch is ENDED:
            loader.start_epoch()
        else:
            steps.append(train(batch))
    return steps


def plain(loader: Iterable[object], count: int) -> list[list[float]]:
    """The loop that all of this must equal."""
    steps: list[list[float]] = []
    for epoch in itertools.count():
        for part in ("sampler", "batch_sampler", "dataset"):
            if hasattr(getattr(loader, part, None), "set_epoch"):
                getattr(loader, part).set_epoch(epoch)
        for batch in loader:
            steps.append(train(batch))
            if len(steps) == count:
                return steps
    raise AssertionError


# Loaders of every kind; each call makes them anew, as a restarted script does.


class Squares(Dataset[Tensor]):
    def __init__(self, count: int = 11) -> None:
        self.count = count
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        self.loaded.append(index)
        return torch.tensor(float(index * index))


class Noisy(Squares):
    """Draws from the global generator for each sample."""

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + torch.rand(()) + random.random()


class EagerSampler(Sampler[int]):
    """Draws from the global generator when iteration starts, not at the first index."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(11).tolist())

    def __len__(self) -> int:
        return 11


class PairSampler(Sampler[list[int]]):
    """A batch sampler of its own kind."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(5).tolist()
        return iter([[2 * index, 2 * index + 1] for index in order])

    def __len__(self) -> int:
        return 5


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        for index in range(11):
            yield torch.tensor(float(index))


class Shuffled(Squares):
    """Its samples depend on its epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Tensor:
        return torch.randperm(11, generator=seeded(self.epoch))[index].float()


class Streamed(IterableDataset[Tensor]):
    """Like those of Hugging Face: its epoch is only read as an iteration begins, and by a property."""

    def __init__(self) -> None:
        self._epoch = torch.tensor(0)

    @property
    def epoch(self) -> int:
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = torch.tensor(epoch)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randperm(11, generator=seeded(self.epoch)).float())


class Plain:
    """Batches from a class with no more than ``__iter__``."""

    def __iter__(self) -> Iterator[Tensor]:
        for index in torch.randperm(7).tolist():
            yield torch.tensor([float(index)])


class Stateful:
    """Keeps its position; its state holds tensors and is alive: it changes as the loader goes on."""

    def __init__(self) -> None:
        self.current: dict[str, object] = {"next": 0, "sum": torch.zeros(1), "epoch": 0}

    def state_dict(self) -> dict[str, object]:
        return self.current

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.current = dict(state)

    def __iter__(self) -> Iterator[Tensor]:
        state = self.current
        while state["next"] < 6:  # type: ignore[operator]
            state["next"] += 1  # type: ignore[operator]
            state["sum"] += state["next"]  # type: ignore[operator]
            yield torch.stack([state["sum"][0], torch.tensor(float(state["epoch"]))])  # type: ignore[index,arg-type]
        state["next"] = 0
        state["epoch"] += 1  # type: ignore[operator]


def seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


LOADERS: dict[str, Callable[[], Iterable[object]]] = {
    "list": lambda: [torch.tensor([float(i)]) for i in range(5)],
    "plain": Plain,
    "stateful": Stateful,
    "shuffled": lambda: DataLoader(Squares(), batch_size=2, shuffle=True),
    "own_generator": lambda: DataLoader(Squares(), batch_size=2, shuffle=True, generator=seeded()),
    "eager": lambda: DataLoader(Squares(), batch_size=2, sampler=EagerSampler()),
    "pairs": lambda: DataLoader(Squares(), batch_sampler=PairSampler()),
    "unbatched": lambda: DataLoader(Squares(), batch_size=None, shuffle=True),
    "distributed": lambda: DataLoader(
        Squares(), batch_size=2, sampler=DistributedSampler(range(11), num_replicas=1, rank=0, seed=3)
    ),
    "noisy": lambda: DataLoader(Noisy(), batch_size=2, shuffle=True),
    "global": lambda: GlobalBatches(Squares(), 2, seed=3),
    "epochs": lambda: DataLoader(Shuffled(), batch_size=2),
    "streamed epochs": lambda: DataLoader(Streamed(), batch_size=2),
    "iterable": lambda: DataLoader(Stream(), batch_size=2),
    "two_workers": lambda: DataLoader(Squares(), batch_size=2, shuffle=True, num_workers=2),
    "two_workers_global": lambda: GlobalBatches(Squares(), 2, seed=3, num_workers=2),
    "two_workers_iterable": lambda: DataLoader(Stream(), batch_size=2, num_workers=1),
}


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def drain(loader: BoundLoader) -> int:
    count = 0
    while loader.next_batch() is not ENDED:
        count += 1
    return count
