"""What a page shows of a trace: lanes, who exchanged what with whom, waits, schedules; wrong files are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from anabranch.cli.view import draw_step
from anabranch.record.trace import ProcessTrace, write_trace
from anabranch.view.trace_page import read_trace


def span(name: str, category: str, start: int, end: int, *, track: str = "", flow: Any = None, **facts: object) -> Any:
    """Times in microseconds."""
    return name, category, track, 1000 * start, 1000 * end, 1, facts or None, flow


def trace_of(tmp_path: Path, **notes: object) -> dict[str, Any]:
    worker = ProcessTrace("worker 0", 10, "host", 0, threads={1: (11, "MainThread")})
    worker.spans = [
        span("wait", "wait", 12, 18, peer="parameters 0", operation="pull"),
        span(
            "pull",
            "crossing",
            10,
            20,
            track="requests",
            flow=("ask", "a"),
            peer="parameters 0",
            sent_bytes=40,
            received_bytes=60,
        ),
        span("all_reduce", "crossing", 30, 40, track="workers", peer="ranks 1, 2", bytes=100),
        span("train", "step", 0, 100, step=7),
        span("wait", "wait", 120, 121, peer="rank 1", operation="pipeline step RB0.3<1"),
    ]
    server = ProcessTrace("parameters 0", 20, "host", 0, threads={1: (21, "serving")}, dropped=5)
    server.spans = [span("pull", "serve", 11, 19, track="served", flow=("serve", "a"))]
    write_trace(tmp_path / "out.json", [worker, server], notes=notes)
    return read_trace(tmp_path / "out.json", draw_step)


def test_every_span_is_in_its_lane_with_its_facts(tmp_path: Path) -> None:
    found = trace_of(tmp_path)
    spans = {
        (lane["process"], lane["name"], found["texts"][lane["spans"][i]]): lane["spans"][i + 2 : i + 5]
        for lane in found["lanes"]
        for i in range(0, len(lane["spans"]), 5)
    }
    assert [lane["process"] for lane in found["lanes"]] == ["worker 0"] * 3 + ["parameters 0"]
    start, duration, facts = spans["worker 0", "requests", "pull"]
    assert (start, duration) == (10, 10)
    assert found["facts"][facts] == {"peer": "parameters 0", "sent_bytes": 40, "received_bytes": 60}
    assert spans["worker 0", "MainThread", "train"][:2] == [0, 100]


def test_arrows_lead_from_lane_to_lane(tmp_path: Path) -> None:
    found = trace_of(tmp_path)
    names = [(found["lanes"][a]["name"], found["lanes"][b]["name"]) for a, _, b, _ in found["arrows"]]
    assert names == [("requests", "served"), ("served", "requests")]


def test_bytes_are_counted_between_the_peers_that_exchanged_them(tmp_path: Path) -> None:
    found = {(one["from"], one["to"], one["name"]): one["bytes"] for one in trace_of(tmp_path)["crossings"]}
    assert found == {
        ("worker 0", "parameters 0", "pull"): 100,
        ("worker 0", "worker 1", "all_reduce"): 50,
        ("worker 0", "worker 2", "all_reduce"): 50,
    }


def test_the_longest_wait_is_listed_first_with_its_step_and_in_words(tmp_path: Path) -> None:
    first, second = trace_of(tmp_path)["waits"]
    assert (first["peer"], first["operation"], first["step"], first["us"]) == ("parameters 0", "pull", 7, 6)
    assert (second["peer"], second["step"]) == ("worker 1", None)  # outside of every step
    assert second["operation"] == "pipeline step: gradients of microbatch 3"


def test_missing_parts_are_reported(tmp_path: Path) -> None:
    notes = trace_of(tmp_path, complete=False)["notes"]
    assert "parameters 0 dropped 5 spans for lack of space" in notes
    assert "the run ended before all of its steps were recorded" in notes


def stage(number: int, actions: list[tuple[str, int, int, int]], name: str) -> ProcessTrace:
    part = ProcessTrace(name, 10 + number, "host", 0, threads={1: (30 + number, "MainThread")})
    part.spans = [
        span(phase, "compute", start, end, stage=number, microbatch=microbatch)
        for phase, microbatch, start, end in actions
    ]
    part.spans.append(span("train", "step", 0, 100, step=3))
    return part


def test_a_schedule_is_shown_as_it_ran_and_as_it_was_planned(tmp_path: Path) -> None:
    first = stage(
        0, [("forward", 0, 1, 3), ("forward", 1, 3, 5), ("backward", 0, 20, 24), ("backward", 1, 30, 34)], "worker 0"
    )
    second = stage(
        1, [("forward", 0, 4, 6), ("backward", 0, 8, 12), ("forward", 1, 13, 15), ("backward", 1, 15, 19)], "worker 1"
    )
    first.spans.append(span("send activations", "crossing", 3, 4, peer="stage 1", bytes=64))
    write_trace(tmp_path / "out.json", [first, second])
    found = read_trace(tmp_path / "out.json", draw_step)
    (schedule,) = found["schedules"]
    assert schedule["step"] == 3
    ran, planned = (
        [element.text for element in ElementTree.fromstring(schedule[kind]).iter("{http://www.w3.org/2000/svg}title")]
        for kind in ("ran", "planned")
    )
    assert "backward of microbatch 0 on stage 1: 0.004 ms from 0.007 ms" in ran
    # One forward, one backward: the second stage has its microbatch after 1, and returns it after 2 more.
    assert planned == [
        "forward of microbatch 0 on stage 0: 1 from 0",
        "forward of microbatch 1 on stage 0: 1 from 1",
        "backward of microbatch 0 on stage 0: 2 from 4",
        "backward of microbatch 1 on stage 0: 2 from 7",
        "forward of microbatch 0 on stage 1: 1 from 1",
        "backward of microbatch 0 on stage 1: 2 from 2",
        "forward of microbatch 1 on stage 1: 1 from 4",
        "backward of microbatch 1 on stage 1: 2 from 5",
    ]
    assert 'aria-label="as planned: 9, 33 % bubble"' in schedule["planned"]
    assert 'aria-label="as it ran: 0.033 ms, 64 % bubble"' in schedule["ran"]
    assert [(one["from"], one["to"]) for one in found["crossings"]] == [("worker 0", "worker 1")]


def test_more_spans_than_a_page_holds_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.view.trace_page._MOST_SPANS", 2)
    found = trace_of(tmp_path)
    assert sum(len(lane["spans"]) for lane in found["lanes"]) == 2 * 5
    assert "the first 2 spans are shown; 4 later ones are in the file" in found["notes"]


@pytest.mark.parametrize(
    "text",
    ["", "[" * 100_000, "{}", "[3]", '{"traceEvents": []}', '{"traceEvents": [{"ph": "X"}], "otherData": {}}'],
)
def test_a_file_that_is_not_a_trace_is_refused_by_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.json").write_text(text)
    with pytest.raises(ValueError, match=r"wrong\.json is not a trace of Anabranch: "):
        read_trace(tmp_path / "wrong.json", draw_step)
