"""Libraries that tests use, imported when a test first asks for something of them: to collect all tests costs none."""

from importlib import import_module
from typing import Any


class _Later:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest asks all that it finds in a module whether it is a fixture
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)


def lazily(name: str) -> Any:
    """Stands for a module by its name."""
    return _Later(name)
