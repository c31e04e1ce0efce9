"""A real ``redis-server``, on a loopback port and a Unix socket; skipped if it is not installed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from anabranch.launch.meeting.addresses import held_port
from waiting import wait_until

_PROGRAM = shutil.which("redis-server")


class RealRedis:
    """Starts with its ``with`` block and ends with it; a port of its own stays the same over ``stop`` and ``start``.

    Attributes:
        url: its TCP address.
        socket_url: its Unix socket's.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        self._folder = folder
        self._options = options
        self._stack = ExitStack()
        self._port = self._stack.enter_context(held_port("127.0.0.1"))
        self.url = f"redis://127.0.0.1:{self._port}"
        self.socket_url = f"unix://{folder}/redis.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self._said = 0  # bytes of the log of those that were stopped

    @property
    def port(self) -> int:
        return self._port

    def start(self) -> None:
        """Start it, and return once it answers."""
        assert _PROGRAM is not None
        socket = self._folder / "redis.sock"
        said = (self._folder / "redis.log").open("ab")
        self._said = said.tell()
        with said:
            self._process = subprocess.Popen(
                [
                    *(_PROGRAM, "--bind", "127.0.0.1", "--port", str(self._port), "--unixsocket", str(socket)),
                    *("--save", "", "--appendonly", "no", "--dir", str(self._folder), *self._options),
                ],
                stdout=said,
                stderr=said,
            )
        wait_until(self._answers)

    def stop(self) -> None:
        """Kill it, with all its data."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(60.0)
            self._process = None

    def client(self, **facts: Any) -> Any:
        """Return a separate connection, to read and change the table."""
        from redis import Redis

        return Redis(unix_socket_path=str(self._folder / "redis.sock"), **facts)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "redis.log").read_text()
        return "Ready to accept connections" in (self._folder / "redis.log").read_text()[self._said :]

    def __enter__(self) -> RealRedis:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._stack.close()


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RealRedis]:
    """An empty Redis."""
    pytest.importorskip("redis", reason="the package redis is not installed")
    if _PROGRAM is None:
        pytest.skip("no redis-server on this machine (Debian: apt-get install redis-server)")
    folder = tmp_path / "redis"
    folder.mkdir(mode=0o700)
    with RealRedis(folder) as running:
        yield running
