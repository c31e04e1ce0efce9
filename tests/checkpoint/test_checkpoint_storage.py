"""Checkpoints on storage that fsspec reaches: whole or absent, whatever operation fails."""

from __future__ import annotations

import logging
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from saves import assert_whole, save
from torch import nn

import anabranch as ab
from anabranch import checkpoint
from anabranch.errors import CheckpointError

UPLOADS = ("makedirs", "put_file", "info", "ls", "rm_file")


@pytest.fixture(params=["memory", "local"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    name = uuid.uuid4().hex
    yield f"memory://{name}" if request.param == "memory" else f"local://{tmp_path}/{name}"
    files = fsspec.filesystem("memory")
    if files.exists(f"/{name}"):
        files.rm(f"/{name}", recursive=True)


def names(url: str) -> list[str]:
    files, root = fsspec.core.url_to_fs(url)
    return sorted(path.rpartition("/")[2] for path in files.find(root))


def test_the_newest_of_two_generations_is_read_and_older_ones_are_removed(url: str) -> None:
    for step in (1, 2, 3):
        save(url, step)
    assert names(url) == [
        f"{name}-0000000{generation}.{kind}"
        for name, kind in (("manifest", "json"), ("model", "safetensors"), ("rank0", "safetensors"))
        for generation in (2, 3)
    ]
    assert_whole(checkpoint.read(url), 3)
    assert_whole(checkpoint.read(url, generation=2), 2)


def test_the_newest_below_a_url_is_found(url: str) -> None:
    assert checkpoint.read_newest(url) is None
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        checkpoint.read(url)
    save(f"{url}/b", 1)
    save(f"{url}/a", 2)
    found = checkpoint.read_newest(url)
    assert_whole(found, 2)
    assert found is not None
    assert str(found.path) == f"{url}/a"


class Failing:
    """Makes the ``nth`` call of one operation of a file system fail, before or after it was done."""

    def __init__(self, files: object, operation: str, nth: int, *, after: bool) -> None:
        self.real: Callable[..., object] = getattr(files, operation)
        self.nth, self.after, self.calls = nth, after, 0

    def __call__(self, *arguments: object, **options: object) -> object:
        self.calls += 1
        if self.calls != self.nth:
            return self.real(*arguments, **options)
        if self.after:
            self.real(*arguments, **options)
        raise RuntimeError("the service failed")


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("operation", UPLOADS)
def test_a_failure_of_any_operation_leaves_a_whole_checkpoint(
    url: str, operation: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, _ = fsspec.core.url_to_fs(url)
    save(url, 1)
    save(url, 2)
    nth, failures = 1, 0
    while True:
        step = 2 + nth
        failing = Failing(files, operation, nth, after=after)
        with monkeypatch.context() as patch:
            patch.setattr(files, operation, failing)
            if failing.nth and not _fails(url, step):
                assert failing.calls < nth
                break
        failures += 1
        found = checkpoint.read(url)
        assert_whole(found, found.step)
        assert found.step in (step, 2)
        assert operation != "put_file" or found.step == 2  # another may fail once all is there: at removing what is old
        for name in names(url):  # put back what it was
            fsspec.core.url_to_fs(url)[0].rm_file(f"{fsspec.core.url_to_fs(url)[1]}/{name}")
        save(url, 1)
        save(url, 2)
        nth += 1
    assert failures >= 2


def _fails(url: str, step: int) -> bool:
    try:
        save(url, step)
    except CheckpointError as error:
        return "the service failed" in str(error) and url in str(error)
    return False


@pytest.mark.parametrize("what", ["manifest", "model"])
def test_a_damaged_generation_is_passed_over_and_named(url: str, what: str, caplog: pytest.LogCaptureFixture) -> None:
    save(url, 1)
    save(url, 2)
    files, root = fsspec.core.url_to_fs(url)
    path = next(f"{root}/{name}" for name in names(url) if name.startswith(f"{what}-00000002"))
    data = bytearray(files.cat_file(path))
    data[-4] ^= 1
    files.pipe_file(path, bytes(data))
    with caplog.at_level(logging.WARNING, "anabranch.checkpoint"):
        assert_whole(checkpoint.read(url), 1)
    assert f"generation 2 in {url} is damaged" in caplog.text


def test_an_outage_is_not_mistaken_for_an_empty_storage(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save(url, 1)
    save(url, 2)
    files, _ = fsspec.core.url_to_fs(url)
    for operation in ("find", "get_file", "info"):
        with monkeypatch.context() as patch:
            patch.setattr(files, operation, Failing(files, operation, 1, after=False))
            with pytest.raises(CheckpointError, match="the service failed"):
                checkpoint.read_newest(url)


def executor() -> ab.Executor:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    step = ab.TrainStep(model, lambda m, batch: m(batch).square().mean(), torch.optim.Adam(model.parameters(), lr=0.1))
    return ab.Executor({"train": step})


@pytest.mark.parametrize("wait", [True, False])
def test_an_executor_resumes_from_a_url_as_if_uninterrupted(url: str, wait: bool) -> None:
    batch = torch.ones(4, 2)
    with executor() as first:
        first.run("train", batch)
        first.save(f"{url}/run", wait=wait)
        first.finish_saves()
        expected = [first.run("train", batch)["loss"].item() for _ in range(3)]
    for load in ("load", "resume"):
        with executor() as second:
            second.load(f"{url}/run") if load == "load" else second.resume(url)
            assert [second.run("train", batch)["loss"].item() for _ in range(3)] == expected
    with executor() as third:
        assert third.resume(f"{url}/nothing") is False


def test_file_urls_are_folders(tmp_path: Path) -> None:
    save(f"file://{tmp_path}/run", 1)
    assert_whole(checkpoint.read(tmp_path / "run"), 1)


def test_a_url_of_an_unknown_or_uninstalled_file_system_is_refused() -> None:
    with pytest.raises(ValueError, match=r"nothing://x cannot be saved to"):
        save("nothing://x", 1)


def test_without_fsspec_the_error_has_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'anabranch\[storage\]'"):
        save("memory://x", 1)


def test_a_password_in_a_url_is_in_no_message() -> None:
    from anabranch.checkpoint.storage import Storage

    assert str(Storage("memory://me:secret@host/run")) == "memory://host/run"
