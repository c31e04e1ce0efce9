"""Mixtures whose experts go and come back, or were never there."""

from __future__ import annotations

import logging
import threading
import time

import pytest
import torch
from torch import nn

from anabranch.errors import BoundaryError, PeerLost
from anabranch.experts import Directory, DirectoryServer, ExpertBackend, ExpertServer, RemoteMixtureOfExperts
from anabranch.tensors import TensorSpec
from waiting import join


def serving(directory: Directory, count: int = 2, prefix: str = "ffn") -> ExpertServer:
    backends = [ExpertBackend(f"{prefix}.{i}", nn.Linear(4, 4), args_schema=[TensorSpec(4)]) for i in range(count)]
    return ExpertServer(backends, directory=directory)


@pytest.mark.parametrize("remote", [False, True])
def test_a_wrong_prefix_is_named_with_what_the_directory_has(remote: bool) -> None:
    with DirectoryServer() as names:
        directory = Directory(names.endpoint) if remote else names.directory
        with pytest.raises(BoundaryError, match=r"lists no expert ffm\.\[0:2\]; it lists none at all"):
            RemoteMixtureOfExperts(4, [2], directory, "ffm")(torch.ones(1, 4))
        with serving(directory):
            for x in (torch.ones(1, 4), torch.ones(1, 2, 4)):
                mixture = RemoteMixtureOfExperts(4, [2], directory, "ffm")
                started = time.monotonic()
                with pytest.raises(BoundaryError, match=r"lists no expert ffm\.\[0:2\]; it lists ffn\.\*") as caught:
                    mixture(x)
                assert "allow_zero_outputs" not in str(caught.value)
                assert time.monotonic() - started < mixture.forward_timeout / 2


def test_a_directory_over_tcp_without_keys_is_refused_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANABRANCH_KEYS", raising=False)
    with pytest.raises(ValueError, match=r"tcp://names:7000 is reached over TCP.*keys=DIR"):
        Directory("tcp://names:7000")
    with pytest.raises(ValueError, match="keys=DIR"):
        RemoteMixtureOfExperts(4, [2], "tcp://names:7000", "ffn")
    Directory("tcp://names:7000", insecure=True)


@pytest.mark.parametrize("withdrawn", [False, True])
def test_a_forward_waits_for_experts_that_are_gone_and_says_so_once(
    withdrawn: bool, caplog: pytest.LogCaptureFixture
) -> None:
    directory = Directory()
    mixture = RemoteMixtureOfExperts(4, [2], directory, "ffn", k_best=2, forward_timeout=60.0)
    patient = RemoteMixtureOfExperts(4, [2], directory, "ffn", k_best=2, allow_zero_outputs=True)
    x = torch.ones(3, 4)
    with serving(directory) as server:
        mixture(x)
        patient(x)
    if not withdrawn:
        directory.announce(["ffn.0", "ffn.1"], server.endpoint, 60.0)
    outputs: list[torch.Tensor] = []
    with caplog.at_level(logging.WARNING, "anabranch.experts"):
        assert patient(x).eq(0).all()  # at once
        waiting = threading.Thread(target=lambda: outputs.append(mixture(x)))
        waiting.start()
        while not any("waiting until they are back" in text for text in caplog.messages):
            waiting.join(timeout=0.001)
        assert waiting.is_alive()
        with serving(directory):
            join(waiting)
            assert mixture.statistics().avoided == frozenset()
            mixture(x)
    assert outputs[0].shape == (3, 4)
    texts = [text for text in caplog.messages if "gone" in text or "back:" in text]
    assert [text for text in texts if "ffn.0, ffn.1" in text] == texts
    assert len(texts) == (0 if withdrawn else 3)  # gone for both mixtures, back for the one


def test_experts_that_stay_away_are_an_error_at_the_deadline() -> None:
    directory = Directory()
    mixture = RemoteMixtureOfExperts(4, [2], directory, "ffn", k_best=2, forward_timeout=1.0)
    with serving(directory) as server:
        mixture(torch.ones(3, 4))
    directory.announce(["ffn.0", "ffn.1"], server.endpoint, 60.0)
    with pytest.raises(BoundaryError, match="3 rows have fewer than 1 experts") as caught:
        mixture(torch.ones(3, 4))
    assert caught.value.elapsed is not None
    assert caught.value.elapsed > 0.9
    assert PeerLost.__name__ in mixture.statistics().failed
