"""The catalogue of metrics: what is said of the numbers of a trial's result is said here, once.

The fields of `ttsv.results.TrialResult`, columns of the database, fields of the API, leaderboards, their legends and
exports, and docs/metrics.md are read from it. A new metric is a module that computes it, an entry here, and the stage
of an evaluation that measures it (`ttsv.evaluation.evidence.Evidence.numbers`). Importing this loads no torch.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Literal, TypeVar

_FACTORS = {"%": 100.0, "ms": 1000.0, "millions": 1e-6, "MiB": 2.0**-20}
"""Units in which tables print other numbers than those that are stored."""
_STORED = {"%": "As a fraction.", "ms": "In seconds.", "s": "In seconds.", "nats": "In nats.", "MiB": "In bytes."}
"""Units of the numbers that are stored, by those of tables."""


@dataclass(frozen=True)
class MetricInfo:
    """A metric: a number of a trial's result, stored as a fraction in [0, 1], in seconds, bytes or as a bare number.

    `heading`, `unit` (empty: a bare number) and `decimals` are those of tables for people, `headline` metrics are in
    them even if nobody asks. `best` says which values are. `definition` is one or two sentences. `protocol` is the part
    of the evaluation's protocol, beside data set and split, by which it is decided whether two values may be compared
    (empty: neither is anything else), `source` where the metric is defined. `group` is its section in the documents.
    `whole` numbers are counts. `presence`: whether every result has a number, states one or null, or has null unless
    it was measured.
    """

    name: str
    heading: str
    definition: str
    _: KW_ONLY
    group: str
    protocol: str = ""
    source: str = ""
    unit: str = ""
    decimals: int = 3
    best: Literal["most", "least", "at 1"] = "least"
    whole: bool = False
    presence: Literal["always", "stated", "optional"] = "optional"
    headline: bool = False

    @property
    def title(self) -> str:
        """The heading with its unit."""
        return f"{self.heading} ({self.unit})" if self.unit else self.heading

    @property
    def in_words(self) -> str:
        """The definition with the unit of stored values."""
        return f"{self.definition} {_STORED.get(self.unit, '')}".rstrip()

    @property
    def factor(self) -> float:
        """By which a stored value is multiplied to be in `unit`."""
        return _FACTORS.get(self.unit, 1.0)

    @property
    def nullable(self) -> bool:
        """Whether there are results without a number."""
        return self.presence != "always"

    @property
    def value_type(self) -> Any:
        """The type of its values: `int` or `float`, or also None."""
        number = int if self.whole else float
        return number | None if self.nullable else number


_share = partial(MetricInfo, unit="%", decimals=2)
_milliseconds = partial(MetricInfo, unit="ms", decimals=2)

CERTIFIED_RADII = {f"certified_{part}": part / 255 for part in (36, 72, 108, 255)}
"""Metric -> the L2 radius, in pixels of [0, 1], at which images are certified."""


_AT = {name: "1" if radius == 1 else f"{255 * radius:.0f}/255" for name, radius in CERTIFIED_RADII.items()}
"""Metric -> its radius, as people write it."""

_ACCURACY = "Accuracy"
_ATTACKS = "Attacks"
_CORRUPTIONS = "Corruptions"
_CALIBRATION = "Calibration"
_CERTIFICATES = "Certificates and Lipschitz constants"
_SINGULAR_VALUES = "Singular values"
_COST = "Size and cost"

# fmt: off
METRICS: dict[str, MetricInfo] = {
    info.name: info
    for info in (
        _share("accuracy", "accuracy", "Share of the test images whose largest logit is the label's.",
            best="most", group=_ACCURACY, presence="always", headline=True, protocol="images.accuracy"),
        _share("top5_accuracy", "top-5 accuracy",
            "Share of the test images whose label is among the five largest logits; null for five classes or fewer.",
            best="most", group=_ACCURACY, protocol="images.accuracy"),
        _share("robust_accuracy", "AutoAttack accuracy",
            "Share of images classified as labelled under every attack of AutoAttack, at the norm and radius that the"
            " protocol names, in pixels of [0, 1].",
            best="most", group=_ATTACKS, headline=True, protocol="attacks.autoattack",
            source="Croce, Hein 2020; the package of its authors"),
        _share("pgd_accuracy", "PGD accuracy",
            "Share of images classified as labelled under projected gradient descent alone, at the norm and radius"
            " that the protocol names, in pixels of [0, 1]: quick, and proves little.",
            best="most", group=_ATTACKS, headline=True, protocol="attacks.pgd", source="Madry et al. 2018"),
        _share("corruption_accuracy", "corruption accuracy",
            "Mean accuracy over all 19 kinds of corruption and 5 severities.",
            best="most", group=_CORRUPTIONS, headline=True, protocol="corruptions",
            source="Hendrycks, Dietterich 2019"),
        _share("mce", "mCE",
            "Mean corruption error relative to the stored baseline of the data set: 1 for a network that errs as the"
            " baseline does; null without one.",
            group=_CORRUPTIONS, protocol="corruptions.mce_baseline", source="Hendrycks, Dietterich 2019, section 4.1"),
        _share("ece", "ECE",
            "Expected calibration error: mean over images of the distance between accuracy and mean confidence of the"
            " image's bin; 15 bins of equal width, closed on the right.",
            group=_CALIBRATION, presence="always", headline=True, protocol="metrics.ece",
            source="Guo et al. 2017, eq. 3"),
        _share("max_calibration_error", "maximum calibration error",
            "Largest distance between accuracy and mean confidence of a bin, of those of the ECE.",
            group=_CALIBRATION, protocol="metrics.ece", source="Guo et al. 2017, eq. 5"),
        _share("adaptive_ece", "adaptive ECE", "Expected calibration error over 15 bins of equal counts.",
            group=_CALIBRATION, protocol="metrics.ece", source="Nguyen, O'Connor 2015"),
        _share("scaled_ece", "ECE after temperature scaling", "ECE once the logits are divided by the temperature.",
            group=_CALIBRATION, protocol="metrics.temperature", source="Guo et al. 2017"),
        MetricInfo("temperature", "temperature",
            "By which logits are divided for the least loss on the validation images; above 1 the network is"
            " overconfident, below 1 not sure enough.",
            best="at 1", group=_CALIBRATION, protocol="metrics.temperature", source="Guo et al. 2017, section 4.2"),
        MetricInfo("brier", "Brier score",
            "Mean squared distance of the probabilities to the label's unit vector, summed over classes, 0 to 2.",
            decimals=4, group=_CALIBRATION, protocol="images.calibration", source="Brier 1950, eq. 2"),
        MetricInfo("loss", "loss", "Mean cross-entropy of the test images, the orthogonal loss not included.",
            unit="nats", decimals=4, group=_ACCURACY, presence="always", protocol="metrics.loss"),
        MetricInfo("scaled_loss", "loss after temperature scaling",
            "Loss once the logits are divided by the temperature.",
            unit="nats", decimals=4, group=_CALIBRATION, protocol="metrics.temperature", source="Guo et al. 2017"),
        *(_share(name, f"certified at {at}",
            "Share of images proved to be classified as labelled whatever is added to the pixels within an L2 radius of"
            f" {at}: a certificate.",
            best="most", group=_CERTIFICATES, headline=at == "36/255", protocol="certificates",
            source="[certificates](certificates.md)")
            for name, at in _AT.items()),
        *(_share(f"assumed_{name}", f"p.r. at {at}, L = 1 assumed",
            f"The paper's p.r. at {at}: margin / (sqrt(2) L) > radius with a Lipschitz constant L = 1 in normalised"
            " coordinates assumed, which is no proof. Null unless every convolution is SOC or SOC-TT.",
            best="most", group=_CERTIFICATES, source="the paper, table 1")
            for name, at in _AT.items() if at != "1"),
        MetricInfo("lipschitz_bound", "Lipschitz bound",
            "Rigorous upper bound of the Lipschitz constant: no two images' logits differ by more than this times the"
            " distance of their pixels, both in L2.",
            decimals=4, group=_CERTIFICATES, protocol="certificates", source="[certificates](certificates.md)"),
        MetricInfo("lipschitz_fgsm", "empirical Lipschitz constant, normalised",
            "Largest ratio of the change of logits to that of the image over FGSM steps of L2 length 0.5, in"
            " normalised coordinates: the paper's search, a lower bound of the Lipschitz constant.",
            group=_CERTIFICATES, protocol="lipschitz", source="the paper, section Empirical Lipschitz constant"),
        MetricInfo("lipschitz_ascent", "empirical Lipschitz constant, pixels",
            "Largest ratio of the change of logits to that of the image that gradient ascent on the ratio finds, in"
            " pixels: a lower bound of the Lipschitz constant.",
            group=_CERTIFICATES, protocol="lipschitz"),
        MetricInfo("max_singular_value", "largest singular value",
            "Largest singular value over all convolutions, each as a periodic operator at the size it sees.",
            group=_SINGULAR_VALUES, presence="always", headline=True, protocol="metrics.singular_values",
            source="Theorem 2, corrected: [traps](traps.md)"),
        MetricInfo("compression", "compression",
            "Weights of all convolutions of the uncompressed network over those of this one; biases, linear layers and"
            " normalisation left out.",
            decimals=1, best="most", group=_COST, presence="always", headline=True, source="the paper's column"),
        MetricInfo("parameters", "parameters", "Trainable parameters of the whole network.",
            unit="millions", group=_COST, whole=True, presence="always"),
        MetricInfo("multiply_accumulates", "multiply-accumulates",
            "Of the inference of one image, in convolutions and matrix products, as the layers compute.",
            unit="millions", decimals=1, group=_COST, whole=True, presence="always"),
        MetricInfo("train_seconds", "training", "Time of all optimizer steps, constraints included.",
            unit="s", decimals=1, group=_COST, presence="always", headline=True),
        MetricInfo("constraint_seconds", "constraint", "The part of the training's time that the constraint took.",
            unit="s", decimals=2, group=_COST, presence="always"),
        _milliseconds("step_seconds", "step", "Mean time of an optimizer step, without the first epoch of several.",
            group=_COST, presence="always"),
        _milliseconds("constraint_step_seconds", "constraint per step",
            "The part of a step's mean time that the constraint takes, the gradient of its penalty excepted.",
            group=_COST, presence="always"),
        MetricInfo("eval_seconds", "evaluation", "Time of the evaluation on the test images.",
            unit="s", decimals=2, group=_COST, presence="always"),
        MetricInfo("attack_seconds", "attacks", "Time of all attacks.",
            unit="s", decimals=1, group=_ATTACKS, protocol="attacks"),
        _milliseconds("spectrum_seconds", "spectrum", "Time of the exact singular values of all convolutions.",
            group=_COST, presence="always"),
        _milliseconds("latency_seconds", "inference of 1 image",
            "Median time of inference for one image, each TT layer merged or factored, whichever multiplies less.",
            group=_COST, presence="always"),
        _milliseconds("batch_seconds", "inference of 128 images",
            "Median time of inference for 128 images at once, each TT layer merged or factored, whichever multiplies"
            " less.",
            group=_COST, presence="always"),
        _milliseconds("merged_latency_seconds", "inference of 1 image, merged",
            "Median time of inference for one image, all frames merged into dense kernels; null without TT layers.",
            group=_COST),
        _milliseconds("merged_batch_seconds", "inference of 128 images, merged",
            "Median time of inference for 128 images at once, all frames merged into dense kernels; null without TT"
            " layers.",
            group=_COST),
        MetricInfo("peak_memory", "peak GPU memory",
            "Largest memory allocated on the GPU in training, where it has several epochs without the first, in which"
            " cuDNN tries ways that it does not take; null on a CPU, or where an earlier attempt trained.",
            unit="MiB", decimals=0, group=_COST, whole=True, presence="stated"),
        MetricInfo("spectrum_memory", "memory of the spectrum",
            "The most that torch had allocated for the exact singular values; on a CPU without the libraries'"
            " workspaces.",
            unit="MiB", decimals=1, group=_COST, whole=True),
    )
}
# fmt: on
"""By name, in the order in which tables show them."""

_FIRST_COLUMNS = """
    accuracy loss ece max_singular_value compression parameters multiply_accumulates train_seconds constraint_seconds
    step_seconds constraint_step_seconds eval_seconds spectrum_seconds latency_seconds batch_seconds peak_memory
    spectrum_memory selected_epoch top5_accuracy max_calibration_error adaptive_ece brier temperature scaled_ece
    scaled_loss robust_accuracy pgd_accuracy attack_seconds corruption_accuracy mce lipschitz_bound certified_36
    certified_72 certified_108 certified_255 assumed_certified_36 assumed_certified_72 assumed_certified_108
    lipschitz_fgsm lipschitz_ascent merged_latency_seconds merged_batch_seconds
"""

Part = TypeVar("Part")


def in_column_order(parts: Mapping[str, Part]) -> dict[str, Part]:
    """Parts by a metric's name, in the order that the columns of results have had since; what is newer comes last."""
    known = (name for name in _FIRST_COLUMNS.split() if name in parts)
    return {name: parts[name] for name in dict.fromkeys((*known, *parts))}
