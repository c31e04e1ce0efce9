"""Hugging Face's language models, and single blocks of them, generate through sessions of remote experts as here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from real_models import gpt2, llama
from torch import Tensor, nn

from anabranch.experts import ExpertBackend, ExpertServer, RemoteExpert
from anabranch.tensors import TensorSpec


class Whole(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def make_cache(self, rows: int, max_length: int) -> object:
        from transformers import DynamicCache

        return DynamicCache()

    def forward(self, ids: Tensor, cache: object = None) -> Tensor:
        return self.model(ids, past_key_values=cache, use_cache=cache is not None).logits


@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_whole_model_generates_the_same_as_its_own_generate(make: Callable[[], nn.Module]) -> None:
    model = make().eval()
    prompt = torch.randint(2, 16, (100, 5))  # so many that a session counts more than the least, 64 KiB
    with torch.no_grad():
        expected = model.generate(prompt, max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
    backend = ExpertBackend("model.0", Whole(model), args_schema=[TensorSpec(None, dtype=torch.int64)])
    with ExpertServer([backend]) as server, RemoteExpert("model.0", server.endpoint).session(16) as session:
        ids = new = prompt
        sizes: list[int] = []
        for _ in range(10):
            new = session.step(new)[:, -1:].argmax(-1)
            ids = torch.cat([ids, new], 1)
            sizes.append(server.statistics().session_bytes)
    assert torch.equal(ids, expected)
    assert sizes[1:] == sorted(sizes[1:])
    assert sizes[-1] > sizes[1] > 0


class Block(Whole):
    def forward(self, x: Tensor, cache: object = None) -> Tensor:
        out = self.model(x, past_key_values=cache, use_cache=cache is not None)
        return out[0] if isinstance(out, tuple) else out


def test_a_block_continues_a_sequence_bit_for_bit() -> None:
    block = Block(gpt2().eval().transformer.h[0])
    width = block.model.ln_1.weight.shape[0]
    dtype = block.model.ln_1.weight.dtype
    pieces = [torch.randn(2, length, width, dtype=dtype) for length in (4, 1, 2, 1)]
    backend = ExpertBackend("block.0", block, args_schema=[TensorSpec(None, width, dtype=dtype)])
    with ExpertServer([backend]) as server, RemoteExpert("block.0", server.endpoint).session(8) as session:
        came = [session.step(piece) for piece in pieces]
    with torch.no_grad():
        cache = block.make_cache(2, 8)
        expected = [block(piece, cache=cache) for piece in pieces]
    assert all(torch.equal(a, b) for a, b in zip(came, expected, strict=True))
