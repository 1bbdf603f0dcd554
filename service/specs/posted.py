"""Reads a spec from outside, and says at once what is wrong with its form and with the fields of its trials."""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidatorFunctionWrapHandler

from service.errors import SpecError
from service.specs.grid import field_problems
from service.specs.spec import ExperimentSpec, read_spec

_OF_TRIALS = {"spec_version", "base", "grid", "variants", "trials", "search"}
"""Fields without one of which nothing is known of the trials."""


def read_posted(document: Mapping[str, object]) -> ExperimentSpec:
    """The spec that a document from outside is. Raises `SpecError`."""
    try:
        return read_spec(document)
    except SpecError as error:
        wrong = {re.split(r"[.\[]", problem.field)[0] for problem in error.problems}
        if wrong & _OF_TRIALS:
            raise
        rest = {name: value for name, value in document.items() if name not in wrong}
        problems = field_problems(read_spec({"name": "x"} | rest))
        raise SpecError(list(dict.fromkeys([*error.problems, *problems]))) from error


def as_posted(document: Any, read: ValidatorFunctionWrapHandler) -> ExperimentSpec:
    """Has Pydantic read a spec as `read_posted` does."""
    return read_posted(document) if isinstance(document, dict) else read(document)
