"""``RemoteProcess``: a role's process on another node, with the supervisor's interface for local processes."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from anabranch.launch.job_file import Elsewhere
from anabranch.launch.job_status import ahead
from anabranch.launch.ray.role_actor import RoleEvents
from anabranch.launch.supervision.outcome import Exit
from anabranch.launch.supervision.worker import ProcessSpec, RoleProcess
from anabranch.record.process import replace_text

__all__ = ["ANSWER_SECONDS", "RemoteProcess"]

ANSWER_SECONDS = 20.0
"""Seconds after which an actor that does not answer is lost."""

_STOPPED_SECONDS = 1.0  # what a call takes longer than it may where the process stood still


class RemoteProcess(RoleProcess):
    """A process in an actor; a thread follows the actor, writes what comes to the log and the screen, and sees the end.

    Args:
        spec: what to start.
        restarted: how often that was started before.
        actor: the Ray actor; its methods have ``remote``.
        begin: starts the process there and returns its id.
        fetch: waits for a call's result, as ``ray.get`` does; raises when the actor is lost.
        seen: called with the process's state, on any thread, as often as it is looked at.

    Attributes:
        lost: whether the actor is lost.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        restarted: int,
        actor: Any,
        begin: Callable[[], int],
        fetch: Callable[[Any, float], Any],
        seen: Callable[[Elsewhere], None] = lambda state: None,
    ) -> None:
        self._actor = actor
        self._begin = begin
        self._fetch = fetch
        self._seen = seen
        self._describe(spec, restarted)
        self.lost = False
        self._code = -signal.SIGKILL
        self.pid = begin()
        self.pidfd, self._end = os.pipe()
        self._screen: dict[int, int] = {}
        if spec.screen is not None:
            self._screen = {1: os.dup(spec.screen.stdout), 2: os.dup(spec.screen.stderr)}
        elif not restarted:
            self.log.write_bytes(b"")
        self._follower = threading.Thread(target=self._follow, name=f"anabranch-{self.role}-{self.rank}", daemon=True)
        self._follower.start()

    @property
    def exit(self) -> Exit:
        """Its exit."""
        return replace(super().exit, node_lost=self.lost and not self.stopped)

    def signal(self, number: signal.Signals) -> None:
        """Send ``number``; does nothing if the actor is lost."""
        if self.running:
            self.stopped = True
            with suppress(Exception):  # Ray's errors are many, and the follower sees the loss
                self._actor.signal.remote(int(number))

    def signal_group(self, number: int) -> None:
        """Stop or continue it."""
        if self.running:
            with suppress(Exception):  # as in ``signal``
                self._actor.signal_group.remote(int(number))

    def reap(self) -> None:
        """Take the exit code of a process that has ended."""
        self._follower.join(ANSWER_SECONDS)
        self.ended_at = time.time()
        self.exit_code = self._code
        os.close(self.pidfd)
        if self.lost:  # its place is gone with it
            self.spec = replace(self.spec, restarts=None)
        self._seen("gone")

    def abandon(self) -> None:
        """Count a process whose node does not answer as killed."""
        self.lost = True
        self.ended_at = time.time()
        self.exit_code = -signal.SIGKILL
        self._seen("gone")

    def _follow(self) -> None:
        log = self.log.open("ab", buffering=0)
        try:
            while True:
                news = self._news()
                self._keep_status(news)
                self._seen("stopped" if news.stopped else "running")
                for stream, data in news.output:
                    with suppress(OSError):
                        _write_all(self._screen.get(stream, log.fileno()), data)
                if news.code is not None and not news.output:
                    self._code = news.code
                    return
        except Exception as error:  # noqa: BLE001  of Ray, whose errors are many: the actor is lost
            self.lost = True
            why = str(error).strip().splitlines()
            with suppress(OSError):
                line = f"anabranch: the Ray node of {self.role} {self.rank} was lost: {why[0] if why else error!r}"
                _write_all(self._screen.get(2, log.fileno()), line.encode() + b"\n")
        finally:
            log.close()
            for descriptor in self._screen.values():
                os.close(descriptor)
            os.close(self._end)

    def _news(self) -> RoleEvents:
        """Return what came since the last call; asks again if this process was stopped (Ctrl-Z) in between."""
        asked = time.monotonic()
        news: RoleEvents
        try:
            news = self._fetch(self._actor.follow.remote(), ANSWER_SECONDS)
        except Exception:
            if time.monotonic() - asked < ANSWER_SECONDS + _STOPPED_SECONDS:
                raise
            news = self._fetch(self._actor.follow.remote(), ANSWER_SECONDS)
        return news

    def _keep_status(self, news: RoleEvents) -> None:
        """Write the process's reported status for ``anabranch status``, in times of this machine's clock."""
        if news.status:
            status = ahead(json.loads(news.status), time.monotonic() - news.now)
            with suppress(OSError):  # a full disk, a folder that was removed
                replace_text(self.log.with_suffix(".status"), json.dumps(status) + "\n")


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
