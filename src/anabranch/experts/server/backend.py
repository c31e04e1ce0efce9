"""An expert: a module that trains itself, with its schemas of inputs and outputs, its optimizer, and its two queues.

Forward runs without a graph; backward computes it again from the inputs, which are sent a second time, so the server
keeps nothing between the two for callers that may never come back. Every backward batch is an update. The module's
buffers are updated only by the forward, as for a local module; dropout draws a new mask in backward, because the first
one is gone: that gradient belongs to a forward whose output was never used. If that matters, ``keep_activations`` keeps
the forward's graph, or the expert is put into eval mode.

A caller in eval mode has its batches run in eval mode, separately from others: batches of a device run one at a time,
and the module's own mode is restored after each.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.stateless import _reparametrize_module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anabranch.autodiff.layer_state import LayerState, lazy_clone
from anabranch.autodiff.moved_parameter import parameters_here
from anabranch.errors import ActivationsGone, NonFinite, SchemaError
from anabranch.experts.server.scheduler import (
    Task,
    TaskPool,
    Unrepeatable,
    cut,
    in_parts,
    join_padded,
    join_rows,
    make_mask,
    rows_of,
    split_outputs,
    split_padded,
)
from anabranch.experts.wire import (
    ExpertInfo,
    Mismatch,
    Nesting,
    Schema,
    count_parts,
    first_not_finite,
    infer_specs,
    outline,
    specs_of,
)
from anabranch.tensors import Structure, TensorSpec
from anabranch.transport.announcements import check_uid
from anabranch.transport.failures import ends_the_program
from anabranch.transport.frame import MOST_TENSORS

# BatchNorm refuses one row, and 3 coincides with a shape's other sizes less often than 2.
_SAMPLE_ROWS, _SAMPLE_LENGTH = 3, 8
# Positions above which a step would be split; a step is one call of the module.
_LONGEST_STEP = 1 << 40


class ExpertBackend:
    """A module served as an expert.

    >>> module = nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    >>> backend = ExpertBackend("ffn.0", module, optimizer, args_schema=TensorSpec(4))
    >>> backend.get_info()["outputs_schema"]
    TensorSpec(2, dtype=torch.float32)
    >>> gradients = backend.backward(torch.ones(3, 4), torch.ones(3, 2))
    >>> [tuple(gradient.shape) for gradient in gradients]
    [(3, 4)]

    Args:
        uid: its name, ``prefix.i[.j...]``.
        module: takes rows (dim 0) and returns as many. Callers in eval mode get it in eval mode, others in the mode
            that it is in. One that can continue sequences (``RemoteExpert.session``) has ``make_cache(rows,
            max_length)``, and a ``forward`` that takes what it made as the keyword argument ``cache``.
        optimizer: over parameters of ``module``; ``None`` leaves them as they are.
        args_schema: a ``TensorSpec``, or a nesting of them, for each positional argument; a ``TensorSpec`` alone is
            that of the only one. Requests of which sizes vary (``TensorSpec(None, 512)``) share a batch if they are of
            equal sizes, or with ``pad=True`` are padded to the longest, and the module takes a keyword argument
            ``mask``.
        kwargs_schema: the same for each keyword argument.
        outputs_schema: the module's outputs; by default found by one run on zeros, which leaves random state, buffers
            and mode as they were.
        scheduler: stepped once an update.
        clip_grad_norm: bound of the gradients' global norm.
        gradient_reduction: ``"sum"``: a batch of several requests moves the parameters by the sum of their gradients;
            ``"mean"``: by their mean over requests.
        keep_activations: rows of forwards whose graphs are kept for their backwards, so that neither the inputs travel
            again nor the forward is computed again, and dropout masks are the forward's; the oldest are freed first,
            and their backwards compute the forward again. Costs a copy of the parameters an update, and memory that is
            not PyTorch's own (a mapped file, a NumPy array) is copied by each forward.
        pool: ``min_batch_size=1``, ``max_batch_size=4096``, ``timeout=None``, ``max_queue_rows``,
            ``max_queue_bytes``: see ``TaskPool``. A row counts as one however long it is; a padded batch is at most
            half padding.

    Raises:
        ValueError: an invalid uid, no inputs in the schema, an optimizer of another module's parameters.
        TypeError: a subclass overrides ``forward``, ``backward`` or ``step``.
        SchemaError: the module does not accept the schema's inputs, or returns values that cannot be sent, or has more
            inputs and outputs than a message carries tensors.

    To change the update, override ``apply_gradients``; nothing else of a backend is called for every request.

    Source: the expert backends of hivemind (Ryabinin and Gusev, "Towards Crowdsourced Training of Large Neural Networks
    using Decentralized Mixture-of-Experts", 2020).
    """

    def __init__(
        self,
        uid: str,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        args_schema: Sequence[Structure] | TensorSpec = (),
        kwargs_schema: Mapping[str, Structure] | None = None,
        outputs_schema: Structure = None,
        scheduler: LRScheduler | None = None,
        clip_grad_norm: float | None = None,
        gradient_reduction: Literal["sum", "mean"] = "sum",
        keep_activations: int = 0,
        min_batch_size: int = 1,
        max_batch_size: int = 4096,
        timeout: float | None = None,
        max_queue_rows: int | None = None,
        max_queue_bytes: int = 1 << 30,
    ) -> None:
        self.uid = check_uid(uid)
        for name in ("forward", "backward", "step"):
            if getattr(type(self), name) is not getattr(ExpertBackend, name):
                raise TypeError(
                    f"{uid}: {type(self).__name__} overrides {name}, which is not called for every request; override "
                    "apply_gradients to change the update, or the module's forward"
                )
        if gradient_reduction not in ("sum", "mean"):
            raise ValueError(f"gradient_reduction is 'sum' or 'mean', got {gradient_reduction!r}")
        if clip_grad_norm is not None and not clip_grad_norm > 0:
            raise ValueError(f"clip_grad_norm is a norm above 0, got {clip_grad_norm!r}")
        if isinstance(keep_activations, bool) or not isinstance(keep_activations, int) or keep_activations < 0:
            raise ValueError(f"keep_activations is a number of rows, 0 or more, got {keep_activations!r}")
        _check_optimizer(uid, module, optimizer)
        if type(self).apply_gradients is ExpertBackend.apply_gradients:
            _check_steps(uid, optimizer, scheduler)
        self.module = module
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.clip_grad_norm = clip_grad_norm
        self.gradient_reduction = gradient_reduction
        self.updates = 0
        self.changes = 0
        """The number of changes of its parameters, or of buffers that are no norm's statistics, as answers say it."""
        self.kept = KeptActivations(keep_activations)
        self._gradients = ParameterGradients(module)
        self.device = next((tensor.device for tensor in module.state_dict().values()), torch.device("cpu"))
        arguments = (args_schema,) if isinstance(args_schema, TensorSpec) else tuple(args_schema)
        keywords = dict(sorted((kwargs_schema or {}).items()))
        _check_inputs(uid, arguments, keywords)
        if "cache" in keywords and callable(getattr(module, "make_cache", None)):
            raise ValueError(f"{uid}: make_cache gives the module an input called cache, so kwargs_schema has none")
        self._mask: Tensor | None = None
        self._state = LayerState(list(module.modules()))
        self._written: set[int] = set()
        """Places of trained parameters that forwards write."""
        self.schema, self.takes_tensor = Schema(arguments, keywords, None), False
        outputs = self._infer_outputs() if outputs_schema is None else outputs_schema
        self.schema = Schema(arguments, keywords, outputs, max_batch_size)
        self.takes_tensor = self.schema.takes_one and not self.schema.pads
        layout = self.schema.output_layout
        backward = [*self.schema.input_layout, *((name, spec) for name, spec in layout if spec.requires_grad)]
        if (parts := max(count_parts(layout), count_parts(backward))) > MOST_TENSORS:
            raise SchemaError(
                f"{uid}: a message carries at most {MOST_TENSORS} tensors, and this expert needs {parts} (int8 takes "
                "two each); join some, or declare outputs without gradients by requires_grad=False"
            )
        pool = partial(TaskPool, max_queue_rows=max_queue_rows, max_queue_bytes=max_queue_bytes)
        sized = partial(pool, min_batch_size=min_batch_size, max_batch_size=max_batch_size, timeout=timeout)
        alone = weakref.proxy(self)  # a pool does not keep alive the backend that has it
        self.forward_pool = sized(name=f"{uid}_forward", process_tasks=partial(ExpertBackend._run_forward, alone))
        self.backward_pool = sized(
            name=f"{uid}_backward", process_tasks=partial(ExpertBackend._run_backward, alone), whole=True
        )
        self.session_pool: TaskPool | None = None
        """The queue of steps of sessions, for a module that makes caches; its rows are positions."""
        if callable(getattr(module, "make_cache", None)):
            self.session_pool = pool(name=f"{uid}_session", process_tasks=_run_steps, max_batch_size=_LONGEST_STEP)
        self.open_sessions = 0
        """The number of sessions that its server has open."""
        self._marks = self._state.marks()

    # --- for callers

    def get_info(self) -> ExpertInfo:
        """Return the schemas of the expert's inputs and outputs, and its keyword names, sorted."""
        return self.schema.info()

    def get_pools(self) -> tuple[TaskPool, ...]:
        """Return the queues of forward and backward, and of sessions' steps if the module makes caches."""
        pools = self.forward_pool, self.backward_pool
        return pools if self.session_pool is None else (*pools, self.session_pool)

    def to(self, device: torch.device | str) -> ExpertBackend:
        """Move the module; its optimizer follows."""
        self.module.to(device)
        self.device = torch.device(device)
        if self.optimizer is not None:
            # Loading its own state moves the optimizer's tensors to where their parameters are.
            self.optimizer.load_state_dict(self.optimizer.state_dict())
        return self

    # --- run by the runtime

    def forward(self, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the outputs for a batch; all inputs and outputs flat, in the schema's order."""
        # Like torch.no_grad, which takes longer than a small module.
        recording = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            placed = inputs if self.device.type == "cpu" else [self._place(tensor) for tensor in inputs]
            outputs = self.module(placed[0]) if self.takes_tensor else self._call(placed)
        finally:
            torch._C._set_grad_enabled(recording)
        return tuple(self._check_outputs(outputs, placed))

    def make_cache(self, rows: int, max_length: int) -> object:
        """Return the module's cache for this many sequences of at most this many positions."""
        with torch.no_grad():
            cache = cast("Callable[[int, int], object]", self.module.make_cache)(rows, max_length)
        if cache is None:
            raise TypeError(f"{self.uid}: make_cache returned None, which means that there is no session")
        return cache

    def step(self, cache: object, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the outputs for the next positions of the sequences in ``cache``, which then holds these too; in eval
        mode, without gradients.
        """
        with torch.no_grad(), _evaluating(self.module):
            placed = [self._place(tensor) for tensor in inputs]
            return tuple(self._check_outputs(self._call(placed, cache=cache), placed))

    def backward(self, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of a batch's inputs, and an update of the parameters.

        Args:
            inputs: the forward's inputs, then the gradient of each output, ``None`` for an output without one.

        Returns:
            A gradient for each input; ``None`` where the input has none.

        Raises:
            NonFinite: a parameter's gradient is NaN or Inf; nothing was updated.
        """
        with self._gradients.of_batch():
            answers, moved = self._recompute(inputs)
            if moved:
                self._update()
        return answers

    def apply_gradients(self) -> None:
        """Update the parameters from their gradients; override to change the update.

        An override may leave the parameters unchanged, to step at every k-th batch: the gradients are then kept, and
        those of the next batch are added to them. Once a parameter has changed, or this method has run, all gradients
        are cleared. An override that discards a batch clears them itself, with ``self.module.zero_grad()``.
        """
        self._gradients.applied = True
        if self.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_grad_norm)
        if self.optimizer is not None:
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    # --- for checkpoints

    def state_dict(self) -> dict[str, object]:
        """Parameters, buffers, optimizer, scheduler, the count of updates, and gradients that wait for their step."""
        return {
            "module": self.module.state_dict(),
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "updates": self.updates,
            "changes": self.changes,
            "gradients": self._gradients.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Load a state from ``state_dict``.

        Raises:
            RuntimeError: it is another module's.
            ValueError: it is another optimizer's.
        """
        self.module.load_state_dict(cast(dict[str, Tensor], state["module"]))
        if self.optimizer is not None and state["optimizer"] is not None:
            self.optimizer.load_state_dict(cast(dict[str, object], state["optimizer"]))
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(cast(dict[str, object], state["scheduler"]))
        self.updates = int(cast(int, state["updates"]))
        self._gradients.load_state_dict(cast(Mapping[str, object], state["gradients"]))
        self.changes = int(cast(int, state["changes"]))
        self._marks = self._state.marks()

    # --- forward and backward

    def _recompute(self, inputs: Sequence[Tensor | None]) -> tuple[tuple[Tensor | None, ...], bool]:
        """Return the gradients of the inputs, with the parameters' in ``.grad`` and finite, and whether there were
        any.
        """
        count = len(self.schema.inputs)
        leaves = self._as_leaves(inputs[:count])
        with torch.enable_grad(), self._state.put_back(trained=self._written):
            outputs = self._check_outputs(self.module(leaves[0]) if self.takes_tensor else self._call(leaves), leaves)
            roots: list[Tensor] = []
            gradients: list[Tensor] = []
            for output, gradient in zip(outputs, inputs[count:], strict=True):
                if output is not None and gradient is not None and output.requires_grad:
                    roots.append(output)
                    gradients.append(gradient.to(output.device, output.dtype, non_blocking=True))
            if roots:
                # On this thread alone: torch's thread of a device may be waiting for this answer, in this same process.
                with torch.autograd.set_multithreading_enabled(False):
                    torch.autograd.backward(roots, gradients)
        self._check_gradients(outputs)
        return tuple([None if leaf is None else leaf.grad for leaf in leaves]), bool(roots)

    def _recompute_batch(self, batch: Sequence[Task]) -> tuple[Sequence[Tensor | None], bool]:
        """Recompute a batch, or one request larger than a batch in parts, whose gradients of parameters are summed."""
        size = self.backward_pool.max_batch_size
        if len(batch) > 1 or batch[0].rows <= size:
            with self._with_mask(batch) if self.schema.pads else _as_it_is:
                return self._recompute(self._join(batch))
        moved: list[bool] = []

        def part(tasks: Sequence[Task]) -> list[Sequence[Tensor | None]]:
            gradients, some = self._recompute(tasks[0].inputs)
            moved.append(some)
            return [gradients]

        return in_parts(batch[0], size, self.backward_pool.name, part), any(moved)

    def _run_forward(self, batch: Sequence[Task]) -> Sequence[Sequence[Tensor | None]]:
        """Return the outputs of each task, in the mode of their callers."""
        if self.device.type != "cpu":
            self._bring(batch)
        changes, before = self._count_changes(), self._marks
        # Each task of a batch that fails runs alone, on the state that there was before.
        alone = batch[0].evaluating or len(batch) == batch[0].requests == 1
        with (
            _evaluating(self.module) if batch[0].evaluating else _as_it_is,
            self._with_mask(batch) if self.schema.pads else _as_it_is,
            _as_it_is if alone else self._state.put_back(trained=self._written, if_it_fails=True),
        ):
            if batch[0].tickets if len(batch) == 1 else any(task.tickets for task in batch):
                outputs = self._keep_forward(batch, changes)
            elif len(batch) == 1 and not self.schema.pads:
                outputs = [self.forward(*batch[0].inputs)]
            else:
                outputs = self._split(self.forward(*self._join(batch)), batch)
        if changed := self._count_changes() != changes:
            pairs = enumerate(zip(before, self._marks, strict=False))
            self._written |= {place for place, (old, new) in pairs if old != new}
        for task in batch:
            task.seen.changes = max(task.seen.changes, changes)
            task.seen.changed |= changed
        return outputs if self.device.type == "cpu" else list(map(_here, outputs))

    def _run_backward(self, batch: Sequence[Task]) -> Sequence[Sequence[Tensor | None]]:
        """Return the gradients of each task's inputs, in the mode of their callers, and update the parameters: through
        kept graphs for tasks with tickets, by recomputation for the others.

        Without updates the parameters' gradients are discarded, and the graphs stay for a backward that has them.
        """
        if self.device.type != "cpu":
            self._bring(batch)
        changes = self._count_changes()
        plain: list[Task] = []
        resumed: list[tuple[Task, list[KeptRows]]] = []
        tickets: list[bytes] = []
        for task in batch:
            task.seen.changes = max(task.seen.changes, changes)
            if task.tickets:
                tickets += [ticket for _, ticket in task.tickets]
                resumed.append((task, self._find_kept(task)))
            else:
                plain.append(task)
        if len(set(tickets)) < len(tickets):
            # The tasks then run one by one, and the first of the two finds the activations.
            raise ActivationsGone(f"{self.uid} keeps activations for one backward only; send the inputs again")
        answers: dict[int, Sequence[Tensor | None]] = {}
        moved = False
        try:
            with _evaluating(self.module) if batch[0].evaluating else _as_it_is, self._gradients.of_batch():
                if plain:
                    self._refuse_another_mask()
                    gradients, moved = self._recompute_batch(plain)
                    answers |= zip(map(id, plain), self._split(gradients, plain, gradients=True), strict=True)
                if resumed:
                    gradients_kept, moved_kept = self._backward_kept(resumed)
                    answers |= gradients_kept
                    moved |= moved_kept
                    self._check_gradients(
                        [output for _, entries in resumed for entry in entries for output in entry.batch.outputs]
                    )
                if batch[0].updates:
                    for ticket in tickets:
                        self.kept.drop(ticket)
                    if moved:
                        self._update()
        finally:
            # The update has been counted, and the rest of the state is what it was.
            self._marks = self._state.marks()
        each = list(map(answers.__getitem__, map(id, batch)))
        return each if self.device.type == "cpu" else list(map(_here, each))

    def _bring(self, batch: Sequence[Task]) -> None:
        """Copy a batch's tensors to the device before they are joined: from pinned memory without a wait."""
        for task in batch:
            task.inputs = [self._place(tensor) for tensor in task.inputs]

    def _count_changes(self) -> int:
        """Return how often the expert has changed: by updates, by forwards that write to it, by its owner."""
        marks = self._state.marks()
        if marks != self._marks:
            self._marks = marks
            self.changes += 1
        return self.changes

    def _join(self, batch: Sequence[Task]) -> Sequence[Tensor | None]:
        """Return the inputs of a batch, and the gradients of its outputs if it is a backward's."""
        if len(batch) == 1:
            return batch[0].inputs
        inputs: Sequence[Sequence[Tensor | None]] = [task.inputs for task in batch]
        if self.schema.pads:
            specs = [*self.schema.inputs, *self.schema.output_specs]
            inputs = join_padded(batch, specs[: len(batch[0].inputs)])
        return join_rows(inputs, [task.rows for task in batch])

    def _split(
        self, tensors: Sequence[Tensor | None], batch: Sequence[Task], *, gradients: bool = False
    ) -> Sequence[Sequence[Tensor | None]]:
        """Return the outputs of each task, or the ``gradients`` of its inputs."""
        split = [tensors] if len(batch) == 1 else split_outputs(tensors, batch)
        if not self.schema.pads:
            return split
        if gradients:
            return split_padded(split, batch, self.schema.inputs, self.schema.input_names)
        return split_padded(split, batch, self.schema.output_specs, self.schema.output_names)

    @contextmanager
    def _with_mask(self, batch: Sequence[Task]) -> Iterator[None]:
        self._mask = make_mask(batch, self.device)
        try:
            yield
        finally:
            self._mask = None

    def _keep_forward(self, batch: Sequence[Task], changes: int) -> Sequence[Sequence[Tensor | None]]:
        """Return a forward whose graph is kept for the tasks with a ticket."""
        copies = copies_of(self.module)
        fresh = dict(copies)
        leaves = self._as_leaves(self._join(batch))
        with torch.enable_grad():
            outputs = self._check_outputs(self._call(leaves, copies), leaves)
        take_writes(self.module, copies, fresh)
        rows = sum(task.rows for task in batch)
        graph = KeptBatch(leaves, outputs, fresh, rows, changes)
        start = 0
        for task in batch:
            place = start
            for count, ticket in task.tickets:
                self.kept.put(ticket, KeptRows(graph, place, count, task.length))
                place += count
            start += task.rows
        return self._split([None if output is None else output.detach() for output in outputs], batch)

    def _refuse_another_mask(self) -> None:
        """Raise ``ValueError`` where forward would draw another mask of dropout than the one of the output."""
        for name, layer in self.module.named_modules():
            if isinstance(layer, _DropoutNd) and layer.training and layer.p > 0:
                raise ValueError(
                    f"{self.uid}: {name or 'the module'} is {layer} in training mode, of which a backward would draw "
                    "another mask: serve it with keep_activations= (rows that wait for theirs), p=0, or in eval mode"
                )

    def _find_kept(self, task: Task) -> list[KeptRows]:
        """Return the kept rows of a task, those that follow one another in one graph as one."""
        entries: list[KeptRows] = []
        for rows, ticket in task.tickets:
            entry = self.kept.get(ticket)
            if entry is None:
                raise ActivationsGone(f"{self.uid} has not kept these activations; send the inputs again")
            if entry.rows != rows:
                raise SchemaError(f"{self.uid}: received gradients of {rows} rows for a forward of {entry.rows}")
            last = entries[-1] if entries else None
            if last is not None and last.batch is entry.batch and last.start + last.rows == entry.start:
                entries[-1] = KeptRows(last.batch, last.start, last.rows + rows, last.length)
            else:
                entries.append(entry)
        return entries

    def _backward_kept(
        self, tasks: Sequence[tuple[Task, list[KeptRows]]]
    ) -> tuple[dict[int, Sequence[Tensor | None]], bool]:
        """Each task's gradients of its inputs, with the parameters' in ``.grad``, and whether there were any."""
        count = len(self.schema.inputs)
        graphs: dict[int, list[tuple[KeptRows, Sequence[Tensor | None]]]] = {}
        for task, entries in tasks:
            start = 0
            for entry in entries:
                its = rows_of(task.inputs[count:], start, entry.rows)
                graphs.setdefault(id(entry.batch), []).append((entry, its))
                start += entry.rows
        gradients: dict[int, list[Tensor | None]] = {}
        moved = False
        for key, parts in graphs.items():
            gradients[key], any_roots = parts[0][0].batch.backward(self.module, parts)
            moved |= any_roots
        answers: dict[int, Sequence[Tensor | None]] = {}
        for task, entries in tasks:
            task.seen.changes = max(entry.batch.changes for entry in entries)
            mine = [rows_of(gradients[id(entry.batch)], entry.start, entry.rows) for entry in entries]
            if self.schema.pads:  # such requests do not come together
                mine[0] = list(map(cut, mine[0], self.schema.inputs, repeat(entries[0].length)))
            answers[id(task)] = mine[0] if len(mine) == 1 else join_rows(mine, [entry.rows for entry in entries])
        return answers, moved

    def _call(
        self, leaves: Sequence[Tensor | None], copies: dict[str, Tensor] | None = None, cache: object = None
    ) -> Structure:
        schema = self.schema
        whole = schema.input_nesting.rebuild(leaves)
        args, kwargs = cast(tuple[tuple[object, ...], dict[str, object]], whole)
        if self._mask is not None:
            kwargs["mask"] = self._mask
        elif schema.pads:  # of a request alone
            shape = _rows_of(leaves), schema.measure(leaves)[1]
            kwargs["mask"] = torch.ones(shape, dtype=torch.bool, device=self.device)
        if cache is not None:
            kwargs["cache"] = cache
        if copies is None:
            return self.module(*args, **kwargs)
        return torch.func.functional_call(self.module, copies, args, kwargs)

    def _place(self, tensor: Tensor | None) -> Tensor | None:
        if tensor is None or tensor.device == self.device:
            return tensor
        return tensor.to(self.device, non_blocking=True)

    def _as_leaves(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the inputs on the device, those that have gradients as leaves."""
        leaves: list[Tensor | None] = []
        for tensor, spec in zip(tensors, self.schema.inputs, strict=True):
            if tensor is not None and tensor.device != self.device:
                tensor = self._place(tensor)
            if tensor is not None and spec is not None and spec.requires_grad:
                tensor = tensor.detach().requires_grad_()
            leaves.append(tensor)
        return leaves

    def _check_outputs(self, outputs: Structure, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the module's outputs flat.

        Raises:
            SchemaError: they do not fit the schema, or are not as many rows as ``inputs``.
        """
        schema, first = self.schema, inputs[0]
        rows = first.shape[0] if first is not None else _rows_of(inputs)
        if schema.gives_one and isinstance(outputs, Tensor):
            leaves: list[object] = [outputs]
        else:
            try:
                leaves = schema.output_nesting.leaves_of(outputs)
            except Mismatch:
                raise SchemaError(
                    f"{self.uid} returned {outline(outputs)}, which differs from its schema, {outline(schema.outputs)}"
                ) from None
        for index, (leaf, spec) in enumerate(zip(leaves, schema.output_specs, strict=True)):
            if spec is None:
                continue
            if not isinstance(leaf, Tensor) or leaf.dtype is not spec.dtype or leaf.shape[1:] != spec.shape:
                spec.check(leaf, f"{self.uid}'s output {index}")
            assert isinstance(leaf, Tensor)
            if leaf.shape[:1] != (rows,):
                says = f"expected {rows} rows, as in the input, got {len(leaf) if leaf.ndim else 'none'}"
                raise SchemaError(
                    f"{self.uid}'s output {index}: {says}; a module returns one row (dim 0) per input row"
                )
        return cast(list[Tensor | None], leaves)

    def _check_gradients(self, outputs: Sequence[Tensor | None]) -> None:
        names: list[str] = []
        gradients: list[Tensor | None] = []
        for own, parameter in self.module.named_parameters():
            names.append(own)
            gradients.append(parameter.grad)
        if (name := first_not_finite(gradients, names)) is not None:
            of_module = first_not_finite(outputs, [""] * len(outputs)) is not None
            why = " because the module's own output holds NaN or Inf" if of_module else ""
            raise NonFinite(f"{self.uid}: the gradient of {name} is NaN or Inf{why}; nothing was updated")

    def _update(self) -> None:
        tasks = self.backward_pool.tasks_in_batch
        if self.gradient_reduction == "mean" and tasks > 1:
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    parameter.grad /= tasks
        try:
            with self._gradients.added(overridden=type(self).apply_gradients is not ExpertBackend.apply_gradients):
                self.apply_gradients()
            self.updates += 1
        except BaseException as error:
            if ends_the_program(error):
                raise
            raise Unrepeatable(f"{self.uid}: the update failed: {type(error).__name__}: {error}") from error
        finally:
            self.changes += self._gradients.stepped

    def _infer_outputs(self) -> Structure:
        """Return the specs of the module's outputs, found by running it on zeros, and twice if input sizes vary."""
        if not any(spec is not None and spec.varying for spec in self.schema.inputs):
            return self._infer_at(0)
        shorter, longer = self._infer_at(_SAMPLE_LENGTH), self._infer_at(2 * _SAMPLE_LENGTH)
        kinds = [
            [None if spec is None else (len(spec.shape), spec.dtype) for spec in specs_of(outputs)]
            for outputs in (shorter, longer)
        ]
        if kinds[0] != kinds[1]:
            raise SchemaError(
                f"{self.uid}: the module returns {shorter} or {longer}, depending on the length of its input"
            )
        merged: list[TensorSpec | None] = []
        for a, b in zip(specs_of(shorter), specs_of(longer), strict=True):
            if a is None or b is None:
                merged.append(None)
                continue
            sizes = [one if one == other else None for one, other in zip(a.shape, b.shape, strict=True)]
            merged.append(TensorSpec(*sizes, dtype=a.dtype, requires_grad=a.requires_grad))
        return Nesting.of(shorter).rebuild(merged)

    @torch.inference_mode(False)  # whether an output needs gradients is read from the module's
    def _infer_at(self, length: int) -> Structure:
        devices = [self.device] if self.device.type == "cuda" else []
        zeros = [
            None if spec is None else spec.zeros(_SAMPLE_ROWS, [length] * len(spec.varying), device=self.device)
            for spec in self.schema.inputs
        ]
        with torch.random.fork_rng(devices=devices), torch.enable_grad(), ExitStack() as modes:
            for part in self.module.modules():
                # The buffers of a remote part are on its server, and change in train mode.
                if getattr(type(part), "steps_there", False):
                    modes.enter_context(_evaluating(part))
            leaves = self._as_leaves(zeros)
            try:
                if any(map(is_lazy, self.module.parameters())):
                    self._call(leaves)  # with the shapes of its parameters it writes their sizes into attributes
                modes.enter_context(self._state.put_back(trained=range(sys.maxsize)))
                outputs = self._call(leaves)
            except Exception as error:
                raise SchemaError(
                    f"{self.uid}: the module does not accept the inputs of its schema: {type(error).__name__}: {error}"
                    + (f" (at length {length}; give outputs_schema to try none)" if length else "")
                ) from error
        return infer_specs(outputs, _SAMPLE_ROWS)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Hold ``module`` in eval mode, and restore the mode of each of its parts."""
    modes = [(part, part.training) for part in module.modules()]
    if any(training for _, training in modes):
        module.eval()
    try:
        yield
    finally:
        # Through ``train``, which a module may override: some merge weights in eval mode. Parents come first.
        for part, training in modes:
            if part.training != training:
                part.train(training)


_as_it_is = nullcontext()


def _run_steps(batch: Sequence[Task]) -> list[Sequence[Tensor | None]]:
    return [_here(task.step(task.inputs)) for task in batch if task.step is not None]


def _here(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the tensors in main memory."""
    return [None if tensor is None else tensor.cpu() for tensor in tensors]


def _rows_of(inputs: Sequence[Tensor | None]) -> int:
    return next(tensor.shape[0] for tensor in inputs if tensor is not None)


def _check_inputs(uid: str, arguments: tuple[Structure, ...], keywords: Mapping[str, Structure]) -> None:
    specs = [spec for spec in specs_of((arguments, dict(keywords))) if spec is not None]
    if not specs:
        raise ValueError(f"{uid}: a schema without inputs has no rows to batch; give args_schema or kwargs_schema")
    padded, grouped = ([spec for spec in specs if spec.varying and spec.pad == pad] for pad in (True, False))
    if padded and "mask" in keywords:
        raise ValueError(f"{uid}: pad=True gives the module an input called mask, so kwargs_schema cannot have one")
    if padded and grouped:
        raise ValueError(f"{uid}: {padded[0]} is padded, and {grouped[0]} is not; give both pad=True, or neither")


def _check_optimizer(uid: str, module: nn.Module, optimizer: Optimizer | None) -> None:
    if optimizer is None:
        return
    own = {id(parameter) for parameter in module.parameters()}
    for index, group in enumerate(optimizer.param_groups):
        if foreign := [tuple(parameter.shape) for parameter in group["params"] if id(parameter) not in own]:
            raise ValueError(
                f"{uid}: the optimizer's group {index} is of another module, of shapes {foreign}; create it over "
                "module.parameters()"
            )


def _check_steps(uid: str, *steppers: Optimizer | LRScheduler | None) -> None:
    """Refuse an optimizer or scheduler whose ``step`` needs an argument: LBFGS, ReduceLROnPlateau."""
    for one in steppers:
        if one is not None:
            try:
                inspect.signature(type(one).step).bind(one)
            except TypeError as error:
                raise ValueError(
                    f"{uid}: {type(one).__name__}.step is called without arguments ({error}); use another one, or "
                    "override apply_gradients and call it there"
                ) from None


# --- gradients of parameters: a batch's own, and those that earlier batches left for a later step
#
#     left by earlier batches ──> set aside ───────────────────────┐
#     this batch ──> .grad ──> finite? ──> mean over requests ──> sum ──> apply_gradients ──> cleared if it has stepped,
#                                └── a batch that fails leaves the others' as they were           else left for the next


class ParameterGradients:
    """The gradients of a module's parameters: a batch's own, in ``.grad``, and those of earlier batches beside them.

    Attributes:
        applied: they have been used in an update; set by the update itself if it may leave the parameters unchanged.
        stepped: the batch's update has changed parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.applied = self.stepped = False
        self._parameters: list[nn.Parameter] = []
        self._left: list[Tensor | None] = []  # for ``.grad``, when the batch ends

    @contextmanager
    def of_batch(self) -> Iterator[None]:
        """Set aside those of earlier batches while a batch's are computed; restore them if it fails or has none."""
        self._parameters = list(parameters_here(self._module).values())
        self._left = list(map(_GRAD, self._parameters))
        self.stepped = False
        for parameter in self._parameters:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in zip(self._parameters, self._left, strict=True):
                parameter.grad = gradient
            self._parameters, self._left = [], []

    @contextmanager
    def added(self, *, overridden: bool) -> Iterator[None]:
        """Add the earlier gradients to the batch's for an update in the block; clear them if it was made.

        An update that fails before it has changed anything discards only this batch. ``overridden``: it may leave them
        for later, or change parameters in ways visible only in their values.
        """
        for parameter, earlier in zip(self._parameters, self._left, strict=True):
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else _sum(earlier, parameter.grad)
        before = self._marks() if overridden else None
        self.applied = not overridden
        try:
            yield
            self._left = list(map(_GRAD, self._parameters))
        finally:
            if self.applied or before != self._marks():
                self.stepped, self._left = True, [None] * len(self._parameters)

    def state_dict(self) -> dict[str, object]:
        """Return the gradients by parameter, dense, and how many dimensions were sparse; empty if none waits."""
        named = self._module.named_parameters()
        gradients = {name: parameter.grad for name, parameter in named if parameter.grad is not None}
        return {name: [one.to_dense(), one.is_sparse and one.sparse_dim()] for name, one in gradients.items()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Load the gradients from ``state_dict``."""
        for name, parameter in self._module.named_parameters():
            gradient, sparse = cast("tuple[Tensor | None, int]", state.get(name, (None, 0)))
            gradient = None if gradient is None else gradient.to(parameter.device, parameter.dtype)
            parameter.grad = gradient.to_sparse(sparse) if gradient is not None and sparse else gradient

    def _marks(self) -> tuple[list[int], list[float]]:
        """Return what changes when a parameter does: its version, or through ``.data`` only its values."""
        with torch.no_grad():
            sums = [parameter.sum().double() for parameter in self._parameters if parameter.numel()]
            return [parameter._version for parameter in self._parameters], torch.stack(sums).tolist() if sums else []


_GRAD = attrgetter("grad")


def _sum(earlier: Tensor, gradient: Tensor) -> Tensor:
    # A sparse one is added to a dense one, not the reverse.
    return gradient + earlier if earlier.is_sparse else earlier + gradient


# --- activations kept between forward and backward: the forward's graph, for callers whose backward arrives in time
#
# The graph is the batch's, and each request knows its rows of it: its backward can run alone or with others, with zeros
# for the gradients of the rest. The graph is over copies of the parameters and buffers at that time: what writes to
# them before the backward would otherwise change the graph's saved tensors. A copy takes no memory until one side is
# written. Kept rows are bounded; the oldest are evicted first, and their caller sends the inputs again.


def copies_of(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of a module's parameters, as leaves, and buffers, by name."""
    copies = {
        name: copy_on_write(parameter).requires_grad_(parameter.requires_grad)
        for name, parameter in parameters_here(module).items()
    }
    return copies | {name: copy_on_write(buffer) for name, buffer in module.named_buffers()}


def take_writes(module: nn.Module, copies: Mapping[str, Tensor], fresh: Mapping[str, Tensor]) -> None:
    """Write to ``module`` what a forward on ``copies`` has written to them; ``fresh`` are the copies before it."""
    with torch.no_grad():
        for name, own in [*parameters_here(module).items(), *module.named_buffers()]:
            copy = copies[name]
            if copy is not fresh[name] and not isinstance(own, nn.Parameter):
                owner, _, last = name.rpartition(".")
                setattr(module.get_submodule(owner), last, copy_on_write(copy))
            elif copy.layout is torch.strided and not is_unwritten(copy) and not torch.equal(copy, own):
                own.copy_(copy)


def is_unwritten(tensor: Tensor) -> bool:
    """Return True if neither ``tensor`` nor its copy on write has been written since."""
    return tensor.layout is torch.strided and bool(torch._C._is_cow_tensor(tensor))  # type: ignore[attr-defined]


def copy_on_write(tensor: Tensor) -> Tensor:
    """Return a detached copy whose memory is copied when the first of the two is written."""
    copy = lazy_clone(tensor.detach(), on_cuda=True)
    return tensor.detach().clone() if copy is None else copy


@dataclass(frozen=True, slots=True, eq=False)
class KeptBatch:
    """A forward's graph: its inputs, those with gradients as leaves, its outputs, the copies of parameters and buffers
    that it is over, and how often the expert had changed before.
    """

    leaves: Sequence[Tensor | None]
    outputs: Sequence[Tensor | None]
    copies: dict[str, Tensor]
    rows: int
    changes: int

    def backward(
        self, module: nn.Module, parts: Sequence[tuple[KeptRows, Sequence[Tensor | None]]]
    ) -> tuple[list[Tensor | None], bool]:
        """Add the gradients of the parameters to theirs in ``module``; return those of the leaves, and whether any
        output had a gradient.

        Args:
            module: the expert's.
            parts: the parts to run back, each with a gradient for each of its outputs, where it has one.
        """
        roots: list[Tensor] = []
        seeds: list[Tensor] = []
        for index, output in enumerate(self.outputs):
            mine = [(kept, its[index]) for kept, its in parts if its[index] is not None]
            if output is None or not output.requires_grad or not mine:
                continue
            seed = torch.zeros_like(output)
            for kept, gradient in mine:
                assert gradient is not None
                rows = seed[kept.start : kept.start + kept.rows]
                rows[tuple(slice(size) for size in gradient.shape)].copy_(gradient, non_blocking=True)
            roots.append(output)
            seeds.append(seed)
        try:
            if roots:
                # Other requests of the same graph may still run their backward. On this thread alone: torch's thread of
                # a device may be waiting for this answer, in this same process. A part of the module that is
                # checkpointed runs again, from the copies too.
                with (
                    torch.autograd.set_multithreading_enabled(False),
                    _reparametrize_module(module, dict(self.copies), tie_weights=True),
                ):
                    torch.autograd.backward(roots, seeds, retain_graph=True)
            for name, copy in self.copies.items():
                if copy.grad is not None:
                    parameter = module.get_parameter(name)
                    parameter.grad = copy.grad if parameter.grad is None else parameter.grad + copy.grad
            return [None if leaf is None else leaf.grad for leaf in self.leaves], bool(roots)
        finally:
            for tensor in (*self.leaves, *self.copies.values()):
                if tensor is not None:
                    tensor.grad = None


@dataclass(frozen=True, slots=True, eq=False)
class KeptRows:
    """One request's rows of a forward's graph, and its length if the graph is of padded requests."""

    batch: KeptBatch
    start: int
    rows: int
    length: int = 0


class KeptActivations:
    """Activations kept for later backwards, by the callers' tickets.

    >>> kept = KeptActivations(4)
    >>> batch = KeptBatch([], [], copies_of(nn.Linear(1, 1)), rows=6, changes=0)
    >>> for start, ticket in enumerate((b"a", b"b", b"c")):
    ...     kept.put(ticket, KeptRows(batch, 2 * start, rows=2))
    >>> b"a" in kept, b"c" in kept
    (False, True)

    Args:
        rows: the most rows kept.
    """

    def __init__(self, rows: int) -> None:
        self.budget = rows
        self._entries: OrderedDict[bytes, KeptRows] = OrderedDict()
        self._rows = 0

    def __contains__(self, ticket: bytes) -> bool:
        return ticket in self._entries

    def put(self, ticket: bytes, kept: KeptRows) -> None:
        """Keep a request's part of a graph, and evict the oldest ones beyond the budget."""
        self.drop(ticket)
        if kept.rows > self.budget:
            return
        self._entries[ticket] = kept
        self._rows += kept.rows
        while self._rows > self.budget:
            self._rows -= self._entries.popitem(last=False)[1].rows

    def get(self, ticket: bytes) -> KeptRows | None:
        """Return the activations kept under ``ticket``; ``None`` if they are gone."""
        return self._entries.get(ticket)

    def drop(self, ticket: bytes) -> None:
        """Free the activations kept under ``ticket``."""
        entry = self._entries.pop(ticket, None)
        if entry is not None:
            self._rows -= entry.rows
