"""A mixture of experts that reads handwritten digits while one of its four servers is killed and comes back.

::

    python examples/mixture_of_experts.py                                 starts four servers itself
    anabranch run --experts 4 examples/mixture_of_experts.py              the job's four expert processes serve
    anabranch run --workers 2 --experts 4 examples/mixture_of_experts.py  two workers share each batch and the experts

::

    64 pixels ── stem ── 32 ──┬────────────────── + ── head ── 10 digits
                              └── gate ── best 4 ─┘
                                        of 8 experts on 4 servers, each with an optimizer of its own

The script trains twice: undisturbed and alone, with all experts in this process, then on the four servers, of which one
is killed (``kill -9``) after a third of the steps; after half of them it is back, started again by the script or by the
job's launcher. It says how both ended. Experts are saved every half second, so the one that comes back has nearly all
of what it had learned. Writes ``result.json`` into ``--out``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from _run import add_first, reported
from sklearn.datasets import load_digits
from torch import Tensor, nn

import anabranch as ab
from anabranch.experts.server.layers import Feedforward
from anabranch.job import DirectoryLike

SERVERS = 4
FEATURES = 32
BATCH = 64
VICTIM = 1
LINES = 20  # steps between two lines
SAVED_EVERY = 0.5  # seconds
PATIENCE = 60.0  # seconds for a server to come back


def make_backends(index: int, count: int, seed: int = 0) -> list[ab.ExpertBackend]:
    """Server ``index``'s part of the 4 x 2 grid."""
    backends = []
    for i in range(index, SERVERS, count):
        for j in range(2):
            torch.manual_seed(1000 * seed + 10 * i + j)
            module = Feedforward(FEATURES)
            optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
            backends.append(
                ab.ExpertBackend(f"digits.{i}.{j}", module, optimizer, args_schema=[ab.TensorSpec(FEATURES)])
            )
    return backends


