"""What is said of a spec before its trials run: what has no effect, and what is lacking where they would run.

Of the user's own data `own_data` says it, or refuses the spec.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from service.api.own_data import OwnData
from service.database.engine import Database
from service.errors import SpecError
from service.queue import census, nodes
from service.settings import Settings
from service.specs.grid import search_base
from service.specs.planner import CellCount, GridCount, Plan, warnings
from service.specs.spec import ExperimentSpec
from ttsv.config.evaluation import PUBLISHED_CORRUPTIONS
from ttsv.config.fields import FieldValue
from ttsv.data.catalog import FETCHED

_SHOWN = 3
"""Hosts that a warning names."""


def spec_warnings(
    database: Database, settings: Settings, own: OwnData, spec: ExperimentSpec, plan: Plan | GridCount
) -> list[str]:
    """What has no effect, and what is lacking. Raises `SpecError` for data that trials cannot have."""
    names = _datasets(spec, plan.cells)
    if problems := own.problems(names):
        raise SpecError(problems)
    absent = _absent_published(names, settings) + _absent_corruptions(spec, plan.cells, settings)
    return [*warnings(spec, plan), *own.warnings(names), *absent, *_idle_gpus(database, spec)]


def _idle_gpus(database: Database, spec: ExperimentSpec) -> list[str]:
    if spec.resources.gpus:
        return []
    with database.read() as session:
        gpus = nodes.gpus_there(session)
    there = f"{gpus:g} GPU{'s' * (gpus != 1)}"
    idle = f"resources.gpus is 0: trials compute on CPUs alone, though the nodes have {there}"
    return [f"{idle}; reserve 1 or a fraction of one"] if gpus else []


def bf16_warnings(database: Database, spec: ExperimentSpec, plan: Plan | GridCount) -> list[str]:
    """That the processors of the workers that are there cannot train in bf16; a later worker's may differ."""
    count = sum(cell.trials for cell in plan.cells if cell.config.training.precision == "bf16")
    searched = "bf16" in _searched(spec, "training.precision")
    if not (count or searched) or spec.resources.gpus:
        return []
    trials = "trials" if searched else f"{count} trial{'s' * (count > 1)}"
    fix = "have no instructions for it; take float32, or a GPU (resources.gpus)"
    with database.read() as session:
        if census.unfit_for_bf16(session):
            refused = "will be refused by every worker that is there: their processors"
            return [f"training.precision: {trials} in bf16 {refused} {fix}"]
        hosts = nodes.without_bf16(session)
    some = ", ".join(hosts[:_SHOWN]) + (f" and {len(hosts) - _SHOWN} more" if len(hosts) > _SHOWN else "")
    refused = f"will be refused where they come to run on some of the nodes ({some}), whose processors"
    return [f"training.precision: {trials} in bf16 {refused} {fix}"] if hosts else []


def _absent_published(names: set[str], settings: Settings) -> list[str]:
    """What is said of published data sets that are not in the data folder: they may still be fetched."""
    return [
        f"dataset {name}: this service's data folder has none, {_unless_there(settings)} its trials fail at the start; "
        f"run `ttsv data fetch {name}` on {_first_machine(settings)}"
        for name in sorted(names & FETCHED.keys())
        if not (settings.data_dir / "datasets" / FETCHED[name]).exists()
    ]


def _unless_there(settings: Settings) -> str:
    """Under which condition trials lack what this service's data folder lacks.

    Only with a store may the data folders of workers be others: without one they would leave files where nobody reads
    them, and are refused.
    """
    return "without which" if settings.storage is None else "and where the worker's has none"


def _first_machine(settings: Settings) -> str:
    """Where data are put; trials elsewhere copy them at first use."""
    head = "the head" if settings.storage is None else "the head of each worker"
    return f"{head}, from which further nodes copy it"


def _datasets(spec: ExperimentSpec, cells: Iterable[CellCount]) -> set[str]:
    """The data sets of all trials, those of a search that are still to be drawn included."""
    return {*map(str, _searched(spec, "dataset")), *(cell.config.dataset for cell in cells)}


def _searched(spec: ExperimentSpec, path: str) -> Sequence[FieldValue]:
    """What the trials of a search may have for a field that was given or is drawn from a list; of other specs none."""
    if spec.search is None:
        return ()
    base = search_base(spec)
    return [base[path]] if path in base else spec.search.space.get(path, {}).get("choice", ())


def _absent_corruptions(spec: ExperimentSpec, cells: Iterable[CellCount], settings: Settings) -> list[str]:
    """What is said of published corruptions that are not in the data folder: they may still be put there."""
    counts: Counter[str] = Counter()
    for cell in cells:
        if cell.config.evaluation.corruptions == "published":
            counts[cell.config.dataset] += cell.trials
    if "published" in _searched(spec, "evaluation.corruptions"):
        counts.update(dict.fromkeys(_datasets(spec, cells), 0))
    found = []
    for dataset, count in sorted(counts.items()):
        name = PUBLISHED_CORRUPTIONS[dataset]
        if not (settings.data_dir / "datasets" / name).is_dir():
            fails = "the trial fails" if count == 1 else f"{count or 'its'} trials fail"
            lacks = f"this service's data folder has no datasets/{name}, {_unless_there(settings)}"
            why = f"{lacks} {fails} at the start"
            fix = f"unpack its publisher's archive there, on {_first_machine(settings)}, or take generated ones"
            found.append(f"evaluation.corruptions: {why}; {fix}")
    return found
