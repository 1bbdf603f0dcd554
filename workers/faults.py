"""Named points where tests break a process: `TTSV_FAULT=after_claim:kill` (or `raise`, or `sleep`)."""

import os
import signal
import time


def fault(name: str) -> None:
    """Does what the environment asks for at this point; nothing by default."""
    wanted, _, what = os.environ.get("TTSV_FAULT", "").partition(":")
    if wanted != name:
        return
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "sleep":
        time.sleep(3600)
    else:
        raise RuntimeError(f"fault {name}")
