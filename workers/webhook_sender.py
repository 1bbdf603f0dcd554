"""Tells webhooks what happened, in a thread beside the worker: a slow receiver delays no claim."""

import asyncio
import logging
import threading
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Self

from sqlalchemy.exc import SQLAlchemyError

from service.database.engine import Database
from service.experiments import webhooks
from service.experiments.events import EventKind
from service.experiments.webhooks import Delivery
from service.settings import Settings
from service.webhook_post import NotDeliveredError, Target, post, targets

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
AT_ONCE = 20
"""Deliveries that are under way together."""
_OUTAGE_SECONDS = 10.0
_END_SECONDS = 10.0


class WebhookSender:
    """As a context manager; without addresses in the settings it does nothing. Raises `ValueError` for wrong ones.

    Several workers share the deliveries by the database. What was not delivered at the end is due for the next worker.
    """

    def __init__(self, settings: Settings, database: Database) -> None:
        self._database = database
        self._targets = targets(settings)
        self._kinds = (EventKind.CLOSED, *((EventKind.TRIAL_FAILED,) if settings.webhook_trials else ()))
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._targets:
            for name in ("httpx2", "httpcore2"):  # their lines have the whole URL, which may be a secret
                logging.getLogger(name).setLevel(logging.WARNING)
            # A daemon: an answer that never comes keeps no worker from ending.
            self._thread = threading.Thread(target=self._run, name="webhooks", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._ending.set()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        logger.info("webhooks to %s", ", ".join(target.shown for target in self._targets))
        enrolled = False
        while not self._ending.is_set():
            pause = LOOK_SECONDS
            try:
                if not enrolled:
                    for target in self._targets:
                        self._database.write(partial(webhooks.enrol, endpoint=target.endpoint))
                    enrolled = True
                for target in self._targets:
                    self.deliver(target)
            except SQLAlchemyError as error:
                logger.warning("webhooks wait for the database: %s", error)
                pause = _OUTAGE_SECONDS
            except Exception:  # whatever it was, what comes after it is to be told
                logger.exception("webhooks: an unexpected error")
                pause = _OUTAGE_SECONDS
            self._ending.wait(pause)

    def deliver(self, target: Target) -> int:
        """Sends what is due to one address; how many it took."""
        with self._database.read() as session:
            if not webhooks.has_work(session, target.endpoint, self._kinds):
                return 0
        take = partial(webhooks.take, endpoint=target.endpoint, kinds=self._kinds, limit=AT_ONCE)
        deliveries = self._database.write(take)
        problems = asyncio.run(_send(target, deliveries))
        for delivery, problem in zip(deliveries, problems, strict=True):
            over = self._database.write(partial(webhooks.settle, delivery=delivery, delivered=problem is None))
            if problem is not None:
                level, then = (logging.ERROR, "given up") if over else (logging.WARNING, "tried again later")
                what = f"event {delivery.event_id} to {target.shown}, attempt {delivery.attempt}"
                logger.log(level, "webhook: %s: %s; %s", what, problem, then)
        return problems.count(None)


async def _send(target: Target, deliveries: Sequence[Delivery]) -> list[str | None]:
    """What went wrong with each."""

    async def one(delivery: Delivery) -> str | None:
        try:
            await post(target, delivery.message)
        except NotDeliveredError as error:
            return str(error)
        return None

    return list(await asyncio.gather(*map(one, deliveries)))
