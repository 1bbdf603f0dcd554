"""The catalogue of metrics: what is said of the numbers of a trial's result is said here, once.

The fields of `ttsv.results.TrialResult`, columns of the database, fields of the API, leaderboards, their legends and
exports, and docs/metrics.md are read from it. A new metric is a module that computes it, an entry here, and the stage
of an evaluation that measures it (`ttsv.evaluation.evidence.Evidence.numbers`). Importing this loads no torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

_FACTORS = {"%": 100.0, "ms": 1000.0, "millions": 1e-6, "MiB": 2.0**-20}
"""Units in which tables print other numbers than those that are stored."""


@dataclass(frozen=True, kw_only=True)
class MetricInfo:
    """A metric: a number of a trial's result, stored as a fraction in [0, 1], in seconds, bytes or as a bare number.

    `heading`, `unit` (empty: a bare number) and `decimals` are those of tables for people, `headline` metrics are in
    them even if nobody asks. `best` says which values are. `definition` is one or two sentences. `protocol` is the part
    of the evaluation's protocol, beside data set and split, by which it is decided whether two values may be compared
    (empty: neither is anything else), `source` where the metric is defined. `group` is its section in the documents.
    `whole` numbers are counts. `presence`: whether every result has a number, states one or null, or has null unless
    it was measured. `in_schema` is what the API's schema says where the name does not say it.
    """

    name: str
    heading: str
    unit: str = ""
    decimals: int = 3
    best: Literal["most", "least", "at 1"] = "least"
    definition: str
    protocol: str = ""
    source: str = ""
    group: str
    whole: bool = False
    presence: Literal["always", "stated", "optional"] = "optional"
    headline: bool = False
    in_schema: str = ""

    @property
    def title(self) -> str:
        """The heading with its unit."""
        return f"{self.heading} ({self.unit})" if self.unit else self.heading

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


def _certified() -> Iterator[MetricInfo]:
    for name, radius in CERTIFIED_RADII.items():
        at = _of_255(radius)
        yield _share(
            name=name,
            heading=f"certified at {at}",
            best="most",
            definition="Share of images proved to be classified as labelled whatever is added to the pixels within an"
            f" L2 radius of {at}: a certificate.",
            protocol="certificates",
            source="[certificates](certificates.md)",
            group=_CERTIFICATES,
            headline=at == "36/255",
            in_schema="Certified accuracy at radius 36/255." if at == "36/255" else "",
        )


def _assumed_certified() -> Iterator[MetricInfo]:
    for name, radius in CERTIFIED_RADII.items():
        if (at := _of_255(radius)) == "1":
            continue
        yield _share(
            name=f"assumed_{name}",
            heading=f"p.r. at {at}, L = 1 assumed",
            best="most",
            definition=f"The paper's p.r. at {at}: margin / (sqrt(2) L) > radius with a Lipschitz constant L = 1 in"
            " normalised coordinates assumed, which is no proof. Null unless every convolution is SOC or SOC-TT.",
            source="the paper, table 1",
            group=_CERTIFICATES,
            in_schema="The paper's: by an assumed constant of 1 in normalised coordinates, no certificate."
            if at == "36/255"
            else "",
        )


def _of_255(radius: float) -> str:
    return "1" if radius == 1 else f"{255 * radius:.0f}/255"


_ACCURACY = "Accuracy"
_ATTACKS = "Attacks"
_CORRUPTIONS = "Corruptions"
_CALIBRATION = "Calibration"
_CERTIFICATES = "Certificates and Lipschitz constants"
_SINGULAR_VALUES = "Singular values"
_COST = "Size and cost"

METRICS: dict[str, MetricInfo] = {
    info.name: info
    for info in (
        _share(
            name="accuracy",
            heading="accuracy",
            best="most",
            definition="Share of the test images whose largest logit is the label's.",
            protocol="images.accuracy",
            group=_ACCURACY,
            presence="always",
            headline=True,
        ),
        _share(
            name="top5_accuracy",
            heading="top-5 accuracy",
            best="most",
            definition="Share of the test images whose label is among the five largest logits; null for five classes or"
            " fewer.",
            protocol="images.accuracy",
            group=_ACCURACY,
            in_schema="Of more than five classes; else null.",
        ),
        _share(
            name="robust_accuracy",
            heading="AutoAttack accuracy",
            best="most",
            definition="Share of images classified as labelled under every attack of AutoAttack, at the norm and radius"
            " that the protocol names, in pixels of [0, 1].",
            protocol="attacks.autoattack",
            source="Croce, Hein 2020; the package of its authors",
            group=_ATTACKS,
            headline=True,
            in_schema="Under AutoAttack, where asked for.",
        ),
        _share(
            name="pgd_accuracy",
            heading="PGD accuracy",
            best="most",
            definition="Share of images classified as labelled under projected gradient descent alone, at the norm and"
            " radius that the protocol names, in pixels of [0, 1]: quick, and proves little.",
            protocol="attacks.pgd",
            source="Madry et al. 2018",
            group=_ATTACKS,
            headline=True,
            in_schema="Under PGD, which proves little. Null, as all of the following are, unless the evaluation asks"
            " for it.",
        ),
        _share(
            name="corruption_accuracy",
            heading="corruption accuracy",
            best="most",
            definition="Mean accuracy over all 19 kinds of corruption and 5 severities.",
            protocol="corruptions",
            source="Hendrycks, Dietterich 2019",
            group=_CORRUPTIONS,
            headline=True,
            in_schema="Mean over corruptions and severities.",
        ),
        _share(
            name="mce",
            heading="mCE",
            definition="Mean corruption error relative to the stored baseline of the data set: 1 for a network that"
            " errs as the baseline does; null without one.",
            protocol="corruptions.mce_baseline",
            source="Hendrycks, Dietterich 2019, section 4.1",
            group=_CORRUPTIONS,
            in_schema="Mean corruption error, over that of a stored baseline.",
        ),
        _share(
            name="ece",
            heading="ECE",
            definition="Expected calibration error: mean over images of the distance between accuracy and mean"
            " confidence of the image's bin; 15 bins of equal width, closed on the right.",
            protocol="metrics.ece",
            source="Guo et al. 2017, eq. 3",
            group=_CALIBRATION,
            presence="always",
            headline=True,
        ),
        _share(
            name="max_calibration_error",
            heading="maximum calibration error",
            definition="Largest distance between accuracy and mean confidence of a bin, of those of the ECE.",
            protocol="metrics.ece",
            source="Guo et al. 2017, eq. 5",
            group=_CALIBRATION,
        ),
        _share(
            name="adaptive_ece",
            heading="adaptive ECE",
            definition="Expected calibration error over 15 bins of equal counts.",
            protocol="metrics.ece",
            source="Nguyen, O'Connor 2015",
            group=_CALIBRATION,
        ),
        _share(
            name="scaled_ece",
            heading="ECE after temperature scaling",
            definition="ECE once the logits are divided by the temperature.",
            protocol="metrics.temperature",
            source="Guo et al. 2017",
            group=_CALIBRATION,
            in_schema="At that temperature.",
        ),
        MetricInfo(
            name="temperature",
            heading="temperature",
            best="at 1",
            definition="By which logits are divided for the least loss on the validation images; above 1 the network is"
            " overconfident, below 1 not sure enough.",
            protocol="metrics.temperature",
            source="Guo et al. 2017, section 4.2",
            group=_CALIBRATION,
            in_schema="Fitted on the validation split.",
        ),
        MetricInfo(
            name="brier",
            heading="Brier score",
            decimals=4,
            definition="Mean squared distance of the probabilities to the label's unit vector, summed over classes,"
            " 0 to 2.",
            protocol="images.calibration",
            source="Brier 1950, eq. 2",
            group=_CALIBRATION,
        ),
        MetricInfo(
            name="loss",
            heading="loss",
            unit="nats",
            decimals=4,
            definition="Mean cross-entropy of the test images, the orthogonal loss not included.",
            protocol="metrics.loss",
            group=_ACCURACY,
            presence="always",
        ),
        MetricInfo(
            name="scaled_loss",
            heading="loss after temperature scaling",
            unit="nats",
            decimals=4,
            definition="Loss once the logits are divided by the temperature.",
            protocol="metrics.temperature",
            source="Guo et al. 2017",
            group=_CALIBRATION,
            in_schema="At that temperature.",
        ),
        *_certified(),
        *_assumed_certified(),
        MetricInfo(
            name="lipschitz_bound",
            heading="Lipschitz bound",
            decimals=4,
            definition="Rigorous upper bound of the Lipschitz constant: no two images' logits differ by more than this"
            " times the distance of their pixels, both in L2.",
            protocol="certificates",
            source="[certificates](certificates.md)",
            group=_CERTIFICATES,
            in_schema="Rigorous, L2, with respect to pixels.",
        ),
        MetricInfo(
            name="lipschitz_fgsm",
            heading="empirical Lipschitz constant, normalised",
            definition="Largest ratio of the change of logits to that of the image over FGSM steps of L2 length 0.5, in"
            " normalised coordinates: the paper's search, a lower bound of the Lipschitz constant.",
            protocol="lipschitz",
            source="the paper, section Empirical Lipschitz constant",
            group=_CERTIFICATES,
            in_schema="Largest empirical constant, normalised coordinates.",
        ),
        MetricInfo(
            name="lipschitz_ascent",
            heading="empirical Lipschitz constant, pixels",
            definition="Largest ratio of the change of logits to that of the image that gradient ascent on the ratio"
            " finds, in pixels: a lower bound of the Lipschitz constant.",
            protocol="lipschitz",
            group=_CERTIFICATES,
            in_schema="By a stronger search, in pixels.",
        ),
        MetricInfo(
            name="max_singular_value",
            heading="largest singular value",
            definition="Largest singular value over all convolutions, each as a periodic operator at the size it sees.",
            protocol="metrics.singular_values",
            source="Theorem 2, corrected: [traps](traps.md)",
            group=_SINGULAR_VALUES,
            presence="always",
            headline=True,
            in_schema="Over all convolutions, of the periodic operator.",
        ),
        MetricInfo(
            name="compression",
            heading="compression",
            decimals=1,
            best="most",
            definition="Weights of all convolutions of the uncompressed network over those of this one; biases, linear"
            " layers and normalisation left out.",
            source="the paper's column",
            group=_COST,
            presence="always",
            headline=True,
        ),
        MetricInfo(
            name="parameters",
            heading="parameters",
            unit="millions",
            definition="Trainable parameters of the whole network.",
            group=_COST,
            whole=True,
            presence="always",
        ),
        MetricInfo(
            name="multiply_accumulates",
            heading="multiply-accumulates",
            unit="millions",
            decimals=1,
            definition="Of the inference of one image, in convolutions and matrix products, as the layers compute.",
            group=_COST,
            whole=True,
            presence="always",
            in_schema="Of one image.",
        ),
        MetricInfo(
            name="train_seconds",
            heading="training",
            unit="s",
            decimals=1,
            definition="Time of all optimizer steps, constraints included.",
            group=_COST,
            presence="always",
            headline=True,
        ),
        MetricInfo(
            name="constraint_seconds",
            heading="constraint",
            unit="s",
            decimals=2,
            definition="The part of the training's time that the constraint took.",
            group=_COST,
            presence="always",
        ),
        _milliseconds(
            name="step_seconds",
            heading="step",
            definition="Mean time of an optimizer step, without the first epoch of several.",
            group=_COST,
            presence="always",
            in_schema="Mean time of an optimizer step, without the first epoch of several.",
        ),
        _milliseconds(
            name="constraint_step_seconds",
            heading="constraint per step",
            definition="The part of a step's mean time that the constraint takes, the gradient of its penalty"
            " excepted.",
            group=_COST,
            presence="always",
            in_schema="The part of it that the constraint takes.",
        ),
        MetricInfo(
            name="eval_seconds",
            heading="evaluation",
            unit="s",
            decimals=2,
            definition="Time of the evaluation on the test images.",
            group=_COST,
            presence="always",
        ),
        MetricInfo(
            name="attack_seconds",
            heading="attacks",
            unit="s",
            decimals=1,
            definition="Time of all attacks.",
            protocol="attacks",
            group=_ATTACKS,
        ),
        _milliseconds(
            name="spectrum_seconds",
            heading="spectrum",
            definition="Time of the exact singular values of all convolutions.",
            group=_COST,
            presence="always",
            in_schema="Of the exact singular values of all convolutions.",
        ),
        _milliseconds(
            name="latency_seconds",
            heading="inference of 1 image",
            definition="Median time of inference for one image, each TT layer merged or factored, whichever multiplies"
            " less.",
            group=_COST,
            presence="always",
            in_schema="Inference of one image.",
        ),
        _milliseconds(
            name="batch_seconds",
            heading="inference of 128 images",
            definition="Median time of inference for 128 images at once, each TT layer merged or factored, whichever"
            " multiplies less.",
            group=_COST,
            presence="always",
            in_schema="Inference of 128 images.",
        ),
        _milliseconds(
            name="merged_latency_seconds",
            heading="inference of 1 image, merged",
            definition="Median time of inference for one image, all frames merged into dense kernels; null without TT"
            " layers.",
            group=_COST,
            in_schema="As latency_seconds, frames merged into kernels; null without.",
        ),
        _milliseconds(
            name="merged_batch_seconds",
            heading="inference of 128 images, merged",
            definition="Median time of inference for 128 images at once, all frames merged into dense kernels; null"
            " without TT layers.",
            group=_COST,
        ),
        MetricInfo(
            name="peak_memory",
            heading="peak GPU memory",
            unit="MiB",
            decimals=0,
            definition="Largest memory allocated on the GPU in training; null on a CPU.",
            group=_COST,
            whole=True,
            presence="stated",
            in_schema="Of the GPU, in bytes; null on a CPU.",
        ),
        MetricInfo(
            name="spectrum_memory",
            heading="memory of the spectrum",
            unit="MiB",
            decimals=1,
            definition="The most that torch had allocated for the exact singular values; on a CPU without the"
            " libraries' workspaces.",
            group=_COST,
            whole=True,
            in_schema="The most allocated for the singular values, in bytes.",
        ),
    )
}
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
