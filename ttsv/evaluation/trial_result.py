"""The evaluation of a trial's network: from what was measured to the trial's result and files."""

import time
from collections.abc import Generator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ttsv.config.trial import TrialConfig
from ttsv.data.loading import Dataset
from ttsv.evaluation.evaluated import NetworkCost, evaluate_network
from ttsv.evaluation.saved import load_saved
from ttsv.evaluation.subject import EvaluationOptions, Subject
from ttsv.models import create_model
from ttsv.results import CHECKPOINTS, StageProgress, TrialResult
from ttsv.runtime.work_time import WorkTime, timed
from ttsv.training.checkpoint import load_weights, save_model
from ttsv.training.network import TrainedNetwork, model_arguments
from ttsv.training.record import describe_training, read_training

ATTACK_STATE = "autoattack.safetensors"
"""In the folder of checkpoints: what AutoAttack has found so far."""


def take_network(source: Path, config: TrialConfig, data: Dataset, *, device: torch.device) -> TrainedNetwork:
    """The network that another trial left in `source`, its `model.safetensors`.

    Raises `DataError` where it is not the network that the canonical `config` describes.
    """
    arguments = model_arguments(config, data)
    facts = read_training(source, config, arguments, data)
    return TrainedNetwork(model=load_saved(source, device=device), arguments=arguments, facts=facts)


def evaluate_trial(
    config: TrialConfig, data: Dataset, network: TrainedNetwork, *, folder: Path, datasets: Path
) -> Generator[StageProgress, None, TrialResult]:
    """Evaluates a trial's network as the canonical `config` says; yields where it is.

    The network and all files go to the trial's `folder`; `datasets` is the folder of the data sets.
    """
    spent = WorkTime()
    subject = Subject(
        model=network.model,
        data=data,
        mean=network.arguments.mean,
        std=network.arguments.std,
        trained=config,
        report=network.report,
        said=network.facts.said,
    )
    options = EvaluationOptions(
        config=config.evaluation,
        folder=datasets,
        state=folder / CHECKPOINTS / ATTACK_STATE,
        renew_state=True,
        layers=True,
    )
    found = yield from timed(evaluate_network(subject, options), spent)
    began = time.perf_counter()
    assert found.cost is not None
    assert found.layers is not None
    layers = network.facts.with_projections(found.layers.records)
    facts = network.facts if network.report is None else replace(network.facts, layers=layers)
    model = save_model(folder, network.model, asdict(network.arguments), **describe_training(config, data, facts))
    kept = {} if network.best_weights is None else {"best-model": _save_best(folder, config, data, network)}
    files = found.write(folder, title=f"{config.model} on {config.dataset}")
    columns: dict[str, Any] = {**found.measured.columns, **facts.columns(), **_inference_seconds(found.cost)}
    return TrialResult(
        **columns,
        max_singular_value=max(layer.largest for layer in layers if layer.input_size),
        compression=found.cost.compression,
        parameters=found.cost.parameters,
        multiply_accumulates=found.cost.multiply_accumulates,
        eval_seconds=spent.seconds + time.perf_counter() - began,
        spectrum_seconds=found.layers.seconds,
        spectrum_memory=found.layers.memory,
        protocol=found.measured.protocol,
        environment={**found.environment, "trained_on": list(facts.trained_on)},
        layers=[layer.to_dict() for layer in layers],
        valid=not found.violations,
        violations=found.violations,
        evaluation=found.measured.results,
        artifacts={"model": model} | kept | files,
    )


def _save_best(folder: Path, config: TrialConfig, data: Dataset, network: TrainedNetwork) -> Path:
    """Writes the best epoch's network beside the last one's, and returns its file.

    It is described as that of a trial that selects it: by its own epoch, and without what was done to the last one's.
    """
    assert network.best_weights is not None
    with torch.random.fork_rng(devices=[]):
        best = create_model(**asdict(network.arguments))
    load_weights(best, network.best_weights)
    said = {subject: words for subject, words in network.facts.said.items() if subject != "kept"}
    if "projection" in said and network.best_epoch != network.facts.selected_epoch:
        said["projection"] = "what its epoch left was kept as it was"
    facts = replace(network.facts, selected_epoch=network.best_epoch, layers=(), said=said)
    chosen = replace(config, training=replace(config.training, select="best", keep_best=False))
    told = describe_training(chosen, data, facts)
    return save_model(folder, best, asdict(network.arguments), name="best", **told)


def _inference_seconds(cost: NetworkCost) -> dict[str, float]:
    """By column: of 1 and of 128 images, as the network is and, where it has frames to merge, with them merged."""
    names = {1: "latency_seconds", 128: "batch_seconds"}
    return {("merged_" if one.merged else "") + names[one.count]: one.seconds for one in cost.inference}
