"""/v1/artifacts: the files that trials left, by their id. No request names a path."""

import re
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Request, Response
from fastapi.responses import FileResponse

from service.api.http.authentication import Reader
from service.api.http.dependencies import MAX_ID, Config, Db, TrialId
from service.api.http.examples import UNCHANGED, VALIDATORS, Example, headers_of, kept
from service.api.http.problems import RESPONSES, problem, refusals
from service.api.http.responses import Answer, etag_matches, validators
from service.api.openapi_examples.trials import ARTIFACTS
from service.experiments import store
from service.experiments.artifacts import content_of
from service.schemas.trials import ArtifactList, ArtifactOut

router = APIRouter(prefix="/v1", tags=["artifacts"], responses=RESPONSES)

ArtifactId = Annotated[int, Path(ge=1, le=MAX_ID, description="The file's number, of all trials.")]

_BYTES: Example = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}, "example": "bytes"}}
_FILE = (*VALIDATORS, "Accept-Ranges", "Content-Disposition", "Last-Modified")
_RANGE = re.compile(r"\s*(?:(\d{1,18})-(\d{1,18})?|-(\d{1,18}))\s*")
_MAX_RANGES = 10


@router.get(
    "/trials/{trial_id}/artifacts",
    operation_id="listTrialArtifacts",
    responses=kept(ARTIFACTS),
    response_model=ArtifactList,
)
def index(trial_id: TrialId, answer: Answer, who: Reader, database: Db) -> Any:
    """The files a trial left: its manifest, with sizes and SHA-256."""
    with database.read() as session:
        store.get_trial(session, trial_id, project_id=who.project_id)
        items = [ArtifactOut.of(artifact) for artifact in store.artifacts_of(session, trial_id)]
    return answer(ArtifactList(items=items))


@router.get(
    "/artifacts/{artifact_id}",
    operation_id="getArtifact",
    response_class=FileResponse,
    responses={
        200: {"description": "The file", "content": _BYTES} | headers_of(*_FILE),
        206: {"description": "The parts asked for by Range", "content": _BYTES | {"multipart/byteranges": {}}}
        | headers_of(*_FILE, "Content-Range"),
    }
    | UNCHANGED
    | refusals(410, 416),
)
def download(
    artifact_id: ArtifactId,
    request: Request,
    who: Reader,
    database: Db,
    settings: Config,
    byte_range: Annotated[str | None, Header(alias="Range", description="Parts of the file.")] = None,
    if_none_match: Annotated[str | None, Header(description="ETags of files that are known.")] = None,
) -> Response:
    """A file that a trial left. Its ETag is its SHA-256; parts of it are had by Range, safely with If-Range."""
    with database.read() as session:
        artifact = store.get_artifact(session, artifact_id, project_id=who.project_id)
        session.expunge(artifact)
    content = content_of(settings, artifact)
    tag = f'"{artifact.sha256}"'
    headers = validators(tag) | {
        "X-Content-Type-Options": "nosniff",
        "Content-Security-Policy": "sandbox; default-src 'none'; style-src 'unsafe-inline'",
    }
    if etag_matches(if_none_match, tag):
        return Response(status_code=304, headers=headers)
    if byte_range is not None:
        kept = _satisfiable(byte_range, artifact.size)
        if kept == "":
            beyond = {"Content-Range": f"bytes */{artifact.size}"}
            return problem(416, f"Range: the file has {artifact.size} bytes", instance=request.url.path, headers=beyond)
        _set_range(request, kept)
    return FileResponse(content.path, headers=headers, media_type=content.media_type, filename=content.name)


def _satisfiable(header: str, size: int) -> str | None:
    """The header with those ranges that lie within the file: None for one to be ignored, empty if none does."""
    unit, _, ranges = header.partition("=")
    asked = ranges.split(",")
    if unit.strip().lower() != "bytes" or len(asked) > _MAX_RANGES:
        return None
    kept = []
    for one in asked:
        match = _RANGE.fullmatch(one)
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            return None
        start, last, suffix = match.groups()
        if start is not None and int(start) < size:
            kept.append(f"{int(start)}-{'' if last is None else min(int(last), size - 1)}")
        elif suffix is not None and int(suffix) > 0 and size > 0:
            kept.append(f"{max(0, size - int(suffix))}-")
    return f"bytes={','.join(kept)}" if kept else ""


def _set_range(request: Request, header: str | None) -> None:
    """What `FileResponse` is to read: a header it would refuse is taken away, as RFC 9110 wants it ignored."""
    rest = [(name, value) for name, value in request.scope["headers"] if name != b"range"]
    request.scope["headers"] = rest + ([(b"range", header.encode())] if header is not None else [])
