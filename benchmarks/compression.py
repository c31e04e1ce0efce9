"""What rounding activations and gradients on their way saves, and what it costs: bytes, and the loss at the end.

    python benchmarks/compression.py [--steps 300] [--seeds 3] [--out DIR]

The same training each time, with the same weights and batches: digits through an expert of 256 features on the far
side.
"""

from __future__ import annotations

import json
import statistics

import torch
import torch.nn.functional as F
from measure import keep, machine, options_of
from sklearn.datasets import load_digits
from torch import nn

from anabranch.experts import ExpertBackend, ExpertServer, RemoteExpert
from anabranch.experts.server.layers import Feedforward
from anabranch.tensors import TensorSpec

FEATURES = 256
KINDS = (None, "bfloat16", "float16", "int8")


def train(compression: str | None, steps: int, seed: int) -> tuple[int, float]:
    """Bytes of tensors that crossed, and the loss on all digits at the end."""
    torch.manual_seed(seed)
    digits = load_digits()
    pixels, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    stem, head, far = nn.Linear(64, FEATURES), nn.Linear(FEATURES, 10), Feedforward(FEATURES)
    spec = TensorSpec(FEATURES, compression=compression)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD([*stem.parameters(), *head.parameters()], lr=0.1)
    backend = ExpertBackend(
        "far.0", far, torch.optim.SGD(far.parameters(), lr=0.1), args_schema=[spec], outputs_schema=spec
    )
    with ExpertServer([backend]) as server:
        expert = RemoteExpert("far.0", server.endpoint)
        for _ in range(steps):
            rows = torch.randint(len(labels), (64,))
            loss = F.cross_entropy(head(expert(torch.tanh(stem(pixels[rows])))), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        facts = server.statistics().transport
    with torch.no_grad():
        final = F.cross_entropy(head(far(torch.tanh(stem(pixels)))), labels)
    return facts.bytes_received + facts.bytes_sent, float(final)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = machine()
    rows: list[dict[str, object]] = []
    results = {kind: [train(kind, options.steps, seed) for seed in range(options.seeds)] for kind in KINDS}
    for kind, made in results.items():
        plain = results[None]
        rows.append(
            {
                "compression": kind,
                "bytes_ratio": round(sum(b for b, _ in made) / sum(b for b, _ in plain), 4),
                "loss": [round(loss, 5) for _, loss in made],
                "loss_ratio": round(
                    statistics.mean(mine / other for (_, mine), (_, other) in zip(made, plain, strict=True)), 4
                ),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    keep("compression", before, rows, options.out, bars="bytes_ratio", by=("compression",))


if __name__ == "__main__":
    main()
