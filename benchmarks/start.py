"""Seconds from `anabranch run` to the end of a job's first step, forked and with plain processes.

::

    python benchmarks/start.py [--jobs 2+1+2 16+4+4] [--out DIR]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import keep, machine, options_of

STEP = """
import torch, anabranch as ab
import torch.distributed as dist

job = ab.job()
directory = job.serve(lambda index, count: [
    ab.ExpertBackend(f"ffn.{index}", torch.nn.Linear(8, 8), args_schema=[ab.TensorSpec(8)])])
dist.init_process_group("gloo")
with ab.ParameterClient() as client:
    client.init("bias", (8,))
    x = (torch.ones(4, 8) + client.pull("bias")).requires_grad_()
    ab.RemoteExpert("ffn.0", directory)(x).sum().backward()
    dist.all_reduce(x.grad)
dist.destroy_process_group()
"""


def seconds(script: Path, workers: int, servers: int, experts: int, *options: str) -> float:
    roles = ["--workers", str(workers), "--servers", str(servers), "--experts", str(experts)]
    command = [sys.executable, "-m", "anabranch.cli", "run", *roles, *options, str(script)]
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--jobs", nargs="+", default=["2+1+2", "16+4+4"], help="WORKERS+SERVERS+EXPERTS")
    options = parser.parse_args()
    before = machine()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "first_step.py")
        script.write_text(STEP)
        for job in options.jobs:
            workers, servers, experts = map(int, job.split("+"))
            row: dict[str, object] = {"job": job}
            for how, chosen in (("forked", ()), ("plain", ("--spawn",))):
                row[how] = round(seconds(script, workers, servers, experts, *chosen), 2)
            print(row, flush=True)
            rows.append(row)
    keep("start", before, rows, options.out)


if __name__ == "__main__":
    main()
