"""The interface to the network: the part that the client and the server need.

``SocketTransport`` is the real network, ``MemoryTransport`` stays inside the process, and tests wrap either one to
lose, delay and repeat bytes. A stream never blocks: it sends or receives what it can now and returns how much, because
one thread serves many streams under one deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Peer:
    """Identity of the remote side, from its certificate or from the kernel.

    Attributes:
        name: for messages and counts.
        role: the role in its certificate; ``None`` for the owner of a Unix socket's directory, who has every role.
        job: its job: our certificate's, or the peer's if ours is for every job; ``"*"`` if both are.
            ``None`` without certificates.
        certificate: its certificate's SHA-256; ``None`` without one.
        plain: true over TCP without TLS.
    """

    name: str
    role: str | None = None
    job: str | None = None
    certificate: str | None = None
    plain: bool = False

    @property
    def on_this_host(self) -> bool:
        """True if the kernel vouches for the peer, rather than a network."""
        return self.certificate is None and not self.plain


NOBODY = Peer("nobody")
"""The peer of a stream whose handshake is not done."""


class Stream(Protocol):
    """A connection that carries bytes in order, without ever blocking.

    A lost or refused connection raises ``ConnectionError``, a peer without permission ``Unauthorized``.

    Attributes:
        descriptor: what to poll.
        ready_at: the ``time.monotonic`` moment before which polling is useless; 0.0 on a network that is not simulated.
        peer: the remote side; nobody until the handshake is done.
    """

    descriptor: int
    ready_at: float
    peer: Peer

    def handshake(self) -> bool:
        """Continue connecting and identifying the peer; true once that is done."""

    def wants_write(self) -> bool:
        """Return True if the handshake waits until the descriptor can be written to, rather than read."""

    def send(self, buffers: Sequence[memoryview]) -> int:
        """Take bytes from the start of ``buffers`` and return how many; 0 if it would block."""

    def receive_into(self, buffer: memoryview) -> int:
        """Fill the start of ``buffer`` and return how far; 0 if it would block. The end raises ``ConnectionError``."""

    def abort(self) -> None:
        """End the connection from any thread: the thread that polls it wakes and finds it lost."""

    def close(self) -> None:
        """Frees the descriptor; only for the thread that polls it."""

    def finish(self) -> None:
        """End our side: the peer reads what was sent to its end, and then finds the connection closed."""


class Listener(Protocol):
    """A socket that accepts streams.

    Attributes:
        endpoint: the address at which clients find it.
        job: the job in our certificate, ``"*"`` for every one; ``None`` without.
    """

    endpoint: str
    job: str | None

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a peer connects."""

    def accept(self) -> Stream | None:
        """Return the next stream, not yet identified, or ``None`` if no client is waiting."""

    def close(self) -> None:
        """Stop listening and remove the files created for it."""


class Transport(Protocol):
    """A network: creates listeners and connections."""

    def listen(self, endpoint: str | None) -> Listener:
        """Listen at ``endpoint``, or at a new endpoint if ``None``."""

    def connect(self, endpoint: str) -> Stream:
        """Begins to connect to ``endpoint``; ``handshake`` completes it."""
