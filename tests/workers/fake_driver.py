"""A driver whose trials only sleep: `training.lr` is the length of an epoch in seconds.

The nearer `training.weight_decay` is to 0.3 the better they are. Some seeds misbehave, 1007 gets on within its epochs;
trials with seeds from 2000 on wait until two have begun, those from 3000 on, after an epoch, for the file that
`TRIALS_GATE` names. Each trial leaves its process id in `pid` and the epochs it trained in `trained`; the state that it
trains on, in its checkpoint and at last its network, is a hash chain: it shows every lost or doubled epoch.
"""

import hashlib
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

import ray

from ttsv.config.trial import TrialConfig
from ttsv.errors import DivergedError, OutOfMemoryError
from ttsv.results import EpochMetrics, StageProgress, TrialResult
from ttsv.runtime.headway import get_on
from workers.driver.__main__ import main


def run_trial(
    config: TrialConfig, *, data_dir: Path, folder: Path, source: Path | None = None
) -> Iterator[EpochMetrics | TrialResult | StageProgress]:
    (folder / "pid").write_text(str(os.getpid()))
    print("hello")
    good = 1 - abs(config.training.weight_decay - 0.3)
    checkpoint = folder / "checkpoint"
    done, chain = 0, hashlib.sha256(str(config.seed).encode()).hexdigest()
    if checkpoint.exists():
        number, chain = checkpoint.read_text().split()
        done = int(number)
    while 2000 <= config.seed < 3000 and len(list(folder.parents[1].glob("*/*/pid"))) < 2:
        time.sleep(0.05)
    if config.seed == 1001:
        raise DivergedError("the loss is nan")
    card = ray.get_runtime_context().get_assigned_resources().get("GPU", 0)  # type: ignore[no-untyped-call]
    with (folder / "cards").open("a") as file:
        file.write(f"{card:g}\n")
    (folder / "node").write_text(ray.get_runtime_context().get_node_id())
    if config.seed == 1006 or (config.seed == 1005 and 0 < card < 1):
        raise OutOfMemoryError("no room")
    if config.seed == 1002:
        raise RuntimeError("a bug")
    for epoch in range(done + 1, config.training.epochs + 1) if source is None else ():
        while config.seed >= 3000 and epoch > 1 and not Path(os.environ["TRIALS_GATE"]).exists():
            time.sleep(0.05)
        until = time.monotonic() + config.training.lr
        while config.seed == 1007 and time.monotonic() < until:
            time.sleep(0.05)
            get_on()
        time.sleep(3600 if config.seed == 1004 else max(0.0, until - time.monotonic()))
        chain = hashlib.sha256(f"{chain} {epoch}".encode()).hexdigest()
        with (folder / "trained").open("a") as file:
            file.write(f"{epoch}\n")
        metrics = EpochMetrics(
            epoch=epoch,
            epochs=config.training.epochs,
            train_loss=math.nan if config.seed == 1003 else 1.0,
            train_accuracy=0.5,
            val_loss=1.0,
            val_accuracy=good,
            ort_loss=None,
            lr=0.1,
            seconds=0.1,
            constraint_seconds=0.0,
        )
        try:
            yield metrics
        except GeneratorExit:  # its caller stops here: it has this epoch
            _save(checkpoint, f"{epoch} {chain}")
            raise
        _save(checkpoint, f"{epoch} {chain}")
    model = folder / "model"
    model.write_text(f"weights {chain}" if source is None else f"{source.read_text()}, again")
    yield StageProgress(stage="attack", done=1, total=2, seconds_left=3.0)
    yield TrialResult(
        accuracy=0.5,
        loss=1.0,
        ece=0.1,
        max_singular_value=1.0,
        compression=1.0,
        parameters=10,
        multiply_accumulates=100,
        train_seconds=1.0,
        constraint_seconds=0.0,
        step_seconds=0.1,
        constraint_step_seconds=0.0,
        eval_seconds=0.1,
        spectrum_seconds=0.01,
        latency_seconds=0.001,
        batch_seconds=0.05,
        peak_memory=None,
        selected_epoch=2,
        protocol={"split": "test"},
        environment={"device": "none"},
        layers=[],
        artifacts={"model": model},
    )


def _save(checkpoint: Path, text: str) -> None:
    partial = checkpoint.with_suffix(".partial")
    partial.write_text(text)
    partial.rename(checkpoint)


if __name__ == "__main__":
    main(run_trial)
