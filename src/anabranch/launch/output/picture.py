"""The status display of a job: a ``JobStatus`` as a ``rich`` renderable, for ``anabranch status``.

::

    anabranch · 2 workers, 1 server · 0:42 ─────────────────────────────────────
    train.py · logs
    training ━━━━━━━━━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━━ 412/800 51% · 0:31 left
    loss 0.3127 · 12.3 steps/s
    worker 0      4711  waiting  3.2 s for parameters 0 (pull)  step 412 · cache 93%
    worker 1      4712  running  step 412 · cache 91%
    parameters 0  4710  stopped
    crossing  workers 1.2 MB/s · table users 3.4 MB/s
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from anabranch.deadline import minutes_and_seconds
from anabranch.launch.job_status import JobStatus, RoleStatus, TrackedLoop
from anabranch.record.words import in_words, on_one_line

_STYLES = {
    "running": "green",
    "waiting": "yellow",
    "stopped": "bold red",
    "starting": "cyan",
    "restarting": "magenta",
    "gone": "dim",
}
_BESIDE_ROLES = 5  # lines: the head, the script, the bar, the loss, what crosses
_MOST_UIDS = 2


def picture(job: JobStatus, before: JobStatus | None = None, *, lines: int | None = None) -> RenderableType:
    """Return the picture of ``job``.

    Args:
        job: its current state.
        before: its state a moment ago, so that rates of services are current, not those of their whole lives.
        lines: at most this many lines, without the least important roles.
    """
    room = None if lines is None else lines - _BESIDE_ROLES
    shown = _most_telling(job.roles, room)
    parts: list[RenderableType] = [Rule(Text(_head(job), style="bold"), align="left", style="dim")]
    if job.folder is not None:
        parts.append(_line(" · ".join(filter(None, [job.script, job.folder]))))
    if job.progress:
        parts.append(_bar(job.progress, job.steps_per_second))
    loss = [] if job.loss is None else [f"loss {job.loss:.4g}"]
    if job.steps_per_second is not None:
        loss.append(f"{job.steps_per_second:.1f} steps/s")
    if loss:
        parts.append(Text(" · ".join(loss)))
    parts.append(_roles(job, shown, before))
    return Group(*parts)


def _head(job: JobStatus) -> str:
    counts = Counter(role.role.replace("parameters", "server") for role in job.roles)
    parts = ["anabranch", ", ".join(f"{count} {role}{'s' * (count != 1)}" for role, count in counts.items())]
    if job.seconds is not None:
        parts.append(minutes_and_seconds(job.seconds))
    if job.ended is not None:
        parts.append("ended")
    return " · ".join(filter(None, parts))


def _bar(loops: Sequence[TrackedLoop], steps_per_second: float | None) -> RenderableType:
    *outer, loop = loops
    line = Table.grid(padding=(0, 1), expand=True)
    line.add_column(no_wrap=True, overflow="ellipsis", max_width=30)
    cells: list[RenderableType] = [
        Text(on_one_line(" · ".join([*map(_count, outer), loop.label or "progress"])), style="bold")
    ]
    if loop.total:
        line.add_column(ratio=1)
        cells.append(ProgressBar(loop.total, min(loop.done, loop.total), style="dim"))
    line.add_column(no_wrap=True)
    cells.append(Text(" · ".join(_how_far(loop, steps_per_second))))
    line.add_row(*cells)
    return line


def _count(loop: TrackedLoop) -> str:
    count = str(loop.done) if loop.total is None else f"{loop.done}/{loop.total}"
    return f"{loop.label} {count}" if loop.label else count


def _how_far(loop: TrackedLoop, steps_per_second: float | None) -> Iterable[str]:
    if not loop.total:
        yield str(loop.done)
    else:
        yield f"{loop.done}/{loop.total} {100 * loop.done // loop.total}%"
    rate = loop.done / loop.seconds if loop.seconds else steps_per_second
    if loop.seconds and rate:
        yield f"{rate:.1f}/s" if rate >= 1 else f"{1 / rate:.1f} s each"
    if loop.total and rate:
        yield f"{minutes_and_seconds(max(0, loop.total - loop.done) / rate)} left"


def _roles(job: JobStatus, shown: Sequence[RoleStatus], before: JobStatus | None) -> RenderableType:
    earlier = {} if before is None else {role.name: role for role in before.roles}
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, min_width=max((len(role.name) for role in shown), default=0))
    table.add_column(no_wrap=True, justify="right")
    table.add_column(no_wrap=True)
    table.add_column()  # the one that is cut: its text does not wrap, though the column may
    for role in shown:
        facts = _line(_wait(role), style=_STYLES[role.state])
        facts.append(on_one_line(" · ".join(_facts(role, earlier.get(role.name)))), style="default")
        pid = Text("" if role.pid is None else str(role.pid), style="dim")
        table.add_row(role.name, pid, Text(role.state, style=_STYLES[role.state]), facts)
    if hidden := len(job.roles) - len(shown):
        counts = Counter(role.state for role in job.roles if role not in shown)
        words = ", ".join(f"{count} {state}" for state, count in counts.items())
        table.add_row(Text(f"{hidden} more", style="dim"), "", Text(words, style="dim"))
    crossing = _crossing(job.roles)
    return Group(table, _line(f"crossing  {' · '.join(crossing)}")) if crossing else table


def _line(text: str, style: str = "") -> Text:
    """One line, cut where the terminal ends."""
    return Text(on_one_line(text), style=style, no_wrap=True, overflow="ellipsis")


def _most_telling(roles: Sequence[RoleStatus], room: int | None) -> Sequence[RoleStatus]:
    """Return the roles that fit, in order: running ones without waits are left out first."""
    if room is None or len(roles) <= room:
        return roles
    ordered = sorted(roles, key=lambda role: role.state in ("running", "gone"))
    shown = ordered[: max(0, room - 1)]
    return [role for role in roles if role in shown]


def _wait(role: RoleStatus) -> str:
    if role.waiting_for is None or role.waiting_seconds is None:
        return ""
    seconds = role.waiting_seconds
    since = f"{seconds:.1f} s" if seconds < 60 else minutes_and_seconds(seconds)
    return f"{since} for {role.waiting_for} ({in_words(role.operation or '')})  "


def _facts(role: RoleStatus, before: RoleStatus | None) -> Iterable[str]:
    if role.steps is not None:
        yield f"step {role.steps}"
    hits = sum(loads.get("hits", 0) for loads in role.loads.values())
    misses = sum(loads.get("misses", 0) for loads in role.loads.values())
    if hits + misses:
        yield f"cache {100 * hits / (hits + misses):.0f}%"
    if role.service and role.state in ("running", "waiting"):
        yield from _service_facts(role, before)


def _service_facts(role: RoleStatus, before: RoleStatus | None) -> Iterable[str]:
    facts = role.service
    if uids := [*facts.get("experts", ())]:
        yield ", ".join(uids[:_MOST_UIDS]) + (f" +{len(uids) - _MOST_UIDS}" if len(uids) > _MOST_UIDS else "")
    if "queue_tasks" in facts:
        yield f"queue {facts['queue_tasks']}"
        yield f"busy {100 * _rate('busy_seconds', role, before):.0f}%"
        yield f"{_rate('rows', role, before):.0f} rows/s"
    if "stored_bytes" in facts:
        yield f"{_scaled(facts['rows']).replace(' ', '')} rows"
        if (clocks := facts["clocks"]) and facts["lag"] != 0:
            bound = "" if facts["lag"] is None else f" of {facts['lag']}"
            yield f"stale {max(clocks) - min(clocks)}{bound} steps"
    if "bytes" in facts:
        yield f"{_scaled(_rate('bytes', role, before))}B/s"


def _total(name: str, service: Mapping[str, Any]) -> float:
    """Return a count of a service, or of all its experts together."""
    return math.fsum(one[name] for one in ([service] if name in service else service["experts"].values()))


def _rate(name: str, role: RoleStatus, before: RoleStatus | None) -> float:
    """Return the rate per second of a count: since ``before``, or since the service started."""
    total, seconds = _total(name, role.service), float(role.service["uptime"])
    if before is not None and before.pid == role.pid and before.service and before.service["uptime"] < seconds:
        total, seconds = max(0.0, total - _total(name, before.service)), seconds - before.service["uptime"]
    return total / seconds if seconds > 0 else 0.0


def _crossing(roles: Sequence[RoleStatus]) -> list[str]:
    """Return the bytes per second of each boundary, of all workers together, the busiest first."""
    totals: Counter[str] = Counter()
    for role in roles:
        totals.update({name: round(rate) for name, rate in role.crossing.items()})
    return [f"{name} {_scaled(rate)}B/s" for name, rate in totals.most_common() if rate]


def _scaled(number: float) -> str:
    """Return a number with its decimal prefix.

    >>> _scaled(950), _scaled(1_234_567)
    ('950 ', '1.2 M')
    """
    for prefix in ("", "k", "M", "G", "T"):
        if number < 1000 or prefix == "T":
            break
        number /= 1000
    return f"{number:.0f} {prefix}" if not prefix or number >= 100 else f"{number:.1f} {prefix}"
