"""A remote expert, called as if it were local, or step by step; and what it has in common with mixtures of them."""

from __future__ import annotations

import copy
import os
import threading
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from anabranch.autodiff.boundary.crossing import Crossed, Form, cross, current_tracer, outside_tracing
from anabranch.autodiff.boundary.whole_calls import WholeCall, beside
from anabranch.autodiff.moved_parameter import Switch
from anabranch.deadline import LONGEST_SLEEP, Deadline, check_seconds
from anabranch.errors import AnotherSchema, BoundaryError, CaptureError, NotFound, PeerLost, SessionGone
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
from anabranch.experts.directory import DirectoryLike, check_directory, within
from anabranch.experts.wire import ExpertInfo, RowInputs, Schema, with_leading
from anabranch.record.spans import mark
from anabranch.tensors import Structure
from anabranch.transport import Client, Request, pack
from anabranch.transport.announcements import check_uid
from anabranch.transport.client import ModuleClient

_CURE = (
    "leave it out of what sums, counts, copies or averages parameters (`if not name.endswith('weights_there')`); "
    "loss.backward() trains them there, with the weight_decay= of their optimizer and clip_grad_norm= of their server"
)


class RemoteModule(nn.Module):
    """A module that calls experts, which update themselves in its backward.

    Attributes:
        weights_there: a parameter without numbers, in place of the experts' own. Where it is frozen, as by
            ``requires_grad_(False)`` of a model around it, or where a backward does not go to it, as
            ``torch.autograd.grad(y, x)``, the experts give gradients and are not updated.

    Args:
        served: what is on servers, for errors.
    """

    steps_there: ClassVar[bool] = True
    """The far side makes an update of every gradient that comes."""

    def __init__(self, served: str) -> None:
        super().__init__()
        self.weights_there = Switch(f"weights_there stands for the parameters of {served} on servers", _CURE)
        self._schema: Schema | None = None  # once a capture has asked for it, by ``learn_form``
        self._whole_call = WholeCall(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the experts' outputs for these inputs."""
        if torch.compiler.is_dynamo_compiling() and self._schema is None:  # a compiler that is not this library's
            return beside(type(self)._call_experts, (self, *args), kwargs)
        return self._call_experts(*args, **kwargs)

    @abstractmethod
    def _call_experts(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs, nested."""

    def _behind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Schema, Sequence[Tensor]]:
        """Cross the boundary, which Dynamo sees as one call; it guards what it reads itself: the modes."""
        if torch.compiler.is_dynamo_compiling():
            assert self._schema is not None
            return self._schema, self._whole_call(self.training, self.weights_there.requires_grad, *args, **kwargs)
        return self._cross(args, kwargs, evaluating=not self.training)

    def call_whole(self, training: bool, trained: bool, *args: Any, **kwargs: Any) -> Sequence[Tensor]:
        """Cross the boundary, as one call that Dynamo does not trace into."""
        return self._cross(args, kwargs, evaluating=not training)[1]

    @abstractmethod
    def _cross(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, evaluating: bool
    ) -> tuple[Schema, Sequence[Tensor]]:
        """Return the schema of the experts that answered, and their outputs; each caller's own."""

    # Servers save the experts' parameters.

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}weights_there"]

    def _load_from_state_dict(self, *args: Any) -> None:
        with self.weights_there.out_of(self):
            super()._load_from_state_dict(*args)


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
        check_seconds(forward_timeout=forward_timeout, backward_timeout=backward_timeout)
        self.uid = check_uid(uid)
        self.forward_timeout = forward_timeout
        self.backward_timeout = backward_timeout
        if not isinstance(endpoint_or_directory, str):
            check_directory(endpoint_or_directory)
        self._where = endpoint_or_directory
        self._module_client = ModuleClient(client, keys=keys, insecure=insecure)
        self._known: tuple[str, Schema] | None = None
        self._counts = CallCounts()

    @property
    def client(self) -> Client:
        """The client that sends its requests in this process."""
        return self._module_client.client

    def learn_form(self) -> None:
        """Request the nesting of the expert's outputs, for a capture."""
        self._schema = self.find(Deadline.after(self.forward_timeout))[1]

    def __getstate__(self) -> dict[str, object]:
        # The expert may have moved by then, and have another schema.
        return {**vars(self), "_known": None}

    def __deepcopy__(self, memo: dict[int, object]) -> RemoteExpert:
        """Another caller of the same expert, through the same client and directory."""
        memo[id(self._where)] = self._where
        memo[id(self)] = copied = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))  # type: ignore[no-untyped-call]
        return copied

    def extra_repr(self) -> str:
        """Return the uid and its endpoint or directory."""
        return f"{self.uid!r}, {self._where if isinstance(self._where, str) else 'by directory'}"

    def get_info(self) -> ExpertInfo:
        """Return the schemas of the expert's inputs and outputs, and its keyword names, sorted."""
        return self.find(Deadline.after(self.forward_timeout))[1].info()

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

    def _call_experts(self, *args: Any, **kwargs: Any) -> Structure:
        schema, outputs = self._behind(args, kwargs)
        return outputs[0] if schema.gives_one else schema.nest_outputs(outputs)

    def _cross(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, evaluating: bool
    ) -> tuple[Schema, Sequence[Tensor]]:
        deadline = None
        if (known := self._known) is None:
            deadline = Deadline(self.forward_timeout)
            with outside_tracing():
                known = self.find(deadline)
            if current_tracer() is not None:
                deadline = None  # a graph starts a new one in every run
        schema = known[1]
        inputs, leading = schema.flatten_inputs(args, kwargs)
        ask_it = partial(self._ask, schema, deadline, evaluating)
        boundary = ExpertBoundary("expert", self.uid, ask_it, partial(self._forms, schema))
        crossed = cross(boundary, *inputs, entry=self.weights_there)
        if (known := self._known) is not None:  # with another schema, if the expert has come back with one
            schema = known[1]
        return schema, crossed if len(leading) == 1 else with_leading(crossed, leading)

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
        deadline: Deadline | None,
        evaluating: bool,
        inputs: Sequence[Tensor | None],
        wants: Sequence[bool] | None,
    ) -> Crossed:
        """Call the expert, once more if it may have moved."""
        deadline = deadline or Deadline(self.forward_timeout)
        for _ in range(2):
            endpoint, schema = self._known or self.find(deadline)
            sent = inputs
            if schema is not known:  # the inputs must fit the expert's current schema
                args, kwargs = known.input_nesting.rebuild(inputs)
                sent = schema.flatten_inputs(args, kwargs, casting=False).tensors
            rows = len(sent[0]) if sent[0] is not None else next(len(one) for one in sent if one is not None)
            call = ExpertCall(self.uid, endpoint, schema, sent, rows, evaluating)
            client = self._module_client.client
            calls = Calls(client, [call], deadline, self.backward_timeout, counts=self._counts)
            crossed = ask(calls, keep=wants is not None)
            if call.error is None:
                return crossed
            error, call.error = call.error, None
            if deadline.expired() or not self.forget_if_changed(error, deadline):
                break
        try:
            raise error
        finally:
            del error, crossed, calls, call  # held by the traceback: a cycle

    def find(self, deadline: Deadline) -> tuple[str, Schema]:
        """Return the expert's endpoint and schema, looked up if they are not known."""
        if (known := self._known) is None:  # several threads may look it up at once
            endpoint = self._where if isinstance(self._where, str) else self._look_up(self._where, deadline)
            self._known = known = endpoint, fetch_schema(self.client, self.uid, endpoint, deadline)
        return known

    def forget_if_changed(self, error: Exception, deadline: Deadline) -> bool:
        """Forget the expert's endpoint and return True if it has moved or changed its schema, so that a retry may
        succeed.
        """
        changed = isinstance(error, AnotherSchema)
        if not isinstance(self._where, str):
            # A peer that missed two beats and is still announced at the same endpoint would miss two more.
            lost = isinstance(error, PeerLost) and self._look_up(self._where, deadline) != error.peer
            changed = changed or lost or isinstance(error, NotFound)
        if changed:
            self._known = None
        return changed

    def _look_up(self, directory: DirectoryLike, deadline: Deadline) -> str:
        endpoints = within(directory, deadline).lookup([self.uid])
        if self.uid not in endpoints:
            raise NotFound(f"the directory lists no server for {self.uid!r}")
        return endpoints[self.uid]


