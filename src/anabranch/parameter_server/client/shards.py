"""The shards as a client sees them: requests to all of them at once, and the tables and parameters that they hold."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from anabranch.deadline import Deadline
from anabranch.errors import NotFound, PeerLost, ProtocolError, RolledBack, SchemaError
from anabranch.parameter_server.client.row_messages import Layout
from anabranch.parameter_server.messages import (
    AcknowledgedPushes,
    DropMessage,
    ExpectedState,
    InitMessage,
    PushReply,
    Share,
)
from anabranch.record import spans
from anabranch.tables.optimizers.row_optimizers import RowOptimizer
from anabranch.tables.table_spec import ALLOWED_DTYPES, Placement, TableSpec
from anabranch.tables.warming import compile_kernels
from anabranch.tensors.dtypes import dtype_named
from anabranch.transport import Answer, Client, Request, pack, unpack
from anabranch.transport.frame import ReplyHeader

_T = TypeVar("_T")
_NUMBERED = frozenset({"init", "join", "push", "restore", "drop"})
LONGEST = 64 << 20  # bytes of an answer whose length is not known before: names and numbers of a shard's tables
_REMEMBERED = 64  # messages of different tables


class ShardCalls:
    """Sends requests to the shards.

    Args:
        client: sends the requests.
        endpoints: of all shards, in their order.
        timeout: seconds that a call may take.
        watch: called at intervals while waiting for other workers; raises if one of them is known to be lost.
        look_every: seconds until the first call.

    Attributes:
        shards: the number of shards.
        acknowledged: for each endpoint, the numbers of this client's pushes.
        full: tables that have had no room for an id.
        rolled_back: true once a shard has said that it lost pushes of this client, until it is set back.
    """

    def __init__(
        self,
        client: Client,
        endpoints: Sequence[str],
        timeout: float,
        watch: Callable[[], None] | None,
        look_every: float,
    ) -> None:
        self._client, self.endpoints, self.timeout = client, list(endpoints), timeout
        self.shards = len(self.endpoints)
        self._watch, self._look_every = watch, look_every
        self.acknowledged = {endpoint: AcknowledgedPushes() for endpoint in endpoints}
        self.rolled_back = False
        self.full: set[str] = set()
        self._noting = threading.Lock()

    def request(
        self,
        shard: int,
        verb: str,
        payload: bytes = b"",
        tensors: Sequence[Tensor] = (),
        *,
        step: int | None = None,
        answer_bytes: int = 0,
    ) -> Request:
        """Return a request to one shard, with this client's expected state there, and the most bytes of its answer."""
        endpoint = self.endpoints[shard]
        pushes = self.acknowledged[endpoint]
        expected = ExpectedState(self._client.epoch, pushes.newest, pushes.incarnation, shard, self.shards).encode()
        return Request(
            endpoint, verb, tensors=tensors, payload=payload, schema=expected, once=verb in _NUMBERED, step=step,
            check=partial(_check_answer, answer_bytes), role="parameters",
        )  # fmt: skip

    def call(
        self, shard: int, verb: str, payload: bytes = b"", tensors: Sequence[Tensor] = (), *, answer_bytes: int = 0
    ) -> Answer:
        """Send a request to one shard, and return the answer."""
        return self.all([self.request(shard, verb, payload, tensors, answer_bytes=answer_bytes)])[0]

    def everywhere(
        self, verb: str, payload: bytes = b"", tensors: Sequence[Tensor] = (), *, answer_bytes: int = 0
    ) -> list[Answer]:
        """Send the same request to every shard."""
        shards = range(self.shards)
        return self.all([self.request(shard, verb, payload, tensors, answer_bytes=answer_bytes) for shard in shards])

    def all(
        self, requests: Sequence[Request], deadline: Deadline | None = None, *, watched: bool = False
    ) -> list[Answer]:
        """Send ``requests`` at once, under the client's timeout by default; raises the first error.

        ``watched`` are those that may wait for other workers, which may be lost meanwhile.
        """
        answers: list[Answer] = []
        for outcome in self.outcomes(requests, deadline or Deadline(self.timeout), self._watch if watched else None):
            if isinstance(outcome, Exception):
                raise outcome
            answers.append(outcome)
        return answers

    def outcomes(
        self, requests: Sequence[Request], deadline: Deadline, watch: Callable[[], None] | None = None
    ) -> list[Answer | Exception]:
        """Return the answer to each request, or its error."""
        outcomes: list[Answer | Exception] = []
        came = self._client.gather(requests, deadline, watch=watch, every=self._look_every)
        for request, outcome in zip(requests, came, strict=True):
            assert outcome is not None
            outcomes.append(outcome)
            if isinstance(outcome, Exception):
                self._note_loss(request, outcome)
            elif request.verb == "push" and outcome.payload:
                reply = unpack(outcome.payload, PushReply)
                with self._noting:
                    self.acknowledged[request.endpoint].add(reply.number)
                    self.full.update(reply.full)
        return outcomes

    def _note_loss(self, request: Request, error: Exception) -> None:
        """Forget the numbers of pushes that a shard has lost."""
        if isinstance(error, RolledBack):
            expected = ExpectedState.decode(request.schema)
            assert expected is not None
            with self._noting:
                self.rolled_back = True
                pushes = self.acknowledged[request.endpoint]
                error.lost = pushes.cut(expected.pushes - error.lost)
                pushes.incarnation = 0

    def post(self, requests: Sequence[Request]) -> None:
        """Send requests whose answers nobody needs, and whose loss a later request makes good."""
        if unsent := [request for request in requests if not self._client.post(request, self.timeout)]:
            self.outcomes(unsent, Deadline(self.timeout))

    def describe(self) -> list[dict[str, Any]]:
        """Return what each shard holds."""
        return [unpack(answer, dict[str, Any]) for answer in self.ask_at_length("describe")]

    def ask_at_length(self, verb: str) -> list[bytes]:
        """Return every shard's answer to ``verb``, which may be too long for a header."""
        answers = self.everywhere(verb, answer_bytes=LONGEST)
        return [answer.tensors[0].numpy().tobytes() for answer in answers]

    def incarnations(self) -> list[Answer]:
        """Wait for shards that do not listen yet, as long as a call may take: a new machine compiles for a minute."""
        deadline = Deadline(self.timeout)
        while True:
            try:
                return self.all([self.request(shard, "start") for shard in range(self.shards)], deadline)
            except PeerLost as error:
                if deadline.expired() or not isinstance(error.__cause__, ConnectionRefusedError):
                    raise
            if self._watch is not None:
                self._watch()

    def wait_for(self, future: Future[_T], operation: str, *, step: int | None = None) -> _T:
        """Wait for a call of this client on another thread, checking meanwhile that all workers are alive.

        Raises:
            PeerLost: another worker is gone.
            DeadlineExceeded: the call has overrun its own deadline.
        """
        deadline = Deadline(self.timeout + 2 * self._look_every)  # the call's own error comes first
        with spans.span("wait", "wait", peer="the servers", operation=operation):
            while not wait([future], timeout=min(self._look_every, deadline.remaining())).done:
                deadline.check(peer="the servers", operation=operation, step=step)
                if self._watch is not None:
                    self._watch()
        return future.result(timeout=0)


