"""The paper's tables: what was printed, of which configuration, and how that differs from what was measured here."""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import NotRequired, TypeAlias, TypedDict

import yaml

from service.errors import NotFoundError
from service.leaderboards.boards import PaperReference, Printed
from service.leaderboards.metrics import Metric
from service.leaderboards.protocols import Record, differences
from service.paper.presets import PAPER, Preset, preset_spec, smaller
from service.paper.recipes import PresetGrid
from service.paper.recipes import Protocol as PresetProtocol
from service.specs.columns import value_of
from service.specs.grid import expand_grid
from service.specs.spec import ExperimentSpec
from ttsv.config.fields import FieldValue, FieldValues, TrialFields
from ttsv.config.training import LOOKING_ON
from ttsv.config.trial import TrialConfig
from ttsv.errors import ConfigError

SPEEDUP, SAVING = RATIOS = ("speedup", "memory_saving")
"""Columns of their own: a time, or a memory, of the uncompressed network's row over that of the row."""
_PRINTED = {
    "accuracy": Metric.ACCURACY,
    "autoattack": Metric.ROBUST_ACCURACY,
    "corruptions": Metric.CORRUPTION_ACCURACY,
    "ece": Metric.ECE,
    "certified": Metric.ASSUMED_CERTIFIED_36,
    "compression": Metric.COMPRESSION,
    "max_empirical_lipschitz": Metric.LIPSCHITZ_FGSM,
}
HEADLINE = ("dataset", "model", "layer", "rank", "constraint", "delta", "lambda_ort")
"""Equal fields make a trial one of a printed row; whatever else differs is said."""


Label: TypeAlias = str | float | None
"""What a row is called in one column."""
Headline: TypeAlias = tuple[FieldValue | FieldValues, ...]
"""A trial's values of `HEADLINE`."""


@dataclass(frozen=True)
class PrintedRow:
    """One row: its labels, its values, the configuration that it stands for and that one's small stand-in."""

    labels: Mapping[str, Label]
    values: dict[str, Printed]
    config: TrialFields
    smoke: TrialFields

    @property
    def key(self) -> Headline:
        """What a trial of the row has in common with it."""
        return headline(self.config)


@dataclass(frozen=True)
class PaperTable:
    """A table or figure. `columns` are metrics and `RATIOS`; `ratios` names the metric that each of these compares.

    `beside`: what the rows' values are, the paper's printed ones ("paper") or those that its formulas predict. `note`:
    what must be known of its rows.
    """

    name: str
    title: str
    seeds: str
    labels: tuple[str, ...]
    columns: tuple[str, ...]
    ratios: dict[str, Metric]
    ratio_notes: tuple[str, ...]
    beside: str
    note: str | None
    rows: tuple[PrintedRow, ...]


def headline(config: TrialFields) -> Headline:
    """The fields of a trial by which it belongs to a printed row."""
    return tuple(map(config.get, HEADLINE))


def paper_table(paper: str, name: str) -> PaperTable:
    """A table or figure of the paper; raises `NotFoundError`."""
    tables = _tables()
    if paper != PAPER or name not in tables:
        asked = f"{paper}/{name}".removeprefix("-/")[:100]  # a client sends a name without a paper so
        raise NotFoundError(f"there is no table {asked!r}; there are {', '.join(f'{PAPER}/{n}' for n in tables)}")
    return tables[name]


def preset_table(preset: Preset) -> PaperTable | None:
    """The table or figure whose numbers a preset makes anew, if it has one."""
    return _tables().get(preset.name.removeprefix(f"{PAPER}/"))


def references(config: TrialFields, record: Record) -> list[PaperReference]:
    """The printed rows that a cell's configuration corresponds to, with the differences of its protocol's record."""
    found = _by_headline().get(headline(config), [])
    return [
        PaperReference(table.name, row.labels, row.values, notes(table, row, config, record)) for table, row in found
    ]


def printed_of(row: PrintedRow) -> dict[str, list[tuple[str, Printed]]]:
    """Metric -> what tables of the paper print of a row's configuration, each with the table's name.

    A figure prints no numbers, but some of its points stand in a table.
    """
    found: dict[str, list[tuple[str, Printed]]] = {}
    for table, other in _by_headline().get(row.key, []):
        for metric, value in other.values.items():
            found.setdefault(metric, []).append((table.name, value))
    return found


