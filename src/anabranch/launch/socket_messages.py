"""Messages between the launcher and its processes: JSON prefixed with its length, with open descriptors."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence

Message = dict[str, object]

_LENGTH_BYTES = 4
_MOST_DESCRIPTORS = 16


def send(channel: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send ``message``; the remote side has copies of ``descriptors``."""
    body = json.dumps(message).encode()  # ASCII: file names that are not UTF-8 survive as escaped surrogates
    socket.send_fds(channel, [len(body).to_bytes(_LENGTH_BYTES, "big")], descriptors)
    channel.sendall(body)


def receive(channel: socket.socket) -> tuple[Message, list[int]] | None:
    """Return the next message and its descriptors; ``None`` at the end of the stream."""
    head, descriptors, _, _ = socket.recv_fds(channel, _LENGTH_BYTES, _MOST_DESCRIPTORS)
    head += _read(channel, _LENGTH_BYTES - len(head)) if head else b""
    body = _read(channel, int.from_bytes(head, "big")) if len(head) == _LENGTH_BYTES else b""
    if not body:
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    message: Message = json.loads(body)
    return message, list(descriptors)


def _read(channel: socket.socket, size: int) -> bytes:
    """``size`` bytes, or none if the stream ends before."""
    parts = []
    while size:
        part = channel.recv(size)
        if not part:
            return b""
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
