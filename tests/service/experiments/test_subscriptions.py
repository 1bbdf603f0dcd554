"""What watchers are told is tried over a real server in `tests/service/api/test_stream.py`; here: how it ends."""

import asyncio
import time
from collections.abc import Callable, Sequence

import pytest
from sqlalchemy.pool import QueuePool

from service.database.engine import Database
from service.experiments import store, subscriptions
from service.experiments.subscriptions import Seen, Subscriptions


class _Slow(Subscriptions):
    """Looks that take a while, and hold a connection meanwhile."""

    seconds = 0.3

    def _look(self, ids: Sequence[int]) -> dict[int, Seen]:
        with self._database.read() as session:
            store.newest_experiment(session)
            time.sleep(self.seconds)
        return super()._look(ids)


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
