"""Pages in a browser with key presses, touches and a narrow window; skipped without a browser."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from anabranch.cli.view import draw_step
from anabranch.record.trace import ProcessTrace, write_trace
from anabranch.view.page import page_of
from anabranch.view.trace_page import read_trace
from browser import needs_a_browser, seen

pytestmark = [pytest.mark.slow, needs_a_browser]

DESK, PHONE = "1280,900", "500,900"  # Chromium's windows are never narrower; the page takes this for a phone

PRESS = """
const out = {};
const press = (target, key) =>
  target.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
const finger = (target, kind, id, x, y) => target.dispatchEvent(
  new PointerEvent("pointer" + kind, {pointerId: id, clientX: x, clientY: y, pointerType: "touch", bubbles: true}));
Element.prototype.setPointerCapture = () => {};
"""


def asked(page: str, script: str, folder: Path, *, size: str = DESK) -> dict[str, Any]:
    """What ``script`` has put into ``out`` once it has run behind the page's own."""
    script = f"<script>{PRESS}{script}\ndocument.body.dataset.out = encodeURIComponent(JSON.stringify(out));</script>"
    (folder / "page.html").write_text(page.replace("</body>", script + "</body>"), encoding="utf-8")
    found = re.search(r'data-out="([^"]*)"', seen(folder / "page.html", folder, size=size))
    assert found
    return json.loads(unquote(found[1]))  # type: ignore[no-any-return]


def node(name: str, phase: str, scope: str, inputs: list[int], label: str = "mm") -> dict[str, Any]:
    facts = {"shape": "2x2", "dtype": "float32", "bytes": 16, "boundary": ""}
    return {"name": name, "label": label, "scope": scope, "phase": phase, "inputs": inputs, **facts}


def graph(layers: int = 12) -> str:
    nodes = [
        node("batch", "input", "inputs", []),
        *(node(f"layers.{layer}.weight", "input", "parameters", []) for layer in range(layers)),
        node("optimizer.layers.0.weight.step", "input", "optimizer state", []),
    ]
    last = 0
    for phase in ("forward", "backward", "update"):
        for layer in range(layers):
            for part in ("attention", "linear"):
                nodes.append(node(f"{phase}_{layer}_{part}", phase, f"layers.{layer}.{part}", [last]))
                last = len(nodes) - 1
    nodes.append(node("output loss", "output", "outputs", [last], "loss"))
    data = {
        "nodes": nodes,
        "facts": {"operations": len(nodes), "peak": 2048},
        "alive": [16, 2048, 16],
        "makers": ["", nodes[-3]["name"], ""],
        "peak": nodes[-3]["name"],
    }
    return page_of("graph", "graph", data)


def test_the_first_look_at_a_graph_has_the_layers_and_one_box_for_the_optimizer(tmp_path: Path) -> None:
    found = asked(
        graph(),
        """
        const of = (phase, test = () => true) => visible.filter(item => item.phase === phase && test(item));
        out.layers = of("forward").map(item => item.title);
        out.optimizer = of("update").map(item => [item.title, item.count]);
        out.state = of("input").map(item => [item.title, item.count]);
        out.under = of("output")[0].y > of("update")[0].y && of("output")[0].x === of("update")[0].x;
        out.readable = scale * 12; // pixels of a letter
        const right = item => (item.x + item.w) * scale + dx;
        out.inside = visible.every(item => item.x * scale + dx >= 0 && right(item) <= canvas.clientWidth);
        out.facts = $("facts").textContent;
        """,
        tmp_path,
    )
    assert found["layers"][:2] == ["layers", "0"]
    assert found["optimizer"] == [["optimizer", 24]]
    assert found["state"] == [["inputs", 1], ["optimizer state", 1], ["parameters", 12]]
    assert found["under"]
    assert found["inside"]
    assert found["readable"] >= 9
    assert found["facts"].endswith(" operations, at most 2.0 KiB")


def test_a_graph_is_moved_opened_and_followed_by_keys(tmp_path: Path) -> None:
    found = asked(
        graph(),
        """
        canvas.focus();
        out.focus = document.activeElement.id;
        const before = {dx, dy, scale, visible: visible.length};
        press(canvas, "ArrowLeft"); press(canvas, "ArrowDown"); out.moved = [dx - before.dx, dy - before.dy];
        press(canvas, "+"); out.larger = scale > before.scale;
        while (!picked || picked.title !== "optimizer") press(canvas, "j");
        press(canvas, "Enter"); out.opened = visible.length > before.visible;
        press(canvas, "Enter"); out.folded = visible.length === before.visible;
        out.links = detail.querySelectorAll("a").length;
        const link = detail.querySelector("a"), to = link.textContent;
        press(link, "Enter"); out.followed = [to, nodes[picked.leaf].name];
        press(canvas, "Escape"); out.closed = picked === null && getComputedStyle(detail).display === "none";
        press(document.body, "/"); out.search = document.activeElement.id;
        search.value = "update_3_linear"; press(search, "Enter"); out.found = $("found").textContent;
        press(search, "Escape"); out.back = document.activeElement.id;
        """,
        tmp_path,
    )
    assert found["focus"] == found["back"] == "canvas"
    assert found["moved"] == [60, -60]
    assert found["larger"] and found["opened"] and found["folded"] and found["closed"]  # noqa: PT018
    assert found["links"] >= 1
    assert found["followed"] == ["backward_11_linear"] * 2
    assert (found["search"], found["found"]) == ("search", "1 found")


