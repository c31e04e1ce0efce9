"""Values between ranks: refused where they would arrive changed, and in memory that is used again.

That all others arrive as they were sent, ``every_value`` shows, which the ranks of ``test_pipe_ranks.py`` run.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterator

import pytest
import torch

from anabranch.pipeline.links.connection import pack, pack_message, unpack
from anabranch.pipeline.links.shared_memory import MessageMemory
from anabranch.pipeline.stage.packet import cut
from anabranch.tensors import Structure


class Colour(enum.IntEnum):
    RED = 1


class Word(enum.StrEnum):
    YES = "yes"


@pytest.mark.filterwarnings("ignore")  # nested and quantized ones are on their way out of PyTorch
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Colour.RED, "Colour cannot cross"),
        (lambda: Word.YES, "Word cannot cross"),
        (lambda: {Colour.RED: 1}, "Colour cannot cross"),
        (lambda: {1, 2}, "a set cannot cross"),
        (lambda: torch.Size([1]), "a torch.Size cannot cross"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested tensor"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "a quantized tensor"),
    ],
)
def test_values_that_would_arrive_changed_are_refused_where_they_are_sent(
    make: Callable[[], object], words: str
) -> None:
    with pytest.raises(TypeError, match=words):
        pack_message([cut(make())[0]])


# Memory shared by the ranks of one host.

Pair = tuple[MessageMemory, MessageMemory]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """The memory of rank 0, which sends, and of rank 1."""
    pair = MessageMemory([os.getpid()] * 2), MessageMemory([os.getpid()] * 2)
    yield pair
    for memory in pair:
        memory.close()


def crossed(pair: Pair, value: Structure) -> tuple[Structure, int]:
    """The value as it arrives, and the number of its slot."""
    spec, described, parts = pack(value)
    slot = pair[0].put(1, parts)
    return unpack(spec, pair[1].tensors(0, slot, described)), slot[0]


def test_a_slot_is_used_again_once_its_tensors_are_freed_and_they_are_no_copies(pair: Pair):
    descriptors = len(os.listdir("/proc/self/fd"))
    x = torch.ones(4)
    (first, other), number = crossed(pair, (x, x))
    first += 1
    assert torch.equal(x, torch.ones(4))
    assert torch.equal(other, x)
    assert other._version == 0, "a change of its neighbour is none of its own"
    assert crossed(pair, x)[1] != number, "taken"
    view = other[:2]
    del first, other
    assert crossed(pair, x)[1] != number
    del view
    assert crossed(pair, x * 3)[1] == number
    assert crossed(pair, torch.ones(1 << 20))[1] not in (0, 1), "too small"
    assert len({crossed(pair, torch.zeros(0))[1] for _ in range(3)}) == 1, "nothing is freed at once"
    for memory in pair:
        memory.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_tensor_arrives_in_the_order_in_memory_in_which_it_was_sent(pair: Pair):
    """``as_strided`` in the next stage read other numbers without a word."""
    images = torch.arange(48.0).reshape(2, 3, 2, 4)
    sent = [
        images.to(memory_format=torch.channels_last),
        images[:, :1].to(memory_format=torch.channels_last),
        images.permute(3, 0, 2, 1),
        images[0, 0].t().requires_grad_(),
        images[:, :2, 0, 1:3],
    ]
    arrived, _ = crossed(pair, sent)
    assert [one.stride() for one in arrived] == [torch.empty_like(one).stride() for one in sent]
    assert all(map(torch.equal, arrived, sent))
