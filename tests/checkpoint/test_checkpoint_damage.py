"""A checkpoint that was changed after it was saved is found out, and the one before it is taken."""

from __future__ import annotations

import json
import os
import struct
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch import checkpoint
from anabranch.errors import CheckpointError
from toys import forbid

MODEL = {"w": torch.arange(6.0).reshape(2, 3), "half": torch.ones(3).bfloat16(), "none": torch.empty(0, 2)}


def save(directory: Path, step: int) -> Path:
    groups = {"model": {name: tensor + step for name, tensor in MODEL.items()}, "rank0": {"rng": torch.arange(5)}}
    return checkpoint.write(directory, groups, {"step": step, "wide": 2**80}, step=step)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A directory with two generations."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    return tmp_path


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "anabranch.checkpoint"]


@pytest.mark.parametrize("name", ["model-00000002.safetensors", "rank0-00000002.safetensors", "manifest-00000002.json"])
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_a_flipped_bit_in_any_byte_is_detected_and_the_previous_generation_taken(
    two: Path, caplog: pytest.LogCaptureFixture, name: str, every: int
) -> None:
    file = two / name
    whole = file.read_bytes()
    for index in range(0, len(whole), every):
        damaged = bytearray(whole)
        damaged[index] ^= 1 << index % 8
        file.write_bytes(damaged)
        caplog.clear()
        found = checkpoint.read(two)
        assert found.step == 1, f"bit {index % 8} of byte {index} went unseen"
        [warning] = warnings_of(caplog)
        assert f"generation 2 in {two} is damaged" in warning
        assert "using generation 1" in warning
        with pytest.raises(CheckpointError, match=r"generation 2 in .* is damaged"):
            checkpoint.read(two, generation=2).tensors(name.split("-")[0])
    file.write_bytes(whole)
    assert checkpoint.read(two).step == 2


@pytest.mark.parametrize("name", ["model-00000002.safetensors", "manifest-00000002.json"])
def test_a_file_cut_short_or_grown_is_detected(two: Path, name: str) -> None:
    file = two / name
    whole = file.read_bytes()
    for size in [*range(0, len(whole), 11), len(whole) - 1]:
        file.write_bytes(whole[:size])
        assert checkpoint.read(two).step == 1
    file.write_bytes(whole + b"\n")
    assert checkpoint.read(two).step == 1


def test_damage_between_choosing_and_loading_is_detected(tmp_path: Path) -> None:
    save(tmp_path, 1)
    found = checkpoint.read(tmp_path)
    file = tmp_path / "model-00000001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"tensor 'half' is damaged, its checksum is"):
        found.tensors("model")
    assert found.tensors("rank0")["rng"].tolist() == [0, 1, 2, 3, 4]


def test_without_a_complete_checkpoint_the_error_lists_each(two: Path) -> None:
    for generation in (1, 2):
        (two / f"manifest-{generation:08d}.json").write_text("{}")
    for read in (checkpoint.read, checkpoint.read_newest):
        with pytest.raises(CheckpointError) as caught:
            read(two)
        assert "generation 1 in" in str(caught.value)
        assert "generation 2 in" in str(caught.value)


def test_a_torn_save_is_passed_over_in_silence(two: Path, caplog: pytest.LogCaptureFixture) -> None:
    (two / "manifest-00000002.json").unlink()
    assert checkpoint.read(two).step == 1
    assert not warnings_of(caplog)


