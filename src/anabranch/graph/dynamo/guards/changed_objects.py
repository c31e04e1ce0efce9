"""The Python objects that a traced function changes: Dynamo does so after the program has run."""

from __future__ import annotations

__all__ = ["changed_objects"]


def changed_objects() -> set[int]:
    """Return the ids of the objects that the function being traced has changed; to be called in Dynamo's backend."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    effects = InstructionTranslator.current_tx().output.side_effects
    return {known for known, variable in effects.id_to_variable.items() if effects.is_modified(variable)}
