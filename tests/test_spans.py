"""Spans: kept only while somebody records, bounded, and of one process each."""

from __future__ import annotations

import itertools
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.record import spans
from anabranch.record.process import STATUS_VARIABLE, TRACE_VARIABLE
from anabranch.record.spans import Flow, Span
from anabranch.record.trace import (
    ProcessTrace,
    as_lines,
    check_trace_path,
    footer,
    header,
    host,
    offset_between,
    read_part,
    write_trace,
)
from programs import Programs
from traces import Trace, check_valid
from waiting import running


def test_without_a_trace_nothing_is_kept_and_no_clock_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> int:
        raise AssertionError("the clock was read")

    recorder = spans.SpanRecorder()
    monkeypatch.setattr(spans, "monotonic_ns", read)
    with spans.span("forward", "compute", step=1) as nothing:
        assert nothing is None
    assert spans.begin() == 0
    spans.complete(spans.begin(), "pull", "crossing")
    spans.mark("transport.retry")
    assert spans.span("a", "compute") is spans.span("b", "compute", step=2)
    assert recorder.take() == []


def test_a_span_lasts_from_entry_to_exit_also_of_a_block_that_raises() -> None:
    recorder = spans.SpanRecorder()
    with spans.heard(recorder.add):
        before = time.monotonic_ns()
        with pytest.raises(KeyError), spans.span("outer", "compute"), spans.span("inner", "compute", step=3):
            raise KeyError
        after = time.monotonic_ns()
    inner, outer = recorder.take()
    assert (inner[0], inner[6]) == ("inner", {"step": 3})
    assert (outer[0], outer[6]) == ("outer", None)
    assert before <= outer[3] <= inner[3] <= inner[4] <= outer[4] <= after


def test_spans_over_the_limit_are_counted_and_not_kept() -> None:
    recorder = spans.SpanRecorder(limit=3)
    with spans.heard(recorder.add):
        for index in range(10):
            with spans.span(f"s{index}", "compute"):
                pass
            if index == 1:
                assert len(recorder.take()) == 2
    assert [one[0] for one in recorder.take()] == ["s2"]
    assert recorder.dropped == 7


def test_a_lasting_span_is_shown_while_it_is_open_and_recorded_at_its_end() -> None:
    recorder = spans.SpanRecorder()
    with spans.heard(recorder.add), spans.Lasting("load", "load"), spans.Lasting("wait", "wait", lambda: {"peer": "a"}):
        load, wait = spans.open_spans(longer_than=0.0)
        assert (load["name"], wait["name"], wait["peer"]) == ("load", "wait", "a")
        assert load["since"] <= wait["since"] <= time.monotonic()
        assert spans.open_spans() == []  # not for half a second yet
        assert recorder.take() == []
    assert spans.open_spans(longer_than=0.0) == []
    assert [(one[0], one[6]) for one in recorder.take()] == [("wait", {"peer": "a"}), ("load", None)]


def test_of_other_threads_only_waits_are_shown() -> None:
    shown: list[list[dict[str, object]]] = []

    def work() -> None:
        with spans.Lasting("load", "load"), spans.Lasting("wait", "wait"):
            shown.append(spans.open_spans(longer_than=0.0))

    with running(work):
        pass
    assert [[one["name"] for one in found] for found in shown] == [["wait"]]


@pytest.mark.parametrize("last", ["span", "footer"])
def test_recorded_spans_are_read_up_to_a_truncated_line(last: str) -> None:
    recorder = spans.SpanRecorder()
    with spans.heard(recorder.add):
        began = spans.begin()
        spans.complete(began, "pull", "crossing", track="requests", flow=("ask", "7"), facts={"where": Path("x")})
    (one,) = recorder.take()
    end = one if last == "span" else {"threads": {"1": (2, "late")}}
    lines = as_lines([header(recorder, "worker 3"), one, footer(recorder), end])
    part = read_part(lines[:-5])
    assert part is not None
    assert (part.process, part.pid, part.host, part.began) == ("worker 3", os.getpid(), host(), recorder.began)
    assert part.spans == [(*one[:6], {"where": "x"}, ("ask", "7"))]
    assert part.threads == recorder.threads
    assert read_part(b"") is None


