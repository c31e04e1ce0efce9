"""The language model example: the same curve on any number of workers, exact resuming, honest measuring."""

from __future__ import annotations

import json
import shlex
import signal
from functools import partial
from pathlib import Path

import example_jobs
import pytest
import torch
from example_jobs import EXAMPLES, run_example

from anabranch.checkpoint import read_newest
from anabranch.testing import LocalJob
from launched import run, start_run

SCRIPT = EXAMPLES / "language_model.py"
TIMINGS = {"seconds", "steps_per_second", "resumed_from", "missed_seconds", "out"}
SMALL = ("--steps", "4", "--batch", "4", "--memory-rows", "512")
WIDTH = 32
run_here, refused = (partial(one, "language_model") for one in (example_jobs.run_here, example_jobs.refused))


@pytest.fixture(autouse=True)
def _narrow(_importable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the width: the promises are the same, and each run is a fraction of a second."""
    import language_model

    monkeypatch.setattr(language_model, "WIDTH", WIDTH)


def curve(out: Path) -> dict[str, list[object]]:
    return json.loads((out / "curve.json").read_text())


def without_timings(result: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in result.items() if key not in TIMINGS}


# One process.


def test_a_run_ends_with_one_line_of_json_a_checkpoint_and_a_picture(small_text, tmp_path, capsys, drawn):
    out = tmp_path / "out"
    result = run_here(capsys, *SMALL, "--text", small_text, "--out", out, "--seed", 3)
    facts = {"steps": 4, "seed": 3, "workers": 1, "comm_mode": "None", "held_out_bytes": 600}
    assert result == {**result, **facts}
    assert 0 < result["lzma_bits_per_byte"] < 8
    assert 0 < result["bits_per_byte"] < 12
    assert len(curve(out)["losses"]) == 4
    assert curve(out)["losses"][-1] == result["loss"]
    assert (out / "loss.png").stat().st_size > 1000
    assert (out / "checkpoint").is_dir()


def test_held_out_files_are_never_trained_on(small_text, tmp_path, capsys, monkeypatch):
    import _text

    text = _text.text_of([small_text])
    held_out = set(text.held_out)
    assert len(held_out) == 2, "one whole file of 24"
    trained: set[int] = set()
    real = _text.Windows.__getitem__

    def spying(windows, index):
        window = real(windows, index)
        trained.update(window.tolist())
        return window

    monkeypatch.setattr(_text.Windows, "__getitem__", spying)
    large = ["--steps", 10, "--batch", 12, "--memory-rows", 64]
    run_here(capsys, *SMALL, *large, "--text", small_text, "--out", tmp_path / "out")
    assert trained == set(range(48)) - held_out


# Going on.


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_lets_the_step_end_and_saves_it(number, code, small_text, tmp_path, capsys, monkeypatch):
    import language_model

    arguments = [*SMALL, "--text", str(small_text), "--out", str(tmp_path / "out")]
    before = signal.getsignal(number)

    def told_after_step_2(screen, step, *others):
        if step == 2:
            signal.raise_signal(number)

    with monkeypatch.context() as patch:
        patch.setattr(language_model.Screen, "trained", told_after_step_2)
        assert language_model.main(arguments) == code
    assert "saved after step 3, the same command goes on" in capsys.readouterr().err
    assert signal.getsignal(number) is before
    assert run_here(capsys, *arguments)["resumed_from"] == 3


def test_a_second_ctrl_c_ends_at_once_and_leaves_the_last_checkpoint(small_text, tmp_path, capsys, monkeypatch):
    import language_model

    arguments = [*SMALL, "--save-every", "2", "--text", str(small_text), "--out", str(tmp_path / "out")]

    def pressed_twice_in_step_3(screen, step, *others):
        if step == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(language_model.Screen, "trained", pressed_twice_in_step_3)
        assert language_model.main(arguments) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert run_here(capsys, *arguments)["resumed_from"] == 2


def test_a_finished_run_is_measured_again_and_fresh_starts_anew(small_text, tmp_path, capsys):
    arguments = [*SMALL, "--text", small_text, "--out", tmp_path / "out"]
    first = run_here(capsys, *arguments)
    again = run_here(capsys, *arguments, said="training has ended before; --fresh starts anew")
    anew = run_here(capsys, *arguments, "--fresh")
    assert again["resumed_from"] == 4
    assert anew["resumed_from"] == 0
    assert without_timings(first) == without_timings(again) == without_timings(anew)


def test_a_checkpoint_of_other_settings_is_refused_with_the_cure(small_text, tmp_path, capsys):
    arguments = [*SMALL, "--text", small_text, "--out", tmp_path / "out"]
    run_here(capsys, *arguments)
    message = refused(capsys, *arguments, "--seed", 9)
    assert "seed was 0, now 9" in message
    assert "--fresh" in message


# Several workers.


def test_two_workers_draw_the_curve_of_one(small_text, tmp_path, capsys):
    arguments = [*SMALL, "--text", str(small_text), "--evaluate-every", "2"]
    job = run_example(LocalJob(workers=2), SCRIPT, *arguments, "--out", tmp_path / "two", WIDTH=WIDTH)
    two = job.check().results[0]
    one = run_here(capsys, *arguments, "--out", tmp_path / "one")
    assert two is not None
    assert two["comm_mode"] == "AllReduce"
    assert two["workers"] == 2
    assert job.results[1] is None, "only rank 0 reports"
    assert curve(tmp_path / "two")["losses"] == pytest.approx(curve(tmp_path / "one")["losses"], rel=1e-5)
    held_out = [pytest.approx(point, rel=1e-5) for point in curve(tmp_path / "one")["held_out"]]
    assert curve(tmp_path / "two")["held_out"] == held_out
    assert two["bits_per_byte"] == pytest.approx(one["bits_per_byte"], rel=1e-5)


@pytest.mark.slow
def test_with_experts_and_servers_all_of_it_is_found_again(small_text, tmp_path):
    arguments = [*SMALL, "--text", str(small_text), "--out", str(tmp_path / "out")]
    job = LocalJob(servers=1, experts=1)
    first, again = (run_example(job, SCRIPT, *arguments, WIDTH=WIDTH).check() for _ in range(2))
    assert first.results[0] is not None
    assert again.results[0] is not None
    assert (first.results[0]["servers"], first.results[0]["experts"]) == (1, 1)
    assert "2 of 2 experts" in first.logs[0]
    assert again.results[0]["resumed_from"] == 4
    assert without_timings(again.results[0]) == without_timings(first.results[0])
    saved = [read_newest(tmp_path / "out" / "experts" / f"feed_forward.{index}") for index in range(2)]
    assert [one and one.step for one in saved] == [4, 4], "both experts answer every row: one update a step"


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [False, True])
def test_it_kills_an_expert_process_and_a_worker_and_says_how_long_each_was_missed(small_text, tmp_path, restarts):
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(
        f"""
import sys, time
sys.path.insert(0, {str(EXAMPLES)!r})
import language_model

real = language_model.Kills.after


def after(kills, step):
    real(kills, step)
    while step == 35 and len(kills.missed) < 2:  # not before the expert is back, which takes longer than these steps
        time.sleep(0.05)
        real(kills, step)


language_model.Kills.after = after
sys.exit(language_model.main())
"""
    )
    options = ["--max-restarts", 1, "--worker-restarts", "0/600s"] if restarts else []
    command = ["--workers", 2, "--experts", 2, *options, script, *SMALL, "--steps", 40, "--kill"]
    done = run(*command, "--save-every", 8, "--text", small_text, "--out", out, patient=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result["missed_seconds"]) == {"expert 1", "worker 1"}
    assert result["resumed_from"] == (16 if restarts else 0), "killed after step 20"
    assert ("restarting the job (1 of 1)" if restarts else "another takes its place (1 of 3)") in done.stderr
    lines = [line for line in done.stdout.splitlines() if "kill -9" in line or "missed for" in line]
    assert len(lines) == 4, lines
    assert json.loads((out / "result.json").read_text()) == result


@pytest.mark.slow
def test_ctrl_c_of_a_job_ends_it_with_130_and_no_traceback(small_text, tmp_path):
    command = ["--workers", 2, SCRIPT, "--steps", 100000, "--evaluate-every", 1, "--memory-rows", 64]
    command += ["--text", small_text, "--out", tmp_path / "o", "--engine", "tape"]
    with start_run(*command, patient=True) as process:
        for line in process.stdout:
            if line.startswith("step 2/"):
                break
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=200)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "the same command goes on" in errors


# In stages.


@pytest.mark.slow
def test_two_stages_draw_the_curve_of_one_process(small_text, tmp_path, capsys):
    arguments = [*SMALL, "--engine", "tape", "--text", str(small_text)]
    staged = [*arguments, "--stages", "2", "--out", str(tmp_path / "two")]
    job = run_example(LocalJob(2), SCRIPT, *staged, WIDTH=WIDTH).check()
    saved = str(tmp_path / "threads" / "schedule.svg")
    threads = run_here(capsys, *arguments, "--stages", "3", "--out", tmp_path / "threads", said=saved)
    plain = run_here(capsys, *arguments, "--out", tmp_path / "one")
    two = job.results[0]
    assert two is not None
    assert (two["stages"], two["workers"], two["comm_mode"]) == (2, 2, "None")
    assert (threads["stages"], threads["workers"]) == (3, 1)
    assert job.results[1] is None, "only rank 0 reports"
    for result in (two, threads):
        out = Path(str(result["out"]))
        assert curve(out)["losses"] == pytest.approx(curve(tmp_path / "one")["losses"], rel=1e-5)
        assert result["bits_per_byte"] == pytest.approx(plain["bits_per_byte"], rel=1e-5)
        assert (out / "schedule.svg").stat().st_size > 500


@pytest.mark.slow
def test_a_stage_may_hold_a_mixture_of_experts(small_text, tmp_path):
    arguments = [*SMALL, "--engine", "tape", "--text", str(small_text), "--stages", "2", "--out", str(tmp_path)]
    result = run_example(LocalJob(2, servers=1, experts=2), SCRIPT, *arguments, WIDTH=WIDTH).check().results[0]
    assert result is not None
    assert (result["stages"], result["experts"], result["servers"]) == (2, 2, 1)
    assert curve(tmp_path)["losses"][-1] < curve(tmp_path)["losses"][0]


@pytest.mark.parametrize(
    ("workers", "arguments", "message"),
    [
        ("3", ["--stages", "2"], "3 workers make no pipelines of --stages 2"),
        ("1", ["--stages", "7"], "this model has 6 layers"),
        ("3", ["--batch", "2"], "--batch 2 leaves some of 3 workers without a window"),
    ],
)
def test_shapes_of_a_job_that_cannot_be_are_refused(
    workers, arguments, message, small_text, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", workers)
    assert message in refused(capsys, *arguments, "--text", small_text, "--out", tmp_path)


# Parts.


@pytest.mark.parametrize("length", [1, 255, 256, 257, 256 * 16, 256 * 33 + 5])
def test_measuring_predicts_every_byte_once(length):
    import _text

    text = bytes(index * 7 % 251 for index in range(length))
    batches = _text.windows_in_order(text)
    assert bytes(byte for batch in batches for byte in batch[:, 1:].flatten().tolist()) == text


def test_a_byte_is_predicted_from_those_before_it_only():
    import language_model

    torch.manual_seed(0)
    model = language_model.language_model(memory_rows=512).eval()
    text = torch.randint(256, (1, 40))
    changed = text.clone()
    changed[0, 25] ^= 1
    same = (model(text) == model(changed)).all(-1)[0]
    assert same[:25].all()
    assert not same[25:].any()


LANGUAGE_MODEL, CLICK_THROUGH, GRAPH_SAGE = "language_model", "click_through", "graph_sage"


@pytest.mark.parametrize(
    ("example", "arguments", "said"),
    [
        (LANGUAGE_MODEL, "--steps 0", "a whole number of at least 1, not '0'"),
        (LANGUAGE_MODEL, "--batch many", "a whole number of at least 1, not 'many'"),
        (LANGUAGE_MODEL, "--seed -1", "a whole number from 0"),
        (LANGUAGE_MODEL, "--comm-mode Gossip", "one of None, AllReduce, PS, Hybrid, auto, not 'Gossip'"),
        (LANGUAGE_MODEL, "--text no/such/place", "no/such/place: there is no such file"),
        (LANGUAGE_MODEL, "--resume --fresh", "not allowed with"),
        (LANGUAGE_MODEL, "--stepz 3", "unrecognized arguments: --stepz"),
        (CLICK_THROUGH, "--data no/such/file", "no/such/file: there is no such file"),
        (CLICK_THROUGH, f"--held-out {shlex.quote(__file__)}", "--held-out belongs to --data"),
        (CLICK_THROUGH, "--model tree", "invalid choice: 'tree'"),
        (CLICK_THROUGH, "--pull-bound -1", "a whole number from 0"),
        (GRAPH_SAGE, "--nodes 100 --batch 90", "--nodes 100 leave fewer than --batch 90 to train on"),
    ],
)
def test_wrong_arguments_are_named(example, arguments, said, small_text, capsys):
    own = ["--text", small_text] if example == LANGUAGE_MODEL and "--text" not in arguments else []
    assert said in example_jobs.refused(example, capsys, *own, *shlex.split(arguments))


# The table of `make demo-compare`.


def test_each_run_is_a_column_of_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES.parent / "tools")
    from compare_runs import table

    folders = [tmp_path / "killed", tmp_path / "alone"]
    for folder, workers, missed in zip(folders, (2, 1), ({"worker 1": 9.5}, {}), strict=True):
        folder.mkdir()
        facts = {"workers": workers, "servers": workers - 1, "experts": 0, "missed_seconds": missed}
        facts |= {"bits_per_byte": 1.25 * workers, "lzma_bits_per_byte": 1.658}
        (folder / "result.json").write_text(json.dumps(facts))
        (folder / "curve.json").write_text(json.dumps({"held_out": [[workers, 9.0], [80, 2.0], [160, 1.5]]}))
    assert [line.split("  ")[0] for line in table(folders)] == [
        "held-out bits per byte",
        "after step 80",
        "after step 160",
        "all held-out bytes",
        "lzma -9e",
        "worker 1 was killed, and missed for 9.5 s",
    ]
    assert table(folders)[3].split()[-2:] == ["2.500", "1.250"]
