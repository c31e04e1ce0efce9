"""The ratios that count, beside their targets; and the tables of docs/benchmarks.md, made from what the scripts wrote.

::

    python benchmarks/summary.py [RESULTS] [--docs docs/benchmarks.md]

``RESULTS`` is the directory that ``make bench`` and ``make bench-peers`` fill. With ``--docs`` each table below a line

    % table NAME: WHERE        (or % plot NAME: WHERE, of which tools/draw_plots.py also makes a picture)

is replaced where RESULTS has its figures, and WHERE says on what they were taken. Ratios are of medians.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from measure import table

Row: TypeAlias = "dict[str, Any]"
_MARK = re.compile(r"^% (?P<kind>table|plot) (?P<name>[\w-]+): .+\n(?:\|.*\n)+", re.MULTILINE)

MODELS = {
    "mlp_small": "MLP 64-128-128-10, batch 32",
    "mlp_deep": "MLP of 12 layers of 64, batch 32",
    "transformer_d64_l2": "transformer, width 64, 2 layers",
    "wide_and_deep_20k": "wide & deep, 20,000 rows",
    "mlp_med": "MLP 512-1024-1024-512, batch 256",
    "transformer_d256_l4": "transformer, width 256, 4 layers",
    "transformer_d512_l12": "transformer, width 512, 12 layers",
}


class Results:
    """The rows that the benchmarks left in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.machine: Mapping[str, Any] = {}

    def rows(self, name: str, **values: object) -> list[Row]:
        """The rows of a benchmark in which columns have these values; raises ``FileNotFoundError``."""
        found = json.loads((self.directory / f"{name}.json").read_text())
        self.machine = found["machine"]
        return [row for row in found["rows"] if all(row.get(key) == value for key, value in values.items())]

    def row(self, name: str, **values: object) -> Row:
        return self.rows(name, **values)[0]

    def cases(self, name: str) -> dict[str, dict[str, Row]]:
        """The rows of a benchmark that ``measure.report`` wrote, by case and side."""
        cases: dict[str, dict[str, Row]] = {}
        for row in self.rows(name):
            cases.setdefault(row["case"], {})[row["side"]] = row
        return cases


# The tables of the page.


def relative(results: Results, name: str, reference: tuple[str, str], sides: dict[str, str]) -> list[Row]:
    """A row a model: the milliseconds of the reference, and the sides' ratios to it."""
    rows = []
    for case, found in results.cases(name).items():
        row = {"": MODELS.get(case, case), reference[1]: f"{found[reference[0]]['median_ms']:.3g} ms"}
        rows.append(
            row | {head: f"{found[side]['ratio_of_medians']:.2f}" for side, head in sides.items() if side in found}
        )
    return rows


def first_steps(results: Results) -> list[Row]:
    heads = {"loop": "loop", "tape": '`"tape"`', "graph": '`"graph"`', "torch.compile": "`torch.compile(module)`"}
    return [
        {"": MODELS[row["case"]]} | {head: f"{row[f'first, {side} (s)']:.2f}" for side, head in heads.items()}
        for row in results.rows("first_steps")
        if "case" in row
    ]


def all_reduce(results: Results) -> list[Row]:
    return [
        {
            "of each worker": f"{row['KiB']} KiB" if row["KiB"] < 1024 else f"{row['KiB'] // 1024} MiB",
            "gloo": f"{row['gloo_median_ms']:.2g} ms",
            "shared memory": f"{row['shared_median_ms']:.2g} ms",
            "ratio (of minima)": f"{row['median_ratio']:.2g} ({row['minimum_ratio']:.2g})",
        }
        for row in results.rows("all_reduce")
    ]


def embedding_step(results: Results) -> list[Row]:
    names = {"RowWiseAdagrad": "row-wise Adagrad"}
    heads = {"anabranch": "Anabranch", "fbgemm": "FBGEMM 1.8.0", "torch EmbeddingBag": "torch's `EmbeddingBag`"}
    lines: dict[str, Row] = {}
    for row in results.rows("peers/tables"):
        line = lines.setdefault(row["optimizer"], {"": names.get(row["optimizer"], row["optimizer"])})
        line[heads[row["side"]]] = f"{row['median']:.1f} ({row['min']:.1f})"
    return list(lines.values())


