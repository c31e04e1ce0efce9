"""Servers that may be at another step than the worker: no later run guesses, no checkpoint is saved, and one mends it.

A push that was not answered may have been applied, unless it is held until it is released; and a server that was killed
may come back without some.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from anabranch.parameter_server import ParameterServer
from plain_loop import mean_square
from toys import plain_step

X = torch.ones(3, 2)


def executor_of(
    clip: float | None, consistency: str, accumulate: int = 1, served: Literal["refuse", "replace"] = "refuse"
) -> ab.Executor:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    steps = {
        "train": ab.TrainStep(model, mean_square, optimizer, clip_grad_norm=clip, accumulate=accumulate),
        "look": ab.EvalStep(model, lambda m, x: {"out": m(x)}),
    }
    return ab.Executor(steps, "PS", engine="tape", consistency=consistency, served=served)


def unanswered(call: Callable[..., Any], error: Exception, *, arrives: bool) -> Callable[..., None]:
    def ask(*args: Any, **keywords: Any) -> None:
        if arrives:
            call(*args, **keywords)
        raise error

    return ask


@pytest.mark.parametrize(
    ("error", "arrives"), [(ab.DeadlineExceeded("no answer"), True), (ab.PeerLost("gone"), False)], ids=["late", "lost"]
)
def test_after_an_unanswered_push_a_checkpoint_is_required(
    error: Exception, arrives: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with executor_of(None, "ssp:0") as executor:
        executor.run("train", X)
        executor.save(tmp_path)
        expected = [executor.run("train", X)["loss"] for _ in range(2)]
        assert executor._remote is not None
        client = executor._remote.client
        with monkeypatch.context() as patch:
            patch.setattr(client, "push_many", unanswered(client.push_many, error, arrives=arrives))
            with pytest.raises(type(error)):
                executor.run("train", X)
        for go_on in (lambda: executor.run("train", X), lambda: executor.save(tmp_path / "later")):
            with pytest.raises(ab.BoundaryError, match=r"interrupted or not answered.*executor\.load"):
                go_on()
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
def test_a_held_push_that_was_refused_or_not_answered_is_dropped_and_the_next_run_goes_on(
    error: Exception, verb: str, clip: float | None, arrives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with executor_of(clip, "bsp") as executor, executor_of(clip, "bsp") as undisturbed:
        assert executor._remote is not None
        client = executor._remote.client
        for step in range(3):
            if step == 1:
                with monkeypatch.context() as patch:
                    patch.setattr(client, verb, unanswered(getattr(client, verb), error, arrives=arrives))
                    with pytest.raises(type(error)):
                        executor.run("train", X)
                look = {name: one.run("look", X)["out"] for name, one in [("it", executor), ("other", undisturbed)]}
                assert torch.equal(look["it"], look["other"])
            assert executor.run("train", X)["loss"] == undisturbed.run("train", X)["loss"]


def failing_step(model: nn.Module, failing: list[bool]) -> ab.TrainStep:
    def on_gradients(gradients: dict[str, Tensor]) -> None:
        if failing[0]:
            raise KeyboardInterrupt

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ab.TrainStep(model, mean_square, optimizer, on_gradients=on_gradients)


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
        for go_on in (lambda: executor.run(batch=X), lambda: executor.save(tmp_path / "later")):
            with pytest.raises(ab.BoundaryError, match=r"failed behind it.*executor\.load"):
                go_on()
        executor.load(tmp_path)
        assert executor.run(batch=X)["loss"] == expected


def test_a_run_that_fails_behind_a_held_push_changes_nothing() -> None:
    torch.manual_seed(0)
    model, failing = nn.Linear(2, 2), [False]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with ab.Executor(failing_step(model, failing), "PS", engine="tape") as executor:
        failing[0] = True
        with pytest.raises(KeyboardInterrupt):
            executor.run(batch=X)
        failing[0] = False
        assert all(torch.equal(value, before[name]) for name, value in executor.state_dict().items())
        executor.run(batch=X)
    plain = nn.Linear(2, 2)
    plain.load_state_dict(before)
    plain_step(plain, mean_square, torch.optim.SGD(plain.parameters(), lr=0.1), X)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("verb", ["push_many", "squared_norm"])
def test_an_executor_with_such_a_push_can_be_closed(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers may hold its gradients for good, so nothing may wait for them."""
    with executor_of(1.0, "bsp") as executor:
        executor.run("train", X)
        assert executor._remote is not None
        client = executor._remote.client
        with monkeypatch.context() as patch:
            patch.setattr(client, verb, unanswered(getattr(client, verb), ab.DeadlineExceeded("late"), arrives=False))
            with pytest.raises(ab.DeadlineExceeded):
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
        for go_on in (
            lambda: executor.run("train", X),
            lambda: executor.run("look", X),
            lambda: executor.save(tmp_path / "later"),
        ):
            with pytest.raises(ab.BoundaryError, match=r"lost pushes of this worker.*executor\.load"):
                go_on()
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
            for go_on in (
                lambda: first.run("train", X),
                lambda: first.run("look", X),
                lambda: first.save(tmp_path),
                first.close,
            ):
                with pytest.raises(ab.SchemaError, match="another client has joined this server as worker 0"):
                    go_on()
            loss = second.run("train", X)["loss"]
        with executor_of(None, "asp", served="replace") as third:
            third.run("train", X)
            assert third.run("train", X)["loss"] == loss
