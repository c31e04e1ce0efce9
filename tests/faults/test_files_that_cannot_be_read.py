"""A durable directory with files that are not files, are damaged, or may not be read by the shard's user."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from mortal import SGD, SPEC, Shard, push, value

from anabranch.checkpoint.generations import manifest_path
from anabranch.errors import CheckpointError
from toys import forbid

NAME = "shard-0-of-1"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of killed shards with six pushes: one with an empty checkpoint, one with another after three."""
    directories = {}
    for name in ("fresh", "saved"):
        shard = Shard(tmp_path_factory.mktemp(name))
        with shard as client:
            client.init_table(SPEC, SGD)
            push(client, 3)
            if name == "saved":
                shard.server.checkpoint()
            push(client, 3)
        directories[name] = shard.directory
    return directories


@pytest.fixture
def fresh(written: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(written["fresh"], tmp_path / "copy") / NAME


@pytest.fixture
def saved(written: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(written["saved"], tmp_path / "copy") / NAME


def newest_log(directory: Path) -> Path:
    """Of those with records: a restart has begun another, which is empty."""
    return max(directory.glob("log-bodies-*"))


def newest_manifest(directory: Path) -> Path:
    return max(directory.glob("manifest-*"))


def newest_data(directory: Path) -> Path:
    return max(directory.glob("rows-*"))


def database(directory: Path) -> Path:
    return directory / "log.db"


def cut(path: Path) -> None:
    os.truncate(path, 200)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


def make_zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("harm", [cut, flip, make_zeros, Path.unlink, make_fifo])
def test_a_repair_of_the_only_checkpoint_is_reported_and_permanent(
    harm: Callable[[Path], None], fresh: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every push was served, without a word and without a new checkpoint, so the next start was refused again."""
    harm(manifest_path(fresh, 1))
    with pytest.raises(CheckpointError, match=r"(no checkpoint is complete|is missing).*--repair"):
        Shard(fresh.parent)
    caplog.clear()
    with Shard(fresh.parent, repair=True) as client:
        assert value(client) == 6
    [said] = [record.getMessage() for record in caplog.records if "a new checkpoint is written" in record.getMessage()]
    assert "is missing" in said if harm is Path.unlink else f"moved to {fresh / 'set-aside'}" in said
    assert harm is Path.unlink or os.path.lexists(fresh / "set-aside" / "manifest-00000001.json")
    for expected in (6, 7):
        with Shard(fresh.parent) as client:
            assert value(client) == expected
            push(client, 1)


def test_a_repair_sets_a_damaged_checkpoint_aside_also_if_an_older_one_is_whole(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flip(newest_data(saved))
    name = newest_data(saved).name
    with Shard(saved.parent, repair=True) as client:
        assert value(client) == 6
    assert "[2] of its checkpoints are damaged" in caplog.text
    assert (saved / "set-aside" / name).exists()
    caplog.clear()
    with Shard(saved.parent) as client:
        assert value(client) == 6
    assert "is damaged" not in caplog.text


@pytest.mark.parametrize("which", [newest_log, newest_data, database])
def test_an_irregular_file_is_damage_and_set_aside_by_a_repair(which: Callable[[Path], Path], saved: Path) -> None:
    """A FIFO was opened, and waited for without an end."""
    path = which(saved)
    make_fifo(path)
    if which is newest_data:  # the checkpoint before it is whole, and the log goes on from there
        with Shard(saved.parent) as client:
            assert value(client) == 6
    else:
        for _ in range(2):
            with pytest.raises(CheckpointError, match=rf"is damaged: {path}.*--repair"):
                Shard(saved.parent)
    with Shard(saved.parent, repair=True) as client:
        assert value(client) == (3 if which is newest_log else 6)
    with Shard(saved.parent) as client:
        assert value(client) == (3 if which is newest_log else 6)
    assert os.path.lexists(saved / "set-aside" / path.name)


def test_a_file_in_the_place_of_the_folder_set_aside_is_named_and_nothing_is_moved(saved: Path) -> None:
    make_zeros(newest_log(saved))
    before = {path.name for path in saved.glob("log-bodies-*")}
    (saved / "set-aside").touch()
    with pytest.raises(CheckpointError, match="set-aside cannot be created.*remove whatever has its name"):
        Shard(saved.parent, repair=True)
    (saved / "set-aside").unlink()
    assert {path.name for path in saved.iterdir()} >= before
    with Shard(saved.parent, repair=True) as client:
        assert value(client) == 3


@pytest.mark.parametrize("repair", [False, True])
@pytest.mark.parametrize("which", [newest_log, newest_manifest, newest_data])
def test_an_unreadable_file_is_never_mistaken_for_damaged_or_lost(
    which: Callable[[Path], Path], repair: bool, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repair gave up every change that its checkpoints held, which a chmod would have kept."""
    before = {path.name: path.read_bytes() for path in saved.iterdir() if not path.name.startswith("log.db")}
    with monkeypatch.context() as patched:
        forbid(which(saved), patched)
        with pytest.raises(CheckpointError, match=rf"{which(saved)} cannot be read: Permission denied.*chown or chmod"):
            Shard(saved.parent, repair=repair)
    assert {path.name: path.read_bytes() for path in saved.iterdir() if not path.name.startswith("log.db")} == before
    with Shard(saved.parent) as client:
        assert value(client) == 6
