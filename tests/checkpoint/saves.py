"""Checkpoints whose content follows from their step."""

from __future__ import annotations

from pathlib import Path

import torch

from anabranch import checkpoint


def save(place: Path | str, step: int, size: int = 3) -> None:
    model = {"w": torch.full((size,), float(step)), "b": torch.ones(1)}
    checkpoint.write(place, {"model": model, "rank0": {"rng": torch.tensor(step)}}, {"step": step}, step=step)


def assert_whole(read: checkpoint.Checkpoint | None, *steps: int) -> None:
    assert read is not None
    assert read.step in steps
    assert read.state == {"step": read.step}
    assert set(read.tensors("model")["w"].tolist()) == {float(read.step)}
    assert read.tensors("rank0")["rng"].item() == read.step
