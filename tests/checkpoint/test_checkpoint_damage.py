"""A checkpoint that was changed after it was saved is found out, and the one before it is taken."""

from __future__ import annotations

import errno
import json
import logging
import os
import struct
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from anabranch import checkpoint
from anabranch.checkpoint import manifest as manifests
from anabranch.errors import CheckpointError

MODEL = {"w": torch.arange(6.0).reshape(2, 3), "half": torch.ones(3).bfloat16(), "none": torch.empty(0, 2)}


def save(directory: Path, step: int) -> Path:
    groups = {"model": {name: tensor + step for name, tensor in MODEL.items()}, "rank0": {"rng": torch.arange(5)}}
    return checkpoint.write(directory, groups, {"step": step, "wide": 2**80}, step=step)


def files_of(directory: Path, generation: int) -> list[Path]:
    return sorted(directory.glob(f"*-{generation:08d}.*"))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "anabranch.checkpoint"]


@pytest.mark.parametrize("name", ["model-00000002.safetensors", "rank0-00000002.safetensors", "manifest-00000002.json"])
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_a_flipped_bit_in_any_byte_is_detected_and_the_previous_generation_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, every: int
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    file = tmp_path / name
    whole = file.read_bytes()
    for index in range(0, len(whole), every):
        damaged = bytearray(whole)
        damaged[index] ^= 1 << index % 8
        file.write_bytes(damaged)
        caplog.clear()
        found = checkpoint.read(tmp_path)
        assert found.step == 1, f"bit {index % 8} of byte {index} went unseen"
        [warning] = warnings_of(caplog)
        assert f"generation 2 in {tmp_path} is damaged" in warning
        assert "using generation 1" in warning
        with pytest.raises(CheckpointError, match=r"generation 2 in .* is damaged"):
            checkpoint.read(tmp_path, generation=2).tensors(name.split("-")[0])
    file.write_bytes(whole)
    assert checkpoint.read(tmp_path).step == 2


@pytest.mark.parametrize("name", ["model-00000002.safetensors", "manifest-00000002.json"])
def test_a_file_cut_short_or_grown_is_detected(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    file = tmp_path / name
    whole = file.read_bytes()
    for size in [*range(0, len(whole), 11), len(whole) - 1]:
        file.write_bytes(whole[:size])
        assert checkpoint.read(tmp_path).step == 1
    file.write_bytes(whole + b"\n")
    assert checkpoint.read(tmp_path).step == 1


def test_a_file_that_is_gone_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "model-00000002.safetensors").unlink()
    assert checkpoint.read(tmp_path).step == 1
    [warning] = warnings_of(caplog)
    assert "model-00000002.safetensors cannot be opened: No such file" in warning


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


def test_without_a_complete_checkpoint_the_error_lists_each(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    for generation in (1, 2):
        (tmp_path / f"manifest-{generation:08d}.json").write_text("{}")
    for read in (checkpoint.read, checkpoint.read_newest):
        with pytest.raises(CheckpointError) as caught:
            read(tmp_path)
        assert "generation 1 in" in str(caught.value)
        assert "generation 2 in" in str(caught.value)


def test_a_torn_save_is_passed_over_in_silence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "manifest-00000002.json").unlink()
    assert checkpoint.read(tmp_path).step == 1
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


