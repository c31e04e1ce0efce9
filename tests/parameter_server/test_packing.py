"""Packed numbers: exact without compression, few bytes and small errors with it."""

from __future__ import annotations

import pytest
import torch
from clusters import cluster
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from anabranch.errors import NonFinite, SchemaError
from anabranch.parameter_server import ParameterClient, RemoteTables
from anabranch.parameter_server.messages import Share, acceptable, expected, join, split
from anabranch.tables import Cache, Normal, RowOptimizer, TableSpec
from anabranch.tables.optimizers.row_optimizers import Family

DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
SHARES = st.lists(
    st.builds(
        Share, DTYPES, st.tuples(st.integers(0, 5), st.integers(1, 20)), st.sampled_from(["exact", "rows", "states"])
    ),
    max_size=6,
)


@given(SHARES, st.sampled_from([None, "bfloat16", "int8"]))
def test_join_and_split_are_inverse(shares, compression):
    tensors = [torch.randn(share.shape).to(share.dtype) for share in shares]
    flat = join(tensors, shares, compression)
    assert [(tensor.dtype, tuple(tensor.shape)) for tensor in flat] == expected(shares, compression)
    assert sum(tensor.nbytes for tensor in flat) <= sum(share.bytes(compression) for share in shares)
    for tensor, found, share in zip(tensors, split(flat, shares, compression), shares, strict=True):
        assert (found.dtype, found.shape) == (share.dtype, share.shape)
        if compression is None or share.kind == "exact":
            assert torch.equal(found, tensor)


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1.0, 1e6])
def test_8_bits_are_off_by_a_hundredth_of_the_largest_of_16_at_most(scale):
    rows = torch.randn(1000, 16) * torch.rand(1000, 1) * scale
    share = Share(torch.float32, tuple(rows.shape), "rows")
    flat = join([rows], [share], "int8")
    (found,) = split(flat, [share], "int8")
    assert ((found - rows).abs() <= rows.abs().amax(1, keepdim=True) / 177).all()
    assert sum(tensor.nbytes for tensor in flat) <= 0.27 * rows.nbytes
    (halves,) = join([rows], [share], "bfloat16")
    assert halves.nbytes <= 0.5 * rows.nbytes


def test_zeros_and_the_largest_numbers_pass():
    rows = torch.tensor([[0.0] * 16, [3e38] * 16, [-4.5e18] * 16])
    share, two = Share(torch.float32, (3, 16), "rows"), Share(torch.float32, (2, 16), "rows")
    zero, large = split(join([rows[::2]], [two], "int8"), [two], "int8")[0]
    assert (zero == 0).all()
    torch.testing.assert_close(large, rows[2], rtol=0.01, atol=0)
    assert torch.isfinite(split(join([rows], [share], "bfloat16"), [share], "bfloat16")[0]).all()


@pytest.mark.parametrize("large", [4.6e18, -1e30, 3e38, 1e300])
def test_a_number_too_large_for_8_bits_is_refused(large: float) -> None:
    """It arrived as 4.58e18, which is another number, and nobody was told."""
    rows = torch.ones(3, 16, dtype=torch.float64)
    rows[1, 3] = large
    share = Share(torch.float64, (3, 16), "rows")
    assert not acceptable([rows], "bfloat16")
    assert not acceptable([rows], "int8")
    with pytest.raises(NonFinite, match=r'carries at most 4.576e\+18; use "bfloat16"'):
        join([rows], [share], "int8")


@pytest.mark.parametrize("cache", [None, Cache(capacity=8, push_bound=3)])
def test_a_client_neither_pushes_nor_reads_values_that_8_bits_cannot_carry(cache: Cache | None) -> None:
    module = nn.Embedding(4, 16, sparse=True)
    with cluster(2) as servers:
        exact, rounded = (servers.client(compression=how) for how in (None, "int8"))
        tables = servers.enter(RemoteTables(rounded, cache=cache))
        tables.adopt(module, ["weight"], torch.optim.SGD(module.parameters(), lr=10.0))
        before = exact.pull("weight")
        tables.begin(0)
        factors = torch.tensor([1.0, 1e30, 1.0, 1.0])[:, None]
        (module(torch.arange(4)) * factors).sum().backward()
        with pytest.raises(NonFinite, match="at most 4.576e"):
            tables.push()
        tables.flush()
        assert torch.equal(exact.pull("weight"), before)
        exact.sparse_push("weight", torch.tensor([2]), torch.full((1, 16), 9e17))
        with pytest.raises(NonFinite, match="at most 4.576e"):
            rounded.pull("weight")
        torch.testing.assert_close(rounded.sparse_pull("weight", torch.tensor([3])), before[3:], rtol=0, atol=0.05)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("compression", [None, "bfloat16", "int8"])
def test_nan_is_distinguished_from_numbers_at_the_receiver(bad, compression):
    rows = torch.ones(4, 16)
    share = Share(torch.float32, (4, 16), "rows")
    assert acceptable(join([rows], [share], compression))
    rows[2, 5] = bad
    assert not acceptable(join([rows], [share], compression))


def test_other_numbers_than_the_shares_need_are_refused():
    share = Share(torch.float32, (2, 16), "rows")
    codes, scales = join([torch.ones(2, 16)], [share], "int8")
    for flat in ([codes], [codes, scales[:1]], [scales, codes], [codes[:-1], scales], [codes.view(2, 16), scales]):
        with pytest.raises(SchemaError, match="expected"):
            split(flat, [share], "int8")


@pytest.mark.parametrize("compression", ["bfloat16", "int8"])
def test_rows_come_and_go_in_fewer_bytes_and_dense_parameters_are_exact(compression):
    bytes_of = {}
    for how in (None, compression):
        with ParameterClient(compression=how) as client:
            rule = RowOptimizer(Family.SGD, lr=0.5)
            client.init_table(TableSpec("rows", None, 16, initial=Normal(0.0, 1.0)), rule)
            exact = torch.tensor([1.0, 1 / 3])
            client.init("dense", (2,), init=exact)
            ids = torch.tensor([2**53, 2**53 + 1, -(2**63) + 1, 7])
            before = client.sparse_pull("rows", ids)
            grads = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
            client.sparse_push("rows", ids, grads)
            moved = before - client.sparse_pull("rows", ids)
            torch.testing.assert_close(moved, 0.5 * grads, rtol=0, atol=0.05 if how else 1e-6)
            assert torch.equal(client.pull("dense"), exact)
            bytes_of[how] = client.traffic()["rows"].bytes - 3 * ids.nbytes
            with pytest.raises(NonFinite, match="rows hold NaN"):
                client.sparse_push("rows", ids, grads * torch.nan)
            assert list(client.statistics()[0].refused_values.values()) == [1]
    assert bytes_of[compression] <= {"bfloat16": 0.5, "int8": 0.27}[compression] * bytes_of[None]
    with pytest.raises(ValueError, match="'int4'"):
        ParameterClient(compression="int4")  # type: ignore[arg-type]
