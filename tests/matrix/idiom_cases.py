"""Training idioms: layers, losses, tensor functions, hooks and habits of training scripts, as cases of a few steps."""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributions import Beta, Categorical, Dirichlet, Normal, kl_divergence
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import lr_scheduler, swa_utils
from torch.utils.checkpoint import checkpoint_sequential

import anabranch as ab
from plain_loop import Build, TrainingCase, linear, mean_square, sgd

IDIOMS: dict[str, Build] = {}


def idiom(function: Build) -> Build:
    IDIOMS[function.__name__] = function
    return function


def x_of(i: int, *shape: int) -> Tensor:
    """A batch of its own for each step, of no randomness."""
    count = 1
    for size in shape or (3, 4):
        count *= size
    return torch.sin(torch.arange(count, dtype=torch.float32) + i).reshape(shape or (3, 4))


def steady(make: Callable[[], nn.Module], loss: Any = mean_square, **keywords: Any) -> Build:
    """Nothing changes: the layer or the loss is the matter."""
    optimizer = keywords.pop("optimizer", None)

    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        model = make()
        return TrainingCase(
            model, loss, (optimizer or (lambda m: sgd(m, momentum=0.9)))(model), **{"batch": x_of, **keywords}
        )

    return build


# Layers.


class Attention(nn.Module):
    def __init__(self, **keywords: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True, **keywords)

    def forward(self, batch: dict[str, Any]) -> Any:
        x = batch["x"]
        return self.attention(x, x, x, key_padding_mask=batch["mask"], need_weights=True, average_attn_weights=False)


def _attention_batch(i: int) -> dict[str, Any]:
    mask = None if i % 3 == 2 else torch.arange(5)[None, :] >= torch.tensor([5, 2 + i % 3])[:, None]
    return {"x": x_of(i, 2, 5, 4), "mask": mask}


def _with_weights(model: Any, batch: Any) -> Tensor:
    out, weights = model(batch)
    return out.square().mean() + weights.square().mean()  # type: ignore[no-any-return]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.1), 2, enable_nested_tensor=True
        )
        self.last = nn.Linear(4, 2)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        return self.last(self.encoder(batch["x"], src_key_padding_mask=batch["mask"]))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Transformer(4, 2, 1, 1, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.net.generate_square_subsequent_mask(x.shape[1])
        return self.net(x, x.flip(1), tgt_mask=mask, tgt_is_causal=True)  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """Packs sequences of other lengths in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LSTM(4, 5, 2, batch_first=True, dropout=0.2, bidirectional=True, proj_size=3)
        self.cell = nn.GRUCell(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        lengths = [x.shape[1], 2, 1]
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.net(packed)[0], batch_first=True)
        state = out.new_zeros(x.shape[0], 4)
        for t in range(out.shape[1]):
            state = self.cell(out[:, t], state)
        return state


def _ctc(model: nn.Module, batch: Any) -> Tensor:
    scores = model(batch["x"]).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(scores, batch["y"], batch["long"], batch["short"], zero_infinity=True)


def _ctc_batch(i: int) -> dict[str, Tensor]:
    return {
        "x": x_of(i, 2, 6, 4),
        "y": torch.tensor([[1, 2, 1], [2, 2, 1]]),
        "long": torch.tensor([6, 4 + i % 2]),
        "short": torch.tensor([3, 1 + i % 3]),
    }


class WeightedBag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(10, 3, mode="sum", padding_idx=2, include_last_offset=True)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 10))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        ids, offsets = batch["ids"], batch["offsets"]
        return self.bag(ids, offsets, per_sample_weights=self.weight[ids])  # type: ignore[no-any-return]


def _bag_batch(i: int) -> dict[str, Tensor]:
    return {"ids": (torch.arange(7) * (i + 1)) % 10, "offsets": torch.tensor([0, 2, 2, 7])}


class Adaptive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 6), nn.AdaptiveLogSoftmaxWithLoss(6, 12, cutoffs=[4, 8])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x), torch.arange(x.shape[0]) * 5 % 12).loss  # type: ignore[no-any-return]


class Pictures(nn.Module):
    """Convolutions and poolings that are seldom met."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.back = nn.Conv2d(1, 4, 3, padding=1, padding_mode="reflect"), nn.ConvTranspose2d(4, 4, 2, 2)
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)
        self.norms = nn.ModuleList([nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)])
        self.cumulative, self.local = nn.BatchNorm2d(4, momentum=None), nn.LocalResponseNorm(2)
        self.drop, self.fractional = nn.Dropout2d(0.3), nn.FractionalMaxPool2d(2, output_ratio=0.7)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for norm in self.norms:
            y = norm(y)
        y, places = self.pool(F.silu(self.cumulative(y)))
        y = self.unpool(self.drop(y), places) + self.back(self.local(y), output_size=x.shape)
        y = self.fractional(F.pixel_shuffle(y, 2))
        return F.interpolate(y, scale_factor=1.5, mode="bicubic", align_corners=False)


class Warped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor([[[1.0, 0.1, 0.0], [0.0, 0.9, 0.1]]]))

    def forward(self, x: Tensor) -> Tensor:
        grid = F.affine_grid(self.theta.expand(x.shape[0], -1, -1), list(x.shape), align_corners=False)
        patches = F.unfold(F.grid_sample(x, grid, align_corners=False, padding_mode="border"), 3, padding=1)
        return F.fold(patches * 0.5, x.shape[-2:], 3, padding=1)


