"""An exported model is read by Hugging Face's ``from_pretrained``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from real_models import gpt2

import anabranch as ab


@pytest.mark.parametrize("mode", [None, "PS"])
def test_from_pretrained_reads_an_export(mode: str | None, tmp_path: Path) -> None:
    model = gpt2()
    ids = torch.randint(2, 16, (2, 8))
    step = ab.TrainStep(model, lambda m, b: m(b, labels=b), torch.optim.AdamW(model.parameters(), lr=0.01))
    with ab.Executor(step, mode) as executor:
        for _ in range(2):
            executor.run(batch=ids)
        executor.export(tmp_path)
        model.config.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    model.eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
