"""Tables and parameters of servers as checkpoints: read a few rows at a time, and written to any number of shards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from anabranch import checkpoint
from anabranch.errors import CheckpointError, SchemaError
from anabranch.parameter_server.client.shards import HeldTables
from anabranch.parameter_server.messages import ExportMessage, RestoreMessage
from anabranch.tables.optimizers.row_optimizers import CONSTANTS, Family, RowOptimizer
from anabranch.tables.optimizers.row_wise_adagrad import sums_dtype
from anabranch.tables.optimizers.torch_state import ParameterState
from anabranch.tables.table_spec import TableSpec, state_dtype
from anabranch.transport import pack

__all__ = ["CHUNK", "collect", "for_optimizer", "restore", "restore_some", "sums_of", "write_dense", "write_rows"]

CHUNK = 1 << 16  # rows of a whole table in one message
_AT_ONCE = 64 << 20  # bytes of a checkpoint's rows that are held at once, in one file
_BLOCK = ("ids", "values", "stamps", "sums", "usage")


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows of one shard that a checkpoint takes in one message."""

    shard: int
    number: int
    name: str
    first: int
    rows: int


def collect(
    tables: HeldTables, names: Iterable[str] | None = None
) -> tuple[dict[str, object], dict[str, checkpoint.Group]]:
    """Return what ``save`` writes: plain values, and groups of tensors; of ``names`` only, if given.

    A group fetches its tensors when it is called: a dense parameter, or as many rows as fit into a worker's memory.
    """
    wanted = None if names is None else set(names)
    described_tables: dict[str, dict[str, Any]] = {}
    blocks: dict[str, list[_Block]] = {}
    dense: list[object] = []
    groups: dict[str, checkpoint.Group] = {}
    for shard, described in enumerate(tables.calls.describe()):
        for table in described["tables"]:
            name = table["spec"]["name"]
            if wanted is None or name in wanted:
                entry = described_tables.setdefault(name, table)
                entry["step"] = max(entry["step"], table["step"])
                each = _at_once(table)
                blocks.setdefault(name, []).extend(
                    _Block(shard, number, name, first, min(each, table["rows"] - first))
                    for number, first in enumerate(range(0, max(table["rows"], 1), each))
                )
        for parameter in described["dense"]:
            if wanted is None or parameter["name"] in wanted:
                groups[f"dense-{len(dense)}"] = functools.partial(_read_parameter, tables, shard, parameter["name"])
                dense.append({**parameter, "group": f"dense-{len(dense)}"})
    for number, (name, table) in enumerate(described_tables.items()):
        together = _in_files(blocks[name], _at_once(table))
        table["groups"] = [f"table-{number}.{k}" for k in range(len(together))]
        groups |= {
            group: functools.partial(_read_blocks, tables, some, table["step"])
            for group, some in zip(table["groups"], together, strict=True)
        }
    return {"tables": list(described_tables.values()), "dense": dense}, groups


def restore(tables: HeldTables, state: Mapping[str, Any], groups: Callable[[str], Mapping[str, Tensor]]) -> None:
    """Load the result of ``collect``, in place of everything on the shards."""
    if not isinstance(state, Mapping) or "tables" not in state or "dense" not in state:
        raise CheckpointError("this checkpoint holds no server tables or parameters")
    for entry in state["tables"]:
        _check_table(entry, groups)
    tables.drop(None)
    try:
        restore_some(tables, state, groups)
    except Exception as error:
        error.add_note("the servers now hold only part of the checkpoint: load it again, or load another one")
        raise


def restore_some(tables: HeldTables, state: Mapping[str, Any], groups: Callable[[str], Mapping[str, Tensor]]) -> None:
    """As ``restore``, but leaves other tables and parameters in place."""
    for entry in state["tables"]:
        _restore_table(tables, entry, groups)
    for entry in state["dense"]:
        tensors = groups(entry["group"])
        parts = [tensors[str(k)] for k in range(len(tensors))]
        tables.init_dense(entry["name"], torch.zeros_like(parts[0]), RowOptimizer.from_dict(entry["rule"]))
        message = pack(RestoreMessage(entry["name"], entry["step"]))
        tables.calls.call(tables.home(entry["name"]), "restore", message, parts)


