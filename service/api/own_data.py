"""The user's own data sets as this service's data folder has them, which may be another than that of trials' nodes.

One that is there and wrong is refused everywhere, and one that is not there where the database is SQLite: service and
workers are on one machine then.
"""

from collections.abc import Iterable

from service.errors import FieldProblem
from service.settings import Settings
from ttsv.data.catalog import DatasetInfo, dataset_info, own_set
from ttsv.data.facts import own_info, own_place
from ttsv.errors import DataError


class OwnData:
    """What a request asks of such sets: each is looked at once."""

    def __init__(self, settings: Settings) -> None:
        self._data_dir = settings.data_dir
        self._one_machine = settings.url.get_backend_name() == "sqlite"
        self._found: dict[str, DatasetInfo | OSError | DataError | None] = {}

    def facts(self, name: str) -> DatasetInfo | None:
        """What is known of any data set: nothing of one of the user's own that is not there, or wrong (`problems`)."""
        if own_set(name) is None:
            return dataset_info(name)
        found = self._look(name)
        return None if isinstance(found, OSError | DataError) else found

    def problems(self, names: Iterable[str]) -> list[FieldProblem]:
        """What is the matter with sets of the user's own that are wrong, or are not where all trials would run."""
        problems = []
        for name in sorted(filter(own_set, names)):
            found = self._look(name)
            if isinstance(found, DataError):
                problems.append(FieldProblem("dataset", str(found)))
            elif self._one_machine and isinstance(found, OSError):
                remedy = "put it there" if _is_absent(found) else "let this service read it"
                fix = f"{_why(found)} the data folder; {remedy}, or name another data set"
                problems.append(FieldProblem("dataset", f"{name} needs {own_place(name)}, which {fix}"))
        return problems

    def warnings(self, names: Iterable[str]) -> list[str]:
        """What is said of the others, of which not all is known here."""
        said = []
        for name in sorted(filter(own_set, names)):
            found = self._look(name)
            if isinstance(found, OSError):
                where = f"which {_why(found)} this service's data folder; the worker's must have it"
                said.append(f"dataset {name}: {own_place(name)} is needed, {where}, and {_UNSEEN}")
            elif found is None:
                said.append(f"dataset {name}: {_UNSEEN}")
            elif isinstance(found, DatasetInfo) and found.unused:
                said.append(f"dataset {name}: {_unused(found)}")
        return said

    def _look(self, name: str) -> DatasetInfo | OSError | DataError | None:
        if name not in self._found:
            try:
                self._found[name] = own_info(name, self._data_dir)
            except OSError as error:
                self._found[name] = error
            except DataError as error:
                self._found[name] = DataError(str(error).replace(f"{self._data_dir}/", ""))
        return self._found[name]


_UNSEEN = "what its images are is known once a trial reads them: one whose network takes others fails at the start"
_SHOWN = 5
"""Labels that a warning names."""


def _unused(info: DatasetInfo) -> str:
    """That labels do not run through the classes, as where they are counted from 1."""
    first = ", ".join(map(str, info.unused[:_SHOWN])) + (", ..." if len(info.unused) > _SHOWN else "")
    has = f"it has {info.classes} classes, as many as its largest label asks for when labels are counted from 0"
    return f"{has}, and of {len(info.unused)} of them no training image: of label {first}"


def _is_absent(error: OSError) -> bool:
    return isinstance(error, FileNotFoundError | NotADirectoryError)


def _why(error: OSError) -> str:
    """What is the matter with a file of the data folder, whose name follows."""
    return "is not in" if _is_absent(error) else f"cannot be read ({error.strerror}) in"
