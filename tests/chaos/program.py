"""A worker whose trials carry a hash chain through their epochs, so that any lost, doubled or different epoch shows.

`python tests/chaos/program.py` is the worker; its drivers run the same file. An epoch is nothing but the next link:
the hash of the link before, which a checkpoint (of the kind that trainings have) carries from process to process, of
its own number, and of the data set that the process has read; every number that is reported is made of the link.
`python tests/chaos/program.py api` is the API. Settings come from the environment; clocks are as wrong as it says
(`tests.chaos.clocks`), and what is noted goes to the folder `CHAOS_NOTES` (`tests.chaos.notes`).
"""

import dataclasses
import hashlib
import itertools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.chaos import clocks, fences, images, notes
from ttsv.config.trial import TrialConfig
from ttsv.metrics.catalog import METRICS
from ttsv.results import CHECKPOINTS, EpochMetrics, TrialResult

if TYPE_CHECKING:
    from ttsv.training.checkpoint import Checkpoints

PROCESS = "process"
"""In a trial's folder: the id of the process that runs it."""


def first_link(seed: int, decay: float) -> str:
    """The chain before the first epoch, of all that tells a trial of chaos from another."""
    return hashlib.sha256(f"{seed} {decay!r}".encode()).hexdigest()


def next_link(link: str, epoch: int, seen: str) -> str:
    """The chain after one more epoch, of what was seen of the data set (`tests.chaos.images.seen`)."""
    return hashlib.sha256(f"{link} {epoch} {seen}".encode()).hexdigest()


def reported(link: str, name: str) -> float:
    """What the link makes of a number of this name: one in [0, 1) that any database stores exactly."""
    return int(hashlib.sha256(f"{link} {name}".encode()).hexdigest()[:13], 16) / 16**13


def epoch_of(link: str, epoch: int, epochs: int) -> EpochMetrics:
    """What the epoch reports that ends in this link: no two of its numbers are the same, in no two epochs."""
    names = (field.name for field in dataclasses.fields(EpochMetrics))
    numbers: dict[str, Any] = {
        name: reported(link, name) for name in names if name not in ("epoch", "epochs", "spectra")
    }
    return EpochMetrics(epoch=epoch, epochs=epochs, **numbers)


def result_of(link: str, epochs: int, artifacts: dict[str, Path]) -> TrialResult:
    """What a trial reports whose last epoch ends in this link, of every metric that all trials have."""
    numbers: dict[str, Any] = {
        name: int(reported(link, name) * 2**40) if metric.whole else reported(link, name)
        for name, metric in METRICS.items()
        if metric.presence != "optional"
    }
    return TrialResult(
        **numbers,
        selected_epoch=epochs,
        protocol={"split": "test"},
        environment={"device": "none", "link": link},
        layers=[],
        evaluation={"link": link},
        artifacts=artifacts,
    )


def checkpoints(config: TrialConfig, folder: Path) -> "Checkpoints":
    """Those of a trial in its folder."""
    from ttsv.training.checkpoint import Checkpoints  # brings torch, which drivers do without

    return Checkpoints(folder / CHECKPOINTS, {"seed": config.seed, "decay": config.training.weight_decay})


def run_trial(
    config: TrialConfig, *, data_dir: Path, folder: Path, source: Path | None = None
) -> Iterator[EpochMetrics | TrialResult]:
    """Goes on from the checkpoint, link by link; `training.lr` is the length of an epoch in seconds.

    As in every training an epoch is told of before its checkpoint is there: who dies between the two does it again.
    And the data set is read first of all, as trainings read theirs.
    """
    from ttsv.data import load_dataset  # as `checkpoints`

    data = load_dataset(config.dataset, data_dir)
    kept = checkpoints(config, folder)
    newest = max((int(path.stem) for path in kept.folder.glob("*.json")), default=0)
    state = kept.latest() or {"epoch": 0, "link": first_link(config.seed, config.training.weight_decay)}
    done, link = int(state["epoch"]), str(state["link"])
    (folder / PROCESS).write_text(str(os.getpid()))
    notes.note_start(folder, done, spoilt=done < newest)
    notes.note_seen(folder, images.seen(data))
    for epoch in range(done + 1, config.training.epochs + 1):
        time.sleep(config.training.lr)
        link = next_link(link, epoch, images.seen(data))
        notes.note_epoch(folder, epoch)
        yield epoch_of(link, epoch, config.training.epochs)
        kept.save(epoch, {"epoch": epoch, "link": link})
    model = folder / "model"
    model.write_text(link)
    yield result_of(link, config.training.epochs, {"model": model})


def _drive() -> None:
    from workers.driver.__main__ import main

    main(run_trial)


def _work() -> None:
    import logging

    from service.database.engine import Database
    from service.settings import Settings
    from workers.worker.poller import Worker

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    settings = Settings()
    driver = (sys.executable, str(Path(__file__)), "driver")
    Worker(settings, Database(settings.url), driver=driver).run()


def _serve() -> None:
    from workers.cli.__main__ import main

    main()


if __name__ == "__main__":
    role = sys.argv[1] if len(sys.argv) > 1 else "worker"
    if role == "api":
        clocks.put_off(os.environ[clocks.WHO])
        _serve()
        sys.exit()
    if fences.UNFENCED in os.environ:
        fences.weaken()
    fences.watch()
    if role == "driver":
        del sys.argv[1]
        said = {name: value for name, value in itertools.pairwise(sys.argv) if name in ("--experiment", "--fence")}
        clocks.put_off(clocks.driver(said["--experiment"], said["--fence"]))
        _drive()
    else:
        clocks.put_off(os.environ[clocks.WHO])
        _work()
