"""A worker within the time that a batch system gives it: when it leaves, and how it comes back."""

import logging
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass

from service.errors import UserError

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 60.0
"""Before the end of its time a worker begins to give its experiments back."""
IDLE_SECONDS = 60.0
"""So long there is nothing to run before a worker that stays until then leaves: somebody may post the next grid."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_CLOCK = re.compile(r"(?:\d+-)?\d+:\d\d:\d\d")


def seconds_of(text: str) -> float:
    """A time such as `90s`, `30m`, `4h`, `2d`, or `1-12:00:00` as Slurm writes it. Raises `ValueError`."""
    if _CLOCK.fullmatch(text):
        return _seconds_of_clock(text)
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text):
        return float(found[1]) * _UNITS[found[2]]
    raise ValueError(f"{text!r} is no time; write it as 90s, 30m, 4h, 2d or 1-12:00:00")


def _seconds_of_clock(text: str) -> float:
    """A time as Slurm writes it: `1-12:00:00`, `12:00:00`, or `1:58` where little is left. Raises `ValueError`."""
    days, _, clock = text.rpartition("-")
    seconds = 0
    for part in clock.split(":"):
        seconds = seconds * 60 + int(part)
    return float(int(days or 0) * 86400 + seconds)


@dataclass(frozen=True)
class Allocation:
    """How long a worker may stay.

    `ends` is when the machine is taken away, of the monotonic clock; None: never. `until_idle`: no longer than it has
    something to do.
    """

    ends: float | None = None
    until_idle: bool = False

    def is_over(self) -> bool:
        """Whether it is time to leave, with time to write what is known."""
        return self.ends is not None and time.monotonic() > self.ends - DRAIN_SECONDS

    def is_idle(self, busy: float) -> bool:
        """Whether a worker that last had something to do at `busy`, of the monotonic clock, may leave."""
        return self.until_idle and time.monotonic() - busy > IDLE_SECONDS


def allocation(limit: str | None, environment: Mapping[str, str], *, until_idle: bool) -> Allocation:
    """That of a time limit from now, or else of the Slurm job that we are in. Raises `UserError`."""
    if limit is not None:
        try:
            left = seconds_of(limit)
        except ValueError as error:
            raise UserError(f"--time-limit: {error}") from None
        if left <= DRAIN_SECONDS:
            raise UserError(
                f"--time-limit {limit}: must be more than {DRAIN_SECONDS:g} s, which a worker takes to leave"
            )
    elif (given := _left_of_job(environment)) is not None:
        left = given
    else:
        return Allocation(until_idle=until_idle)
    logger.info("this worker leaves in %.0f min", (left - DRAIN_SECONDS) / 60)
    return Allocation(time.monotonic() + left, until_idle)


def _left_of_job(environment: Mapping[str, str]) -> float | None:
    """Seconds until Slurm ends the job that we are in; None where we are in none, or it has no end."""
    if (end := environment.get("SLURM_JOB_END_TIME", "")).isdecimal():
        return int(end) - time.time()
    job = environment.get("SLURM_JOB_ID")
    if job is None:
        return None
    # A job of Slurm before 23.02 is not told when it ends.
    try:
        said = _slurm("squeue", "--noheader", "--job", job, "--format", "%L")
        return None if said == "UNLIMITED" else _seconds_of_clock(said)
    except (UserError, ValueError) as error:
        logger.warning("when job %s ends is not known, so this worker stays until it is killed (%s)", job, error)
        logger.warning("give --time-limit with the time that the job has")
        return None


def job_of(environment: Mapping[str, str]) -> str:
    """The job of Slurm that we are in. Raises `UserError` where we are in none."""
    job = environment.get("SLURM_JOB_ID")
    if job is None:
        raise UserError("--requeue: there is no SLURM_JOB_ID here; start the worker by sbatch")
    return job


def requeue(environment: Mapping[str, str]) -> None:
    """Has Slurm run our job again. Raises `UserError` where we are in none, or Slurm will not."""
    job = job_of(environment)
    # Slurm ends a job that it has queued again at once, maybe before its program, which inherits this, has its answer.
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        _slurm("scontrol", "requeue", job)
        logger.info("job %s is queued again", job)
    except UserError as error:
        raise UserError(f"{error} (submit the job with sbatch --requeue)") from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _slurm(*command: str) -> str:
    """What a program of Slurm prints. Raises `UserError` where it is not there, fails, or takes over a minute."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{' '.join(command)}: {error}") from None
    if done.returncode:
        raise UserError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()
