"""What `TTSV_STORAGE` names, opened."""

import errno
import secrets
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from service.errors import UserError
from service.storage.folder import Folder
from service.storage.objects import Objects, numbered
from service.storage.store import Store

SETTING = "TTSV_STORAGE: "
"""How it is said that such a name can name no store."""
_ANSWER_SECONDS = 10.0
"""How long a store's server may be silent before somebody who looks at it goes on."""
_OBJECTS = ("s3",)
_OPTIONS = (
    "region",
    "scheme",
    "endpoint_override",
    "allow_bucket_creation",
    "allow_bucket_deletion",
    "allow_delayed_open",
    "smart_defaults",
    "tls_ca_file_path",
    "tls_ca_dir_path",
    "tls_verify_certificates",
)
"""What pyarrow takes behind a URL's `?`; it names none of them where it refuses another."""
_KEY_HINT = "write / as %2F in a key, and ? as %3F, or give it by AWS_SECRET_ACCESS_KEY"
_UNWRITABLE = 3
_ASK = f"""
import sys
from service.errors import UserError
from service.storage.opening import require_bucket, require_writable
place, status = sys.stdin.read(), 1
try:
    require_bucket(place)
    status = {_UNWRITABLE}
    require_writable(place)
except (OSError, UserError) as error:
    print(error)
    sys.exit(status)
"""


def problem_of(place: str) -> str | None:
    """What is wrong with such a name, as far as it can be told without asking; None where nothing is."""
    scheme, separator, rest = place.partition("://")
    if not separator:
        return None if Path(place).is_absolute() else "must be an absolute path, or s3://BUCKET/PREFIX"
    if scheme not in _OBJECTS or not urlsplit(place).netloc:
        return "must be an absolute path, or s3://BUCKET/PREFIX?endpoint_override=HOST:PORT&scheme=https"
    return None if rest else "must name a bucket"


def without_secrets(place: str) -> str:
    """A store's place as it may be shown: keys may stand before an `@`, and among a URL's options."""
    return place.partition("?")[0].rpartition("@")[2]


@cache
def open_storage(place: str) -> Store:
    """The store of a folder's path, or of a URL `s3://BUCKET/PREFIX?OPTION=VALUE...` as `pyarrow.fs` reads it.

    Raises `UserError` of what is neither, and `OSError`.
    """
    if problem := problem_of(place):
        raise UserError(f"{SETTING}{problem}")
    if "://" not in place:
        return Folder(Path(place))
    from pyarrow.fs import SubTreeFileSystem

    filesystem, root = _file_system(place)
    return Objects(SubTreeFileSystem(root, filesystem))


def open_kept(data_dir: Path, storage: str | None) -> Store:
    """The store that keeps the files of trials: what `TTSV_STORAGE` names, else the data folder."""
    return Folder(data_dir) if storage is None else open_storage(storage)


def require_bucket(place: str) -> None:
    """Raises `OSError` where the server of such a URL does not answer, refuses us, or has no such bucket.

    The store itself cannot tell: to it a bucket that is not there is an empty one, until something is written.
    """
    filesystem, root = _file_system(place)
    bucket = root.partition("/")[0]
    if filesystem.get_file_info(bucket).type.name == "NotFound":
        raise FileNotFoundError(errno.ENOENT, "there is no such bucket", bucket)


def require_writable(place: str) -> None:
    """Raises `OSError` where no object can be written into the bucket of such a URL, or none removed from it."""
    filesystem, root = _file_system(place)
    name = f"{root.rstrip('/')}/.ttsv-{secrets.token_hex(8)}"
    with filesystem.open_output_stream(name) as file:
        file.write(b".")
    filesystem.delete_file(name)


def bucket_problem(place: str) -> str | None:
    """What keeps the bucket of such a URL from use, in words that follow its name; None where nothing does.

    A small object is written and removed: with a key that may only read all trials would train in vain.

    Asked in a process of its own: of a silent server pyarrow asks again for a minute and a half, and a thread that
    waits for it could not be left behind, as a program's end waits for it. The URL may hold a key, so it is in no
    command line.
    """
    command, patience = [sys.executable, "-c", _ASK], _ANSWER_SECONDS
    try:
        done = subprocess.run(command, input=place, capture_output=True, text=True, check=False, timeout=patience)
    except subprocess.TimeoutExpired:
        return f"does not answer within {patience:g} s"
    if done.returncode == 0:
        return None
    last = ((done.stdout or done.stderr).strip().splitlines() or [f"its look ended with {done.returncode}"])[-1]
    return f"cannot be {'written' if done.returncode == _UNWRITABLE else 'read'}: {last}"


def _file_system(place: str) -> tuple[Any, str]:
    """Of a URL: what speaks with its server, and the path in it."""
    from pyarrow.fs import FileSystem

    try:
        with numbered(without_secrets(place)):  # where it names no region the network is asked for it
            filesystem, root = FileSystem.from_uri(place)
    except ValueError as error:
        raise UserError(f"{SETTING}{_refusal(place, str(error))}") from None
    return filesystem, str(root)


def _refusal(place: str, said: str) -> str:
    """Why pyarrow refuses such a URL, without its secrets, and what helps."""
    if "@" in place.partition("?")[2]:  # a key may have a ? in it, and what is behind that would be named as an option
        return f"it cannot be read; {_KEY_HINT}"
    said = said.replace(place, without_secrets(place))  # the library's own words repeat all of it
    if "query parameter" in said:
        return f"{said}; there are {', '.join(_OPTIONS)}"
    return f"{said}; {_KEY_HINT}" if "@" in place else said
