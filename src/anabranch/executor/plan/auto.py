"""``comm_mode="auto"``: the possible modes, and one choice for all workers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

import msgspec
from torch import nn

from anabranch.executor.plan.mode_choice import ModeChoice, choose
from anabranch.executor.plan.step_plan import Plan
from anabranch.executor.routes import COMM_MODES, CommMode, Routes
from anabranch.executor.running.remote import check_served_steps
from anabranch.executor.steps import Step
from anabranch.parameter_server import Consistency, RemoteEmbedding
from anabranch.pipeline import Pipe
from anabranch.tables import Cache

__all__ = ["agreed", "check_auto", "modes_possible", "tell"]

_log = logging.getLogger("anabranch.executor")


def check_auto(models: Iterable[nn.Module], consistency: str) -> None:
    """Check that the modes give one answer for these models, and that nothing has a place whatever the mode.

    Raises:
        ValueError: names the reason and the modes to name instead.
    """
    if not Consistency.parse(consistency).merges:
        raise ValueError(
            f"comm_mode='auto' chooses among modes that train identically, and under consistency={consistency!r} those "
            "with servers do not; name 'AllReduce', 'PS' or 'Hybrid'"
        )
    for module in (module for model in models for module in model.modules()):
        if isinstance(module, Pipe):
            raise ValueError(
                "comm_mode='auto' plans only models that are whole on each worker, not a Pipe; name a mode"
            )
        if isinstance(module, RemoteEmbedding):
            raise ValueError(
                f"RemoteEmbedding {module.name!r} lives on servers under every comm_mode, so 'auto' has little to "
                "choose; name 'Hybrid', which all-reduces the rest, or 'PS'"
            )


def modes_possible(
    routes_in: Callable[[CommMode], Routes], steps: Mapping[str, Step], cache: Cache | None
) -> dict[CommMode, Routes]:
    """Return where the parameters would live in each mode that these steps can run in."""
    found: dict[CommMode, Routes] = {}
    for mode in COMM_MODES:
        try:
            routes = routes_in(mode)
            if routes.served:
                check_served_steps(steps, Consistency.parse("bsp"), cache)
        except ValueError as error:
            _log.info("comm_mode='auto' leaves out %r: %s", mode, error)
        else:
            found[mode] = routes
    return found


def agreed(plans: Mapping[CommMode, Plan], gather: Callable[[bytes], list[bytes]]) -> ModeChoice:
    """Return rank 0's choice, on every worker."""
    return msgspec.json.decode(gather(msgspec.json.encode(choose(plans)))[0], type=ModeChoice)


def tell(choice: ModeChoice, rank: int) -> None:
    """Log the choice, and print it on rank 0."""
    line = f"comm_mode='auto' chooses {choice.mode!r}: {choice.why}"
    _log.info("%s", line)
    if rank == 0:
        print(line, flush=True)
