"""/v1/tables: the paper's tables beside what was measured here."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Response

from service.access.security import Principal
from service.api.http.authentication import Reader
from service.api.http.dependencies import MAX_ID, Db
from service.api.http.formats import AskedFormat, forms
from service.api.http.problems import RESPONSES, refusals
from service.api.openapi_examples.leaderboards import TABLE, TABLE_TEXT
from service.database.engine import Database
from service.errors import FieldProblem, QueryError
from service.experiments import store
from service.leaderboards.counted_results import EVERYONE
from service.paper.presets import PAPER, Scale
from service.paper.reference import paper_table
from service.paper.reproduction import Reproduction, reproduce
from service.paper.sheets import table_records, table_sheet
from service.schemas.leaderboards import TableOut
from service.specs.patterns import FINGERPRINT

router = APIRouter(prefix="/v1/tables", tags=["leaderboards"], responses=RESPONSES | refusals(406))


@dataclass(frozen=True)
class AskedTable:
    """Which table of the paper is wanted, and from which trials."""

    paper: Annotated[str, Path(max_length=64, description="The paper's key.", examples=[PAPER])]
    name: Annotated[str, Path(max_length=64, description="Which of its tables or figures.", examples=["table2"])]
    experiment: Annotated[int | None, Query(ge=1, le=MAX_ID, description="Only this experiment's trials.")] = None
    scale: Annotated[
        Scale, Query(description="smoke: from an experiment's small stand-ins, to see that the path works.")
    ] = Scale.FULL
    protocol: Annotated[
        str | None, Query(pattern=FINGERPRINT, description="By default the one that fills most of a data set's rows.")
    ] = None

    @property
    def smoke(self) -> bool:
        """Whether it is made from the stand-ins: of an experiment alone."""
        return self.scale is Scale.SMOKE and self.experiment is not None

    def reproduce(self, database: Database, who: Principal) -> Reproduction:
        """The table with our numbers; raises `NotFoundError`."""
        table = paper_table(self.paper, self.name)
        with database.read() as session:
            if self.experiment is not None:
                store.get_experiment(session, self.experiment, project_id=who.project_id)
            return reproduce(
                session,
                table,
                experiment_id=self.experiment,
                smoke=self.smoke,
                protocol=self.protocol,
                scope=who.project_id or EVERYONE,
            )


@router.get("/{paper}/{name}", operation_id="getTable", responses=forms(TABLE, TABLE_TEXT), response_model=TableOut)
def show(
    database: Db, who: Reader, table: Annotated[AskedTable, Depends()], asked: Annotated[AskedFormat, Depends()]
) -> Response:
    """A table of the paper with the printed values and ours side by side, missing rows marked, differences named."""
    if table.scale is Scale.SMOKE and not table.smoke:
        raise QueryError([FieldProblem("experiment", "is required with scale=smoke")])
    found = table.reproduce(database, who)
    return asked.answer(lambda: found, lambda: [table_sheet(found)], lambda: table_records(found))
