"""The other processes of a pipeline: their ranks, what carries messages to them, and waits that watch them.

Messages go over the group's gloo, their tensors in shared memory if all ranks are on one host. A wait for messages has
a deadline, and checks the peers' heartbeats meanwhile. Tensors of GPUs go over the host.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist

from anabranch.deadline import Deadline
from anabranch.liveness.group import Group
from anabranch.liveness.meeting import interruptible
from anabranch.liveness.peers import Identity, end_without_waiting, peers_of_job
from anabranch.pipeline.links.channel import Channel
from anabranch.pipeline.links.inbox import Inbox
from anabranch.pipeline.links.shared_memory import MessageMemory

_TEXT_BYTES = 256
_LAST_SECONDS = 2.0
_FIRST_TAG = 0x70697065
# Pipes on one group are separated by their tags; ranks make them in the same order.
_tags: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()


class RankConnection:
    """This rank's connection to the others of ``group``. Making one is a collective.

    Args:
        group: the ranks, in the order of the schedule's; its backend must carry CPU tensors, as gloo does.
        heartbeat: seconds between the two checks after which a stopped rank is lost.
        shared_memory: true if ranks that are all on one host exchange tensors there.
        likeness: a string that must be equal on all ranks; of long ones the beginning is shown.

    Attributes:
        rank: this process's number in the group.
        peers: the other ranks.
        names: of all ranks, their numbers in the job.
        inbox: the messages that have arrived.

    Raises:
        ValueError: the group's backend does not support CPU tensors, or the ranks' pipes differ.
    """

    def __init__(self, group: dist.ProcessGroup, heartbeat: float, shared_memory: bool, likeness: str) -> None:
        if not heartbeat > 0:
            raise ValueError(f"heartbeat is a number of seconds above 0, got {heartbeat!r}")
        if "gloo" not in str(dist.get_backend_config(group)):
            raise ValueError(
                f"a pipeline's group must carry CPU tensors, but {dist.get_backend(group)} does not; give it "
                'process_group=dist.new_group(backend="gloo")'
            )
        self.group = group
        peers = peers_of_job()
        self._members = Group(peers, dist.get_process_group_ranks(group), heartbeat, recovers=True)
        self.rank, self.names = self._members.rank, self._members.ranks
        self.peers = [peer for peer in range(self._members.size) if peer != self.rank]
        self.inbox = Inbox(self.peers)
        self._check_alike(likeness if shared_memory else f"{likeness} over gloo")
        identities = [Identity.decode(text) for text in self._gather(peers.identity.encode())]
        peers.know(dict(zip(self.names, identities, strict=True)), heartbeat)
        tag = next(_tags.setdefault(group, itertools.count(_FIRST_TAG)))
        self.name = f"pipe {','.join(map(str, self.names))}/{tag}"
        shares = shared_memory and len({identity.host for identity in identities}) == 1
        self.channel = Channel(group, tag, self.inbox, MessageMemory.meet(self._gather) if shares else None)
        # Nothing that holds this object: the channel's threads end when the last reference to it goes.
        self._noticed = partial(_noticed, self.names, self.inbox)
        leave = partial(_exit_without_lost_ranks, self.channel)
        self.close = weakref.finalize(self, _end, self.channel, leave)
        atexit.register(leave)  # after the finalizer's own, so called before it

    def _check_alike(self, likeness: str) -> None:
        digest = hashlib.blake2b(likeness.encode(), digest_size=8).hexdigest()
        texts = self._gather(f"{digest} {likeness}".encode()[:_TEXT_BYTES].decode(errors="ignore"))
        if len({text.split(" ")[0] for text in texts}) > 1:
            each = "; ".join(f"rank {r}: {text.split(' ', 1)[1]}" for r, text in zip(self.names, texts, strict=True))
            raise ValueError(
                "the ranks make different pipes; use the same layers, balance and schedule on all of them (a balance "
                f"that each rank measures itself differs: balance='time' is measured on one). {each}"
            )

    def _gather(self, text: str) -> list[str]:
        mine = torch.zeros(_TEXT_BYTES, dtype=torch.uint8, device="cpu")
        mine[: len(text.encode())] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else 0
        everyone = [torch.empty_like(mine) for _ in range(self._members.size)]
        interruptible(partial(dist.all_gather, everyone, mine, group=self.group))
        return [bytes(row.tolist()).rstrip(b"\0").decode() for row in everyone]

    def wait(
        self, done: Callable[[float], bool], operation: str, deadline: Deadline, ranks: Sequence[int], step: int
    ) -> None:
        """Return when ``done(seconds)``, which waits at most that long, returns true; ``ranks`` are waited for.

        Raises:
            PeerLost: another rank is gone or stopped.
            DeadlineExceeded: names those waited for.
        """
        names = [self.names[rank] for rank in ranks]
        self._members.wait(done, operation, deadline, awaited=names, step=step, noticed=self._noticed)


def _noticed(names: Sequence[int], inbox: Inbox) -> dict[int, str]:
    """Return the ranks, by their numbers in the job, that are lost by what connections to them say."""
    with inbox.changed:
        return {names[rank]: why for rank, why in inbox.lost.items()}


def _exit_without_lost_ranks(channel: Channel) -> None:
    """End the process without gloo, which would wait for a lost rank, or abort because a thread still waits."""
    channel.settle(_LAST_SECONDS)
    if channel.is_stuck():
        end_without_waiting()


def _end(channel: Channel, leave: Callable[[], None]) -> None:
    channel.close()
    if not channel.is_stuck():
        atexit.unregister(leave)
