"""Batches of a bound loader are those of a plain loop, also behind a restart, which refuses another's position."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

import anabranch as ab
from anabranch import checkpoint
from anabranch.errors import CheckpointError
from anabranch.executor.loaders.loading import ENDED, BoundLoader
from anabranch.executor.randomness import random_state, restore_random_state, same_random_state
from anabranch.loaders import GlobalBatches
from plain_loop import mean_square
from toys import assert_same, in_job, plain_step, step_of


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
    """Notes what is loaded."""

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


class PairSampler(Sampler[list[int]]):
    """A batch sampler of its own kind: it draws from the global generator as iteration starts."""

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


def seed_all(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def drain(loader: BoundLoader) -> int:
    count = 0
    while loader.next_batch() is not ENDED:
        count += 1
    return count


Opened = Callable[..., BoundLoader]


@pytest.fixture
def opened() -> Iterator[Opened]:
    loaders: list[BoundLoader] = []

    def make(loader: Iterable[object], rank: int = 0, world_size: int = 1) -> BoundLoader:
        loaders.append(BoundLoader(loader, worker=lambda: (rank, world_size)))
        return loaders[-1]

    yield make
    for loader in loaders:
        loader.close()
    loaders.clear()  # a DataLoader's persistent workers live as long as it does


# Positions.


def slow_if(slow: bool, *values: object) -> ParameterSet:
    return pytest.param(*values, marks=[pytest.mark.slow] if slow else [])


# Forks of a large process, which take their time: one kind in each of the two tests is quick.
@pytest.mark.parametrize("kind", [slow_if("workers" in kind and kind != "two_workers", kind) for kind in LOADERS])
def test_batches_and_random_draws_are_those_of_a_plain_loop(kind: str, opened: Opened) -> None:
    seed_all(0)
    expected = plain(LOADERS[kind](), 14)
    end = random_state()
    seed_all(0)
    assert take(opened(LOADERS[kind]()), 14) == expected
    assert same_random_state(random_state(), end)


def saved(path: Path, loader: BoundLoader) -> tuple[list[object], Any]:
    """Its state as it comes back from a checkpoint, and that of the random generators."""
    state, tensors = checkpoint.split([loader.state()])
    checkpoint.write(path, {"rank0": tensors}, state, step=0)
    read = checkpoint.read(path)
    joined: Any = checkpoint.join(read.state, read.tensors("rank0"))
    return joined, random_state()


def restored(loader: BoundLoader, state: tuple[list[object], Any]) -> BoundLoader:
    loader.restore(state[0])
    restore_random_state(state[1])
    return loader


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
def test_a_restart_resumes_with_the_next_batch(kind: str, steps: int, opened: Opened, tmp_path: Path) -> None:
    seed_all(0)
    first = opened(LOADERS[kind]())
    take(first, steps)
    state = saved(tmp_path, first)
    expected = take(first, 12)
    end = random_state()
    seed_all(1)
    again = opened(LOADERS[kind]())
    before = random_state()
    again.restore(state[0])
    assert same_random_state(random_state(), before)
    assert take(restored(again, state), 12) == expected
    assert same_random_state(random_state(), end)


def persistent(own: bool) -> DataLoader[Tensor]:
    generator = seeded() if own else None
    return DataLoader(
        Squares(), batch_size=3, shuffle=True, num_workers=1, persistent_workers=True, generator=generator
    )


@pytest.mark.parametrize("steps", [5, slow_if(True, 0), slow_if(True, 4)])
@pytest.mark.parametrize("own", [False, slow_if(True, True)])
def test_persistent_workers_draw_their_seed_in_the_first_epoch_only(
    own: bool, steps: int, opened: Opened, tmp_path: Path
) -> None:
    """A restart drew it again in a later epoch: in another order, so some samples came twice and others not at all."""
    seed_all(0)
    expected = plain(persistent(own), 12)
    seed_all(0)
    first = opened(persistent(own))
    assert take(first, steps) == expected[:steps]
    again = restored(opened(persistent(own)), saved(tmp_path / "first", first))
    assert take(again, 10 - steps) == expected[steps:10]
    once_more = restored(opened(persistent(own)), saved(tmp_path / "second", again))
    assert take(once_more, 2) == expected[10:]


def test_persistent_workers_of_a_later_epoch_go_back_to_the_first(opened: Opened) -> None:
    loader = opened(persistent(own=True))
    state = loader.state()
    expected = [step[:-3] for step in take(loader, 5)]
    loader.restore([state])
    assert [step[:-3] for step in take(loader, 5)] == expected


@pytest.mark.parametrize("kind", ["shuffled", "stateful", "list", "distributed", "global"])
def test_a_restart_between_two_epochs_starts_the_second(kind: str, opened: Opened, tmp_path: Path) -> None:
    seed_all(0)
    loader = opened(LOADERS[kind]())
    drain(loader)
    state = saved(tmp_path, loader)
    loader.start_epoch()
    expected = take(loader, 4)
    again = restored(opened(LOADERS[kind]()), state)
    assert again.next_batch() is ENDED
    again.start_epoch()
    assert take(again, 4) == expected


def test_skipped_batches_are_said_and_global_ones_are_not_loaded(
    opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for make in (lambda data: DataLoader(data, batch_size=2), lambda data: GlobalBatches(data, 2)):
        first = opened(make(Squares()))
        take(first, 4)
        again = opened(make(data := Squares()))
        again.restore([first.state()])
        take(again, 1)
        assert len(data.loaded) == (10 if again.kind == "counted" else 2)
    assert [record.getMessage() for record in caplog.records] == [
        "the loader DataLoader has no state_dict: skipping the 4 batches that were read"
    ]


@pytest.mark.parametrize("kind", ["list", "plain", "stateful", "iterable", "shuffled", "pairs"])
def test_another_number_of_workers_is_refused_within_an_epoch_only(kind: str, opened: Opened) -> None:
    first = [opened(LOADERS[kind](), rank=rank, world_size=2) for rank in range(2)]
    second = opened(LOADERS[kind]())
    second.restore([loader.state() for loader in first])
    assert second.next_batch() is not ENDED
    for loader in first:
        loader.next_batch()
    with pytest.raises(CheckpointError, match="load with 2 workers, or read the data by ab.loaders.GlobalBatches"):
        second.restore([loader.state() for loader in first])
    if kind not in ("plain", "stateful", "iterable"):  # behind the last batch, whether its end was asked for or not
        for loader in first:
            take(loader, len(loader.source) - 1)
        second.restore([loader.state() for loader in first])
        assert second.next_batch() is ENDED


def test_a_loader_that_has_become_shorter_is_refused(opened: Opened) -> None:
    first = opened([1, 2, 3, 4])
    take(first, 3)
    with pytest.raises(CheckpointError, match="was at batch 3 of its epoch when saved and yields 2 now"):
        opened([1, 2]).restore([first.state()])


# Looking ahead.


@pytest.mark.parametrize("kind", ["list", "plain", "stateful", "own_generator", "global"])
def test_a_plans_look_is_at_the_epochs_next_batch_and_changes_nothing(kind: str, opened: Opened) -> None:
    seed_all(0)
    expected = plain(LOADERS[kind](), 20)
    seed_all(0)
    loader, steps = opened(LOADERS[kind]()), []
    while len(steps) < 20:
        look, again, batch = loader.first(), loader.first(), loader.next_batch()
        if batch is ENDED:
            assert (look, again, loader.first()) == (None, None, None)
            loader.start_epoch()
            batch = loader.next_batch()
        else:
            assert numbers(look) == numbers(again) == numbers(batch)
        steps.append(train(batch))
    assert steps == expected


def test_the_first_batch_of_a_loader_is_fetched_once_and_its_error_stays(opened: Opened) -> None:
    fetched: list[int] = []

    def batches() -> Iterator[int]:
        for number in range(2):
            fetched.append(number)
            yield number
        raise OSError("the disk")

    loader = opened(batches())
    assert (loader.first(), loader.first(), loader.next_batch()) == (0, 0, 0)
    assert (loader.first(), loader.next_batch(), fetched) == (1, 1, [0, 1])
    for fetch in (loader.first, loader.next_batch):
        with pytest.raises(OSError, match="the disk"):
            fetch()


@pytest.mark.parametrize("kind", ["list", "two_workers_iterable", slow_if(True, "two_workers_global")])
def test_a_batch_that_was_looked_at_is_the_next_and_not_in_the_position(kind: str, opened: Opened) -> None:
    loader = opened(LOADERS[kind]())
    assert loader.peek() is None  # the epoch has not begun
    loader.next_batch()
    position = loader.state()
    ahead = loader.peek()
    assert ahead is loader.peek()
    assert ahead is not None
    assert {**loader.state(), "start": 0} == {**position, "start": 0}
    assert loader.next_batch() is ahead
    again = opened(LOADERS[kind]())
    again.restore([position])
    assert numbers(again.next_batch()) == numbers(ahead)
    drain(loader)
    assert loader.peek() is None


def test_a_failure_of_a_look_is_raised_where_the_batch_is_taken(opened: Opened) -> None:
    def fail(samples: list[Tensor]) -> Tensor:
        if samples[0] == 4:
            raise OverflowError
        return torch.stack(samples)

    loader = opened(DataLoader(Squares(), batch_size=2, num_workers=1, collate_fn=fail))
    assert numbers(loader.next_batch()) == [0, 1]
    assert loader.peek() is None
    with pytest.raises(OverflowError):
        loader.next_batch()
    assert numbers(loader.next_batch()) == [16, 25]


@pytest.mark.parametrize("kind", ["two_workers_iterable", slow_if(True, "two_workers_global")])
def test_a_loader_that_was_closed_or_left_at_its_end_has_no_processes(kind: str, opened: Opened) -> None:
    for end in (drain, BoundLoader.close):
        loader = opened(LOADERS[kind]())
        loader.next_batch()
        assert multiprocessing.active_children()
        end(loader)
        assert not multiprocessing.active_children()


# Epochs.


def test_a_script_that_sets_the_epochs_itself_has_the_last_word(opened: Opened) -> None:
    source = DataLoader(Shuffled(), batch_size=11)
    loader = opened(source)
    for epoch in (0, 1, 5, 2):
        source.dataset.set_epoch(epoch)  # type: ignore[attr-defined]
        assert numbers(loader.next_batch()) == torch.randperm(11, generator=seeded(epoch)).tolist()
        loader.start_epoch()


def test_an_ended_loader_stays_ended_until_an_epoch_is_started(opened: Opened) -> None:
    loader = opened([1])
    assert loader.next_batch() == 1
    assert [loader.next_batch() for _ in range(3)] == [ENDED] * 3
    loader.start_epoch()
    loader.start_epoch()
    assert loader.next_batch() == 1
    loader.close()
    loader.close()
    with pytest.raises(ValueError, match="the loader is closed"):
        loader.next_batch()


def test_a_generator_has_one_epoch_and_a_second_one_is_an_error(opened: Opened) -> None:
    loader = opened(iter(range(3)))
    assert drain(loader) == 3
    assert loader.first() is None
    loader.start_epoch()
    with pytest.raises(ValueError, match="is an iterator .* and is exhausted: it has one epoch"):
        loader.next_batch()


def test_a_loader_that_is_its_own_iterator_and_starts_afresh_has_many_epochs(opened: Opened) -> None:
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


# Bound to the steps of an Executor.


def squared(model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return model(batch[:, None] / 100).square().mean(), {"first": batch}


def dropping() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))


def program(**loaders: Any) -> tuple[nn.Module, ab.Executor]:
    model = dropping()
    steps = {
        "train": step_of(model, loss=squared, lr=0.01),
        "validate": ab.EvalStep(model, lambda model, batch: {"first": batch}),
    }
    return model, ab.Executor(steps, dataloaders=loaders)


def seen(executor: ab.Executor, runs: int, name: str = "train") -> list[list[float]]:
    return [executor.run(name)["first"].tolist() for _ in range(runs)]


@pytest.mark.parametrize("step", ["train", "validate"])
def test_a_loader_without_batches_is_refused(step: str) -> None:
    _, executor = program(**{step: []})
    with executor, pytest.raises(ValueError, match=f"the loader of '{step}' yields no batches"):
        executor.run(step)


def test_a_loader_without_a_length_has_no_batch_num() -> None:
    _, executor = program(train=itertools.repeat(torch.ones(2)))
    with executor:
        executor.run("train")
        with pytest.raises(ValueError, match="'train' has no length"):
            executor.batch_num("train")


def test_bound_batches_are_the_plain_loops_random_numbers_included() -> None:
    """Shuffling, dropout and loading share a generator: it is drawn from in the plain loop's order."""
    model, executor = program(train=DataLoader(Squares(), 4, shuffle=True))
    with executor:
        torch.manual_seed(1)
        ours = seen(executor, 6)
    other = dropping()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.01)
    torch.manual_seed(1)
    theirs = []
    for _ in range(2):
        for batch in DataLoader(Squares(), 4, shuffle=True):
            plain_step(other, lambda model, batch: squared(model, batch)[0], optimizer, batch)
            theirs.append(batch.tolist())
    assert ours == theirs
    assert_same(model, other)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_forked_loader_workers_survive_our_threads() -> None:
    loaders = {"train": DataLoader(Squares(6), 4, num_workers=2), "validate": DataLoader(Squares(6), 5, num_workers=1)}
    _, executor = program(**loaders)
    with executor:
        for _ in range(2):
            assert seen(executor, 2) == [[0, 1, 4, 9], [16, 25]]
            assert seen(executor, 2, "validate") == [[0, 1, 4, 9, 16], [25]]


