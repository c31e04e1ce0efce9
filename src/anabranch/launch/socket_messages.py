"""Messages between the launcher and its processes: a byte, with a descriptor of JSON and others."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence

Message = dict[str, object]

_MOST_DESCRIPTORS = 16


def send(channel: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send ``message``; the remote side has copies of ``descriptors``."""
    with open(os.memfd_create("message"), "w+") as file:  # one byte is never half sent, however long the environment is
        json.dump(message, file)  # ASCII: file names that are not UTF-8 survive as escaped surrogates
        file.flush()
        socket.send_fds(channel, [b"."], [file.fileno(), *descriptors])


def receive(channel: socket.socket) -> tuple[Message, list[int]] | None:
    """Return the next message and its descriptors; ``None`` at the end of the stream."""
    byte, descriptors, _, _ = socket.recv_fds(channel, 1, _MOST_DESCRIPTORS)
    if not byte:
        return None
    with open(descriptors[0]) as file:
        file.seek(0)  # the offset is the sender's
        message: Message = json.load(file)
    return message, descriptors[1:]
