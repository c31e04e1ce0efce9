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
from anabranch.launch.supervision.worker import ProcessSpec, RoleProcess, open_log
from anabranch.record.process import replace_text

ANSWER_SECONDS = 20.0
"""Seconds after which an actor that does not answer is lost."""

_STOPPED_SECONDS = 1.0  # what a call takes longer than it may where the process stood still


class RemoteProcess(RoleProcess):
    """A process in an actor; a thread follows the actor, writes what comes to the log and the screen, and sees the end.

    Args:
        spec: what was started.
        restarted: how often that was started before.
        actor: the Ray actor; its methods have ``remote``.
        pid: the process there.
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
        pid: int,
        fetch: Callable[[Any, float], Any],
        seen: Callable[[Elsewhere], None],
    ) -> None:
        self._actor = actor
        self._fetch = fetch
        self._seen = seen
        self._describe(spec, restarted)
        self.lost = False
        self._code = -signal.SIGKILL
        self.pid = pid
        self.pidfd, self._end = os.pipe()
        with open_log(self.log, anew=not spec.screen and not restarted) as log:
            shown = (log.fileno(),) * 2 if spec.screen is None else (spec.screen.stdout, spec.screen.stderr)
            self._targets = [os.dup(descriptor) for descriptor in shown]
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
            self._send("signal", number)

    def signal_group(self, number: int) -> None:
        """Stop or continue it."""
        if self.running:
            self._send("signal_group", number)

    def _send(self, method: str, number: int) -> None:
        with suppress(Exception):  # Ray's errors are many, and the follower sees the loss
            getattr(self._actor, method).remote(int(number))

    def reap(self) -> None:
        """Take the exit code of a process that has ended."""
        self._follower.join(ANSWER_SECONDS)
        self._ended(self._code)
        os.close(self.pidfd)
        if self.lost:  # its place is gone with it
            self.spec = replace(self.spec, restarts=None)

    def abandon(self) -> None:
        """Count a process whose node does not answer as killed."""
        self.lost = True
        self._ended(-signal.SIGKILL)

    def _ended(self, code: int) -> None:
        self.ended_at = time.time()
        self.exit_code = code
        self._seen("gone")

    def _follow(self) -> None:
        try:
            while True:
                news = self._news()
                self._keep_status(news)
                self._seen("stopped" if news.stopped else "running")
                for stream, data in news.output:
                    self._write(stream, data)
                if news.code is not None and not news.output:
                    self._code = news.code
                    return
        except Exception as error:  # noqa: BLE001  of Ray, whose errors are many: the actor is lost
            self.lost = True
            why = [*str(error).strip().splitlines(), repr(error)][0]
            self._write(2, f"anabranch: the Ray node of {self.role} {self.rank} was lost: {why}\n".encode())
        finally:
            for descriptor in (*self._targets, self._end):
                os.close(descriptor)

    def _write(self, stream: int, data: bytes) -> None:
        with suppress(OSError):
            view = memoryview(data)
            while view:
                view = view[os.write(self._targets[stream - 1], view) :]

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
