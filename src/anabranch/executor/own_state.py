"""``executor.state``: the user's own objects and values, saved with every checkpoint."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from typing import Any


class OwnState(UserDict[str, Any]):
    """The objects and values given as ``state=``, by name; a value may be set, a new name may not.

    What has ``state_dict`` and ``load_state_dict`` is saved by them, any other value as it is.

    >>> state = OwnState({"best": 0.5})
    >>> state["best"] = 0.25
    >>> state.of("best")
    {'value': 0.25}
    """

    def __init__(self, values: Mapping[str, object]) -> None:
        super().__init__()
        self.data = dict(values)

    def of(self, name: str) -> Any:
        """Return the state of an object or value, as a checkpoint has it."""
        value = self.data[name]
        return value.state_dict() if _has_state(value) else {"value": value}

    def load(self, name: str, state: Any) -> None:
        """Load the state of an object; set a value, or fill the dict or list that is there."""
        here = self.data[name]
        if _has_state(here):
            here.load_state_dict(state)
        elif isinstance(here, dict) and isinstance(state["value"], dict):
            here.clear()
            here.update(state["value"])
        elif isinstance(here, list) and isinstance(state["value"], list):
            here[:] = state["value"]
        else:
            self.data[name] = state["value"]

    def __setitem__(self, name: str, value: object) -> None:
        """Set a value."""
        if name not in self.data:
            raise ValueError(f"no state is called {name!r}, so it would not be saved; give it to Executor(state=...)")
        self.data[name] = value


def _has_state(value: object) -> bool:
    return all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict"))
