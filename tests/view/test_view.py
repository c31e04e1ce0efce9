"""``anabranch view``: pages of jobs, traces and graphs that load nothing and take no text for HTML; loopback alone."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from anabranch.cli.app import _app
from anabranch.graph import capture
from anabranch.record.trace import ProcessTrace, write_trace
from anabranch.view.page import page_of
from anabranch.view.serving import PageServer
from browser import needs_a_browser, seen
from waiting import join

EVIL = "</script><script>document.body.innerHTML='taken'</script><!--<img src=x onerror=alert(1)>"


def trace(path: Path) -> Path:
    part = ProcessTrace(EVIL, 10, "host", 0, threads={1: (11, EVIL)})
    facts: dict[str, object] = {"peer": EVIL, "bytes": 100}
    part.spans = [
        (EVIL, "crossing", "", 1000, 2000, 1, facts, None),
        ("wait", "wait", "", 1100, 1900, 1, {"peer": EVIL, "operation": EVIL}, None),
        ("train", "step", "", 0, 9000, 1, {"step": 1}, None),
    ]
    write_trace(path, [part])
    return path


def job(folder: Path, **more: object) -> Path:
    roles = [
        {"role": "worker", "rank": 0, "pid": 4, "endpoint": None, "started": 1},
        {"role": "parameters", "rank": 0, "pid": 5, "endpoint": "unix:/x", "started": 2},
        {"role": "expert", "rank": 0, "pid": 6, "endpoint": None, "started": 3},
    ]
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps({"roles": roles, "started": 1.0, "ended": 61.0, **more}))
    run = {"bytes": {"table users": 4096}, "tables": {}, "loss": 0.25, "curve": [1.0, 0.5, 0.25], "pace": [10.0, 12.0]}
    run |= {"rank": 0, "steps": 3}
    (folder / "worker-0.status").write_text(json.dumps({"pid": 4, "run": run}))
    (folder / "expert-0.status").write_text(json.dumps({"pid": 6, "experts": {"bytes": 512}}))
    return folder


def made(*arguments: object) -> str:
    result = CliRunner().invoke(_app, ["view", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return Path(arguments[-1]).read_text()  # type: ignore[arg-type]


def data_of(page: str) -> dict[str, object]:
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index, no-any-return]


def pages(tmp_path: Path) -> dict[str, str]:
    capture(lambda x: x.sin() + 1, torch.zeros(2)).save(tmp_path / "graph.safetensors")
    asked = {
        "trace": trace(tmp_path / "out.json"),
        "job": job(tmp_path / "logs"),
        "graph": tmp_path / "graph.safetensors",
    }
    return {kind: made(path, "--out", tmp_path / f"{kind}.html") for kind, path in asked.items()}


def test_a_trace_a_job_and_a_graph_become_a_page_that_loads_nothing(tmp_path: Path) -> None:
    found = pages(tmp_path)
    for page in found.values():
        shell = page.replace(EVIL, "")
        code = re.sub(r'<script id="data".*?</script>', "", shell, flags=re.DOTALL).replace(
            "http://www.w3.org/2000/svg", ""
        )
        assert not re.search(
            r"https?:|src=|href=|url\(|@import|fetch\(|import\(|XMLHttp|WebSocket|innerHTML|eval\(", code
        )
        assert "default-src 'none'" in page
    assert data_of(found["trace"])["trace"] is not None
    assert data_of(found["job"])["job"]["loss"] == [1.0, 0.5, 0.25]  # type: ignore[index]
    assert len(data_of(found["graph"])["nodes"]) == 4  # type: ignore[arg-type]


def test_a_job_shows_its_pace_its_bytes_and_the_trace_it_wrote(tmp_path: Path) -> None:
    path = trace(tmp_path / "out.json")
    data = data_of(made(job(tmp_path / "logs", trace=str(path)), "--out", tmp_path / "page.html"))
    found = data["job"]
    assert found["pace"] == [10.0, 12.0]  # type: ignore[index]
    assert found["crossings"] == [  # type: ignore[index]
        {"from": "worker 0", "to": "parameters 0", "name": "table users", "bytes": 4096},
        {"from": "worker 0", "to": "expert 0", "name": "experts", "bytes": 512},
    ]
    assert len(data["trace"]["lanes"]) == 1  # type: ignore[index]


def test_a_trace_that_is_too_large_leaves_the_page_of_its_job(tmp_path: Path) -> None:
    """It was called "not a trace of Anabranch", and there was no page."""
    path = tmp_path / "out.json"
    with path.open("wb") as file:
        file.truncate((64 << 20) + 1)
    result = CliRunner().invoke(
        _app, ["view", str(job(tmp_path / "logs", trace=str(path))), "--out", str(tmp_path / "p")]
    )
    assert result.exit_code == 0
    assert result.stderr.startswith(f"anabranch: the page shows no trace: {path} has 67108865 bytes, more than ")
    data = data_of((tmp_path / "p").read_text())
    assert data["trace"] is None
    assert data["job"]["pace"] == [10.0, 12.0]  # type: ignore[index]


def test_a_loss_that_is_not_finite_is_a_gap(tmp_path: Path) -> None:
    folder = job(tmp_path / "logs")
    status = json.loads((folder / "worker-0.status").read_text())
    status["run"]["curve"] = [1.0, float("nan"), float("inf"), 0.5]
    (folder / "worker-0.status").write_text(json.dumps(status))
    data = data_of(made(folder, "--out", tmp_path / "page.html"))
    assert data["job"]["loss"] == [1.0, None, None, 0.5]  # type: ignore[index]


def test_texts_of_the_data_stay_texts(tmp_path: Path) -> None:
    page = page_of("run", EVIL, {"name": EVIL, "line": "\u2028"})
    assert page.count("</script>") == 2
    assert page.count("<!--") == 0
    assert data_of(page) == {"name": EVIL, "line": "\u2028"}
    assert re.search("<title>(.*?)</title>", page)[1].startswith("&lt;/script&gt;")  # type: ignore[index]


def test_it_looks_at_a_trace_without_importing_torch(tmp_path: Path) -> None:
    path = trace(tmp_path / "out.json")
    code = f"import sys; sys.argv = ['anabranch', 'view', {str(path)!r}, '--out', {str(tmp_path / 'p.html')!r}]\n"
    code += "from anabranch.cli import main\ntry:\n    main()\nfinally:\n    assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


def answer(server: PageServer, path: str = "/", **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", int(server.url.rsplit(":", 1)[1].strip("/")), timeout=50)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    response.body = response.read()  # type: ignore[attr-defined]
    connection.close()
    return response


def test_a_page_is_served_on_loopback_under_this_machines_name_alone() -> None:
    with PageServer("<p>hello") as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert server.url.startswith("http://127.0.0.1:")
            assert answer(server).body == b"<p>hello"  # type: ignore[attr-defined]
            assert "default-src 'none'" in str(answer(server).headers["Content-Security-Policy"])
            assert answer(server, "/etc/passwd").status == 404
            assert answer(server, Host="elsewhere.example:80").status == 403
        finally:
            server.shutdown()
            join(thread)


@pytest.mark.slow
@needs_a_browser
def test_a_browser_draws_all_of_a_run_and_takes_no_name_for_html(tmp_path: Path) -> None:
    path = trace(tmp_path / "out.json")
    made(job(tmp_path / "logs", trace=str(path)), "--out", tmp_path / "page.html")
    drawn = seen(tmp_path / "page.html", tmp_path, size="390,844")
    for title in ("Who exchanged what with whom", "Loss and pace", "Processes", "Timeline", "The longest waits"):
        assert f"<h2>{title}</h2>" in drawn
    assert 'data-drawn="3"' in drawn  # the spans on the canvas
    body = drawn[drawn.index("<body") :]
    assert "taken" not in re.sub(r"<script.*?</script>", "", body, flags=re.DOTALL).replace("innerHTML='taken'", "")
    assert "<img" not in re.sub(r'<script id="data".*?</script>', "", body, flags=re.DOTALL).replace("&lt;img", "")
