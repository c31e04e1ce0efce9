"""``run(fetch=...)``: the loss, what the step returned, outputs of submodules, gradients, and facts about the run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor, nn

from anabranch.autodiff import record_outputs
from anabranch.tensors import Structure, map_structure

__all__ = ["FACTS", "Fetch"]

_GRADIENT = ".grad"
_NORM = "grad_norm"
_ROWS = "rows"
_RATES = "learning_rates"
FACTS = (_NORM, _ROWS, _RATES)
"""Names of facts about a run, unless the step returns something of that name or the model has such a submodule."""


class Fetch:
    """One request's names, classified before anything runs; keys of the step are known only after its forward.

    Args:
        names: the names to fetch; ``None`` takes everything the step returns.
        model: has the submodules and parameters.

    Attributes:
        modules: the submodules whose outputs are requested.
        gradients: the gradients requested, as ``<parameter>.grad``.
        wants_norm: the norm of the gradients is requested, unless the step itself returns something of that name.
        wants_rates: the same of the learning rates.
        norm: the norm of all gradients before clipping, where it was requested and the step took one.
        rows: the rows of this worker's batch, of no dimensions.
        rates: the learning rate of each parameter group, float64.
    """

    norm: Tensor | None = None
    rows: Tensor | None = None
    rates: Tensor | None = None

    def __init__(self, names: Sequence[str] | None, model: nn.Module) -> None:
        if isinstance(names, str):
            raise TypeError(f"fetch is a list of names, got the string {names!r}; write fetch=[{names!r}]")
        if names is not None and not (isinstance(names, Iterable) and all(isinstance(name, str) for name in names)):
            raise TypeError(f"fetch is a list of names, which are strings, got {names!r}")
        self.names = None if names is None else list(names)
        self.wants_norm = self.names is not None and _NORM in self.names
        self.wants_rates = self.names is not None and _RATES in self.names
        self._outputs: Mapping[str, Structure] = {}
        self._recorded: Mapping[str, Structure] = {}
        self._model = model
        self._modules: dict[str, nn.Module] = {}
        self._gradients: dict[str, nn.Parameter] = {}
        self.modules: list[str] = []
        self.gradients: list[str] = []
        if not self.names:
            return
        modules = dict(model.named_modules())
        self._modules = {name: modules[name] for name in self.names if name and name in modules}
        parameters = dict(model.named_parameters())
        self._gradients = {
            name: parameters[name.removesuffix(_GRADIENT)]
            for name in self.names
            if name.endswith(_GRADIENT) and name.removesuffix(_GRADIENT) in parameters
        }
        self.modules, self.gradients = list(self._modules), list(self._gradients)

    def record_gradients(self, gradients: Mapping[str, Structure]) -> None:
        """Take gradients from an engine that leaves none in ``.grad``."""
        self._recorded = gradients

    def record(self, outputs: Mapping[str, Structure]) -> None:
        """Take the outputs of the submodules from an engine that has them."""
        self._outputs = outputs

    def recording(self) -> AbstractContextManager[None]:
        """Record the outputs of the submodules requested while the block runs forward."""
        return self._recording() if self._modules else nullcontext()

    @contextmanager
    def _recording(self) -> Iterator[None]:
        with record_outputs(self._modules) as outputs:
            yield
        self._outputs = outputs

    def check(self, returned: Mapping[str, object]) -> None:
        """Raise ``ValueError`` for an unknown name, before the step changes anything."""
        for name in self.names or ():
            if name == "loss" or name in FACTS or name in returned or name in self._modules or name in self._gradients:
                continue
            raise ValueError(
                f"fetch names {name!r}, which is neither 'loss', nor a key that the step returns ({sorted(returned)}), "
                f"nor a submodule of {type(self._model).__name__}, nor '<parameter>.grad', nor one of {FACTS}"
            )

    def collect(self, returned: Mapping[str, Tensor]) -> dict[str, Structure]:
        """Return the fetched values, once the step has run, without the tape that they depend on: it was swept by
        then.
        """
        return {name: _detached(value) for name, value in self._collect(returned).items()}

    def _collect(self, returned: Mapping[str, Tensor]) -> Mapping[str, Structure]:
        if self.names is None:
            return returned
        found: dict[str, Structure] = {}
        for name in self.names:
            if name in returned:
                found[name] = returned[name]
            elif name in self._recorded:
                found[name] = self._recorded[name]
            elif name in self._gradients:
                gradient = self._gradients[name].grad
                # .grad may be a view of a bucket that the next step overwrites.
                found[name] = None if gradient is None else gradient.detach().clone()
            elif name in self._modules:
                found[name] = self._outputs.get(name)
            elif name in FACTS:
                found[name] = {_NORM: self.norm, _ROWS: self.rows, _RATES: self.rates}[name]
        return found


def _detached(value: Structure) -> Structure:
    if isinstance(value, Tensor):
        return value.detach()
    return map_structure(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)
