"""Servers that may be at another step than the worker: no later run guesses, no checkpoint is saved, and one mends it.

A push that was not answered may have been applied, unless it is held until it is released; and a server that was killed
may come back without some.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from anabranch.parameter_server import ParameterServer
from plain_loop import mean_square
from toys import assert_same, look_of, plain_step, step_of

# What fails here is behind the push: it needs no gradients.
pytestmark = pytest.mark.filterwarnings("ignore:on_gradients gets no gradients")
X = torch.ones(3, 2)


def executor_of(clip: float | None, consistency: str, served: Any = "refuse") -> ab.Executor:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    steps = {"train": step_of(model, torch.optim.Adam, clip_grad_norm=clip), "look": look_of(model)}
    return ab.Executor(steps, "PS", engine="tape", consistency=consistency, served=served)


@contextmanager
def unanswered(executor: ab.Executor, verb: str, error: BaseException, *, arrives: bool) -> Iterator[None]:
    """Runs of the block whose call ends in the error, which they raise, whether it has arrived or not."""
    client: Any = executor._remote.client  # type: ignore[union-attr]
    call = getattr(client, verb)

    def ask(*args: Any, **keywords: Any) -> None:
        if arrives:
            call(*args, **keywords)
        raise error

    with pytest.MonkeyPatch.context() as patch, pytest.raises(type(error)):  # noqa: PT012 - the caller's block
        patch.setattr(client, verb, ask)
        yield


def refused(words: str, *calls: Callable[[], object]) -> None:
    for call in calls:
        with pytest.raises(ab.BoundaryError, match=rf"{words}.*executor\.load"):
            call()


@pytest.mark.parametrize(
    ("error", "arrives"), [(ab.DeadlineExceeded("no answer"), True), (ab.PeerLost("gone"), False)], ids=["late", "lost"]
)
def test_after_an_unanswered_push_a_checkpoint_is_required(error: Exception, arrives: bool, tmp_path: Path) -> None:
    with executor_of(None, "ssp:0") as executor:
        executor.run("train", X)
        executor.save(tmp_path)
        expected = [executor.run("train", X)["loss"] for _ in range(2)]
        with unanswered(executor, "push_many", error, arrives=arrives):
            executor.run("train", X)
        train, save = partial(executor.run, "train", X), partial(executor.save, tmp_path / "later")
        refused("interrupted or not answered", train, save)
        executor.load(tmp_path)
        assert [executor.run("train", X)["loss"] for _ in range(2)] == expected


LOST = product(
    (ab.DeadlineExceeded("no answer"), KeyboardInterrupt()),
    (("push_many", None), ("squared_norm", 1.0)),
    (True, False),
)
REFUSED = [(ab.Overloaded("full"), ("push_many", clip), False) for clip in (None, 1.0)]


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    ("error", "verb", "clip", "arrives"), [(error, *verb, arrives) for error, verb, arrives in (*LOST, *REFUSED)]
)
def test_a_held_push_that_was_refused_or_not_answered_is_dropped(
    error: Exception, verb: str, clip: float | None, arrives: bool
) -> None:
    with executor_of(clip, "bsp") as executor, executor_of(clip, "bsp") as undisturbed:
        for step in range(3):
            if step == 1:
                with unanswered(executor, verb, error, arrives=arrives):
                    executor.run("train", X)
                assert torch.equal(executor.run("look", X)["out"], undisturbed.run("look", X)["out"])
            assert executor.run("train", X)["loss"] == undisturbed.run("train", X)["loss"]


def failing_step(model: nn.Module, failing: list[bool]) -> ab.TrainStep:
    def on_gradients(gradients: dict[str, Tensor]) -> None:
        if failing[0]:
            raise KeyboardInterrupt

    return step_of(model, on_gradients=on_gradients)


def test_after_a_run_that_fails_behind_its_push_a_checkpoint_is_required(tmp_path: Path) -> None:
    failing = [False]
    with ab.Executor(failing_step(nn.Linear(2, 2), failing), "PS", engine="tape", consistency="asp") as executor:
        executor.run(batch=X)
        executor.save(tmp_path)
        expected = executor.run(batch=X)["loss"]
        failing[0] = True
        with pytest.raises(KeyboardInterrupt):
            executor.run(batch=X)
        failing[0] = False
        refused("failed behind it", partial(executor.run, batch=X), partial(executor.save, tmp_path / "later"))
        executor.load(tmp_path)
        assert executor.run(batch=X)["loss"] == expected


def test_a_run_that_fails_behind_a_held_push_changes_nothing() -> None:
    model, failing = nn.Linear(2, 2), [True]
    plain = copy.deepcopy(model)
    with ab.Executor(failing_step(model, failing), "PS", engine="tape") as executor:
        with pytest.raises(KeyboardInterrupt):
            executor.run(batch=X)
        failing[0] = False
        assert all(torch.equal(value, plain.state_dict()[name]) for name, value in executor.state_dict().items())
        executor.run(batch=X)
    plain_step(plain, mean_square, torch.optim.SGD(plain.parameters(), lr=0.1), X)
    assert_same(model, plain)


@pytest.mark.parametrize("verb", ["push_many", "squared_norm"])
def test_an_executor_with_such_a_push_can_be_closed(verb: str) -> None:
    """The servers may hold its gradients for good, so nothing may wait for them."""
    with executor_of(1.0, "bsp") as executor:
        executor.run("train", X)
        with unanswered(executor, verb, ab.DeadlineExceeded("late"), arrives=False):
            executor.run("train", X)


@pytest.mark.parametrize("consistency", ["bsp", "ssp:1", "asp"])
def test_after_a_server_lost_pushes_a_checkpoint_is_required(
    consistency: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start() -> ParameterServer:
        server = ParameterServer(
            listen=f"unix:{tmp_path}/server", durability="checkpoint", checkpoint_dir=tmp_path / "server's"
        )
        return server.__enter__()

    server = start()
    monkeypatch.setenv("ANABRANCH_SERVERS", server.endpoint)
    with executor_of(None, consistency) as executor:
        executor.run("train", X)
        server.checkpoint()
        executor.save(tmp_path / "kept")
        expected = [executor.run("train", X)["loss"] for _ in range(2)]
        server.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)  # without a last checkpoint
        server = start()
        with pytest.raises(ab.RolledBack, match="2 pushes of this client are lost"):
            executor.run("train", X)
        train, look = (partial(executor.run, step, X) for step in ("train", "look"))
        refused("lost pushes of this worker", train, look, partial(executor.save, tmp_path / "later"))
        executor.load(tmp_path / "kept")
        assert [executor.run("train", X)["loss"] for _ in range(2)] == expected
    server.__exit__(None, None, None)


def test_an_executor_whose_servers_were_taken_over_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a notebook's cell does that is run twice, or a second job with the same addresses."""
    with ParameterServer() as server:
        monkeypatch.setenv("ANABRANCH_SERVERS", server.endpoint)
        first = executor_of(None, "asp")
        first.run("train", X)
        with executor_of(None, "asp", served="replace") as second:
            second.run("train", X)
            train, look = (partial(first.run, step, X) for step in ("train", "look"))
            for go_on in (train, look, partial(first.save, tmp_path), first.close):
                with pytest.raises(ab.SchemaError, match="another client has joined this server as worker 0"):
                    go_on()
            loss = second.run("train", X)["loss"]
        with executor_of(None, "asp", served="replace") as third:
            third.run("train", X)
            assert third.run("train", X)["loss"] == loss
