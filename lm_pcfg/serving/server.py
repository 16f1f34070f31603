"""What uvicorn lacks: a bound on connections and on how long they may say nothing, and an end that waits for nobody."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 400  # a process may open 1,024 files, usually
SECONDS_FOR_A_HEAD = 20.0  # of a request: its first line and headers


class Server(uvicorn.Server):
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.app.stop()  # type: ignore[union-attr] # answers what waits: nobody holds up the end
        await super().shutdown(sockets)


class Connection(H11Protocol):
    """A connection that is closed if there are too many, or if no request comes on it."""

    _silent: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
            return
        self._silent = self.loop.call_later(SECONDS_FOR_A_HEAD, self._close_if_silent)

    def _close_if_silent(self) -> None:
        if self.cycle is None and not self.transport.is_closing():  # no request has begun
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._silent is not None:
            self._silent.cancel()
        super().connection_lost(exc)
