"""What is told of a trial whose process died."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workers.driver.callback import reason_of

DIED = """Failure # 1 (occurred at 2026-11-22_08-00-00)
an older one
Failure # 2 (occurred at 2026-11-22_08-10-00)
The actor died unexpectedly before finishing this task.
\tclass_name: with_resources.<locals>.ResourceTrainable
\tactor_id: 4f7b
\tpid: 4711
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker \
unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the OOM killer
"""
"""As Ray writes it."""


def test_the_last_sentence_of_ray_without_names_and_advice(tmp_path: Path) -> None:
    file = tmp_path / "error.txt"
    file.write_text(DIED)
    trial: Any = SimpleNamespace(error_file=str(file))
    assert reason_of(trial) == (
        "The actor died unexpectedly before finishing this task. The actor is dead because its worker process has "
        "died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error "
        "code 2. End of file."
    )


@pytest.mark.parametrize("file", [None, "nowhere"])
def test_without_a_word_of_ray(file: str | None) -> None:
    trial: Any = SimpleNamespace(error_file=file)
    assert reason_of(trial) == "the process died, and Ray does not say why"