_PROCESS = """
import os, sys
from anabranch.record import process, spans

with spans.span("before", "compute"):
    pass
child = os.fork()
if child == 0:
    with spans.span("of the child", "compute"):
        pass
    sys.exit(int(process.process_record() is not None))
assert os.waitpid(child, 0)[1] == 0, "the child records"
with spans.span("after", "compute"):
    pass
"""


def test_a_process_that_a_launcher_has_named_a_folder_writes_at_its_end_and_its_forks_write_nothing(
    tmp_path: Path, programs: Programs
) -> None:
    named = {TRACE_VARIABLE: str(tmp_path), STATUS_VARIABLE: str(tmp_path / "logs" / "parameters-1")}
    assert programs.run(_PROCESS, environment=named).returncode == 0
    (path,) = tmp_path.glob("*.spans")
    assert path.name.startswith("parameters-1.")
    part = read_part(path.read_bytes())
    assert part is not None
    assert part.process == "parameters 1"
    assert [one[0] for one in part.spans] == ["before", "after"]


# The file of a trace: valid events, one clock, arrows with both ends.


def one(
    name: str,
    start: int,
    end: int,
    *,
    category: str = "compute",
    track: str = "",
    flow: Flow | None = None,
    **facts: Any,
) -> Span:
    return name, category, track, start, end, 1, facts or None, flow


def part(process: str, spans: list[Span], *, pid: int = 7, host: str = "a", **more: Any) -> ProcessTrace:
    return ProcessTrace(
        process, pid, host, began=more.pop("began", 0), spans=spans, threads={1: (pid, "MainThread")}, **more
    )


def written(tmp_path: Path, parts: list[ProcessTrace], **more: Any) -> Trace:
    write_trace(tmp_path / "out.json", parts, **more)
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    return check_valid(tmp_path / "out.json")


def test_processes_and_threads_are_named_and_times_are_microseconds_since_the_first_began(tmp_path: Path) -> None:
    trace = written(
        tmp_path,
        [
            part("parameters 0", [one("pull", 12_000, 15_500)], pid=9, began=9_000),
            part("worker 1", [one("forward", 11_000, 12_000, step=3)], pid=8, began=10_000),
            part("worker 0", [], began=5_000),
        ],
    )
    assert trace.processes == ["worker 0", "worker 1", "parameters 0"]
    forward, pull = trace.spans("forward")[0], trace.spans("pull")[0]
    assert (forward["ts"], forward["dur"], forward["args"]) == (6.0, 1.0, {"step": 3})
    assert (pull["ts"], pull["dur"]) == (7.0, 3.5)
    assert trace.place(pull) == ("parameters 0", "MainThread")


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=30))
def test_spans_of_a_track_that_overlap_lie_in_lanes_and_those_that_do_not_share_one(
    tmp_path_factory: pytest.TempPathFactory, times: list[tuple[int, int]]
) -> None:
    crossings = [
        one(f"s{index}", 1000 * start, 1000 * (start + length), track="requests")
        for index, (start, length) in enumerate(times)
    ]
    trace = written(tmp_path_factory.mktemp("trace"), [part("worker 0", crossings)])
    lanes = defaultdict(list)
    for event in trace.spans():
        lanes[trace.place(event)[1]].append((event["ts"], event["ts"] + event["dur"]))
    most = max((sum(s <= start < s + n for s, n in times) for start, _ in times), default=0)
    assert len(lanes) <= max(most, 1) or any(length == 0 for _, length in times)
    for some in lanes.values():
        some.sort()
        # An empty span is drawn as long as a nanosecond.
        assert all(before[1] <= after[0] + 0.001 for before, after in itertools.pairwise(some))


def test_a_thread_that_had_ended_has_its_own_lane(tmp_path: Path) -> None:
    here, gone = one("forward", 0, 1_000), (*one("forward", 0, 1_000)[:5], 140_000_000_000_000, None, None)
    of_profiler = (*one("aten::add", 200, 300, category="operator")[:5], 7, None, None)
    trace = written(tmp_path, [part("worker 0", [here, gone, of_profiler])])
    assert [trace.place(event)[1] for event in trace.spans()] == ["MainThread", "a thread that has ended", "MainThread"]
    assert all(event["tid"] < 1 << 31 for event in trace.spans())


