"""Where a trial works: in the data folder, or in a scratch folder whose files are carried to where they belong."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from service.storage import Attempt, Folder, Store, begin, copy_out, open_storage
from ttsv.config.evaluation import PUBLISHED_CORRUPTIONS
from ttsv.config.trial import TrialConfig
from ttsv.errors import DataError
from ttsv.results import StageProgress
from workers.node.depot.courier import Courier
from workers.node.depot.data_sets import bring_baseline, bring_data_set
from workers.node.depot.home import Home
from workers.node.depot.remote import RemoteFolder
from workers.node.scratch import node_data, scratch_folder
from workers.trial_process.messages import BRINGING, STORING, Job

logger = logging.getLogger(__name__)

TOLD_SECONDS = 10.0


class DroppedError(BaseException):
    """Tune is done with a trial that has not ended: no other process goes on from where this one is."""


@dataclass(frozen=True)
class Workplace:
    """`root`: what paths of a manifest begin at; `folder` is in it. `data_dir` has the data sets.

    `stores`: where networks of other trials are looked for; `head` the data folder, where it is not seen.
    """

    root: Path
    folder: Path
    data_dir: Path
    stores: tuple[Store, ...] = ()
    courier: Courier | None = None
    head: RemoteFolder | None = None

    def sync(self) -> Iterator[StageProgress]:
        """Waits until everything written so far is where it belongs; says so where that takes long. Raises `OSError`.

        While a store is away silence would be taken for a hung process.
        """
        if self.courier is not None:
            for _ in self.courier.syncing(TOLD_SECONDS):
                yield StageProgress(stage=STORING, done=0, total=1)

    def network(self, path: str) -> Path:
        """The file of a network that another trial left, brought here if need be. Raises `DataError` without one."""
        for store in self.stores:
            if store.size(path) is None:
                continue
            target = self.root / "source" / PurePosixPath(path).name
            copy_out(store, path, target)
            described = str(PurePosixPath(path).with_suffix(".json"))
            if store.size(described) is not None:
                copy_out(store, described, target.with_suffix(".json"))
            return target
        place = self.data_dir / path
        if self.head is None and place.is_file():
            return place
        raise DataError(f"{place}, the network to be evaluated, is gone; run the trial that left it again")

    def bring_data_sets(self, config: TrialConfig) -> Iterator[StageProgress]:
        """Has the data sets of a trial on this machine; yields how far that is, while it takes long."""
        if (head := self.head) is None:
            return
        names = [config.dataset]
        if config.evaluation.corruptions == "published" and config.dataset in PUBLISHED_CORRUPTIONS:
            names.append(PUBLISHED_CORRUPTIONS[config.dataset])
        for name in names:
            yield from _aside(partial(bring_data_set, name, self.data_dir, head), name)
        if config.evaluation.corruptions != "none":
            # It may have to wait for another trial that brings the set itself.
            yield from _aside(lambda _told: bring_baseline(config.dataset, self.data_dir, head), config.dataset)


@contextmanager
def workplace(job: Job, data_dir: Path, home: Home | None) -> Iterator[Workplace]:
    """The place of a trial, with what earlier attempts at it left, until the block ends.

    Without a `home`, and where the home's folder is seen and keeps the trials' files, it is that folder itself. Of a
    trial that is dropped in the block nothing more is carried: its checkpoints may have been removed there by now.
    """
    attempt = Attempt(job.fence, job.attempt)
    seen = data_dir if home is None else home.here()
    if seen is not None and (home is None or home.storage is None):
        yield Workplace(seen, seen / begin(Folder(seen), job.trial_id, attempt), seen)
        return
    assert home is not None
    head = RemoteFolder(home) if seen is None else None
    if head is not None:
        head.check()
    near: Store = Folder(seen) if head is None else head  # type: ignore[arg-type]
    home.require_store()
    store = near if home.storage is None else open_storage(home.storage)
    own = node_data(home.data_dir) if seen is None else seen
    with scratch_folder(own) as root:
        path = begin(store, job.trial_id, attempt)
        folder = root / path
        folder.mkdir(parents=True)
        known = list(store.files(path))
        for name in known:
            copy_out(store, f"{path}/{name}", folder / name)
        courier = Courier(folder, store, job.trial_id, attempt, known)
        courier.start()
        stores = (store,) if home.storage is None else (store, near)
        dropped = False
        try:
            yield Workplace(root, folder, own, stores, courier, head)
        except DroppedError:
            dropped = True
            raise
        finally:
            try:
                if not dropped:
                    courier.finish()
            except Exception as error:  # of a trial that succeeded all is there, and others have their own reason
                logger.warning("the newest files of trial %d stay behind: %s", job.trial_id, error)
            courier.close()


def _aside(work: Callable[[Callable[[str, int, int | None], None]], object], name: str) -> Iterator[StageProgress]:
    """Works in a thread; yields how far it is now and then. Ends the work where nobody asks any more.

    While others bring the set, or the head reads it, it is at its beginning: silence would be taken for a hung process.
    """
    state = {"done": 0, "total": 0}
    failed: list[BaseException] = []
    unwanted, over = threading.Event(), threading.Event()

    def told(file: str, done: int, total: int | None) -> None:
        state["done"], state["total"] = done, total or 0
        if unwanted.is_set():
            raise InterruptedError(f"{name} is not wanted any more")

    def run() -> None:
        try:
            work(told)
        except BaseException as error:
            failed.append(error)
        finally:
            over.set()

    threading.Thread(target=run, name="data", daemon=True).start()
    try:
        while not over.wait(TOLD_SECONDS):
            mib = 2**20
            yield StageProgress(
                stage=f"{BRINGING} {name}", done=state["done"] // mib, total=max(1, state["total"] // mib)
            )
    finally:
        unwanted.set()
    if failed:
        raise failed[0]
