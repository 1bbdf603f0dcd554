"""What the path around the training costs: start of the API, POST of a large grid, first epoch, further trials.

    python benchmarks/first_path.py [--quick]

Starts the whole stack on a fresh folder (SQLite, local Ray), posts 20 trials of the quickstart's size and reads
everything over the API. Prints each figure beside its bound. The record is `first_path`; --quick takes two trials.

- API start: from starting the process until /livez answers.
- POST of 1,000 trials: one request.
- first epoch: from the POST until an epoch of any trial can be read, the worker being up.
- further trial: trials run one at a time; from the end of the first to the end of the last, less the seconds that the
  trials themselves spent in training and evaluation, over their number.
"""

import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import keep, parser
from service.client import ApiError, Client
from service.settings import Settings
from workers.worker.single_machine import LocalStack

HERE = Path(__file__).parent
BOUNDS = {
    "api_start_seconds": 2.0,
    "post_1000_trials_seconds": 1.0,
    "first_epoch_seconds": 15.0,
    "further_trial_seconds": 0.3,
}


def main() -> int:
    quick = parser(__doc__).parse_args().quick
    figures: dict[str, float] = {}
    quickstart = json.loads((HERE.parent / "examples" / "quickstart.json").read_text())
    if quick:
        quickstart["base"]["training"]["epochs"] = 1
        quickstart["grid"] = {"rank": [4], "seed": [0, 1]}
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(data_dir=Path(folder))
        began = time.perf_counter()
        with LocalStack(settings, port=0) as stack, Client(stack.url, retries=0) as client:
            while not _answers(client):
                time.sleep(0.01)
            figures["api_start_seconds"] = time.perf_counter() - began
            while client.ready().worker_seen_at is None:
                time.sleep(0.1)
            time.sleep(0 if quick else 5)  # the worker's cluster comes up: a worker that serves is up for days
            figures["post_1000_trials_seconds"] = _post_large(client, quickstart)
            trials = _run(client, quickstart, figures)
    gaps = _further(trials)
    figures["further_trial_seconds"] = statistics.fmean(gaps)
    for name, value in figures.items():
        print(f"{name:28} {value:8.3f} s, bound {BOUNDS[name]:5.1f} s, ratio {value / BOUNDS[name]:.2f}")
    if quick:
        return 0
    median = {"further_trial_median_seconds": statistics.median(gaps)}
    keep("first_path", "python benchmarks/first_path.py", {"trials": len(trials), **figures, **median})
    return int(any(value > BOUNDS[name] for name, value in figures.items()))


def _answers(client: Client) -> bool:
    try:
        client.ready()
    except ApiError:
        return False
    return True


def _post_large(client: Client, quickstart: dict[str, Any]) -> float:
    """Posts 1,000 trials, then cancels them."""
    spec = quickstart | {
        "name": "large",
        "grid": {"rank": list(range(1, 101)), "seed": list(range(10))},
        "priority": -1,
    }
    began = time.perf_counter()
    experiment = client.submit(spec)
    seconds = time.perf_counter() - began
    client.cancel(experiment.id)
    return seconds


def _run(client: Client, quickstart: dict[str, Any], figures: dict[str, float]) -> list[Any]:
    began = time.perf_counter()
    experiment = client.submit(quickstart | {"max_concurrent_trials": 1})
    for state in client.watch(experiment.id, every=0.1):
        if state.progress.epochs_done and "first_epoch_seconds" not in figures:
            figures["first_epoch_seconds"] = time.perf_counter() - began
    return list(client.trials(experiment.id, state="succeeded"))


def _further(trials: list[Any]) -> list[float]:
    """Seconds between the ends of two trials that the later one did not spend in training and evaluation."""
    ordered = sorted(trials, key=lambda trial: trial.finished_at)
    return [
        (later.finished_at - earlier.finished_at).total_seconds()
        - later.result.train_seconds
        - later.result.eval_seconds
        for earlier, later in itertools.pairwise(ordered)
    ]


if __name__ == "__main__":
    sys.exit(main())
