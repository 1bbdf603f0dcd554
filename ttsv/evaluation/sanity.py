"""What cannot be true of right numbers, looked for image by image in every evaluation."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ttsv.data.loading import as_pixels
from ttsv.evaluation.evidence import Evidence
from ttsv.metrics.attacks.record import perturbation

_TIE = 1e-4
"""Logits closer than this share of the largest are a tie: batches of other sizes are rounded otherwise."""
_ROUNDING = 1e-6
"""Of distances and ratios that are compared with bounds."""


@dataclass(frozen=True, kw_only=True)
class Violation:
    """`text` says what cannot be true, `images` of which (their places among the test images; empty: of the whole).

    `found` (len(images), channels, ...): what an attack made of them, where it is about that.
    """

    text: str
    images: tuple[int, ...] = ()
    found: Tensor | None = None


def find_violations(evidence: Evidence) -> list[Violation]:
    """Everything that contradicts itself; with one violation no number of the evaluation may be used.

    Certified implies correct, in an attack's own count too, and not broken by any attack nearer than the certified
    radius (L2, whatever the attack's own norm: so at the attack's radius, too); withstanding an attack implies correct;
    an empirical Lipschitz constant is at most the bound in its space; calibration errors are in [0, 1].
    """
    return [*_wrong(evidence), *_broken(evidence), *_lost(evidence), *_steep(evidence), *_miscalibrated(evidence)]


def checks(evidence: Evidence) -> list[str]:
    """What `find_violations` had to look at, in words: a check without its metrics is none."""
    attacks, certificates = evidence.attacks, evidence.certificates
    found = ["calibration errors are in [0, 1]"]
    if certificates is not None:
        found.append(f"certified images are classified as labelled ({len(certificates.radii)} images)")
    for name, attack in attacks.items():
        found.append(f"images that withstand {name} are classified as labelled ({len(attack.robust)} images)")
        if certificates is not None:
            count = min(len(attack.robust), len(certificates.radii))
            found.append(f"{name} breaks no image within the radius for which it is certified ({count} images)")
    if evidence.bound is not None:
        for one in evidence.lipschitz:
            what = f"empirical Lipschitz constants ({one.method}, {one.space}) are at most the bound"
            found.append(f"{what} ({len(one.values)} images)")
    return found


def _wrong(evidence: Evidence) -> Iterator[Violation]:
    """Images that the network gets wrong, by more than rounding, though a metric counts them as right."""
    logits, labels = evidence.logits.cpu().double(), evidence.labels.cpu()
    lost = logits.amax(1) - logits.gather(1, labels[:, None])[:, 0]
    wrong = lost > _TIE * logits.abs().amax(1)
    claims: list[tuple[str, Tensor]] = [(f"withstand {name}", found.robust) for name, found in evidence.attacks.items()]
    if evidence.certificates is not None:
        claims.append(("are certified", evidence.certificates.radii > 0))
    for claim, claimed in claims:
        if (both := claimed & wrong[: len(claimed)]).any():
            yield Violation(text=f"{int(both.sum())} images {claim} but are misclassified", images=_places(both))


def _broken(evidence: Evidence) -> Iterator[Violation]:
    """Images broken by a smaller change than the certificate allows."""
    if evidence.certificates is None:
        return
    for name, attack in evidence.attacks.items():
        found = attack.adversarial_indices
        radii = evidence.certificates.radii
        known = found < len(radii)
        distances = perturbation(attack.adversarial_images, as_pixels(evidence.images.cpu()[found]), "L2")
        against = known & (radii[found.clamp(max=len(radii) - 1)] > distances * (1 + _ROUNDING))
        if against.any():
            yield Violation(
                text=f"{name} broke {int(against.sum())} images within the L2 radius for which they are certified",
                images=tuple(found[against].tolist()),
                found=attack.adversarial_images[against],
            )


def _lost(evidence: Evidence) -> Iterator[Violation]:
    """Images with a certificate that an attack has not broken but counts as lost, hence as misclassified."""
    if evidence.certificates is None:
        return
    largest = evidence.logits.cpu().double().abs().amax(1)[: len(evidence.certificates.radii)]
    certified = (evidence.certificates.radii > 0) & (evidence.certificates.margins > _TIE * largest)
    for name, attack in evidence.attacks.items():
        lost = ~attack.robust
        lost[attack.adversarial_indices] = False
        count = min(len(lost), len(certified))
        if (both := lost[:count] & certified[:count]).any():
            text = f"{int(both.sum())} images are certified but {name} counts them as misclassified"
            yield Violation(text=text, images=_places(both))


def _steep(evidence: Evidence) -> Iterator[Violation]:
    """Images at which the network changes faster than its bound allows."""
    if evidence.bound is None:
        return
    for one in evidence.lipschitz:
        bound = evidence.bound.value * one.longest_unit
        steep = one.values > bound * (1 + _ROUNDING)
        if steep.any():
            found = f"empirical Lipschitz constant {one.maximum:.6g} ({one.method}, {one.space})"
            text = f"{found} is above the bound {bound:.6g}, at {int(steep.sum())} images"
            yield Violation(text=text, images=_places(steep))


def _miscalibrated(evidence: Evidence) -> Iterator[Violation]:
    for name, values in (("raw", evidence.calibration.raw), ("scaled", evidence.calibration.scaled)):
        if values is None:
            continue
        for measure in ("ece", "mce", "adaptive_ece"):
            if not 0 <= (value := getattr(values, measure)) <= 1:
                yield Violation(text=f"calibration error {measure} ({name}) {value} is outside [0, 1]")


def _places(chosen: Tensor) -> tuple[int, ...]:
    return tuple(torch.nonzero(chosen)[:, 0].tolist())
