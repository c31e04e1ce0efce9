"""Parameters on the servers of which every worker holds a copy: read whole, once a step has been applied.

Dense parameters are always held so; a table is if the worker prefers to refresh all of it over requesting the rows of
each batch. Of a table only the rows with a gradient are pushed: the servers update the others as the optimizer does.

A read overwrites manual changes of a copy, so the values read are kept to detect them, at the start and the end of a
step. Comparing bits costs about 5 % of a read (64 MiB: 12 of 235 ms) and the memory of the copies once more.
``Tensor._version`` would cost nothing, but does not count writes through ``.data``, and counts those that were undone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anabranch.autodiff.moved_parameter import Ways
from anabranch.parameter_server.client.parameter_client import ParameterClient
from anabranch.parameter_server.client.remote_tables import Beside, spec_of
from anabranch.parameter_server.client.saved_tables import write_dense, write_rows
from anabranch.tables.optimizers.row_optimizers import RowOptimizer, from_torch
from anabranch.tables.table_spec import TableSpec

# As fast as memory is read, and NaN is NaN; torch.equal takes half as long again.
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_NO_IDS = torch.empty(0, dtype=torch.int64, device="cpu")


@dataclass(frozen=True, slots=True)
class _Copy:
    parameter: nn.Parameter
    rule: Callable[[], RowOptimizer]
    spec: TableSpec | None
    ways: Ways | None


class WholeParameters:
    """The copies that one worker holds.

    >>> from anabranch.tables import Family, RowOptimizer
    >>> bias = nn.Parameter(torch.ones(2))
    >>> with ParameterClient() as client:
    ...     whole = WholeParameters(client)
    ...     whole.take_over("bias", bias, lambda: RowOptimizer(Family.SGD, lr=0.5))
    ...     client.push_many({"bias": (torch.empty(0, dtype=torch.int64), torch.ones(2))})
    ...     whole.refresh(None)
    ...     bias.data
    tensor([0.5000, 0.5000])
    """

    def __init__(self, client: ParameterClient) -> None:
        self._client = client
        self._copies: dict[str, _Copy] = {}
        self._read: dict[str, Tensor] = {}

    @property
    def names(self) -> list[str]:
        """The parameters, in the order in which they were taken over."""
        return list(self._copies)

    def take_over(
        self,
        name: str,
        parameter: nn.Parameter,
        rule: Callable[[], RowOptimizer],
        state: Mapping[str, object] | None = None,
        *,
        sparse: bool | None = None,
        adopt: bool = False,
        ways: Ways | None = None,
    ) -> None:
        """Put the leading worker's values on the servers, under ``name``; they are available after a barrier.

        Args:
            name: its name on the servers.
            parameter: stays here as a copy.
            rule: its optimizer, with the numbers that it has at the time of the call.
            state: its optimizer's state so far, as torch names it.
            sparse: for a table, whether its lookups have sparse gradients; ``None`` for any other parameter.
            adopt: the servers hold it, and their values and state count; read them with ``refresh``.
            ways: to it, in the models.
        """
        numbers = rule()
        state_here = from_torch(numbers, parameter.detach(), state or {})
        spec = None
        if sparse is not None:
            spec = spec_of(name, parameter, numbers, sparse=sparse)
            self._client.init_table(spec, numbers)
            if self._client.leads and not adopt:
                write_rows(self._client, name, state_here, numbers)
        elif adopt:
            self._client.init_dense(name, parameter, numbers)  # which compares shapes, and leaves the values there
        elif self._client.leads:
            write_dense(self._client, name, state_here, numbers)
        else:
            self._client.expect_dense(name, parameter, numbers)
        self._copies[name] = _Copy(parameter, rule, spec, ways)
        self._read[name] = parameter.detach().clone()

    def spec(self, name: str) -> TableSpec:
        """Return the servers' spec of one table."""
        spec = self._copies[name].spec
        assert spec is not None
        return spec

    def refresh(self, step: int | None) -> None:
        """Read all of them, in one message per shard, once ``step`` may read."""
        if not self._copies:
            return
        wanted = {
            name: torch.arange(len(one.parameter), device="cpu") if one.spec else _NO_IDS
            for name, one in self._copies.items()
        }
        read = self._client.pull_many(wanted, step=step)
        self._read = {}  # nothing can be told of copies that Ctrl-C leaves half written
        with torch.no_grad():
            for name, pulled in read.items():
                self._copies[name].parameter.copy_(pulled.rows)
        self._read = {name: _as_read(self._copies[name].parameter, pulled.rows) for name, pulled in read.items()}

    def changed(self) -> list[str]:
        """Return the copies that are not as they were read, or that are in the model no longer."""
        if not self._copies:
            return []
        replaced = [name for name, one in self._copies.items() if one.ways and one.ways.replaced() is not None]
        written = (
            name for name, read in self._read.items() if not _same_bits(self._copies[name].parameter.detach(), read)
        )
        return list(dict.fromkeys([*replaced, *written]))

    def beside(self, gradients: Mapping[str, Tensor]) -> Beside:
        """Return the contents of a push for these gradients, dense or sparse ones."""
        return {
            name: (*self._as_pushed(name, gradient), self._copies[name].rule()) for name, gradient in gradients.items()
        }

    def _as_pushed(self, name: str, gradient: Tensor) -> tuple[Tensor, Tensor]:
        if self._copies[name].spec is None:
            return _NO_IDS, gradient.to_dense() if gradient.is_sparse else gradient
        if gradient.is_sparse:
            merged = gradient.coalesce()
            return merged._indices()[0].cpu(), merged._values()
        ids = torch.nonzero((gradient != 0).any(1))[:, 0]
        return ids.cpu(), gradient[ids]


def _as_read(parameter: Tensor, rows: Tensor) -> Tensor:
    """Return what ``parameter`` holds once ``rows`` were copied to it: ``rows``, where that needs no memory."""
    alike = parameter.dtype == rows.dtype and parameter.device == rows.device and parameter.is_contiguous()
    return rows if alike else parameter.detach().clone()


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    one, other = one.to(other.device).contiguous(), other.contiguous()
    if one.device.type == "cpu":
        return bool(_memcmp(one.data_ptr(), other.data_ptr(), one.nbytes) == 0)
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))
