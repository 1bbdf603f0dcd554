"""What the tabs of a trial's page say: tables of what was measured, and why something was not."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from service.database import OPEN_TRIALS, Result, Trial, TrialState
from service.queue.attempts import AttemptDetail
from ttsv.config.evaluation import PUBLISHED_CORRUPTIONS
from ttsv.results import AnyRecord


@dataclass(frozen=True)
class Corruption:
    """A kind of corruption: the accuracy at severities 1 to 5, and their mean."""

    kind: str
    accuracies: Sequence[float]

    @property
    def mean(self) -> float:
        """All severities weigh the same."""
        return sum(self.accuracies) / len(self.accuracies)


@dataclass(frozen=True)
class Corruptions:
    """Accuracies under all kinds of corruption; `relative`: the mean corruption error, where a baseline was there."""

    kinds: Sequence[Corruption]
    mean: float
    relative: float | None

    @property
    def severities(self) -> Sequence[int]:
        """As many as every kind has."""
        return range(1, 1 + min(len(kind.accuracies) for kind in self.kinds))


@dataclass(frozen=True)
class Radius:
    """Shares of images certified at a radius in L2: by the proved bound, and by an assumed constant of 1."""

    radius: float
    certified: float | None
    assumed: float | None


@dataclass(frozen=True)
class Attack:
    """What an attack left: accuracy within `eps` in its norm, over so many images, and before it over these."""

    name: str
    norm: str
    eps: float
    accuracy: float
    clean: float | None
    images: int | None


@dataclass(frozen=True)
class Search:
    """Empirical Lipschitz constants of one method in one space; `bound` is the certified one there."""

    space: str
    method: str
    mean: float | None
    maximum: float
    bound: float | None
    images: int | None


@dataclass(frozen=True)
class Bin:
    """Images of a range of confidence: how many, the means of their confidence and of being right; None of none."""

    low: float
    high: float
    count: int
    confidence: float | None
    accuracy: float | None


@dataclass(frozen=True)
class Reliability:
    """A reliability diagram, with the errors that it shows; `temperature` is that of the logits."""

    name: str
    ece: float
    mce: float
    bins: Sequence[Bin]


@dataclass(frozen=True)
class Robustness:
    """What was measured of a network beside its accuracy; empty or None where that was not asked for.

    `no_bound` says why there is no Lipschitz bound though one was asked for.
    """

    corruptions: Corruptions | None
    radii: Sequence[Radius]
    attacks: Sequence[Attack]
    searches: Sequence[Search]
    bound: float | None
    no_bound: str | None


@dataclass(frozen=True)
class Absence:
    """Why there is nothing to be shown; `values` are those of `ttsv reevaluate` that would give it."""

    why: str
    values: str | None = None


@dataclass(frozen=True)
class Use:
    """What an attempt used of its machine: its points, and the means and peaks of its columns, None where unknown."""

    attempt: AttemptDetail
    points: int
    seconds: float
    cpu: float | None
    memory: float | None
    gpu: float | None
    gpu_memory: float | None


def threshold(trial: Trial) -> float | None:
    """What the constraint holds the singular values of convolutions below; None without one."""
    if trial.constraint == "divide":
        conv: float | None = _part(trial.config, "division").get("conv")
        return conv
    return trial.delta if trial.constraint == "clip" else None


def robustness(result: Result | None) -> Robustness:
    """What a result's record has of corruptions, attacks, certificates and Lipschitz constants."""
    record: AnyRecord = (result.evaluation if result is not None else None) or {}
    certified = _part(record, "certified")
    return Robustness(
        corruptions=_corruptions(_part(record, "corruptions")),
        radii=_radii(_part(certified, "accuracy"), _part(certified, "assumed_1_lipschitz")),
        attacks=[
            Attack(
                name=name,
                norm=str(one.get("norm")),
                eps=one.get("eps", 0.0),
                accuracy=one["robust_accuracy"],
                clean=one.get("clean_accuracy"),
                images=one.get("images"),
            )
            for name, one in _part(record, "attacks").items()
        ],
        searches=[
            Search(
                space=one["space"],
                method=one["method"],
                mean=one.get("mean"),
                maximum=one["maximum"],
                bound=one.get("bound"),
                images=one.get("images"),
            )
            for one in record.get("lipschitz") or ()
        ],
        bound=certified.get("bound"),
        no_bound=certified.get("why"),
    )


def reliabilities(result: Result | None) -> list[Reliability]:
    """The reliability diagrams of a result's record: as the logits are, and at the fitted temperature."""
    record: AnyRecord = (result.evaluation if result is not None else None) or {}
    calibration = _part(record, "calibration")
    found = []
    for name in ("raw", "scaled"):
        if values := _part(calibration, name):
            diagram = values["reliability"]
            columns = zip(diagram["count"], diagram["confidence"], diagram["accuracy"], strict=True)
            edges = diagram["edges"]
            bins = [
                Bin(edges[index], edges[index + 1], count, confidence, accuracy)
                for index, (count, confidence, accuracy) in enumerate(columns)
            ]
            said = "as it is" if name == "raw" else f"at temperature {calibration['temperature']:.3f}"
            found.append(Reliability(said, values["ece"], values["mce"], bins))
    return found


def absent(trial: Trial, result: Result | None, values: str | None = None) -> Absence:
    """Why a trial has not what its evaluation, asked by `values`, would have given."""
    if trial.state in OPEN_TRIALS:
        return Absence("It is not finished yet: what its evaluation measures is here at its end.")
    if result is None:
        early = "Its scheduler stopped it early: it has epochs and was not evaluated."
        ended = f"It has no result: the trial is {trial.state.value}."
        return Absence(early if trial.state is TrialState.EARLY_STOPPED else ended)
    if values is None or not result.evaluation:
        return Absence("Its result has no record of this: it is from before the service kept one.", values)
    return Absence("Its spec does not ask for it.", values)


def corruption_values(dataset: str) -> str:
    """What asks for the corruptions of a data set: published ones, where there are some."""
    return f"corruptions={'published' if dataset in PUBLISHED_CORRUPTIONS else 'generated'}"


def uses(attempts: Sequence[AttemptDetail]) -> list[Use]:
    """What each attempt used, those that were sampled alone."""
    found = []
    for attempt in attempts:
        used = attempt.resources
        if used is None or not used["seconds"]:
            continue
        found.append(
            Use(
                attempt=attempt,
                points=len(used["seconds"]),
                seconds=used["seconds"][-1],
                cpu=_mean(used["cpu"]),
                memory=_peak(used["memory"]),
                gpu=_mean(used["gpu"]),
                gpu_memory=_peak(used["gpu_memory"]),
            )
        )
    return found


def _mean(column: Sequence[float | None]) -> float | None:
    known = [value for value in column if value is not None]
    return sum(known) / len(known) if known else None


def _peak(column: Sequence[float | None]) -> float | None:
    return max((value for value in column if value is not None), default=None)


def _part(record: AnyRecord, name: str) -> AnyRecord:
    found = record.get(name)
    return found if isinstance(found, Mapping) else {}


def _corruptions(record: AnyRecord) -> Corruptions | None:
    table = _part(record, "table")
    if not table or not all(table.values()):
        return None
    kinds = [Corruption(kind, accuracies) for kind, accuracies in table.items()]
    return Corruptions(kinds, record["mean"], record.get("mce"))


def _radii(certified: AnyRecord, assumed: AnyRecord) -> list[Radius]:
    radii = sorted({*certified, *assumed}, key=float)
    return [Radius(float(radius), certified.get(radius), assumed.get(radius)) for radius in radii]
