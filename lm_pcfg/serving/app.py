"""The service: routes, limits and errors. Every answer to a request is 2xx or 4xx, with one line that says why.

Who may ask is decided by the Host header: a page of another site that a browser on this machine shows cannot reach a
service on 127.0.0.1 through a name of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import Body, FastAPI, Request
from fastapi.exceptions import HTTPException, RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lm_pcfg.errors import UserError
from lm_pcfg.inference.model import Model
from lm_pcfg.pages.model_parts import without_paths
from lm_pcfg.serving import page
from lm_pcfg.serving.answers import AnalyseRequest, Answers, LinesRequest, NextRequest, ParseRequest, SampleRequest
from lm_pcfg.serving.worker import Busy, Worker

MOST_BYTES = 1 << 20  # of a request
TOO_LARGE = f"a request has at most {MOST_BYTES:,} bytes"
SMALL, MOST_READ = 16 << 10, 32  # bytes of a body of which any number is read at once; of larger ones so many are
SECONDS_FOR_A_BODY = 20.0
SECONDS_TO_TRY_AGAIN = 2
LOOPBACK = ("127.0.0.1", "localhost", "::1")
HEADERS = {  # what a browser may load is in the pages themselves
    b"content-security-policy": b"frame-ancestors 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cache-control": b"no-store",
}

Asked = TypeVar("Asked")


def make_app(
    model: Model, *, hosts: tuple[str, ...] = LOOPBACK, most_words: int = 200, most_waiting: int = 16
) -> Guard:
    """Make the service of a model.

    hosts         names in the Host header that are answered; "*" among them: any
    most_words    of a line (or pieces)
    most_waiting  requests in the queue
    """
    answers, worker = Answers(model, most_words), Worker(most_waiting)
    app = FastAPI(title="lm_pcfg", docs_url=None, redoc_url=None)

    async def computed(function: Callable[[Asked], dict[str, Any]], asked: Asked) -> dict[str, Any]:
        return await worker.run(partial(function, asked))

    @app.post("/score")
    async def score(asked: Annotated[LinesRequest, Body()]) -> dict[str, Any]:
        """Natural log-probabilities of lines (null: impossible or blank), and how many words of each are unknown."""
        return await computed(answers.score, asked)

    @app.post("/parse")
    async def parse(asked: Annotated[ParseRequest, Body()]) -> dict[str, Any]:
        """Trees of lines, as brackets and as nodes [first word, end, label]."""
        return await computed(answers.parse, asked)

    @app.post("/surprisal")
    async def surprisal(asked: Annotated[LinesRequest, Body()]) -> dict[str, Any]:
        """Surprisals in bits of the words of lines and of their ends."""
        return await computed(answers.surprisal, asked)

    @app.post("/sample")
    async def sample(asked: Annotated[SampleRequest, Body()]) -> dict[str, Any]:
        """Sentences drawn from the model, or completions of a prefix; the same seed draws the same."""
        return await computed(answers.sample, asked)

    @app.post("/next")
    async def next_word(asked: Annotated[NextRequest, Body()]) -> dict[str, Any]:
        """The likeliest continuations of a prefix with their probabilities."""
        return await computed(answers.next, asked)

    @app.post("/analyse")
    async def analyse(asked: Annotated[AnalyseRequest, Body()]) -> dict[str, Any]:
        """What the page shows of a line: tree, alternatives, span posteriors and surprisals, drawn."""
        return await computed(partial(page.analysis, answers), asked)

    @app.get("/about")
    async def about() -> dict[str, Any]:
        """What is served, and its limits."""
        return answers.about()

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Answered at once, also while the model computes."""
        return {"status": "ok", "computing": worker.computing, "waiting": worker.waiting}

    @app.get("/", include_in_schema=False)
    async def first_page() -> HTMLResponse:
        return HTMLResponse(page.first_page(answers.about()))

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page.api_page(app.openapi()))

    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Busy, _busy)
    app.add_exception_handler(MemoryError, _too_long)

    @app.exception_handler(UserError)
    async def refused(_: Request, error: Exception) -> JSONResponse:
        return _problem(400, without_paths(model, str(error)))

    return Guard(app, hosts, worker)


def _problem(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"detail": message}, status, headers)


async def _invalid(_: Request, error: Exception) -> JSONResponse:
    """Say what is wrong with a request, without a copy of it."""
    assert isinstance(error, RequestValidationError)
    problems = [f"{'.'.join(map(str, one['loc'][1:])) or 'body'}: {one['msg']}" for one in error.errors()[:5]]
    return _problem(422, "; ".join(problems).encode("utf-8", "replace").decode())


async def _busy(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Busy)
    return _later(error)


def _later(busy: Busy) -> JSONResponse:
    return _problem(429, str(busy), {"Retry-After": str(busy.seconds)})


async def _too_long(_: Request, __: Exception) -> JSONResponse:
    return _problem(413, "the memory does not suffice for these lines: send fewer or shorter ones")


class Guard:
    """Looks at every request before the service does: its Host header, its size, and how long it takes to arrive.

    What could not be queued is refused here, before it is read, and so many bodies are read at once: a crowd of
    requests costs little time and bounded memory.
    """

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...], worker: Worker):
        self.app, self.hosts, self.worker = app, {host.lower() for host in hosts}, worker
        self._reading = 0

    def stop(self) -> None:
        """Answer what waits or is computed, so that the service can end at once."""
        self.worker.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *HEADERS.items()]
            await send(message)

        try:
            body = await self._admitted(scope, receive)
        except Busy as busy:
            await _later(busy)(scope, receive, send_with_headers)
        except HTTPException as refused:
            await _problem(refused.status_code, refused.detail)(scope, receive, send_with_headers)
        else:
            await self.app(scope, _replayed(body, receive), send_with_headers)

    async def _admitted(self, scope: Scope, receive: Receive) -> bytes:
        """Return the body of a request that may be answered, or refuse it."""
        headers = dict(scope["headers"])
        if "*" not in self.hosts and host_name(headers.get(b"host", b"").decode("latin-1")) not in self.hosts:
            raise HTTPException(421, "this service does not answer to that name: see `lm_pcfg serve --allow-host`")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > MOST_BYTES:
            raise HTTPException(413, TOO_LARGE)
        if scope["method"] != "POST":  # its body, if there is one, is not looked at
            return b""
        self.worker.check_room()
        is_large = b"content-length" not in headers or int(length) > SMALL
        if is_large and self._reading >= MOST_READ:
            raise Busy(f"{self._reading} large requests are being read already", SECONDS_TO_TRY_AGAIN)
        self._reading += is_large
        try:
            async with asyncio.timeout(SECONDS_FOR_A_BODY):
                return await _body(receive)
        except TimeoutError:
            raise HTTPException(408, "the request did not arrive in time") from None
        finally:
            self._reading -= is_large


async def _body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if sum(map(len, parts)) > MOST_BYTES:
            raise HTTPException(413, TOO_LARGE)
        if not message.get("more_body", False):
            return b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body that was read already, and then what comes after it."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def host_name(host: str) -> str:
    """Return a Host header without its port: "[::1]:8000" is "::1"."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
