"""How an evaluation was measured: what decides whether two numbers may be compared."""

import hashlib
import json
from typing import Any

from ttsv.data.loading import Dataset
from ttsv.evaluation.evidence import Evidence
from ttsv.metrics.attack_record import AttackRecord
from ttsv.metrics.corruption import CorruptionRecord

ECE_BINS = 15
LIPSCHITZ_RADIUS = 0.5
"""Of the search for empirical constants, in its space: the paper's."""
ASCENT_STEPS = 20


def evaluation_protocol(
    data: Dataset, preprocessing: dict[str, Any], evidence: Evidence, seed: int, precision: str
) -> dict[str, Any]:
    """The protocol of an evaluation's numbers, JSON-ready; `ttsv.records` adds how the network was trained.

    It holds what changes what a number means: the images (data set, its SHA-256, split, how many for each metric),
    the preprocessing, the threat model, the attack's package and version, how certificates are made, where corrupted
    images come from, precision and seed. Left out, and recorded beside it, is what only says where it was computed and
    leaves the meaning as it is: device, versions of other packages, git revision and dirty flag, threads, and
    the attack's batch size, which like the device draws other random numbers and nothing more.
    Radii are not in it either: every certified accuracy names its own.
    """
    count = len(evidence.labels)
    images: dict[str, int] = {"accuracy": count, "calibration": count, "temperature": len(data.validation.labels)}
    protocol: dict[str, Any] = {
        "dataset": data.info.name,
        "dataset_sha256": data.sha256,
        "split": {**data.split, "evaluated": "test"},
        "preprocessing": {"pixels": "[0, 1]", **preprocessing},
        "metrics": {
            "accuracy": "top-1",
            "loss": "mean cross-entropy, nats",
            "ece": {"bins": ECE_BINS, "edges": "equal width, right-closed"},
            "temperature": "least loss on the validation images",
        },
        "images": images,
        "precision": precision,
    }
    if evidence.attacks:
        images |= {name: len(attack.robust) for name, attack in evidence.attacks.items()}
        protocol["attacks"] = {name: _attack(attack) for name, attack in evidence.attacks.items()}
    if evidence.bound is not None:
        protocol["certificates"] = "L2, pixels: product of rigorous bounds of every layer, float64"
    if evidence.certificates is not None:
        images["certified"] = len(evidence.certificates.radii)
    if evidence.lipschitz:
        images["lipschitz"] = len(evidence.lipschitz[0].values)
        protocol["lipschitz"] = {
            "radius": LIPSCHITZ_RADIUS,
            "norm": "L2",
            "methods": sorted({one.method for one in evidence.lipschitz}),
            "ascent_steps": ASCENT_STEPS,
            "seed": seed,
        }
    if evidence.corruption is not None:
        images["corruptions"] = evidence.corruption.protocol["images"]
        protocol["corruptions"] = _corruptions(evidence.corruption)
    return protocol


def _attack(attack: AttackRecord) -> dict[str, Any]:
    left_out = ("batch_size", "images")
    return {name: value for name, value in attack.protocol().items() if name not in left_out}


def _corruptions(record: CorruptionRecord) -> dict[str, Any]:
    """Published files by one SHA-256 over theirs; generated ones by what they were made of, and with."""
    found = {name: value for name, value in record.protocol.items() if name not in ("files", "images")}
    if found["corruptions"] == "published":
        text = json.dumps(record.protocol["files"], sort_keys=True)
        found["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    return found
