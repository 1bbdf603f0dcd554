"""What stays in a data folder of experiments and trials that have no row any more.

Who deletes removes what is in the store and in his own data folder. Where workers and APIs have one each, with a store
for what trials write, logs, books of Ray Tune and curves for TensorBoard lie in the folder of whoever ran the
experiment, and copies of networks in that of whoever was asked for them: so each looks through its own.
"""

import logging
import time
from collections.abc import Iterable

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from service.database import Experiment, Trial
from service.database.engine import Database
from service.experiments.artifacts import remove_copies
from service.settings import Settings
from service.upkeep.files import DataFolder
from service.upkeep.home import require_home
from service.upkeep.moves import JOURNAL

logger = logging.getLogger(__name__)

LOOK_SECONDS = 3600.0
"""Between two looks through a data folder."""
SETTLED_SECONDS = 3600.0
"""What changed more lately stays: a process may still write it, a restore may have just put it there."""
_AT_ONCE = 500


def remove_orphans(database: Database, settings: Settings) -> int:
    """Removes from the data folder, not from the store, what belongs to no row; of how many experiments and trials.

    Folders of trials are of before a store was set, as whoever deletes removes none but his own, or of a machine that
    was cut off from its worker when its trial was deleted, and wrote on. What has a higher number than the newest row
    stays, as the database may be another one that was just restored; so does everything while a restore is on its way.
    What cannot be removed is left for the next time. Raises `OSError` where the folder cannot be read, or is another's.
    """
    folder = DataFolder(settings.data_dir)
    if (folder.path / JOURNAL).exists():
        return 0
    before = time.time() - SETTLED_SECONDS
    # The folder is read first: what is in it then had its row before that.
    experiments = [number for number, changed in folder.experiments().items() if changed < before]
    trials = [number for number, changed in folder.trials().items() if changed < before]
    with database.read() as session:
        if settings.storage is None:
            require_home(session, folder)
        remove_copies(session, folder.path)
        orphans = _without_row(session, Experiment, experiments)
        left = _without_row(session, Trial, trials)
    gone = 0
    for numbers, remove in ((orphans, folder.remove_experiment), (left, folder.remove_trial)):
        for number in numbers:
            try:
                remove(number)
                gone += 1
            except OSError as error:
                logger.warning("what has no row any more stays for now: %s", error)
    return gone


def _without_row(session: Session, table: type[Experiment | Trial], numbers: Iterable[int]) -> list[int]:
    """Those of these numbers that no row has, though a newer one is there."""
    newest = session.scalar(select(func.max(table.id)))
    older = sorted(number for number in numbers if newest is not None and number < newest)
    there = set[int]()
    for first in range(0, len(older), _AT_ONCE):
        there |= set(session.scalars(select(table.id).where(table.id.in_(older[first : first + _AT_ONCE]))))
    return [number for number in older if number not in there]
