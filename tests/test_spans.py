"""Spans: kept only while somebody records, bounded, and of one process each."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from anabranch.record import spans
from anabranch.record.process import STATUS_VARIABLE, TRACE_VARIABLE
from anabranch.record.trace import as_lines, footer, header, host, read_part
from programs import start
from waiting import join


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


def test_a_span_that_began_before_the_recording_is_left_out() -> None:
    began, recorder, lasting = spans.begin(), spans.SpanRecorder(), spans.Lasting("load", "load")
    with lasting, spans.heard(recorder.add):
        spans.complete(began, "pull", "crossing")
        lasting.__exit__(None, None, None)
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


def test_what_happens_is_a_span_of_its_thread_without_length() -> None:
    recorder = spans.SpanRecorder()
    with spans.heard(recorder.add):
        spans.mark("transport.retry", peer="unix:/s")
    ((name, category, track, start, end, thread, facts, flow),) = recorder.take()
    assert (name, category, track, thread, flow) == ("transport.retry", "event", "", threading.get_ident(), None)
    assert facts == {"peer": "unix:/s"}
    assert 0 < start <= end


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

    thread = threading.Thread(target=work)
    thread.start()
    join(thread)
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
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(_PROCESS)
    named = {TRACE_VARIABLE: str(tmp_path), STATUS_VARIABLE: str(tmp_path / "logs" / "parameters-1")}
    with start(script, environment=named) as process:
        assert process.wait() == 0
    (path,) = tmp_path.glob("*.spans")
    assert path.name.startswith("parameters-1.")
    part = read_part(path.read_bytes())
    assert part is not None
    assert part.process == "parameters 1"
    assert [one[0] for one in part.spans] == ["before", "after"]
