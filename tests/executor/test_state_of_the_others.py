"""The state that a newcomer takes from a member goes in pieces, which are checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anabranch.collectives import Workers
from anabranch.errors import BoundaryError
from anabranch.executor import exchange
from anabranch.executor.exchange import send_state

PIECE = 64


class Line:
    """What rank 0 has broadcast, for the others to take."""

    broadcast_bytes = Workers.broadcast_bytes
    device = torch.device("cpu")

    def __init__(self, rank: int, sent: list[Tensor]) -> None:
        self.rank, self._sent, self._next = rank, sent, iter(sent)

    def broadcast(self, tensors: list[Tensor], *, source: int, operation: str) -> None:
        for tensor in tensors:
            if self.rank == source:
                self._sent.append(tensor.clone())
            else:
                tensor.copy_(next(self._next))


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    adam = {"step": torch.tensor(3.0), "moments": torch.randn(7, 5).T, "none": torch.zeros(0, 4)}
    others = [torch.tensor([True, False]), torch.randn(3, dtype=torch.complex128), torch.randn(9).bfloat16()]
    return {"w": nn.Parameter(torch.randn(50)), "adam": {("a", 1): adam}, "others": others, "lr": 0.1}


def sent(one: object) -> list[Tensor]:
    messages: list[Tensor] = []
    workers: Any = Line(0, messages)
    send_state(workers, one, 0, takes=False)
    return messages


def taken(messages: list[Tensor], *, takes: bool) -> Any:
    workers: Any = Line(1, messages)
    return send_state(workers, None, 0, takes=takes)


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_PIECE_BYTES", PIECE)


def test_it_arrives_as_it_is_in_pieces() -> None:
    there = state()
    messages = sent(there)
    here = taken(messages, takes=True)
    torch.testing.assert_close(here, there, rtol=0.0, atol=0.0)
    pieces = [message.nbytes for message in messages[2:-2]]  # between the head and the digest, with their lengths
    tensors = [there["w"], *there["adam"]["a", 1].values(), *there["others"]]
    assert max(pieces) <= PIECE
    assert sum(pieces) == sum(tensor.nbytes for tensor in tensors)
    assert taken(messages, takes=False) is None


def test_one_without_tensors_arrives() -> None:
    assert taken(sent({"lr": 0.1}), takes=True) == {"lr": 0.1}


def test_a_flipped_bit_is_seen() -> None:
    messages = sent(state())
    for number in range(2, len(messages) - 2):
        with pytest.raises(BoundaryError, match="arrived otherwise than it was sent"):
            taken([one ^ 1 if at == number else one for at, one in enumerate(messages)], takes=True)
