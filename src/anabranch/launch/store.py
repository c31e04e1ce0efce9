"""The job's rendezvous store, held by the launcher, so that it outlives every rank, and bound to the loopback alone.

torch's own server listens on every interface and answers anyone. Here it takes over a socket that is bound already:
no other host reaches it, and no port is guessed. (Only the store's non-libuv backend takes over a socket.)
"""

from __future__ import annotations

import socket

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # defined in C++

__all__ = ["host_store"]

_BACKLOG = 1024


def host_store() -> TCPStore:
    """A store that listens on a free port of 127.0.0.1 for as long as it is referenced."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
    port = listening.getsockname()[1]
    return TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
        use_libuv=False,
    )
