"""Framed tensors and waits between processes, bounded in time and size.

Neither a message bus nor a scheduler: it knows no experts or tables, only verbs for which a server is given handlers.
Open ``client.py`` and ``server.py`` first, they draw the life of a request. ``drivers.py`` says on which thread a
request is read, ``frame.py`` how it is laid out in bytes, ``once.py`` why a retry does no harm, ``certificates.py``
which peers may connect, ``heap.py`` how a service gives memory back to the system; ``streams.py`` is the seam at which
sockets are replaced. ``beats.py`` stands apart: it tells whether the ranks of a ``torch.distributed`` job are still
alive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anabranch._lazy import lazy_names
from anabranch.deadline import Deadline

if TYPE_CHECKING:
    from anabranch.transport.beats import Beats
    from anabranch.transport.certificates import make_keys
    from anabranch.transport.client import Answer, Client, Outcome, Request
    from anabranch.transport.frame import Limits, RequestHeader, TensorHeader, allocate, pack, unpack
    from anabranch.transport.memory_network import MemoryTransport
    from anabranch.transport.server import Call, Server, ServerStatistics, Verb
    from anabranch.transport.sockets import SocketTransport
    from anabranch.transport.streams import Listener, Peer, Stream, Transport

__all__ = [
    "Answer",
    "Beats",
    "Call",
    "Client",
    "Deadline",
    "Limits",
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

if not TYPE_CHECKING:  # a checker would take every name for one of the package
    __getattr__, __dir__ = lazy_names(
        "anabranch.transport",
        ["certificates", "streams", "frame", "beats", "sockets", "memory_network", "client", "server"],
    )
