"""The connection to a Ray cluster, and its errors, in one sentence each; the resources that a role requests there."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from anabranch.errors import AnabranchError
from anabranch.launch.spec import Resources

_VERSION = "2.60.0"
_ANSWER_SECONDS = 5.0
_CPU = {"worker": 0.5, "server": 0.25, "expert": 0.25}
_NOT_SHIPPED = (".git", ".venv*", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", "node_modules")


class RayError(AnabranchError):
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
        raise RayError(
            f"no Ray cluster can be used at {address or 'this machine'}: {' '.join(str(error).split())[:300]}; check "
            f"that `ray status` answers, that all nodes have this version, pip install 'ray=={_VERSION}', and the same "
            "Python, and give --address HOST:6379 of the head node"
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
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        raise RayError(
            f"--address {address!r} is not HOST:PORT of a head node, such as 10.0.0.1:6379; `ray start --head` shows "
            "it. Ray Client and job addresses cannot place a job's roles"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise RayError(
            f"nothing answers at {address} ({error}); start the head node there with `ray start --head --port {port}`, "
            "or give the --address that it showed"
        ) from None


def parse_resources(text: str) -> Resources:
    """Return the parsed ``--resources``.

    >>> parse_resources('{"worker": {"CPU": 2, "GPU": 1}}')
    {'worker': {'CPU': 2, 'GPU': 1}}

    Raises:
        ValueError: other text.
    """
    try:
        return check_resources(json.loads(text))
    except json.JSONDecodeError:
        return check_resources(text)


def check_resources(resources: Any) -> Resources:
    """Return valid resources of roles; raise a ``ValueError`` for others."""
    try:
        amounts = [amount for wanted in resources.values() for amount in wanted.values()]
        if resources.keys() <= _CPU.keys() and all(amount >= 0 for amount in amounts):
            return dict(resources)
    except (AttributeError, TypeError):
        pass
    raise ValueError(
        f'resources give amounts per role, such as {{"worker": {{"CPU": 2, "GPU": 1}}}}; roles are '
        f"{', '.join(_CPU)}; got {resources!r}"
    )


def resources_of(role: str, resources: Resources, *, gpus: bool) -> dict[str, float]:
    """Return what one process of ``role`` requests: fractions of a CPU, so that small jobs fit small nodes.

    >>> resources_of("worker", {}, gpus=True)
    {'CPU': 0.5, 'GPU': 1.0}
    """
    role = "server" if role == "parameters" else role
    own = {"CPU": _CPU[role], **({"GPU": 1.0} if gpus and role == "worker" else {}), **resources.get(role, {})}
    return {name: float(amount) for name, amount in own.items() if amount}
