"""The resources of Ray that each role requests: fractions of a CPU, so that small jobs fit small nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping

from anabranch.launch.spec import Resources

__all__ = ["check_resources", "parse_resources", "resources_of"]

_ROLES = ("worker", "server", "expert")
_CPU = {"worker": 0.5, "server": 0.25, "expert": 0.25}


def parse_resources(text: str) -> Resources:
    """Return the parsed ``--resources``.

    >>> parse_resources('{"worker": {"CPU": 2, "GPU": 1}}')
    {'worker': {'CPU': 2, 'GPU': 1}}

    Raises:
        ValueError: other text.
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f'resources are JSON such as {{"worker": {{"CPU": 2, "GPU": 1}}}}, got {text!r}: {error}'
        ) from None
    check_resources(found)
    return dict(found)


def check_resources(found: object) -> None:
    """Raise a ``ValueError`` for invalid resources."""
    if not isinstance(found, Mapping) or not all(
        role in _ROLES
        and isinstance(wanted, Mapping)
        and all(
            isinstance(name, str) and isinstance(amount, int | float) and not isinstance(amount, bool) and amount >= 0
            for name, amount in wanted.items()
        )
        for role, wanted in found.items()
    ):
        raise ValueError(
            f'resources give amounts per role, such as {{"worker": {{"CPU": 2, "GPU": 1}}}}; roles are '
            f"{', '.join(_ROLES)}; got {found!r}"
        )


def resources_of(role: str, wanted: Resources, *, gpus: bool) -> dict[str, float]:
    """Return what one process of ``role`` requests.

    >>> resources_of("worker", {}, gpus=True)
    {'CPU': 0.5, 'GPU': 1.0}
    """
    own = {"CPU": _CPU[role], **({"GPU": 1.0} if gpus and role == "worker" else {}), **wanted.get(role, {})}
    return {name: float(amount) for name, amount in own.items() if amount}
