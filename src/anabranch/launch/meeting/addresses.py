"""Addresses of a job's services: sockets in one private folder, or TCP ports under certificates made for the job.

All endpoints are known before any process listens, so all start at once. A port is kept by a socket of the launcher
that is bound but does not listen: no other process gets its number, and its service, restarted or not, also binds to
it.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from anabranch.transport import make_keys
from anabranch.transport.certificates import KEYS_VARIABLE
from anabranch.transport.endpoints import PrivateFolder, TcpEndpoint, parse_endpoint, split_endpoints
from anabranch.transport.redis_directory import RedisLink, is_local, is_redis_url


@dataclass(frozen=True, slots=True)
class ServiceAddresses:
    """The endpoints of a job's services.

    Attributes:
        directory: where the directory listens.
        parameters: where each parameter server does.
        keys: the directory of certificates; ``None`` where the kernel names the peer.
    """

    directory: str
    parameters: tuple[str, ...]
    keys: Path | None = None

    def expert(self, index: int) -> str:
        """Return where an expert process listens: on TCP any port is fine.

        >>> ServiceAddresses("unix:/run/directory", ()).expert(0)
        'unix:/run/expert-0'
        >>> ServiceAddresses("tcp://10.0.0.1:7000", ()).expert(0)
        'tcp://10.0.0.1:0'
        """
        if self.directory.startswith("tcp:"):
            return f"{self.directory.rpartition(':')[0]}:0"
        return f"unix:{Path(self.directory.removeprefix('unix:')).with_name(f'expert-{index}')}"


def check_directory(directory: str, *, experts: int, host: str | None, keys: str | None) -> None:
    """Refuse an external directory if others could not reach the experts of a job on this machine.

    Args:
        directory: endpoints of servers, or the URL of a Redis.
        experts: how many expert processes the job has.
        host: the address at which they listen; ``None`` for Unix sockets.
        keys: the directory of certificates that the environment names.

    Raises:
        ValueError: names the missing option.
        ModuleNotFoundError: without the ``redis`` extra.
    """
    shown = directory
    if is_redis_url(directory):
        shown, is_here = RedisLink(directory, 1.0).url, is_local(directory)
    else:
        is_here = not any(isinstance(parse_endpoint(one), TcpEndpoint) for one in split_endpoints(directory))
        if not is_here and not keys:
            raise ValueError(f"{shown} requires certificates; name their folder in {KEYS_VARIABLE}")
    if experts and host is None and not is_here:
        raise ValueError(
            f"clients of {shown} may be on another host, but the experts use Unix sockets; also give --host"
        )


@contextmanager
def private_place(servers: int) -> Iterator[ServiceAddresses]:
    """Unix sockets in a folder that only this user can enter, removed with the job.

    >>> with private_place(1) as place:
    ...     [endpoint.split("/")[-1] for endpoint in (place.directory, *place.parameters)]
    ['directory', 'parameters-0']
    """
    with PrivateFolder() as folder:
        yield ServiceAddresses(
            f"unix:{folder}/directory", tuple(f"unix:{folder}/parameters-{shard}" for shard in range(servers))
        )


@contextmanager
def tcp_place(host: str, servers: int, keys: str | os.PathLike[str] | None = None) -> Iterator[ServiceAddresses]:
    """Free TCP ports of ``host``, an address of this machine, with ``keys`` or else certificates made for the job.

    Raises:
        ValueError: not an address of this machine, or one that others cannot connect to.
        ModuleNotFoundError: without the ``tls`` extra.
    """
    with ExitStack() as stack:
        ports = [stack.enter_context(held_port(host)) for _ in range(servers + 1)]
        if keys is None:
            keys = stack.enter_context(PrivateFolder())
            make_keys(keys)
            (keys / "authority.key").unlink()  # no connection may be accepted later
        shown = f"[{host}]" if ":" in host else host
        directory, *parameters = [f"tcp://{shown}:{port}" for port in ports]
        yield ServiceAddresses(directory, tuple(parameters), Path(keys))


@contextmanager
def held_port(host: str) -> Iterator[int]:
    """Reserve a free port of ``host``, an address of this machine, for a service that also binds to it."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{host!r} is not an address of this machine: {error}") from None
    with sock:
        if ipaddress.ip_address(str(address[0])).is_unspecified:
            raise ValueError(
                f"{host!r} stands for all addresses of this machine and cannot be connected to; name one of them"
            )
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
        except OSError as error:
            raise ValueError(f"{host!r} is not an address of this machine: {error.strerror}") from None
        yield int(sock.getsockname()[1])
