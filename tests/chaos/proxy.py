"""A TCP proxy before a database that can cut connections, fall silent, or swallow the reply to a COMMIT."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Proxy:
    """Listens on `port` of this machine and forwards to a Unix socket, in a thread of its own.

    `swallow` says how many of the next COMMITs are carried out without their client ever hearing of it: its connection
    is reset instead. `swallowed` and `cut` count what was done.
    """

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.swallow = self.swallowed = self.cuts = 0
        self._silent_until = 0.0
        self._closed_until = 0.0
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._server = self._do(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]

    def cut(self, seconds: float = 0.0) -> None:
        """Resets every connection, and refuses new ones for so long."""
        self._closed_until = time.monotonic() + seconds
        self._do(self._reset_all())
        self.cuts += 1

    def fall_silent(self, seconds: float) -> None:
        """Half open: nothing is forwarded for so long, then every connection is reset."""
        self._silent_until = time.monotonic() + seconds

        async def later() -> None:
            await asyncio.sleep(seconds)
            await self._reset_all()

        asyncio.run_coroutine_threadsafe(later(), self._loop)
        self.cuts += 1

    def close(self) -> None:
        """Ends the proxy and its thread."""

        async def end() -> None:
            self._server.close()
            await self._reset_all()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await asyncio.sleep(0)  # aborted transports close their sockets in the next turn of the loop

        self._do(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _reset_all(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            if time.monotonic() < self._closed_until:
                writer.transport.abort()
                return
            try:
                there, to_there = await asyncio.open_unix_connection(self.upstream)
            except OSError:
                writer.transport.abort()
                return
            self._writers.add(to_there)
            link = _Link()
            ways = [
                asyncio.create_task(self._forward(reader, to_there, link, asks=True)),
                asyncio.create_task(self._forward(there, writer, link, asks=False)),
            ]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            writer.transport.abort()
            to_there.transport.abort()
            self._writers.discard(to_there)
        finally:
            self._writers.discard(writer)

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: "_Link", *, asks: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                while time.monotonic() < self._silent_until:
                    await asyncio.sleep(0.05)
                if asks and self.swallow > 0 and b"COMMIT\0" in data:
                    self.swallow -= 1
                    link.deaf = True
                if not asks and link.deaf:
                    self.swallowed += 1
                    return
                writer.write(data)
                await writer.drain()


class _Link:
    """One client's connection; `deaf` from the COMMIT on whose answer it will not get."""

    deaf = False
