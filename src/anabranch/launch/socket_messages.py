"""Messages between the launcher and its processes: JSON with descriptors, each whole or refused."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence

Message = dict[str, object]

_MOST_BYTES, _MOST_DESCRIPTORS = 1 << 20, 16


def channel() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection."""
    return socket.socketpair(type=socket.SOCK_SEQPACKET)  # keeps messages apart


def send(channel: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send ``message``; the remote side has copies of ``descriptors``.

    Raises:
        OSError: nobody is there, or it is longer than some 200 KB.
    """
    # ASCII: file names that are not UTF-8 survive as escaped surrogates.
    socket.send_fds(channel, [json.dumps(message).encode()], descriptors)


def receive(channel: socket.socket) -> tuple[Message, list[int]] | None:
    """Return the next message and its descriptors; ``None`` at the end."""
    text, descriptors, _, _ = socket.recv_fds(channel, _MOST_BYTES, _MOST_DESCRIPTORS)
    return (json.loads(text), descriptors) if text else None
