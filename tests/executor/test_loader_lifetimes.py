"""Epochs begin when they are started, and a closed or dropped loader leaves nothing behind."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable

import pytest
import torch
from loader_kinds import Squares, Stream, WatchedLoader, bound, drain, numbers, strided, take
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    SequentialSampler,
)

from anabranch.executor.loaders import loading
from anabranch.executor.loaders.loading import ENDED, BoundLoader

pytestmark = pytest.mark.usefixtures("every_fetch_is_worth_a_thread")


def test_an_ended_loader_stays_ended_until_an_epoch_is_started(opened: Callable[..., BoundLoader]) -> None:
    loader = opened([1])
    assert loader.next_batch() == 1
    assert [loader.next_batch() for _ in range(3)] == [ENDED] * 3
    assert repr(ENDED) == "ENDED"
    loader.start_epoch()
    loader.start_epoch()
    assert loader.next_batch() == 1


@pytest.mark.parametrize("batches", [0, 1, 3])
def test_a_generator_has_one_epoch_and_a_second_one_is_an_error(
    batches: int, opened: Callable[..., BoundLoader]
) -> None:
    loader = opened(iter(range(batches)))
    assert drain(loader) == batches
    loader.start_epoch()
    with pytest.raises(ValueError, match="is an iterator .* and is exhausted: it has one epoch"):
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


def test_samplers_get_the_epoch_counted_from_the_script_s_last(opened: Callable[..., BoundLoader]) -> None:
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


def test_a_loader_that_cannot_be_iterated_is_refused() -> None:
    with pytest.raises(TypeError, match="a loader is an iterable of batches, got int"):
        bound(3)  # type: ignore[arg-type]


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("anabranch-loader")]


def test_closing_ends_the_thread_and_may_be_done_twice(opened: Callable[..., BoundLoader]) -> None:
    loader = opened(WatchedLoader())
    take(loader, 3)
    assert len(loader_threads()) == 1
    loader.close()
    loader.close()
    assert not loader_threads()
    with pytest.raises(ValueError, match="the loader is closed"):
        loader.next_batch()


def test_a_loader_that_is_dropped_leaves_no_thread() -> None:
    loader = bound(WatchedLoader())
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

    loader = opened(WatchedLoader(act=act))
    take(loader, 2)
    assert hanging.wait(30)
    [thread] = loader_threads()
    started = time.monotonic()
    loader.close(timeout=0.05)
    assert time.monotonic() - started < 30  # of 60
    assert "the loader WatchedLoader has been fetching a batch for over" in caplog.text
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
        loader = opened(WatchedLoader(act=lambda index: index == 2 and release.wait(60)))
        take(loader, 3)
    finally:
        logging.getLogger("anabranch.executor").removeHandler(handler)
    assert "the loader WatchedLoader has been fetching for" in caplog.text


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
    ahead = opened(WatchedLoader(count=1000))
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


def test_an_unshuffled_loader_has_a_sequential_sampler() -> None:
    assert type(DataLoader(Squares()).sampler) is SequentialSampler
