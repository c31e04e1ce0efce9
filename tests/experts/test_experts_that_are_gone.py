"""Mixtures whose experts go and come back, or were never there."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from anabranch.deadline import Deadline
from anabranch.errors import BoundaryError, PeerLost
from anabranch.experts import Directory, DirectoryServer, ExpertBackend, ExpertServer, RemoteMixtureOfExperts
from anabranch.experts.client.finder import ExpertFinder
from anabranch.tensors import TensorSpec
from waiting import join


def serving(directory: Directory, *uids: str) -> ExpertServer:
    backends = [ExpertBackend(uid, nn.Linear(4, 4), args_schema=[TensorSpec(4)]) for uid in uids]
    return ExpertServer(backends, directory=directory)


@pytest.mark.parametrize("kind", ["memory", "remote", "another class"])
def test_a_wrong_prefix_is_named_with_what_the_directory_has(kind: str) -> None:
    with DirectoryServer() as names:
        directory: Any = Directory(names.endpoint) if kind == "remote" else names.directory
        if kind == "another class":  # as a RedisDirectory
            methods = ("announce", "withdraw", "lookup", "active", "announced")
            directory = SimpleNamespace(**{name: getattr(names.directory, name) for name in methods})
        with pytest.raises(BoundaryError, match=r"lists no expert ffm\.\[0:2\]; it lists none at all"):
            RemoteMixtureOfExperts(4, [2], directory, "ffm")(torch.ones(1, 4))
        with serving(directory, "ffn.0"):
            for x in (torch.ones(1, 4), torch.ones(1, 2, 4)):
                mixture = RemoteMixtureOfExperts(4, [2], directory, "ffm")
                started = time.monotonic()
                with pytest.raises(BoundaryError, match=r"lists no expert ffm\.\[0:2\]; it lists ffn\.\*") as caught:
                    mixture(x)
                assert "allow_zero_outputs" not in str(caught.value)
                assert time.monotonic() - started < mixture.forward_timeout / 2
        lenient = RemoteMixtureOfExperts(4, [2], directory, "ffm", allow_zero_outputs=True)
        with pytest.raises(BoundaryError, match="shape of their outputs is not known"):
            lenient(torch.ones(1, 4))


def test_a_directory_over_tcp_without_keys_is_refused_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANABRANCH_KEYS", raising=False)
    with pytest.raises(ValueError, match=r"tcp://names:7000 is reached over TCP.*keys=DIR"):
        Directory("tcp://names:7000")
    with pytest.raises(ValueError, match="keys=DIR"):
        RemoteMixtureOfExperts(4, [2], "tcp://names:7000", "ffn")
    Directory("tcp://names:7000", insecure=True)


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("withdrawn", [False, True])
def test_a_forward_waits_for_experts_that_are_gone_and_says_so_once(
    withdrawn: bool, least: int, caplog: pytest.LogCaptureFixture
) -> None:
    """With two needed, one of the two is away; with one, both are."""
    directory, away = Directory(), ["ffn.1"] if least == 2 else ["ffn.0", "ffn.1"]
    mixture = RemoteMixtureOfExperts(4, [2], directory, "ffn", k_best=2, k_min=least, forward_timeout=60.0)
    patient = RemoteMixtureOfExperts(4, [2], directory, "ffn", k_best=2, k_min=least, allow_zero_outputs=True)
    x = torch.ones(3, 4)
    outputs: list[torch.Tensor] = []
    with ExitStack() as stack:
        if least == 2:
            stack.enter_context(serving(directory, "ffn.0"))
        with serving(directory, *away) as server:
            mixture(x)
            patient(x)
        if not withdrawn:
            directory.announce(away, server.endpoint, 60.0)
        stack.enter_context(caplog.at_level(logging.WARNING, "anabranch.experts"))
        assert patient(x).shape == (3, 4)  # at once
        waiting = threading.Thread(target=lambda: outputs.append(mixture(x)))
        waiting.start()
        while not any("waiting until they are back" in text for text in caplog.messages):
            waiting.join(timeout=0.001)
        assert waiting.is_alive()
        with serving(directory, *away):
            join(waiting)
            assert mixture.statistics().avoided == frozenset()
            mixture(x)
    assert outputs[0].shape == (3, 4)
    texts = [text for text in caplog.messages if "gone" in text or "back:" in text]
    assert [text for text in texts if ", ".join(away) in text] == texts
    assert len(texts) == 3  # gone for both mixtures, back for the one
    assert sum("waiting" in text for text in caplog.messages) == 1
    mixture.forward_timeout = 0.5
    with pytest.raises(BoundaryError):
        mixture(x)
    assert sum("waiting" in text for text in caplog.messages) == 2, "of the second outage"


def test_a_mixture_that_goes_on_without_an_expert_withdrawn_says_so_once_and_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory, x = Directory(), torch.ones(3, 4)
    mixture = RemoteMixtureOfExperts(4, [2, 2], directory, "ffn", k_best=4)
    with serving(directory, "ffn.0.0", "ffn.0.1"), caplog.at_level(logging.WARNING, "anabranch.experts"):
        for outage in range(2):
            with serving(directory, "ffn.1.0"):
                mixture(x)
                mixture(x)
            assert sum("back" in text for text in caplog.messages) == outage
            mixture(x)
            mixture(x)
    gone = "experts have gone: ffn.1.0 (the directory no longer lists them); the mixture goes on with the others"
    assert caplog.messages == [gone, "experts are back: ffn.1.0", gone]


def test_experts_that_stay_away_are_an_error_at_the_deadline_that_names_the_cure() -> None:
    directory = Directory()
    mixture = RemoteMixtureOfExperts(4, [2], directory, "ffn", k_best=2, k_min=2)
    with serving(directory, "ffn.0", "ffn.1") as server:
        mixture(torch.ones(3, 4))
    mixture.forward_timeout = 1.0
    directory.announce(["ffn.0", "ffn.1"], server.endpoint, 60.0)
    with pytest.raises(BoundaryError, match="3 rows have fewer than 2 experts") as caught:
        mixture(torch.ones(3, 4))
    for cure in ("lower k_min=2", "allow_zero_outputs=True", "anabranch run --experts N"):
        assert cure in str(caught.value)
    assert caught.value.elapsed is not None
    assert caught.value.elapsed > 0.9
    assert PeerLost.__name__ in mixture.statistics().failed


def test_a_directory_that_does_not_answer_in_time_hides_no_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_late(finder: ExpertFinder, deadline: Deadline) -> bool:
        raise deadline.error(peer="the directory", operation="directory.lookup")

    directory = Directory()
    mixture = RemoteMixtureOfExperts(4, [2], directory, "ffn", k_best=2, k_min=2)
    with serving(directory, "ffn.0"):
        monkeypatch.setattr(ExpertFinder, "some_away", too_late)
        with pytest.raises(BoundaryError, match="3 rows have fewer than 2 experts.*lower k_min=2"):
            mixture(torch.ones(3, 4))
