"""A worker whose drivers run fake trials; settings come from the environment.

With `DIES_AFTER_CLAIM` it is killed between a claim and the start of its driver.
"""

import logging
import os
import signal
import sys
from pathlib import Path

from service.database.engine import Database
from service.queue.leases import Lease
from service.settings import Settings
from workers.worker.drivers import Drivers
from workers.worker.poller import Worker


def die(drivers: Drivers, lease: Lease) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    settings = Settings()
    driver = (sys.executable, str(Path(__file__).with_name("fake_driver.py")))
    if "DIES_AFTER_CLAIM" in os.environ:
        Drivers.start = die  # type: ignore[assignment,method-assign]
    Worker(settings, Database(settings.url), driver=driver).run()