class Double(nn.Module):
    """A layer that is not of the input's dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.single, self.wide = nn.Linear(4, 3), nn.Linear(3, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.single(x.float()).double()) * torch.ones(3, dtype=torch.float16)  # type: ignore


class Positive(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(x)

    def right_inverse(self, x: Tensor) -> Tensor:
        return x.expm1().clamp_min(1e-6).log()


def _parametrized() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    parametrizations.orthogonal(model[0], "weight", orthogonal_map="cayley")
    parametrize.register_parametrization(model[2], "weight", Positive())
    return model


class Codebook(nn.Module):
    """The nearest codes, passed straight through, the codes moved by averages in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("codes", torch.randn(5, 3))
        self.register_buffer("sizes", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        picked = torch.cdist(y, self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                chosen = F.one_hot(picked, 5).type_as(y)
                self.sizes.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                self.codes.lerp_(chosen.t() @ y / self.sizes[:, None], 0.1)
        return y + (self.codes[picked] - y).detach()  # type: ignore[no-any-return]


class Queue(nn.Module):
    """A queue of keys in a buffer, and a pointer that is read as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 3), nn.Linear(4, 3).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(6, 3), dim=1))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        q = F.normalize(self.query(x), dim=1)
        with torch.no_grad():
            for slow, quick in zip(self.key.parameters(), self.query.parameters(), strict=True):
                slow.mul_(0.9).add_(quick.detach(), alpha=0.1)
            k = F.normalize(self.key(x), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().detach().t()], 1)
        at = int(self.at)
        self.queue[at : at + x.shape[0]] = k
        self.at[0] = (at + x.shape[0]) % 6
        return F.cross_entropy(logits / 0.2, torch.zeros(x.shape[0], dtype=torch.long))


class Generators(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.generator = nn.Linear(4, 3), torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y * torch.bernoulli(torch.full_like(y, 0.5), generator=self.generator)  # type: ignore[no-any-return]


class Augmented(nn.Module):
    """Decides by torch's, Python's and NumPy's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if torch.rand(()) < 0.5:
            x = x.flip(1)
        if random.random() < 0.5:
            x = x * 1.5
        order = torch.randperm(x.shape[0])
        return self.layer(x[order] * float(np.random.uniform(0.5, 1.5)))  # type: ignore[no-any-return]


class Equilibrium(nn.Module):
    """Iterates until it no longer moves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        z, moved, rounds = torch.zeros_like(x), 1.0, 0
        while moved > 1e-2 and rounds < 30:
            new = torch.tanh(0.5 * self.layer(z) + x)
            z, moved, rounds = new, (new - z).abs().max().item(), rounds + 1
        return z


class Dispatching(nn.Module):
    """Picks its layer by a word in the batch, and its parameters from lists and dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(4, 3, bias=False)})
        self.scales = nn.ParameterDict({"a": nn.Parameter(torch.ones(3)), "b": nn.Parameter(torch.ones(1))})
        self.shifts = nn.ParameterList([torch.zeros(3), torch.ones(3)])

    def forward(self, x: Tensor, *, kind: str, extra: Any = None) -> Tensor:
        y = self.layers[kind](x) * self.scales[kind] + self.shifts[kind == "b"]
        return y if extra is None else y * extra  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Routes rows to the two best of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores, picked = self.gate(x).softmax(1).topk(2)
        out = x.new_zeros(x.shape[0], 3)
        for index, expert in enumerate(self.experts):
            rows, place = (picked == index).nonzero(as_tuple=True)
            out.index_add_(0, rows, expert(x[rows]) * scores[rows, place][:, None])
        return out


