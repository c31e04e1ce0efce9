"""Receive buffers: reused when the last tensor in them is freed, and not before."""

from __future__ import annotations

import torch

from anabranch.pipeline.links.receive_buffers import Buffers

ROWS = 1 << 14


def test_a_buffer_serves_again_when_its_tensor_and_every_view_of_it_is_freed():
    buffers = Buffers()
    x = buffers.empty("float32", [ROWS, 4])
    view, address = x[3:], x.data_ptr()
    del x
    other = buffers.empty("float32", [ROWS, 4])
    assert other.data_ptr() != address
    del view
    assert buffers.empty("int64", [ROWS]).data_ptr() == address


def test_a_much_smaller_tensor_leaves_a_large_buffer_alone():
    buffers = Buffers()
    large = buffers.empty("float64", [64 * ROWS])
    address = large.data_ptr()
    del large
    assert buffers.empty("float32", [ROWS]).data_ptr() != address
    assert buffers.empty("float64", [60 * ROWS]).data_ptr() == address


def test_tensors_have_the_requested_form_and_independent_versions():
    buffers = Buffers()
    for shape in ([], [0, 3], [5], [ROWS, 3]):
        x = buffers.empty("bfloat16", shape)
        assert (x.dtype, list(x.shape)) == (torch.bfloat16, shape)
    x, y = buffers.empty("float32", [ROWS]), buffers.empty("float32", [ROWS])
    x.zero_()
    assert y._version == 0