def forbid(name: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user who may not open or list it; root may, who runs many a test."""
    real = getattr(os, name)

    def refuse(given: str | Path, *rest: int, **named: int) -> object:
        if os.fspath(given) == str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(given))
        return real(given, *rest, **named)

    monkeypatch.setattr(os, name, refuse)


@pytest.mark.parametrize("closed", ["closed", "."])
def test_a_directory_that_may_not_be_read_is_named_and_nothing_taken_in_its_place(
    closed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was passed over, and a job that resumed went back to an older step, or to the beginning."""
    save(tmp_path / "open", 1)
    save(tmp_path / "closed", 2)
    forbid("listdir", tmp_path / closed, monkeypatch)
    forbid("scandir", tmp_path / closed, monkeypatch)
    with pytest.raises(
        CheckpointError, match=rf"{tmp_path / closed} cannot be read: Permission denied.*chown or chmod"
    ):
        checkpoint.read_newest(tmp_path)
    with pytest.raises(CheckpointError, match=rf"{tmp_path / closed} cannot be read: Permission denied"):
        checkpoint.read(tmp_path / closed)


def test_files_of_the_file_system_itself_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lost+found").mkdir()
    forbid("scandir", tmp_path / "lost+found", monkeypatch)
    assert checkpoint.read_newest(tmp_path) is None
    save(tmp_path, 1)
    found = checkpoint.read_newest(tmp_path)
    assert found is not None
    assert found.step == 1


@pytest.mark.parametrize("name", ["model-00000002.safetensors", "manifest-00000002.json"])
def test_an_unreadable_file_is_not_mistaken_for_a_damaged_one(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generation before it was taken, although a chmod would have brought this one back."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    found = checkpoint.read(tmp_path)
    forbid("open", tmp_path / name, monkeypatch)
    message = rf"{name} cannot be read: Permission denied\. It is not treated as damaged or lost: let user .*chmod"
    reads: list[Callable[[], object]] = [
        lambda: checkpoint.read(tmp_path),
        lambda: checkpoint.read_newest(tmp_path),
        lambda: checkpoint.read(tmp_path, generation=2),
    ]
    for read in reads if name.startswith("manifest") else [*reads, lambda: found.tensors("model")]:
        with pytest.raises(CheckpointError, match=message) as caught:
            read()
        assert "is damaged" not in str(caught.value)
    assert checkpoint.read(tmp_path, generation=1).step == 1


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def dangle(path: Path) -> None:
    path.symlink_to(path.parent / "nothing")


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (make_fifo, "is a FIFO, not a regular file"),
        (make_device, "is a character device, not a regular file"),
        (Path.mkdir, "is a directory, not a regular file"),
        (dangle, "cannot be opened: it is a dangling link"),
    ],
)
@pytest.mark.parametrize("name", ["model-00000002.safetensors", "manifest-00000002.json"])
def test_an_irregular_file_is_damage_and_not_waited_for(
    tmp_path: Path, name: str, make: Callable[[Path], None], what: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / name).unlink()
    make(tmp_path / name)
    assert checkpoint.read(tmp_path).step == 1
    [warning] = warnings_of(caplog)
    assert f"{name} {what}" in warning
    for step in (3, 4, 5):
        save(tmp_path, step)
    assert checkpoint.read(tmp_path).step == 5


def test_a_manifest_longer_than_any_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.truncate(save(tmp_path, 1), 1 << 36)  # takes no space
    with pytest.raises(CheckpointError, match=r"has 68719476736 bytes, more than the 268435456 of any manifest"):
        checkpoint.read(tmp_path)
    monkeypatch.setattr(manifests, "LONGEST", 1000)
    with pytest.raises(ValueError, match=r"the manifest would have \d+ bytes, .* save long values of the state as"):
        checkpoint.write(tmp_path / "long", {}, {"text": "x" * 1000}, step=1)
    assert checkpoint.read_newest(tmp_path / "long") is None


def test_a_file_in_place_of_the_directory_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="there is no such directory"):
        checkpoint.read(tmp_path / "file")
    with pytest.raises(CheckpointError, match="cannot save step 1 to .*file: .*File exists"):
        save(tmp_path / "file", 1)


Fields = dict[str, object]


def forge(path: Path, change: Callable[[Fields], None]) -> None:
    """Changes the manifest's fields and signs it anew, as no accident could."""
    fields = json.loads(path.read_bytes())["manifest"]
    change(fields)
    sign(path, json.dumps(fields))


def sign(path: Path, body: str) -> None:
    path.write_text(f'{{"crc32":"{zlib.crc32(body.encode()):08x}","manifest":{body}}}\n')


def renamed(group: str) -> Callable[[Fields], None]:
    def change(fields: Fields) -> None:
        fields["files"] = {group: fields["files"]["model"]}  # type: ignore[index]

    return change


