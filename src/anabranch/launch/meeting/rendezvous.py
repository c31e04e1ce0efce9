"""The launcher's side of the rendezvous process, see ``rendezvous_process.py``."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

from anabranch.launch.python_program import PythonProgram
from anabranch.launch.socket_messages import Message, channel, receive, send

PROGRAM = PythonProgram("anabranch.launch.meeting.rendezvous_process", is_module=True)
"""Source of the process; its stdin is the channel to the launcher."""

_START_SECONDS = 120.0
_BACKLOG = 1024


class Rendezvous:
    """The launcher's side; a context manager whose end is the process's.

    Args:
        directory: where the process serves the directory; ``None`` for none.
        keys: the directory of certificates.
        host: where the rendezvous store listens.

    Attributes:
        port: where the rendezvous store listens, on ``host``.
        descriptor: the process's stdin.
    """

    def __init__(self, directory: str | None, keys: Path | None = None, host: str = "127.0.0.1") -> None:
        self._directory = directory
        self._keys = keys
        # No port is guessed, and by default no other host reaches it.
        self._listening = socket.create_server((host, 0), backlog=_BACKLOG)
        self.port = int(self._listening.getsockname()[1])
        try:
            with socket.socket(self._listening.family, socket.SOCK_DGRAM) as probe:
                probe.connect((host, self.port))  # sends nothing; gloo would look for minutes
        except OSError as error:
            self._listening.close()
            raise ConnectionError(
                f"this machine does not reach its own address {host}: {error.strerror}; is its loopback interface up?"
            ) from None
        self._channel, self._theirs = channel()
        self.descriptor = self._theirs.fileno()

    def wait_until_ready(self) -> None:
        """Pass the process, which runs, its configuration; return when the directory answers, or has failed."""
        self._theirs.close()
        self._channel.settimeout(_START_SECONDS)
        keys = None if self._keys is None else str(self._keys)
        with self._listening, suppress(OSError):  # it died: its watcher reports it
            facts: Message = {"directory": self._directory, "keys": keys}
            send(self._channel, facts, [self._listening.fileno()])
            if self._directory is not None:
                receive(self._channel)

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in (self._channel, self._theirs, self._listening):
            sock.close()
