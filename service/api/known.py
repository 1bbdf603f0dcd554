"""Query parameters that a route does not have are refused: a misspelt `dry_run` would queue trials."""

from fastapi import Request
from fastapi.dependencies.models import Dependant

from service.errors import FieldProblem, QueryError


def known_parameters_only(request: Request) -> None:
    """Raises `QueryError` for every query parameter that the request's route does not know."""
    known = _query_names(request.scope["route"].dependant)
    if unknown := [name for name in dict.fromkeys(request.query_params.keys()) if name not in known]:
        fix = (
            f"there is no such parameter here; there are {', '.join(sorted(known))}" if known else "takes no parameters"
        )
        raise QueryError([FieldProblem(name[:200], fix) for name in unknown[:20]])


def _query_names(dependant: Dependant) -> set[str]:
    return {field.alias for field in dependant.query_params}.union(*map(_query_names, dependant.dependencies))
