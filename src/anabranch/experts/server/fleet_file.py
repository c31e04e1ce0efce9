"""A fleet of experts in a file: a list of groups in TOML or YAML, each with the keys of ``ExpertGroup``."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch.experts.server.expert_group import ExpertGroup

if TYPE_CHECKING:
    from yaml.nodes import Node

__all__ = ["read_fleet"]

_KEYS = tuple(field.name for field in fields(ExpertGroup) if field.name != "where")
_FORM = "a fleet is a list of groups: [[experts]] in TOML, a list under experts: in YAML"


def read_fleet(path: str | os.PathLike[str]) -> list[ExpertGroup]:
    r"""Read the groups of a fleet; keys are those of ``ExpertGroup``, with ``-`` or ``_``.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "fleet.toml")
    ...     _ = file.write_text('[[experts]]\nuids = "ffn.[0:2]"\nmax-batch-size = 64')
    ...     read_fleet(file)[0].max_batch_size
    64

    Args:
        path: ends in ``.toml``, ``.yaml`` or ``.yml``.

    Raises:
        ValueError: the file is not a fleet; the message names file, group, key and value, and says what to give.
        ModuleNotFoundError: YAML without the ``yaml`` extra.
        OSError: the file cannot be read.
    """
    path = Path(path)
    content = _load(path)
    groups = content
    if isinstance(content, Mapping):
        if other := [key for key in content if key != "experts"]:
            raise ValueError(
                f"{path}: {other[0]!r} is outside the groups; {_FORM}. Options of the server, such as listen and "
                "directory, are given on the command line"
            )
        groups = content.get("experts")
    if not isinstance(groups, list) or not groups:
        raise ValueError(f"{path}: {_FORM}, got {_short(groups)}")
    return [_read_group(group, f"{path}, group {number}") for number, group in enumerate(groups, 1)]


def _read_group(content: object, where: str) -> ExpertGroup:
    if not isinstance(content, Mapping):
        raise ValueError(f"{where}: a group is a table of keys and values, got {_short(content)}")
    said: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in _KEYS:
            near = get_close_matches(name, _KEYS, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"keys are {', '.join(_KEYS)}"
            raise ValueError(f"{where}: unknown key {key!r} with the value {_short(value)}; {hint}")
        if name in said:
            raise ValueError(f"{where}: {name!r} is given twice, with - and with _; keep one")
        said[name] = value
    if "uids" not in said:
        raise ValueError(f'{where}: has no uids; give the experts\' names, such as uids = "ffn.[0:4]"')
    where = f"{where} ({said['uids']})"
    try:
        return ExpertGroup(**said, where=where)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _load(path: Path) -> object:
    if path.suffix == ".toml":
        try:
            return tomllib.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not TOML: {error}") from error
    if path.suffix not in (".yaml", ".yml"):
        raise ValueError(f"{str(path)!r} has no known format; name it .toml, .yaml or .yml")
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{path} needs PyYAML: pip install 'anabranch[yaml]', or use TOML, which needs no package", name="yaml"
        ) from error
    text = path.read_text(encoding="utf-8")
    try:
        content = yaml.safe_load(text)
        twice = _key_given_twice(yaml.compose(text, yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if twice is not None:
        key, first, second = twice
        raise ValueError(f"{path}: {key!r} is given twice in one table, in line {first} and in line {second}; keep one")
    return content


def _key_given_twice(root: Node | None) -> tuple[str, int, int] | None:
    """Return a key that a table has twice, with its lines: YAML silently uses the last."""
    waiting = [root]
    seen: set[int] = set()
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in seen or isinstance(node.value, str):
            continue
        seen.add(id(node))  # an alias may lead back to its own container
        lines: dict[tuple[str, str], int] = {}
        for item in node.value:
            key, value = item if isinstance(item, tuple) else (None, item)
            waiting.append(value)
            if key is None or not isinstance(key.value, str):
                continue
            line = key.start_mark.line + 1
            if (key.tag, key.value) in lines:
                return key.value, lines[key.tag, key.value], line
            lines[key.tag, key.value] = line
    return None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
