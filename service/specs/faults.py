"""What is wrong with a spec, gathered so that all of it can be said at once."""

import re
from collections.abc import Iterator, Sequence

from service.errors import FieldProblem, SpecError
from service.specs.planner import Planner
from service.specs.validation_errors import shown
from ttsv.config.fields import FieldValues
from ttsv.config.trial import field_infos
from ttsv.errors import ConfigError

REQUIRED = ("dataset", "model")
"""Fields without which nothing is known of a trial."""
_PLACE = re.compile(r"(?P<item>base|grid|variants\[\d+\]|trials\[\d+\])\.(?P<path>.+?)(?P<value>\[\d+\])?")
_REST = {"clipping": ("clipping.", "constraint"), "division": ("division.", "constraint")}
"""Of which fields nothing can be said where one of a part is left out, besides those of the part itself."""
_MOST_VALUES = 5
"""Of one field so many values are named that are wrong in the same way."""
_MOST_TRIALS = 1000
"""So many wrong ones are looked at: what the others would add is not worth the seconds that ten thousands take."""


class Faults:
    """What is wrong with fields by themselves, then with the trials that the others make.

    Of what hangs together with a wrong field nothing is said, as it may be right once that field is.
    """

    def __init__(self, problems: Sequence[FieldProblem]) -> None:
        self._problems = dict.fromkeys(problems)
        self._values: dict[tuple[str, str], dict[str, None]] = {}
        self._trials = 0
        places = [found for problem in problems if (found := _PLACE.fullmatch(problem.field))]
        tops = {path.partition(".")[0] for path in field_infos()} - {*REQUIRED}
        # A wrong value of an axis is left out, and the others stand by themselves.
        places = [one for one in places if one["item"] != "grid" or not one["value"]]
        self.hopeless = {one["item"] for one in places if one["path"].partition(".")[0] not in tops}
        """The parts of a spec that have no trials: nobody knows what an unknown field was to be."""
        paths = {one["path"] for one in places}
        self._unsure = tuple(each for path in paths for each in (_REST.get(path.partition(".")[0]) or [_part(path)]))

    def look_at(self, planner: Planner, fields: FieldValues) -> None:
        """Adds all that is wrong with a trial."""
        self._trials += 1
        for error in errors(planner, fields):
            if not error.field.startswith(self._unsure):
                self._values.setdefault((error.field, error.fix), {})[shown(error.value)] = None

    @property
    def are_enough(self) -> bool:
        """Whether no more trials need be looked at."""
        return self._trials >= _MOST_TRIALS

    def refuse(self) -> None:
        """Raises `SpecError` where anything is wrong."""
        told = [FieldProblem(field, f"{fix}, not {_listed(list(v))}") for (field, fix), v in self._values.items()]
        if problems := [*dict.fromkeys([*self._problems, *told])]:
            raise SpecError(problems)


def _part(path: str) -> str:
    """`training.` for `training.lr`; a field that stands by itself as it is."""
    part, dot, _ = path.partition(".")
    return part + dot


def _listed(values: Sequence[str]) -> str:
    more = len(values) - _MOST_VALUES
    named = [*values[:_MOST_VALUES], f"{more} others"] if more > 1 else values
    return " or ".join(filter(None, (", ".join(named[:-1]), named[-1])))


def errors(planner: Planner, fields: FieldValues) -> Iterator[ConfigError]:
    """What is wrong with a trial: each time what is to blame is left out, and the rest looked at again."""
    blamed: set[str] = set()
    while True:
        try:
            planner.plan({path: value for path, value in fields.items() if path not in blamed})
        except ConfigError as error:
            if error.field in blamed:
                return  # by what it is where it is not given
            yield error
            if error.field in REQUIRED or error.field not in fields:
                return
            blamed.add(error.field)
        else:
            return
