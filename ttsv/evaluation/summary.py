"""From what was found to numbers: the typed columns of a result, and its whole record."""

import math
from collections.abc import Sequence
from dataclasses import asdict

from ttsv.certification.certificates import LipschitzBound, assumed_certified_accuracy, shares_beyond
from ttsv.config.evaluation import EvaluationConfig
from ttsv.config.fields import JsonObject
from ttsv.evaluation.baseline import Baseline
from ttsv.evaluation.evidence import Evidence
from ttsv.evaluation.sanity import checks
from ttsv.metrics.accuracy import accuracy, cross_entropy, top_accuracy
from ttsv.metrics.attacks.record import AttackRecord
from ttsv.metrics.catalog import CERTIFIED_RADII
from ttsv.metrics.lipschitz import EmpiricalLipschitz

HISTOGRAM_BINS = 50


def columns(evidence: Evidence, baseline: Baseline | None) -> dict[str, float | None]:
    """`ttsv.evaluation.stages.Measured.columns`."""
    raw, scaled, bound = evidence.calibration.raw, evidence.calibration.scaled, evidence.bound
    robust = {name: attack.robust_accuracy for name, attack in evidence.attacks.items()}
    corruption = evidence.corruption
    found: dict[str, float | None] = {
        "accuracy": accuracy(evidence.logits, evidence.labels),
        "loss": cross_entropy(evidence.logits, evidence.labels),
        "ece": raw.ece,
        "top5_accuracy": top_accuracy(evidence.logits, evidence.labels),
        "max_calibration_error": raw.mce,
        "adaptive_ece": raw.adaptive_ece,
        "brier": raw.brier,
        "temperature": evidence.calibration.temperature,
        "scaled_ece": scaled.ece if scaled else None,
        "scaled_loss": scaled.nll if scaled else None,
        "robust_accuracy": robust.get("autoattack"),
        "pgd_accuracy": robust.get("pgd"),
        "attack_seconds": sum(attack.seconds for attack in evidence.attacks.values()) if robust else None,
        "corruption_accuracy": corruption.mean if corruption else None,
        "mce": baseline.compare(corruption)[0] if baseline and corruption else None,
        "lipschitz_bound": bound.value if bound else None,
        "lipschitz_fgsm": _largest(evidence, "fgsm", "normalised"),
        "lipschitz_ascent": _largest(evidence, "ascent", "pixels"),
    }
    certified = _certified(evidence, tuple(CERTIFIED_RADII.values()))
    found |= {name: certified.get(radius) for name, radius in CERTIFIED_RADII.items()}
    assumed = _assumed(evidence, tuple(CERTIFIED_RADII.values()))
    found |= {f"assumed_{name}": assumed.get(radius) for name, radius in CERTIFIED_RADII.items() if radius < 1}
    return found | evidence.numbers


def results(evidence: Evidence, config: EvaluationConfig, baseline: Baseline | None) -> JsonObject:
    """`ttsv.evaluation.stages.Measured.results`: what was asked for, JSON-ready, with all checks and stages' seconds.

    The median radius is None where it is infinite: a constant network is certified at any distance.
    """
    found: JsonObject = {
        "images": len(evidence.labels),
        "accuracy": accuracy(evidence.logits, evidence.labels),
        "top5_accuracy": top_accuracy(evidence.logits, evidence.labels),
        "loss": cross_entropy(evidence.logits, evidence.labels),
        "calibration": asdict(evidence.calibration),
    }
    if evidence.attacks:
        found["attacks"] = {name: _attack(attack) for name, attack in evidence.attacks.items()}
    if config.certified or config.lipschitz_methods:
        found["certified"] = _certificates(evidence, config)
    if evidence.lipschitz:
        found["lipschitz"] = [_empirical(one, evidence.bound) for one in evidence.lipschitz]
    if evidence.corruption is not None:
        corruptions = asdict(evidence.corruption)
        if baseline is not None:
            value, why = baseline.compare(evidence.corruption)
            corruptions |= {"mce": value, "why_no_mce": why, "baseline_sha256": baseline.sha256}
        found["corruptions"] = corruptions
    return found | evidence.numbers | {"checks": checks(evidence), "seconds": evidence.seconds}


def _attack(attack: AttackRecord) -> JsonObject:
    return {
        **attack.protocol(),
        "clean_accuracy": attack.clean_accuracy,
        "robust_accuracy": attack.robust_accuracy,
        "largest_perturbation": attack.largest_perturbation,
        "counts": {name: asdict(counts) for name, counts in attack.counts.items()},
        "warnings": list(attack.warnings),
        "seconds": attack.seconds,
        "adversarial_indices": attack.adversarial_indices.tolist(),
    }


def _certificates(evidence: Evidence, config: EvaluationConfig) -> JsonObject:
    if evidence.bound is None:
        found: JsonObject = {"bound": None, "why": evidence.no_bound}
    else:
        factors = [asdict(factor) for factor in evidence.bound.factors]
        found = {"bound": evidence.bound.value, "pairs_by": evidence.bound.pairs_by, "factors": factors}
    if evidence.certificates is not None:
        found["accuracy"] = _named(_certified(evidence, config.radii))
        median = float(evidence.certificates.radii.median())
        found["median_radius"] = median if math.isfinite(median) else None
    if assumed := _assumed(evidence, config.radii):
        found["assumed_1_lipschitz"] = _named(assumed)
        steepest = max((one.maximum for one in evidence.lipschitz if one.space == "normalised"), default=0.0)
        found["assumption_refuted_by"] = steepest if steepest > 1 + 1e-6 else None
    return found


def _certified(evidence: Evidence, radii: Sequence[float]) -> dict[float, float]:
    if evidence.certificates is None:
        return {}
    return shares_beyond(evidence.certificates.radii, radii)


def _assumed(evidence: Evidence, radii: Sequence[float]) -> dict[float, float]:
    if evidence.assumed_lipschitz is None or not radii:
        return {}
    return assumed_certified_accuracy(evidence.logits, evidence.labels, radii, evidence.assumed_lipschitz)


def _named(values: dict[float, float]) -> dict[str, float]:
    return {f"{radius:.15g}": value for radius, value in values.items()}


def _empirical(one: EmpiricalLipschitz, bound: LipschitzBound | None) -> JsonObject:
    counts, edges = one.histogram(HISTOGRAM_BINS)
    return {
        "space": one.space,
        "method": one.method,
        "norm": one.norm,
        "radius": one.radius,
        "bound": None if bound is None else bound.value * one.longest_unit,
        "images": len(one.values),
        "maximum": one.maximum,
        "mean": float(one.values.mean()),
        "histogram": {"counts": counts, "edges": edges},
    }


def _largest(evidence: Evidence, method: str, space: str) -> float | None:
    return next((one.maximum for one in evidence.lipschitz if (one.method, one.space) == (method, space)), None)
