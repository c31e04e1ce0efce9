"""Checkpoints on S3: ``s3fs`` against moto's S3 server, in its own process."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from saves import assert_whole, save

from anabranch import checkpoint
from anabranch.errors import CheckpointError
from anabranch.launch.meeting.addresses import held_port
from waiting import wait_until

# Looked for without an import, of seconds, which processes that run no slow test would make too.
ABSENT = [name for name in ("s3fs", "moto") if importlib.util.find_spec(name) is None]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(ABSENT), reason=f"not installed: {ABSENT}")]


@contextmanager
def moto(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (folder / "moto.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            wait_until(lambda: process.poll() is not None or listens(port))
            assert process.poll() is None, (folder / "moto.log").read_text()
            yield process
        finally:
            process.kill()
            process.wait(60.0)


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=60.0).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[bytes]]:
    import s3fs

    with held_port("127.0.0.1") as port, pytest.MonkeyPatch.context() as patch:
        facts = {"ACCESS_KEY_ID": "any", "SECRET_ACCESS_KEY": "any", "DEFAULT_REGION": "us-east-1"}
        for name, value in {**facts, "ENDPOINT_URL": f"http://127.0.0.1:{port}"}.items():
            patch.setenv(f"AWS_{name}", value)
        with moto(tmp_path_factory.mktemp("moto"), port) as process:
            s3fs.S3FileSystem().mkdir("bucket")
            yield process


@pytest.fixture
def url(server: subprocess.Popen[bytes], request: pytest.FixtureRequest) -> str:
    return f"s3://bucket/{request.node.name}"


def test_a_missing_bucket_is_named(server: subprocess.Popen[bytes]) -> None:
    with pytest.raises(CheckpointError, match="cannot upload model-00000001.safetensors to s3://nobody-has-it/run"):
        save("s3://nobody-has-it/run", 1)


def test_the_newest_of_several_is_read(url: str) -> None:
    for step in (1, 2, 3):
        save(url, step)
    assert_whole(checkpoint.read_newest(url), 3)
