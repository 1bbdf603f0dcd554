"""What watchers of experiments are told: one look at the database a second for all of them, however many they are."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import anyio
from sqlalchemy.exc import SQLAlchemyError

from service.database import Event, Experiment
from service.database.engine import Database
from service.experiments import store
from service.experiments.events import list_events

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_THREADS = 4
_EVENTS_AT_ONCE = 500
_LAST_LOOK = 5.0  # seconds that a look in progress has once the service ends
_NEWEST = 0
"""No experiment's number: the feed of those who want to hear of new ones."""


@dataclass(frozen=True)
class Seen:
    """An experiment as the last look found it: its row and counts, which trials run, the number of its newest event."""

    experiment: Experiment = field(compare=False)
    state: str
    error: str | None
    waiting: str | None
    progress: store.Progress
    running: frozenset[int]
    newest_event: int


@dataclass
class _Feed:
    """One watched experiment: `changed` is replaced whenever something new was seen.

    `look` is the number of the last look at it, `wanted` of the first of which who came last may be told.
    """

    watchers: int = 0
    seen: Seen | None = None
    gone: bool = False
    look: int = 0
    wanted: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self) -> None:
        told, self.changed = self.changed, asyncio.Event()
        told.set()


@dataclass
class _Watcher:
    """Who watches a feed, and was `told` this of it last; of a look before the one of number `since` nothing."""

    feed: _Feed
    since: int
    told: Seen | None = None

    def news(self) -> Seen | None:
        """What is to be told now, if anything is."""
        if self.feed.look < self.since or self.feed.seen == self.told:
            return None
        self.told = self.feed.seen
        return self.told


class Subscriptions:
    """Looks at all watched experiments in one transaction per `every` seconds, in a thread; nobody else's waits.

    Reads of all streams together use few threads and connections, so that many watchers leave the API its own. Who
    hears nothing new for `quiet` seconds hears the same again, to see whether they may still listen.
    """

    def __init__(self, database: Database, every: float = 1.0, quiet: float = 15.0) -> None:
        self.every = every
        self.quiet = quiet
        self._database = database
        self._feeds: dict[int, _Feed] = {}
        self._newest: int | None = None
        self._looks = 0
        self._task: asyncio.Task[None] | None = None
        self._limiter: anyio.CapacityLimiter | None = None
        self._closed = asyncio.Event()

    async def changes(self, experiment_id: int) -> AsyncGenerator[Seen, None]:
        """What is seen of the experiment in the next look and whenever it changes; ends if the experiment is gone."""
        async with self._feed(experiment_id) as watcher:
            while not watcher.feed.gone:
                changed = watcher.feed.changed
                if (seen := watcher.news()) is not None:
                    yield seen
                elif not await _first_of([changed], self.quiet):
                    watcher.told = None

    async def any_changes(self, experiment_ids: Sequence[int]) -> AsyncGenerator[Seen | int, None]:
        """What is seen of several experiments in the next look and whenever it changes; ends if one of them is gone.

        Between them, whenever it changes and first of all, the number of the newest experiment there is.
        """
        async with AsyncExitStack() as stack:
            posted = await stack.enter_async_context(self._feed(_NEWEST))
            watchers = [await stack.enter_async_context(self._feed(i)) for i in experiment_ids]
            newest: int | None = None
            while not any(watcher.feed.gone for watcher in watchers):
                waits = [watcher.feed.changed for watcher in (posted, *watchers)]
                if self._newest is not None and self._newest != newest:
                    newest = self._newest
                    yield newest
                for watcher in watchers:
                    if (seen := watcher.news()) is not None:
                        yield seen
                if not await _first_of(waits, self.quiet):
                    newest = None

    async def events(self, experiment_id: int, after: int) -> Sequence[Event]:
        """The next events of an experiment, at most 500."""

        def read() -> Sequence[Event]:
            with self._database.read() as session:
                found = list_events(session, limit=_EVENTS_AT_ONCE, after=after, experiment_id=experiment_id)
                session.expunge_all()
                return found

        return await self.aside(read)

    async def aside(self, work: Callable[[], _T]) -> _T:
        """Runs `work` in one of the few threads that all streams share."""
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(_THREADS)
        return await anyio.to_thread.run_sync(work, limiter=self._limiter)

    async def close(self) -> None:
        """Ends the looking, which first gives its connection back unless the database is long in answering."""
        if self._task is not None:
            self._closed.set()
            await asyncio.wait([self._task], timeout=_LAST_LOOK)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @asynccontextmanager
    async def _feed(self, experiment_id: int) -> AsyncIterator[_Watcher]:
        feed = self._feeds.setdefault(experiment_id, _Feed())
        feed.watchers += 1
        feed.wanted = self._looks + 1  # a look in progress may have read before something that the watcher knows of
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look_on())
        try:
            yield _Watcher(feed, feed.wanted)
        finally:
            feed.watchers -= 1
            if feed.watchers == 0 and self._feeds.get(experiment_id) is feed:
                del self._feeds[experiment_id]

    async def _look_on(self) -> None:
        while self._feeds and not self._closed.is_set():
            self._looks += 1
            look = self._looks
            try:
                ids = [i for i in self._feeds if i != _NEWEST]
                newest = await self.aside(self._look_for_newest) if _NEWEST in self._feeds else self._newest
                found = await self.aside(partial(self._look, ids)) if ids else {}
            except SQLAlchemyError as error:
                logger.warning("%d watched experiments wait for the database: %s", len(self._feeds), error)
            else:
                if newest != self._newest:
                    self._newest = newest
                    if posted := self._feeds.get(_NEWEST):
                        posted.tell()
                for experiment_id in ids:
                    feed = self._feeds.get(experiment_id)
                    if feed is None:
                        continue
                    seen = found.get(experiment_id)
                    new = seen is None or seen != feed.seen or feed.look < feed.wanted
                    feed.look = look
                    if new:
                        feed.seen, feed.gone = seen, seen is None
                        feed.tell()
            seen_all = all(feed.look >= feed.wanted for i, feed in self._feeds.items() if i != _NEWEST)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), self.every if seen_all else 0.05)

    def _look_for_newest(self) -> int:
        with self._database.read() as session:
            return store.newest_experiment(session)

    def _look(self, ids: Sequence[int]) -> dict[int, Seen]:
        with self._database.read() as session:
            experiments = store.get_experiments(session, ids)
            progress = store.progress(session, ids)
            running = store.running_trials(session, ids)
            newest = store.newest_events(session, ids)
            session.expunge_all()
        return {
            experiment.id: Seen(
                experiment,
                experiment.state.value,
                experiment.error,
                experiment.waiting,
                progress[experiment.id],
                running[experiment.id],
                newest.get(experiment.id, 0),
            )
            for experiment in experiments
        }


async def _first_of(events: Sequence[asyncio.Event], seconds: float) -> bool:
    """Waits until one of them is set; whether one was so soon."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        done, _ = await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    return bool(done)
