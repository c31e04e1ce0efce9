"""A mixture of experts that reads handwritten digits while one of its four servers is killed and comes back.

::

    python examples/mixture_of_experts.py                                 starts four servers, kills one on the way
    anabranch run --experts 4 examples/mixture_of_experts.py              the job's four expert processes serve

::

    64 pixels ── stem ── 32 ──┬────────────────── + ── head ── 10 digits
                              └── gate ── best 4 ─┘
                                        of 8 experts on 4 servers, each with an optimizer of its own

Alone, the script trains twice: undisturbed, with all experts in this process, then on four server processes of which
one is killed (``kill -9``) after a third of the steps and started again after half of them; it says how both ended.
Experts are saved every half second, so the one that comes back has nearly all of what it had learned. Writes
``accuracy.json`` into ``--out``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import anabranch as ab
from anabranch.experts.layers import Feedforward

SERVERS = 4
FEATURES = 32
BATCH = 64
VICTIM = 1
VICTIMS = [f"digits.{VICTIM}.{j}" for j in range(2)]
UPDATED = 5  # steps between two lines of progress


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

    def __init__(self, directory: object) -> None:
        super().__init__()
        self.stem = nn.Linear(64, FEATURES)
        self.mixture = ab.RemoteMixtureOfExperts(
            FEATURES, (SERVERS, 2), directory, "digits", k_best=4, k_min=1, forward_timeout=20.0, backward_timeout=20.0
        )
        self.head = nn.Linear(FEATURES, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        x = torch.tanh(self.stem(pixels))
        return self.head(x + self.mixture(x))


class ServerProcess:
    """One server of experts, in a process that may be killed and started again."""

    def __init__(self, index: int, seed: int, directory: str, saved: Path) -> None:
        self._arguments = [
            sys.executable,
            __file__,
            "--serve",
            str(index),
            str(seed),
            directory,
            str(saved / f"{index}"),
        ]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def wait_until_up(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "up\n":
            raise RuntimeError("a server of experts did not start; its error is above")

    def kill(self) -> None:
        """``kill -9``: no goodbye, nothing saved on the way out."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=10)
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process = None


def serve(index: int, seed: int, directory: str, saved: str) -> None:
    """The process of one server: says when it is up, serves until its input ends."""
    torch.set_num_threads(1)
    with ab.ExpertServer(
        make_backends(index, SERVERS, seed),
        directory=directory,
        checkpoint_dir=saved,
        checkpoint_seconds=0.5,
        ttl=2.0,
    ):
        print("up", flush=True)
        sys.stdin.read()


@contextmanager
def four_servers(seed: int) -> Iterator[tuple[ab.Directory, list[ServerProcess]]]:
    """Four servers of this script's own, and who finds them."""
    with ExitStack() as stack:
        saved = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        names = stack.enter_context(ab.DirectoryServer())
        servers = [ServerProcess(index, seed, names.endpoint, saved) for index in range(SERVERS)]
        for server in servers:
            server.start()
            stack.callback(server.kill)
        for server in servers:
            server.wait_until_up()
        yield ab.Directory(names.endpoint), servers


def split_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pixels from 0 to 1 and labels: to learn from, and held out."""
    digits = load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
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


def train(directory: object, steps: int, seed: int, between: Callable[[int], str], name: str) -> dict[str, object]:
    """Trains, says how it goes, and returns the accuracy on what was held out, and what became of the calls."""
    torch.manual_seed(seed)
    pixels, labels, held_out, answers = split_digits()
    model = Digits(directory)
    news = ""
    used_again = False
    with ab.Executor({"train": training_step(model), "validate": ab.EvalStep(model, right)}) as executor:
        for step in range(steps):
            news = between(step) or news
            rows = torch.randint(len(labels), (BATCH,))
            before = model.mixture.statistics()
            nats = executor.run("train", (pixels[rows], labels[rows]))["loss"].item()
            facts = model.mixture.statistics()
            if news.startswith("server") and facts.failed == before.failed:
                used_again |= any(facts.rows.get(uid, 0) > before.rows.get(uid, 0) for uid in VICTIMS)
            if step % UPDATED == 0 or step == steps - 1:
                failed = sum(facts.failed.values())
                print(
                    f"{name}  step {step + 1}/{steps}  loss {nats:.3f}  {facts.calls} calls, {failed} failed  {news}",
                    flush=True,
                )
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


def train_disturbed(steps: int, seed: int) -> dict[str, object]:
    """The same with one server killed and brought back."""
    with four_servers(seed) as (directory, servers):

        def between(step: int) -> str:
            if step == steps // 3:
                servers[VICTIM].kill()
                return f"3 servers: server {VICTIM} was killed"
            if step == steps // 2:
                servers[VICTIM].start()
                servers[VICTIM].wait_until_up()
                return f"server {VICTIM} is back"
            return ""

        return train(directory, steps, seed, between, "disturbed  ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="training steps (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    parser.add_argument("--out", type=Path, default=Path("runs/mixture_of_experts"), help="where to write")
    parser.add_argument("--comm-mode", default=None, help="must be left out: one worker trains alone")
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        index, seed, directory, saved = options.serve
        serve(int(index), int(seed), directory, saved)
        return
    if options.comm_mode not in (None, "None"):
        parser.error(f"--comm-mode {options.comm_mode}: this example has one worker, which has nobody to speak to")
    torch.set_num_threads(1)
    job = ab.job()
    options.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, object] = {"example": "mixture_of_experts", "steps": options.steps, "seed": options.seed}
    if job.experts or job.role == "expert":
        # The job's own processes serve; killing one of them is the launcher's business, not ours.
        names = job.serve(lambda index, count: make_backends(index, count, options.seed))
        result |= train(names, options.steps, options.seed, lambda step: "", "job        ")
    else:
        names = ab.Directory()
        with ab.ExpertServer(make_backends(0, 1, options.seed), directory=names):
            calm = train(names, options.steps, options.seed, lambda step: "", "undisturbed")
        result |= train_disturbed(options.steps, options.seed)
        result["undisturbed_accuracy"] = calm["accuracy"]
    (options.out / "accuracy.json").write_text(json.dumps(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
