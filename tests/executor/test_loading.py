"""Batches taken ahead are the batches a plain loop takes, and a restart goes on with the next one."""

from __future__ import annotations

import contextvars
import gc
import itertools
import logging
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from anabranch import checkpoint
from anabranch.errors import CheckpointError
from anabranch.executor import loading, positions
from anabranch.executor.loading import ENDED, BoundLoader
from anabranch.executor.randomness import random_state, restore_random_state, same_random_state


def bound(loader: Iterable[object], rank: int = 0, world_size: int = 1, prefetch: bool = True) -> BoundLoader:
    return BoundLoader(loader, rank=rank, world_size=world_size, prefetch=prefetch)


@pytest.fixture(autouse=True)
def _every_fetch_is_worth_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_WORTH_A_THREAD", -1.0)


@pytest.fixture
def opened() -> Iterator[Callable[..., BoundLoader]]:
    loaders: list[BoundLoader] = []

    def make(loader: Iterable[object], **options: object) -> BoundLoader:
        loaders.append(bound(loader, **options))  # type: ignore[arg-type]
        return loaders[-1]

    yield make
    for loader in loaders:
        loader.close()


def numbers(batch: object) -> list[float]:
    """What is in a batch, flat."""
    if isinstance(batch, Tensor):
        return [float(value) for value in batch.reshape(-1).tolist()]
    if isinstance(batch, list | tuple):
        return [value for part in batch for value in numbers(part)]
    return [float(batch)]  # type: ignore[arg-type]


def train(batch: object) -> list[float]:
    """Stands for a step: it draws from every global generator, and takes long enough for a fetch to overlap."""
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
        for sampler in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
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


