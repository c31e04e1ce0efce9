"""What rank 0 of an example shows meanwhile."""

from __future__ import annotations

import re

import pytest


def test_one_bar_of_79_columns_is_right_after_a_resume(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from _report import Screen

    # A terminal; without colours only what is done of the bar is drawn.
    for name, value in {"FORCE_COLOR": "1", "NO_COLOR": "1", "COLUMNS": "80", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    with Screen(420, 210, 8192, shown=True, also=lambda: "4 of 4 experts") as screen:
        screen.say("going on")
        screen.trained(211, 1.8, 0.25)
        screen.evaluated(211, 2.3)
        screen.trained(315, 1.7, 0.25)
    lines = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", capsys.readouterr().out).split("\n")
    frames = [frame for line in lines for frame in line.split("\r") if "━" in frame]
    done = re.match(r"([━╸]+) +210/420 +$", frames[0])
    assert done
    assert len(done[1]) == pytest.approx(frames[0].index("210/420") / 2, abs=1)
    assert {len(frame) for frame in frames} == {79}, "the terminal's last column is free"
    says = "loss 1.800  2.300 bits/byte  4 of 4 experts  52 s left"
    *shown, last, end = [line.split("\r")[-1] for line in lines]
    assert [*shown, end] == ["going on", f"step 211/420  {says}", ""]
    assert re.match(r"━+╸? *315/420 loss 1.700  2.300 bits/byte  4 of 4 experts  26 s left $", last)