def _check_answer(most: int, header: ReplyHeader) -> None:
    """Raise ``ProtocolError`` for an answer of more bytes than were requested, before memory is taken for it."""
    nbytes = 0
    for tensor in header.tensors:
        nbytes += tensor.nbytes
    if nbytes > most:
        raise ProtocolError(f"the shard answers with {nbytes} bytes, and at most {most} were requested")


class Entry:
    """One name as a client knows it: a table with its placement, or a dense parameter.

    Attributes:
        placement, dtype: of the rows; a dense parameter has no placement.
        shape: of the whole; of a table (rows or -1, *shape of a row).
        width, whole: numbers of a row, and with its state.
        rule: its optimizer on the servers.
    """

    def __init__(
        self, placement: Placement | None, dtype: torch.dtype, shape: tuple[int, ...], rule: RowOptimizer | None = None
    ) -> None:
        self.placement, self.dtype, self.shape, self.rule = placement, dtype, shape, rule
        self.width = self.whole = math.prod(shape[1:])
        if rule is not None and placement is not None:
            self.whole = rule.row_width(self.width)


class KnownTables:
    """The tables and parameters of a client: what ``saved_tables.py`` needs of one, which is built on that.

    Args:
        calls: sends the requests.
        in_process: the one shard is in this process, which compiles its kernels.

    Attributes:
        entries: by name.
        made: the tables that this client has created or learned of, and their optimizers.
    """

    def __init__(self, calls: ShardCalls, *, in_process: bool) -> None:
        self.calls, self.in_process = calls, in_process
        self.entries: dict[str, Entry] = {}
        self.made: list[tuple[TableSpec, RowOptimizer]] = []
        self._expected: dict[str, TableSpec] = {}
        self._layouts: dict[tuple[str, ...], Layout] = {}

    def _entry_of(self, spec: TableSpec, rule: RowOptimizer, row_shape: tuple[int, ...] | None = None) -> Entry:
        placement = Placement.of(spec, self.calls.shards)
        rows = -1 if spec.rows is None else spec.rows
        return Entry(placement, spec.dtype, (rows, *(row_shape or (spec.width,))), rule)

    def entry(self, name: str, *, rows: bool = False) -> Entry:
        """Return the record of a name, requested from the shards if it is not known."""
        if name not in self.entries:
            self._learn()
        entry = self.entries.get(name)
        if entry is None:
            cure = "; a reader makes none: train it, or load a checkpoint, first" if name in self._expected else ""
            raise NotFound(f"no table or parameter {name!r}; there are: {', '.join(self.entries) or 'none'}{cure}")
        if rows and entry.placement is None:
            raise SchemaError(f"{name} is a dense parameter; use pull and push")
        return entry

    def _enter(self, name: str, entry: Entry) -> None:
        self.entries[name] = entry
        self._layouts.clear()

    def forget(self) -> None:
        """Ask the shards again for what they have: it was replaced, perhaps by another client."""
        self.entries.clear()
        self._layouts.clear()

    def layout(self, names: Iterable[str]) -> Layout:
        """Return the layout of a message about ``names``."""
        key = tuple(names)
        layout = self._layouts.get(key)
        if layout is None:
            tables: dict[str, tuple[Placement, torch.dtype, int, int]] = {}
            dense: list[dict[str, Share]] = [{} for _ in range(self.calls.shards)]
            for name in key:
                entry = self.entry(name)
                if entry.placement is not None:
                    tables[name] = (entry.placement, entry.dtype, entry.width, entry.whole)
                else:
                    dense[self.home(name)][name] = Share(entry.dtype, entry.shape)
            if len(self._layouts) >= _REMEMBERED:
                self._layouts.clear()
            layout = self._layouts[key] = Layout(tables, dense)
        return layout

    def _learn(self) -> None:
        for described in self.calls.describe():
            for table in described["tables"]:
                spec = TableSpec.from_dict(table["spec"])
                if self._expected.get(spec.name, spec) != spec:
                    raise SchemaError(f"table {spec.name} is {spec} here, not {self._expected[spec.name]}")
                self.entries.setdefault(spec.name, self._entry_of(spec, RowOptimizer.from_dict(table["rule"])))
            for parameter in described["dense"]:
                name = parameter["name"]
                if name in self._expected:
                    raise SchemaError(f"{name} is a dense parameter here; give the RemoteEmbedding another name")
                dtype = dtype_named(parameter["dtype"], among=ALLOWED_DTYPES)
                rule = RowOptimizer.from_dict(parameter["rule"])
                self.entries.setdefault(name, Entry(None, dtype, tuple(parameter["shape"]), rule))

    def home(self, name: str) -> int:
        """Return the shard of a dense parameter."""
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") % self.calls.shards

    def every_id(self, name: str, entry: Entry) -> Tensor:
        """Return the ids of a fixed table."""
        if entry.shape[0] < 0:
            raise SchemaError(f"table {name} has a dynamic vocabulary and cannot be pulled or pushed as a whole")
        return torch.arange(entry.shape[0], device="cpu")

    def init_table(self, spec: TableSpec, rule: RowOptimizer, *, row_shape: tuple[int, ...] | None = None) -> None:
        """Create the table that ``spec`` describes on every shard; an existing one stays unchanged."""
        if self.in_process:
            compile_kernels(spec.dtype)
        self.calls.everywhere("init", pack(InitMessage(spec.name, rule.to_dict(), spec.to_dict())))
        self._enter(spec.name, self._entry_of(spec, rule, row_shape))
        self._expected.pop(spec.name, None)
        self.made.append((spec, rule))

    def expect_table(self, spec: TableSpec) -> None:
        """Register a table that others create: it may be read once it is there, if it is as ``spec`` describes it."""
        self._expected[spec.name] = spec

    def init_dense(self, name: str, value: Tensor, rule: RowOptimizer) -> None:
        """Create the dense parameter ``name`` with ``value`` on its shard; an existing one stays unchanged."""
        self.calls.call(self.home(name), "init", pack(InitMessage(name, rule.to_dict())), [value.detach().cpu()])
        self.expect_dense(name, value, rule)

    def expect_dense(self, name: str, like: Tensor, rule: RowOptimizer) -> None:
        """Register a dense parameter with the shape and dtype of ``like`` that another client creates."""
        self._enter(name, Entry(None, like.dtype, tuple(like.shape), rule))

    def _steps_by_shard(self) -> list[dict[str, int]]:
        """Return for each shard the tables and parameters that it holds, and the optimizer steps of each."""
        return [
            {table["spec"]["name"]: table["step"] for table in described["tables"]}
            | {parameter["name"]: parameter["step"] for parameter in described["dense"]}
            for described in self.calls.describe()
        ]

    def steps(self) -> dict[str, int]:
        """Return the names of all tables and parameters, and the optimizer steps of each on its first shard."""
        return {name: step for steps in reversed(self._steps_by_shard()) for name, step in steps.items()}

    def drop_some(self, names: Iterable[str] | None) -> set[str]:
        """Drop those of ``names`` that the shards hold, and return them; ``None``: all."""
        chosen = None if names is None else set(names)
        dropped = set()
        for shard, steps in enumerate(self._steps_by_shard()):
            for name in steps:
                if chosen is None or name in chosen:
                    self.calls.call(shard, "drop", pack(DropMessage(name)))
                    dropped.add(name)
        for name in dropped & self.entries.keys():
            del self.entries[name]
        self._layouts.clear()
        return dropped
