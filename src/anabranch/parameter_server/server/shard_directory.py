"""``shard_directory``: the directory of one shard inside ``checkpoint_dir``, which all shards of a group may share.

::

    checkpoint_dir/shard-0-of-2    of this group
    checkpoint_dir/shard-1-of-2
    checkpoint_dir/shard-0-of-1    of another number of shards: its rows lie elsewhere, so nobody here can use it

A server started with the wrong number would begin empty beside the state that it was meant to continue from.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from anabranch.checkpoint.generations import complete_generations
from anabranch.checkpoint.reading import newest_manifest
from anabranch.errors import CheckpointError
from anabranch.parameter_server.server.durable.bodies import PREAMBLE_BYTES, body_numbers, body_path

__all__ = ["shard_directory"]

_NAME = re.compile(r"shard-(\d+)-of-(\d+)")
_SHOWN = 4


def shard_directory(checkpoint_dir: Path, shard: int, shards: int) -> Path:
    """Return the directory of one shard; it need not exist.

    Raises:
        CheckpointError: there is state of another number of shards, and none of this number.
    """
    others = _with_state(checkpoint_dir)
    if others and shards not in others:
        counts = " or ".join(map(str, sorted(others)))
        names = sorted(name for found in others.values() for name in found)
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        raise CheckpointError(
            f"{checkpoint_dir} holds the state of a different number of shards ({shown}), and shard {shard} of "
            f"{shards} would start empty: start with --shards {counts}, or give another --checkpoint-dir. To change "
            "the number of shards, save from the old servers with ParameterClient.save and load that into new ones"
        )
    return checkpoint_dir / f"shard-{shard}-of-{shards}"


def _with_state(checkpoint_dir: Path) -> dict[int, list[str]]:
    """Return the names of the directories that hold changes, by their number of shards."""
    found: dict[int, list[str]] = {}
    try:
        names = os.listdir(checkpoint_dir)
    except OSError:  # not there yet; if it cannot be used, the shard's own directory cannot, and that is said
        return found
    for name in names:
        match = _NAME.fullmatch(name)
        if match and _holds_changes(checkpoint_dir / name):
            found.setdefault(int(match[2]), []).append(name)
    return found


def _holds_changes(directory: Path) -> bool:
    """Return False if a shard's directory is known to hold no change; another server may have it open."""
    try:
        numbers = body_numbers(directory)
        if any(body_path(directory, number).stat().st_size > PREAMBLE_BYTES for number in numbers):
            return True
        newest = newest_manifest(directory)
    except (OSError, CheckpointError):
        return True
    saved = bool(complete_generations(directory)) and (newest is None or newest.step > 0)
    return saved or (not numbers and (directory / "log.db").exists())