def printed_notes(table: PaperTable) -> list[str]:
    """In words: of a figure's points that other tables print, how the paper measured them."""
    printed = {metric for row in table.rows for metric in printed_of(row)} & set(table.columns)
    if not printed or table.beside != "paper":
        return []
    sources = dict.fromkeys(name for row in table.rows for of in printed_of(row).values() for name, _ in of)
    said = [f"seeds of {name}: {_tables()[name].seeds} in the paper" for name in sources]
    if Metric.LIPSCHITZ_FGSM in printed:
        said.append(f"empirical Lipschitz constant: {_published().protocol['max_empirical_lipschitz']}")
    return said


def notes(table: PaperTable, row: PrintedRow, config: TrialFields, record: Record) -> list[str]:
    """In words: in what a measured cell and its protocol differ from a printed row."""
    said = [str(d).replace(" there", " in the paper") for d in differences(complete(config), row.config)]
    protocol = _published().protocol
    # Of LipConvNets the authors' scripts evaluate the last epoch, of other networks the one they chose.
    theirs, told = "best epoch on the test images", protocol["selection"]
    if str(row.config.get("model")).startswith("lipconvnet-"):
        theirs, told = "last epoch", protocol["selection_lipconvnet"]
    if (weights := record.get("weights")) != theirs:
        said.append(f"weights: {weights or 'not recorded'} here; in the paper {told}")
    if Metric.ROBUST_ACCURACY in row.values:
        said.append(f"AutoAttack: in the paper {protocol['autoattack']}")
        images = _images(record)
        if images is not None and images != protocol["autoattack_images"]:
            said.append(f"AutoAttack: {images} images here, {protocol['autoattack_images']} in the paper")
    if Metric.ASSUMED_CERTIFIED_36 in row.values:
        said.append(f"p.r.: {protocol['certified']}")
    if Metric.LIPSCHITZ_FGSM in row.values:
        said.append(f"empirical Lipschitz constant: {protocol['max_empirical_lipschitz']}")
    if row.values and table.beside == "paper":
        said.append(f"seeds: {table.seeds} in the paper")
    return said


def _images(record: Record) -> int | None:
    """How many images were attacked, if the record says so."""
    images = record.get("images")
    attacked = images.get("autoattack") if isinstance(images, dict) else None
    return attacked if isinstance(attacked, int) else None


def complete(config: TrialFields) -> TrialFields:
    """In today's canonical form, with the fields that were added later, without what makes no other network."""
    with contextlib.suppress(ConfigError):  # a field that is no more
        config = TrialConfig.from_dict(config).canonical().to_dict()
    kept = {name: value for name, value in config.items() if name not in ("seed", "evaluation")}
    if isinstance(training := kept.get("training"), dict):
        kept["training"] = {name: value for name, value in training.items() if name not in LOOKING_ON}
    return kept


PrintedNumbers: TypeAlias = Mapping[str, float | list[float] | str | None]
"""A row of the file: its labels, and by name a value, or a mean and what stands behind ±, or null (a dash)."""


class _TableFields(TypedDict):
    """A table or figure in the file."""

    title: str
    preset: str
    dataset: NotRequired[str]
    seeds: str
    labels: list[str]
    columns: list[str]
    rows: NotRequired[list[PrintedNumbers]]
    beside: NotRequired[str]
    speedup: NotRequired[str]
    speedup_note: NotRequired[str]
    memory_saving: NotRequired[str]
    memory_saving_note: NotRequired[str]
    note: NotRequired[str]


class _ProtocolFields(TypedDict):
    """How the paper's numbers were measured, as far as it differs from what is measured here."""

    selection: str
    selection_lipconvnet: str
    autoattack: str
    autoattack_images: int
    certified: str
    max_empirical_lipschitz: str
    ece_bins: int


@dataclass(frozen=True)
class _Published:
    """The file of printed numbers."""

    protocol: _ProtocolFields
    tables: Mapping[str, _TableFields]


@cache
def _published() -> _Published:
    text = files("service.paper").joinpath(f"{PAPER}.yaml").read_text(encoding="utf-8")
    data = yaml.load(text, Loader=_AsPrinted)  # a safe loader
    return _Published(data.pop("protocol"), data)


class _PrintedNumber(float):
    """A number that remembers with how many decimals it is written: 75.60 is not 75.6."""

    decimals: int