def for_optimizer(entry: Mapping[str, Any], tensors: Mapping[str, Tensor], rule: RowOptimizer) -> dict[str, Tensor]:
    """Return a group of a table of ``collect`` for another optimizer, whose state begins anew."""
    found, width = dict(tensors), entry["spec"]["width"]
    kind = sums_dtype(TableSpec.from_dict(entry["spec"]).dtype)
    for label, part in tensors.items():
        if label.endswith(".values"):
            row = (len(part), rule.row_width(width))
            found[label] = torch.full(row, rule.initial_state, dtype=part.dtype, device="cpu")
            found[label][:, :width] = part[:, :width]
            count = len(part) if rule.family is Family.ROW_WISE_ADAGRAD else 0
            found[f"{label[:-7]}.sums"] = torch.full((count,), rule.initial_state, dtype=kind, device="cpu")
        elif label.endswith(".stamps"):
            found[label] = part.clamp(max=1)
    return found


def write_rows(tables: HeldTables, name: str, kept: ParameterState | Tensor, rule: RowOptimizer) -> None:
    """Set all rows of a fixed table that has not been trained here yet, a few at a time.

    A push meanwhile ends it: a shard takes no rows that are older than its table.
    """
    holding = tables.holding(name, rows=True)
    there = _described(tables, name)
    if there["step"]:
        return
    if isinstance(kept, Tensor):
        kept = ParameterState(kept)
    # Every row is up to date, so earlier steps will not be replayed.
    history = torch.zeros(
        kept.step if there["spec"]["every_row_moves"] else 0, CONSTANTS, dtype=torch.float64, device="cpu"
    )
    flat = kept.values.detach().reshape(len(kept.values), -1)
    row_wise = rule.family is Family.ROW_WISE_ADAGRAD
    kind = sums_dtype(flat.dtype)
    for first in range(0, len(flat), CHUNK):
        some = slice(first, first + CHUNK)
        count = len(flat[some])
        row = (count, holding.width * (1 + rule.states))
        block = torch.full(row, rule.initial_state, dtype=state_dtype(flat.dtype), device="cpu")
        block[:, : holding.width] = flat[some]
        sums = torch.full((count if row_wise else 0,), rule.initial_state, dtype=kind, device="cpu")
        for number, state in enumerate(kept.states):
            if row_wise:
                sums = state[some].to("cpu", kind)
            else:
                at = holding.width * (1 + number)
                block[:, at : at + holding.width] = state[some].reshape(count, -1)
        parts = [
            torch.arange(first, first + count, device="cpu"), block,
            torch.full((count,), kept.step + 1, device="cpu"), sums,
            torch.empty(0, 2, dtype=torch.int64, device="cpu"),
        ]  # fmt: skip
        try:
            tables.restore_rows(name, parts, kept.step, history)
        except SchemaError:
            if _described(tables, name)["step"] > kept.step:
                return
            raise


def _described(tables: HeldTables, name: str) -> dict[str, Any]:
    """Return what the first shard says about a table."""
    return next(table for table in tables.calls.describe()[0]["tables"] if table["spec"]["name"] == name)


def write_dense(tables: HeldTables, name: str, kept: ParameterState, rule: RowOptimizer) -> None:
    """Create the dense parameter ``name`` from its saved state; an existing one is overwritten."""
    tables.init_dense(name, kept.values, rule)
    if kept.step:
        dtype = kept.values.dtype
        kind = sums_dtype(dtype) if rule.family is Family.ROW_WISE_ADAGRAD else state_dtype(dtype)
        states = [state.to(kind) for state in kept.states]
        parts = [part.detach().cpu().contiguous() for part in (kept.values, *states)]
        message = pack(RestoreMessage(name, kept.step))
        tables.calls.call(tables.home(name), "restore", message, parts)


