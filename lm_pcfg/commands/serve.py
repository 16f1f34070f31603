"""`lm_pcfg serve` puts a model behind HTTP."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from lm_pcfg.commands.output import Checkpoints, DeviceOption, PrecisionOption, WeightsOption
from lm_pcfg.console import say, warn
from lm_pcfg.errors import UserError


def serve(
    checkpoint: Checkpoints = None,
    host: Annotated[str, typer.Option(help="Address to listen on; others than loopback are reached from outside.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any that is free.")] = 8000,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="Another name of this machine to answer to; * answers to any. May be repeated."),
    ] = None,
    max_length: Annotated[int, typer.Option(min=1, help="Most words of a line.")] = 200,
    queue: Annotated[int, typer.Option(min=0, help="Most requests that wait; others get 429.")] = 16,
    precision: PrecisionOption = "fp32",
    weights: WeightsOption = "auto",
    device: DeviceOption = "auto",
) -> None:
    """Answer /score, /parse, /surprisal, /sample and /next, and show a page to type sentences into."""
    import os
    import signal
    import socket

    import uvicorn

    from lm_pcfg import load
    from lm_pcfg.serving.app import LOOPBACK, make_app
    from lm_pcfg.serving.server import Connection, Server

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise UserError(f"cannot listen on {host}, port {port}: {error.strerror or error}; try --port 0") from None
    with listening:
        model = load(*(checkpoint or ()), weights=weights, device=device, prepare_cpu=True)
        model.precision = precision
        if host not in LOOPBACK:
            warn(f"{host} is reached from other machines: there is no password, so shield it by a firewall or a proxy")
            if not allow_host:
                warn("only this machine's own names are answered: --allow-host NAME adds the one that others use")
        app = make_app(
            model, hosts=(*LOOPBACK, host, *(allow_host or ())), most_words=max_length, most_waiting=queue
        )  # fmt: skip
        shown = f"[{host}]" if ":" in host else host
        say(f"{', '.join(str(one.checkpoint) for one in model.grammars)}: http://{shown}:{listening.getsockname()[1]}")
        say("a page to type into at /, the API at /docs; Ctrl-C ends it")
        config = uvicorn.Config(
            app, http=Connection, ws="none", log_level="warning", access_log=False, timeout_graceful_shutdown=5,
            server_header=False, lifespan="off",
        )  # fmt: skip
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # an orderly end, as by Ctrl-C
        with suppress(KeyboardInterrupt):  # uvicorn raises it again when it has stopped
            Server(config).run(sockets=[listening])
    say("stopped")
    if app.worker.runs:  # Python would end under PyTorch's feet
        os._exit(0)