def unequal() -> list[Any]:
    """What workers whose loaders have unequal lengths see, and the weights of a table on servers under each cache."""
    rank = ab.job().rank
    batches = [torch.full((2, 1), float(10 * rank + index)).double() for index in range([5, 2][rank])]
    torch.manual_seed(0)
    model = nn.Linear(1, 1).double()
    steps = {"train": step_of(model, lr=1e-4), "validate": ab.EvalStep(model, lambda m, b: {"rows": b})}
    with ab.Executor(steps, comm_mode="AllReduce", dataloaders=dict.fromkeys(steps, batches)) as executor:
        number = executor.batch_num("train")
        losses = [executor.run("train")["loss"].item() for _ in range(2 * number)]
        rows = [executor.run("validate")["rows"].flatten().tolist() for _ in range(number + 1)]
    ids = [torch.tensor([[2 * rank + index, index]]) for index in range([4, 1][rank])]
    weights = []
    for cache in (None, ab.Cache(capacity=2), ab.Cache(capacity=2, pull_bound=1, push_bound=1)):
        table = nn.EmbeddingBag(8, 1, mode="sum", sparse=True, dtype=torch.float64)
        nn.init.zeros_(table.weight)
        train = step_of(table, loss=lambda m, ids: m(ids).sum(), lr=1.0, reduction="sum")
        with ab.Executor(train, "Hybrid", cache=cache, dataloaders={"default": ids}, served="replace") as executor:
            for _ in range(2 * executor.batch_num()):
                executor.run()
        weights.append(table.weight.flatten().tolist())
    return [number, losses, rows, model.weight.item(), weights]


def test_an_epoch_ends_when_every_workers_loader_has_ended() -> None:
    """Until then a worker whose loader has ended pushes nothing under the number of its own step."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    expected = []
    for index in [*range(5), *range(5)]:
        values = [10 * rank + index for rank, count in enumerate([5, 2]) if index < count]
        x = torch.tensor(values).double().repeat_interleave(2)[:, None]
        expected.append(plain_step(model, mean_square, optimizer, x).item())
    table = torch.zeros(8)
    for ids in [[0, 0], [1, 1], [2, 2], [3, 3], [2, 0]]:
        table -= 2 * torch.bincount(torch.tensor(ids), minlength=8)
    for rank, (number, losses, rows, weight, tables) in enumerate(in_job(unequal, 2, servers=2)):
        assert number == 5
        assert [*losses, weight] == pytest.approx([*expected, model.weight.item()], rel=1e-12)
        own = [[10 * rank + index] * 2 for index in range([5, 2][rank])]
        assert rows == own + [[]] * (5 - len(own)) + own[:1]
        assert tables == [table.tolist()] * 3
