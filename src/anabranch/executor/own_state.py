"""``executor.state``: the user's own objects and values, saved with every checkpoint."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from typing import Any, Protocol


class HasState(Protocol):
    """An object with saveable state: nested plain values and tensors."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Restore a state."""


class OwnState(UserDict[str, Any]):
    """The objects and values given as ``state=``, by name; a value may be set, a new name may not.

    >>> state = OwnState({"best": 0.5})
    >>> state["best"] = 0.25
    >>> state.objects["best"].state_dict()
    {'value': 0.25}
    """

    def __init__(self, values: Mapping[str, object]) -> None:
        super().__init__()
        self.data = dict(values)

    @property
    def objects(self) -> dict[str, HasState]:
        """The object of each name that is saved."""
        saved = ("state_dict", "load_state_dict")
        return {
            name: value if all(callable(getattr(value, method, None)) for method in saved) else _Value(self, name)
            for name, value in self.data.items()
        }

    def state(self) -> dict[str, Any]:
        """Return the state of each object."""
        return {name: target.state_dict() for name, target in self.objects.items()}

    def __setitem__(self, name: str, value: object) -> None:
        """Set a value; what has a ``state_dict`` is saved by it."""
        if name not in self.data:
            raise ValueError(f"no state is called {name!r}, so it would not be saved; give it to Executor(state=...)")
        self.data[name] = value

    def __delitem__(self, name: str) -> None:
        """Refuse it: a checkpoint has what was given."""
        raise ValueError(f"state {name!r} is saved with every checkpoint; set it, to None for instance")


class _Value:
    """A plain value as an object with state."""

    def __init__(self, values: OwnState, name: str) -> None:
        self._values, self._name = values, name

    def state_dict(self) -> dict[str, object]:
        return {"value": self._values.data[self._name]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        value, here = state_dict["value"], self._values.data[self._name]
        if isinstance(here, dict) and isinstance(value, dict):
            here.clear()
            here.update(value)
        elif isinstance(here, list) and isinstance(value, list):
            here[:] = value
        else:
            self._values.data[self._name] = value
