"""Counts of each experiment's trials, which the database keeps by triggers: lists stay quick with any number of trials.

Whatever writes a trial keeps them, bulk statements and people at a database prompt included; but whoever lowers the
best of a trial calls `lower_bests`, as a trigger would have to read all trials for that. A migration that copies
`trials` on SQLite drops the triggers with the old table, so `upkeep.migrate` takes them away before and puts them
back after, counting anew.
"""

from collections.abc import Collection

from sqlalchemy import Connection, bindparam, text
from sqlalchemy.orm import Session

_COLUMNS = "experiment_id, state, trials, epoch, epochs, run_seconds, best_val_accuracy"
_SUMS = "count(*), sum(epoch), sum(epochs), sum(run_seconds), max(best_val_accuracy)"

_FILL = (
    "DELETE FROM tallies",
    f"INSERT INTO tallies ({_COLUMNS}) SELECT experiment_id, state, {_SUMS} FROM trials GROUP BY experiment_id, state",
    "UPDATE tallies SET best_accuracy = (SELECT max(results.accuracy) FROM results JOIN trials"
    " ON trials.id = results.trial_id WHERE trials.experiment_id = tallies.experiment_id AND results.valid)"
    " WHERE state = 'succeeded'",
)

_ADD = (
    "DO UPDATE SET trials = {t}trials + excluded.trials, epoch = {t}epoch + excluded.epoch,"
    " epochs = {t}epochs + excluded.epochs, run_seconds = {t}run_seconds + excluded.run_seconds, best_val_accuracy ="
)

# SQLite: once per row. The scalar max() of a null is null.
_UPSERT = (
    f"INSERT INTO tallies ({_COLUMNS}) VALUES (NEW.experiment_id, NEW.state, 1, NEW.epoch, NEW.epochs,"
    " NEW.run_seconds, NEW.best_val_accuracy) ON CONFLICT (experiment_id, state) "
    + _ADD.format(t="")
    + " coalesce(max(best_val_accuracy, excluded.best_val_accuracy), best_val_accuracy, excluded.best_val_accuracy);"
)
_TAKE_AWAY = (
    "UPDATE tallies SET trials = trials - 1, epoch = epoch - OLD.epoch, epochs = epochs - OLD.epochs,"
    " run_seconds = run_seconds - OLD.run_seconds WHERE experiment_id = OLD.experiment_id AND state = OLD.state;"
)
_SQLITE = (
    f"CREATE TRIGGER tally_insert AFTER INSERT ON trials BEGIN {_UPSERT} END",
    "CREATE TRIGGER tally_update AFTER UPDATE OF experiment_id, state, epoch, epochs, run_seconds, best_val_accuracy"
    f" ON trials BEGIN {_TAKE_AWAY} {_UPSERT} END",
    f"CREATE TRIGGER tally_delete AFTER DELETE ON trials BEGIN {_TAKE_AWAY} END",
    "CREATE TRIGGER tally_result AFTER INSERT ON results WHEN NEW.valid BEGIN"
    " INSERT INTO tallies (experiment_id, state, trials, epoch, epochs, run_seconds, best_accuracy)"
    " SELECT experiment_id, 'succeeded', 0, 0, 0, 0, NEW.accuracy FROM trials WHERE id = NEW.trial_id"
    " ON CONFLICT (experiment_id, state) DO UPDATE SET"
    " best_accuracy = max(coalesce(best_accuracy, excluded.best_accuracy), excluded.best_accuracy); END",
)
_SQLITE_DROP = tuple(
    f"DROP TRIGGER IF EXISTS {name}" for name in ("tally_insert", "tally_update", "tally_delete", "tally_result")
)

