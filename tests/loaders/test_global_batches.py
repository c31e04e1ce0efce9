"""GlobalBatches: the same samples in each step on any number of workers, also behind a resume in an epoch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import anabranch as ab
from anabranch.errors import CheckpointError
from anabranch.executor.loaders.batches import Batches
from anabranch.executor.loaders.loading import ENDED, BoundLoader
from anabranch.executor.randomness import random_state, same_random_state
from anabranch.loaders import GlobalBatches
from toys import in_job, step_of

COUNT, BATCH = 23, 5  # the last batch has 3 samples: fewer than four workers


def workers_of(size: int, **options: Any) -> list[BoundLoader]:
    def bound(rank: int) -> BoundLoader:
        return BoundLoader(GlobalBatches(range(COUNT), BATCH, **options), worker=lambda: (rank, size))

    return [bound(rank) for rank in range(size)]


def steps_of(workers: list[BoundLoader], count: int) -> list[list[int]]:
    """The samples of each step, of all workers together, over as many epochs as it takes."""
    steps: list[list[int]] = []
    while len(steps) < count:
        batches = [worker.next_batch() for worker in workers]
        if all(batch is ENDED for batch in batches):
            for worker in workers:
                worker.start_epoch()
        else:
            steps.append(sorted(i for batch in batches if isinstance(batch, Tensor) for i in numbers(batch)))
    return steps


@pytest.mark.parametrize(
    ("shuffle", "drop_last", "processes"),
    # Each epoch starts processes, which import torch: two seconds each.
    [*itertools.product((True, False), (True, False), (0,)), pytest.param(True, False, 1, marks=pytest.mark.slow)],
)
def test_every_number_of_workers_takes_the_same_steps(shuffle: bool, drop_last: bool, processes: int) -> None:
    length, samples = (4, 20) if drop_last else (5, COUNT)
    runs = []
    for size in (1, 2, 3, 4):
        workers = workers_of(size, shuffle=shuffle, drop_last=drop_last, seed=7, num_workers=processes)
        assert {worker.length() for worker in workers} == {length}
        runs.append(steps_of(workers, 3 * length))
    assert runs == [runs[0]] * 4
    first, second, third = (runs[0][begin : begin + length] for begin in range(0, 3 * length, length))
    for epoch in (first, second, third):
        assert len(set(itertools.chain(*epoch))) == sum(map(len, epoch)) == samples
    assert (first != second) == shuffle


@pytest.mark.parametrize("before", [1, 2, 4])
@pytest.mark.parametrize("after", [1, 2, 3])
@pytest.mark.parametrize("taken", [0, 2, 5, 7])  # 5: a whole epoch, of which the end was not seen
@pytest.mark.parametrize("options", [{}, {"shuffle": False, "drop_last": True}], ids=str)
def test_another_number_of_workers_goes_on_within_an_epoch(
    before: int, after: int, taken: int, options: dict[str, Any]
) -> None:
    expected = steps_of(workers_of(1, **options), 12)
    first, second = workers_of(before, **options), workers_of(after, **options)
    assert steps_of(first, taken) == expected[:taken]
    states = [worker.state() for worker in first]
    for worker in second:
        worker.restore(states)
    assert steps_of(second, 12 - taken) == expected[taken:]


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_workers_may_change_between_two_batches(num_workers: int) -> None:
    at = (0, 1)
    loader = GlobalBatches(range(COUNT), BATCH, shuffle=False, num_workers=num_workers)
    batches = BoundLoader(loader, worker=lambda: at)
    assert numbers(batches.next_batch()) == [0, 1, 2, 3, 4]
    at = (1, 2)
    assert numbers(batches.next_batch()) == [6, 8]
    assert numbers(batches.next_batch()) == [11, 13]
    at = (2, 3)
    assert [numbers(batch) for batch in iter(batches.next_batch, ENDED)] == [[17], [22]]


def numbers(batch: object) -> list[int]:
    assert isinstance(batch, Tensor)
    return batch.tolist()


class Flaky(Dataset[int]):
    """Fails, or is interrupted, where it is told."""

    error: BaseException | None = None

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        if index == 7 and self.error is not None:
            raise self.error
        return index


@pytest.mark.parametrize(("error", "then"), [(OSError(), 10), (KeyboardInterrupt(), 5)])
def test_the_rest_of_an_epoch_follows_a_batch_that_failed(error: BaseException, then: int) -> None:
    data = Flaky()
    loader = BoundLoader(GlobalBatches(data, BATCH, shuffle=False))
    loader.next_batch()
    data.error = error
    with pytest.raises(type(error)):
        loader.next_batch()
    data.error = None
    assert numbers(loader.next_batch()) == list(range(then, then + BATCH))


def test_a_script_that_sets_the_epochs_itself_has_the_last_word_on_all_workers() -> None:
    loaders = [GlobalBatches(range(9), 4) for _ in range(2)]
    bound = [BoundLoader(loader, worker=lambda rank=rank: (rank, 2)) for rank, loader in enumerate(loaders)]
    for number in (0, 1, 5, 2):
        for loader in loaders:
            loader.set_epoch(number)
        assert steps_of(bound, 3) == order_of(number)
    assert steps_of(bound, 3) == order_of(3)  # behind 2, if it sets none


def order_of(epoch: int) -> list[list[int]]:
    loader = GlobalBatches(range(9), 4)
    loader.set_epoch(epoch)
    return [sorted(numbers(batch)) for batch in loader]


@pytest.mark.parametrize("drop_last", [False, True])
def test_another_batch_size_goes_on_at_the_same_sample(drop_last: bool) -> None:
    first = BoundLoader(GlobalBatches(range(COUNT), 5, shuffle=False))
    steps_of([first], 2)
    again = BoundLoader(GlobalBatches(range(COUNT), 4, shuffle=False, drop_last=drop_last))
    again.restore([first.state()])
    assert again.left() == (3 if drop_last else 4)
    batches = [numbers(batch) for batch in iter(again.next_batch, ENDED)]
    assert batches == [[10, 11, 12, 13], [14, 15, 16, 17], [18, 19, 20, 21], [22]][: 3 if drop_last else 4]


class Drawing(Dataset[int]):
    """Draws for each sample, where it is loaded."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        return int(torch.randint(1 << 30, ()))


