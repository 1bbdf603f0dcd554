"""Compares this machine with the head's cluster, and says in words what does not fit: a child of `membership`.

`python -m workers.node.probe HOST:PORT` reads a `NodeNote` from standard input, leaves it with the head, among the
nodes or among the refused, and writes a `Verdict` to standard output. Nothing but the head's own port is needed for
it, and no part of Ray runs here before.
"""

import contextlib
import dataclasses
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pydantic import TypeAdapter

from service.queue.cluster import Machine
from service.storage import MARKER, bucket_problem, without_secrets
from workers.node.notes import MOST_CLOCK_SECONDS, HeadNote, NodeNote, Notes, misfits, other_versions, said
from workers.node.scratch import node_data, write_problem

CONNECT_SECONDS = 3.0
CLOCK_SECONDS = 20.0
"""How long the head's clock may stand still before nobody writes it."""
_HTTP2, _SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]), b"\x04"
"""How a client begins, with an empty frame of settings; and the type of such a frame, its fourth byte."""
_LOOK_SECONDS = 0.05
_LOOKS_AT_CLOCK = 3


class Outcome(StrEnum):
    """`unanswered`: it may be otherwise later. `unwelcome`: the token is not the cluster's.

    `hindered`: its versions are the head's, and its clock is not, or it cannot reach the store of files or the folder
    that all share, or not write where its trials would: that may pass.
    """

    FITS = "fits"
    REFUSED = "refused"
    HINDERED = "hindered"
    UNWELCOME = "unwelcome"
    UNANSWERED = "unanswered"


@dataclass(frozen=True)
class Verdict:
    """What became of the comparison, in words unless it fits. `data_dir`: the head's data folder, at its path there."""

    outcome: Outcome
    words: str = ""
    data_dir: str | None = None


VERDICT = TypeAdapter(Verdict)
NOTE = TypeAdapter(NodeNote)


def judge(address: str, note: NodeNote) -> Verdict:
    """Asks the head, and leaves it a note. A node that has joined before says there what is wrong with it now."""
    from ray.exceptions import AuthenticationError, RayError

    if (words := no_ray_at(address)) is not None:
        return Verdict(Outcome.UNANSWERED, words)
    try:
        notes = Notes(address)
        head, ahead = compare_clocks(lambda: notes.heads.get("head"))
        if head is None:
            return Verdict(Outcome.UNANSWERED, f"Ray answers at {address}, and no worker writes there")
        problems = misfits(
            head,
            note.machine.versions,
            clock_seconds=ahead,
            sees_folder=head.folder is None or head.folder.seen(),
        )
        outcome = Outcome.REFUSED if other_versions(head, note.machine.versions) else Outcome.HINDERED
        problems += [*store_problems(head), *folder_problems(head)]
        machine: Machine = dataclasses.replace(note.machine, clock_seconds=None if ahead is None else round(ahead, 2))
        note = dataclasses.replace(note, machine=machine, problem=said(problems) or None)
        joined = note.name in notes.nodes.names()
        (notes.nodes if joined or not problems else notes.refused).put(note.name, note)
    except AuthenticationError as error:
        if "WrongClusterID" in str(error):
            return Verdict(Outcome.UNANSWERED, f"the head at {address} is starting again")
        words = f"the token is not that of the cluster at {address}: copy the file `token` of the head's data folder"
        return Verdict(Outcome.UNWELCOME, words)
    except RayError as error:
        return Verdict(Outcome.UNANSWERED, f"Ray's head at {address}: {str(error).partition(chr(10))[0]}")
    except ValueError:
        return Verdict(Outcome.REFUSED, f"the head at {address} writes other notes: install the same version on both")
    return Verdict(outcome if problems else Outcome.FITS, said(problems), head.data_dir)


def no_ray_at(address: str) -> str | None:
    """In words why no head of Ray is there; None where one is, or is slow.

    Ray itself waits most of a minute for whoever listens. Its head speaks HTTP/2, and begins with a frame of settings.
    """
    host, _, port = address.rpartition(":")
    try:
        line = socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS)
    except OSError as error:
        return f"nothing answers at {address} ({error.strerror or error})"
    with line:
        try:
            line.sendall(_HTTP2)
            begin = line.recv(9)
        except TimeoutError:
            return None
        except OSError:
            begin = b""
    return None if begin[3:4] == _SETTINGS else f"what listens at {address} is not Ray: which port has the head?"


def store_problems(head: HeadNote) -> list[str]:
    """What keeps this machine from the store of the trials' files, with what mends it; nothing without a store."""
    if head.storage is None:
        return []
    place = without_secrets(head.storage.path)
    if head.storage.marker:
        if not head.storage.seen():
            missing = f"its file {MARKER} is missing, or of another"
            return [f"the head's store {place} is not here ({missing}): mount it there"]
        if (problem := write_problem(Path(head.storage.path))) is None:
            return []
        return [f"the head's store {place} {problem}: mount it for writing, and let that user write there"]
    problem = bucket_problem(head.storage.path)
    if problem is None:
        return []
    return [f"the head's store {place} {problem} (asked from here, with this machine's AWS_ACCESS_KEY_ID and the like)"]


def folder_problems(head: HeadNote) -> list[str]:
    """What keeps trials here from writing into the head's data folder, or this machine's own, with what mends it.

    Nothing where the head's must be seen and is not: `misfits` says so.
    """
    if head.data_dir is None:
        return []
    folder = node_data(head.data_dir)
    fix = "or set TTSV_DATA_DIR to a folder of this machine that may be written"
    if head.folder is not None:
        if not head.folder.seen():
            return []
        if not dataclasses.replace(head.folder, path=str(folder)).seen():
            folder = Path(head.folder.path)
        fix = "and let that user write there"
    problem = write_problem(folder)
    return [] if problem is None else [f"the data folder {folder} {problem}: mount it for writing, {fix}"]


def compare_clocks(
    look: Callable[[], HeadNote | None], clock: Callable[[], float] = time.time, patience: float = CLOCK_SECONDS
) -> tuple[HeadNote | None, float | None]:
    """The head's note, once it was seen to change, and how many seconds our clock is ahead of the head's.

    The note has the time at which it was written, so that the moment of a change compares the clocks; what a slow look
    adds is taken off by looking again. None and None where nobody writes.
    """
    first, deadline = look(), time.monotonic() + patience
    ahead: float | None = None
    changes = 0
    while changes < _LOOKS_AT_CLOCK and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        note = look()
        if note is None or note == first:
            continue
        now = clock() - note.time
        ahead = now if ahead is None else min(ahead, now, key=abs)
        first, changes = note, changes + 1
        if abs(ahead) <= MOST_CLOCK_SECONDS:
            break
    return (first, ahead) if changes else (None, None)


def main() -> None:
    """The child's whole life."""
    verdict = judge(sys.argv[1], NOTE.validate_json(sys.stdin.buffer.read()))
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(VERDICT.dump_json(verdict).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
