"""True power cuts: a small separate ext4 disk, shut down in the middle of a save without writing back its journal.

What survives is what was made durable and nothing else: the page cache is lost, as it is when the power goes. Killing
the process, as the other sweep does, cannot show a missing fsync; this can.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from saves import assert_whole, save

from anabranch import checkpoint
from anabranch.errors import CheckpointError
from anabranch.record.spans import on_fault_point

pytestmark = [pytest.mark.root, pytest.mark.slow]

# linux/ext4.h: EXT4_IOC_SHUTDOWN with EXT4_GOING_FLAGS_NOLOGFLUSH, _IOR('X', 125, __u32).
_SHUTDOWN, _WITHOUT_LOG_FLUSH = 0x8004587D, 2


class PowerCut(Exception):
    pass


class Disk:
    def __init__(self, image: Path, mountpoint: Path) -> None:
        self.image, self.mountpoint = image, mountpoint
        mountpoint.mkdir()
        with image.open("wb") as file:
            file.truncate(16 << 20)
        run("mkfs.ext4", "-q", "-F", "-O", "^metadata_csum", str(image))

    @contextlib.contextmanager
    def mounted(self) -> Iterator[Path]:
        # The journal is committed only when someone asks for it: five minutes are for ever here.
        run("mount", "-o", "loop,commit=300", str(self.image), str(self.mountpoint))
        try:
            yield self.mountpoint
        finally:
            run("umount", str(self.mountpoint))

    def cut_power(self) -> None:
        descriptor = os.open(self.mountpoint, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _WITHOUT_LOG_FLUSH))
        finally:
            os.close(descriptor)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    if done.returncode:
        pytest.skip(f"{command[0]} does not work here: {done.stderr.strip()[:200]}")


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    if os.geteuid():
        pytest.skip("a loop-mounted disk needs root")
    for program in ("mkfs.ext4", "mount", "umount"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    disk = Disk(tmp_path / "disk.img", tmp_path / "disk")
    with disk.mounted():
        try:
            disk.cut_power()
        except OSError as error:
            pytest.skip(f"this kernel cannot cut the power of an ext4 disk: {error}")
    return disk


def test_a_power_cut_at_any_point_leaves_the_new_or_the_acknowledged_checkpoint(disk: Disk) -> None:
    for nth in range(100):
        with disk.mounted() as mountpoint:
            save(mountpoint / f"{nth}", 1, size=5000)
            left = nth

            def cut(name: str) -> None:
                nonlocal left
                left -= 1
                if left < 0:
                    disk.cut_power()
                    raise PowerCut(name)

            point = "acknowledged"
            with on_fault_point(cut):
                try:
                    save(mountpoint / f"{nth}", 2, size=5000)
                except (PowerCut, CheckpointError) as error:
                    point = str(error)
                else:
                    disk.cut_power()
        with disk.mounted() as mountpoint:
            durable = point in ("acknowledged", "checkpoint.durable", "checkpoint.removed")
            assert_whole(checkpoint.read_newest(mountpoint / f"{nth}"), *((2,) if durable else (1, 2)))
            shutil.rmtree(mountpoint / f"{nth}")
        if point == "acknowledged":
            break
    assert nth > 10


def test_the_first_checkpoint_survives_a_power_cut_right_after_it(disk: Disk) -> None:
    with disk.mounted() as mountpoint:
        save(mountpoint / "new" / "directories", 1)
        disk.cut_power()
    with disk.mounted() as mountpoint:
        assert_whole(checkpoint.read_newest(mountpoint / "new" / "directories"), 1)
