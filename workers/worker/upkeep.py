"""The worker's housekeeping among the files of trials: what was deleted or cancelled goes, and what retention names."""

import logging
import threading
import time
from datetime import datetime, timedelta
from types import TracebackType
from typing import Self

from sqlalchemy.exc import SQLAlchemyError

from service.database import now
from service.database.engine import Database
from service.experiments.store import forget_answers
from service.queue import driver_reads
from service.settings import Settings
from service.storage import Folder, open_kept, remove_checkpoints
from service.upkeep import orphans
from service.upkeep.deletion import remove_marked
from service.upkeep.files import DataFolder
from service.upkeep.home import require_home
from service.upkeep.retention import Rules, finish, plan, prune
from workers.worker import webhooks

logger = logging.getLogger(__name__)

LOOK_SECONDS = 20.0
"""Between two looks for experiments that were deleted."""
RETAIN_SECONDS = 3600.0
_SWEPT_FOR = timedelta(hours=1)
"""So long an experiment is looked at after it was cancelled, as those who ran it may still write."""
_BEFORE = timedelta(minutes=1)
"""So long before a look something may have been cancelled that it did not see yet."""
ACTOR = "retention"


class Upkeep:
    """A thread that tidies up for as long as the context lasts; what it cannot do now it tries again later.

    Nothing depends on when it is done, and several workers may do the same at once.
    """

    def __init__(self, settings: Settings, database: Database) -> None:
        self._database, self._settings = database, settings
        self._rules = Rules(settings.retention_days, settings.retention_best, settings.retention_gib)
        self._told = dict.fromkeys((target.endpoint for target in webhooks.targets(settings)), webhooks.kinds(settings))
        self._finished = False
        self._swept_at: datetime | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="upkeep", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        self._thread.join(5)

    def _run(self) -> None:
        retain_after, orphans_after, begun = 0.0, 0.0, False
        finish_after = time.monotonic() + RETAIN_SECONDS
        while not self._over.wait(LOOK_SECONDS if begun else 0):
            if time.monotonic() >= finish_after:  # a command may have been killed in the middle of its removal
                self._finished, finish_after = False, time.monotonic() + RETAIN_SECONDS
            try:
                self.tidy(first=not self._finished)
                self.sweep()
                if time.monotonic() >= orphans_after:
                    self.remove_orphans()
                    orphans_after = time.monotonic() + orphans.LOOK_SECONDS
                if self._rules.some and time.monotonic() >= retain_after:
                    self.retain()
                    retain_after = time.monotonic() + RETAIN_SECONDS
            except SQLAlchemyError:
                pass  # the poller says that the database is away
            except Exception:  # what a store's library raises must not end this for the worker's life
                logger.exception("what is to be removed stays for now")
            begun = True

    def tidy(self, *, first: bool = False) -> None:
        """Removes what was deleted; at `first`, and every hour, also files whose removal somebody left half done.

        Then answers that nobody will ask for again are forgotten, too.
        """
        if first:
            self._database.write(forget_answers)
        try:
            folder = DataFolder.of(self._settings)
            remove_marked(self._database, folder, self._told)
            if first:
                finish(self._database, folder)
                self._finished = True
        except OSError as error:
            logger.warning("files stay for now: %s", error)

    def sweep(self) -> None:
        """Removes what cancelled trials would have resumed from; whoever ran them was killed in the middle of it.

        Those that never began are looked at once, as in a bucket each look is a request. Where something fails the next
        look is at all of them: the store may be away for longer than they are looked at.
        """
        moment, before = now(), self._swept_at
        since, lately = (None, None) if before is None else (moment - _SWEPT_FOR, before - _BEFORE)
        self._swept_at = None
        try:
            with self._database.read() as session:
                if cancelled := driver_reads.cancelled_trials(session, since, lately):
                    require_home(session, DataFolder.of(self._settings))
            kept = open_kept(self._settings.data_dir, self._settings.storage)
            for trial_id, fence in cancelled:  # of which some may be retried, and at work again, before their turn
                try:
                    remove_checkpoints(kept, trial_id, fence)
                except PermissionError as error:  # which keeps no other trial's from going
                    logger.warning("checkpoints of trial %d stay for now: %s", trial_id, error)
        except OSError as error:
            logger.warning("checkpoints of cancelled trials stay for now: %s", error)
        else:
            self._swept_at = moment

    def remove_orphans(self) -> None:
        """Removes from our data folder what belongs to rows that somebody with another data folder deleted.

        Also what is left of files whose writers died in the middle of them, and from a store that is a folder.
        """
        try:
            orphans.remove_orphans(self._database, self._settings)
            for store in (Folder(self._settings.data_dir), open_kept(self._settings.data_dir, self._settings.storage)):
                if isinstance(store, Folder):
                    store.drop_abandoned()
        except OSError as error:
            logger.warning("what has no row any more stays for now: %s", error)

    def retain(self) -> None:
        """Removes what the rules name; what boards show stays."""
        try:
            folder = DataFolder.of(self._settings)
            with self._database.read() as session:
                planned = plan(session, folder, self._rules)
            done = prune(self._database, folder, planned, actor=ACTOR)
        except OSError as error:
            logger.warning("files stay for now: %s", error)
            return
        if planned.too_much:
            over, who = planned.too_much / 2**30, "boards show them, or what runs or waits needs them"
            logger.warning("networks have %.1f GiB more than TTSV_RETENTION_GIB: %s", over, who)
        if done.networks or done.checkpoints:
            facts = len(done.networks), len(done.checkpoints), done.size // 2**20
            logger.info("retention removed %d networks and the checkpoints of %d trials: %d MiB", *facts)
