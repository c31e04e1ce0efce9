"""Batches taken ahead are those of a plain loop, one at most, from a thread where that is safe."""

from __future__ import annotations

import contextvars
import random
import threading
import traceback
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from loader_kinds import Broken, Squares, Stateful, WatchedLoader, drain, numbers, take
from torch.utils.data import (
    DataLoader,
)

from anabranch.executor.loaders import loading
from anabranch.executor.loaders.loading import ENDED, BoundLoader

pytestmark = pytest.mark.usefixtures("every_fetch_is_worth_a_thread")


def test_all_but_the_first_two_batches_of_an_epoch_are_fetched_by_another_thread(
    opened: Callable[..., BoundLoader],
) -> None:
    source = WatchedLoader()
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

    loader = opened(WatchedLoader(act=act))
    loader.next_batch()
    loader.next_batch()
    assert fetching.wait(30)  # nobody has asked for it
    used.set()
    assert numbers(loader.next_batch())[0] == 2


def test_at_most_one_batch_is_fetched_ahead(opened: Callable[..., BoundLoader]) -> None:
    source = WatchedLoader(count=20)
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
    source = WatchedLoader(count=12, act=act)
    loader = opened(source)
    here = threading.get_ident()
    drain(loader)
    assert [thread == here for thread in source.fetched] == [True] * 9 + [False] * 3
    loader.start_epoch()
    drain(loader)
    assert [thread == here for thread in source.fetched[12:]] == [True] * 2 + [False] * 10


def test_without_prefetch_no_thread_is_started(opened: Callable[..., BoundLoader]) -> None:
    source = WatchedLoader()
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
    source = WatchedLoader(act=draw)
    loader = opened(source)
    take(loader, 15)
    assert set(source.fetched) == {threading.get_ident()}
    [record] = caplog.records
    assert record.name == "anabranch.executor"
    assert "the batches of the loader WatchedLoader are not prefetched, since it draws from" in record.getMessage()
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
    assert "reuses the memory of the previous batch" in caplog.text


def test_a_step_that_changes_its_batch_does_not_look_like_a_loader_that_does(
    opened: Callable[..., BoundLoader], caplog: pytest.LogCaptureFixture
) -> None:
    loader = opened(WatchedLoader())
    while (batch := loader.next_batch()) is not ENDED:
        batch.add_(float("nan"))  # type: ignore[attr-defined]
    assert not caplog.records


@pytest.mark.parametrize("at", [0, 1, 2, 4])
def test_next_batch_raises_the_loader_s_error_with_its_traceback(at: int, opened: Callable[..., BoundLoader]) -> None:
    def the_function_that_fails(index: int) -> None:
        if index == at:
            raise Broken(f"at {index}")

    loader = opened(WatchedLoader(act=the_function_that_fails))
    for _ in range(at):
        loader.next_batch()
    with pytest.raises(Broken, match=f"at {at}") as caught:
        loader.next_batch()
    assert "the_function_that_fails" in "".join(traceback.format_exception(caught.value))


def test_thread_modes_hold_where_batches_are_fetched(opened: Callable[..., BoundLoader]) -> None:
    variable = contextvars.ContextVar("variable", default=0)
    seen: list[tuple[bool, int, str]] = []

    def act(index: int) -> None:
        seen.append((torch.is_grad_enabled(), variable.get(), str(torch.empty(()).device)))

    loader = opened(WatchedLoader(act=act))
    variable.set(3)
    with torch.no_grad(), torch.device("meta"):
        drain(loader)
    assert seen == [(False, 3, "meta")] * 6


def test_a_position_does_not_count_prefetched_batches(opened: Callable[..., BoundLoader]) -> None:
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
