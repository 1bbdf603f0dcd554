"""What both clients do with requests: send them again, go over pages, take up what broke off where it was."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import httpx2 as httpx

from service.client.calls import Call, Paged, Text, query
from service.client.downloads import Download
from service.client.errors import UnreachableError, refusal, unsendable
from service.client.experiments import experiment
from service.client.frames import epoch_frame, result_frame
from service.client.sending import Line, pause
from service.client.streams import Feed, updated
from service.client.trials import epochs, trials
from service.client.wire import Wire
from service.schemas.experiments import ArtifactOut, EventOut, ExperimentOut, ExperimentUpdate
from service.specs.documents import DocumentError, refuse_beyond_json
from service.specs.states import OPEN_EXPERIMENTS

if TYPE_CHECKING:
    import pandas as pd

_T = TypeVar("_T")


class Session:
    """One service over one wire."""

    def __init__(self, line: Line, wire: Wire) -> None:
        self._line, self._wire = line, wire

    async def send(self, call: Call[_T]) -> _T:
        """Sends a request, again where it was not answered, and reads the answer."""
        try:
            refuse_beyond_json(call.json, "the body")
        except DocumentError as error:
            raise unsendable(error) from None
        attempt = 0
        while True:
            options = {"params": call.params, "json": call.json, "headers": call.headers}
            try:
                response = await self._wire.request(call.method, call.path, **options)
            except httpx.TransportError as error:
                wait = self._line.pause_after(error, attempt, repeatable=call.repeatable)
            else:
                if response.is_success:
                    return call.read(response)
                wait = self._line.pause_after(response, attempt, repeatable=call.repeatable)
            await self._wire.sleep(wait)
            attempt += 1

    async def pages(self, paged: Paged[_T]) -> AsyncGenerator[_T]:
        """The items of a list; pages are fetched as they are needed."""
        call = paged.first
        while True:
            page = await self.send(call)
            for item in paged.items(page):
                yield item
            following = paged.following(page)
            if following is None:
                return
            call = call.asking(**following)

    async def text(self, text: Text) -> AsyncGenerator[str]:
        """Text in pieces as it comes. A connection that breaks is an error: where to go on is not known."""
        options = {"params": text.params, "timeout": self._line.streaming}
        try:
            async with self._wire.stream(text.path, **options) as answer:
                if not answer.head.is_success:
                    raise refusal(await answer.whole())
                async for piece in answer.text():
                    yield piece
        except httpx.TransportError as error:
            raise self._line.no_answer(error) from error

    async def follow(
        self, experiment_id: int, after: int = 0, events: bool = True
    ) -> AsyncGenerator[ExperimentUpdate | EventOut]:
        """Progress and events until the experiment is final; a stream that breaks is taken up where it was."""
        feed = Feed(after)
        path, params = f"/v1/experiments/{experiment_id}/stream", query(events=events)
        failures = 0
        while not feed.ended:
            options = {"params": params, "headers": feed.headers, "timeout": self._line.streaming}
            try:
                async with self._wire.stream(path, **options) as answer:
                    if not answer.head.is_success:
                        raise refusal(await answer.whole())
                    feed.begin()
                    if answer.head.status_code == 204:  # final, and all events known: its last word is its own
                        feed.ended = True
                        yield ExperimentUpdate.model_validate(await self.send(experiment(experiment_id)))
                    async for line in answer.lines():
                        if (item := feed.take(line)) is not None:
                            failures = 0
                            yield item
            except httpx.TransportError as error:
                if failures >= self._line.retries:
                    raise self._line.no_answer(error) from error
            except UnreachableError:
                if failures >= self._line.retries:
                    raise
            if not feed.ended:
                await self._wire.sleep(pause(failures))
                failures += 1

    async def watch(self, experiment_id: int, every: float = 1.0) -> AsyncGenerator[ExperimentOut]:
        """The experiment whenever it changes, until it is final: by its stream, or by asking again and again."""
        shown = await self.send(experiment(experiment_id))
        yield shown
        try:
            async for update in self.follow(experiment_id, events=False):
                # The last word is the experiment's own: a search may have added trials meanwhile.
                if isinstance(update, ExperimentUpdate) and update.state in OPEN_EXPERIMENTS:
                    changed = updated(shown, update)
                    if changed != shown:
                        shown = changed
                        yield shown
        except UnreachableError:  # something between us lets no streams through, perhaps; else asking says so
            pass
        while shown.state in OPEN_EXPERIMENTS:
            found = await self.send(experiment(experiment_id))
            if found != shown:
                shown = found
                yield shown
            if shown.state in OPEN_EXPERIMENTS:
                await self._wire.sleep(every)

    async def download(self, artifact: ArtifactOut, target: str | Path) -> Path:
        """Fetches a file and checks its SHA-256; what broke off, in an earlier call too, goes on where it was."""
        failures = 0
        with Download(artifact, Path(target)) as download:
            while not download.done:
                options = {"headers": download.headers, "timeout": self._line.streaming}
                have = download.size
                try:
                    async with self._wire.stream(download.path, **options) as answer:
                        if answer.head.is_success:
                            download.begin(answer.head)
                            async for chunk in answer.bytes():
                                download.write(chunk)
                            outcome: httpx.Response | httpx.TransportError = answer.head
                        else:
                            outcome = await answer.whole()
                except httpx.TransportError as error:
                    outcome = error
                if not download.done:
                    failures = 0 if download.size > have else failures
                    await self._wire.sleep(self._line.pause_after(outcome, failures))
                    failures += 1
            return download.finish()

    async def results(
        self, experiment_id: int | None = None, dataset: str | None = None, state: str | None = None
    ) -> "pd.DataFrame":
        """Trials as a data frame."""
        found = self.pages(trials(experiment_id, dataset=dataset, state=state))
        return result_frame([trial async for trial in found])

    async def metrics(self, trial_id: int) -> "pd.DataFrame":
        """Epochs as a data frame."""
        return epoch_frame([epoch async for epoch in self.pages(epochs(trial_id))])
