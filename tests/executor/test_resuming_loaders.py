"""A restart resumes with the next batch, for any loader, and refuses the position of another loader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet
from loader_kinds import LOADERS, Broken, Squares, numbers, plain, seed_all, seeded, take
from torch import Tensor
from torch.utils.data import (
    DataLoader,
)

from anabranch import checkpoint
from anabranch.errors import CheckpointError
from anabranch.executor.loaders import positions
from anabranch.executor.loaders.loading import ENDED, BoundLoader
from anabranch.executor.randomness import random_state, restore_random_state, same_random_state

pytestmark = pytest.mark.usefixtures("every_fetch_is_worth_a_thread")


def slow_if(slow: bool, *values: object) -> ParameterSet:
    return pytest.param(*values, marks=[pytest.mark.slow] if slow else [])


# Forks of a large process, which take their time: one kind in each of the two tests is quick.
@pytest.mark.parametrize("kind", [slow_if("workers" in kind and kind != "two_workers", kind) for kind in LOADERS])
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


@pytest.mark.quick_cases(30)
@pytest.mark.parametrize(
    ("kind", "steps"),
    # Where in an epoch it stops is the same to forked workers.
    [
        slow_if("workers" in kind and kind != "two_workers_iterable", kind, steps)
        for kind in LOADERS
        for steps in ([3] if "workers" in kind else [0, 1, 3, 6, 9])
    ],
)
def test_a_restart_resumes_with_the_next_batch(
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


def persistent(own: bool) -> DataLoader[Tensor]:
    generator = seeded() if own else None
    return DataLoader(
        Squares(), batch_size=3, shuffle=True, num_workers=1, persistent_workers=True, generator=generator
    )


@pytest.mark.parametrize("steps", [5, slow_if(True, 0), slow_if(True, 2), slow_if(True, 4), slow_if(True, 9)])
@pytest.mark.parametrize("own", [False, slow_if(True, True)])
def test_persistent_workers_draw_their_seed_in_the_first_epoch_only(
    own: bool, steps: int, opened: Callable[..., BoundLoader], tmp_path: Path
) -> None:
    """A restart drew it again in a later epoch: in another order, so some samples came twice and others not at all."""
    seed_all(0)
    expected = plain(persistent(own), 12)
    seed_all(0)
    first = opened(persistent(own))
    assert take(first, steps) == expected[:steps]
    state, draws = saved(tmp_path / "first", [first]), random_state()
    again = opened(persistent(own))
    again.restore(state)
    restore_random_state(draws)
    assert take(again, 10 - steps) == expected[steps:10]
    state, draws = saved(tmp_path / "second", [again]), random_state()
    once_more = opened(persistent(own))
    once_more.restore(state)
    restore_random_state(draws)
    assert take(once_more, 2) == expected[10:]


def test_persistent_workers_of_a_later_epoch_go_back_to_the_first(opened: Callable[..., BoundLoader]) -> None:
    loader = opened(persistent(own=True))
    state = loader.state()
    expected = [step[:-3] for step in take(loader, 5)]
    loader.restore([state])
    assert [step[:-3] for step in take(loader, 5)] == expected


@pytest.mark.parametrize("kind", ["shuffled", "own_generator", "stateful", "plain", "distributed"])
def test_a_restart_of_a_restart_resumes_too(kind: str, opened: Callable[..., BoundLoader], tmp_path: Path) -> None:
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


def test_settings_of_a_loader_hold_for_the_rest_of_the_epoch_too() -> None:
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
    rest = positions._with_sampler(whole, positions._RemainingIndices(whole, 0, True))
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


def test_another_batch_size_resumes_at_the_same_sample(opened: Callable[..., BoundLoader]) -> None:
    first = opened(DataLoader(Squares(), batch_size=2))
    take(first, 2)
    again = opened(DataLoader(Squares(), batch_size=3))
    again.restore([first.state()])
    assert numbers(again.next_batch()) == [16, 25, 36]


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        ("list", "shuffled", r"stores its position as \['counted'\], but this one \(DataLoader\) as 'map'"),
        ("shuffled", "sequential", r"has .*RandomSampler as its sampler, but this one .*SequentialSampler"),
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
    with pytest.raises(CheckpointError, match="has 11 as its number of samples in the dataset, but this one has 12"):
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
