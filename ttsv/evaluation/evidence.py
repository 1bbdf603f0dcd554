"""What the metrics of one evaluation found, image by image, while it is under way."""

from dataclasses import dataclass, field

from torch import Tensor

from ttsv.certification.certificates import Certificates, LipschitzBound
from ttsv.metrics.attacks.record import AttackRecord
from ttsv.metrics.calibration import CalibrationRecord
from ttsv.metrics.corruption import CorruptionRecord
from ttsv.metrics.lipschitz import EmpiricalLipschitz


@dataclass(kw_only=True)
class Evidence:
    """All on the same images, in the same order: a metric of fewer is of the first.

    `images` (count, channels, ...), `labels` (count,) and `logits` (count, classes) are on the network's device, as is
    nothing else. `bound` is None where none was asked for, `no_bound` says why there is none though one was;
    `assumed_lipschitz`: see there, None too where no certificates were asked for. `numbers`: metrics, by their names in
    `ttsv.metrics.catalog`, that a stage gives as they are to be stored. `seconds`: those of each stage.
    """

    images: Tensor
    labels: Tensor
    logits: Tensor
    calibration: CalibrationRecord
    attacks: dict[str, AttackRecord] = field(default_factory=dict)
    bound: LipschitzBound | None = None
    no_bound: str | None = None
    certificates: Certificates | None = None
    assumed_lipschitz: float | None = None
    lipschitz: list[EmpiricalLipschitz] = field(default_factory=list)
    corruption: CorruptionRecord | None = None
    numbers: dict[str, float | None] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def per_image(self) -> dict[str, Tensor]:
        """What is known of every image, on the CPU, in tensors whose first axis is that of the metric's images.

        `margins`: the label's logit less the largest other one. `broken_by_*`: the attack that broke the image, counted
        from 0 in the order of the record's `counts`; -1 for none.
        """
        labels, logits = self.labels.cpu(), self.logits.cpu()
        own = logits.gather(1, labels[:, None]).double()
        others = logits.double().scatter(1, labels[:, None], -float("inf"))
        found = {
            "labels": labels,
            "predictions": logits.argmax(1),
            "margins": own[:, 0] - others.amax(1),
            "confidences": logits.double().softmax(1).amax(1),
        }
        for name, attack in self.attacks.items():
            broken = attack.robust.long() * 0 - 1
            broken[attack.adversarial_indices] = attack.adversarial_attacks
            found |= {f"robust_{name}": attack.robust, f"broken_by_{name}": broken}
        if self.certificates is not None:
            found |= {"certified_radii": self.certificates.radii, "certified_margins": self.certificates.margins}
        for one in self.lipschitz:
            found[f"lipschitz_{one.method}_{one.space}"] = one.values
        return found
