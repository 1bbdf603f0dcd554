"""The logs of trials and of the drivers that run experiments: their end, or all that is still to come."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response
from fastapi.responses import StreamingResponse
from sqlalchemy.orm import Session

from service.api.http.authentication import Reader, Watch, Watched
from service.api.http.dependencies import Config, Db, ExperimentId, Subscribed, TrialId
from service.api.http.examples import Responses, headers_of
from service.api.http.problems import RESPONSES
from service.database import OPEN_EXPERIMENTS, OPEN_TRIALS
from service.errors import NotFoundError
from service.experiments import logs, store
from service.experiments.logs import Log
from service.experiments.subscriptions import Subscriptions
from service.settings import Settings

router = APIRouter(prefix="/v1", tags=["logs"], responses=RESPONSES)

_EXAMPLE = "2026-11-21T03:32:06.120Z INFO epoch 1/12: train loss 1.2301, validation accuracy 0.8811, 0.65 s\n"
_TEXT: Responses = {
    200: {"description": "The log", "content": {"text/plain": {"schema": {"type": "string"}, "example": _EXAMPLE}}}
    | headers_of("Cache-Control")
}
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Type": "text/plain; charset=utf-8",
    "X-Accel-Buffering": "no",
    "X-Content-Type-Options": "nosniff",
}
_LOOK_SECONDS = 0.5
_SEAM = 4096
"""So many bytes before a place tell whether a log goes on there that was told until then."""


@dataclass(frozen=True)
class _Asked:
    """Who asks for how much of a log."""

    who: Reader
    database: Db
    settings: Config
    subscriptions: Subscribed
    watch: Watched
    tail: Annotated[int, Query(ge=0, le=100_000, description="So many lines of its end, 4 MiB at most.")] = 1000
    follow: Annotated[bool, Query(description="Go on with what is written, until the end.")] = False

    def answer(self, what: str, find: Callable[[Settings], Log | None], is_open: Callable[[Session], bool]) -> Response:
        """The end of the log that `find` names, or all that is still to come; raises `NotFoundError`.

        To follow what never wrote one is to read nothing, whether it ended before it was asked for or after.
        """

        def ended() -> bool:
            with self.database.read() as session:
                return not is_open(session)

        def newest() -> Log | None:
            return find(self.settings)

        ended()  # raises where it is not there
        if self.follow:
            return StreamingResponse(
                _follow(self.subscriptions, self.watch, newest, ended, self.tail), headers=_HEADERS
            )
        if (path := newest()) is None:
            raise NotFoundError(f"{what} has no log; one is written as soon as it runs")
        return Response(logs.tail(path, self.tail)[0], headers=_HEADERS)


Asked = Annotated[_Asked, Depends()]


@router.get("/trials/{trial_id}/logs", operation_id="getTrialLog", response_class=Response, responses=_TEXT)
def of_trial(trial_id: TrialId, asked: Asked) -> Response:
    """The log of a trial's newest attempt. With `follow` it goes on until the trial is final, through all attempts."""

    def is_open(session: Session) -> bool:
        return store.get_trial(session, trial_id, project_id=asked.who.project_id).state in OPEN_TRIALS

    return asked.answer(f"trial {trial_id}", lambda settings: logs.trial_log(settings, trial_id), is_open)


@router.get(
    "/experiments/{experiment_id}/logs", operation_id="getExperimentLog", response_class=Response, responses=_TEXT
)
def of_experiment(experiment_id: ExperimentId, asked: Asked) -> Response:
    """The log of the process that ran the experiment last. With `follow` it goes on until the experiment is final."""

    def is_open(session: Session) -> bool:
        found = store.get_experiment(session, experiment_id, project_id=asked.who.project_id)
        return found.state in OPEN_EXPERIMENTS

    return asked.answer(
        f"experiment {experiment_id}", lambda settings: logs.experiment_log(settings.data_dir, experiment_id), is_open
    )


async def _follow(
    subscriptions: Subscriptions, watch: Watch, find: Callable[[], Log | None], ended: Callable[[], bool], lines: int
) -> AsyncIterator[bytes]:
    """The end of the log, then what is written to it, then what the logs of later attempts have beyond it.

    One that does not begin with what was told is told from its beginning. It ends early where the key does.
    """
    path, offset, seam = None, 0, b""
    first = True
    while await watch.holds(subscriptions.aside):
        final = await subscriptions.aside(lambda: _safely(ended))  # before reading: what is written until then is all
        newest = await subscriptions.aside(find)
        if first and newest is not None:
            text, offset = await subscriptions.aside(partial(logs.tail, newest, lines))
            path = newest
            seam = await subscriptions.aside(partial(logs.read_before, path, offset, _SEAM))
            yield text
        first = False
        while path is not None:
            piece = await subscriptions.aside(partial(logs.read_from, path, offset))
            if not piece:
                break
            offset, seam = offset + len(piece), (seam + piece)[-_SEAM:]
            yield piece
        if newest is not None and newest != path:
            path = newest
            if await subscriptions.aside(partial(logs.read_before, path, offset, _SEAM)) != seam:
                offset, seam = 0, b""
        elif final:
            return
        else:
            await asyncio.sleep(_LOOK_SECONDS)


def _safely(ended: Callable[[], bool]) -> bool:
    try:
        return ended()
    except NotFoundError:  # deleted meanwhile
        return True
