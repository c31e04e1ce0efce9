"""The job's rendezvous store, which outlives every rank, and is bound to one address: the loopback on one machine.

torch's own server listens on every interface and answers anyone. Here it adopts a socket that is already bound: no
other host reaches it, and no port is guessed. (Only the store's non-libuv backend adopts a socket.)
"""

from __future__ import annotations

import socket

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # defined in C++

__all__ = ["host_store"]


def host_store(listening: socket.socket) -> TCPStore:
    """Return a store that listens on ``listening``, which it then owns, as long as it is referenced."""
    host, port = listening.getsockname()[:2]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
        use_libuv=False,
    )
