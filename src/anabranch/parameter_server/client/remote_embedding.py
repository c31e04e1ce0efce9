"""``RemoteEmbedding``: an embedding whose rows are created on the servers, and never all on a worker."""

from __future__ import annotations

import copy
import uuid
import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from anabranch.autodiff.boundary.whole_calls import WholeCall
from anabranch.autodiff.moved_parameter import Switch
from anabranch.choices import choice
from anabranch.job import job
from anabranch.parameter_server.client.parameter_client import ParameterClient
from anabranch.parameter_server.client.remote_weight import WeightSource, look_up, unique_of
from anabranch.parameter_server.client.saved_tables import for_optimizer, restore_some
from anabranch.tables.optimizers.row_optimizers import OptimizerFactory, RowOptimizer
from anabranch.tables.table_spec import Constant, Eviction, Initial, Normal, TableSpec

_STANDARD_NORMAL = Normal()
_CURE = (
    "look rows up, read them with a ParameterClient, and leave on_servers out of what sums, counts, copies or averages "
    "parameters (`if not name.endswith('on_servers')`); a penalty belongs to the rows' optimizer: weight_decay="
)


class RemoteEmbedding(nn.Module):
    """Looks rows up on the servers, and pushes their gradients there.

    >>> def sgd(rows):
    ...     return torch.optim.SGD(rows, lr=0.5)
    >>> users = RemoteEmbedding("users", None, 2, init=0.5, optimizer=sgd)
    >>> # alone, its push is applied at once
    >>> users(torch.tensor([2**53 + 1, -7])).sum().backward()
    >>> users(torch.tensor([2**53 + 1, 2**53])).detach()
    tensor([[0.0000, 0.0000],
            [0.5000, 0.5000]])
    >>> users.close()

    It can be copied and pickled: it holds the table's name, and reaches the servers where it is used.

    In the ``TrainStep`` of an executor the pushes of a step are ordered by its consistency. Only rows that were
    looked up move, as under ``torch.optim.SparseAdam``. Its only parameter, ``on_servers``, has no numbers and is not
    saved: ``requires_grad_(False)`` of the module, or of the model, freezes the rows.

    Args:
        name: of the table, for all workers and checkpoints; letters, digits, ``_ - .``.
        num_embeddings: ids are ``range(num_embeddings)``; ``None`` takes any int64 as an id, and training admits it.
        embedding_dim: numbers per row.
        mode: ``None`` gives a row for each id, ``[*ids.shape, embedding_dim]``; ``"sum"``, ``"mean"`` and ``"max"``
            reduce bags as ``torch.nn.EmbeddingBag`` does, with ``offsets`` and ``per_sample_weights``.
        init: the first values of rows: a number, ``Constant``, ``Uniform`` or ``Normal``.
        optimizer: makes the optimizer that moves the rows; ``None`` takes the ``TrainStep``'s.
        capacity: most rows of a dynamic vocabulary, over all servers.
        eviction: the row to evict from a full table: the one unused longest (``"age"``) or used in the fewest steps.
        admission: probability that a training use admits a new id; until then it reads as its first values.
        memory_map: the servers keep the table in a mapped file of theirs, for tables larger than memory.
        dtype: float32 (whatever torch's default), float64, bfloat16 or float16, of the rows here and on the servers.
        seed: with the name, fixes the first values of all rows.

    Raises:
        ValueError: an invalid value, or in training no optimizer.
    """

    def __init__(
        self,
        name: str,
        num_embeddings: int | None,
        embedding_dim: int,
        *,
        mode: Literal["sum", "mean", "max"] | None = None,
        init: float | Initial = _STANDARD_NORMAL,
        optimizer: OptimizerFactory | None = None,
        capacity: int | None = None,
        eviction: Eviction = "age",
        admission: float = 1.0,
        memory_map: bool | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        super().__init__()
        mode = choice("mode", mode, (None, "sum", "mean", "max"))
        initial = Constant(float(init)) if isinstance(init, (int, float)) else init
        self.spec = TableSpec(
            name, num_embeddings, embedding_dim, dtype, initial, seed, capacity=capacity, eviction=eviction,
            admission=admission, memory_map=bool(memory_map),
        )  # fmt: skip
        self.name = name
        self.mode = mode
        self._rule = None if optimizer is None else RowOptimizer.from_factory(optimizer)
        self._link = _Link()
        self.on_servers = Switch(f"on_servers stands for the rows of RemoteEmbedding {name}", _CURE, dtype)
        self._whole_call = WholeCall(self)

    def _save_to_state_dict(self, *args: Any) -> None:
        """Save nothing: there are no numbers here."""

    def _load_from_state_dict(self, *args: Any) -> None:
        with self.on_servers.out_of(self):
            super()._load_from_state_dict(*args)

    @property
    def rule(self) -> Callable[[], RowOptimizer] | None:
        """The optimizer given to it, if any."""
        rule = self._rule
        return None if rule is None else lambda: rule

    @property
    def last_rule(self) -> RowOptimizer | None:
        """The optimizer given to it, or that of the executor that it was in last."""
        return self._rule or self._link.rule

    @property
    def source(self) -> WeightSource | None:
        """The source of its rows, if it is connected."""
        return self._link.source

    def attach(self, source: WeightSource) -> None:
        """Read from ``source`` from now on, and send gradients there."""
        self._link.source = source

    def check_new(self, client: ParameterClient) -> None:
        """Raise ``ValueError`` if its table, not there yet, would begin without the rows that this module had."""
        link, alone = self._link, self._link.client
        here = link.rows is not None
        if alone is not None and alone.in_process and not alone.forked:
            here = here or bool(alone.steps().get(self.name))
        if (link.lost or (here and not client.in_process)) and not client.steps().get(self.name):
            where = "in the memory of the process that pickled it" if link.lost else "trained without servers"
            raise ValueError(
                f"the rows of RemoteEmbedding {self.name} were {where}, and its table would begin anew here; save "
                "them there with executor.save, and load that into a RemoteEmbedding made anew with executor.load"
            )

    def put_back(self, client: ParameterClient, rule: RowOptimizer) -> None:
        """Set the rows that were kept here, where they are to be read from now on."""
        if self._link.rows is None or not client.in_process:
            return
        (entry,), groups = self._link.rows
        if not RowOptimizer.from_dict(entry["rule"]).same_layout(rule):
            groups, entry = for_optimizer(entry, groups, rule), {**entry, "rule": rule.to_dict(), "step": 0}
        restore_some(client, {"tables": [entry], "dense": []}, groups)
        self._link.rows = None

    def leave(self, client: ParameterClient, rule: RowOptimizer | None) -> None:
        """Read no longer through ``client``, which is closed next: rows that end with it are kept here.

        ``rule`` is ``None`` where they were only read.
        """
        rows, source = None if rule is not None or client.in_process else self._link.rows, self._link.source
        try:
            if (theirs := _rows_of(self.name, client)) is not None:
                rows, rule = theirs, rule or RowOptimizer.from_dict(theirs[0][0]["rule"])
        finally:
            for link in self._link.alike:
                if link.source is source:
                    link.source, link.rule, link.rows = None, rule or link.rule, rows

    def forward(self, ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Rows of ``ids``, or with a ``mode`` one row a bag."""
        args = (self.on_servers.requires_grad, ids, offsets, per_sample_weights)
        if torch.compiler.is_dynamo_compiling():
            return self._whole_call(*args)[0]
        return self.call_whole(*args)[0]

    def call_whole(
        self, trained: bool, ids: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None
    ) -> list[Tensor]:
        """``forward``, as one call that Dynamo does not trace into; constants if it is not ``trained``."""
        return [look_up(self._reach, self.spec, trained, None, ids, offsets, per_sample_weights, mode=self.mode)]

    def _reach(self) -> WeightSource:
        link = self._link
        if link.client is not None and link.client.forked and not link.client.in_process:
            # A forked child of the process that connected.
            link.client = link.source = None
        return link.source or self._alone()

    def _alone(self) -> WeightSource:
        rule = self.last_rule
        if rule is None:
            raise ValueError(
                f"RemoteEmbedding {self.name} has no optimizer; give it one with optimizer=, or run it in a TrainStep"
            )
        client = self._link.client or self._connect(rule)
        source = self._link.source = _DirectSource(self.name, client, self)
        return source

    def _connect(self, rule: RowOptimizer) -> ParameterClient:
        client = ParameterClient()
        try:
            self.check_new(client)
            client.init_table(self.spec, rule)
            self.put_back(client, rule)
        except BaseException:
            client.close()
            raise
        self._link.client, self._link.owned = client, True
        return client

    def close(self) -> None:
        """Close the client that the module made for itself, if any; rows that end with it are kept here."""
        client, owned = self._link.client, self._link.owned
        if client is None:
            return
        rows = _rows_of(self.name, client)
        for link in self._link.alike if owned else (self._link,):
            if link.client is client:
                link.client, link.source, link.rows, link.owned = None, None, rows, False
        if owned:
            client.close()

    def extra_repr(self) -> str:
        """Return the table, for ``repr``."""
        return f"{self.name!r}, {self.spec.rows}, {self.spec.width}, mode={self.mode!r}"


_Rows = tuple[list[dict[str, Any]], dict[str, dict[str, Tensor]]]
"""What ``ParameterClient.collect`` tells of one table, and its groups."""


def _rows_of(name: str, client: ParameterClient) -> _Rows | None:
    """Return the rows that end with ``client``, if they are in this process's memory."""
    if not client.in_process or client.forked:
        return None
    with client.collect([name]) as saved:
        groups = {key: dict(group) for key, group in saved.groups()}
        return (saved.state["tables"], groups) if saved.state["tables"] else None


class _Link:
    """The source that the module reads from; a separate object, because connecting does not change the model.

    Attributes:
        source: where rows are read: an executor's, or that of ``client``.
        client: created by the module for itself, or by the module that it was copied from.
        owned: the module created the client, and so closes it.
        rule: the optimizer of the executor that it was in.
        rows: those that were in this process's memory, until they are looked up again.
        alike: this link, that of the module that it was copied from, and those of other copies.
        lost: the rows were in the memory of another process.
    """

    def __init__(self) -> None:
        self.source: WeightSource | None = None
        self.client: ParameterClient | None = None
        self.owned = self.lost = False
        self.rule: RowOptimizer | None = None
        self.rows: _Rows | None = None
        self.alike = weakref.WeakSet([self])

    def __deepcopy__(self, memo: dict[int, object]) -> _Link:
        """Return a link to the same table."""
        copied = _Link()
        copied.client, copied.rule, copied.rows, copied.lost = self.client, self.rule, self.rows, self.lost
        if self.client is None:
            copied.source = self.source
        copied.alike = self.alike
        copied.alike.add(copied)
        return copied

    def __reduce__(self) -> tuple[Callable[..., _Link], tuple[object, ...]]:
        here = self.client.in_process if self.client is not None else self.source is not None and not job().servers
        if here:
            token = uuid.uuid4().hex
            _links[token] = self
            return _link_again, (self.rule, None, token)
        return _link_again, (self.rule, self.rows, "" if self.lost else None)


_links: weakref.WeakValueDictionary[str, _Link] = weakref.WeakValueDictionary()
"""The links to tables in this process's memory, of modules that were pickled."""


def _link_again(rule: RowOptimizer | None, rows: _Rows | None, token: str | None) -> _Link:
    """Return the link of an unpickled module, to the same table if that is in this process's memory."""
    if token is not None and (there := _links.get(token)) is not None:
        return copy.deepcopy(there)
    link = _Link()
    link.rule, link.rows, link.lost = rule, rows, token is not None
    return link


class _DirectSource:
    """The table of a module outside any step: reads the present values, pushes at once."""

    def __init__(self, name: str, client: ParameterClient, module: RemoteEmbedding) -> None:
        self.name, self._client, self._module = name, client, module

    def read(self, ids: Tensor) -> Tensor:
        training = self._module.training and torch.is_grad_enabled()
        return self._client.pull_many({self.name: ids}, training=training)[self.name].rows

    def distinct(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return unique_of(ids)

    def take_gradient(self, ids: Tensor, grads: Tensor) -> None:
        if self._module.on_servers.requires_grad:  # frozen since the lookup, too
            self._client.push_many({self.name: (ids, grads)})