@pytest.mark.parametrize(
    ("flow", "track", "here", "there", "arrows"),
    [
        (("ask", "serve"), "requests", (0, 10_000), (3_000, 7_000), [(0.0, 3.0), (6.999, 9.999)]),
        (("send", "receive"), "", (1_000, 2_000), (0, 5_000), [(1.0, 4.999)]),
    ],
)
def test_requests_answers_and_messages_are_arrows(
    flow: tuple[Any, Any], track: str, here: Any, there: Any, arrows: list[tuple[float, float]], tmp_path: Path
) -> None:
    spans = [one("one", *here, track=track, flow=(flow[0], "41")), one("lost", 20_000, 21_000, flow=(flow[0], "42"))]
    other = one("other", *there, track=track, flow=(flow[1], "41"))
    trace = written(tmp_path, [part("worker 0", spans), part("worker 1", [other], pid=9)])
    assert [(source["ts"], target["ts"]) for source, target in trace.arrows] == arrows
    assert [source["pid"] for source, _ in trace.arrows] == [7, 9][: len(arrows)]


def test_ranks_at_a_collective_have_arrows_from_the_last_to_arrive(tmp_path: Path) -> None:
    starts = {"worker 0": 0, "worker 1": 5_000, "worker 2": 2_000}
    parts = [
        part(name, [one("all_reduce", start, 9_000, track="workers", flow=("meet", "w/1"))], pid=pid)
        for pid, (name, start) in enumerate(starts.items(), 10)
    ]
    trace = written(tmp_path, parts)
    assert [(trace.place(source)[0], trace.place(target)[0]) for source, target in trace.arrows] == [
        ("worker 1", "worker 0"),
        ("worker 1", "worker 2"),
    ]
    assert {source["ts"] for source, _ in trace.arrows} == {5.0}


def test_clocks_of_other_machines_are_set_right_and_their_error_is_stated(tmp_path: Path) -> None:
    there = [(1_000_100, 1_000_400), (1_000_500, 1_000_620)]  # a million ahead
    here = [(100, 390), (510, 640)]
    parts = [
        part("worker 0", [one("forward", 1_000, 2_000)], clock=here),
        part("worker 1", [one("forward", 1_001_500, 1_002_500)], pid=7, host="b", began=1_000_000, clock=there),
        part("worker 2", [one("forward", 1_800, 2_500)], pid=9, clock=[(90, 400), (500, 600)]),
    ]
    trace = written(tmp_path, parts)
    told = {entry["name"]: entry for entry in trace.other["processes"]}
    assert told["worker 0"]["offset_us"] == told["worker 2"]["offset_us"] == 0
    assert told["worker 2"]["offset_error_us"] == 0  # on the same machine
    assert abs(told["worker 1"]["offset_us"] + 1000) <= told["worker 1"]["offset_error_us"] <= 0.2
    assert trace.spans("forward")[1]["ts"] - trace.spans("forward")[0]["ts"] == pytest.approx(0.5, abs=0.2)
    assert len({event["pid"] for event in trace.spans()}) == 3  # two have the same number


@given(
    st.integers(-(10**6), 10**6),
    st.lists(st.tuples(*[st.integers(0, 50)] * 4), min_size=1, max_size=8),
)
def test_the_error_of_an_offset_bounds_it_however_long_either_way_took(
    offset: int, rounds: list[tuple[int, int, int, int]]
) -> None:
    here, there, now = [], [], 0
    for late_here, late_there, way, way_back in rounds:
        ours, theirs = now + late_here, now + late_there
        meet = max(ours, theirs)
        here.append((ours, meet + way))
        there.append((theirs + offset, meet + way_back + offset))
        now = meet + 1000
    found, error = offset_between(here, there)
    assert abs(found + offset) <= error


def test_a_trace_that_cannot_be_written_whole_replaces_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        write_trace(path, [part("worker 0", [one("a", 0, 1, bad=object())])])
    assert path.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_a_path_that_cannot_be_written_is_refused_with_the_reason(tmp_path: Path) -> None:
    for bad in (tmp_path, tmp_path / "absent" / "out.json", f"{tmp_path}/out/"):
        with pytest.raises(ValueError, match="no trace can be written"):
            check_trace_path(bad)
    assert check_trace_path(str(tmp_path / "out.json")) == tmp_path / "out.json"
    if os.geteuid():
        tmp_path.chmod(0o500)
        with pytest.raises(ValueError, match="and is writable"):
            check_trace_path(tmp_path / "out.json")