@pytest.mark.parametrize("group", ["../x", "/etc/passwd", "a/b", "..", ".lock", "", "a\x00b", "a" * 101])
def test_a_manifest_that_names_a_path_is_refused(tmp_path: Path, group: str) -> None:
    path = save(tmp_path / "inner", 1)
    data = (tmp_path / "inner" / "model-00000001.safetensors").read_bytes()
    (tmp_path / "x-00000001.safetensors").write_bytes(data)
    forge(path, renamed(group))
    with pytest.raises(CheckpointError, match="the name of a checkpoint group consists of letters"):
        checkpoint.read(tmp_path / "inner")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda fields: fields.update(format=2), "has format 2, but this version reads up to 1; update"),
        (lambda fields: fields.pop("step"), "missing required field `step`"),
        (lambda fields: fields.update(extra=1), "unknown field `extra`"),
        (lambda fields: fields.update(step="7"), "Expected `int`, got `str`"),
        (lambda fields: fields.update(files=[]), "Expected `object`, got `array`"),
        (lambda fields: fields.update(state={"$pickle": "x"}), r"the key '\$pickle', which this version does not know"),
        (lambda fields: fields.update(state={"$int": "0x1", "b": 1}), r"the key '\$int'"),
        (lambda fields: fields.update(state={"$int": 3}), r"a '\$int' that cannot be read"),
        (lambda fields: fields.update(state={"$float": "00"}), r"a '\$float' that cannot be read"),
        (lambda fields: fields.update(state={"$bytes": "?"}), r"a '\$bytes' that cannot be read"),
        (lambda fields: fields.update(state={"$dict": [[1]]}), r"a '\$dict' that cannot be read"),
        (lambda fields: fields.update(state={"$dict": [[[], 1]]}), r"a '\$dict' that cannot be read"),
        (lambda fields: fields.update(state={"$tuple": 1}), r"a '\$tuple' that cannot be read"),
    ],
)
def test_a_manifest_of_another_shape_is_refused(tmp_path: Path, change: Callable[[Fields], None], message: str) -> None:
    forge(save(tmp_path, 1), change)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.read(tmp_path)


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[]",
        "3",
        "null",
        "{",
        "[" * 100_000,
        '{"format":' + "9" * 5000 + "}",
        '{"format":1,"format":1}',
        '{"a":\xff}',
    ],
    ids=lambda body: body[:12],
)
def test_a_manifest_that_is_not_our_json_is_refused(tmp_path: Path, body: str) -> None:
    sign(save(tmp_path, 1), body)
    with pytest.raises(CheckpointError, match=r"the manifest (cannot be read|has format)"):
        checkpoint.read(tmp_path)


def test_keys_that_stand_twice_in_a_manifest_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    body = json.dumps(json.loads(path.read_bytes())["manifest"])
    sign(path, body.replace('"step": 1', '"step": 1, "step": 2', 1))
    with pytest.raises(CheckpointError, match="the key 'step' appears twice"):
        checkpoint.read(tmp_path)


def forge_header(directory: Path, change: Callable[[str], str]) -> None:
    """Changes the text of the model's header, and makes the manifest agree with its length and checksum."""
    file = directory / "model-00000001.safetensors"
    data = file.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    text = change(data[8:end].decode()).encode()
    header = struct.pack("<Q", len(text)) + text
    file.write_bytes(header + data[end:])

    def agree(fields: Fields) -> None:
        record = fields["files"]["model"]  # type: ignore[index]
        record.update(bytes=len(header) + len(data) - end, header_bytes=len(header), header_crc32=zlib.crc32(header))

    forge(directory / "manifest-00000001.json", agree)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"half"', '"w"', "the key 'w' appears twice"),
        ('"half":{', '"half":{"dtype":"F32",', "the key 'dtype' appears twice"),
        ("[24,30]", "[20,26]", "the header says bytes 20 to 26"),
        ("[24,30]", "[26,32]", "the header says bytes 26 to 32"),
        ("[24,30]", "[24,36]", "the header says bytes 24 to 36"),
        ("[24,30]", "[-24,-30]", "the header says bytes"),
        ("[24,30]", "[24]", "the header cannot be read"),
        ("[2,3]", "[2,4]", r"shape \[2, 4\] takes 32 bytes from 0 on"),
        ("[2,3]", "[1099511627776,3]", r"takes 13194139533312 bytes"),
        ("[2,3]", "[-2,-3]", r"claims to be F32 of shape \[-2, -3\]"),
        ("[2,3]", "[3,2]", "holds different tensors than the manifest says"),
        ("[0,2]", "[0,99999999999999999999]", "holds different tensors|cannot be read"),
        ('"F32"', '"X32"', "claims to be X32"),
        ('"BF16"', '"F16"', "holds different tensors than the manifest says"),
        ('"half"', '"other"', "holds different tensors than the manifest says"),
        ('{"__metadata__"', "[", "the header cannot be read"),
    ],
)
def test_a_false_header_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    save(tmp_path, 1)
    forge_header(tmp_path, lambda text: text)
    assert checkpoint.read(tmp_path).step == 1
    forge_header(tmp_path, lambda text: text.replace(old, new, 1))
    with pytest.raises(CheckpointError, match=message):
        checkpoint.read(tmp_path)


