"""What routes say of their answers to the OpenAPI document, with an example for each."""

from typing import Any

Example = dict[str, Any]
"""An answer as JSON: any of the schemas."""
Responses = dict[int | str, dict[str, Any]]
"""What a route says of its answers, by status, in FastAPI's form."""


_HEADERS = {
    "Accept-Ranges": "`bytes`: parts are had by Range.",
    "Allow": "With 405: the methods that the path takes.",
    "Cache-Control": "Whether it may be kept: `no-cache`, if it is asked for each time whether it changed.",
    "Content-Disposition": "The file name proposed for saving it.",
    "Content-Range": "Which bytes of how many these are, or of how many none was asked for.",
    "ETag": "Of what was answered: for If-None-Match, or If-Match with a change.",
    "Last-Modified": "When the file was written.",
    "Link": 'Address of the next page (`rel="next"`), where there is one.',
    "Location": "Path of the experiment that was made.",
    "Retry-After": "Seconds after which it is worth asking again.",
    "Vary": "The request's headers on which the answer depends.",
    "WWW-Authenticate": "`Bearer`: a key is wanted.",
}
"""Headers of answers, beside X-Request-ID, which all have."""

VALIDATORS = ("ETag", "Cache-Control", "Vary")
"""Headers of answers that may be kept and asked for again."""


def headers_of(*names: str) -> dict[str, object]:
    """The part of a response, in OpenAPI's form, that says which headers it has."""
    named = {name: {"description": _HEADERS[name], "schema": {"type": "string"}} for name in names}
    return {"headers": named} if named else {}


def shown(example: Example | list[Example], status: int = 200, *headers: str) -> Responses:
    """A route's `responses`, with the example and the headers for one status."""
    return {status: {"content": {"application/json": {"example": example}}} | headers_of(*headers)}


UNCHANGED: Responses = {
    304: {"description": "Not changed since the answer with this ETag"} | headers_of(*VALIDATORS, "Link")
}


def kept(example: Example | list[Example], *headers: str) -> Responses:
    """A GET's `responses` where `Reply` gives them: with an ETag, or 304 without a body."""
    return shown(example, 200, *VALIDATORS, *headers) | UNCHANGED


def page(item: Example) -> Example:
    """A page with one item."""
    return {"items": [item], "next": "djE6MA"}
