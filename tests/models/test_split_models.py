"""Models of other libraries become pipes without rewriting, with the unsplit model's outputs, gradients and buffers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from real_models import bert, gpt2, llama, load, padded, padded_left, t5
from torch import Tensor, nn

from anabranch import Executor, TrainStep
from anabranch.errors import CaptureError
from anabranch.pipeline import Pipe, split

WAYS = [("GPipe", 1, "always"), ("GPipe", 3, "never"), ("1F1B", 3, "always"), ("1F1B", 1, "never")]


def batch_of(i: int, left: bool = False) -> dict[str, Tensor]:
    """Four rows whose labels count as many tokens in each, so that a mean over rows is a mean over tokens."""
    make = padded_left if left else padded
    ids, mask = (torch.cat([make(i)[name], make(i + 1)[name]]) for name in ("input_ids", "attention_mask"))
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def assert_same(ours: nn.Module, theirs: nn.Module, rtol: float = 1e-10, atol: float = 1e-12) -> None:
    for (name, one), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=rtol, atol=atol, msg=lambda text, name=name: name + text)
    ours.zero_grad()
    theirs.zero_grad()
    for (name, one), (_, other) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12, msg=name)


def language_models() -> dict[str, tuple[Any, list[str]]]:
    return {
        "gpt2": (lambda: gpt2(n_layer=4), ["transformer.h.1", "transformer.h.3"]),
        "gpt2 inside a block": (lambda: gpt2(n_layer=2), ["transformer.h.0.mlp", "transformer.h.1"]),
        "gpt2 untied": (lambda: gpt2(n_layer=2, tie_word_embeddings=False), ["transformer.h.0", "transformer.ln_f"]),
        "gpt2 eager": (lambda: gpt2(n_layer=2, attn_implementation="eager"), ["transformer.h.1", "lm_head"]),
        "llama": (lambda: llama(num_hidden_layers=4), ["model.layers.1", "model.layers.3"]),
        "llama tied": (lambda: llama(tie_word_embeddings=True), ["model.layers.1", "model.norm"]),
    }


@pytest.mark.parametrize(
    ("name", "schedule", "chunks", "checkpoint"),
    [(name, *WAYS[(i + j) % 4]) for i, name in enumerate(language_models()) for j in range(4 if name == "gpt2" else 1)],
)
def test_language_models(name: str, schedule: str, chunks: int, checkpoint: str):
    torch.manual_seed(0)
    make, at = language_models()[name]
    model = make().double().eval()
    plain = copy.deepcopy(model)
    parts = split(model, at)
    assert list(parts.state_dict()) == list(model.state_dict())
    with Pipe(parts, [1, 1, 1], ["cpu"] * 3, chunks, checkpoint, schedule) as pipe:
        for left in (False, True):
            batch = batch_of(3, left) | {"use_cache": False}
            result = pipe.step(**batch, loss=lambda output, _: output.loss)
            expected = plain(**batch)
            expected.loss.backward()
            torch.testing.assert_close(result.loss, expected.loss.detach(), rtol=1e-5, atol=0.0)  # made in float32
            assert_same(pipe, plain, rtol=1e-5, atol=1e-7)
            del batch["labels"]
            output = pipe(batch.pop("input_ids"), **batch)
            assert type(output) is type(expected)
            torch.testing.assert_close(output.logits, expected.logits, rtol=1e-10, atol=1e-12)
            output.logits.square().sum().backward()
            expected = plain(**(batch_of(3, left) | {"use_cache": False}))
            expected.logits.square().sum().backward()
            assert_same(pipe, plain)


def test_gpt2_trains_with_its_own_dropout_in_every_microbatch():
    model = gpt2(n_layer=2).double()
    parts = split(model, ["transformer.h.1"])
    ids = torch.zeros(4, 6, dtype=torch.int64)
    with Pipe(parts, [1, 1], chunks=2) as pipe:
        train = [pipe(ids, use_cache=False).logits for _ in range(2)]
        pipe.eval()
        quiet = [pipe(ids, use_cache=False).logits for _ in range(2)]
    assert not torch.equal(*train)
    assert not torch.equal(train[0][0], train[0][2])
    assert torch.equal(*quiet)
    torch.testing.assert_close(quiet[0], model(ids).logits)


def test_padded_batches_train_gpt2_as_the_plain_loop_does():
    model = gpt2(n_layer=2, use_cache=False, embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0).double()
    plain = copy.deepcopy(model)
    ids = torch.randint(2, 16, (6, 8), generator=torch.Generator().manual_seed(0))
    padding = torch.arange(8) >= torch.tensor([8, 3, 1, 5, 1, 1])[:, None]  # the last microbatch predicts nothing
    labels = ids.masked_fill(padding, -100)
    batch = load("transformers").BatchEncoding(
        {"input_ids": ids, "attention_mask": (~padding).long(), "labels": labels}
    )
    with Pipe(split(model, ["transformer.h.1"]), [1, 1], chunks=3) as pipe:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        step = TrainStep(
            pipe, lambda output, _: output.loss, optimizer, rows=lambda batch: (batch["labels"][:, 1:] != -100).sum()
        )
        with Executor({"train": step}) as executor:
            losses = [executor.run("train", batch)["loss"] for _ in range(3)]
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    for loss in losses:
        expected = plain(**batch).loss
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0.0)  # made in float32
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def test_a_cache_that_would_cross_a_cut_is_refused():
    model = llama()
    parts = split(model, ["model.layers.1"])
    with (
        Pipe(parts, [1, 1]) as pipe,
        pytest.raises(CaptureError, match=r"modeling_llama.*DynamicCache.*use_cache=False"),
    ):
        pipe(torch.zeros(2, 4, dtype=torch.int64))


@pytest.mark.parametrize(
    ("name", "at", "options"),
    [
        ("resnet18", ["layer2", "layer3.1", "layer4"], {}),
        ("densenet121", ["features.denseblock2", "features.norm5", "classifier"], {"block_config": (1, 2, 1, 1)}),
        (
            "VisionTransformer",
            ["encoder.layers.encoder_layer_1", "encoder.layers.encoder_layer_1.mlp", "heads"],
            {"image_size": 32, "patch_size": 16, "num_layers": 2, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 8},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_image_models(name: str, at: list[str], options: dict[str, Any]):
    vision = load("torchvision.models")
    torch.manual_seed(0)
    make = vision.DenseNet if options.get("block_config") else getattr(vision, name)
    model = make(num_classes=5, **options).double()
    plain = copy.deepcopy(model)
    x, target = torch.randn(4, 3, 32, 32, dtype=torch.float64), torch.tensor([0, 1, 2, 3])
    parts = split(model, at)
    assert list(parts.state_dict()) == list(plain.state_dict())
    with Pipe(parts, [1] * 4, chunks=2, schedule="1F1B", checkpoint="always") as pipe:
        result = pipe.step(x, target, loss=F.cross_entropy)
        # BatchNorm sees the microbatches one after the other.
        losses = [F.cross_entropy(plain(part), rows) for part, rows in zip(x.chunk(2), target.chunk(2), strict=True)]
        loss = sum(losses) / 2
        loss.backward()
        torch.testing.assert_close(result.loss, loss.detach(), rtol=1e-9, atol=1e-10)
        assert_same(pipe, plain)


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_encoders(name: str):
    torch.manual_seed(0)
    model = {"bert": bert, "t5": t5}[name]().double().eval()
    plain = copy.deepcopy(model)
    batch = batch_of(3)
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    if name == "t5":
        inputs |= {"decoder_input_ids": batch["input_ids"], "use_cache": False}
    at = ["bert.encoder.layer.1", "cls"] if name == "bert" else ["encoder.block.1", "decoder.block.1"]
    with Pipe(split(model, at), [1, 1, 1], chunks=3, checkpoint="always") as pipe:
        output, expected = pipe(**inputs).logits, plain(**inputs).logits
        output.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-12)
        assert_same(pipe, plain)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
@pytest.mark.parametrize(("reentrant", "schedule"), [(False, "GPipe"), (False, "ZB1P"), (True, "1F1B")])
def test_gpt2_that_checkpoints_its_blocks_replays_their_dropout(reentrant: bool, schedule: str):
    torch.manual_seed(0)
    model = gpt2(n_layer=4, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1).double()
    ids = batch_of(3)["input_ids"]
    gradients = []
    for checkpoints in (False, True):
        if checkpoints:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.zero_grad()
        parts = split(model, ["transformer.h.2"])
        with Pipe(parts, [1, 1], chunks=2, schedule=schedule, checkpoint="never", seed=5) as pipe:
            pipe.step(input_ids=ids, use_cache=False, target=None, loss=lambda y, _: y.logits.square().mean())
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.allclose(one, other, rtol=1e-9, atol=1e-12) for one, other in zip(*gradients, strict=True))
