"""The process in which a job's members find one another: it holds the rendezvous store and the directory.

Apart from the launcher, so that the launcher imports no torch, and a launcher that is paused holds nobody up. It is
there before all others, outlives them, and dies with the launcher.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

from anabranch.launch.channel import Message, receive, send
from anabranch.launch.program import Program

__all__ = ["EXPERT_MARK", "PROGRAM", "Rendezvous", "expert_mark", "main", "serve"]

PROGRAM = Program("anabranch.launch.rendezvous", is_module=True)
"""What the process runs; its stdin is the channel to the launcher."""

EXPERT_MARK = "anabranch-expert"
"""The prefix of the uids under which expert processes are announced."""

_START_SECONDS = 120.0
_ANSWER_SECONDS = 5.0
_BACKLOG = 1024


def expert_mark(index: int) -> str:
    """The uid under which the expert process ``index`` itself is announced, beside its experts.

    >>> expert_mark(0)
    'anabranch-expert.0'
    """
    return f"{EXPERT_MARK}.{index}"


class Rendezvous:
    """The launcher's side; a context manager whose end is the process's.

    Attributes:
        port: where the rendezvous store listens, on 127.0.0.1.
        descriptor: what the process gets as its stdin.
    """

    def __init__(self, directory: str | None, keys: Path | None = None) -> None:
        self._directory = directory
        self._keys = keys
        # No other host reaches it, and no port is guessed.
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        self.port = int(self._listening.getsockname()[1])
        self._channel, self._theirs = socket.socketpair()
        self.descriptor = self._theirs.fileno()

    def started(self) -> None:
        """Hands the process what it serves; call it once it runs."""
        self._theirs.close()
        self._channel.settimeout(_START_SECONDS)
        keys = None if self._keys is None else str(self._keys)
        with self._listening, suppress(OSError):  # it died: whoever watches it says so
            send(self._channel, {"directory": self._directory, "keys": keys}, [self._listening.fileno()])

    def wait_until_ready(self) -> None:
        """Returns when the directory answers, or will not."""
        if self._directory is not None:
            with suppress(OSError):
                receive(self._channel)
        self._channel.settimeout(_ANSWER_SECONDS)

    def is_announced(self, uid: str) -> bool:
        """Whether somebody serves ``uid``."""
        try:
            send(self._channel, {"uid": uid})
            received = receive(self._channel)
        except OSError:
            return False
        return received is not None and bool(received[0]["found"])

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sock in (self._channel, self._theirs, self._listening):
            sock.close()


def main() -> None:
    """Serves until the launcher closes the channel on stdin."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the job decides when it is over
        signal.signal(number, signal.SIG_IGN)
    channel = socket.socket(fileno=os.dup(0))
    received = receive(channel)
    if received is None:
        return
    facts, (listening,) = received
    with ExitStack() as stack:
        serve(channel, facts, socket.socket(fileno=listening), stack)


def serve(channel: socket.socket, facts: Mapping[str, object], listening: socket.socket, stack: ExitStack) -> None:
    """Answers over ``channel`` until its end."""
    from anabranch.experts import DirectoryServer
    from anabranch.launch.store import host_store

    store = host_store(listening)
    directory = None
    if facts["directory"] is not None:
        keys = facts["keys"]
        server = DirectoryServer(str(facts["directory"]), keys=None if keys is None else str(keys))
        directory = stack.enter_context(server).directory
        send(channel, {"ready": True})
    with suppress(OSError):
        while (received := receive(channel)) is not None:
            answer: Message = {"found": directory is not None and bool(directory.lookup([str(received[0]["uid"])]))}
            send(channel, answer)
    del store


if __name__ == "__main__":
    main()
    sys.exit(0)
