"""Checkpoints whose content follows from their step."""

from __future__ import annotations

from pathlib import Path

import torch

from anabranch import checkpoint


def save(place: Path | str, step: int, size: int = 3) -> None:
    model = {"w": torch.full((size,), float(step)), "b": torch.ones(1)}
    checkpoint.write(place, {"model": model, "rank0": {"rng": torch.tensor(step)}}, {"step": step}, step=step)


def assert_whole(found: checkpoint.Checkpoint | None, *steps: int) -> None:
    assert found is not None
    assert found.step in steps
    assert found.state == {"step": found.step}
    assert set(found.tensors("model")["w"].tolist()) == {float(found.step)}
    assert found.tensors("rank0")["rng"].item() == found.step