def growth(results: Results) -> list[Row]:
    return [
        {"rows": f"{row['rows']:,}", "20,000 lookups": f"{row['median']:.2f} ms ({row['min']:.2f})"}
        for row in results.rows("tables_growth")
    ]


def shard(results: Results) -> list[Row]:
    rows = {row["side"]: row for row in results.rows("parameter_server")}
    ratio = shard_ratio(results)
    line = {f"{side}": f"{row['median_ms']:.1f} ms ({row['min_ms']:.1f})" for side, row in rows.items()}
    return [line | {"server / (echo + kernels)": f"{ratio:.2f}"}]


def cached_tables(results: Results) -> list[Row]:
    heads = {
        "uncached": "not cached",
        "cached": "cached, both bounds 50",
        "DataLoader": "cached, batches of a `DataLoader`",
        "8-bit": "cached, rows of 8 bits",
        "ddp": "dense gradients (`DistributedDataParallel`)",
        "best static cache": "the best static cache of that size",
    }
    rows, plain = results.rows("cached_tables"), results.row("cached_tables", side="uncached")["steps_per_second"]
    lines = []
    for row in rows:
        rate = row.get("steps_per_second")
        steps = "" if rate is None else f"{rate:.1f}" + ("" if row["side"] == "uncached" else f", {rate / plain:.2f}x")
        size = f"{row['bytes_a_step'] / 1e3:,.0f}" if "bytes_a_step" in row else ""
        share = "" if row["side"] == "uncached" else f"{row['share_of_uncached']:.1%}"
        lines.append(
            {"200 Mbit/s each way": heads[row["side"]], "kB a step": size, "of uncached": share, "steps/s": steps}
        )
    return lines


def pipelines(results: Results) -> list[Row]:
    lines = []
    for name, where, peer in (
        ("pipeline_ranks", "two processes", "torch "),
        ("pipeline_threads", "one process", "torchgpipe"),
    ):
        for case, sides in results.cases(name).items():
            m = int(case.removeprefix("m="))
            theirs = sides
            if peer == "torchgpipe" and (results.directory / "pipeline_threads_peers.json").exists():
                theirs = results.cases("pipeline_threads_peers")[case]
            best, rival = fastest(sides, "Pipe "), fastest(theirs, peer)
            alone = next(row for side, row in sides.items() if side.endswith("nothing shared"))
            lines.append(
                {
                    "m microbatches": f"{m}, {where}",
                    "2m/(m+1)": f"{2 * m / (m + 1):.2f}",
                    "nothing shared": f"{1 / alone['ratio_of_medians']:.2f}",
                    "best `Pipe`": f"{best[0]:.2f} ({best[1].removeprefix('Pipe ')})",
                    "best peer": f"{rival[0]:.2f} ({rival[1]})" if rival else "",
                }
            )
    return lines


def fastest(sides: Mapping[str, Row], prefix: str) -> Any:
    """The speed-up and the name of the fastest side whose name begins so; None if there is none."""
    return max(
        ((1 / row["ratio_of_medians"], side) for side, row in sides.items() if side.startswith(prefix)), default=None
    )


def nop(results: Results) -> list[Row]:
    rows = {row["work"].removeprefix("nop "): row for row in results.rows("experts") if row["work"].startswith("nop ")}
    heads = {"unix": "Unix socket", "unix echo": "bare echo over it", "tls": "TLS", "tls echo": "bare echo over TLS"}
    return [
        {"a call that does nothing, each way": head}
        | {size: f"{row['median_ms'][side]:.2g} ({row['minimum_ms'][side]:.2g})" for size, row in rows.items()}
        for side, head in heads.items()
    ]


