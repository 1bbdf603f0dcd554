"""Server-sent events, and where a stream goes on after it broke."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from service.schemas.experiments import EventOut, ExperimentUpdate


@dataclass
class Feed:
    """The stream of one experiment, fed line by line (as the HTML standard has it); survives reconnecting.

    `position` is the last event that came, `ended` whether the service said that no more will.
    """

    position: int = 0
    ended: bool = False
    _name: str = field(default="", init=False)
    _data: list[str] = field(default_factory=list, init=False)
    _id: str = field(default="", init=False)

    @property
    def headers(self) -> Mapping[str, str]:
        """What says where to go on, if anywhere: at an event that is not there yet."""
        accept = {"Accept": "text/event-stream"}
        return accept | {"Last-Event-ID": str(self.position)} if self.position else accept

    def begin(self) -> None:
        """A new connection: what the last one left unfinished does not count."""
        self._name, self._data, self._id = "", [], ""

    def take(self, line: str) -> ExperimentUpdate | EventOut | None:
        """What a line completes, if it does."""
        if line:
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            match name:
                case "event":
                    self._name = value
                case "data":
                    self._data.append(value)
                case "id":
                    self._id = value
            return None
        name, data, identity = self._name, "\n".join(self._data), self._id
        self.begin()
        if not data:
            return None
        if identity.isdigit():
            self.position = int(identity)
        if name == "event":
            return EventOut.model_validate_json(data)
        self.ended = name == "end"
        return ExperimentUpdate.model_validate_json(data)
