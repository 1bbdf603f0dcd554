"""How requests make and enlarge experiments, once per Idempotency-Key: by a spec, a preset or another experiment."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, TypeVar

from fastapi import Header, Query, Response
from fastapi.responses import JSONResponse
from pydantic import JsonValue
from sqlalchemy.orm import Session

from service.api.dry_run import dry_run, taken_of_cards
from service.api.http.authentication import Submitter
from service.api.http.dependencies import Config, Db
from service.api.http.responses import experiment_out
from service.api.own_data import OwnData
from service.api.spec_warnings import bf16_warnings, spec_warnings
from service.database.outages import broken_connection
from service.errors import FieldProblem, QueryError, SpecError
from service.experiments import store
from service.experiments.memory import shares
from service.experiments.submission import Draft, submit
from service.schemas.dry_runs import DryRunOut
from service.specs.grid import count_grid, datasets, expand_grid
from service.specs.patterns import PRINTABLE
from service.specs.planner import GridCount, Plan
from service.specs.spec import ExperimentSpec
from ttsv.runtime.faults import fault

_Planned = TypeVar("_Planned", bound=Plan | GridCount)


@dataclass(frozen=True)
class Submission:
    """Who wants to make or enlarge an experiment, and how the answer goes out: once per Idempotency-Key."""

    response: Response
    database: Db
    settings: Config
    who: Submitter
    idempotency_key: Annotated[
        str | None,
        Header(
            min_length=1,
            max_length=200,
            pattern=PRINTABLE,
            description="A word of one's own: the same request sent again with it gets the same answer, and stores "
            "nothing more.",
        ),
    ] = None

    @cached_property
    def own(self) -> OwnData:
        """The user's own data sets, as far as they are known here."""
        return OwnData(self.settings)

    def said(self, spec: ExperimentSpec, plan: Plan | GridCount) -> list[str]:
        """What is said of a spec that can run; raises `SpecError` of one that cannot."""
        return spec_warnings(self.database, self.settings, self.own, spec, plan)

    def of(
        self, experiment_id: int, request: dict[str, JsonValue], make: Callable[..., Draft], **asked: Any
    ) -> dict[str, JsonValue]:
        """Submits what a function `draft_...` of `service.experiments.drafts` makes of an experiment.

        A request that was answered before gets its answer whatever became of the experiment since, which may not let
        itself be drafted from any more.
        """
        with self.database.read() as session:
            known = store.answered(session, self.idempotency_key, request, project_id=self.who.project_id)
            if known is None:
                most = self.settings.max_trials
                draft = make(session, experiment_id, who=self.who, max_trials=most, facts=self.own.facts, **asked)
        if known is None:
            return self.store(draft, request)
        if known["id"] != experiment_id:
            self.response.headers["Location"] = f"/v1/experiments/{known['id']}"
        return known

    def store(self, draft: Draft, request: dict[str, JsonValue]) -> dict[str, JsonValue]:
        """Submits a draft; the experiment as plain data, and what is said of its new trials.

        `request` says what is asked, and of what. A new experiment's address becomes the header Location.
        """
        said: list[JsonValue] = [*self.said(draft.spec, draft.fresh)]
        if draft.sources is None:  # a re-evaluation trains nothing
            said += bf16_warnings(self.database, draft.spec, draft.fresh)
            if shares(draft.spec.resources.gpus):
                cells = draft.fresh.cells
                said += taken_of_cards(self.database, draft.spec, cells, self.who.project_id)[1].warnings

        def work(session: Session) -> dict[str, JsonValue]:
            def stored() -> dict[str, JsonValue]:
                made = experiment_out(session, submit(session, draft, self.who)).model_dump(mode="json")
                return {**made, "warnings": said}

            return store.answer_once(session, self.idempotency_key, request, stored, project_id=self.who.project_id)

        answer = self.database.write(work)
        fault("after_submission", broken_connection)
        if draft.before is None:
            self.response.headers["Location"] = f"/v1/experiments/{answer['id']}"
        return answer


@dataclass(frozen=True)
class SpecSubmission(Submission):
    """A spec that is posted, or only to be looked at."""

    dry_run: Annotated[
        bool, Query(description="Store nothing: answer (200) with the trials and what they would cost.")
    ] = False

    summary: Annotated[
        bool,
        Query(
            description="With dry_run: count the trials of large grids without listing one. `trials` is empty, and "
            "everything else is said of all of them."
        ),
    ] = False

    def post(self, spec: ExperimentSpec) -> Mapping[str, object] | JSONResponse:
        """The stored experiment with what has no effect in it, or what the spec would become.

        A request that was answered before gets that answer, what was said of its spec then included.
        """
        if self.summary and not self.dry_run:
            raise QueryError([FieldProblem("summary", "is said of a dry run: add dry_run=true, or remove it")])
        if self.dry_run:
            return JSONResponse(self.looked_at(spec).model_dump(mode="json"))
        request = spec.model_dump(mode="json")
        with self.database.read() as session:
            known = store.answered(session, self.idempotency_key, request, project_id=self.who.project_id)
        if known is not None:
            self.response.headers["Location"] = f"/v1/experiments/{known['id']}"
            return known
        return self.store(Draft(spec, self._planned(spec, expand_grid)), request)

    def looked_at(self, spec: ExperimentSpec) -> DryRunOut:
        """What the spec would become. Raises `SpecError`."""
        expand: Callable[..., Plan | GridCount] = count_grid if self.summary else expand_grid
        plan = self._planned(spec, expand)
        said = [*self.said(spec, plan), *bf16_warnings(self.database, spec, plan)]
        return dry_run(self.database, spec, plan, said, self.who.project_id, self.own.facts)

    def _planned(self, spec: ExperimentSpec, expand: Callable[..., _Planned]) -> _Planned:
        """The trials of a spec. Raises `SpecError` of all that is wrong with it, the user's own data sets included."""
        problems = self.own.problems(datasets(spec))
        try:
            plan = expand(spec, max_trials=self.settings.max_trials, facts=self.own.facts)
        except SpecError as error:
            raise SpecError([*error.problems, *problems]) from error
        if problems:
            raise SpecError(problems)
        return plan