class NoisyByItself(Squares):
    """Draws from the generator that its sampler has too."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + torch.rand((), generator=self.generator)


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


def with_own_generator() -> DataLoader[Tensor]:
    return DataLoader(Squares(), batch_size=2, shuffle=True, generator=seeded())


def noisy_by_itself() -> DataLoader[Tensor]:
    generator = seeded()
    return DataLoader(NoisyByItself(generator), batch_size=2, shuffle=True, generator=generator)


LOADERS: dict[str, Callable[[], Iterable[object]]] = {
    "list": lambda: [torch.tensor([float(i)]) for i in range(5)],
    "plain": Plain,
    "stateful": Stateful,
    "sequential": lambda: DataLoader(Squares(), batch_size=2),
    "drop_last": lambda: DataLoader(Squares(), batch_size=2, drop_last=True),
    "shuffled": lambda: DataLoader(Squares(), batch_size=2, shuffle=True),
    "own_generator": with_own_generator,
    "replacement": lambda: DataLoader(
        Squares(), batch_size=2, sampler=RandomSampler(range(11), replacement=True, num_samples=40, generator=seeded())
    ),
    "weighted": lambda: DataLoader(Squares(), batch_size=2, sampler=WeightedRandomSampler([1.0] * 11, 9)),
    "eager": lambda: DataLoader(Squares(), batch_size=2, sampler=EagerSampler()),
    "pairs": lambda: DataLoader(Squares(), batch_sampler=PairSampler()),
    "outer": lambda: DataLoader(Squares(), batch_sampler=BatchSampler(EagerSampler(), 3, False)),
    "unbatched": lambda: DataLoader(Squares(), batch_size=None, shuffle=True),
    "distributed": lambda: DataLoader(
        Squares(), batch_size=2, sampler=DistributedSampler(range(11), num_replicas=1, rank=0, seed=3)
    ),
    "noisy": lambda: DataLoader(Noisy(), batch_size=2, shuffle=True),
    "noisy_by_itself": noisy_by_itself,
    "iterable": lambda: DataLoader(Stream(), batch_size=2),
    "two_workers": lambda: DataLoader(Squares(), batch_size=2, shuffle=True, num_workers=2),
    "two_workers_own_generator": lambda: DataLoader(
        Squares(), batch_size=2, shuffle=True, num_workers=2, generator=seeded()
    ),
    "two_workers_iterable": lambda: DataLoader(Stream(), batch_size=2, num_workers=1),
}


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@pytest.mark.parametrize("kind", LOADERS)
def test_batches_and_random_draws_are_those_of_a_plain_loop(kind: str, opened: Callable[..., BoundLoader]) -> None:
    seed_all(0)
    expected = plain(LOADERS[kind](), 14)
    end = random_state()
    seed_all(0)
    assert take(opened(LOADERS[kind]()), 14) == expected
    assert same_random_state(random_state(), end)


def saved(path: Path, loaders: list[BoundLoader]) -> list[object]:
    """Their states as they come back from a checkpoint."""
    state, tensors = checkpoint.split([loader.state() for loader in loaders])
    checkpoint.write(path, {"rank0": tensors}, state, step=0)
    found = checkpoint.read(path)
    joined = checkpoint.join(found.state, found.tensors("rank0"))
    assert isinstance(joined, list)
    return joined


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("steps", [0, 1, 3, 6, 9])
def test_a_restart_goes_on_with_the_next_batch(
    kind: str, steps: int, opened: Callable[..., BoundLoader], tmp_path: Path
) -> None:
    seed_all(0)
    first = opened(LOADERS[kind]())
    take(first, steps)
    state, draws = saved(tmp_path, [first]), random_state()
    expected = take(first, 12)
    end = random_state()
    seed_all(1)
    again = opened(LOADERS[kind]())
    before = random_state()
    again.restore(state)
    assert same_random_state(random_state(), before)
    restore_random_state(draws)
    assert take(again, 12) == expected
    assert same_random_state(random_state(), end)


@pytest.mark.parametrize("kind", ["shuffled", "own_generator", "stateful", "plain", "distributed"])
def test_a_restart_of_a_restart_goes_on_too(kind: str, opened: Callable[..., BoundLoader], tmp_path: Path) -> None:
    seed_all(0)
    expected = plain(LOADERS[kind](), 12)
    seed_all(0)
    steps: list[list[float]] = []
    loader = opened(LOADERS[kind]())
    for turn in range(6):
        steps += take(loader, 2)
        state, draws = saved(tmp_path / str(turn), [loader]), random_state()
        loader = opened(LOADERS[kind]())
        loader.restore(state)
        restore_random_state(draws)
    assert steps == expected


@pytest.mark.parametrize("kind", ["shuffled", "stateful", "list", "distributed"])
def test_a_restart_between_two_epochs_starts_the_second(
    kind: str, opened: Callable[..., BoundLoader], tmp_path: Path
) -> None:
    seed_all(0)
    loader = opened(LOADERS[kind]())
    while loader.next_batch() is not ENDED:
        pass
    state, draws = saved(tmp_path, [loader]), random_state()
    loader.start_epoch()
    expected = take(loader, 4)
    again = opened(LOADERS[kind]())
    again.restore(state)
    restore_random_state(draws)
    assert again.next_batch() is ENDED
    again.start_epoch()
    assert take(again, 4) == expected


def test_loading_takes_the_position_of_a_loader_that_is_elsewhere(opened: Callable[..., BoundLoader]) -> None:
    loader = opened(DataLoader(Squares(), batch_size=2))
    take(loader, 2)
    state = loader.state()
    expected = take(loader, 2)
    loader.restore([state])
    assert [step[:2] for step in take(loader, 2)] == [step[:2] for step in expected]


def test_resuming_a_map_style_dataset_loads_nothing_that_was_handed_out(opened: Callable[..., BoundLoader]) -> None:
    first = opened(DataLoader(Squares(), batch_size=2, shuffle=True))
    take(first, 4)
    dataset = Squares()
    again = opened(DataLoader(dataset, batch_size=2, shuffle=True), prefetch=False)
    again.restore([first.state()])
    assert dataset.loaded == []
    take(again, 1)
    assert len(dataset.loaded) == 2


def test_what_was_asked_of_a_loader_holds_for_the_rest_of_the_epoch_too() -> None:
    def collate(samples: list[Tensor]) -> Tensor:
        return torch.stack(samples)

    def start(worker: int) -> None:
        pass

    options = {
        "num_workers": 2,
        "collate_fn": collate,
        "timeout": 7.0,
        "worker_init_fn": start,
        "multiprocessing_context": "spawn",
        "generator": seeded(),
        "prefetch_factor": 5,
    }
    whole = DataLoader(Squares(), batch_size=2, pin_memory=True, **options)  # type: ignore[arg-type]
    rest = positions._with_sampler(whole, positions._Rest(whole, 0, True))
    assert rest.dataset is whole.dataset
    for name in (*options, "pin_memory"):
        assert getattr(rest, name) == getattr(whole, name), name


def test_a_batch_that_could_not_be_made_counts_as_read(opened: Callable[..., BoundLoader]) -> None:
    class Bad(Squares):
        def __getitem__(self, index: int) -> Tensor:
            if index == 5:
                raise Broken
            return super().__getitem__(index)

    first = opened(DataLoader(Bad(), batch_size=2))
    take(first, 2)
    with pytest.raises(Broken):
        first.next_batch()
    state = first.state()
    assert numbers(first.next_batch()) == [36, 49]
    again = opened(DataLoader(Bad(), batch_size=2))
    again.restore([state])
    assert numbers(again.next_batch()) == [36, 49]


def test_another_batch_size_goes_on_at_the_same_sample(opened: Callable[..., BoundLoader]) -> None:
    first = opened(DataLoader(Squares(), batch_size=2))
    take(first, 2)
    again = opened(DataLoader(Squares(), batch_size=3))
    again.restore([first.state()])
    assert numbers(again.next_batch()) == [16, 25, 36]


# Another number of workers.


def strided(rank: int, world_size: int, count: int, batch_size: int = 2, **options: object) -> DataLoader[Tensor]:
    sampler: DistributedSampler[int] = DistributedSampler(
        range(count),
        num_replicas=world_size,
        rank=rank,
        seed=7,
        **options,  # type: ignore[arg-type]
    )
    return DataLoader(TensorDataset(torch.arange(count)), batch_size=batch_size, sampler=sampler)


def read_all(loaders: list[BoundLoader]) -> list[float]:
    batches = [loader.next_batch() for loader in loaders]
    return [value for batch in batches if batch is not ENDED for value in numbers(batch)]


@pytest.mark.parametrize("before", [1, 2, 3, 4])
@pytest.mark.parametrize("after", [1, 2, 3, 4])
@pytest.mark.parametrize("steps", [1, 2])
def test_another_number_of_workers_reads_the_rest_of_the_epoch_once(
    before: int, after: int, steps: int, opened: Callable[..., BoundLoader]
) -> None:
    count = 24  # of which 12 divides all
    first = [opened(strided(rank, before, count), rank=rank, world_size=before) for rank in range(before)]
    for loader in first:
        loader.next_batch()
        while loader.next_batch() is not ENDED:
            pass
        loader.start_epoch()  # the second epoch has another order
    read = [value for _ in range(steps) for value in read_all(first)]
    states = [loader.state() for loader in first]
    second = [opened(strided(rank, after, count), rank=rank, world_size=after) for rank in range(after)]
    for loader in second:
        loader.restore(states)
    rest: list[float] = []
    while part := read_all(second):
        rest += part
    assert sorted(read + rest) == list(range(count))
    sampler: DistributedSampler[int] = DistributedSampler(range(count), num_replicas=1, rank=0, seed=7)
    sampler.set_epoch(1)
    order = list(sampler)
    assert sorted(read) == sorted(order[: len(read)])
    assert sorted(rest) == sorted(order[len(read) :])
    # And the next epoch is everybody's third.
    for loader in second:
        loader.start_epoch()
    sampler.set_epoch(2)
    order = list(sampler)
    found = read_all(second)
    assert sorted(found) == sorted(order[: len(found)])


class Dealt(Sampler[int]):
    """Deals samples out in turn, without repeating some to make the shares equal."""

    def __init__(self, rank: int, num_replicas: int, count: int) -> None:
        self.rank, self.num_replicas, self.count = rank, num_replicas, count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, self.count, self.num_replicas))

    def __len__(self) -> int:
        return len(range(self.rank, self.count, self.num_replicas))


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_shares_of_unequal_length_are_dealt_out_anew_too(after: int, opened: Callable[..., BoundLoader]) -> None:
    def dealt(rank: int, world_size: int) -> BoundLoader:
        sampler = Dealt(rank, world_size, 16)
        dataset = TensorDataset(torch.arange(16))
        return opened(DataLoader(dataset, batch_size=5, sampler=sampler), rank=rank, world_size=world_size)

    first = [dealt(rank, 3) for rank in range(3)]  # shares of 6, 5 and 5: rank 0 has a batch of one more
    read = [value for _ in range(2) for value in read_all(first)]
    assert sorted(read) == list(range(16))
    assert first[1].next_batch() is ENDED
    second = [dealt(rank, after) for rank in range(after)]
    for loader in second:
        loader.restore([loader.state() for loader in first])
    assert read_all(second) == []
    for loader in [*first, *second]:
        loader.start_epoch()
    assert sorted(read_all(first)) == list(range(15))
    for loader in second:
        loader.restore([loader.state() for loader in first])
    rest: list[float] = []
    while part := read_all(second):
        rest += part
    assert rest == [15]


def test_numbers_of_workers_may_change_again_and_again(opened: Callable[..., BoundLoader]) -> None:
    count = 60
    states: list[object] = []
    read: list[float] = []
    for world_size in (3, 2, 4, 1, 3):
        loaders = [
            opened(strided(rank, world_size, count), rank=rank, world_size=world_size) for rank in range(world_size)
        ]
        for loader in loaders:
            if states:
                loader.restore(states)
        found = read_all(loaders)
        order = list(DistributedSampler(range(count), num_replicas=1, rank=0, seed=7))
        assert sorted(found) == sorted(order[len(read) : len(read) + len(found)])
        read += found
        states = [loader.state() for loader in loaders]
    assert len(read) == 2 * (3 + 2 + 4 + 1 + 3)


def test_every_loader_may_change_workers_between_epochs(opened: Callable[..., BoundLoader]) -> None:
    for make in (LOADERS["plain"], LOADERS["shuffled"], LOADERS["stateful"]):
        first = [opened(make(), rank=rank, world_size=2) for rank in range(2)]
        second = opened(make())
        second.restore([loader.state() for loader in first])
        assert second.next_batch() is not ENDED


@pytest.mark.parametrize("kind", ["list", "plain", "stateful", "iterable", "shuffled", "pairs"])
def test_within_an_epoch_other_loaders_refuse_another_number_of_workers(
    kind: str, opened: Callable[..., BoundLoader]
) -> None:
    first = [opened(LOADERS[kind](), rank=rank, world_size=2) for rank in range(2)]
    for loader in first:
        loader.next_batch()
    second = opened(LOADERS[kind]())
    with pytest.raises(CheckpointError, match=r"load with (2|as many) workers"):
        second.restore([loader.state() for loader in first])


def test_workers_that_had_read_unequally_refuse_another_number(opened: Callable[..., BoundLoader]) -> None:
    first = [opened(strided(rank, 2, 24), rank=rank, world_size=2) for rank in range(2)]
    take(first[0], 2)
    take(first[1], 1)
    with pytest.raises(CheckpointError, match=r"had read \[4, 2\] samples of this epoch"):
        opened(strided(0, 1, 24)).restore([loader.state() for loader in first])


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        ("list", "shuffled", r"keeps its position as \['counted'\], this one \(DataLoader\) as 'map'"),
        ("shuffled", "sequential", r"has .*RandomSampler as its sampler, this one .*SequentialSampler"),
        ("pairs", "outer", r"PairSampler|EagerSampler"),
    ],
)
def test_a_position_of_another_loader_is_refused(
    then: str, now: str, message: str, opened: Callable[..., BoundLoader]
) -> None:
    first = opened(LOADERS[then]())
    first.next_batch()
    with pytest.raises(CheckpointError, match=message):
        opened(LOADERS[now]()).restore([first.state()])


def test_a_position_in_another_dataset_is_refused(opened: Callable[..., BoundLoader]) -> None:
    first = opened(DataLoader(Squares(11), batch_size=2))
    first.next_batch()
    with pytest.raises(CheckpointError, match="has 11 as its number of samples in the dataset, this one 12"):
        opened(DataLoader(Squares(12), batch_size=2)).restore([first.state()])


def test_a_loader_that_has_become_shorter_is_refused(opened: Callable[..., BoundLoader]) -> None:
    first = opened([1, 2, 3, 4])
    take(first, 3)
    with pytest.raises(CheckpointError, match="was at batch 3 of its epoch when saved and yields 2 now"):
        opened([1, 2]).restore([first.state()])


def test_a_loader_that_gives_batches_out_of_order_cannot_resume(opened: Callable[..., BoundLoader]) -> None:
    first = opened(DataLoader(Squares(), batch_size=2, in_order=False))
    first.next_batch()
    with pytest.raises(CheckpointError, match="in_order=False has no position"):
        opened(DataLoader(Squares(), batch_size=2, in_order=False)).restore([first.state()])


# Fetching ahead.


class Watched:
    """Notes which thread does what; ``act(index)`` runs as batch ``index`` is fetched."""

    def __init__(self, count: int = 6, act: Callable[[int], object] | None = None) -> None:
        self.count, self.act = count, act
        self.iterated: list[int] = []
        self.fetched: list[int] = []

    def __iter__(self) -> Iterator[Tensor]:
        self.iterated.append(threading.get_ident())
        return self.batches()

    def batches(self) -> Iterator[Tensor]:
        for index in range(self.count):
            self.fetched.append(threading.get_ident())
            extra = self.act(index) if self.act else 0
            yield torch.tensor([float(index), float(extra or 0)])


def drain(loader: BoundLoader) -> int:
    count = 0
    while loader.next_batch() is not ENDED:
        count += 1
    return count


def test_all_but_the_first_two_batches_of_an_epoch_are_fetched_by_another_thread(
    opened: Callable[..., BoundLoader],
) -> None:
    source = Watched()
    loader = opened(source)
    here = threading.get_ident()
    for epoch in range(2):
        assert drain(loader) == 6
        assert [thread == here for thread in source.fetched[6 * epoch :]] == [True] * 2 + [False] * 4
        loader.start_epoch()
    assert source.iterated == [here] * 2
    assert len(set(source.fetched)) == 2


def test_the_next_batch_is_fetched_while_this_one_is_used(opened: Callable[..., BoundLoader]) -> None:
    fetching, used = threading.Event(), threading.Event()

    def act(index: int) -> None:
        if index == 2:
            fetching.set()
            assert used.wait(30)

    loader = opened(Watched(act=act))
    loader.next_batch()
    loader.next_batch()
    assert fetching.wait(30)  # nobody has asked for it
    used.set()
    assert numbers(loader.next_batch())[0] == 2


def test_at_most_one_batch_is_fetched_ahead(opened: Callable[..., BoundLoader]) -> None:
    source = Watched(count=20)
    loader = opened(source)
    take(loader, 4)
    assert loader._pending is not None
    loader._pending.result(30)
    assert len(source.fetched) == 5


def test_a_thread_is_started_once_fetches_usually_take_longer_than_handing_over(
    opened: Callable[..., BoundLoader], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def act(index: int) -> None:
        nonlocal now
        now += 100.0 if len(source.fetched) in (1, 3) or len(source.fetched) >= 7 else 0.0

    class Clock:
        def monotonic(self) -> float:
            return now

    monkeypatch.setattr(loading, "_WORTH_A_THREAD", 3e-4)
    monkeypatch.setattr(loading, "time", Clock())
    source = Watched(count=12, act=act)
    loader = opened(source)
    here = threading.get_ident()
    drain(loader)
    assert [thread == here for thread in source.fetched] == [True] * 9 + [False] * 3
    loader.start_epoch()
    drain(loader)
    assert [thread == here for thread in source.fetched[12:]] == [True] * 2 + [False] * 10


def test_without_prefetch_no_thread_is_started(opened: Callable[..., BoundLoader]) -> None:
    source = Watched()
    before = threading.active_count()
    assert drain(opened(source, prefetch=False)) == 6
    assert set(source.fetched) == {threading.get_ident()}
    assert threading.active_count() == before


def test_a_list_needs_no_thread(opened: Callable[..., BoundLoader]) -> None:
    before = threading.active_count()
    assert drain(opened([torch.ones(1)] * 5)) == 5
    assert threading.active_count() == before


@pytest.mark.parametrize(
    "draw",
    [lambda index: torch.rand(()).item(), lambda index: random.random(), lambda index: np.random.random()],
    ids=["torch", "python", "numpy"],
)
def test_a_loader_that_draws_from_a_global_generator_is_never_fetched_ahead_and_the_log_says_why(
    draw: Callable[[int], float], opened: Callable[..., BoundLoader], caplog: pytest.LogCaptureFixture
) -> None:
    source = Watched(act=draw)
    loader = opened(source)
    take(loader, 15)
    assert set(source.fetched) == {threading.get_ident()}
    [record] = caplog.records
    assert record.name == "anabranch.executor"
    assert "the batches of the loader Watched are not fetched ahead, since it draws from" in record.getMessage()
    assert "generator=torch.Generator()" in record.getMessage()


def test_a_sampler_that_draws_its_seed_at_the_first_batch_may_be_fetched_ahead(
    opened: Callable[..., BoundLoader], caplog: pytest.LogCaptureFixture
) -> None:
    loader = opened(DataLoader(Squares(), batch_size=2, shuffle=True))
    take(loader, 3)
    assert loader._pending is not None
    assert not caplog.records


@pytest.mark.parametrize("as_numpy", [False, True])
def test_a_loader_that_fills_the_same_memory_again_is_never_fetched_ahead(
    as_numpy: bool, opened: Callable[..., BoundLoader], caplog: pytest.LogCaptureFixture
) -> None:
    class Reused:
        def __iter__(self) -> Iterator[object]:
            buffer = np.zeros(3)
            for index in range(6):
                buffer[:] = index
                yield {"x": buffer if as_numpy else torch.from_numpy(buffer)}

    loader = opened(Reused())
    for index in range(6):
        batch = loader.next_batch()
        assert isinstance(batch, dict)
        assert batch["x"].tolist() == [index] * 3
    assert "fills the memory of the batch before" in caplog.text


def test_a_step_that_changes_its_batch_does_not_look_like_a_loader_that_does(
    opened: Callable[..., BoundLoader], caplog: pytest.LogCaptureFixture
) -> None:
    loader = opened(Watched())
    while (batch := loader.next_batch()) is not ENDED:
        batch.add_(float("nan"))  # type: ignore[attr-defined]
    assert not caplog.records


class Broken(RuntimeError):
    pass


@pytest.mark.parametrize("at", [0, 1, 2, 4])
def test_what_a_loader_raises_comes_out_of_next_batch_with_its_traceback(
    at: int, opened: Callable[..., BoundLoader]
) -> None:
    def the_function_that_fails(index: int) -> None:
        if index == at:
            raise Broken(f"at {index}")

    loader = opened(Watched(act=the_function_that_fails))
    for _ in range(at):
        loader.next_batch()
    with pytest.raises(Broken, match=f"at {at}") as caught:
        loader.next_batch()
    assert "the_function_that_fails" in "".join(traceback.format_exception(caught.value))


def test_what_a_thread_has_set_for_itself_holds_where_batches_are_fetched(opened: Callable[..., BoundLoader]) -> None:
    variable = contextvars.ContextVar("variable", default=0)
    seen: list[tuple[bool, int, str]] = []

    def act(index: int) -> None:
        seen.append((torch.is_grad_enabled(), variable.get(), str(torch.empty(()).device)))

    loader = opened(Watched(act=act))
    variable.set(3)
    with torch.no_grad(), torch.device("meta"):
        drain(loader)
    assert seen == [(False, 3, "meta")] * 6


def test_a_position_does_not_count_what_was_fetched_ahead(opened: Callable[..., BoundLoader]) -> None:
    source = Stateful()
    loader = opened(source)
    take(loader, 3)
    assert loader._pending is not None
    loader._pending.result(30)
    assert source.current["next"] == 4
    position = loader.state()["position"]
    assert isinstance(position, dict)
    assert position["state"]["next"] == 3
    assert position["state"]["sum"].item() == 6


# Epochs.


def test_an_ended_loader_stays_ended_until_an_epoch_is_started(opened: Callable[..., BoundLoader]) -> None:
    loader = opened([1])
    assert loader.next_batch() == 1
    assert [loader.next_batch() for _ in range(3)] == [ENDED] * 3
    assert repr(ENDED) == "ENDED"
    loader.start_epoch()
    loader.start_epoch()
    assert loader.next_batch() == 1


@pytest.mark.parametrize("batches", [0, 1, 3])
def test_a_generator_has_one_epoch_and_says_so(batches: int, opened: Callable[..., BoundLoader]) -> None:
    loader = opened(iter(range(batches)))
    assert drain(loader) == batches
    loader.start_epoch()
    with pytest.raises(ValueError, match="is an iterator .* and has been read to its end: it has one epoch"):
        loader.next_batch()


def test_a_loader_that_is_its_own_iterator_and_starts_afresh_has_many_epochs(
    opened: Callable[..., BoundLoader],
) -> None:
    class Reader:
        def __iter__(self) -> Reader:
            self.left = 3
            return self

        def __next__(self) -> int:
            self.left -= 1
            if self.left < 0:
                raise StopIteration
            return self.left

    loader = opened(Reader())
    for _ in range(3):
        assert drain(loader) == 3
        loader.start_epoch()


def test_samplers_are_told_the_epoch_from_where_the_script_left_it(opened: Callable[..., BoundLoader]) -> None:
    source = strided(0, 1, 6)
    source.sampler.set_epoch(4)  # type: ignore[attr-defined]
    loader = opened(source)
    orders = []
    for _ in range(2):
        orders.append([numbers(batch) for batch in iter(loader.next_batch, ENDED)])
        loader.start_epoch()
    expected = []
    for epoch in (4, 5):
        source.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        expected.append([numbers(batch) for batch in source])
    assert orders == expected


def test_length_is_the_loaders_or_none(opened: Callable[..., BoundLoader]) -> None:
    assert opened([1, 2]).length() == 2
    assert opened(DataLoader(Squares(), batch_size=2)).length() == 6
    assert opened(DataLoader(Stream(), batch_size=2)).length() is None
    assert opened(iter([1])).length() is None


def test_what_cannot_be_iterated_is_refused() -> None:
    with pytest.raises(TypeError, match="a loader is an iterable of batches, got int"):
        bound(3)  # type: ignore[arg-type]


# Lifetimes.


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("anabranch-loader")]


def test_closing_ends_the_thread_and_may_be_done_twice(opened: Callable[..., BoundLoader]) -> None:
    loader = opened(Watched())
    take(loader, 3)
    assert len(loader_threads()) == 1
    loader.close()
    loader.close()
    assert not loader_threads()
    with pytest.raises(ValueError, match="the loader is closed"):
        loader.next_batch()


def test_a_loader_that_is_dropped_leaves_no_thread() -> None:
    loader = bound(Watched())
    take(loader, 3)
    [thread] = loader_threads()
    del loader
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


def test_closing_does_not_wait_for_a_loader_that_hangs(
    opened: Callable[..., BoundLoader], caplog: pytest.LogCaptureFixture
) -> None:
    hanging, release = threading.Event(), threading.Event()

    def act(index: int) -> None:
        if index == 2:
            hanging.set()
            assert release.wait(60)

    loader = opened(Watched(act=act))
    take(loader, 2)
    assert hanging.wait(30)
    [thread] = loader_threads()
    started = time.monotonic()
    loader.close(timeout=0.05)
    assert time.monotonic() - started < 10
    assert "the loader Watched has been fetching a batch for over" in caplog.text
    release.set()
    thread.join(30)
    assert not thread.is_alive()


def test_the_log_says_that_a_loader_is_slow(
    opened: Callable[..., BoundLoader], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_PATIENCE", 0.01)
    release = threading.Event()

    class Release(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            release.set()

    handler = Release()
    logging.getLogger("anabranch.executor").addHandler(handler)
    try:
        loader = opened(Watched(act=lambda index: index == 2 and release.wait(60)))
        take(loader, 3)
    finally:
        logging.getLogger("anabranch.executor").removeHandler(handler)
    assert "the loader Watched has been fetching for" in caplog.text


class Computing(Dataset[Tensor]):
    """Its workers compute with torch: what a fork in the wrong place makes hang."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        square = torch.full((64, 64), float(index))
        return (square @ square).sum()


