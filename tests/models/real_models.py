"""Training loops of models from other libraries, from small random configurations: nothing is downloaded."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plain_loop import Build, TrainingCase, mean_square, nothing


@functools.cache
def _missing_operators() -> torch.library.Library:
    # torchvision's wheel has its C++ operators for CUDA's build of torch. Beside the CPU's they do not load, and its
    # Python registers shapes for two of them at import.
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def load(name: str) -> Any:
    """Import a module by its name, whatever it warns about."""
    import importlib

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _missing_operators()
        return importlib.import_module(name)


def adam(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def of(model: nn.Module, loss: Callable[[Any, Any], Any], batch: Callable[[int], Any], **keywords: Any) -> TrainingCase:
    return TrainingCase(model, loss, keywords.pop("optimizer", None) or adam(model), nothing, batch=batch, **keywords)


# Hugging Face.


def tokens(i: int, rows: int = 2, length: int = 8, vocabulary: int = 50) -> Tensor:
    return torch.randint(3, vocabulary, (rows, length), generator=torch.Generator().manual_seed(i))


def padded(i: int) -> dict[str, Tensor]:
    """Tokens, a padding mask, and labels that are -100 where there is padding."""
    ids = tokens(i)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def padded_left(i: int) -> dict[str, Tensor]:
    batch = padded(i)
    batch["attention_mask"] = batch["attention_mask"].flip(1)
    return batch


def own_loss(model: nn.Module, batch: Any) -> Any:
    return model(**batch).loss


SMALL = {"vocab_size": 50, "max_position_embeddings": 16}
TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def transformer(model: str, config: str, **keywords: Any) -> Any:
    """One of Hugging Face's models, by the names of its class and of its configuration's."""
    transformers = load("transformers")
    return getattr(transformers, model)(getattr(transformers, config)(**keywords))


def gpt2(**keywords: Any) -> Any:
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
    return transformer("GPT2LMHeadModel", "GPT2Config", **(SMALL | sizes | keywords))


def llama(**keywords: Any) -> Any:
    return transformer("LlamaForCausalLM", "LlamaConfig", **(SMALL | TOWER | {"num_key_value_heads": 1} | keywords))


def bert(model: str = "BertForMaskedLM", **keywords: Any) -> Any:
    return transformer(model, "BertConfig", **(SMALL | TOWER | keywords))


def t5() -> Any:
    sizes = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    return transformer("T5ForConditionalGeneration", "T5Config", vocab_size=50, **sizes)


def pictures(i: int, size: int = 16, rows: int = 3) -> Tensor:
    return torch.randn(rows, 3, size, size, generator=torch.Generator().manual_seed(i))


def checkpointed() -> Any:
    model = gpt2()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def mixtral() -> Any:
    sizes = SMALL | TOWER | {"num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    return transformer("MixtralForCausalLM", "MixtralConfig", output_router_logits=True, **sizes)


def of_some_length(i: int) -> dict[str, Tensor]:
    ids = tokens(i, length=6 + i % 3)
    return {"input_ids": ids, "labels": ids}


def lora() -> Any:
    peft = load("peft")
    options = {"r": 2, "target_modules": ["c_attn"], "lora_dropout": 0.1, "fan_in_fan_out": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(gpt2(), peft.LoraConfig(task_type="CAUSAL_LM", **options))


# Pictures.


def classified(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], label_smoothing=0.1)


def labelled(i: int, size: int = 32) -> dict[str, Tensor]:
    return {"x": pictures(i, size), "y": torch.tensor([0, 1, i % 4])}


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)


def resnet() -> TrainingCase:
    resnets = load("torchvision.models.resnet")
    model = resnets.ResNet(resnets.Bottleneck, [1, 1, 1, 1], num_classes=4, width_per_group=8)
    return of(model, classified, labelled, optimizer=momentum(model))


def vision_transformer() -> Any:
    return load("timm.models.vision_transformer").VisionTransformer(
        img_size=16, patch_size=8, embed_dim=16, depth=3, num_heads=2, num_classes=4, drop_path_rate=0.3, drop_rate=0.1
    )


def unet() -> TrainingCase:
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    sizes = {"sample_size": 8, "block_out_channels": (8, 16), "layers_per_block": 1}
    model = load("diffusers").UNet2DModel(**sizes, **blocks, norm_num_groups=4, attention_head_dim=4)
    schedule = torch.linspace(0.99, 0.1, 10)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        noise, time = torch.randn_like(x), torch.randint(0, 10, (len(x),))
        share = schedule[time][:, None, None, None]
        return F.mse_loss(model(share.sqrt() * x + (1 - share).sqrt() * noise, time).sample, noise)

    return of(model, loss, lambda i: pictures(i, 8))


# Sequences, graphs and towers by hand.


class Language(nn.Module):
    """A recurrent language model."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 8), nn.Linear(12, 50)
        self.net = nn.LSTM(8, 12, num_layers=2, batch_first=True, dropout=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.net(self.table(ids))[0])  # type: ignore[no-any-return]


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def packed_lstm() -> TrainingCase:
    def loss(model: nn.Module, batch: Any) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(batch["x"], batch["lengths"], batch_first=True, enforce_sorted=False)
        return model(packed)[0].data.square().mean()

    batch = lambda i: {"x": torch.ones(2, 5, 4) * i, "lengths": torch.tensor([5, 2 + i % 3])}  # noqa: E731
    return of(nn.LSTM(4, 6, batch_first=True), loss, batch)