def test_order_and_loading_processes_draw_nothing_from_this_process() -> None:
    before = random_state()
    first = [batch.tolist() for batch in GlobalBatches(Drawing(), BATCH, num_workers=1)]
    assert same_random_state(random_state(), before)
    torch.manual_seed(99)
    loader = GlobalBatches(Drawing(), BATCH, num_workers=1)
    assert [batch.tolist() for batch in loader] == first
    assert [batch.tolist() for batch in loader] != first  # of the next epoch


def test_an_iteration_that_was_left_begins_again_and_a_loaded_position_goes_on() -> None:
    loader = GlobalBatches(range(COUNT), BATCH, shuffle=False)
    for _ in zip(range(2), loader, strict=False):
        pass
    position = loader.state_dict()
    assert position == {"epoch": 0, "samples": 10, "seed": 0, "shuffle": False, "length": COUNT}
    assert next(iter(loader)).tolist() == [0, 1, 2, 3, 4]
    loader.load_state_dict(position)
    assert loader.state_dict() == position
    assert next(iter(loader)).tolist() == [10, 11, 12, 13, 14]


@pytest.mark.parametrize("options", [{"seed": 1}, {"shuffle": False}])
def test_a_position_in_another_order_is_refused(options: dict[str, Any]) -> None:
    state = GlobalBatches(range(COUNT), BATCH).state_dict()
    name = next(iter(options))
    with pytest.raises(CheckpointError, match=f"has {name}=.*but this one has {options[name]}"):
        GlobalBatches(range(COUNT), BATCH, **options).load_state_dict(state)
    with pytest.raises(CheckpointError, match="has length=23, but this one has 22"):
        GlobalBatches(range(22), BATCH).load_state_dict(state)