def test_data_that_belongs_to_no_tensor_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    with (tmp_path / "model-00000001.safetensors").open("ab") as file:
        file.write(b"tail")

    def agree(fields: Fields) -> None:
        fields["files"]["model"]["bytes"] += 4  # type: ignore[index]

    forge(path, agree)
    with pytest.raises(CheckpointError, match="its tensors take 30 bytes, but it holds 34"):
        checkpoint.read(tmp_path)


def test_a_shape_that_no_tensor_has_is_a_checkpoint_error_even_if_manifest_and_header_agree(tmp_path: Path) -> None:
    save(tmp_path, 1)
    sizes = [0, 2**62, 2**62]
    forge_header(tmp_path, lambda text: text.replace("[0,2]", json.dumps(sizes), 1))

    def agree(fields: Fields) -> None:
        fields["files"]["model"]["tensors"]["none"]["shape"] = sizes  # type: ignore[index]

    forge(tmp_path / "manifest-00000001.json", agree)
    with pytest.raises(CheckpointError, match="the tensor 'none' cannot have the shape"):
        checkpoint.read(tmp_path).tensors("model")


@pytest.mark.parametrize("field", ["bytes", "header_bytes"])
def test_a_size_bomb_costs_no_memory(tmp_path: Path, field: str) -> None:
    path = save(tmp_path, 1)

    def claim(fields: Fields) -> None:
        fields["files"]["model"][field] = 2**40  # type: ignore[index]

    forge(path, claim)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="bytes"):
        checkpoint.read(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_the_format_of_today_is_read_tomorrow(tmp_path: Path) -> None:
    """A checkpoint as version 1 wrote it, byte for byte; never change it."""
    text = ('{"__metadata__":{"format":"pt"},"w":{"dtype":"I16","shape":[2],"data_offsets":[0,4]}}').ljust(88)
    data = struct.pack("<Q", len(text)) + text.encode() + b"\x01\x00\xff\xff"
    (tmp_path / "model-00000003.safetensors").write_bytes(data)
    body = (
        '{"format":1,"step":9,"written":0,"state":{"t":{"$tuple":[1,{"$int":"0x8000000000000000"}]}},"files":{"model":'
        f'{{"bytes":{len(data)},"header_bytes":96,"header_crc32":{zlib.crc32(data[:96])},'
        '"tensors":{"w":{"dtype":"I16","shape":[2],"crc32":668904070}}}}}'
    )
    sign(tmp_path / "manifest-00000003.json", body)
    found = checkpoint.read(tmp_path)
    assert (found.step, found.generation, found.state) == (9, 3, {"t": (1, 2**63)})
    assert found.tensors("model")["w"].tolist() == [1, -1]


def test_a_checkpoint_made_today_is_the_bytes_the_format_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    path = checkpoint.write(tmp_path, {"m": {"w": torch.tensor([1, -1], dtype=torch.int16)}}, (1,), step=9)
    assert path.read_bytes() == (
        b'{"crc32":"%08x","manifest":{"format":1,"step":9,"written":0,"state":{"$tuple":[1]},"files":{"m":{"bytes":100,'
        b'"header_bytes":96,"header_crc32":%d,"tensors":{"w":{"dtype":"I16","shape":[2],"crc32":%d}}}}}}\n'
    ) % (
        zlib.crc32(path.read_bytes()[31:-2]),
        zlib.crc32((tmp_path / "m-00000001.safetensors").read_bytes()[:96]),
        zlib.crc32(b"\x01\x00\xff\xff"),
    )
    assert manifests.unpack(path.read_bytes()).state == (1,)


def test_warnings_go_to_the_log_of_the_package(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "manifest-00000002.json").write_text("")
    with caplog.at_level(logging.WARNING, logger="anabranch"):
        checkpoint.read_newest(tmp_path)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