class Digits(nn.Module):
    """A stem and a head here, experts elsewhere."""

    def __init__(self, directory: DirectoryLike) -> None:
        super().__init__()
        self.stem = nn.Linear(64, FEATURES)
        self.mixture = ab.RemoteMixtureOfExperts(
            FEATURES, (SERVERS, 2), directory, "digits", k_best=4, k_min=1, forward_timeout=20.0, backward_timeout=20.0
        )
        self.head = nn.Linear(FEATURES, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        x = torch.tanh(self.stem(pixels))
        return self.head(x + self.mixture(x))


class ExpertServerProcess(Protocol):
    """A server in another process, which can be killed and comes back."""

    def kill(self) -> None:
        """``kill -9``: no goodbye, nothing saved on the way out."""

    def come_back(self) -> None:
        """Return when it serves again."""


class OwnServer:
    """One that this script starts."""

    def __init__(self, index: int, seed: int, directory: str, saved: Path) -> None:
        self._arguments = [
            sys.executable,
            __file__,
            "--serve",
            str(index),
            str(seed),
            directory,
            str(saved / str(index)),
        ]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        # In a group of its own, or Ctrl-C in a terminal would reach it too.
        self._process = subprocess.Popen(
            self._arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
        )

    def wait_until_up(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "up\n":
            raise RuntimeError("a server of experts did not start; its error is above")

    def come_back(self) -> None:
        self.start()
        self.wait_until_up()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self.end()

    def end(self) -> None:
        """End the server's input: it saves, and leaves no file behind."""
        if self._process is not None:
            try:
                self._process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.communicate(timeout=10)
            self._process = None


class JobServer:
    """An expert process of the job, which its launcher starts again."""

    def __init__(self, uid: str, directory: DirectoryLike, pid: Path) -> None:
        self._uid = uid
        self._directory = directory
        self._pid = pid

    def kill(self) -> None:
        os.kill(int(self._pid.read_text()), signal.SIGKILL)

    def come_back(self) -> None:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                ab.RemoteExpert(self._uid, self._directory, forward_timeout=1.0).get_info()
                return
            except (ab.BoundaryError, ab.NotFound):
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)


def serve(index: int, seed: int, directory: str, saved: str) -> None:
    """Run the process of one server: say when it is up, serve until its input ends."""
    torch.set_num_threads(1)
    with ab.ExpertServer(
        make_backends(index, SERVERS, seed),
        directory=directory,
        checkpoint_dir=saved,
        checkpoint_seconds=SAVED_EVERY,
        ttl=2.0,
    ):
        print("up", flush=True)
        sys.stdin.read()


@contextmanager
def own_servers(seed: int) -> Iterator[tuple[DirectoryLike, Sequence[ExpertServerProcess]]]:
    """Four servers that this script starts, and who finds them."""
    with ExitStack() as stack:
        saved = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        names = stack.enter_context(ab.DirectoryServer())
        servers = [OwnServer(index, seed, names.endpoint, saved) for index in range(SERVERS)]
        for server in servers:
            stack.callback(server.end)
        for server in servers:
            server.start()
        for server in servers:
            server.wait_until_up()
        yield ab.Directory(names.endpoint), servers


def job_servers(job: ab.Job, seed: int, out: Path) -> tuple[DirectoryLike, Sequence[ExpertServerProcess]]:
    """Return the job's expert processes; in one of those, serve and never come back."""

    def make(index: int, count: int) -> list[ab.ExpertBackend]:
        return make_backends(index, count, seed)

    state = out / "experts"
    if job.role == "expert":
        state.mkdir(parents=True, exist_ok=True)
        (state / f"{job.rank}.pid").write_text(str(os.getpid()))
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            shutil.rmtree(state / str(job.rank), ignore_errors=True)  # an earlier run's
    names = job.serve(make, checkpoint_dir=state / str(job.rank), checkpoint_seconds=SAVED_EVERY)
    return names, [JobServer(f"digits.{index}.0", names, state / f"{index}.pid") for index in range(job.experts)]


def split_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pixels from 0 to 1 and labels: to learn from, and held out."""
    data, target = load_digits(return_X_y=True)
    pixels = torch.tensor(data, dtype=torch.float32) / 16
    labels = torch.tensor(target)
    held_out = torch.arange(len(labels)) % 5 == 0
    return pixels[~held_out], labels[~held_out], pixels[held_out], labels[held_out]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    pixels, labels = batch
    return F.cross_entropy(model(pixels), labels)


def right(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    pixels, labels = batch
    return {"right": (model(pixels).argmax(1) == labels).float().mean()}


def training_step(model: Digits) -> ab.TrainStep:
    return ab.TrainStep(model, loss, torch.optim.Adam(model.parameters(), lr=3e-3))


def train(
    directory: DirectoryLike,
    steps: int,
    seed: int,
    name: str,
    between: Callable[[int], str] = lambda step: "",
    comm_mode: Literal["AllReduce"] | None = None,
) -> dict[str, object]:
    """Trains, shows how it goes, and returns the accuracy on what was held out, and what became of the calls.

    ``between`` is called before each step and says what happened.
    """

    def share(job: ab.Job) -> tuple[Tensor, Tensor]:
        """Return this worker's part of the step's batch; if a worker is lost, the others share it out anew."""
        drawn = torch.Generator().manual_seed(seed * 2**20 + executor.step)
        rows = torch.randint(len(labels), (BATCH,), generator=drawn)
        if comm_mode is not None:
            rows = rows[job.rank :: job.world_size]
        return pixels[rows], labels[rows]

    torch.manual_seed(seed)
    pixels, labels, held_out, answers = split_digits()
    model = Digits(directory)
    news = ""
    used_again = False
    steps_of = {"train": training_step(model), "validate": ab.EvalStep(model, right)}
    with ab.Executor(steps_of, comm_mode=comm_mode) as executor:
        while (step := executor.step) < steps:
            happened = between(step)
            news = happened or news
            before = model.mixture.statistics()
            nats = executor.run("train", share)["loss"].item()
            facts = model.mixture.statistics()
            if news.endswith("is back") and facts.failed == before.failed:
                used_again |= any(facts.rows[uid] > before.rows.get(uid, 0) for uid in facts.rows if is_victims(uid))
            if ab.job().rank == 0 and (happened or (step + 1) % LINES == 0 or step + 1 == steps):
                calls = f"{facts.calls} calls, {sum(facts.failed.values())} failed"
                print(f"{name:11}  step {step + 1}/{steps}  loss {nats:.3f}  {calls}  {news}", flush=True)
        accuracy = executor.run("validate", (held_out, answers))["right"].item()
        engine = executor.engine("train")
    facts = model.mixture.statistics()
    return {
        "accuracy": accuracy,
        "engine": engine,
        "calls": facts.calls,
        "failed": facts.failed,
        "used_again": used_again,
    }


def is_victims(uid: str) -> bool:
    return uid.startswith(f"digits.{VICTIM}.")


def undisturbed(steps: int, seed: int) -> dict[str, object]:
    """Trains with all experts in this process."""
    names = ab.Directory()
    with ab.ExpertServer(make_backends(0, 1, seed), directory=names):
        return train(names, steps, seed, "undisturbed")


def train_disturbed(
    directory: DirectoryLike, servers: Sequence[ExpertServerProcess], steps: int, seed: int
) -> dict[str, object]:
    """Trains while one server is killed and comes back."""

    def between(step: int) -> str:
        if step == steps // 3:
            if ab.job().rank == 0:
                servers[VICTIM].kill()
            return f"{len(servers) - 1} of {len(servers)} servers: server {VICTIM} was killed"
        if step == steps // 2:
            if ab.job().rank == 0:
                servers[VICTIM].come_back()
            return f"{len(servers)} servers: server {VICTIM} is back"
        return ""

    return train(directory, steps, seed, "disturbed", between, "AllReduce" if ab.job().workers > 1 else None)


def run(options: argparse.Namespace, job: ab.Job) -> dict[str, object]:
    options.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if job.experts:
            names, servers = job_servers(job, options.seed, options.out)
        else:
            names, servers = stack.enter_context(own_servers(options.seed))
        calm = {} if job.joined else undisturbed(options.steps, options.seed)  # the others do not wait for that again
        result = train_disturbed(names, servers, options.steps, options.seed)
    return {**result, "undisturbed_accuracy": calm.get("accuracy"), "out": str(options.out)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_first(parser, steps=300, out="runs/mixture_of_experts")
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        index, seed, directory, saved = options.serve
        serve(int(index), int(seed), directory, saved)
        return 0
    torch.set_num_threads(1)
    job = ab.job()
    if job.workers > 1 and not job.experts:
        parser.error(f"{job.workers} workers: they share the job's experts; start the job with --experts {SERVERS}")
    if job.experts not in (0, SERVERS):
        parser.error(
            f"{job.experts} expert processes: the grid has {SERVERS} rows; start the job with --experts {SERVERS}"
        )
    return reported(lambda: run(options, job), resumes=False)


if __name__ == "__main__":
    sys.exit(main())
