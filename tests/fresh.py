"""Processes of Python that have imported what tests want of them, and that once for all.

They are copies of one that was started with nothing else: an interpreter that begins anew imports for a second.
"""

import multiprocessing

FRESH = multiprocessing.get_context("forkserver")
FRESH.set_forkserver_preload(["tests.service.upkeep.processes", "tests.service.queue.crowd"])