def test_forked_workers_that_compute_live_beside_our_threads(opened: Callable[..., BoundLoader]) -> None:
    training = opened(DataLoader(Computing(), batch_size=2, num_workers=2))
    validating = opened(DataLoader(Computing(), batch_size=3, num_workers=1))
    ahead = opened(Watched(count=1000))
    expected = [float(index * index * 64**3) for index in range(12)]
    for _ in range(2):
        take(ahead, 3)  # its thread is there as the others fork
        read: list[float] = []
        checked: list[float] = []
        while (batch := training.next_batch()) is not ENDED:
            read += numbers(batch)
            (torch.ones(128, 128) @ torch.ones(128, 128)).sum()
            take(ahead, 1)
        while (batch := validating.next_batch()) is not ENDED:
            checked += numbers(batch)
        assert read == checked == expected
        training.start_epoch()
        validating.start_epoch()


def test_persistent_workers_resume_and_stay(opened: Callable[..., BoundLoader]) -> None:
    def make() -> DataLoader[Tensor]:
        return DataLoader(Squares(), batch_size=2, num_workers=1, persistent_workers=True)

    first = opened(make())
    take(first, 2)
    again = opened(make())
    again.restore([first.state()])
    assert [numbers(batch) for batch in iter(again.next_batch, ENDED)] == [[16, 25], [36, 49], [64, 81], [100]]
    again.start_epoch()
    assert numbers(again.next_batch()) == [0, 1]


def test_sequential_sampler_is_what_an_unshuffled_loader_has() -> None:
    assert type(DataLoader(Squares()).sampler) is SequentialSampler
