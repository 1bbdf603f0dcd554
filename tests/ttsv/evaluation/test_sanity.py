"""What cannot be true is found image by image, and marks the result invalid."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from ttsv.certification.certificates import LipschitzBound, certificates, lipschitz_bound
from ttsv.config.trial import TrialConfig
from ttsv.data import load_dataset
from ttsv.data.loading import as_pixels
from ttsv.evaluation.evidence import Evidence
from ttsv.evaluation.sanity import Violation, checks, find_violations
from ttsv.metrics.attacks.pgd import pgd
from ttsv.metrics.calibration import calibration_record
from ttsv.metrics.lipschitz import empirical_lipschitz
from ttsv.results import TrialResult
from ttsv.trial import run_trial


@pytest.fixture(scope="module")
def evidence(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    """A linear classifier of digits and everything about it, all of it right."""
    data = load_dataset("digits", tmp_path_factory.mktemp("data"))
    images, labels = as_pixels(data.test.images[:60]), data.test.labels[:60]
    train, targets = data.train.images.flatten(1).double(), data.train.labels
    one_hot = torch.nn.functional.one_hot(targets, 10).double()
    ridge = torch.linalg.solve(train.T @ train + 0.1 * torch.eye(64, dtype=torch.float64), train.T @ one_hot)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=False))
    with torch.no_grad():
        model.get_parameter("1.weight").copy_(ridge.T)
        logits = model(images)
    bound = lipschitz_bound(model, 8, in_channels=1)
    return Evidence(
        images=images,
        labels=labels,
        logits=logits,
        calibration=calibration_record(logits, labels),
        attacks={"pgd": pgd(model, images[:40], labels[:40], eps=0.5, steps=30)},
        bound=bound,
        certificates=certificates(model, images, labels, bound=bound),
        lipschitz=[empirical_lipschitz(model, images, labels, method=method) for method in ("fgsm", "ascent")],
    )


def one(found: list[Violation], text: str) -> Violation:
    (violation,) = found
    assert text in violation.text
    return violation


def test_right_numbers_contradict_nothing(evidence: Evidence) -> None:
    assert evidence.certificates is not None
    attack = evidence.attacks["pgd"]
    # The attack finds some, and the certificate holds for some: the check has something to compare.
    assert 0 < len(attack.adversarial_indices) < 40
    assert (evidence.certificates.radii > 0.05).any()
    assert find_violations(evidence) == []
    assert find_violations(replace(evidence, certificates=None, bound=None)) == []


def test_what_is_checked_is_said(evidence: Evidence) -> None:
    assert checks(evidence) == [
        "calibration errors are in [0, 1]",
        "certified images are classified as labelled (60 images)",
        "images that withstand pgd are classified as labelled (40 images)",
        "pgd breaks no image within the radius for which it is certified (40 images)",
        "empirical Lipschitz constants (fgsm, pixels) are at most the bound (60 images)",
        "empirical Lipschitz constants (ascent, pixels) are at most the bound (60 images)",
    ]
    # Without a bound or a certificate nothing is checked against them.
    assert checks(replace(evidence, bound=None, certificates=None)) == [
        "calibration errors are in [0, 1]",
        "images that withstand pgd are classified as labelled (40 images)",
    ]


def test_a_bound_that_is_too_small_is_found_where_an_attack_breaks_it(evidence: Evidence) -> None:
    right, attack = evidence.certificates, evidence.attacks["pgd"]
    assert right is not None
    wrong = replace(evidence, certificates=replace(right, radii=right.radii * 100))
    violation = one(find_violations(wrong), "pgd broke")
    moved = (attack.adversarial_images - evidence.images[attack.adversarial_indices]).flatten(1).double().norm(dim=1)
    expected = attack.adversarial_indices[right.radii[attack.adversarial_indices] * 100 > moved]
    assert violation.images == tuple(expected.tolist())
    assert violation.found is not None
    assert len(violation.found) == len(expected) > 0
    assert f"broke {len(expected)} images within" in violation.text


def test_one_certificate_beyond_what_broke_its_image_is_enough(evidence: Evidence) -> None:
    right, attack = evidence.certificates, evidence.attacks["pgd"]
    assert right is not None
    place = int(attack.adversarial_indices[0])
    moved = float((attack.adversarial_images[0] - evidence.images[place]).double().norm())
    for radius, found in ((moved * (1 + 1e-4), (place,)), (moved * (1 - 1e-4), None)):
        radii = right.radii.clone()
        radii[place] = radius
        violations = find_violations(replace(evidence, certificates=replace(right, radii=radii)))
        assert ([v.images for v in violations]) == ([found] if found else [])


def test_what_is_robust_or_certified_is_correct(evidence: Evidence) -> None:
    labels = evidence.labels.clone()
    robust = evidence.attacks["pgd"].robust.nonzero()[:, 0].tolist()
    labels[robust[1]] = (labels[robust[1]] + 1) % 10
    found = find_violations(replace(evidence, labels=labels, certificates=None))
    assert one(found, "withstand pgd but are misclassified").images == (robust[1],)
    assert evidence.certificates is not None
    certified = int((evidence.certificates.radii > 0).nonzero()[-1])  # beyond the images that were attacked
    assert certified >= 40
    labels = evidence.labels.clone()
    labels[certified] = (labels[certified] + 1) % 10
    found = find_violations(replace(evidence, labels=labels))
    assert one(found, "are certified but are misclassified").images == (certified,)


def test_what_is_certified_is_not_lost_unbroken(evidence: Evidence) -> None:
    certified, attack = evidence.certificates, evidence.attacks["pgd"]
    assert certified is not None
    place = int((attack.robust & (certified.radii[:40] > 0)).nonzero()[-1])
    robust = attack.robust.clone()
    robust[place] = False
    wrong = replace(evidence, attacks={"pgd": replace(attack, robust=robust)})
    assert one(find_violations(wrong), "are certified but pgd counts them as misclassified").images == (place,)
    # A tie may be lost in batches of another size.
    margins = certified.margins.clone()
    margins[place] = 1e-6
    assert find_violations(replace(wrong, certificates=replace(certified, margins=margins))) == []


def test_a_tie_is_no_contradiction(evidence: Evidence) -> None:
    place = int(evidence.attacks["pgd"].robust.nonzero()[0])
    logits = evidence.logits.clone()
    logits[place] = 0
    logits[place, 1] = 1.0
    logits[place, int(evidence.labels[place])] = 1.0 - 1e-6
    assert find_violations(replace(evidence, logits=logits)) == []


def test_constants_above_their_bound(evidence: Evidence) -> None:
    bound = evidence.bound
    assert bound is not None
    values: list[Tensor] = [found.values for found in evidence.lipschitz]
    between = (float(values[0].max()) + float(values[1].max())) / 2
    assert values[0].max() < between < values[1].max()
    wrong = replace(evidence, bound=replace(bound, value=between), certificates=None)
    violation = one(find_violations(wrong), "(ascent, pixels) is above the bound")
    assert violation.images == tuple((values[1] > between).nonzero()[:, 0].tolist())
    # In coordinates normalised by a std of 0.25 each constant and the bound are a quarter as large.
    for unit in (0.25, 0.2):
        elsewhere = [
            replace(found, space="normalised", values=found.values / 4, maximum=found.maximum / 4, longest_unit=unit)
            for found in evidence.lipschitz
        ]
        text = f"(ascent, normalised) is above the bound {between * unit:.6g}"
        found = find_violations(replace(wrong, lipschitz=elsewhere))
        assert found
        assert text in found[-1].text
        assert found[-1].images == tuple((values[1] / 4 > between * unit).nonzero()[:, 0].tolist())


@pytest.mark.parametrize(("measure", "value"), [("ece", 1.5), ("mce", -0.1), ("adaptive_ece", 2.0)])
def test_calibration_errors_are_between_0_and_1(evidence: Evidence, measure: str, value: float) -> None:
    calibration = evidence.calibration
    changed: dict[str, Any] = {measure: value}
    wrong = replace(calibration, raw=replace(calibration.raw, **changed))
    found = find_violations(replace(evidence, calibration=wrong))
    assert one(found, f"calibration error {measure} (raw) {value} is outside [0, 1]").images == ()


@pytest.mark.slow
def test_an_invalid_trial_says_so_and_keeps_the_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deliberately wrong bound, injected."""

    def wrong(*arguments: Any, **options: Any) -> LipschitzBound:
        found = lipschitz_bound(*arguments, **options)
        pairs = None if found.pairs is None else found.pairs * 1e-6
        return replace(found, value=found.value * 1e-6, pairs=pairs)

    monkeypatch.setattr("ttsv.evaluation.stages.lipschitz_bound", wrong)
    evaluation = {"attack": "pgd", "attack_images": 30, "certified": True, "lipschitz": "fgsm", "lipschitz_images": 7}
    config = TrialConfig.from_dict(
        {"dataset": "digits", "model": "small-cnn", "training": {"epochs": 1}, "evaluation": evaluation}
    )
    *_, result = run_trial(config, data_dir=tmp_path / "data", folder=tmp_path / "trial", device="cpu")
    assert isinstance(result, TrialResult)
    assert not result.valid
    broken, steep, normalised = result.violations
    assert "pgd broke" in broken
    assert "empirical Lipschitz constant" in steep
    assert "(fgsm, normalised) is above the bound" in normalised
    with safe_open(result.artifacts["violations"], "pt") as file:
        assert file.metadata() == {"0": broken, "1": steep, "2": normalised}
        places, adversarial = file.get_tensor("0.places"), file.get_tensor("0.adversarial")
        images = file.get_tensor("0.images")
        assert len(file.get_tensor("1.places")) == 7
    test = as_pixels(load_dataset("digits", tmp_path / "data").test.images)
    assert torch.equal(images, test[places])
    assert adversarial.shape == images.shape
    assert ((adversarial - images).flatten(1).norm(dim=1) <= 0.5 + 1e-6).all()
