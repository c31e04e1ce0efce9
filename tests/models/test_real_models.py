"""Models and optimizers of other libraries train as in the plain loop, to the last bit, whatever the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from real_models import MODELS, OPTIMIZERS, adam, bert, gpt2, padded
from torch import Tensor, nn

import anabranch as ab
from plain_loop import STEPS, check, frozen
from toys import assert_same, plain_step

ENGINES = ("tape", "graph")


# Who is not a graph, with the words of the refusal; everybody else is one.
REFUSED = {
    "packed_lstm": "nn/utils/rnn.py",
    "geometric_gcn": "the shape of a result depends on values",
    "hf_mixtral": "`lock`",  # taken in the first forward alone
}
CAPTURED_OPTIMIZERS = ("torch_Muon",)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_trains_as_in_the_plain_loop(engine: str, name: str) -> None:
    got = check(MODELS[name], engine)
    if engine == "graph":
        assert (got.refused_at is not None) == (name in REFUSED), got.refusal
        assert REFUSED.get(name, "") in got.refusal


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("engine", ENGINES)
def test_an_optimizer_of_another_library_trains_as_in_the_plain_loop(engine: str, name: str) -> None:
    """Forward and backward are a graph with every one of them."""
    got = check(OPTIMIZERS[name], engine)
    assert got.engines == [engine] * STEPS
    assert bool(got.by_itself) == (engine != "tape" and name not in CAPTURED_OPTIMIZERS)
    assert got.refused_at is None, got.refusal


@pytest.mark.parametrize("engine", ENGINES)
def test_a_transformer_is_its_own_loss(engine: Any) -> None:
    """``loss=lambda model, batch: model(**batch)``: its output has a ``.loss``, and hands its logits back."""
    model, plain = gpt2(), gpt2()
    plain.load_state_dict(model.state_dict())
    optimizer, reference = adam(model), adam(plain)
    with ab.Executor(ab.TrainStep(model, lambda m, b: m(**b), optimizer), engine=engine) as executor:
        for index in range(4):
            torch.manual_seed(index)
            results = executor.run(batch=padded(index))
            torch.manual_seed(index)
            reference.zero_grad()
            expected = plain(**padded(index))
            expected.loss.backward()
            reference.step()
            assert torch.equal(results["loss"], expected.loss.detach())
            assert torch.equal(results["logits"], expected.logits.detach())
        assert executor.engine() == engine
    assert_same(model, plain)


def adversaries() -> tuple[Any, Any, Any, Any, Any, Any]:
    """A generator and a discriminator, an optimizer and a loss each."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    critic = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01, betas=(0.5, 0.999)) for m in (generator, critic)]

    def critic_loss(critic: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            made = generator(torch.randn(len(x), 3))
        return F.softplus(-critic(x)).mean() + F.softplus(critic(made)).mean()

    def generator_loss(generator: Any, x: Tensor) -> Tensor:
        return F.softplus(-critic(generator(torch.randn(len(x), 3)))).mean()

    return generator, critic, *optimizers, generator_loss, critic_loss


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_two_adversaries_train_as_in_the_plain_loop(engine: str, freeze: bool) -> None:
    batches = [torch.linspace(-1, 1, 20).reshape(5, 4) * (i + 1) for i in range(STEPS)]

    def plain() -> list[object]:
        generator, critic, g, c, generator_loss, critic_loss = adversaries()
        losses = []
        for x in batches:
            for model, optimizer, loss in ((critic, c, critic_loss), (generator, g, generator_loss)):
                critic.requires_grad_(model is critic or not freeze)
                losses.append(frozen(plain_step(model, loss, optimizer, x)))
        return [losses, frozen(generator.state_dict()), frozen(critic.state_dict())]

    def engines() -> list[object]:
        generator, critic, g, c, generator_loss, critic_loss = adversaries()
        steps = {
            "critic": ab.TrainStep(critic, critic_loss, c),
            "generator": ab.TrainStep(generator, generator_loss, g),
        }
        losses = []
        with ab.Executor(steps, engine=engine) as executor:  # type: ignore[arg-type]
            for x in batches:
                for name in steps:
                    critic.requires_grad_(name == "critic" or not freeze)
                    losses.append(frozen(executor.run(name, x)["loss"]))
        return [losses, frozen(generator.state_dict()), frozen(critic.state_dict())]

    wanted = plain()
    try:
        assert engines() == wanted
    except ab.CaptureError:
        assert engine == "graph"


# The ids of transformers' lookups are learned.


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


# An exported model is read by Hugging Face's ``from_pretrained``.


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
