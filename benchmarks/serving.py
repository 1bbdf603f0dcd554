"""The service with 100,000 finished trials: how fast it answers over HTTP, what it weighs, and MLflow beside it.

    python benchmarks/serving.py [--trials 100000] [--points 5000000] [--runs 5000] [--seconds 10] [--quick]

On SQLite and on PostgreSQL (the server that the tests use) in turn: fills a database, starts the API as a process of
its own, measures over HTTP from one client, and posts a grid. Then records the same runs of 40 metrics in MLflow's
SQLite store and here, and asks both for the 50 best with all metrics. Prints each figure beside its bound and fails if
a bound is missed. Each side keeps a record, `serving sqlite` and so on; --quick takes 1,000 trials.
"""

import multiprocessing
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx2 as httpx

from beside_mlflow import against_mlflow
from fill import CELLS_SEEDS, DATASET, fill
from hosting import cpu_seconds, databases, served
from load import sustained
from measuring import keep, parser, peak_mebibytes, resident_mebibytes
from service.leaderboards.metrics import Metric

BOUNDS = {
    "leaderboard p95": {"sqlite": 0.050, "postgres": 0.050},
    "leaderboard of one rank p95": {"sqlite": 0.050, "postgres": 0.050},
    "leaderboard where a field p95": {"sqlite": 0.150, "postgres": 0.150},
    "leaderboard grouped by a field p95": {"sqlite": 0.150, "postgres": 0.150},
    "leaderboard sorted by a field p95": {"sqlite": 0.150, "postgres": 0.150},
    "leaderboard as a matrix p95": {"sqlite": 0.150, "postgres": 0.150},
    "trials where a stored field p95": {"sqlite": 0.050, "postgres": 0.050},
    "trials sorted by a stored field p95": {"sqlite": 0.050, "postgres": 0.050},
    "trials where a field p95": {"sqlite": 0.150, "postgres": 0.150},
    "trials where a field, of none p95": {"sqlite": 0.150, "postgres": 0.150},
    "trials sorted by a field p95": {"sqlite": 0.150, "postgres": 0.150},
    "trials sorted by a default p95": {"sqlite": 0.150, "postgres": 0.150},
    "trials where a result p95": {"sqlite": 0.150, "postgres": 0.150},
    "experiments p95": {"sqlite": 0.020, "postgres": 0.020},
    "experiment p95": {"sqlite": 0.020, "postgres": 0.020},
    "page of metrics p95": {"sqlite": 0.030, "postgres": 0.030},
    "grid of 10,000": {"sqlite": 1.5, "postgres": 1.5},
    "dry run of 20,000": {"sqlite": 2.0, "postgres": 2.0},
}
RATE = 200
MEMORY_MIB = 250
FASTER_ANSWER, FASTER_RECORD = 100, 20


def timed(ask: Callable[[], httpx.Response], count: int, process: int) -> dict[str, float]:
    """Seconds of so many requests, the first few apart; `cpu`: the server's part of them on average."""
    seconds: list[float] = []
    used = 0.0
    for index in range(count + 3):
        used = cpu_seconds(process) if index == 3 else used
        began = time.perf_counter()
        response = ask()
        taken = time.perf_counter() - began
        assert response.is_success, response.text
        if index >= 3:
            seconds.append(taken)
    cpu = (cpu_seconds(process) - used) / count
    return {"p50": statistics.median(seconds), "p95": statistics.quantiles(seconds, n=20)[-1], "cpu": cpu}


def measure(
    client: httpx.Client, process: int, log: Path, experiments: int, trials: int, seconds: float, *, quick: bool
) -> dict[str, Any]:
    """All figures of one database."""
    repeats = 3 if quick else 200
    rng = random.Random(0)
    metrics = [metric.value for metric in Metric]

    def board() -> httpx.Response:
        return client.get(f"/v1/leaderboards/{DATASET}", params={"metric": rng.choice(metrics)})

    def filtered() -> httpx.Response:
        return client.get(f"/v1/leaderboards/{DATASET}", params={"metric": rng.choice(metrics), "rank": "2"})

    def one_experiment() -> httpx.Response:
        return client.get(f"/v1/leaderboards/{DATASET}", params={"experiment": rng.randint(1, experiments)})

    def chosen(**asked: str) -> Callable[[], httpx.Response]:
        return lambda: client.get(f"/v1/leaderboards/{DATASET}", params={"metric": rng.choice(metrics), **asked})

    def listed(**asked: str) -> Callable[[], httpx.Response]:
        return lambda: client.get("/v1/trials", params=asked)

    asks = {
        "leaderboard": board,
        "leaderboard of one rank": filtered,
        "leaderboard of one experiment": one_experiment,
        "leaderboard where a field": chosen(where="training.lr<=0.01"),
        "leaderboard grouped by a field": chosen(group_by="training.lr"),
        "leaderboard sorted by a field": chosen(sort="training.lr"),
        "leaderboard as a matrix": chosen(pivot="training.lr,rank", limit="1"),
        "trials where a stored field": listed(where="rank in (3, 4)"),
        "trials sorted by a stored field": listed(sort="-rank"),
        "trials where a field": listed(where="training.lr<=0.01"),
        "trials where a field, of none": listed(where="training.lr<=1e-9"),
        "trials sorted by a field": listed(sort="training.lr"),
        "trials sorted by a default": listed(sort="training.momentum"),
        "trials where a result": listed(where="accuracy>=0.9999"),
        "leaderboard with front": lambda: client.get(
            f"/v1/leaderboards/{DATASET}", params={"pareto": "accuracy,compression"}
        ),
        "experiments": lambda: client.get("/v1/experiments"),
        "experiment": lambda: client.get(f"/v1/experiments/{rng.randint(1, experiments)}"),
        "page of metrics": lambda: client.get(f"/v1/trials/{rng.randint(1, trials)}/metrics", params={"limit": 100}),
    }
    found: dict[str, Any] = {
        name: timed(ask, min(repeats, 20) if "front" in name else repeats, process) for name, ask in asks.items()
    }
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found["rate"] = pool.apply(sustained, (str(client.base_url), trials, experiments, seconds))
    seeds = 1 if quick else 100
    for name, rates, apart, asked in (
        ("grid of 10,000", 100, seeds, {}),
        ("dry run of 20,000", 200, seeds, {"dry_run": "true"}),
        ("dry run of 20,000, no two alike", 200 * seeds, 1, {"dry_run": "true"}),
    ):
        axes = {"training.lr": [1e-6 * k for k in range(1, rates + 1)], "seed": list(range(apart))}
        spec = {"name": "large", "base": {"dataset": "synthetic:1x8x8:2:100", "model": "small-cnn"}, "grid": axes}
        began = time.perf_counter()
        answer = client.post("/v1/experiments", params=asked, json=spec)
        found[name] = time.perf_counter() - began if answer.is_success else answer.text
        print("" if answer.is_success else log.read_text()[-2000:], end="")
    found["memory_mib"] = {"now": resident_mebibytes(process), "peak": peak_mebibytes(process)}
    return found


