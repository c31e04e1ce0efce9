"""Where a Ray cluster of one test leaves its files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["ray_folder"]


@contextmanager
def ray_folder() -> Iterator[dict[str, str]]:
    """What the environment of a process needs, so that the Ray it starts leaves nothing outside a short folder."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled"}  # it would keep a token in the home directory
