"""From a point's fields to a trial before it has a row, and what is said of fields that have no effect in any trial.

An axis of such a field is a mistake that would go unseen.
"""

import dataclasses
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from service.specs.spec import ExperimentSpec
from ttsv.config.fields import Checked, FieldValue, FieldValues, TrialFields, build, digest
from ttsv.config.trial import TrialConfig, field_infos
from ttsv.data.catalog import DatasetInfo, dataset_info
from ttsv.errors import ConfigError
from ttsv.models.registry import has_torchvision

Facts = Callable[[str], DatasetInfo | None]
"""Name of a data set -> what is known of it."""


@dataclass(frozen=True)
class PlannedTrial:
    """A trial before it has a row: canonical, with its two fingerprints."""

    config: TrialConfig
    fingerprint: str
    cell: str


@dataclass(frozen=True)
class PlannedCell:
    """A canonical trial with seed 0, the fields that decide (`TrialConfig.deciding`), and the cell of all its seeds."""

    config: TrialConfig
    different: TrialFields
    digest: str


@dataclass(frozen=True)
class CellCount:
    """So many trials that train the same but for their seeds; `config` has seed 0, or that of one of them."""

    config: TrialConfig
    trials: int


@dataclass(frozen=True)
class Plan:
    """The trials of a spec, each once; `points` counts duplicates too, and of a search what it may try.

    `idle`: given fields, by dotted path, that have no effect in any trial (of a search: in any of the points tried).
    `unreached`: milestones of which that is true, though not of all. `unbuilt`: networks that were not built.

    In the order of the variants and, within each, of the grid (last axis fastest), then of the listed trials; seeds of
    `repeat` are the fastest of all.
    """

    trials: list[PlannedTrial]
    points: int
    idle: tuple[str, ...] = ()
    unreached: tuple[int, ...] = ()
    unbuilt: int = 0

    @property
    def cells(self) -> list[CellCount]:
        """What stands for all trials, as in a `GridCount`: here each of them by itself."""
        return [CellCount(planned.config, 1) for planned in self.trials]


@dataclass(frozen=True)
class GridCount:
    """The trials of a spec, counted and not listed. All but `cells` is as in its `Plan`."""

    cells: list[CellCount]
    points: int
    idle: tuple[str, ...] = ()
    unreached: tuple[int, ...] = ()
    unbuilt: int = 0

    @property
    def trials(self) -> int:
        """How many there are."""
        return sum(cell.trials for cell in self.cells)


class Planner:
    """Makes planned trials of fields by dotted path.

    Ten thousand points of a grid share most of their parts, and many differ by their seeds alone: each part is made,
    and each cell worked out, once. `chooser`: the part of the spec (a search, a scheduler) that chooses among the
    trials by what is measured after their epochs, if one does: that may not be the test images. `facts`: what is known
    of a data set. `cards`: whether the trials get GPUs.
    """

    def __init__(self, chooser: str | None = None, facts: Facts = dataset_info, *, cards: bool = True) -> None:
        self._chooser, self._facts, self._cards = chooser, facts, cards
        self._parts: dict[str, Checked] = {}
        self._cells: dict[str, PlannedCell] = {}
        self._images: dict[tuple[Any, ...], ConfigError | None] = {}
        """What is the matter with networks and the images they take, where anything is."""
        self._built: set[tuple[Any, ...]] = set()
        """What of torchvision's networks is built: their layers are known once they are, which takes time."""
        self._unbuilt: set[tuple[Any, ...]] = set()
        self._given: set[str] = set()
        self._effective: set[str] = set()
        self.most_epochs = 0
        """Of any trial so far."""
        self._milestones: set[int] = set()
        self._reached: set[int] = set()

    @property
    def unbuilt(self) -> int:
        """How many networks were not built that had to be, to see whether they take their images."""
        return len({model for _, model, *_ in self._unbuilt})

    def idle(self) -> tuple[str, ...]:
        """Fields that were set, and are at their default in every canonical trial so far: they have no effect."""
        return tuple(sorted(self._given - self._effective))

    def unreached(self) -> tuple[int, ...]:
        """Milestones that come after the end of every trial so far that has them, where others come before it."""
        return tuple(sorted(self._milestones - self._reached)) if self._reached else ()

    def plan(self, fields: FieldValues) -> PlannedTrial:
        """Raises `ConfigError` for fields that do not go together."""
        cell = self.cell({path: value for path, value in fields.items() if path != "seed"})
        # (The seed is checked where the configuration is made, as any field is.)
        config = dataclasses.replace(cell.config, seed=cast(int, fields["seed"])) if "seed" in fields else cell.config
        if not config.seed:
            return PlannedTrial(config, cell.digest, cell.digest)
        return PlannedTrial(config, digest({**cell.different, "seed": config.seed}), cell.digest)

    def cell(self, fields: FieldValues) -> PlannedCell:
        """What all seeds of such trials share; `fields` name none. Raises `ConfigError`."""
        key = _key(fields)
        if key not in self._cells:
            self._cells[key] = self._made(fields)
        return self._cells[key]

    def _made(self, fields: FieldValues) -> PlannedCell:
        top: dict[str, FieldValue] = {}
        nested: dict[str, dict[str, FieldValue]] = {}
        for path, value in fields.items():
            part, _, name = path.rpartition(".")
            (nested.setdefault(part, {}) if part else top)[name] = value
        values: dict[str, Any] = {**top, **{name: self._part(name, inner) for name, inner in nested.items()}}
        given = TrialConfig(**values)
        info = self._facts(given.dataset)
        given.check_normalization(info)
        given.evaluation.check_dataset(given.dataset, info)
        config = given.canonical()
        written = (
            given.with_short_normalization()
        )  # what is as everywhere was not set, at whatever length it is written
        self._given |= {path for path in fields.keys() - self._given if _is_set(written, path)}
        self._effective |= {path for path in self._given - self._effective if _is_set(config, path)}
        self.most_epochs = max(self.most_epochs, config.training.epochs)
        if given.training.schedule == "multistep":
            self._milestones.update(given.training.milestones)
            self._reached.update(config.training.milestones)
        if self._chooser and config.training.validation == "test":
            fix = f"must be held-out: `{self._chooser}` would choose among trials by the test images"
            raise ConfigError("training.validation", "test", fix)
        if config.training.precision == "fp16" and not self._cards:
            fix = "must be float32 where resources.gpus is 0: processors take many times as long for a step in fp16"
            raise ConfigError("training.precision", "fp16", fix)
        divided = config.division.conv is not None, config.division.linear is not None
        projected = config.constraint == "clip", config.clipping.linear, *divided
        alone = config.leaves_one_alone(info)
        rank = config.rank if config.layer == "aoc-tt" else None  # which alone has no layers of some ranks
        batch = config.training.batch_size if alone else None
        images = (config.dataset, config.model, config.layer, rank, config.mean, config.std, batch, *projected)
        if images not in self._images:
            self._images[images] = self._refusal(config, info, alone)
        if (refusal := self._images[images]) is not None:
            raise ConfigError(refusal.field, refusal.value, refusal.fix)
        different = config.deciding()
        return PlannedCell(config, different, digest(different))

    def _refusal(self, config: TrialConfig, info: DatasetInfo | None, alone: bool) -> ConfigError | None:
        """What is the matter with a network and its images; looked at once, as some have to be built."""
        network = (config.dataset, config.model, config.layer, alone)
        build = has_torchvision() and (network in self._built or len(self._built) < _MOST_BUILT)
        if config.model.startswith("torchvision:"):
            (self._built if build else self._unbuilt).add(network)
        try:
            config.check_images(info, build=build)
        except ConfigError as error:
            return error
        return None

    def _part(self, name: str, fields: FieldValues) -> Checked:
        key = name + _key(fields)
        if key not in self._parts:
            self._parts[key] = build(_PARTS[name], fields)
        return self._parts[key]


