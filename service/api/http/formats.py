"""In which form tables are answered: JSON, CSV, Markdown or LaTeX."""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

from fastapi import Header, Query, Response
from pydantic import BeforeValidator
from pydantic_core import to_json
from starlette.exceptions import HTTPException

from service.api.http.examples import Example, Responses, headers_of
from service.leaderboards.text_tables import Sheet, to_csv, to_latex, to_markdown


class Format(StrEnum):
    """Forms of a table."""

    JSON = "json"
    CSV = "csv"
    MARKDOWN = "markdown"
    LATEX = "latex"


MEDIA_TYPES = {
    Format.JSON: "application/json",
    Format.CSV: "text/csv",
    Format.MARKDOWN: "text/markdown",
    Format.LATEX: "application/x-latex",
}
_ALSO = {"text/x-tex": Format.LATEX, "application/x-tex": Format.LATEX, "text/x-markdown": Format.MARKDOWN}
_BY_TYPE = {media: form for form, media in MEDIA_TYPES.items()} | _ALSO

_SHORT = {"md": Format.MARKDOWN, "tex": Format.LATEX}
"""The endings of files are understood, too."""

Records = tuple[Sequence[str], Sequence[Sequence[Any]]]


class AskedFormat:
    """The form of the answer: `format`, or what `Accept` likes best."""

    def __init__(
        self,
        format: Annotated[
            Format | None,
            BeforeValidator(lambda value: _SHORT.get(value, value)),
            Query(description="Instead of the header Accept."),
        ] = None,
        standalone: Annotated[bool, Query(description="LaTeX: a whole document, not a table to put into one.")] = False,
        accept: Annotated[str | None, Header(include_in_schema=False)] = None,
    ) -> None:
        self.format = format or _accepted(accept)
        self._standalone = standalone

    def answer(
        self, json: Callable[[], Any], sheets: Callable[[], Sequence[Sheet]], records: Callable[[], Records]
    ) -> Response:
        """The response in this form; only what it needs is made."""
        if self.format is Format.JSON:
            text: str | bytes = to_json(json())  # from plain data and dataclasses, without a second look at each number
        elif self.format is Format.CSV:
            text = to_csv(*records())
        elif self.format is Format.MARKDOWN:
            text = to_markdown(sheets())
        else:
            text = to_latex(sheets(), standalone=self._standalone)
        headers = {"Vary": VARY, "X-Content-Type-Options": "nosniff"}
        return Response(text, media_type=MEDIA_TYPES[self.format], headers=headers)


def _accepted(accept: str | None) -> Format:
    """The form that the header likes best; of equals JSON, then the one named first. 406 where none is."""
    if accept is None or not accept.strip():
        return Format.JSON
    ranges = [_range(part) for part in accept.split(",") if part.strip()]
    best: tuple[float, Format] | None = None
    for media, form in _BY_TYPE.items():
        # The most precise range that covers the type decides.
        fitting = [(name.count("*"), quality) for name, quality in ranges if _covers(name, media)]
        quality = min(fitting, key=lambda item: item[0])[1] if fitting else 0.0
        if quality > 0 and (best is None or quality > best[0]):
            best = (quality, form)
    if best is None:
        raise HTTPException(406, f"Accept: {accept[:200]}: the forms are {', '.join(MEDIA_TYPES.values())}")
    return best[1]


def _range(text: str) -> tuple[str, float]:
    name, *parameters = (part.strip() for part in text.lower().split(";"))
    quality = 1.0
    for parameter in parameters:
        key, _, value = parameter.partition("=")
        if key.strip() == "q":
            try:
                quality = float(value)
            except ValueError:
                quality = 0.0
    return name, quality


def _covers(name: str, media: str) -> bool:
    return name in ("*/*", media) or (name.endswith("/*") and media.startswith(name[:-1]))


VARY = "Accept, Authorization"
"""On what an answer in one of several forms depends."""


def forms(example: Example, text: Mapping[Format, str], *headers: str) -> Responses:
    """A route's `responses` for status 200, with an example of every form; `headers` besides `Vary`."""
    content: dict[str, object] = {"application/json": {"example": example}}
    for form, shown in text.items():
        content[MEDIA_TYPES[form]] = {"schema": {"type": "string"}, "example": shown}
    return {
        200: {"content": content, "description": "In the form that `format` or Accept asks for."}
        | headers_of("Vary", *headers)
    }