class Masked(nn.Module):
    """Functional dropout by a flag of a configuration."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layer, self.config = nn.Linear(4, 3), config

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x), self.config.p, training=self.config.drop)


class ComplexLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.complex64) @ self.weight
        return torch.view_as_real(y * y.conj().resolve_conj() + y.imag).sum(-1)


def two(model: Callable[[], nn.Module] = lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))) -> Any:
    return model()


IDIOMS |= {
    "attention_with_padding_and_weights": steady(Attention, _with_weights, batch=_attention_batch),
    "attention_with_bias_and_zero_key": steady(
        lambda: Attention(add_bias_kv=True, add_zero_attn=True), _with_weights, batch=_attention_batch
    ),
    "encoder_of_padded_sequences": steady(Encoder, batch=_attention_batch),
    "encoder_and_decoder": steady(Decoder, batch=lambda i: x_of(i, 2, 3 + i % 2, 4)),
    "packed_bidirectional_recurrence": steady(Recurrent, batch=lambda i: x_of(i, 3, 3 + i % 2, 4)),
    "ctc": steady(linear, _ctc, batch=_ctc_batch),
    "bags_with_weights": steady(WeightedBag, batch=_bag_batch, rows=lambda b: 3.0),
    "adaptive_softmax": steady(Adaptive, lambda m, x: m(x)),
    "random_slopes": steady(lambda: nn.Sequential(nn.Linear(4, 4), nn.PReLU(4), nn.RReLU(0.1, 0.3))),
    "pictures": steady(Pictures, batch=lambda i: x_of(i, 2, 1, 6, 6)),
    "pictures_channels_last": steady(
        lambda: Pictures().to(memory_format=torch.channels_last),
        batch=lambda i: x_of(i, 2, 1, 6, 6).to(memory_format=torch.channels_last),
    ),
    "warped_pictures": steady(Warped, batch=lambda i: x_of(i, 2, 1, 5, 5)),
    "layers_of_two_dtypes": steady(Double, batch=lambda i: x_of(i).double()),
    "parametrizations_of_ones_own": steady(_parametrized),
    "codebook": steady(Codebook),
    "queue_of_keys": steady(Queue, lambda m, x: m(x)),
    "generator_of_its_own": steady(Generators),
    "augmentations": steady(Augmented),
    "equilibrium": steady(Equilibrium),
    "mixture_of_experts": steady(Experts, batch=lambda i: x_of(i, 6, 4)),
    "complex_parameters": steady(
        ComplexLayer, lambda m, x: m(x).mean(), optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=0.1)
    ),
    "layer_chosen_by_a_word": steady(
        Dispatching,
        lambda m, b: m(**b).square().mean(),
        batch=lambda i: {"x": x_of(i), "kind": "ab"[i % 2], "extra": None if i % 3 else np.float32(i)},
    ),
}


# Losses and tensor functions.


def _many_losses(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    far, near = y.roll(1, 0), y.flip(0)
    target, soft = torch.tensor([0, -100, 2]), torch.softmax(x, 1)
    logs = F.log_softmax(y, 1)
    return sum(  # type: ignore[return-value]
        [
            F.cross_entropy(y, target, weight=torch.arange(1.0, 5.0), ignore_index=-100, label_smoothing=0.1),
            F.cross_entropy(y, soft, label_smoothing=0.2),
            F.kl_div(logs, logs.roll(1, 0).detach(), log_target=True, reduction="batchmean"),
            F.triplet_margin_with_distance_loss(y, near, far, distance_function=lambda a, b: (a - b).abs().sum(1)),
            F.gaussian_nll_loss(y, x, F.softplus(far)),
            F.cosine_embedding_loss(y, far, torch.tensor([1, -1, 1]), margin=0.2),
            F.huber_loss(y, x, delta=0.3),
            F.multi_margin_loss(y, target.clamp_min(0)),
            F.multilabel_margin_loss(y, torch.tensor([[1, 2, -1, 0]] * 3)),
            F.poisson_nll_loss(y, x.abs(), full=True),
            F.hinge_embedding_loss(y, x.sign()),
        ]
    )


def _decompositions(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    square = y.t() @ y + torch.eye(4)
    values, vectors = torch.linalg.eigh(square)
    return (  # type: ignore[no-any-return]
        torch.linalg.slogdet(square).logabsdet
        + torch.linalg.svdvals(y).sum()
        + torch.linalg.solve(square, x.t()).square().mean()
        + torch.linalg.cholesky(square).diagonal().log().sum()
        + torch.matrix_exp(0.1 * square).mean()
        + (vectors.abs() * values).mean()
    )


def _sorting(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    values, order = y.sort(dim=1, stable=True)
    picked = torch.where(x > 0)
    distinct, counts = torch.unique(order[:, 0], return_counts=True)
    pieces = torch.zeros(5).scatter_reduce(0, order[:, 0], values[:, 0], "amax", include_self=False)
    return (  # type: ignore[no-any-return]
        pieces.sum()
        + y[picked].square().sum()
        + y.masked_select(x < 0).sum() * counts.float().mean()
        + y.topk(2).values.prod()
        + y.gather(1, order).cumsum(1).logcumsumexp(0).mean()
        + torch.zeros(9).index_put((distinct,), y[: len(distinct), 0], accumulate=True).square().sum()
        + y.median() + y.kthvalue(2, 1).values.sum() + y.unfold(1, 2, 1).amax(-1).mean()
    )  # fmt: skip


def _spectra(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x).flatten()
    frames = torch.stft(y, 8, 4, window=torch.hann_window(8), return_complex=True, center=True)
    back = torch.istft(frames, 8, 4, window=torch.hann_window(8), length=y.numel())
    return frames.abs().square().mean() + (back - y.detach()).square().mean() + torch.fft.fft2(frames).angle().mean()


def _distributions(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    normal = Normal(y, F.softplus(y) + 0.1)
    action = Categorical(logits=y)
    drawn = action.sample()
    return (  # type: ignore[no-any-return]
        normal.rsample().square().mean()
        + kl_divergence(normal, Normal(0.0, 1.0)).mean()
        - (action.log_prob(drawn) * x.sum(1)).mean()
        - 0.1 * action.entropy().mean()
        + Dirichlet(F.softplus(y) + 0.5).rsample().square().mean()
        + Beta(F.softplus(y) + 0.5, torch.ones(4)).rsample().mean()
        + F.gumbel_softmax(y, hard=True).mul(x).sum()
    )


def _estimators(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    rounded = y + (y.round() - y).detach()
    faked = torch.fake_quantize_per_tensor_affine(y, 0.1, 0, -8, 7)
    safe = torch.where(y > 0, y.clamp_min(1e-6).sqrt(), torch.zeros_like(y))
    return (rounded * faked).mean() + safe.sum() + torch.nan_to_num((y - y) / (y - y).detach()).mean().detach()


def _functional_transforms(model: nn.Module, x: Tensor) -> Tensor:
    parameters = dict(model.named_parameters())

    def one(row: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (row,))

    jacobians = torch.vmap(torch.func.jacrev(one))(x)
    forward = torch.func.jvp(one, (x[0],), (x[1],))[1]
    hessian = torch.func.hessian(lambda row: one(row).square().sum())(x[0])
    return jacobians.square().mean() + forward.sum() + hessian.diagonal().sum() * 0.1


def _each_rows_gradient(model: nn.Module, x: Tensor) -> Tensor:
    """The norms of the gradients of each row, as differential privacy takes them."""
    parameters = dict(model.named_parameters())

    def loss(values: Any, row: Tensor) -> Tensor:
        return torch.func.functional_call(model, values, (row,)).square().mean()

    found = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    return sum(gradient.square().sum() for gradient in found.values()) + mean_square(model, x)  # type: ignore


def _double_backward(model: nn.Module, x: Tensor) -> Tensor:
    """A Hessian's product with a vector, and a gradient's norm, in the loss."""
    weights = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(mean_square(model, x), weights, create_graph=True)
    product = torch.autograd.grad(
        sum((g * p.detach()).sum() for g, p in zip(gradients, weights, strict=True)), weights, create_graph=True
    )
    return sum(g.square().sum() for g in product) + sum(g.square().sum() for g in gradients)  # type: ignore


class Straight(torch.autograd.Function):
    """Keeps what is no tensor, has an output without gradient, takes ``None`` for zeros, and a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, power: int, scale: float) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        ctx.power, ctx.scale = power, scale
        signs = x.sign()
        ctx.mark_non_differentiable(signs)
        return x.pow(power) * scale, signs, x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        first, _, last = gradients
        assert last is None  # the third output is not used
        return first * ctx.power * x.pow(ctx.power - 1) * ctx.scale * 1.25, None, None


