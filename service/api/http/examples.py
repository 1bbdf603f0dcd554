"""What routes say of their answers to the OpenAPI document, with an example for each."""

from typing import Any

Example = dict[str, Any]
"""An answer as JSON: any of the schemas."""
Responses = dict[int | str, dict[str, Any]]
"""What a route says of its answers, by status, in FastAPI's form."""


def shown(example: Example | list[Example], status: int = 200) -> Responses:
    """A route's `responses`, with the example for one status."""
    return {status: {"content": {"application/json": {"example": example}}}}


def page(item: Example) -> Example:
    """A page with one item."""
    return {"items": [item], "next": "djE6MA"}
