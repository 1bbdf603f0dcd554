"""The renames of a restore: what puts it in its place and takes it back, written down before the first is done."""

import json
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from service.errors import UserError
from service.settings import Settings
from service.storage import Objects, open_storage, without_secrets
from service.storage.store import sync_folder

JOURNAL = "restore.json"
"""Its name in the data folder."""


@dataclass(frozen=True)
class Move:
    """A renaming on one disk."""

    source: Path
    target: Path

    def do(self) -> None:
        """Renames it, into a folder that is made if need be."""
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.source.rename(self.target)

    def undo(self) -> None:
        """Takes the renaming back, if it was done."""
        if os.path.lexists(self.target) and not os.path.lexists(self.source):
            self.target.rename(self.source)


@dataclass(frozen=True)
class ObjectsMove:
    """A move of all that is in a folder of an object store: one after the other, so it may be done in part.

    `place` is the store's, as it may be shown.
    """

    store: Objects
    place: str
    source: str
    target: str

    def do(self) -> None:
        """Moves it."""
        self.store.move(self.source, self.target)

    def undo(self) -> None:
        """Takes it back, as far as it was done: nothing else is in the target before a move before it is taken back."""
        self.store.move(self.target, self.source)


Moves = Sequence[Move | ObjectsMove]


class Journal:
    """The renames of a restore, written down before the first is done, with how many are done."""

    def __init__(self, data_dir: Path, restore_id: str | None = None, moves: Moves = (), done: int = 0) -> None:
        self._path = data_dir / JOURNAL
        self.id, self.begun = restore_id or uuid.uuid4().hex, False
        self._moves, self._done = moves, done

    @property
    def mark(self) -> str:
        """The key of the row by which a database says that it has this restore."""
        return f"restore {self.id}"

    @classmethod
    def read(cls, settings: Settings) -> "Journal | None":
        """What a restore that was cut short left; None where none did. Raises `UserError` without its store."""
        try:
            found = json.loads((settings.data_dir / JOURNAL).read_bytes())
        except FileNotFoundError:
            return None
        moves: list[Move | ObjectsMove] = []
        for source, target, *place in found["moves"]:
            if not place:
                moves.append(Move(Path(source), Path(target)))
                continue
            if settings.storage is None or without_secrets(settings.storage) != place[0]:
                raise UserError(f"TTSV_STORAGE must name {place[0]}, into which the restore went that was cut short")
            store = open_storage(settings.storage)
            assert isinstance(store, Objects), "it was one when this was written"
            moves.append(ObjectsMove(store, place[0], source, target))
        return cls(settings.data_dir, found["id"], moves, found["done"])

    def begin(self, moves: Moves) -> None:
        """Writes them down, then does them."""
        self._moves, self.begun = moves, True
        os.sync()
        self._write()
        for move in moves:
            move.do()
            self._done += 1
            self._write()

    def undo(self) -> None:
        """Takes back what was done of them. Of one more it is not known: it was done where its source is gone."""
        for move in reversed(self._moves[: self._done + 1]):
            move.undo()
            self._done -= 1
            if isinstance(move, ObjectsMove):
                # Written down before another is: what is back by then must not be taken for what this one had brought.
                self._write()
        self.end()

    def end(self) -> None:
        """Forgets them."""
        os.sync()
        self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        moves = [
            [str(one.source), str(one.target), *([one.place] if isinstance(one, ObjectsMove) else [])]
            for one in self._moves
        ]
        draft = self._path.with_name(f"{JOURNAL}.partial")
        with draft.open("w") as file:
            json.dump({"id": self.id, "done": self._done, "moves": moves}, file)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(self._path)
        sync_folder(self._path.parent)