def test_workers_that_do_not_wait_for_each_other_resume_only_in_the_same_number() -> None:
    first = workers_of(2)
    for worker in (first[0], *first):
        worker.next_batch()
    states = [worker.state() for worker in first]
    with pytest.raises(CheckpointError, match="not wait for each other, and this job has 3; load with 2 workers"):
        workers_of(3)[0].restore(states)
    again = workers_of(2)
    for worker in again:
        worker.restore(states)
    assert [again[0].taken, again[1].taken] == [2, 1]


def test_a_worker_that_never_has_a_sample_and_does_not_wait_for_the_others_is_told() -> None:
    loader = BoundLoader(GlobalBatches(range(1), 2), worker=lambda: (1, 2))
    batches = Batches({"train": loader}, None, together=False)
    with pytest.raises(ValueError, match="the loader of 'train' yields no batches"):
        batches.next("train", lambda: None)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"batch_size": 0}, ValueError, "batch_size is at least 1, got 0"),
        ({"seed": 1.5}, TypeError, "seed is a whole number, got 1.5"),
        *(({name: None}, TypeError, f"{name} is not taken") for name in ("sampler", "batch_sampler", "generator")),
        ({"in_order": False}, ValueError, "in_order=False has no position"),
        ({"dataset": Endless()}, TypeError, "a Endless has no order of its own"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        GlobalBatches(**{"dataset": range(9), "batch_size": 2, **options})


def test_fewer_samples_in_a_batch_than_workers_are_refused() -> None:
    with pytest.raises(ValueError, match="batch_size=2 is of all 3 workers"):
        BoundLoader(GlobalBatches(range(9), 2), worker=lambda: (0, 3))


OPTIONS = [{}, {"shuffle": False, "drop_last": True}, {"drop_last": True, "num_workers": 1}]


def trained(path: str, runs: int) -> list[list[float]]:
    """Steps and parameters after so many more runs, with each of the options."""
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(*(torch.randn(COUNT, size, generator=generator).double() for size in (4, 1)))
    results = []
    for number, options in enumerate(OPTIONS):
        torch.manual_seed(0)
        model = nn.Linear(4, 1).double()
        step = step_of(model, torch.optim.Adam, lambda m, b: (m(b[0]) - b[1]).square().mean())
        with ab.Executor(step, dataloaders={"default": GlobalBatches(data, BATCH, **options)}) as executor:  # type: ignore[arg-type]
            executor.resume(f"{path}/{number}")
            for _ in range(runs):
                executor.run()
            executor.save(f"{path}/{number}")
        results.append([executor.step, *model.weight[0].tolist()])
    return results


@pytest.mark.slow
def test_parameters_do_not_depend_on_the_number_of_workers_and_their_changes(tmp_path: Path) -> None:
    expected = [pytest.approx(one, rel=1e-12) for one in trained(str(tmp_path / "alone"), 13)]
    for sizes, runs in ([(2,), (13,)], [(3,), (13,)], [(4,), (13,)], [(2, 3, 1, 4), (3, 4, 3, 3)]):
        for size, count in zip(sizes, runs, strict=True):
            results = in_job(trained, size, str(tmp_path / str(sizes)), count)
        assert results == [expected] * len(results)


def test_going_back_keeps_the_epoch_that_the_script_has_set() -> None:
    batches = GlobalBatches(range(10), 4, seed=1)
    loader = BoundLoader(batches)
    batches.set_epoch(5)
    moment = loader.moment()
    for _ in range(2):
        assert loader.next_batch().tolist() == batches.order(5)[:4].tolist()
        loader.go_back(moment)