def computing(results: Results) -> list[Row]:
    """Calls of experts that compute: what the same takes here, and their ratio."""
    lines = []
    for row in results.rows("experts"):
        work, medians = row["work"], row.get("median_ms", {})
        if work.startswith(("nop", "overload")) or "expert" not in " ".join(medians):
            continue
        expert = next(side for side in medians if side.startswith(("expert", "mixture")))
        here = next(side for side in reversed(medians) if side.startswith("here"))
        lines.append(
            {
                "": work,
                "here": f"{medians[here]:.3g}",
                "expert": f"{medians[expert]:.3g}",
                "ratio": f"{medians[expert] / medians[here]:.2f}",
            }
        )
    return lines


def plain(results: Results, name: str, heads: dict[str, tuple[str, str]]) -> list[Row]:
    """Columns of a benchmark under other heads, each in its format."""
    return [
        {head: format(row[key], shape) if shape else str(row[key]) for key, (head, shape) in heads.items()}
        for row in results.rows(name)
    ]


def compressed(results: Results) -> list[Row]:
    return [
        {
            "values sent as": row["compression"] or "float32",
            "bytes": f"{row['bytes_ratio']:.3f}",
            "final loss": f"{row['loss_ratio']:.4f}",
        }
        for row in results.rows("compression")
    ]


TABLES: dict[str, Callable[[Results], list[Row]]] = {
    "tape": partial(
        relative, name="tape_overhead", reference=("loop", "loop"), sides={"executor, tape": "by `Executor`"}
    ),
    "step-graph": partial(
        relative,
        name="step_graph_compiled",
        reference=("eager", "loop"),
        sides={
            "graph": "graph",
            "executor": "by `Executor`",
            "executor, skip_nonfinite=None": "and no look for NaN",
            "compiled": "graph + Inductor",
            "torch.compile(module)": "`torch.compile(module)`",
            "kernels": "bare kernels",
        },
    ),
    "first-steps": first_steps,
    "data-parallel": partial(
        relative,
        name="data_parallel",
        reference=("DistributedDataParallel", "`DistributedDataParallel`"),
        sides={
            "nothing summed": "nothing summed",
            "executor, tape": "tape",
            "executor, graph": "graph",
            "executor, graph, skip_nonfinite=None": "graph, no check",
        },
    ),
    "all-reduce": all_reduce,
    "tables": embedding_step,
    "growth": growth,
    "threads": partial(
        plain,
        name="tables_threads",
        heads={
            "table": ("table", ""),
            "verb": ("", ""),
            "rows": ("distinct rows", ","),
            "one": ("one thread (ms)", ".2f"),
            "two": ("two threads (ms)", ".2f"),
            "ratio": ("ratio", ".2f"),
        },
    ),
    "shard": shard,
    "cached-tables": cached_tables,
    "skews": partial(
        plain,
        name="cached_tables_skews",
        heads={"zipf": ("Zipf's exponent", ".2f"), "cached": ("cached", ".1%"), "static": ("best static cache", ".1%")},
    ),
    "autodiff": partial(
        plain,
        name="autodiff",
        heads={"side": ("", ""), "against": ("against", ""), "ratio_median": ("ratio", ".2f")},
    ),
    "compression": compressed,
    "start": partial(
        plain,
        name="start",
        heads={
            "job": ("workers + servers + experts", ""),
            "forked": ("seconds", ".1f"),
            "plain": ("plain processes", ".1f"),
        },
    ),
    "pipelines": pipelines,
    "nop": nop,
    "experts": computing,
    "table-kinds": partial(
        plain,
        name="table_kinds",
        heads={
            "kind": ("26 tables", ""),
            "pull_ms": ("pull (ms)", ".2f"),
            "own push_ms": ("its push (ms)", ".2f"),
            "other push_ms": ("another push (ms)", ".2f"),
            "pull": ("pull / fixed", ".2f"),
            "own push": ("its push", ".2f"),
            "other push": ("another push", ".2f"),
            "together": ("pull and its push", ".2f"),
        },
    ),
    "new-ids": partial(
        plain,
        name="new_ids",
        heads={
            "rows": ("rows", ",d"),
            "longest_ms": ("longest push (ms)", ".0f"),
            "longest_of_all_ms": ("of all until then", ".0f"),
            "median_ms": ("median", ".1f"),
        },
    ),
}