_MOST_BUILT = 32
"""Networks that are built for one spec, to see whether they can be: of others it is said that they were not."""

_PARTS: dict[str, type[Checked]] = {
    field.name: type(field.default) for field in dataclasses.fields(TrialConfig) if isinstance(field.default, Checked)
}
"""Name -> class of the nested parts of a trial."""


_DEFAULTS = {path: info.default for path, info in field_infos().items()}


def _is_set(config: TrialConfig, path: str) -> bool:
    return bool(operator.attrgetter(path)(config) != _DEFAULTS[path])


def _key(fields: FieldValues) -> str:
    """Tells fields apart: by order and type too, which costs a duplicate and no more."""
    return repr(fields)


_NEEDS = {
    "training.milestones": "schedule: multistep, and an epoch before the last",
    "training.gamma": "schedule: multistep, and a milestone before the last epoch",
    "scheduler.grace_epochs": "a trial of more epochs",
    "layer": "a rank",
    "rank": "layer: tt or soc-tt",
    "frames": "layer: tt and a rank",
    "lambda_ort": "layers with a rank, and free frames",
    "ort_normalizer": "a lambda_ort above 0",
    "constraint": "a delta to clip to, or a norm to divide by in division",
    "delta": "constraint: clip",
    "clipping": "constraint: clip and a delta",
    "clipping.operator": "constraint: clip, a delta, and rescale: true in clipping",
    "division": "constraint: divide, and one of its conv, linear and batch_norm",
}


def warnings(spec: ExperimentSpec, plan: Plan | GridCount) -> list[str]:
    """A sentence for every field of the spec that has no effect in any of its trials, with what it would need.

    And one for networks of which nobody knows whether they can run.
    """
    found = []
    trials = "none of the points tried" if spec.search else "no trial"
    if plan.unreached:
        epochs = ", ".join(map(str, plan.unreached))
        place = _place(spec, "training.milestones")
        found.append(f"{place}: {epochs} has an effect in {trials}: it needs more epochs")
    if plan.unbuilt:
        some = "1 network" if plan.unbuilt == 1 else f"{plan.unbuilt} networks"
        first = f"unlike the first {_MOST_BUILT}, " if has_torchvision() else ""
        tried = f"{first}{some} of torchvision could not be tried here"
        found.append(
            f"{_place(spec, 'model')}: {tried}: trials whose network does not take its images fail at the start"
        )
    for path in plan.idle:
        needs = _NEEDS.get(path) or _NEEDS.get(path.partition(".")[0], "other values of the fields beside it")
        found.append(f"{_place(spec, path)} has an effect in {trials}: it needs {needs}")
    return found


def _place(spec: ExperimentSpec, path: str) -> str:
    """Where the spec has the field."""
    if spec.search and path in spec.search.space:
        return f"search.space.{path}"
    return f"grid.{path}" if path in spec.grid else path
