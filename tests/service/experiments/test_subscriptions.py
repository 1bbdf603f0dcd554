"""What watchers are told is tried over a real server in `tests/service/api/test_stream.py`.

Here: that nobody is told what was seen before, and how it ends.
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence

import pytest
from sqlalchemy.pool import QueuePool

from service.database import TrialState
from service.database.engine import Database
from service.experiments import actions, store, subscriptions
from service.experiments.subscriptions import Seen, Subscriptions


class _Slow(Subscriptions):
    """Looks that take a while, and hold a connection meanwhile."""

    seconds = 0.3

    def _look(self, ids: Sequence[int]) -> dict[int, Seen]:
        with self._database.read() as session:
            store.newest_experiment(session)
            time.sleep(self.seconds)
        return super()._look(ids)


async def _state(subscriptions: Subscriptions, watched: int) -> str:
    """The first that a new watcher is told."""
    changes = subscriptions.changes(watched)
    try:
        return (await anext(changes)).state
    finally:
        await changes.aclose()


async def _state_of_several(subscriptions: Subscriptions, watched: int) -> str:
    changes = subscriptions.any_changes([watched])
    try:
        while not isinstance(seen := await anext(changes), Seen):
            pass
        return seen.state
    finally:
        await changes.aclose()


@pytest.mark.parametrize("told", [_state, _state_of_several])
def test_who_comes_is_told_nothing_that_was_seen_before(
    database: Database, submit: Callable[..., int], told: Callable[[Subscriptions, int], Awaitable[str]]
) -> None:
    """Else a stream of an experiment that was just retried would say that it is over, and end."""
    watched = submit(seeds=1)
    database.write(lambda session: actions.cancel(session, watched))

    async def watch() -> tuple[str, str]:
        all_told = Subscriptions(database, every=0.2)
        open_page = all_told.changes(watched)
        before = (await anext(open_page)).state
        database.write(lambda session: actions.retry(session, watched, states=[TrialState.CANCELLED]))
        after = await told(all_told, watched)
        await open_page.aclose()
        await all_told.close()
        return before, after

    assert asyncio.run(watch()) == ("cancelled", "queued")


class _Late(Subscriptions):
    """Looks that tell late what they read."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.read = threading.Event()

    def _look(self, ids: Sequence[int]) -> dict[int, Seen]:
        found = super()._look(ids)
        self.read.set()
        time.sleep(0.1)
        return found


def test_who_comes_in_a_look_waits_for_the_next(database: Database, submit: Callable[..., int]) -> None:
    watched = submit(seeds=1)

    async def watch() -> str:
        late = _Late(database)
        open_page = late.changes(watched)
        first = asyncio.ensure_future(anext(open_page))
        await asyncio.to_thread(late.read.wait, 10)
        database.write(lambda session: actions.pause(session, watched))
        state = await _state(late, watched)
        await first
        await open_page.aclose()
        await late.close()
        return state

    assert asyncio.run(watch()) == "paused"


async def _closed_in_a_look(database: Database, watched: int) -> None:
    slow = _Slow(database)
    changes = slow.changes(watched)
    first = asyncio.ensure_future(anext(changes))
    while _connections(database) == 0:
        await asyncio.sleep(0.01)
    await slow.close()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await changes.aclose()


def _connections(database: Database) -> int:
    assert isinstance(database.engine.pool, QueuePool)
    return database.engine.pool.checkedout()


def test_the_end_waits_for_the_look_in_progress(database: Database, submit: Callable[..., int]) -> None:
    """Else its connection would come back to an engine that is closed, and be left open."""
    asyncio.run(_closed_in_a_look(database, submit(seeds=1)))
    assert _connections(database) == 0


def test_the_end_does_not_wait_for_ever(
    database: Database, submit: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Slow, "seconds", 1.5)
    monkeypatch.setattr(subscriptions, "_LAST_LOOK", 0.1)
    assert asyncio.run(_seconds_to_close(database, submit(seeds=1))) < 1


async def _seconds_to_close(database: Database, watched: int) -> float:
    began = time.monotonic()
    await _closed_in_a_look(database, watched)
    return time.monotonic() - began
