"""How bytes and waits cross a boundary: framed tensors between processes, bounded in time and size.

Not a message bus and no scheduler: it knows neither experts nor tables, only verbs that a server is given handlers for.
Open ``client.py`` and ``server.py`` first, they draw the life of a request; ``drivers.py`` says on which thread it is
read, ``frame.py`` what it looks like in bytes, ``streams.py`` is the seam at which sockets are replaced, ``once.py``
why a retry does no harm, ``keys.py`` who may come in, ``heap.py`` how a service gives memory back to the system.
``beats.py`` is another matter: it tells whether the ranks of a ``torch.distributed`` job are still there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anabranch._lazy import lazy_names
from anabranch.deadline import Deadline

if TYPE_CHECKING:
    from anabranch.transport.beats import Beats
    from anabranch.transport.client import Answer, Client, Outcome, Request
    from anabranch.transport.frame import Limits, RequestHeader, TensorHeader, allocate, pack, unpack
    from anabranch.transport.keys import make_keys
    from anabranch.transport.memory import MemoryTransport
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
        "anabranch.transport", ["keys", "streams", "frame", "beats", "sockets", "memory", "client", "server"]
    )