def graph_net() -> Any:
    geometric = load("torch_geometric.nn")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = geometric.GCNConv(4, 8), geometric.GCNConv(8, 3)

        def forward(self, data: Any) -> Tensor:
            x = F.dropout(F.relu(self.one(data.x, data.edge_index)), 0.3, self.training)
            return self.two(x, data.edge_index)  # type: ignore[no-any-return]

    return Net()


EDGES = torch.tensor([[0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 0, 2]])


def data_of(i: int) -> Any:
    g = torch.Generator().manual_seed(i)
    return load("torch_geometric.data").Data(
        x=torch.randn(5, 4, generator=g), edge_index=EDGES, y=torch.tensor([0, 1, 2, i % 3, 0])
    )


def node_loss(model: nn.Module, data: Any) -> Tensor:
    return F.cross_entropy(model(data), data.y)


MODELS: dict[str, Build] = {
    "hf_gpt2": lambda patch: of(gpt2(), own_loss, padded),
    "hf_gpt2_gradient_checkpointing": lambda patch: of(checkpointed(), own_loss, padded),
    "hf_gpt2_lengths_change": lambda patch: of(gpt2(), own_loss, of_some_length),
    "hf_llama": lambda patch: of(llama(), own_loss, padded),
    "hf_bert": lambda patch: of(bert(), own_loss, padded),
    "hf_t5": lambda patch: of(t5(), own_loss, padded),
    "hf_mixtral": lambda patch: of(mixtral(), own_loss, padded),
    "peft_lora": lambda patch: of(lora(), own_loss, padded),
    "torchvision_resnet": lambda patch: resnet(),
    "timm_vit_with_drop_path": lambda patch: of(vision_transformer(), classified, lambda i: labelled(i, 16)),
    "diffusers_unet": lambda patch: unet(),
    "lstm": lambda patch: of(Language(), next_token, tokens, clip=0.5),
    "packed_lstm": lambda patch: packed_lstm(),
    "geometric_gcn": lambda patch: of(graph_net(), node_loss, data_of, rows=lambda data: 5.0),
}


# Optimizers.


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def by(model: nn.Module, optimizer: Any) -> TrainingCase:
    return of(model, mean_square, lambda i: torch.linspace(-1, 1, 12).reshape(3, 4) + 0.1 * i, optimizer=optimizer)


def _third_party(module: str, name: str, **keywords: Any) -> Build:
    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        model = perceptron()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = getattr(load(module), name)(list(model.parameters()), **keywords)
        if hasattr(optimizer, "train"):
            optimizer.train()
        return by(model, optimizer)

    return build


def muon(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = perceptron()
    matrices, rest = ([p for p in model.parameters() if (p.ndim == 2) == two] for two in (True, False))
    return by(model, [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01)])


OPTIMIZERS: dict[str, Build] = {
    "schedulefree_AdamW": _third_party("schedulefree", "AdamWScheduleFree", lr=0.01, warmup_steps=3),
    "lion_pytorch_Lion": _third_party("lion_pytorch", "Lion", lr=0.01, weight_decay=0.1),
    "prodigyopt_Prodigy": _third_party("prodigyopt", "Prodigy", lr=1.0),
    "transformers_Adafactor": _third_party("transformers.optimization", "Adafactor"),
    "pytorch_optimizer_Lamb": _third_party("pytorch_optimizer", "Lamb", lr=0.01),
    "torch_Muon": muon,
}
