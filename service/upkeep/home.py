"""The one place where the files of trials are: the API's, which workers must share to leave files where it reads them.

The first API on a database writes the mark of that place into it. Whoever comes with another place is refused, and a
worker of a database without a mark is believed.
"""

import errno
import logging
import socket
from pathlib import Path

from sqlalchemy import inspect, select
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.orm import Session

from service.database import Experiment, Home
from service.database.engine import Database, is_damaged, said_by, shown
from service.errors import UserError
from service.settings import Settings
from service.storage import MARKER, SETTING, Folder, bucket_problem, mark_of, marked, open_kept, without_secrets
from service.storage.attempts import TRIALS
from service.upkeep.files import DataFolder
from service.upkeep.places import NUMBER
from service.upkeep.rows import counters

logger = logging.getLogger(__name__)

_ONLY = 1


def settle(database: Database, settings: Settings) -> None:
    """Makes the settings' place the one of the database if that has none, as an API does when it starts.

    Also where its data folder was it, and `TTSV_STORAGE` is new: it reads both. Raises `UserError` where the database
    has another place. Database or store may be away: then the next start does it.
    """
    try:
        with database.read() as session:
            home = session.get(Home, _ONLY)
        into_store = (
            home is not None and settings.storage is not None and home.mark == mark_of(Folder(settings.data_dir))
        )
        if (home is None or into_store) and _answers(settings):
            _write(database, settings, over=into_store)
    except (DBAPIError, OSError) as error:
        logger.warning("where the files of trials are cannot be noted now: %s", said_by(error))
    refuse_elsewhere(database, settings)


def refuse_link(settings: Settings) -> None:
    """Raises `UserError` where the folder of all trials is a link.

    A trial would train to its end there, and nobody would read what it left: no file behind a link is given out.
    """
    if (problem := link_problem(settings)) is not None:
        raise UserError(problem)


def link_problem(settings: Settings) -> str | None:
    """Why no trial can leave its files in the data folder; None where that is no link's fault."""
    folder = settings.data_dir / TRIALS
    if settings.storage is not None or not folder.is_symlink():
        return None
    return (
        f"{folder} is a link, and no file behind a link is given out: mount the disk there (mount --bind), or move the "
        "data folder to it and let TTSV_DATA_DIR name that"
    )


def refuse_lost(database: Database, settings: Settings) -> None:
    """Raises `UserError` where trials left files here, and the database never had one (`lost_problem`)."""
    try:
        problem = lost_problem(settings, None if _is_absent(database) else database)
    except OperationalError:  # it is away: the API says so until it is back
        return
    except OSError as error:
        logger.warning("whether the files of trials are of this database cannot be told: %s", error)
        return
    if problem is not None:
        raise UserError(problem)


def lost_problem(settings: Settings, database: Database | None) -> str | None:
    """Why the files of trials here are of another database; None where they need not be. `database`: None: no file yet.

    In a database that never had an experiment numbers begin at 1, and trials write into the folders that are there.
    Raises `OSError` where these cannot be read, `DBAPIError` where the database does not answer.
    """
    if (database is not None and _has_begun(database)) or (place := _used(settings)) is None:
        return None
    there = "is not there" if database is None else "has never had an experiment"
    return (
        f"the database {shown(settings.url)} {there}, and trials have left files in {place}, among which those of new "
        "trials would be. Let TTSV_DATABASE_URL and TTSV_DATA_DIR name what belongs together; restore the database by "
        f"`ttsv restore --force FILE`, from a backup; or move {place} aside, to begin anew"
    )


def _is_absent(database: Database) -> bool:
    """Whether it is a file that is yet to be made, as whoever connects would do."""
    url = database.engine.url
    return url.get_backend_name() == "sqlite" and not Path(str(url.database)).exists()


def _has_begun(database: Database) -> bool:
    """Whether it has, or ever had, an experiment."""
    with database.read() as session:
        connection, name = session.connection(), Experiment.__tablename__
        if not inspect(connection).has_table(name):
            return False
        there = session.scalar(select(Experiment.id).limit(1)) is not None
        return there or counters(connection, [name]).get(name, 0) > 0


