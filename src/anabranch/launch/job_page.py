"""The data of a page about a job: its processes, the bytes between them, its loss and its pace."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from anabranch.launch.job_file import JOB_FILE
from anabranch.launch.job_status import JobStatus, RoleStatus, status_of
from anabranch.record.process import read_regular
from anabranch.record.words import in_words

__all__ = ["job_data", "trace_of"]


def job_data(folder: Path) -> dict[str, Any]:
    """Return what ``run.js`` draws of the job whose log folder this is.

    Raises:
        ValueError: it is none.
    """
    found = status_of(folder)
    return {
        "folder": str(folder),
        "ended": found.ended is not None,
        "seconds": found.seconds,
        "loss": [value if math.isfinite(value) else None for value in found.curve],
        "pace": list(found.pace),
        "saved": found.saved,
        "roles": [_role(role) for role in found.roles],
        "crossings": _crossings(found),
    }


def trace_of(folder: Path) -> Path | None:
    """Return the job's trace (``--trace``), if the file exists."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        path = Path(json.loads(read_regular(folder / JOB_FILE))["trace"])
        if path.is_file():
            return path
    return None


def _role(role: RoleStatus) -> dict[str, Any]:
    facts = {"steps": role.steps, "pid": role.pid, "endpoint": role.endpoint, **_numbers(role.service)}
    return {
        "name": role.name,
        "state": role.state,
        "waiting_for": role.waiting_for,
        "waiting_seconds": role.waiting_seconds,
        "operation": in_words(role.operation or ""),
        "facts": {name: value for name, value in facts.items() if value},
    }


def _numbers(service: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in service.items() if isinstance(value, int | float | str)}


def _crossings(found: JobStatus) -> list[dict[str, Any]]:
    """Return the traffic across each boundary, by worker; all servers count as one."""
    crossings = []
    for role in found.roles:
        for boundary, size in role.crossed.items():
            table = boundary.startswith("table ")
            other = "parameters" if table else "workers" if boundary == "workers" else boundary
            name = boundary if table else {"workers": "all_reduce", "pipeline": "stages"}.get(boundary, boundary)
            crossings.append({"from": role.name, "to": other, "name": name, "bytes": size})
    return crossings
