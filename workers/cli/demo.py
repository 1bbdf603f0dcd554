"""`make demo`: an empty machine to a leaderboard in one command."""

import time

from rich.console import Console

from service.client import Client
from service.database import OPEN_EXPERIMENTS, ExperimentState
from service.errors import UserError
from service.schemas.experiments import ExperimentOut
from service.settings import Settings
from service.specs.versions import upgrade
from workers.cli.tables import LiveLine, duration, show_leaderboard
from workers.worker.single_machine import LocalStack


def run(settings: Settings, spec: dict[str, object], console: Console, spec_path: str) -> None:
    """Starts the stack on a free port, posts the spec, follows it, prints the leaderboard, stops everything.

    An unfinished experiment of the same spec (an earlier demo was interrupted) is followed instead of posted again.
    Raises `UserError` if not every trial succeeded.
    """
    began = time.monotonic()
    with LocalStack(settings, port=0) as stack, Client(stack.url) as client:
        console.print(f"API and worker start on {stack.url}; data and logs in {settings.data_dir}", soft_wrap=True)
        experiment = _unfinished(client, spec)
        if experiment is None:
            experiment = client.submit(spec)
            console.print(
                f"posted {spec_path} as experiment {experiment.id}: {experiment.grid_points} grid points, "
                f"{experiment.trial_count} different trials"
            )
        else:
            console.print(f"experiment {experiment.id} of an earlier demo was not finished; it goes on")
        try:
            with LiveLine(console) as line:
                for state in client.watch(experiment.id):
                    stack.tend()
                    for complaint in stack.complaints():
                        console.print(complaint, markup=False, highlight=False, soft_wrap=True)
                    line.show(state)
        except KeyboardInterrupt:
            console.print("stopping; the next demo goes on where this one was ...")
            raise
        experiment = state
        datasets = sorted({trial.config["dataset"] for trial in client.trials(experiment.id)})
        for dataset in datasets:
            show_leaderboard(console, client.leaderboard(dataset, experiment_id=experiment.id))
        console.print(f"{duration(time.monotonic() - began)} in all. The same by hand, once `make serve` is up:")
        for command in _by_hand(spec_path, experiment.id, datasets):
            console.print(f"  {command}", markup=False, highlight=False, soft_wrap=True)
        console.print("stopping ...")
    if experiment.state != ExperimentState.SUCCEEDED:
        raise UserError(f"experiment {experiment.id} is {experiment.state.value}: {experiment.error}")


def _unfinished(client: Client, spec: dict[str, object]) -> ExperimentOut | None:
    """The newest open experiment whose spec says what this one says."""
    spec = upgrade(spec)
    for state in OPEN_EXPERIMENTS:
        for experiment in client.experiments(state=state):
            if all(experiment.spec.get(name) == value for name, value in spec.items()):
                return experiment
    return None


def _by_hand(spec_path: str, experiment_id: int, datasets: list[str]) -> list[str]:
    url = "http://127.0.0.1:8000"
    return [
        f"curl -sS {url}/v1/experiments -H 'Content-Type: application/json' -d @{spec_path}",
        f"curl -sS {url}/v1/experiments/{experiment_id}",
        f"curl -sS '{url}/v1/experiments/{experiment_id}/trials?limit=5'",
        *(f"curl -sS '{url}/v1/leaderboards/{dataset}?experiment={experiment_id}'" for dataset in datasets),
    ]
