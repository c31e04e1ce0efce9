"""A remote expert, called as if it were local."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from anabranch.autodiff.boundary import whole_calls
from anabranch.autodiff.boundary.crossing import Crossed, Form, cross, current_tracer, outside_tracing
from anabranch.deadline import Deadline
from anabranch.errors import AnotherSchema, NotFound, PeerLost
from anabranch.experts import wire
from anabranch.experts.client.calls import (
    CallCounts,
    Calls,
    CallStatistics,
    ExpertBoundary,
    ExpertCall,
    ask,
    output_forms,
    sample_forms,
)
from anabranch.experts.client.connections import ModuleClient
from anabranch.experts.client.remote_module import RemoteModule
from anabranch.experts.client.session import InferenceSession
from anabranch.experts.directory import DirectoryLike, within
from anabranch.experts.schema import Schema, with_leading
from anabranch.experts.server.backend import ExpertInfo, info_of
from anabranch.tensors import Structure
from anabranch.transport import Client, Request, unpack
from anabranch.transport.announcements import check_uid

__all__ = ["RemoteExpert", "fetch_schema"]


def fetch_schema(client: Client, uid: str, endpoint: str, deadline: Deadline) -> Schema:
    """Fetch the schema of the expert ``uid`` at ``endpoint``."""
    return Schema.unpack(client.call(Request(endpoint, wire.INFO, uid, role="experts"), deadline).payload)


class RemoteExpert(RemoteModule):
    """Calls a remote expert; gradients flow back, and the expert updates itself in its backward.

    >>> import torch
    >>> from torch import nn
    >>> from anabranch.experts import ExpertBackend, ExpertServer
    >>> from anabranch.tensors import TensorSpec
    >>> backend = ExpertBackend("double.0", nn.Identity(), args_schema=[TensorSpec(2)])
    >>> x = torch.ones(1, 2, requires_grad=True)
    >>> with ExpertServer([backend]) as server:
    ...     RemoteExpert("double.0", server.endpoint)(x).sum().backward()
    >>> x.grad
    tensor([[1., 1.]])

    Args:
        uid: the expert.
        endpoint_or_directory: its server's endpoint, or a directory that has it.
        forward_timeout: seconds for a forward call.
        backward_timeout: seconds for a backward call.
        client: sends the requests; shared by the process's modules by default, with ``keys`` and ``insecure``.

    Raises:
        ValueError: an invalid uid, or a time that is not above 0.

    Calling it takes and returns the structures of the expert's schema, on the device of the first input. Inputs may
    have more leading dimensions than one, all of them the same; the outputs have them too. In grad mode the floating
    outputs require grad even where no input does, because the expert learns from their backward. A gradient comes back
    for each floating input. Backward calls are applied exactly once however often they are retried.

    Its mode is the expert's for its calls: after ``eval()`` dropout is off there and statistics stay as they are. In
    train mode the expert runs in the mode in which its server holds it. Under autocast floating inputs are cast to the
    dtypes of the schema.

    It can be copied and pickled: it holds the uid and the address, and requests the schema where it is used.

    Raises, when called: SchemaError, for arguments that do not fit the expert's schema; NotFound, if no server has the
    uid; DeadlineExceeded, PeerLost, Overloaded, Unauthorized, RemoteError, NonFinite, as they happen.
    """

    def __init__(
        self,
        uid: str,
        endpoint_or_directory: str | DirectoryLike,
        *,
        forward_timeout: float = 30.0,
        backward_timeout: float = 30.0,
        client: Client | None = None,
        keys: str | os.PathLike[str] | None = None,
        insecure: bool = False,
    ) -> None:
        super().__init__(f"expert {uid!r}")
        for name, seconds in (("forward_timeout", forward_timeout), ("backward_timeout", backward_timeout)):
            if not 0 < seconds < float("inf"):
                raise ValueError(f"{name} is a finite number of seconds above 0, got {seconds!r}")
        self.uid = check_uid(uid)
        self.forward_timeout = forward_timeout
        self.backward_timeout = backward_timeout
        self._where = endpoint_or_directory
        self._module_client = ModuleClient(client, keys=keys, insecure=insecure)
        self._known: tuple[str, Schema] | None = None
        self._looking = threading.Lock()
        self._counts = CallCounts()

    @property
    def client(self) -> Client:
        """The client that sends its requests in this process."""
        return self._module_client.client

    def learn_form(self) -> None:
        """Request the nesting of the expert's outputs, for a capture."""
        self._keep(self.find(Deadline.after(self.forward_timeout))[1])

    def __getstate__(self) -> dict[str, object]:
        # The expert may have moved by then, and have another schema.
        return {name: value for name, value in super().__getstate__().items() if name not in ("_looking", "_known")}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._known, self._looking = None, threading.Lock()

    def __deepcopy__(self, memo: dict[int, object]) -> RemoteExpert:
        """Another caller of the same expert, through the same client and directory."""
        memo[id(self._where)] = self._where
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    def extra_repr(self) -> str:
        """Return the uid and its endpoint or directory."""
        return f"{self.uid!r}, {self._where if isinstance(self._where, str) else 'by directory'}"

    def get_info(self) -> ExpertInfo:
        """Return the schemas of the expert's inputs and outputs, its keyword names, sorted, and how many sessions its
        server has open for it now.
        """
        deadline = Deadline.after(self.forward_timeout)
        endpoint, schema = self.find(deadline)
        answer = self.client.call(Request(endpoint, wire.SESSION_COUNT, self.uid, role="experts"), deadline)
        return info_of(schema, unpack(answer.payload, int))

    def statistics(self) -> CallStatistics:
        """Counters of its calls since it was made, or copied."""
        return self._counts.read()

    def session(self, max_length: int, ttl: float = 60.0) -> InferenceSession:
        """Return a context manager whose ``step(x)`` continues sequences that the expert's server keeps.

        Args:
            max_length: positions that the sequences may grow to.
            ttl: seconds without a step after which the server frees them.

        Raises:
            ValueError: ``max_length`` is not a whole number above 0, ``ttl`` no number of seconds above 0.
        """
        return InferenceSession(self, max_length, ttl)

    def forward(self, *args: object, **kwargs: object) -> Structure:
        """Return the expert's outputs for these inputs."""
        if torch.compiler.is_dynamo_compiling() and self._schema is None:  # a compiler that is not this library's
            return cast(Structure, whole_calls.beside(RemoteExpert.forward, (self, *args), kwargs))
        schema, outputs = self._behind(args, kwargs)
        return schema.nest_outputs(outputs)

    def _cross(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, evaluating: bool
    ) -> tuple[Schema, Sequence[Tensor]]:
        deadline = Deadline.after(self.forward_timeout)
        known = self._known
        if known is None:
            with outside_tracing():
                known = self.find(deadline)
        schema = known[1]
        inputs, leading = schema.flatten_inputs(args, kwargs)
        # A graph starts a new deadline in every run.
        first_deadline = deadline if current_tracer() is None else None
        answering = schema  # another one, if the expert has come back with another

        def ask_again(inputs: Sequence[Tensor | None], keep: bool) -> Crossed:
            nonlocal answering
            crossed, answering = self._ask(schema, inputs, first_deadline, keep=keep, evaluating=evaluating)
            return crossed

        boundary = ExpertBoundary("expert", self.uid, ask_again, partial(self._forms, schema))
        crossed = cross(boundary, *inputs, entry=self.weights_there)
        return answering, with_leading(crossed, leading)

    def _forms(self, schema: Schema, inputs: Sequence[Tensor | None]) -> Sequence[Form]:
        first = next(tensor for tensor in inputs if tensor is not None)
        if not schema.varies:
            return output_forms(schema, first.shape[0], first.device)
        deadline = Deadline.after(self.forward_timeout)
        with outside_tracing():
            endpoint, _ = self.find(deadline)
            return sample_forms(self.client, self.uid, endpoint, schema, inputs, first.shape[0], deadline)

    def _ask(
        self,
        known: Schema,
        inputs: Sequence[Tensor | None],
        deadline: Deadline | None,
        *,
        keep: bool,
        evaluating: bool,
    ) -> tuple[Crossed, Schema]:
        """Call the expert, once more if it may have moved; return the answer and the schema that it then had."""
        deadline = deadline or Deadline.after(self.forward_timeout)
        for _ in range(2):
            endpoint, schema = self._known or self.find(deadline)
            sent = inputs
            if schema is not known:  # the inputs must fit the expert's current schema
                args, kwargs = known.input_nesting.rebuild(inputs)
                sent = schema.flatten_inputs(args, kwargs, casting=False).tensors
            call = ExpertCall(self.uid, endpoint, schema, sent, evaluating)
            calls = Calls(
                self._module_client.client, [call], deadline, self.backward_timeout, check_backward=_raise_first,
                counts=self._counts,
            )  # fmt: skip
            crossed = ask(calls, keep=keep)
            if call.error is None:
                return crossed, schema
            error, call.error = call.error, None
            if deadline.expired() or not self.forget_if_changed(error, deadline):
                break
        try:
            raise error
        finally:
            del error, crossed, calls, call  # held by the traceback: a cycle

    def find(self, deadline: Deadline) -> tuple[str, Schema]:
        """Return the expert's endpoint and schema, looked up if they are not known."""
        if (known := self._known) is not None:
            return known
        with self._looking:
            if self._known is None:
                endpoint = self._where if isinstance(self._where, str) else self._look_up(self._where, deadline)
                self._known = endpoint, fetch_schema(self.client, self.uid, endpoint, deadline)
            return self._known

    def forget_if_changed(self, error: Exception, deadline: Deadline) -> bool:
        """Forget the expert's endpoint and return True if it has moved or changed its schema, so that a retry may
        succeed.
        """
        if not self._may_have_changed(error, deadline):
            return False
        self._known = None
        return True

    def _may_have_changed(self, error: Exception, deadline: Deadline) -> bool:
        if isinstance(error, AnotherSchema):
            return True
        if isinstance(self._where, str) or not isinstance(error, (PeerLost, NotFound)):
            return False
        # A peer that missed two beats and is still announced at the same endpoint would miss two more.
        return isinstance(error, NotFound) or self._look_up(self._where, deadline) != error.peer

    def _look_up(self, directory: DirectoryLike, deadline: Deadline) -> str:
        found = within(directory, deadline).lookup([self.uid])
        if self.uid not in found:
            raise NotFound(f"the directory lists no server for {self.uid!r}")
        return found[self.uid]


def _raise_first(calls: Sequence[ExpertCall]) -> None:
    for call in calls:
        if call.gradient_error is not None:
            error, call.gradient_error = call.gradient_error, None
            try:
                raise error
            finally:
                del error  # held by the traceback: a cycle
