"""How many cases a test tries: few in every run, many in `make test-deep`.

`HYPOTHESIS_PROFILE` chooses: `quick` (`make test-quick`), `repeatable` (every run) and `deep` draw the same examples
each time, so that a failure is the change's; `explore` draws new ones.
"""

import os
from typing import Any

import pytest
from hypothesis import settings

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "repeatable")
SHARES = {"quick": 0.05, "repeatable": 0.2, "deep": 2.0, "explore": 1.0}
FEWEST = 5 if PROFILE == "quick" else 10
ROWS = 2 if PROFILE == "quick" else None
"""So many rows of a parametrized test in a room are run, the first, the last, and those evenly between; None: all."""


def share(number: int) -> int:
    """The profile's share of so many cases; of a handful none is left out."""
    return max(min(number, FEWEST), round(SHARES[PROFILE] * number))


def examples(number: int = 100, **options: Any) -> settings:
    """Settings of a property that is tried with this profile's share of `number` examples, however long they take."""
    return settings(max_examples=share(number), deadline=None, **options)


def deep(*values: Any) -> Any:
    """Parameters that only `make test-deep` tries."""
    return pytest.param(*values, marks=pytest.mark.deep)


mostly_sqlite = pytest.mark.parametrize("database_url", ["sqlite", deep("postgres")], indirect=True)
"""On PostgreSQL in `make test-deep` alone: what is refused before it is asked, or what other tests show there."""
