"""The command line, `lm_pcfg COMMAND`: lists the commands, and turns errors into one line and an exit status.

To add a command, write a file in `lm_pcfg/commands/` with one function, and add one line to COMMANDS. The function's
arguments are the command's (`Annotated` with a Typer option, and a plain default), so it can be called from Python too.
Torch and other heavy packages are imported inside the functions: `--help` has to answer at once.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from lm_pcfg.commands import bench, doctor, export, fit, glossary, info, prepare, report, search, serve, train, verify
from lm_pcfg.commands.output import WholeHelp
from lm_pcfg.commands.text import evaluate, next_word, parse, sample, score, suite, surprisal, tag
from lm_pcfg.console import say
from lm_pcfg.errors import FailedElsewhere, LostContact, UserError, is_out_of_memory

COMMANDS: dict[str, Callable[..., None]] = {
    "prepare": prepare.prepare,
    "train": train.train,
    "score": score.score,
    "parse": parse.parse,
    "evaluate": evaluate.evaluate,
    "tag": tag.tag,
    "sample": sample.sample,
    "surprisal": surprisal.surprisal,
    "next": next_word.next_word,
    "suite": suite.suite,
    "info": info.info,
    "verify": verify.verify,
    "export": export.export,
    "report": report.report,
    "search": search.search,
    "fit": fit.fit,
    "serve": serve.serve,
    "glossary": glossary.glossary,
    "doctor": doctor.doctor,
}

#: Commands that processes of a launcher run together; of another one each would do all the work, and print it.
TOGETHER = ("train", "score", "parse", "evaluate", "bench", "doctor")

app = typer.Typer(
    help="Probabilistic context-free grammars as language models.",
    cls=WholeHelp,
    add_completion=True,  # `lm_pcfg --install-completion`: bash, zsh, fish
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: it answers in a fraction of the time
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _command in COMMANDS.items():
    app.command(_name)(_command)
app.add_typer(bench.bench, name="bench")  # a group: each benchmark is a command of its own


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed_version

        print(f"lm_pcfg {installed_version('lm_pcfg')}")
        raise typer.Exit
    command = context.invoked_subcommand
    if command is None:
        print(context.get_help())
    elif command not in TOGETHER and "LOCAL_RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        if os.environ.get("RANK", "0") != "0":
            raise FailedElsewhere("rank 0 says why")
        raise UserError(f"{command} runs in one process: start it without a launcher")


# When a process exits, the launcher ends all others: a process without an error of its own waits this many seconds, so
# that the one with the error can print it.
_TIME_TO_SPEAK = 5.0
# A process that lost contact to another waits until the launcher has seen the other's end: the launcher's summary names
# the first that ended.
_TIME_TO_BE_SEEN = 2.0

# Where nothing more precise is known.
_LESS_MEMORY = (
    "try fewer symbols (model.nonterminals, model.rank, model.states), smaller batches (batch.sentences, batch.cost, "
    "--batch-cost) or shorter sentences (data.max_length, --max-length)"
)

# What Typer raises for wrong usage: a class of click, or of the copy of it that newer Typers carry.
_WrongUsage: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def main() -> None:
    # PyTorch's allocator on ARM CPUs (mimalloc) reads this when PyTorch is imported. By default it gives memory back to
    # the system 10 ms after a tensor is freed, and the next step asks for it again, page by page.
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "10000")  # milliseconds
    _prepare_streams()
    try:
        status = _run()
    except Exception as error:  # a bug: Python shows where
        _tell_launcher(f"{type(error).__name__}: {' '.join(str(error).split())}")
        raise
    sys.exit(status)


def _prepare_streams() -> None:
    """Have results written in UTF-8 where the locale knows nothing but ASCII, and lost where output was closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for the whole process
        elif isinstance(stream, io.TextIOWrapper):
            encoding = "utf-8" if stream.encoding.lower() in ("ascii", "ansi_x3.4-1968", "us-ascii") else None
            stream.reconfigure(encoding=encoding, errors="backslashreplace")


def _run() -> int:
    """Run a command and return its exit status: 0 success, 1 a failure with one clear line, 2 wrong usage.

    A user's mistake never ends in a traceback.
    """
    try:
        status = app(standalone_mode=False) or 0
        if status == 130:  # newer Typers turn Ctrl-C into this
            raise KeyboardInterrupt
        sys.stdout.flush()
    except _WrongUsage as error:
        _let_first_speak()
        error.show()
        _tell_launcher(error.format_message())
        status = error.exit_code
    except FailedElsewhere as error:
        time.sleep(_TIME_TO_SPEAK)
        _tell_launcher(str(error))
        status = 1
    except LostContact as error:
        status = _fail(str(error), seconds_after=_TIME_TO_BE_SEEN)
    except UserError as error:
        status = _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        say("lm_pcfg: interrupted")
        status = 130
    except (BrokenPipeError, SystemExit) as error:
        # `lm_pcfg score ... | head`: whoever read has had enough. Typer turns that into an exit of its own.
        closed = isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError)
        status = 0 if closed else getattr(error, "code", 1)
        if closed:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = f" ({str(error).splitlines()[0]})" if str(error) else ""
        status = _fail(f"not enough memory; {_LESS_MEMORY}{reason}")
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):  # a name that no file can have, wherever it is looked for
            name = str(error.filename)
            return _fail(f"{name[:60]}{'...' if len(name) > 60 else ''}: {error.strerror}; check the path")
        if isinstance(error, PermissionError) and error.filename is not None:  # wherever it was met, in looking already
            way_out = "ask its owner for access (chmod), or name another path"
            return _fail(f"{error.filename}: {error.strerror}; {way_out}")
        if error.errno != errno.ENOSPC:
            raise
        status = _fail(f"cannot write: {error.strerror}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to write has nowhere to go
    return status


def _fail(message: str, seconds_after: float = 0.0) -> int:
    """Print the error, with the rank where there are several, wait, and return exit status 1."""
    _let_first_speak()
    say(f"lm_pcfg: error: {_rank()}{message}")
    time.sleep(seconds_after)
    _tell_launcher(message)
    return 1


def _let_first_speak() -> None:
    """What is wrong before the rendezvous is wrong with all processes of this host: local rank 0 prints it, and the
    launcher ends the others. If the launcher does not, they print it too.
    """
    torch = sys.modules.get("torch")
    connected = torch is not None and torch.distributed.is_initialized()
    if _rank() and not connected and os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_TIME_TO_SPEAK)


def _rank() -> str:
    """How messages begin: with the rank of this process, if there are several."""
    return f"rank {os.environ.get('RANK', '?')}: " if os.environ.get("WORLD_SIZE", "1") != "1" else ""


def _tell_launcher(message: str) -> None:
    from lm_pcfg.distributed import launcher

    launcher.tell_failure(f"{_rank()}{message}")