class Once(torch.autograd.Function):
    """Counts its calls on its class."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Once.calls += 1
        ctx.calls = Once.calls
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2 + 0.01 * ctx.calls


class Cubed(torch.autograd.Function):
    """With ``setup_context``, and a backward that can be differentiated."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.pow(3)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x.square()


def _own_function(model: nn.Module, x: Tensor) -> Tensor:
    first, signs, _ = Straight.apply(model(x), 2, 0.5)
    return (first * (2 + signs)).mean()  # type: ignore[no-any-return]


def _own_double(model: nn.Module, x: Tensor) -> Tensor:
    y = Cubed.apply(model(x)) * 0.3
    (gradient,) = torch.autograd.grad(y.square().sum(), model.parameters().__next__(), create_graph=True)
    return gradient.square().mean() + y.mean()  # type: ignore[no-any-return]


@idiom
def own_function_that_counts(patch: pytest.MonkeyPatch) -> TrainingCase:
    patch.setattr(Once, "calls", 0)
    model = linear()
    return TrainingCase(
        model, lambda m, x: Once.apply(m(x) * 1.0).square().mean(), sgd(model), seen=lambda: Once.calls, batch=x_of
    )


def _attentions(model: nn.Module, x: Tensor) -> Tensor:
    q = model(x).reshape(1, 2, -1, 2)
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    dropped = F.scaled_dot_product_attention(q, q, q, dropout_p=0.3)
    biased = F.scaled_dot_product_attention(q, q.flip(2), q, attn_mask=mask.float(), scale=0.3)
    return (dropped + biased + F.scaled_dot_product_attention(q, q, q, is_causal=True)).square().mean()


def _autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
        with torch.autocast("cpu", enabled=False):
            z = (y.float() @ x.t()).softmax(1)
    return z.float().square().mean() + y.float().mean()


IDIOMS |= {
    "many_losses": steady(lambda: nn.Linear(4, 4), _many_losses),
    "decompositions": steady(lambda: nn.Linear(4, 4), _decompositions),
    "sorting_and_picking": steady(lambda: nn.Linear(4, 4), _sorting),
    "spectra": steady(lambda: nn.Linear(4, 8), _spectra),
    "distributions": steady(lambda: nn.Linear(4, 4), _distributions),
    "straight_through": steady(lambda: nn.Linear(4, 4), _estimators),
    "functional_transforms": steady(two, _functional_transforms),
    "each_rows_gradient": steady(two, _each_rows_gradient),
    "hessian_times_vector": steady(two, _double_backward),
    "own_function": steady(linear, _own_function),
    "own_function_differentiated_twice": steady(linear, _own_double, optimizer=lambda m: sgd(m, lr=1e-3)),
    "attention_functions": steady(lambda: nn.Linear(4, 4), _attentions),
    "autocast_in_parts": steady(lambda: nn.Linear(4, 4), _autocast),
    "checkpointed_sequence": steady(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.4), nn.Tanh(), nn.Linear(6, 4)),
        lambda m, x: checkpoint_sequential(m, 2, x, use_reentrant=False).square().mean(),
    ),
}