def main() -> int:
    shared = parser(__doc__)
    shared.add_argument("--trials", type=int, default=100_000)
    shared.add_argument("--points", type=int, default=5_000_000)
    shared.add_argument("--runs", type=int, default=5_000)
    shared.add_argument("--seconds", type=float, default=10, help="Of the sustained load.")
    shared.add_argument("--only", choices=["sqlite", "postgres", "mlflow"])
    chosen = shared.parse_args()
    if chosen.quick:
        chosen.trials, chosen.points, chosen.runs, chosen.seconds = 1000, 1000, 50, 0.5
    figures: dict[str, dict[str, Any]] = {}
    missed: list[str] = []
    for kind in ("sqlite", "postgres"):
        if chosen.only not in (None, kind):
            continue
        with tempfile.TemporaryDirectory() as name, databases(kind, Path(name)) as url:
            experiments = fill(url, chosen.trials, chosen.points)
            with served(url, Path(name)) as (client, process):
                log = Path(name) / "api.log"
                figures[kind] = measure(
                    client, process, log, experiments, chosen.trials, chosen.seconds, quick=chosen.quick
                )
        missed += _report(kind, figures[kind])
    if chosen.only in (None, "mlflow"):
        with tempfile.TemporaryDirectory() as name:
            beside = figures["mlflow"] = against_mlflow(chosen.runs, Path(name))
        for what, bound in (("answer", FASTER_ANSWER), ("record", FASTER_RECORD)):
            theirs, ours = (beside[side][f"{what}_seconds"] for side in ("mlflow", "ttsv"))
            beside[f"{what}_ratio"] = round(theirs / ours, 1)
            missed += [f"mlflow {what} ratio"] if theirs / ours < bound else []
            print(f"{what:24} MLflow {theirs:8.4f} s, here {ours:8.4f} s, ratio {theirs / ours:6.1f}, bound {bound}")
        print(f"{'one run, waited for':24} here {beside['ttsv']['record_alone_seconds']:8.4f} s")
    if not chosen.quick:
        command = shlex.join(["python", "benchmarks/serving.py", *sys.argv[1:]])
        filled = {"trials": chosen.trials, "seeds_per_cell": CELLS_SEEDS, "points": chosen.points}
        for side, found in figures.items():
            about = {"mlflow": version("mlflow")} if side == "mlflow" else filled
            short = [name.removeprefix(f"{side} ") for name in missed if name.startswith(f"{side} ")]
            keep(f"serving {side}", command, {"versions": about, "figures": found, "missed": short})
    print("missed: " + ", ".join(missed) if missed else "every bound is kept")
    return int(bool(missed) and not chosen.quick)


def _report(kind: str, found: dict[str, Any]) -> list[str]:
    missed = []
    for name, seconds in found.items():
        if isinstance(seconds, str):
            print(f"{kind:9} {name}: {seconds}")  # an answer that refused it
            missed.append(f"{kind} {name}")
        elif not isinstance(seconds, dict) or "p95" in seconds:
            value = seconds["p95"] if isinstance(seconds, dict) else seconds
            bound = BOUNDS.get(f"{name} p95", BOUNDS.get(name, {})).get(kind)
            line = f"{kind:9} {name:32} {value * 1000:9.1f} ms" + (f", bound {bound * 1000:.0f} ms" if bound else "")
            more = (
                "".join(f", {key} {seconds[key] * 1000:.1f}" for key in ("p50", "cpu")) if value is not seconds else ""
            )
            print(line + more, flush=True)
            missed += [f"{kind} {name}"] if bound is not None and value > bound else []
    rate, peak = found["rate"], found["memory_mib"]["peak"]
    print(f"{kind:9} {'requests a second':32} {rate['per_second']:9.1f}, errors {rate['errors']:.0f}, bound {RATE}")
    print(f"{kind:9} {'peak memory':32} {peak:9.1f} MiB, bound {MEMORY_MIB}")
    missed += [f"{kind} rate"] if rate["per_second"] < RATE or rate["errors"] else []
    missed += [f"{kind} memory"] if peak > MEMORY_MIB else []
    return missed


if __name__ == "__main__":
    sys.exit(main())
