"""The operators that a graph from a file may call: those that check what they are given.

Many of PyTorch's operators trust their arguments: given an index out of range, or the statistics of other sizes that a
backward takes, they read and write foreign memory. What computes element by element checks its shapes, and so do
PyTorch's core operators apart from a few; others stand here once mutated arguments have not made them fail. A backward
is not needed in a file: ``ab.gradients`` derives it from the loaded forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

__all__ = ["check_sizes", "is_listed"]

_MORE = """
_conj _fft_c2c _is_all_true _linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd
_log_softmax_backward_data _prelu_kernel _prelu_kernel_backward _safe_softmax
_scaled_dot_product_flash_attention_for_cpu _softmax_backward_data _trilinear _unsafe_view adaptive_max_pool2d
addbmm addmv addr affine_grid_generator all aminmax arange baddbmm bernoulli bernoulli_ binary_cross_entropy
binary_cross_entropy_backward binary_cross_entropy_with_logits bincount block_diag bucketize cauchy_ channel_shuffle
cholesky_solve complex convolution_backward copy_ count_nonzero cummax cummin cumprod detach diag_embed
diagonal_copy diagonal_scatter dist dot elu_backward empty_like exponential_ eye fill_ floor_divide floor_divide_
geometric_ glu glu_backward grid_sampler_3d hardshrink_backward hardsigmoid_backward hardswish hardswish_
hardswish_backward hardtanh_backward histc huber_loss huber_loss_backward im2col index_add index_add_ index_copy
index_fill index_put_ index_reduce kthvalue leaky_relu_backward lift_fresh lift_fresh_copy linalg_cholesky_ex
linalg_cross linalg_inv_ex linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp linalg_pinv linalg_qr
linalg_solve_triangular linalg_vector_norm linspace log_normal_ log_sigmoid_backward log_sigmoid_forward
logcumsumexp logspace logsumexp lu_unpack masked_fill masked_fill_ masked_select max median min mish_backward mode
mse_loss mse_loss_backward multinomial mv nanmedian nansum native_batch_norm new_empty new_empty_strided new_full
new_ones new_zeros nll_loss2d_forward nll_loss_forward norm normal normal_ ones ones_like pixel_shuffle
pixel_unshuffle poisson polar rand_like randint randn_like random_ renorm repeat_interleave replication_pad1d roll
rot90 scatter_ scatter_add_ scatter_reduce_ searchsorted select_backward slice_backward smooth_l1_loss
smooth_l1_loss_backward soft_margin_loss soft_margin_loss_backward softplus_backward softshrink_backward split
squeeze squeeze_ stack std std_mean sum t take trace transpose transpose_ tril tril_indices triu triu_indices unbind
unfold uniform_ unsafe_split unsqueeze_ upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d
upsample_nearest2d upsample_nearest3d upsample_trilinear3d var_mean vdot view_as_complex view_as_real zero_ zeros
zeros_like
"""
_LISTED = frozenset(_MORE.split())
# Of the core operators.
_UNSAFE = frozenset({"_embedding_bag", "_pdist_forward", "resize_"})


def is_listed(operator: OpOverload) -> bool:
    """Return True if a graph from a file may call ``operator``."""
    if operator.namespace != "aten":
        return False
    name = operator._schema.name.removeprefix("aten::")
    if name in _LISTED or name.startswith("_foreach_") or torch.Tag.pointwise in operator.tags:
        return True
    return torch.Tag.core in operator.tags and name not in _UNSAFE and "backward" not in name


def check_sizes(name: str, tensors: Sequence[Tensor]) -> None:
    """Refuse tensors whose sizes two operators trust that usual models cannot do without: BatchNorm its weights and
    statistics, attention its keys, values and mask.
    """
    fits = True
    if "batch_norm" in name:
        fits = all(tensor.numel() == tensors[0].shape[1] for tensor in tensors[1:])
    elif "flash_attention" in name:
        query, key, value = (tensor.shape for tensor in tensors[:3])
        scores = (*query[:3], key[2])
        fits = key == value and key[:2] == query[:2] and key[3] == query[3] and query.numel() * key.numel() > 0
        masks = [torch.broadcast_shapes(mask.shape, scores) for mask in tensors[3:]]  # type: ignore[no-untyped-call]
        fits = fits and all(mask == scores for mask in masks)
    if not fits:
        raise ValueError(f"sizes {[tuple(tensor.shape) for tensor in tensors]} do not belong together")