_ID_BYTES = 16
# Seconds for telling the server that the session has ended; otherwise the session expires there.
_FAREWELL = 5.0


# --- a sequence that an expert continues step by step, whose earlier positions its server keeps
#
#     step(x) ── fits max_length? ──> session id, number n, x ──> server ──> outputs for x's positions, n becomes n + 1
#                                           └── no answer: n stays, and the same step may be asked for again


class InferenceSession:
    """Sequences that an expert continues; created by ``RemoteExpert.session``, and used as a context manager.

    >>> import torch
    >>> from torch import nn
    >>> from anabranch.experts import ExpertBackend, ExpertServer, RemoteExpert
    >>> from anabranch.tensors import TensorSpec
    >>> class RunningSum(nn.Module):
    ...     def make_cache(self, rows, max_length):
    ...         return {"sum": torch.zeros(rows, 1, 2)}
    ...     def forward(self, x, cache=None):
    ...         sums = x.cumsum(1) if cache is None else cache["sum"] + x.cumsum(1)
    ...         if cache is not None:
    ...             cache["sum"] = sums[:, -1:]
    ...         return sums
    >>> backend = ExpertBackend("sum.0", RunningSum(), args_schema=[TensorSpec(None, 2)])
    >>> with ExpertServer([backend]) as server:
    ...     with RemoteExpert("sum.0", server.endpoint).session(max_length=8) as session:
    ...         _ = session.step(torch.ones(1, 3, 2))
    ...         session.step(torch.ones(1, 1, 2)), session.length
    (tensor([[[4., 4.]]]), 4)

    Its first step opens it on the server, which keeps the cache that the expert's module makes for this many rows.
    Steps run in eval mode and without gradients, and change nothing of the expert. Several threads may share a session;
    their steps come one after the other.

    Where a step raises ``DeadlineExceeded``, ``PeerLost`` or ``Overloaded``, whether it was taken is not known, and it
    may be requested again with the same inputs: it is never taken twice.
    """

    def __init__(self, expert: RemoteExpert, max_length: int, ttl: float = 60.0) -> None:
        if isinstance(max_length, bool) or not isinstance(max_length, int) or not 1 <= max_length < 1 << 62:
            raise ValueError(f"max_length is a whole number of positions above 0, got {max_length!r}")
        check_seconds(ttl=ttl)
        self.max_length = max_length
        """Positions that the sequences may grow to."""
        self.length = 0
        """Positions of the sequences so far."""
        self.ttl = ttl
        """Seconds without a step after which the server frees the cache."""
        self._expert = expert
        self._id = os.urandom(_ID_BYTES)
        self._lock = threading.Lock()
        self._where: tuple[str, Schema] | None = None
        self._steps = 0
        self._ended = False

    def __enter__(self) -> InferenceSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def __repr__(self) -> str:
        state = "ended" if self._ended else f"{self.length} of {self.max_length} positions"
        return f"InferenceSession({self._expert.uid!r}, {state})"

    def __reduce__(self) -> NoReturn:
        cure = "send the expert, and open another session there"
        raise TypeError(f"a session of {self._expert.uid} cannot be copied or pickled; {cure}")

    def step(self, *args: object, **kwargs: object) -> Structure:
        """Return the expert's outputs for the next positions of the sequences.

        Args:
            args: as of the expert; the first size that varies of the first input that has one is the number of
                positions. Every step has as many rows as the first.
            kwargs: the same.

        Raises:
            ValueError: the session was ended here.
            SchemaError: the inputs do not fit the expert's schema, have another number of rows than before, no row or
                no position, or exceed ``max_length``, and the sequences are as they were. Or the expert keeps none.
            SessionGone: the server no longer has the session: its time to live has passed, the server was restarted, a
                step has failed there.
            Overloaded: the server has no room.
            BoundaryError: as of a call of the expert.
            CaptureError: a graph is captured, which cannot advance a sequence each time it runs.
        """
        if current_tracer() is not None:
            raise CaptureError(f"a session of {self._expert.uid} cannot step in a graph; use engine='tape'")
        deadline = Deadline.after(self._expert.forward_timeout)
        while not self._lock.acquire(timeout=min(LONGEST_SLEEP, deadline.remaining())):
            if deadline.expired():
                raise deadline.error(peer=self._expert.uid, operation="wait for another thread's step of the session")
        try:
            return self._take(args, kwargs, deadline)
        finally:
            if self._ended:
                self._tell_server()  # ended by another thread, perhaps before this step had opened it there
            self._lock.release()

    def end(self) -> None:
        """End the session: its server frees the cache at once. Ending it again does nothing.

        An unreachable server frees it after the time to live; that raises nothing.
        """
        self._ended = True
        self._tell_server()

    def _tell_server(self) -> None:
        where, self._where = self._where, None
        if where is None:
            return
        request = Request(where[0], wire.SESSION_END, self._expert.uid, payload=self._id, role="experts")
        try:
            self._expert.client.call(request, Deadline.after(min(_FAREWELL, self._expert.forward_timeout)))
        except (BoundaryError, ValueError) as error:
            mark("experts.session_not_ended", uid=self._expert.uid, error=str(error))

    def _take(self, args: tuple[object, ...], kwargs: dict[str, object], deadline: Deadline) -> Structure:
        if self._ended:
            raise ValueError(f"this session of {self._expert.uid} was ended; open another with expert.session(...)")
        for again in (False, True):
            endpoint, schema = self._where or self._expert.find(deadline)
            rows = schema.flatten_inputs(args, kwargs)
            try:
                outputs = self._ask(endpoint, schema, rows, deadline)
                break
            except (BoundaryError, ValueError) as error:
                if self._steps and isinstance(error, AnotherSchema):
                    raise SessionGone(f"{error}: its server has restarted since the session was opened") from error
                if again or deadline.expired() or not self._may_be_elsewhere(error, deadline):
                    raise
                # Before the first answer nothing is lost by calling another server; after it, the expert's current one
                # knows whether the session still exists.
                self._where = (self._expert.find(deadline)[0], schema) if self._steps else None
        self._steps += 1
        self.length += schema.length_of(rows.tensors)
        return schema.nest_outputs(with_leading(outputs, rows.leading))

    def _may_be_elsewhere(self, error: Exception, deadline: Deadline) -> bool:
        """Return True if the expert has moved or changed its schema, so that a retry may help."""
        try:
            return not isinstance(error, SessionGone) and self._expert.forget_if_changed(error, deadline)
        except NotFound:
            return False  # not served now; the same step may be requested once its server is back

    def _ask(self, endpoint: str, schema: Schema, inputs: RowInputs, deadline: Deadline) -> list[Tensor]:
        self._where = endpoint, schema
        tensors = [None if tensor is None else tensor.detach() for tensor in inputs.tensors]
        first = next(tensor for tensor in tensors if tensor is not None)
        request = Request(
            endpoint,
            wire.SESSION_STEP,
            self._expert.uid,
            wire.to_wire(tensors, schema.inputs),
            payload=pack(wire.StepHeader(self._id, self._steps, self.max_length, self.ttl)),
            schema=schema.hash,
            check=partial(wire.check_parts, schema.output_layout, sent=len(first)),
            role="experts",
        )
        answer = self._expert.client.call(request, deadline)
        outputs = wire.from_wire(answer.tensors, schema.output_specs)
        return [output.to(first.device) for output in outputs if output is not None]