class _AsPrinted(yaml.SafeLoader):
    """Reads numbers as they are written."""


def _number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    found = _PrintedNumber(loader.construct_yaml_float(node))
    found.decimals = len(node.value.partition(".")[2])
    return found


_AsPrinted.add_constructor("tag:yaml.org,2002:float", _number)


@cache
def _tables() -> dict[str, PaperTable]:
    return {name: _table(name, data) for name, data in _published().tables.items()}


@cache
def _by_headline() -> dict[Headline, list[tuple[PaperTable, PrintedRow]]]:
    found: dict[Headline, list[tuple[PaperTable, PrintedRow]]] = {}
    for table in _tables().values():
        for row in table.rows:
            if row.values and table.beside == "paper":
                found.setdefault(row.key, []).append((table, row))
    return found


def _table(name: str, data: _TableFields) -> PaperTable:
    points = list(_points(data["preset"]))
    printed: Sequence[PrintedNumbers] = data.get("rows") or [{} for _ in points]
    labels = tuple(data["labels"])
    rows = []
    for (config, smoke), values in zip(points, printed, strict=True):
        said = {label: _label(label, config) for label in labels}
        rows.append(PrintedRow(said, _values(values), config, smoke))
    ratios = {SPEEDUP: data.get("speedup"), SAVING: data.get("memory_saving")}
    ratio_notes = {SPEEDUP: data.get("speedup_note"), SAVING: data.get("memory_saving_note")}
    return PaperTable(
        name,
        data["title"],
        data["seeds"],
        labels,
        tuple(data["columns"]),
        {ratio: Metric(metric) for ratio, metric in ratios.items() if metric is not None},
        tuple(f"{ratio.replace('_', ' ')}: {note}" for ratio, note in ratio_notes.items() if note is not None),
        data.get("beside", "paper"),
        data.get("note"),
        tuple(rows),
    )


def _points(preset: str) -> Iterator[tuple[TrialFields, TrialFields]]:
    """The preset's rows in the text's order, seeds apart: each configuration with its small stand-in.

    The configurations are those of the authors' programs; a row that these lack has the text's.
    """
    programs = {headline(config): (config, smoke) for config, smoke in _points_by(preset, PresetProtocol.CODE)}
    for point in _points_by(preset, PresetProtocol.TEXT):
        yield programs.get(headline(point[0]), point)


def _points_by(preset: str, protocol: PresetProtocol) -> Iterator[tuple[TrialFields, TrialFields]]:
    """The same by one protocol, in its own order."""
    spec = preset_spec(preset, protocol=protocol)
    axes = {path: values for path, values in spec["grid"].items() if path != "seed"}
    for variant, point in itertools.product(spec["variants"], itertools.product(*axes.values())):
        one: PresetGrid = {
            "base": spec["base"],
            "variants": [variant],
            "grid": {path: [value] for path, value in zip(axes, point, strict=True)},
        }
        yield _config(one), _config(smaller(one))


def _config(spec: PresetGrid) -> TrialFields:
    plan = expand_grid(ExperimentSpec.model_validate({"name": "row", **spec}), max_trials=1)
    return complete(plan.trials[0].config.to_dict())


def _values(printed: PrintedNumbers) -> dict[str, Printed]:
    found = {}
    for name, value in printed.items():
        metric = name if name in RATIOS else _PRINTED.get(name)
        if metric is None or value is None or isinstance(value, str):
            continue
        mean, spread = value if isinstance(value, list) else (value, None)
        factor = 1.0 if metric in RATIOS else Metric(metric).reading.factor
        scaled = None if spread is None else round(spread / factor, 10)
        comparable = metric is not Metric.ROBUST_ACCURACY
        decimals = mean.decimals if isinstance(mean, _PrintedNumber) else 0
        found[str(metric)] = Printed(round(mean / factor, 10), scaled, comparable, decimals)
    return found


def _label(label: str, config: TrialFields) -> Label:
    if label == "method":
        if config["constraint"] == "clip":
            return f"clip to {config['delta']:g}"
        return "division" if config["constraint"] == "divide" else "baseline"
    if label == "depth":
        return int(str(config["model"]).rpartition("-")[2])
    if label == "channels":
        return int(str(config["dataset"]).split(":")[1].split("x")[0])
    value = value_of(config, label)
    assert value is None or isinstance(value, str | int | float), label
    return value if label != "lambda_ort" else value or None
