"""Messages between the stages of one process: each worker has a mailbox, into which the others put messages."""

from __future__ import annotations

import itertools
import os
import threading
from typing import Protocol

from anabranch.deadline import Deadline
from anabranch.pipeline.schedule.actions import Action, Kind
from anabranch.pipeline.stage.packet import Gradients, Packet
from anabranch.record import spans

__all__ = ["Aborted", "Exchange", "Link", "Message"]

Message = list[Packet] | list[Gradients]
"""One packet, or one packet's gradients, for each route between two stages."""


class Aborted(Exception):
    """Another worker has failed; this one stops."""


class Link(Protocol):
    """Runs a rank's sends and receives.

    Attributes:
        name: of the call, the same on all ranks, and unique.
    """

    @property
    def name(self) -> str: ...

    def send(self, action: Action, message: Message) -> None:
        """Hands over the message of a sending action; does not wait for its arrival."""

    def receive(self, action: Action) -> Message:
        """Wait for the message of a receiving action. Raises ``Aborted`` once the step has failed elsewhere."""

    def check(self) -> None:
        """Raise ``Aborted`` if the step has failed elsewhere."""


_calls = itertools.count()

_Key = tuple[Kind, int, int, int]


class Exchange:
    """The mailboxes of all workers of a step.

    Args:
        rank_of: the worker of each stage.
        deadline: of the whole step.
        step: the call's number.
    """

    def __init__(self, rank_of: tuple[int, ...], deadline: Deadline, step: int) -> None:
        self.name = f"stages {os.getpid()}/{next(_calls)}"
        self._rank_of = rank_of
        self._deadline = deadline
        self._step = step
        self._arrived = [threading.Condition() for _ in range(max(rank_of) + 1)]
        self._mailboxes: list[dict[_Key, Message]] = [{} for _ in self._arrived]
        self._aborted = False

    def send(self, action: Action, message: Message) -> None:
        """Put the message into its receiver's mailbox."""
        assert action.peer is not None
        kind = Kind.RECV_F if action.kind is Kind.SEND_F else Kind.RECV_B
        rank = self._rank_of[action.peer]
        with self._arrived[rank]:
            self._mailboxes[rank][kind, action.peer, action.stage, action.microbatch] = message
            self._arrived[rank].notify()

    def receive(self, action: Action) -> Message:
        """Take the message from the mailbox, waiting for it."""
        assert action.peer is not None
        key = (action.kind, action.stage, action.peer, action.microbatch)
        rank = self._rank_of[action.stage]
        mailbox = self._mailboxes[rank]
        with self._arrived[rank]:
            with spans.span("wait", "wait", peer=f"stage {action.peer}", operation=str(action)):
                here = self._arrived[rank].wait_for(lambda: key in mailbox or self._aborted, self._deadline.remaining())
            self.check()
            if not here:
                raise self._deadline.error(peer=f"stage {action.peer}", operation=f"pipeline {action}", step=self._step)
            return mailbox.pop(key)

    def check(self) -> None:
        """Raise ``Aborted`` after ``abort``."""
        if self._aborted:
            raise Aborted

    def abort(self) -> None:
        """Wake all waits, and end the step for them."""
        self._aborted = True
        for condition in self._arrived:
            with condition:
                condition.notify_all()
