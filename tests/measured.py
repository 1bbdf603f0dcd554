"""A trial of which everything was measured: its evaluation's record, its layers, its attempts; in made-up numbers."""

import math
import random
from datetime import timedelta
from typing import Any

from sqlalchemy.orm import Session

from service.database import Artifact, Attempt, Environment, EpochSpectra, Result, Trial, now
from service.database.experiments import StoredSpectra
from ttsv.data.corruptions import KINDS

ATTEMPTS = 2


def evaluation(accuracy: float = 0.9, images: int = 10_000) -> dict[str, Any]:
    """The record of an evaluation that was asked for everything, as `ttsv.evaluation.summary.results` makes it."""
    rng = random.Random(2)
    certified = {f"{radius:.15g}": accuracy * math.exp(-2.2 * radius) for radius in (36 / 255, 72 / 255, 108 / 255, 1)}
    return {
        "images": images,
        "accuracy": accuracy,
        "calibration": {
            "bins": 15,
            "images": images,
            "raw": _calibration(accuracy, 0.05, images),
            "validation_images": 5000,
            "temperature": 1.234,
            "scaled": _calibration(accuracy, 0.012, images),
        },
        "attacks": {
            "pgd": _attack("L2", 0.5, accuracy * 0.62, images),
            "autoattack": _attack("Linf", 8 / 255, accuracy * 0.41, images),
        },
        "certified": {
            "bound": 11.4,
            "pairs_by": "rows",
            "factors": [],
            "accuracy": certified,
            "median_radius": 0.21,
            "assumed_1_lipschitz": {radius: min(accuracy, 1.2 * share) for radius, share in certified.items()},
        },
        "lipschitz": [
            _search(space, method, mean, bound, images)
            for space, bound in (("pixels", 11.4), ("normalised", 2.9))
            for method, mean in (("fgsm", 0.13 * bound), ("ascent", 0.19 * bound))
        ],
        "corruptions": {
            "mean": accuracy - 0.22,
            "table": {
                kind: [
                    accuracy * (1 - (0.02 + 0.03 * index % 0.11) * severity) - 0.01 * rng.random() for severity in _FIVE
                ]
                for index, kind in enumerate(KINDS)
            },
            "mce": 0.81,
        },
        "seconds": {"accuracy": 1.0},
    }


_FIVE = range(1, 6)


def layers(count: int = 8, delta: float = 1.0) -> list[dict[str, Any]]:
    """Records of convolutions whose largest singular values are `delta`."""
    return [
        {
            "name": f"features.{3 * index}",
            "kind": "TTConv2d",
            "shape": {"k1": [16, 3], "core": [16, 16, 3, 3], "k3": [64, 16]},
            "input_size": [32, 32],
            "largest": delta,
            "smallest": 0.02 * index,
            "quantiles": [0.02 * index, *(delta * share for share in (0.2, 0.4, 0.6, 0.8, 0.95, 1.0))],
            "largest_before_projection": delta * (1.1 + 0.05 * index),
            "projection": {"before": delta * 1.1, "after": delta, "smallest": None, "measure": "periodic norm"},
        }
        for index in range(count)
    ]


def spectra(session: Session, trial_id: int, epochs: int = 80, every: int = 5, count: int = 8) -> None:
    """What a trial's layers had while it trained: values that grow until they are clipped."""
    seen = [1, *(epoch for epoch in range(every, epochs + 1, every) if epoch > 1)]
    for epoch in seen:
        values, before = [], []
        for index in range(count):
            top = 1 - 0.6 * math.exp(-epoch / (6 + 3 * index))
            grown = [top * share**1.5 for share in (0.02, 0.16, 0.37, 0.58, 0.78, 0.93, 1.0)]
            values.append([min(1.0, 1.08 * value) for value in grown])
            before.append([value * (1.1 + 0.01 * index) for value in grown])
        names = [f"features.{3 * index}" for index in range(count)]
        stored: StoredSpectra = {"names": names, "values": values, "before": [*before]}
        session.add(EpochSpectra(trial_id=trial_id, epoch=epoch, layers=stored))