def _used(settings: Settings) -> str | None:
    """Where trials have left files, as people know it: the data folder is read, too, where a store keeps them."""
    if any(map(NUMBER.fullmatch, Folder(settings.data_dir).folders(TRIALS))):
        return str(settings.data_dir / TRIALS)
    storage = settings.storage
    if storage is None or ("://" in storage and bucket_problem(storage) is not None):  # which others tell
        return None
    if any(map(NUMBER.fullmatch, open_kept(settings.data_dir, storage).folders(TRIALS))):
        return f"{without_secrets(storage)}/{TRIALS}"
    return None


def move_here(database: Database, settings: Settings) -> str:
    """Makes the settings' place the one of the database, whatever it was; returns its name. Raises `OSError`."""
    _write(database, settings, over=True)
    return _place(settings)


def refuse_elsewhere(database: Database, settings: Settings, *, in_doubt: bool = False) -> None:
    """Raises `UserError` where these settings would leave files where the API does not read them.

    `in_doubt`: also where that cannot be told, as before files are removed.
    """
    problem, doubt = None, "whether the files of trials are where the API reads them cannot be told"
    try:
        with database.read() as session:
            # Who makes a backup may have the database of a version that knew no marks.
            known = inspect(session.connection()).has_table(Home.__tablename__) and session.get(Home, _ONLY) is not None
        if known and _answers(settings):
            problem = problem_of(database, settings)
        elif known and in_doubt:
            problem = f"{doubt}, as the store of TTSV_STORAGE cannot be used now: nothing is done"
    except OSError as error:
        if in_doubt:
            raise UserError(f"{doubt}: {error}; nothing is done") from error
        logger.warning("%s: %s", doubt, error)
    except DBAPIError as error:
        if in_doubt or is_damaged(error):
            raise
        logger.warning("%s: %s", doubt, said_by(error))
    if problem is not None:
        raise UserError(problem)


def problem_of(database: Database, settings: Settings) -> str | None:
    """Why files that these settings keep are not where the API reads them; None: they are, or it has no mark.

    Raises `OSError` where the place cannot be read, `DBAPIError` where the database does not answer.
    """
    with database.read() as session:
        home = session.get(Home, _ONLY)
    if home is None or mark_of(open_kept(settings.data_dir, settings.storage)) == home.mark:
        return None
    return (
        f"files of trials would be in {_place(settings)}, and the API of this database has them in {home.place}: "
        f"another folder or store, or one that is not mounted here (its file {MARKER} is missing, or says otherwise). "
        "Set TTSV_DATA_DIR and TTSV_STORAGE alike for API and workers; where the files are here now, run "
        "`ttsv migrate --here` first"
    )


def known_mark(session: Session) -> str | None:
    """The mark of the place where the files of this database's trials are; None where no API has noted one yet."""
    home = session.get(Home, _ONLY)
    return None if home is None else home.mark


def require_home(session: Session, folder: DataFolder) -> None:
    """Raises `OSError` where files of this database's trials are elsewhere, or what has them is not mounted.

    By the mark, as not every trial left a file that could be looked for.
    """
    home = session.get(Home, _ONLY)
    if home is not None and folder.mark() != home.mark:
        says = f"files of trials are in {home.place}: another folder or store, or not mounted here (its file {MARKER})"
        raise OSError(errno.ENODEV, says, str(folder.path))


def _write(database: Database, settings: Settings, *, over: bool) -> None:
    mark, place = marked(open_kept(settings.data_dir, settings.storage)), _place(settings)

    def write(session: Session) -> None:
        row = Home(id=_ONLY, mark=mark, place=place)
        if over:
            session.merge(row)
        elif session.get(Home, _ONLY) is None:
            session.add(row)  # what another has added meanwhile stays

    try:
        database.write(write)
    except IntegrityError:  # another API did at the same time
        if over:
            raise


def _answers(settings: Settings) -> bool:
    """Whether the store does, which else is waited for longer than anybody's start may take.

    Raises `UserError` where what `TTSV_STORAGE` names can be none.
    """
    if settings.storage is None or "://" not in settings.storage:
        return True
    if (problem := bucket_problem(settings.storage)) is not None:
        if (wrong := problem.partition(SETTING))[1]:
            raise UserError("".join(wrong[1:]))
        logger.warning("the store of trials' files (TTSV_STORAGE) %s", problem)
    return problem is None


def _place(settings: Settings) -> str:
    """What people know the place by."""
    if settings.storage is not None and "://" in settings.storage:
        return without_secrets(settings.storage)
    return f"{settings.storage or settings.data_dir.resolve()} on {socket.gethostname()}"
