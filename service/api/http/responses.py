"""How a GET answers, with ETags and pages, and how the database's rows are shown as the API's answers."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import Depends, Header, Request, Response
from pydantic import BaseModel
from sqlalchemy.orm import Session

from service.database import Experiment, ExperimentState, Result, Trial
from service.experiments import store
from service.experiments.listing import tags_of
from service.queue.attempts import silences
from service.schemas.experiments import ExperimentOut, ExperimentProgress
from service.schemas.field_selection import Fields
from service.schemas.trials import PASSING, ResultOut, TrialOut


class Reply:
    """How a GET answers: with an ETag of what it says, and with 304 and no body to who has it already."""

    def __init__(
        self,
        request: Request,
        if_none_match: Annotated[str | None, Header(description="ETags of answers that are known.")] = None,
    ) -> None:
        self._url = request.url
        self._known = if_none_match

    def __call__(
        self,
        answer: BaseModel | Mapping[str, object] | Sequence[BaseModel],
        *,
        following: str | int | None = None,
        page_parameter: str = "cursor",
        revision: int | None = None,
    ) -> Response:
        """The answer as JSON. `revision` enters the ETag, for `If-Match`.

        `following` is where the next page begins, as the value of the query parameter `page_parameter`.
        """
        if isinstance(answer, BaseModel):
            body = written(answer)
        elif isinstance(answer, Mapping):
            body = json.dumps(answer, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        else:
            body = b"[" + b",".join(map(written, answer)) + b"]"
        tag = tag_of(body, revision)
        headers = validators(tag)
        headers |= self.link(following, page_parameter)
        if etag_matches(self._known, tag):
            return Response(status_code=304, headers=headers)
        return Response(body, media_type="application/json", headers=headers)

    def link(self, following: str | int | None, page_parameter: str = "cursor") -> dict[str, str]:
        """The header that names the next page, where there is one."""
        if following is None:
            return {}
        return {"Link": f'<{self._url.include_query_params(**{page_parameter: following})}>; rel="next"'}


Answer = Annotated[Reply, Depends(Reply)]


def written(answer: BaseModel) -> bytes:
    """An answer as a GET writes it."""
    return answer.model_dump_json().encode()


def tag_of(body: bytes, revision: int | None = None) -> str:
    """The ETag of an answer that is written so."""
    digest = hashlib.sha256(body).hexdigest()[:32]
    return f'"{digest}"' if revision is None else f'"{revision}-{digest}"'


def validators(tag: str) -> dict[str, str]:
    """Headers that let a client keep an answer, and ask each time whether it is still the newest."""
    return {"ETag": tag, "Cache-Control": "private, no-cache", "Vary": "Authorization"}


def etag_matches(if_none_match: str | None, tag: str) -> bool:
    """Whether the header names this ETag, weak or strong."""
    if if_none_match is None:
        return False
    known = [one.strip().removeprefix("W/") for one in if_none_match.split(",")]
    return tag.removeprefix("W/") in known or known == ["*"]


def revision_matches(if_match: str | None, revision: int) -> bool:
    """Whether a change may be made: no `If-Match`, `*`, or the ETag of an answer that showed this revision.

    What workers do meanwhile makes other ETags but no other revision, so it stands in no one's way.
    """
    if if_match is None or if_match.strip() == "*":
        return True
    return any(re.fullmatch(rf'"{revision}(-[0-9a-f]+)?"', one.strip()) for one in if_match.split(","))


_EVERYTHING = Fields(ExperimentOut)


def experiment_out(session: Session, experiment: Experiment) -> ExperimentOut:
    """An experiment with its progress and tags, as they stand in this transaction."""
    session.flush()
    (out,) = experiments_out(session, [experiment])
    return out


def experiments_out(
    session: Session, experiments: Sequence[Experiment], wanted: Fields = _EVERYTHING
) -> list[ExperimentOut]:
    """Experiments as the API shows them; what is not wanted is not looked for, and is missing in the answers."""
    ids = [experiment.id for experiment in experiments]
    progress = store.progress(session, ids) if "progress" in wanted else {}
    tags = tags_of(session, ids) if "tags" in wanted else {}
    plain = [name for name in ExperimentOut.model_fields if name not in ("progress", "tags") and name in wanted]
    answers = []
    for experiment in experiments:
        values: dict[str, Any] = {name: getattr(experiment, name) for name in plain}
        if "progress" in wanted:
            values["progress"] = progress_out(experiment, progress[experiment.id])
        if "tags" in wanted:
            values["tags"] = tags[experiment.id]
        answers.append(ExperimentOut.model_construct(set(values), **values))
    return answers


def progress_out(experiment: Experiment, progress: store.Progress) -> ExperimentProgress:
    """Progress with the time left."""
    return ExperimentProgress(**vars(progress), seconds_left=_seconds_left(experiment, progress))


_EVERYTHING_OF_A_TRIAL = Fields(TrialOut)


def trials_out(
    session: Session, rows: Sequence[tuple[Trial, Result | None]], wanted: Fields = _EVERYTHING_OF_A_TRIAL
) -> list[TrialOut]:
    """Trials as the API shows them; what is not wanted is not looked for, and is missing in the answers."""
    passing = [name for name in PASSING if name in wanted]
    silent = silences(session, [trial for trial, _ in rows]) if passing else {}
    plain = [name for name in TrialOut.model_fields if name not in ("result", *PASSING) and name in wanted]
    answers = []
    for trial, result in rows:
        values: dict[str, Any] = {name: getattr(trial, name) for name in plain}
        values |= {name: getattr(silent.get(trial.id), name, None) for name in passing}
        if "result" in wanted:
            values["result"] = result_out(result) if result else None
        answers.append(TrialOut.model_construct(set(values), **values))
    return answers


def result_out(result: Result) -> ResultOut:
    """A result as the API shows it."""
    return ResultOut.model_construct(**{name: getattr(result, name) for name in ResultOut.model_fields})


def _seconds_left(experiment: Experiment, progress: store.Progress) -> float | None:
    """From the last progress on, at the pace since the last claim: what is stored says it, so the ETag stands still.

    None until a twentieth of its work is done, as starting takes time too, and where all epochs are done: how long the
    evaluations take that are left is not known.
    """
    claimed, progressed = experiment.claimed_at, experiment.progressed_at
    done, left = progress.epochs_done - experiment.epochs_at_claim, progress.epochs - progress.epochs_done
    wanted = (progress.epochs - experiment.epochs_at_claim) / 20
    if experiment.state != ExperimentState.RUNNING or claimed is None or progressed is None:
        return None
    return None if done < max(1, wanted) or not left else max(0.0, (progressed - claimed).total_seconds()) * left / done