def attempts(session: Session, trial_id: int, points: int = 120) -> None:
    """Two attempts of a trial: the first was killed, each was sampled."""
    record = {"torch": "2.9.1", "git_revision": "4f" * 20, "git_dirty": True, "cpu": "EPYC", "gpus": ["NVIDIA H100"]}
    if session.get(Environment, "e" * 64) is None:
        session.add(Environment(fingerprint="e" * 64, record=record))
        session.flush()
    for number in range(1, ATTEMPTS + 1):
        seconds = [2.0 * index for index in range(points // (3 - number))]
        session.add(
            Attempt(
                trial_id=trial_id,
                number=number,
                fence=number,
                started_at=now() - timedelta(hours=3 - number),
                place=f"gpu{number}, GPU 0",
                environment="e" * 64,
                resources={
                    "interval": 2.0,
                    "seconds": seconds,
                    "cpu": [100 + 20 * math.sin(at / 30) for at in seconds],
                    "memory": [900 + 400 * (1 - math.exp(-at / 20)) for at in seconds],
                    "gpu": [None if at < 6 else 80 + 15 * math.sin(at / 9) for at in seconds],
                    "gpu_memory": [None if at < 6 else 2048.0 for at in seconds],
                },
            )
        )


def file(session: Session, trial_id: int, kind: str = "model", name: str = "model.safetensors") -> None:
    """A file of a trial, in the manifest alone."""
    path = f"trials/{trial_id}/1/{name}"
    session.add(Artifact(trial_id=trial_id, kind=kind, path=path, sha256="0" * 64, size=4_200_000))


def changes(accuracy: float = 0.9) -> dict[str, Any]:
    """What `tests.grids.finish` puts into a result so that every tab has something."""
    return {"evaluation": evaluation(accuracy), "layers": layers(), "environment": {"torch": "2.9.1"}}


def dress(session: Session, trial_id: int) -> None:
    """Gives a trial that has succeeded what every tab shows."""
    trial, result = session.get(Trial, trial_id), session.get(Result, trial_id)
    assert trial is not None
    assert result is not None
    found = changes(result.accuracy)
    result.evaluation, result.layers, result.environment = found["evaluation"], found["layers"], found["environment"]
    attempts(session, trial_id)
    spectra(session, trial_id)
    file(session, trial_id)


def _attack(norm: str, eps: float, left: float, images: int) -> dict[str, Any]:
    return {"norm": norm, "eps": eps, "images": images, "clean_accuracy": 0.9, "robust_accuracy": left, "seconds": 1.0}


def _search(space: str, method: str, mean: float, bound: float, images: int) -> dict[str, Any]:
    edges = [mean * (0.3 + 2.2 * index / 50) for index in range(51)]
    counts = [round(images / 9 * math.exp(-(((edge / mean - 1) / 0.35) ** 2))) for edge in edges[1:]]
    found = {"space": space, "method": method, "norm": "L2", "radius": 0.5, "bound": bound, "images": images}
    return found | {"maximum": edges[-1], "mean": mean, "histogram": {"counts": counts, "edges": edges}}


def _calibration(accuracy: float, ece: float, images: int) -> dict[str, Any]:
    edges = [index / 15 for index in range(16)]
    count = [0, 0, *(round(images * 2.0 ** (index - 13) / 2) for index in range(2, 15))]
    confidence = [(edges[index] + edges[index + 1]) / 2 if count[index] else None for index in range(15)]
    right = [None if value is None else max(0.0, value - ece * (2 - value)) for value in confidence]
    diagram = {"edges": edges, "count": count, "confidence": confidence, "accuracy": right}
    values = {"ece": ece, "mce": 2 * ece, "adaptive_ece": ece, "nll": 1.2 - accuracy, "brier": 0.1}
    return values | {"reliability": diagram}
