"""The file of a trace: valid events, one clock, arrows with both ends."""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.record.spans import Flow, Span
from anabranch.record.trace import ProcessTrace, check_trace_path, offset_between, write_trace
from traces import Trace, check_valid


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


def test_waits_have_a_colour_of_their_own_and_peers_their_names(tmp_path: Path) -> None:
    wait = one("wait", 0, 1_000, category="wait", peer="unix:/s")
    trace = written(
        tmp_path, [part("worker 0", [wait, one("forward", 2_000, 3_000)])], names={"unix:/s": "parameters 0"}
    )
    assert "cname" in trace.spans("wait")[0]
    assert "cname" not in trace.spans("forward")[0]
    assert trace.spans("wait")[0]["args"] == {"peer": "parameters 0", "endpoint": "unix:/s"}


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


def test_a_request_and_its_answer_are_arrows(tmp_path: Path) -> None:
    asks = one("pull", 0, 10_000, category="crossing", track="requests", flow=("ask", "41"))
    serves = one("pull", 3_000, 7_000, category="serve", track="served", flow=("serve", "41"))
    lost = one("pull", 20_000, 21_000, category="crossing", track="requests", flow=("ask", "42"))
    trace = written(tmp_path, [part("worker 0", [asks, lost]), part("parameters 0", [serves], pid=9)])
    assert [(source["ts"], target["ts"]) for source, target in trace.arrows] == [(0.0, 3.0), (6.999, 9.999)]
    assert [(source["pid"], target["pid"]) for source, target in trace.arrows] == [(7, 9), (9, 7)]


def test_a_request_sent_twice_has_one_arrow_back_from_the_last_server(tmp_path: Path) -> None:
    asks = one("pull", 0, 10_000, track="requests", flow=("ask", "41"))
    serves = [one("pull", start, start + 1_000, track="served", flow=("serve", "41")) for start in (2_000, 6_000)]
    trace = written(tmp_path, [part("worker 0", [asks]), part("parameters 0", serves, pid=9)])
    assert [(source["ts"], target["ts"]) for source, target in trace.arrows] == [(0.0, 6.0), (6.999, 9.999)]


def test_a_message_has_an_arrow_from_sender_to_receiver(tmp_path: Path) -> None:
    sends, receives = one("send", 1_000, 2_000, flow=("send", "a")), one("receive", 0, 5_000, flow=("receive", "a"))
    trace = written(tmp_path, [part("worker 0", [sends]), part("worker 1", [receives], pid=9)])
    assert [(source["ts"], target["ts"]) for source, target in trace.arrows] == [(1.0, 4.999)]


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


def test_a_rank_that_left_a_broadcast_before_the_last_arrived_has_no_arrow(tmp_path: Path) -> None:
    starts = {"worker 0": (0, 1_000), "worker 1": (5_000, 9_000), "worker 2": (2_000, 9_000)}
    parts = [
        part(name, [one("broadcast", start, end, track="workers", flow=("meet", "w/1"))], pid=pid)
        for pid, (name, (start, end)) in enumerate(starts.items(), 10)
    ]
    trace = written(tmp_path, parts)
    assert [(trace.place(source)[0], trace.place(target)[0]) for source, target in trace.arrows] == [
        ("worker 1", "worker 2")
    ]


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