def sums_of(tables: HeldTables, name: str, rows: int, rule: RowOptimizer) -> Tensor:
    """Return row-wise Adagrad's sums of a fixed table; in an answer with rows they would have the rows' dtype."""
    sums = torch.full((rows,), rule.initial_state, dtype=sums_dtype(tables.holding(name).dtype), device="cpu")
    for shard, described in enumerate(tables.calls.describe()):
        table = next(table for table in described["tables"] if table["spec"]["name"] == name)
        for first in range(0, table["rows"], CHUNK):
            _, (ids, _, _, some, *_) = tables.calls.export(shard, ExportMessage(name, first, CHUNK))
            sums[ids] = some
    return sums


def _read_blocks(tables: HeldTables, blocks: Sequence[_Block], step: int) -> dict[str, Tensor]:
    """Return the rows of ``blocks``, each as far behind ``step`` as it is behind the steps of its shard."""
    found: dict[str, Tensor] = {}
    longest = torch.empty(0, device="cpu")
    for block in blocks:
        message = ExportMessage(block.name, block.first, max(block.rows, 1))
        there, (ids, values, stamps, *parts, history) = tables.calls.export(block.shard, message)
        stamps = (stamps + (step - there)).clamp(min=1)
        named = zip(_BLOCK, (ids, values, stamps, *parts), strict=True)
        found |= {f"{block.shard}.{block.number}.{label}": part for label, part in named}
        longest = history if len(history) > len(longest) or "history" not in found else longest
        found["history"] = _of_length(longest, step) if len(longest) else longest
    return found


def _read_parameter(tables: HeldTables, shard: int, name: str) -> dict[str, Tensor]:
    return {str(k): tensor for k, tensor in enumerate(tables.calls.export(shard, ExportMessage(name))[1])}


def _restore_table(tables: HeldTables, entry: Mapping[str, Any], groups: Callable[[str], Mapping[str, Tensor]]) -> None:
    spec = TableSpec.from_dict(entry["spec"])
    own = next((made for made, _ in reversed(tables.made) if made.name == spec.name), spec)
    spec = replace(spec, memory_map=own.memory_map)
    tables.init_table(spec, RowOptimizer.from_dict(entry["rule"]))
    for group in entry["groups"]:
        tensors = groups(group)
        blocks = sorted({tuple(map(int, name.split(".")[:2])) for name in tensors if name != "history"})
        for shard, number in blocks:
            parts = [tensors[f"{shard}.{number}.{label}"] for label in _BLOCK]
            tables.restore_rows(spec.name, parts, entry["step"], tensors["history"])


def _of_length(history: Tensor, steps: int) -> Tensor:
    """Return the last ``steps`` entries; missing ones are filled with the first, since no row still has to catch up on
    them.
    """
    missing = steps - len(history)
    return torch.cat([history[:1].expand(missing, -1), history]) if missing > 0 else history[-missing:]


def _check_table(entry: Mapping[str, Any], groups: Callable[[str], Mapping[str, Tensor]]) -> None:
    """Raise ``CheckpointError`` for a table that could not be loaded whole, before the one on the shards is dropped."""
    name, step = entry["spec"]["name"], entry["step"]
    for group in entry["groups"]:
        for label, tensor in groups(group).items():
            if label.endswith(".stamps") and tensor.numel() and not 0 <= tensor.min() <= tensor.max() <= step + 1:
                raise CheckpointError(
                    f"the checkpoint's table {name} has rows of step {int(tensor.max()) - 1} and was saved at step "
                    f"{step}: it was saved while its shards had taken different numbers of pushes, by an earlier "
                    "version; nothing was changed"
                )


def _at_once(table: Mapping[str, Any]) -> int:
    """Return the number of rows of a table, as its shard describes it, that a checkpoint holds in memory at once."""
    spec = TableSpec.from_dict(table["spec"])
    row = RowOptimizer.from_dict(table["rule"]).row_width(spec.width) * state_dtype(spec.dtype).itemsize
    return max(1, min(CHUNK, _AT_ONCE // row))


def _in_files(blocks: Sequence[_Block], rows: int) -> list[list[_Block]]:
    """Return the blocks in order, joined up to at most ``rows`` rows."""
    found: list[list[_Block]] = [[]]
    for block in blocks:
        if found[-1] and sum(other.rows for other in found[-1]) + block.rows > rows:
            found.append([])
        found[-1].append(block)
    return found
