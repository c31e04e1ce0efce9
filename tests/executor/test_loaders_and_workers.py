"""The rest of an epoch is read once by any number of workers, or by none that cannot tell what is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from loader_kinds import LOADERS, numbers, strided, take
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    Sampler,
    TensorDataset,
)

from anabranch.errors import CheckpointError
from anabranch.executor.loaders.loading import ENDED, BoundLoader

pytestmark = pytest.mark.usefixtures("every_fetch_is_worth_a_thread")


def read_all(loaders: list[BoundLoader]) -> list[float]:
    batches = [loader.next_batch() for loader in loaders]
    return [value for batch in batches if batch is not ENDED for value in numbers(batch)]


@pytest.mark.quick_cases(10)
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
