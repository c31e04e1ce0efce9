"""The ids of transformers' lookups are learned: words are a leaf of the batch, positions those of the last steps."""

from __future__ import annotations

from typing import Any

import pytest
from real_models import adam, bert, gpt2, padded

import anabranch as ab


@pytest.mark.parametrize(
    ("make", "words", "positions"),
    [
        (gpt2, "transformer.wte.weight", "transformer.wpe.weight"),
        (bert, "bert.embeddings.word_embeddings.weight", "bert.embeddings.position_embeddings.weight"),
    ],
)
def test_words_and_positions_of_a_transformer_are_known_before_its_third_step(
    make: Any, words: str, positions: str
) -> None:
    model = make(tie_word_embeddings=False)  # a tied table is not only looked up, and stays on the workers
    step = ab.TrainStep(model, lambda m, b: m(**b), adam(model))
    with ab.Executor(step, "Hybrid") as executor:
        for number in range(4):
            executor.run(batch=padded(number))
        known = {route.parameter: route.ids for route in executor.routes() if route.ids}
        runner = executor._runners["default"]
        assert runner.ids is not None
        assert not runner.ids.watching  # the last step looked up nothing that was not expected
    assert known[words] == "batch.input_ids"
    assert known[positions] == "the ids of the last steps"
    assert "when looked up" not in known.values()
