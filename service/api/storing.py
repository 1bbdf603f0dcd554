"""Storing what a request asks for once, however often it is sent."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import Response
from sqlalchemy.orm import Session

from service import store, submission
from service.api.answers import experiment_out
from service.db import Database
from service.events import EventKind
from service.keys import check_quota
from service.models import Experiment
from service.security import ANYONE, Principal
from service.submission import Draft


@dataclass(frozen=True)
class New:
    """An experiment to be stored, and how it came about: `origin` is the experiment that it was made from."""

    draft: Draft
    kind: EventKind = EventKind.SUBMITTED
    origin: int | None = None


def store_new(
    database: Database, who: Principal, new: New, response: Response, key: str | None, request: dict[str, Any]
) -> dict[str, Any]:
    """Stores an experiment in the project of who asks, within its quota, once per Idempotency-Key; the answer."""

    def work(session: Session) -> Experiment:
        check_quota(session, who, len(new.draft.plan.trials))
        return submission.create_experiment(
            session,
            new.draft.spec,
            new.draft.plan,
            sources=new.draft.sources,
            kind=new.kind,
            origin=new.origin,
            project_id=who.project_id,
            owner=None if who == ANYONE else who.name,
            actor=who.name,
        )

    answer = once(database, who, key, request, work)
    response.headers["Location"] = f"/v1/experiments/{answer['id']}"
    return answer


def once(
    database: Database,
    who: Principal,
    key: str | None,
    request: dict[str, Any],
    work: Callable[[Session], Experiment],
) -> dict[str, Any]:
    """Does something once per key; the experiment as plain data. `request` says what is asked, and of what."""

    def answer(session: Session) -> dict[str, Any]:
        return store.answer_once(
            session,
            key,
            request,
            lambda: experiment_out(session, work(session)).model_dump(mode="json"),
            project_id=who.project_id,
        )

    return database.write(answer)