def test_a_graph_is_moved_pinched_and_opened_by_fingers(tmp_path: Path) -> None:
    found = asked(
        graph(),
        """
        const before = {dx, dy, scale, visible: visible.length};
        finger(canvas, "down", 1, 100, 300); finger(canvas, "move", 1, 140, 330); finger(canvas, "up", 1, 140, 330);
        out.moved = [dx - before.dx, dy - before.dy];
        finger(canvas, "down", 1, 100, 300); finger(canvas, "down", 2, 200, 300);
        finger(canvas, "move", 2, 300, 300); finger(canvas, "up", 1, 100, 300); finger(canvas, "up", 2, 300, 300);
        out.pinched = scale / before.scale;
        out.readable = before.scale * 12;
        const box = canvas.getBoundingClientRect(), item = visible.find(item => item.title === "optimizer");
        centre(item);
        const place = [box.left + item.x * scale + dx + 9, box.top + item.y * scale + dy + 9];
        finger(canvas, "down", 1, ...place); finger(canvas, "up", 1, ...place);
        out.opened = item.open;
        out.wide = document.documentElement.scrollWidth <= innerWidth;
        """,
        tmp_path,
        size=PHONE,
    )
    assert found["moved"] == [40, 30]
    assert found["pinched"] == pytest.approx(2)
    assert found["readable"] >= 12
    assert found["opened"]
    assert found["wide"]


def trace(tmp_path: Path) -> str:
    names = [*(f"worker {rank}" for rank in range(2)), "parameters 0", "parameters 1", "expert 0", "expert 1"]
    parts = []
    for pid, name in enumerate(names, 1):
        part = ProcessTrace(name, pid, "host", 0, threads={1: (pid, "MainThread")})
        if name.startswith("worker"):
            peers = [other for other in names if other != name]
            part.spans = [
                (
                    "pull",
                    "crossing",
                    "requests",
                    1000 * turn,
                    100_000_000 + turn,
                    1,
                    {"peer": peer, "bytes": 1e6 + turn},
                    None,
                )
                for turn, peer in enumerate(peers * 5)
            ]
        part.spans += [
            ("forward", "compute", "", 5000, 9000, 1, {"stage": pid, "microbatch": 0}, None),
            ("wait", "wait", "", 30_000_000, 90_000_000, 1, {"peer": "rank 1", "operation": "pull"}, None),
            ("train", "step", "", 0, 99_000_000, 1, {"step": 1}, None),
        ]
        parts.append(part)
    write_trace(tmp_path / "out.json", parts)
    return page_of("run", "out.json", {"job": None, "trace": read_trace(tmp_path / "out.json", draw_step)})


LABELS = """
const placesOf = what => [...document.querySelectorAll(what)].map(one => {
  const {left, top, right, bottom} = one.getBoundingClientRect();
  return [left, top, right, bottom];
});
out.labels = placesOf("svg text[paint-order]");
out.boxes = placesOf("svg rect[rx='7']");
out.wide = document.documentElement.scrollWidth <= innerWidth;
"""


def overlap(one: list[float], other: list[float]) -> bool:
    return one[0] < other[2] and one[2] > other[0] and one[1] < other[3] and one[3] > other[1]


@pytest.mark.parametrize("size", [DESK, PHONE])
def test_no_label_of_the_map_overlaps_another_or_a_box(size: str, tmp_path: Path) -> None:
    found = asked(trace(tmp_path), LABELS, tmp_path, size=size)
    assert len(found["labels"]) >= 4
    assert not any(overlap(*pair) for pair in itertools.combinations(found["labels"], 2))
    assert not any(overlap(label, box) for label in found["labels"] for box in found["boxes"])
    assert found["wide"]


def test_rows_that_overlap_are_one_of_few_lines_and_a_wait_is_shown_by_enter(tmp_path: Path) -> None:
    found = asked(
        trace(tmp_path),
        """
        const canvas = document.querySelector("canvas");
        out.rows = Number(canvas.dataset.rows);
        out.first = tickText(0, 1e7) + "," + tickText(-1e7, 1e7) + "," + tickText(2500, 500);
        const row = document.querySelector("tr[tabindex]");
        press(row, "Enter");
        out.focus = document.activeElement.tagName;
        """,
        tmp_path,
    )
    assert found["rows"] == 6 + 2  # the threads, and the requests of each worker
    assert found["first"] == "0 s,-10 s,2500 µs"
    assert found["focus"] == "CANVAS"


def test_on_a_phone_a_finger_scrolls_past_the_timeline_and_the_schedule_is_as_wide_as_the_screen(
    tmp_path: Path,
) -> None:
    found = asked(
        trace(tmp_path),
        """
        out.touch = getComputedStyle(document.querySelector("canvas")).touchAction;
        out.schedule = [...document.querySelectorAll("svg[aria-label^='as ']")].map(svg => {
          const letter = svg.querySelector("text").getBoundingClientRect().height;
          return [svg.getBoundingClientRect().width / svg.parentNode.clientWidth, letter > 12];
        });
        out.wide = document.documentElement.scrollWidth <= innerWidth;
        out.hover = document.querySelector("svg[aria-label^='as planned'] title").textContent;
        """,
        tmp_path,
        size=PHONE,
    )
    assert found["touch"] == "pan-y"
    assert found["schedule"] == [[1, True], [1, True]]  # letters are as large as they were drawn
    assert found["wide"]
    assert found["hover"] == "forward of microbatch 0 on stage 1: 1 from 0"


def test_a_trace_without_spans_is_shown_as_such(tmp_path: Path) -> None:
    write_trace(tmp_path / "out.json", [])
    page = page_of("run", "out.json", {"job": None, "trace": read_trace(tmp_path / "out.json", draw_step)})
    assert "no spans" in asked(page, "out.text = document.body.innerText;", tmp_path)["text"]