@idiom
def loss_reads_the_clock(patch: pytest.MonkeyPatch) -> TrainingCase:
    now = iter(range(10**6))
    model = linear()

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return mean_square(m, x) * (1 + 0.01 * next(now))

    return TrainingCase(model, loss, sgd(model), batch=x_of, seen=lambda: next(copy.copy(now)))


@idiom
def loss_scaled_by_its_last_value(patch: pytest.MonkeyPatch) -> TrainingCase:
    model, kept = linear(), {"last": 1.0}
    return TrainingCase(
        model,
        lambda m, x: mean_square(m, x) / kept["last"],
        sgd(model),
        batch=x_of,
        between=lambda out: kept.update(last=out["loss"].item() + 0.5),
    )


# Batches.


def _aliased(i: int) -> dict[str, Tensor]:
    whole = x_of(i, 5, 4)
    return {"a": whole[:3], "b": whole[1:4], "c": whole.t()[:, :3].t(), "d": whole[0].expand(3, 4)}


@idiom
def batch_of_overlapping_views_written_by_the_loss(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = linear()

    def loss(m: nn.Module, b: Any) -> Tensor:
        b["a"][1:].add_(1)  # and with it "b" and "c"
        return (m(b["a"]) + m(b["b"]) * m(b["c"]) + m(b["d"])).square().mean()

    return TrainingCase(model, loss, sgd(model), batch=_aliased)


@idiom
def one_batch_object_refilled(patch: pytest.MonkeyPatch) -> TrainingCase:
    model: Any = linear()
    held: dict[str, Any] = {"x": torch.zeros(3, 4), "tags": [], "scale": np.float64(1)}

    def batch(i: int) -> Any:
        held["x"].copy_(x_of(i))
        held["tags"].append(f"step {i}")
        held["scale"] = np.float64(i) / 3
        held.pop("mask", None)
        if i % 2:
            held["mask"] = x_of(i) > 0
        return held

    def loss(m: nn.Module, b: Any) -> Tensor:
        y = m(b["x"]) * (float(b["scale"]) + len(b["tags"]))
        return y[b["mask"][:, :3]].square().sum() if "mask" in b else y.square().mean()

    return TrainingCase(model, loss, sgd(model, lr=1e-3), batch=batch)


IDIOMS |= {
    "last_batch_is_smaller": steady(linear, batch=lambda i: x_of(i, 2 if i % 3 == 2 else 5, 4)),
    "batch_of_no_rows": steady(
        linear,
        lambda m, x: m(x).square().sum(),
        batch=lambda i: x_of(i, 0 if i in (3, 6) else 3, 4),
        optimizer=sgd,  # without momentum: what moves without a gradient stands still (docs/guides/training.md)
    ),
    "batch_of_views_that_overlap": steady(
        linear, lambda m, b: sum(m(v).square().mean() for v in b.values()), batch=_aliased
    ),
    "batch_of_many_dtypes": steady(
        linear,
        lambda m, b: (m(b["x"].float()) * b["w"].float()[:, None]).square()[b["keep"]].mean() + b["u"].float().mean(),
        batch=lambda i: {
            "x": x_of(i).to([torch.float64, torch.bfloat16, torch.float16][i % 3]),
            "w": torch.tensor([1, 2, i], dtype=torch.int16),
            "keep": torch.tensor([True, i % 2 == 0, True]),
            "u": torch.tensor([3, i, 250], dtype=torch.uint8),
        },
    ),
}


# Hooks, modules and optimizers of training scripts.


@idiom
def gradient_noise(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = two()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient + 0.01 * torch.randn_like(gradient))
    return TrainingCase(model, mean_square, sgd(model, momentum=0.9), batch=x_of)


@idiom
def gradients_scaled_after_they_are_added_up(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = two()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: (p.grad.div_(p.grad.norm() + 1e-6), None)[1])
    return TrainingCase(model, mean_square, sgd(model, momentum=0.9), batch=x_of)


@idiom
def hook_that_removes_itself(patch: pytest.MonkeyPatch) -> TrainingCase:
    model, calls = two(), []

    def hook(module: Any, args: Any, out: Tensor) -> Tensor:
        calls.append(len(calls))
        if len(calls) == 4:
            handle.remove()
        return out * 1.5

    handle = model[0].register_forward_hook(hook)
    return TrainingCase(model, mean_square, sgd(model), batch=x_of, seen=lambda: calls)


@idiom
def parametrization_added_and_removed(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = two()

    def change(k: int) -> None:
        if k == 1:
            parametrize.register_parametrization(model[0], "weight", Positive())
        else:
            parametrize.remove_parametrizations(model[0], "weight", leave_parametrized=False)

    return TrainingCase(model, mean_square, sgd(model), change, batch=x_of)


@idiom
def model_copied_and_pickled(patch: pytest.MonkeyPatch) -> TrainingCase:
    model, seen = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), []

    def between(out: Any) -> None:
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other.eval()
            seen.append(other(x_of(0)).detach().sum())

    return TrainingCase(model, mean_square, sgd(model, momentum=0.9), batch=x_of, between=between, seen=lambda: seen)


@idiom
def optimizer_and_model_written_and_read(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = two()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    kept = io.BytesIO()

    def change(k: int) -> None:
        if k == 1:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, kept)
        else:
            kept.seek(0)
            state = torch.load(kept)
            model.load_state_dict(state["model"], assign=False)
            optimizer.load_state_dict(state["optimizer"])

    return TrainingCase(model, mean_square, optimizer, change, batch=x_of)


@idiom
def configuration_turns_dropout_off(patch: pytest.MonkeyPatch) -> TrainingCase:
    class Config:
        p, drop = 0.5, True

    config = Config()
    model = Masked(config)

    def change(k: int) -> None:
        config.drop = k == 2
        config.p = 0.2 * k

    return TrainingCase(model, mean_square, sgd(model), change, batch=x_of)


@idiom
def generator_seeded_anew(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = Generators()
    return TrainingCase(model, mean_square, sgd(model), lambda k: (model.generator.manual_seed(k), None)[1], batch=x_of)


@idiom
def averaged_weights(patch: pytest.MonkeyPatch) -> TrainingCase:
    """Stochastic weight averaging: its model, its schedule and its BatchNorm statistics."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    optimizer = sgd(model, momentum=0.9)
    averaged = swa_utils.AveragedModel(model)
    schedule = swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=3)
    seen: list[Any] = []

    def between(out: Any) -> None:
        averaged.update_parameters(model)
        schedule.step()
        swa_utils.update_bn([x_of(1), x_of(2)], averaged)
        averaged.eval()
        seen.append(averaged(x_of(0)).detach().sum())

    return TrainingCase(
        model, mean_square, optimizer, batch=x_of, between=between, seen=lambda: [seen, averaged.state_dict()]
    )


@idiom
def averages_swapped_in_to_evaluate(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = two()
    averages = {name: value.detach().clone() for name, value in model.named_parameters()}
    seen: list[Any] = []

    def between(out: Any) -> None:
        with torch.no_grad():
            for name, value in model.named_parameters():
                averages[name].lerp_(value, 0.1)
            kept = copy.deepcopy(model.state_dict())
            model.load_state_dict(averages)
            seen.append(model(x_of(0)).sum())
            model.load_state_dict(kept)

    return TrainingCase(model, mean_square, sgd(model), batch=x_of, between=between, seen=lambda: seen)


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer, and every third step goes half the way back."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.counted = inner, 0
        self.slow = [[p.detach().clone() for p in group["params"]] for group in inner.param_groups]
        super().__init__(inner.param_groups, {})
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        self.counted += 1
        if self.counted % 3 == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for p, s in zip(group["params"], slow, strict=True):
                    s.add_(p.detach() - s, alpha=0.5)
                    p.data.copy_(s)
        return loss


@idiom
def optimizer_that_looks_ahead(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = two()
    optimizer = Lookahead(torch.optim.Adam(model.parameters(), lr=0.05))
    return TrainingCase(model, mean_square, optimizer, batch=x_of, seen=lambda: optimizer.slow)


class Sharpness(torch.optim.Optimizer):
    """Climbs in a hook of ``zero_grad``'s caller: the perturbation of sharpness-aware minimisation, one step late."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "rho": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "climb" in state:
                    p.sub_(state["climb"])
                p.sub_(p.grad, alpha=group["lr"])
                state["climb"] = group["rho"] * p.grad / (p.grad.norm() + 1e-12)
                p.add_(state["climb"])


@idiom
def sharpness_aware_steps(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = two()
    return TrainingCase(model, mean_square, Sharpness(model.parameters(), 0.1), batch=x_of)


@idiom
def projected_by_a_step_hook(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = two()
    optimizer = sgd(model, momentum=0.9)

    def project(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.data.renorm_(2, 0, 0.8) if p.ndim > 1 else p.data.clamp_(-0.1, 0.1)

    optimizer.register_step_post_hook(project)
    return TrainingCase(model, mean_square, optimizer, batch=x_of)


@idiom
def plateau_and_chained_schedules(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = two()
    optimizer = torch.optim.Adam(
        [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.02}], lr=0.05
    )
    chained = lr_scheduler.ChainedScheduler(
        [lr_scheduler.PolynomialLR(optimizer, 8), lr_scheduler.MultiplicativeLR(optimizer, lambda k: 0.95)]
    )
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)
    return TrainingCase(
        model, mean_square, optimizer, scheduler=chained, batch=x_of, between=lambda out: plateau.step(out["loss"])
    )


@idiom
def group_and_layer_added(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def change(k: int) -> None:
        layer = nn.Linear(4, 4)
        model.append(layer)
        optimizer.add_param_group({"params": layer.parameters(), "lr": 0.01 * k, "weight_decay": 0.0})

    return TrainingCase(model, mean_square, optimizer, change, batch=x_of)


@idiom
def lazy_layers(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = nn.Sequential(nn.LazyLinear(6), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(3))
    model(x_of(0))
    return TrainingCase(model, mean_square, sgd(model), batch=x_of)


@idiom
def layers_dropped_at_random(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def loss(m: Any, x: Tensor) -> Tensor:
        for layer in m:
            if random.random() > 0.3:
                x = x + torch.tanh(layer(x))
        return x.square().mean()

    return TrainingCase(model, loss, torch.optim.Adam(model.parameters(), lr=0.05), batch=x_of)


@idiom
def buffers_assigned_in_forward(patch: pytest.MonkeyPatch) -> TrainingCase:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("last", None, persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
            out = y - self.mean if self.last is None else y - self.mean + 0.1 * self.last
            self.last = y.detach()[:1]
            return out  # type: ignore[no-any-return]

    model = Running()
    return TrainingCase(model, mean_square, sgd(model), batch=x_of)


@idiom
def gradient_surgery_inside_the_loss(patch: pytest.MonkeyPatch) -> TrainingCase:
    """Two tasks whose gradients are projected on one another, handed on by a loss whose gradient they are."""
    model = two()

    def loss(m: Any, x: Tensor) -> Tensor:
        weights = list(m.parameters())
        y = m(x)
        one = torch.autograd.grad(y.square().mean(), weights, retain_graph=True)
        other = torch.autograd.grad((y - x).abs().mean(), weights)
        dot = sum((a * b).sum() for a, b in zip(one, other, strict=True))
        joined = [a + b - torch.minimum(dot, torch.zeros(())) * b for a, b in zip(one, other, strict=True)]
        return sum((p * g.detach()).sum() for p, g in zip(weights, joined, strict=True))  # type: ignore

    return TrainingCase(model, loss, sgd(model), batch=x_of)


@idiom
def adversarial_batches(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = two()

    def loss(m: Any, x: Tensor) -> Tensor:
        delta = torch.zeros_like(x).uniform_(-0.1, 0.1).requires_grad_()
        (gradient,) = torch.autograd.grad((m(x + delta)).square().mean(), delta)
        attacked = (x + (delta + 0.1 * gradient.sign()).clamp(-0.1, 0.1)).detach()
        return mean_square(m, attacked)

    return TrainingCase(model, loss, sgd(model), batch=x_of)


@idiom
def inner_loop_of_a_copy(patch: pytest.MonkeyPatch) -> TrainingCase:
    """Meta-learning: two inner steps on a functional copy, differentiated through."""
    model = two()

    def loss(m: Any, x: Tensor) -> Tensor:
        quick = dict(m.named_parameters())
        for _ in range(2):
            inner = torch.func.functional_call(m, quick, (x,)).square().mean()
            found = torch.autograd.grad(inner, list(quick.values()), create_graph=True)
            quick = {name: p - 0.1 * g for (name, p), g in zip(quick.items(), found, strict=True)}
        return (torch.func.functional_call(m, quick, (x.flip(0),)) - x).square().mean()

    return TrainingCase(model, loss, torch.optim.Adam(model.parameters(), lr=0.05), batch=x_of)


@idiom
def ensemble_by_vmap(patch: pytest.MonkeyPatch) -> TrainingCase:
    members = [two() for _ in range(3)]
    base = copy.deepcopy(members[0]).to("meta")
    stacked, _ = torch.func.stack_module_state(members)
    model = nn.ParameterDict({name.replace(".", "_"): nn.Parameter(value.detach()) for name, value in stacked.items()})

    def loss(m: Any, x: Tensor) -> Tensor:
        values = {name: m[name.replace(".", "_")] for name in stacked}
        out = torch.vmap(lambda v: torch.func.functional_call(base, v, (x,)), randomness="different")(values)
        return out.square().mean() + out.var(0).mean()

    return TrainingCase(model, loss, sgd(model), batch=x_of)


# Changes in the middle of training, and inputs that are the model's own tensors.


@idiom
def loss_scaled_by_a_grad_scaler(patch: pytest.MonkeyPatch) -> TrainingCase:
    model, scaler = two(), torch.amp.GradScaler("cpu", init_scale=8.0)  # type: ignore[attr-defined]

    def loss(m: Any, x: Tensor) -> Any:
        return scaler.scale(mean_square(m, x)) / scaler.get_scale()

    return TrainingCase(
        model, loss, sgd(model), batch=x_of, between=lambda out: scaler.update(scaler.get_scale() * 1.5)
    )


@idiom
def generators_held_where_no_module_looks(patch: pytest.MonkeyPatch) -> TrainingCase:
    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.held = nn.Linear(4, 3), [{"drop": torch.Generator().manual_seed(7)}]

        def forward(self, x: Tensor) -> Tensor:
            keep = torch.empty_like(x).bernoulli_(0.7, generator=self.held[0]["drop"])
            return self.layer(x * keep)  # type: ignore[no-any-return]

    model = Holding()
    return TrainingCase(model, mean_square, sgd(model), batch=x_of, seen=lambda: model.held[0]["drop"].get_state())


@idiom
def random_state_forked_inside(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = two()

    def loss(m: Any, x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            noise = torch.randn(x.shape)
        return mean_square(m, x + noise + torch.randn(x.shape))

    return TrainingCase(model, loss, sgd(model), batch=x_of)


@idiom
def noise_of_an_optimizers_own_generator(patch: pytest.MonkeyPatch) -> TrainingCase:
    generator, model = torch.Generator().manual_seed(3), two()

    class Langevin(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(torch.randn(p.shape, generator=generator), alpha=0.01)

    return TrainingCase(model, mean_square, Langevin(model.parameters(), lr=0.1), batch=x_of, seen=generator.get_state)


@idiom
def transform_exchanged(patch: pytest.MonkeyPatch) -> TrainingCase:
    model, chosen = two(), {"jacobian": torch.func.jacrev}

    def loss(m: Any, x: Tensor) -> Tensor:
        values = dict(m.named_parameters())
        found = chosen["jacobian"](lambda row: torch.func.functional_call(m, values, (row,)))(x[0])
        return found.square().sum()  # type: ignore[no-any-return]

    def change(k: int) -> None:
        chosen["jacobian"] = torch.func.jacfwd if k == 1 else torch.func.jacrev

    return TrainingCase(model, loss, sgd(model), change, batch=x_of)


@idiom
def pruned_and_made_permanent(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = two()

    def change(k: int) -> None:
        if k == 1:
            prune.l1_unstructured(model[0], "weight", 0.4)
        else:
            prune.remove(model[0], "weight")

    return TrainingCase(model, mean_square, sgd(model, momentum=0.9), change, batch=x_of)


@idiom
def weights_tied_and_untied(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    old, optimizer = model[2].weight, sgd(model, momentum=0.9)

    def change(k: int) -> None:
        model[2].weight = model[0].weight if k == 1 else old

    return TrainingCase(model, mean_square, optimizer, change, batch=x_of)


@idiom
def tensor_learning_rate_changed_in_place(patch: pytest.MonkeyPatch) -> TrainingCase:
    model, rate = two(), torch.tensor(0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, foreach=False)
    return TrainingCase(model, mean_square, optimizer, lambda k: (rate.mul_(0.5), None)[1], batch=x_of)


@idiom
def tensor_learning_rate_becomes_a_number(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = two()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))

    def change(k: int) -> None:
        optimizer.param_groups[0]["lr"] = torch.tensor(0.03) if k == 1 else 0.2

    return TrainingCase(model, mean_square, optimizer, change, batch=x_of)


@idiom
def class_of_the_optimizer_replaced(patch: pytest.MonkeyPatch) -> TrainingCase:
    class Signs(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad.sign(), alpha=group["lr"])

    model = two()
    optimizer = sgd(model, momentum=0.9)

    def change(k: int) -> None:
        optimizer.__class__ = Signs if k == 1 else torch.optim.SGD

    return TrainingCase(model, mean_square, optimizer, change, batch=x_of)


@idiom
def averages_by_a_hook_of_the_optimizer(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = two()
    averages, optimizer = copy.deepcopy(model), sgd(model, momentum=0.9)

    @torch.no_grad()
    def hook(*_: Any) -> None:
        for average, p in zip(averages.parameters(), model.parameters(), strict=True):
            average.lerp_(p, 0.1)

    optimizer.register_step_post_hook(hook)
    return TrainingCase(
        model,
        lambda m, x: (m(x) - averages(x).detach() + 1).square().mean(),
        optimizer,
        batch=x_of,
        seen=averages.state_dict,
    )


@idiom
def parameters_moved_into_one_tensor(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = two()

    def change(k: int) -> None:
        flat, at = torch.cat([p.detach().flatten() for p in model.parameters()]), 0
        for p in model.parameters():
            p.data = flat[at : at + p.numel()].view(p.shape)
            at += p.numel()

    return TrainingCase(model, mean_square, sgd(model, momentum=0.9), change, batch=x_of)


@idiom
def batch_that_requires_a_gradient(patch: pytest.MonkeyPatch) -> TrainingCase:
    model, kept = two(), []

    def batch(i: int) -> Tensor:
        kept.append(x_of(i).requires_grad_(i % 3 == 1))
        return kept[-1]

    return TrainingCase(model, mean_square, sgd(model), batch=batch, seen=lambda: [x.grad for x in kept])


@idiom
def batch_that_is_a_parameter(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = two()
    return TrainingCase(
        model, mean_square, sgd(model), batch=lambda i: model[0].weight.detach()[:3] if i % 2 else model[0].weight[:3]
    )


@idiom
def batch_that_is_a_buffer_the_loss_writes(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = two()
    model.register_buffer("moved", torch.ones(3, 4))

    def loss(m: Any, x: Tensor) -> Tensor:
        m.moved.add_(0.1)
        return mean_square(m, x)

    return TrainingCase(model, loss, sgd(model), batch=lambda i: model.moved[:])


@idiom
def strides_of_the_batch_are_read(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = two()
    forms: list[Callable[[Tensor], Tensor]] = [
        lambda x: x,
        lambda x: x.t().contiguous().t(),
        lambda x: x.repeat(2, 2)[::2, ::2],
        lambda x: x[:1].expand(3, 4),
    ]
    return TrainingCase(
        model, lambda m, x: mean_square(m, x) * x.stride(1), sgd(model), batch=lambda i: forms[i % 4](x_of(i))
    )


@idiom
def executor_inside_the_loss(patch: pytest.MonkeyPatch) -> TrainingCase:
    model, inner = two(), two()
    executor = ab.Executor(ab.TrainStep(inner, mean_square, sgd(inner)), engine="graph")

    def loss(m: Any, x: Tensor) -> Tensor:
        executor.run(batch=x)
        return (m(x) - inner(x).detach()).square().mean()  # type: ignore[no-any-return]

    return TrainingCase(model, loss, sgd(model), batch=x_of, seen=inner.state_dict, undo=executor.close)
