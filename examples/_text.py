"""Real text for the examples: what is trained on, what is held out, and the batches cut from them."""

from __future__ import annotations

import sysconfig
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

CONTEXT = 256
NOT_SOURCES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
HELD_OUT_FILES = 40


@dataclass(frozen=True, slots=True)
class Text:
    """Bytes to train on, bytes to be measured on, and where they come from."""

    train: bytes
    held_out: bytes
    source: str

    @property
    def fingerprint(self) -> int:
        return zlib.crc32(self.held_out, zlib.crc32(self.train))


def standard_library() -> Text:
    """Python's own sources without their tests; 40 files, chosen by a hash of their path, are held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in root.rglob("*.py") if not NOT_SOURCES & set(path.relative_to(root).parts)]
    return split_files({path: path.relative_to(root).as_posix() for path in paths}, HELD_OUT_FILES, "Python's library")


def text_of(given: list[Path]) -> Text:
    """Files, and all files under directories: one in twenty is held out, or the last twentieth of a lone file.

    Raises:
        ValueError: a path that is not there, or too little text.
    """
    names: dict[Path, str] = {}
    for path in given:
        if not path.exists():
            raise ValueError(f"--text {path}: there is no such file or directory")
        found = [path] if path.is_file() else [inner for inner in path.rglob("*") if is_text(path, inner)]
        names.update({inner.resolve(): inner.relative_to(path.parent).as_posix() for inner in found})
    source = " ".join(map(str, given))
    if len(names) == 1:
        everything = next(iter(names)).read_bytes()
        cut = len(everything) - len(everything) // 20
        text = Text(everything[:cut], everything[cut:], source)
    else:
        text = split_files(names, max(1, len(names) // 20), source)
    if len(text.train) <= CONTEXT or not text.held_out:
        raise ValueError(
            f"too little text in {source}: {len(text.train)} bytes to train on and {len(text.held_out)} held out; "
            f"training needs more than {CONTEXT}, and at least one must be held out: give more or longer files"
        )
    return text


def is_text(root: Path, path: Path) -> bool:
    hidden = any(part.startswith(".") or part == "__pycache__" for part in path.relative_to(root).parts)
    return path.is_file() and not hidden


def split_files(names: Mapping[Path, str], held_out: int, source: str) -> Text:
    """Hold out the files whose names have the lowest hashes: the same ones on every machine."""
    by_hash = sorted(names, key=lambda path: (zlib.crc32(names[path].encode()), names[path], path))

    def read(paths: list[Path]) -> bytes:
        return b"".join(path.read_bytes() for path in sorted(paths, key=lambda path: (names[path], path)))

    return Text(read(by_hash[held_out:]), read(by_hash[:held_out]), source)


class Windows(Dataset[Tensor]):
    """Random windows of the text, as many as training takes, (CONTEXT + 1,) bytes each: every byte predicts the next.

    Which they are depends on the seed alone, so that any number of workers can share them out.
    """

    def __init__(self, text: bytes, count: int, seed: int) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        generator = torch.Generator().manual_seed(seed)
        self._starts = torch.randint(len(text) - CONTEXT, (count,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Tensor:
        start = self._starts[index]
        return self._text[start : start + CONTEXT + 1].long()


def windows_in_order(text: bytes, rows: int = 16) -> list[Tensor]:
    """Batches in which every byte of the text is predicted once; the first from a line feed."""
    padded = torch.frombuffer(bytearray(b"\n" + text), dtype=torch.uint8).long()
    whole = len(text) // CONTEXT
    batches = list(padded.unfold(0, CONTEXT + 1, CONTEXT)[:whole].split(rows)) if whole else []
    rest = padded[None, whole * CONTEXT :]
    return [*batches, rest] if rest.shape[1] > 1 else batches