# The figures that have targets.

WORKERS = (0.25, 0.38, 0.70, 0.40, 0.88, 0.95)
CALLERS = "64 clients of one row on one thread, ffn, full batches"
THREADS = "64 clients of one row on 64 threads"


@dataclass(frozen=True)
class Figure:
    """Ratios of one work, and the most (or, with ``least``, the least) that they are to be.

    Args:
        work: in words.
        ratios: from the results, one for each target.
        targets: in the same order.
        least: larger ratios are better.
    """

    work: str
    ratios: Callable[[Results], list[float]]
    targets: tuple[float, ...]
    least: bool = False


def of_models(name: str, side: str) -> Callable[[Results], list[float]]:
    """The ratios of one side for the six models, in their order."""

    def ratios(results: Results) -> list[float]:
        cases = results.cases(name)
        return [cases[case][side]["ratio_of_medians"] for case in MODELS if case in cases]

    return ratios


def of_experts(begins: str, side: str = "experts") -> Callable[[Results], list[float]]:
    """The ratios of one side where the name of the work begins so."""
    return lambda results: [row["ratio"][side] for row in results.rows("experts") if row["work"].startswith(begins)]


def shard_ratio(results: Results) -> float:
    rows = {row["side"]: row["median_ms"] for row in results.rows("parameter_server")}
    return float(rows["server"] / (rows["echo"] + rows["kernels"]))


def cache_ratios(results: Results) -> list[float]:
    share = {row["side"]: row["share_of_uncached"] for row in results.rows("cached_tables")}
    return [share["cached"] / share["best static cache"], share["8-bit"]]


def cached_speed(results: Results) -> list[float]:
    rate = {row["side"]: row.get("steps_per_second", 0.0) for row in results.rows("cached_tables")}
    return [rate["cached"] / rate["uncached"]]


def against_peers(results: Results) -> list[float]:
    cases = results.cases("pipeline_ranks")
    return [fastest(sides, "Pipe ")[0] / fastest(sides, "torch ")[0] for sides in cases.values()]


def of_one_thread(results: Results) -> list[float]:
    return [fastest(sides, "Pipe ")[0] for sides in results.cases("pipeline_threads").values()]


def of_fbgemm(results: Results) -> list[float]:
    rows = results.rows("peers/tables", side="fbgemm")
    return [row["ours / theirs"] for row in rows]


def of_kinds(kinds: tuple[str, ...], *calls: str) -> Callable[[Results], list[float]]:
    """The ratios of these calls to those of fixed tables, of one kind after the other."""
    return lambda results: [results.row("table_kinds", kind=kind)[call] for kind in kinds for call in calls]


def longest_of_new_ids(results: Results) -> list[float]:
    return [row["longest_ms"] for row in results.rows("new_ids", rows=6_000_000)]


