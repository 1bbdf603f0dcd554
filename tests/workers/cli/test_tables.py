"""How a terminal says how long something takes."""

import pytest

from workers.cli.tables import duration


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.2, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (2285, "38 min"),
        (3599, "1 h"),
        (3900, "1 h 5 min"),
        (187_800, "52 h 10 min"),
    ],
)
def test_durations_as_a_person_writes_them(seconds: float, said: str) -> None:
    assert duration(seconds) == said
