"""Where the files of trials are kept: one small interface (`store`) over a folder and over an object store.

`attempts` says how the files of a trial lie there, the same in every store. pyarrow is loaded for object stores alone.

Of `ttsv` only results, errors and fault points may be imported, of the service only errors.
"""

from service.storage.attempts import Attempt, begin, is_later, logs_of, remove_checkpoints
from service.storage.folder import Folder
from service.storage.marker import MARKER, mark_of, marked
from service.storage.objects import Objects
from service.storage.opening import (
    SETTING,
    bucket_problem,
    open_kept,
    open_storage,
    problem_of,
    require_bucket,
    without_secrets,
)
from service.storage.store import DamagedFileError, Store, StoredFile, copy_out, require_inside, trouble_of

__all__ = [
    "MARKER",
    "SETTING",
    "Attempt",
    "DamagedFileError",
    "Folder",
    "Objects",
    "Store",
    "StoredFile",
    "begin",
    "bucket_problem",
    "copy_out",
    "is_later",
    "logs_of",
    "mark_of",
    "marked",
    "open_kept",
    "open_storage",
    "problem_of",
    "remove_checkpoints",
    "require_bucket",
    "require_inside",
    "trouble_of",
    "without_secrets",
]
