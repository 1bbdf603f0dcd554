"""/v1/compare: trials, cells or experiments beside each other."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response

from service.access.security import Principal
from service.api.http.authentication import Reader
from service.api.http.dependencies import Db
from service.api.http.formats import AskedFormat, forms
from service.api.http.problems import RESPONSES, refusals
from service.api.leaderboards import ShownMetrics, metrics_named
from service.api.openapi_examples.comparisons import COMPARISON, COMPARISON_TEXT
from service.errors import FieldProblem, QueryError
from service.leaderboards.comparison import FEWEST, MOST, CompareQuestion, compare
from service.leaderboards.comparison_sheets import comparison_records, comparison_sheets
from service.leaderboards.counted_results import EVERYONE
from service.leaderboards.metrics import HEADLINE
from service.leaderboards.sides import Key, Kind
from service.schemas.comparisons import CompareOut
from service.specs.patterns import FINGERPRINT, FINGERPRINTS, NUMBER_OR_FINGERPRINT, NUMBERS

router = APIRouter(prefix="/v1/compare", tags=["leaderboards"], responses=RESPONSES | refusals(406))

_LONGEST = 4000


@dataclass(frozen=True, kw_only=True)
class AskedComparison:
    """What is to be compared: two to ten of one kind."""

    trials: Annotated[
        str | None,
        Query(
            max_length=_LONGEST,
            pattern=NUMBERS,
            description=f"Trials, {FEWEST} to {MOST} of them, separated by commas.",
            examples=["7,8"],
        ),
    ] = None
    cells: Annotated[
        str | None,
        Query(
            max_length=_LONGEST,
            pattern=FINGERPRINTS,
            description="Instead: cells, with all of their seeds, by their fingerprints.",
        ),
    ] = None
    experiments: Annotated[
        str | None,
        Query(
            max_length=_LONGEST,
            pattern=NUMBERS,
            description="Instead: experiments; their cells are matched by what any of these experiments varies.",
        ),
    ] = None
    baseline: Annotated[
        str | None,
        Query(
            pattern=NUMBER_OR_FINGERPRINT,
            description="One of those named, to which differences are taken; by default the first.",
        ),
    ] = None
    metrics: ShownMetrics = None
    protocol: Annotated[
        str | None,
        Query(
            pattern=FINGERPRINT,
            description="Only results under this protocol count; by default, metric by metric, those under the one "
            "that most sides have.",
        ),
    ] = None
    limit: Annotated[int, Query(ge=1, le=1000, description="At most so many rows.")] = 100

    def question(self, who: Principal) -> CompareQuestion:
        """The question, for who asks; raises `QueryError` with the field that is wrong, and what would be right."""
        given = {kind: text for kind in Kind if (text := getattr(self, kind)) is not None}
        if not given:
            fix = f"name {FEWEST} to {MOST} trials, cells or experiments, separated by commas"
            raise QueryError([FieldProblem(Kind.TRIALS, fix)])
        (kind, text), *others = given.items()
        if others:
            fix = f"{' and '.join(given)} cannot be compared with each other: name those of one kind"
            raise QueryError([FieldProblem(others[0][0], fix)])
        keys = named(kind, text)
        shown = () if self.metrics == "all" else metrics_named("metrics", self.metrics)
        return CompareQuestion(
            kind=kind,
            keys=keys,
            baseline=0 if self.baseline is None else _place(self.baseline, kind, keys),
            metrics=HEADLINE if self.metrics is None else shown,
            protocol=self.protocol,
            limit=self.limit,
            scope=who.project_id or EVERYONE,
        )


def named(kind: Kind, text: str) -> list[Key]:
    """The different keys of a list; raises `QueryError` where they are too few or too many."""
    keys = list(dict.fromkeys(one if kind is Kind.CELLS else int(one) for one in text.split(",")))
    if not FEWEST <= len(keys) <= MOST:
        have = f"names {len(keys)} different {kind.one if len(keys) == 1 else kind}"
        raise QueryError([FieldProblem(kind, f"{have}: {FEWEST} to {MOST} are compared")])
    return keys


def _place(baseline: str, kind: Kind, keys: list[Key]) -> int:
    key: Key = baseline if kind is Kind.CELLS or not baseline.isdecimal() else int(baseline)
    if key not in keys:
        raise QueryError([FieldProblem("baseline", f"{baseline} is none of the {kind} named: name one of them")])
    return keys.index(key)


@router.get("", operation_id="getComparison", responses=forms(COMPARISON, COMPARISON_TEXT), response_model=CompareOut)
def show(
    database: Db,
    who: Reader,
    compared: Annotated[AskedComparison, Depends()],
    asked: Annotated[AskedFormat, Depends()],
) -> Response:
    """Two to ten trials, cells or experiments: what differs in their configurations, and in results, with errors.

    Of cells and experiments means over seeds, and differences to the baseline with standard error and Welch's test; of
    single trials differences without error. Nothing is averaged over configurations or protocols, and no difference is
    taken between numbers of unequal protocols: `unequal` says where and why. Cells count as on leaderboards, without
    archived experiments; experiments that are named count archived or not. As JSON, CSV, Markdown or LaTeX.
    """
    question = compared.question(who)
    with database.read() as session:
        found = compare(session, question)
    return asked.answer(lambda: found, lambda: comparison_sheets(found), lambda: comparison_records(found))
