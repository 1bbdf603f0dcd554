"""A worker whose drivers run fake trials; settings come from the environment."""

import logging
import sys
from pathlib import Path

from service.database.engine import Database
from service.settings import Settings
from workers.worker.poller import Worker

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    settings = Settings()
    driver = (sys.executable, str(Path(__file__).with_name("fake_driver.py")))
    Worker(settings, Database(settings.url), driver=driver).run()