DYNAMIC = of_kinds(("dynamic",), "pull", "own push", "other push", "together")
FIGURES = [
    Figure("step on the tape / the loop", of_models("tape_overhead", "executor, tape"), (1.03,) * 4 + (1.01,) * 2),
    Figure("step as a graph / the loop", of_models("step_graph", "executor"), (0.69, 0.62, 0.92, 0.77, 1, 1)),
    Figure("two workers, tape / DDP", of_models("data_parallel", "executor, tape"), WORKERS),
    Figure("two workers, graph / DDP", of_models("data_parallel", "executor, graph"), WORKERS),
    Figure(
        "1 MiB of four workers: gloo / shared memory",
        lambda results: [results.row("all_reduce", KiB=1024)["median_ratio"]],
        (15,),
        least=True,
    ),
    Figure("26 tables / FBGEMM: Adagrad, row-wise, SGD", of_fbgemm, (0.4, 0.7, 0.7)),
    Figure(
        "two threads, fixed and dynamic: pull, push of 26,000; of 100,000",
        lambda results: [row["ratio"] for row in results.rows("tables_threads")],
        (1.3, 1.5, 1.45, 1.65) * 2,
        least=True,
    ),
    Figure("pull and push / (echo + kernels)", lambda results: [shard_ratio(results)], (1.25,)),
    Figure("cached bytes / the best static cache's; 8 bits / uncached", cache_ratios, (1.08, 0.13)),
    Figure("cached steps a second / uncached", cached_speed, (2.5,), least=True),
    Figure("two processes' pipe, m = 4, 8: torch's best / ours", against_peers, (1.03, 1.03), least=True),
    Figure("one process's pipe, m = 4, 8: times one thread", of_one_thread, (1.85, 1.74), least=True),
    Figure("empty call of 64 KiB, 2, 8 MiB / the echo", of_experts("nop", "unix"), (4, 1.4, 1.05)),
    Figure("expert's forward / here, batch 16, 128, 2048", of_experts("ffn forward,", "expert"), (1.3, 1.1, 1)),
    Figure("both and Adam / here, recomputing", of_experts("ffn forward+", "expert"), (1.2, 1.05, 1)),
    Figure("64 callers, one thread / here: forward, both", of_experts(CALLERS), (0.65, 0.55), least=True),
    Figure("64 callers, 64 threads / here: forward, both", of_experts(THREADS), (0.45, 0.35), least=True),
    Figure("dynamic / fixed: pull, its push, another, pull and its push", DYNAMIC, (1.85, 1.1, 1.45, 1.45)),
    Figure("float16, mapped / fixed: pull and push", of_kinds(("float16", "mapped"), "together"), (1.15, 1.15)),
    Figure("26,000 new ids into 6 M rows: longest push (ms)", longest_of_new_ids, (60,)),
]


def targets(results: Results) -> list[Row]:
    """A row for each figure that was measured."""
    rows = []
    for figure in FIGURES:
        try:
            ratios = figure.ratios(results)
        except FileNotFoundError:
            continue
        if not ratios:
            continue
        met = [
            ratio >= target if figure.least else ratio <= target
            for ratio, target in zip(ratios, figure.targets, strict=True)
        ]
        sign = ">=" if figure.least else "<="
        rows.append(
            {
                "ratio": figure.work,
                "measured": " ".join(f"{ratio:.2f}" for ratio in ratios),
                "target": f"{sign} {' '.join(f'{target:g}' for target in figure.targets)}",
                "met": f"{sum(met)} of {len(met)}",
            }
        )
    return rows


TABLES["targets"] = targets
WORDS = {2: "two", 4: "four"}


def where(results: Results) -> str:
    """The commit and the machine of the figures last read."""
    machine = results.machine
    return (
        f"commit {machine['commit']}, {WORDS.get(machine['cores'], machine['cores'])} cores of a virtual machine "
        f"({machine['processor']}), CPU only, "
        f"PyTorch {machine['torch']}; medians"
    )


def rewritten(text: str, results: Results) -> str:
    """The page with the tables that the results have."""

    def replaced(match: re.Match[str]) -> str:
        try:
            rows = TABLES[match["name"]](results)
        except (KeyError, FileNotFoundError):
            rows = []
        if not rows:
            return match[0]
        return f"% {match['kind']} {match['name']}: {where(results)}\n{table(rows)}\n"

    return _MARK.sub(replaced, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", default=Path("benchmarks/results"))
    parser.add_argument("--docs", type=Path, default=None, help="the page whose tables are replaced")
    arguments = parser.parse_args()
    results = Results(arguments.results)
    print(table(targets(results)))
    if arguments.docs is not None:
        arguments.docs.write_text(rewritten(arguments.docs.read_text(), results))


if __name__ == "__main__":
    main()
