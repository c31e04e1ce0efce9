"""Framed tensors and waits between processes, bounded in time and size.

It is neither a message bus nor a scheduler, and knows no experts or tables, only verbs and a server's handlers for
them. Open ``client.py`` and ``server/server.py`` first: they draw the life of a request. ``frame.py`` has its layout in
bytes; ``server/connection.py`` makes retries idempotent; ``certificates.py`` decides which peers may connect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anabranch._lazy import lazy_names
from anabranch.deadline import Deadline

if TYPE_CHECKING:
    from anabranch.transport.certificates import make_keys
    from anabranch.transport.client import Answer, Client, Outcome, Request
    from anabranch.transport.frame import RequestHeader, TensorHeader, allocate, pack, unpack
    from anabranch.transport.server.connection import Call, Checked, ServerStatistics, Verb
    from anabranch.transport.server.server import Server
    from anabranch.transport.sockets import MemoryTransport, SocketTransport
    from anabranch.transport.streams import Listener, Peer, Stream, Transport

__all__ = [
    "Answer",
    "Call",
    "Checked",
    "Client",
    "Deadline",
    "Listener",
    "MemoryTransport",
    "Outcome",
    "Peer",
    "Request",
    "RequestHeader",
    "Server",
    "ServerStatistics",
    "SocketTransport",
    "Stream",
    "TensorHeader",
    "Transport",
    "Verb",
    "allocate",
    "make_keys",
    "pack",
    "unpack",
]

if not TYPE_CHECKING:  # a type checker would accept every name as one of the package
    __getattr__, __dir__ = lazy_names(
        "anabranch.transport",
        ["certificates", "streams", "frame", "sockets", "client", "server.connection", "server.server"],
    )