# PostgreSQL: once per statement, or ten thousand new trials would make ten thousand versions of one row.
_GREATEST = _ADD.format(t="t.") + " greatest(t.best_val_accuracy, excluded.best_val_accuracy)"
_POSTGRES = (
    f"""CREATE FUNCTION tally_trials() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF TG_OP = 'INSERT' THEN
            INSERT INTO tallies AS t ({_COLUMNS}) SELECT experiment_id, state, {_SUMS} FROM new_rows GROUP BY 1, 2
            ON CONFLICT (experiment_id, state) {_GREATEST};
        ELSIF TG_OP = 'UPDATE' THEN
            INSERT INTO tallies AS t ({_COLUMNS}) SELECT experiment_id, state,
                sum(sign), sum(sign * epoch), sum(sign * epochs), sum(sign * run_seconds), max(best_val_accuracy)
            FROM (SELECT experiment_id, state, 1 AS sign, epoch, epochs, run_seconds, best_val_accuracy FROM new_rows
                UNION ALL SELECT experiment_id, state, -1, epoch, epochs, run_seconds, NULL FROM old_rows) AS changes
            GROUP BY 1, 2 ORDER BY 1, 2
            ON CONFLICT (experiment_id, state) {_GREATEST};
        ELSE
            UPDATE tallies AS t SET trials = t.trials - gone.trials, epoch = t.epoch - gone.epoch,
                epochs = t.epochs - gone.epochs, run_seconds = t.run_seconds - gone.run_seconds
            FROM (SELECT experiment_id, state, count(*) AS trials, sum(epoch) AS epoch, sum(epochs) AS epochs,
                sum(run_seconds) AS run_seconds FROM old_rows GROUP BY 1, 2) AS gone
            WHERE t.experiment_id = gone.experiment_id AND t.state = gone.state;
        END IF;
        RETURN NULL;
    END $$""",
    """CREATE FUNCTION tally_results() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        INSERT INTO tallies AS t (experiment_id, state, trials, epoch, epochs, run_seconds, best_accuracy)
        SELECT trials.experiment_id, 'succeeded', 0, 0, 0, 0, max(new_rows.accuracy)
        FROM new_rows JOIN trials ON trials.id = new_rows.trial_id WHERE new_rows.valid GROUP BY 1
        ON CONFLICT (experiment_id, state) DO UPDATE
            SET best_accuracy = greatest(t.best_accuracy, excluded.best_accuracy);
        RETURN NULL;
    END $$""",
    "CREATE TRIGGER tally_insert AFTER INSERT ON trials REFERENCING NEW TABLE AS new_rows"
    " FOR EACH STATEMENT EXECUTE FUNCTION tally_trials()",
    "CREATE TRIGGER tally_update AFTER UPDATE ON trials REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows"
    " FOR EACH STATEMENT EXECUTE FUNCTION tally_trials()",
    "CREATE TRIGGER tally_delete AFTER DELETE ON trials REFERENCING OLD TABLE AS old_rows"
    " FOR EACH STATEMENT EXECUTE FUNCTION tally_trials()",
    "CREATE TRIGGER tally_result AFTER INSERT ON results REFERENCING NEW TABLE AS new_rows"
    " FOR EACH STATEMENT EXECUTE FUNCTION tally_results()",
)
_POSTGRES_DROP = ("DROP FUNCTION IF EXISTS tally_trials() CASCADE", "DROP FUNCTION IF EXISTS tally_results() CASCADE")

_LOWER = (
    "UPDATE tallies SET best_val_accuracy = (SELECT max(trials.best_val_accuracy) FROM trials"
    " WHERE trials.experiment_id = tallies.experiment_id AND trials.state = tallies.state)"
    " WHERE experiment_id = :experiment_id"
)
_LOWER_ALL = text(_LOWER)
_LOWER_SOME = text(f"{_LOWER} AND best_val_accuracy IN :fallen").bindparams(bindparam("fallen", expanding=True))


def lower_bests(session: Session, experiment_id: int, fallen: Collection[float] | None = None) -> None:
    """Makes the best validation accuracies those of the trials, after some of theirs fell: triggers only raise them.

    With `fallen`, what these trials had before, only where it was the best: else all trials would be read for nothing.
    """
    if fallen is None:
        session.execute(_LOWER_ALL, {"experiment_id": experiment_id})
    elif fallen:
        session.execute(_LOWER_SOME, {"experiment_id": experiment_id, "fallen": list(fallen)})


def install(connection: Connection) -> None:
    """Counts everything anew and makes the triggers, which must not be there; needs the tables of revision 0003."""
    postgres = connection.dialect.name == "postgresql"
    if postgres:  # what others write meanwhile would be counted by nobody
        connection.execute(text("LOCK TABLE trials, results IN SHARE ROW EXCLUSIVE MODE"))
    for statement in (*_FILL, *(_POSTGRES if postgres else _SQLITE)):
        connection.exec_driver_sql(statement)


def uninstall(connection: Connection) -> None:
    """Takes the triggers away, if there are any."""
    for statement in _POSTGRES_DROP if connection.dialect.name == "postgresql" else _SQLITE_DROP:
        connection.exec_driver_sql(statement)
