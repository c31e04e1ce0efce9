"""The connection to a Ray cluster, and its errors, in one sentence each."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

__all__ = ["RayError", "connected", "import_ray"]

_VERSION = "2.60.0"
_ANSWER_SECONDS = 5.0
_NOT_SHIPPED = (".git", ".venv*", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", "node_modules")


class RayError(Exception):
    """The cluster cannot run the job; the message names the cure."""


def import_ray() -> ModuleType:
    """Return the module ``ray``.

    Raises:
        ModuleNotFoundError: it is not installed.
        RayError: it is another version.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ModuleNotFoundError("--engine ray needs Ray: pip install 'anabranch[ray]'", name="ray") from None
    if ray.__version__ != _VERSION:
        raise RayError(
            f"Ray {ray.__version__} is installed here, but this version of Anabranch needs {_VERSION}: "
            f"pip install 'ray=={_VERSION}', on all nodes"
        )
    found: ModuleType = ray
    return found


@contextmanager
def connected(ray: ModuleType, address: str | None) -> Iterator[None]:
    """Be connected to the cluster at ``address``, to which the current directory is shipped.

    An existing connection is used, with the files it ships, and is kept open.

    Raises:
        RayError: nothing answers there, or it is another version of Ray.
    """
    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS") or None
    _check_answers(address)
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            configure_logging=False,
            runtime_env={"working_dir": os.getcwd(), "excludes": list(_NOT_SHIPPED)},
        )
    except Exception as error:  # noqa: BLE001  Ray's are of many kinds
        words = " ".join(str(error).split())
        if "ersion mismatch" in words:
            raise RayError(
                f"the cluster at {address} runs a different version of Ray or Python than this process (Ray "
                f"{_VERSION}): install the same on all nodes, pip install 'ray=={_VERSION}'. Ray says: {words[:300]}"
            ) from None
        raise RayError(
            f"no Ray cluster can be used at {address or 'this machine'}: {words[:300]}; check that `ray status` "
            "answers, and give --address HOST:6379 of its head node"
        ) from None
    # Ray prints events of its nodes on stdout, which is rank 0's; the pinned version has this switch.
    shown, ray._private.worker._worker_logs_enabled = ray._private.worker._worker_logs_enabled, False
    try:
        yield
    finally:
        ray.shutdown()
        ray._private.worker._worker_logs_enabled = shown


def _check_answers(address: str | None) -> None:
    if address in (None, "auto", "local"):
        return
    assert address is not None
    if "://" in address:
        raise RayError(
            f"--address {address}: give HOST:PORT of the head node, such as 10.0.0.1:6379, on a machine of the "
            "cluster; Ray Client and job addresses cannot place a job's roles"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise RayError(f"--address {address!r} is not HOST:PORT; `ray start --head` shows that of the head node")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise RayError(
            f"nothing answers at {address} ({error}); start the head node there with `ray start --head --port {port}`, "
            "or give the --address that it showed"
        ) from None