def test_a_damaged_newest_checkpoint_is_replaced_by_the_highest_complete_step_of_all_directories(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (10, 30):
        save(tmp_path / "a", step)
    for step in (5, 20):
        save(tmp_path / "b", step)
    data = bytearray((tmp_path / "a" / "model-00000002.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "a" / "model-00000002.safetensors").write_bytes(data)
    found = checkpoint.read_newest(tmp_path)
    assert found is not None
    assert (found.step, found.path.name) == (20, "b")
    [warning] = warnings_of(caplog)
    assert f"generation 2 in {tmp_path / 'a'} is damaged" in warning


@pytest.mark.parametrize("closed", ["closed", "."])
def test_a_directory_that_may_not_be_read_is_named_and_nothing_taken_in_its_place(
    closed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was passed over, and a job that resumed went back to an older step, or to the beginning."""
    save(tmp_path / "open", 1)
    save(tmp_path / "closed", 2)
    forbid(tmp_path / closed, monkeypatch, "listdir")
    forbid(tmp_path / closed, monkeypatch, "scandir")
    with pytest.raises(
        CheckpointError, match=rf"{tmp_path / closed} cannot be read: Permission denied.*chown or chmod"
    ):
        checkpoint.read_newest(tmp_path)
    with pytest.raises(CheckpointError, match=rf"{tmp_path / closed} cannot be read: Permission denied"):
        checkpoint.read(tmp_path / closed)


def test_files_of_the_file_system_itself_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lost+found").mkdir()
    forbid(tmp_path / "lost+found", monkeypatch, "scandir")
    assert checkpoint.read_newest(tmp_path) is None
    save(tmp_path, 1)
    found = checkpoint.read_newest(tmp_path)
    assert found is not None
    assert found.step == 1


@pytest.mark.parametrize("name", ["model-00000002.safetensors", "manifest-00000002.json"])
def test_an_unreadable_file_is_not_mistaken_for_a_damaged_one(
    two: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generation before it was taken, although a chmod would have brought this one back."""
    found = checkpoint.read(two)
    forbid(two / name, monkeypatch)
    message = rf"{name} cannot be read: Permission denied\. It is not treated as damaged or lost: let user .*chmod"
    reads: list[Callable[[], object]] = [
        lambda: checkpoint.read(two),
        lambda: checkpoint.read_newest(two),
        lambda: checkpoint.read(two, generation=2),
    ]
    for read in reads if name.startswith("manifest") else [*reads, lambda: found.tensors("model")]:
        with pytest.raises(CheckpointError, match=message) as caught:
            read()
        assert "is damaged" not in str(caught.value)
    assert checkpoint.read(two, generation=1).step == 1


@pytest.mark.parametrize(
    ("make", "what"),
    [(os.mkfifo, "is not a regular file"), (lambda path: path.symlink_to("nothing"), "cannot be opened: No such file")],
)
@pytest.mark.parametrize("name", ["model-00000002.safetensors", "manifest-00000002.json"])
def test_an_irregular_file_is_damage_and_not_waited_for(
    two: Path, name: str, make: Callable[[Path], None], what: str, caplog: pytest.LogCaptureFixture
) -> None:
    (two / name).unlink()
    make(two / name)
    assert checkpoint.read(two).step == 1
    [warning] = warnings_of(caplog)
    assert f"{name} {what}" in warning
    for step in (3, 4, 5):
        save(two, step)
    assert checkpoint.read(two).step == 5


def test_a_file_in_place_of_the_directory_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="there is no such directory"):
        checkpoint.read(tmp_path / "file")
    with pytest.raises(CheckpointError, match="cannot save step 1 to .*file: .*File exists"):
        save(tmp_path / "file", 1)


Fields = dict[str, Any]


def forge(path: Path, change: Callable[[Fields], object]) -> None:
    """Changes the manifest's fields and signs it anew, as no accident could."""
    fields = json.loads(path.read_bytes())["manifest"]
    change(fields)
    sign(path, json.dumps(fields))


def sign(path: Path, body: str) -> None:
    path.write_text(f'{{"crc32":"{zlib.crc32(body.encode()):08x}","manifest":{body}}}\n')


def of_w(**change: object) -> Callable[[Fields], object]:
    return lambda fields: fields["files"]["model"]["tensors"]["w"].update(change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            (
                lambda fields, group=group: fields.update(files={group: fields["files"]["model"]}),
                "the name of a checkpoint group consists of letters",
            )
            for group in ("../x", "/etc/passwd", ".lock", "", "a" * 101)
        ),
        (lambda fields: fields.update(format=1), "has format 1, but this version reads 2 alone"),
        (lambda fields: fields.pop("step"), "missing required field `step`"),
        (lambda fields: fields.update(step="7"), "Expected `int`, got `str`"),
        (lambda fields: fields.update(state={"$pickle": "x"}), r"the key '\$pickle', which this version does not know"),
        (of_w(shape=[2**40]), "model-00000001.safetensors has .* bytes, but had .* when saved"),
        (of_w(dtype="X32"), r"has tensors of \['X32'\], which this version does not know"),
    ],
)
def test_a_forged_manifest_is_refused_and_costs_no_memory(
    tmp_path: Path, change: Callable[[Fields], object], message: str
) -> None:
    path = save(tmp_path / "inner", 1)
    (tmp_path / "x-00000001.safetensors").write_bytes((path.parent / "model-00000001.safetensors").read_bytes())
    forge(path, change)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=message):
        checkpoint.read(path.parent)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("body", ["", "[]", "{", "[" * 100_000, '{"a":\xff}'], ids=lambda body: body[:12])
def test_a_manifest_that_is_not_our_json_is_refused(tmp_path: Path, body: str) -> None:
    sign(save(tmp_path, 1), body)
    with pytest.raises(CheckpointError, match="the manifest cannot be read"):
        checkpoint.read(tmp_path)


@pytest.mark.parametrize(
    ("old", "new"), [(b"[24,30]", b"[20,26]"), (b"[2,3]", b"[3,2]"), (b'"half"', b'"hell"'), (b'"F32"', b'"I32"')]
)
def test_a_header_that_says_other_than_the_manifest_is_refused(tmp_path: Path, old: bytes, new: bytes) -> None:
    save(tmp_path, 1)
    file = tmp_path / "model-00000001.safetensors"
    data = file.read_bytes()
    assert old in data
    file.write_bytes(data.replace(old, new, 1))
    with pytest.raises(CheckpointError, match="the header is damaged"):
        checkpoint.read(tmp_path)


def test_a_checkpoint_is_the_bytes_that_the_format_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version reads them: what changes them changes the number of the format, too."""
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    path = checkpoint.write(tmp_path, {"m": {"w": torch.tensor([1, -1], dtype=torch.int16)}}, (1, 2**63), step=9)
    body = (
        b'{"format":2,"step":9,"written":0,"state":{"$tuple":[1,{"$int":"0x8000000000000000"}]},"files":{"m":{'
        b'"bytes":100,"tensors":{"w":{"dtype":"I16","shape":[2],"crc32":668904070}}}}}'
    )
    assert path.read_bytes() == b'{"crc32":"%08x","manifest":%b}\n' % (zlib.crc32(body), body)
    header = b'{"__metadata__":{"format":"pt"},"w":{"dtype":"I16","shape":[2],"data_offsets":[0,4]}}'.ljust(88)
    data = (tmp_path / "m-00000001.safetensors").read_bytes()
    assert data == struct.pack("<Q", 88) + header + b"\x01\x00\xff\xff"
    assert checkpoint.read(tmp_path).state == (1, 2**63)
