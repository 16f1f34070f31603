"""Ranks share the batches of a text: values in order and totals to the last digit, and one line when one of them fails.

The ranks of the short tests are threads of this process; those of the long ones are processes that talk through gloo.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import forks
from command_line import lm_pcfg
from flash_inside import Statistics
from lm_pcfg import cli, console
from lm_pcfg.corpus.treebank import Tree
from lm_pcfg.distributed import sharing
from lm_pcfg.distributed.collectives import Collectives
from lm_pcfg.distributed.sharing import ALONE, Ranks, shared_work
from lm_pcfg.errors import FailedElsewhere, UserError
from lm_pcfg.inference import lines as lines_room
from lm_pcfg.inference.evaluate import evaluate_model, load_gold
from lm_pcfg.inference.lines import Warnings, map_lines
from lm_pcfg.inference.model import Model, load_model
from lm_pcfg.inference.next_word import Mix
from lm_pcfg.inference.score import TextScore, score_lines, score_report
from processes import ROOT, environment, free_port, run_ranks
from small_runs import write_untrained_run
from texts import write_text

GOLD = """(S (NP (DT the) (NN cat)) (VP (VBZ sees) (NP (DT a) (NN dog))))
(S (NP (DT the) (JJ old) (NN cat)) (VP (VBZ runs) (RB near)))
(S (NP (NN house)) (VP (VBZ sleeps)))
(INTJ (UH zebra))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two runs, a text with blank, long and unknown lines, and gold trees."""
    folder = tmp_path_factory.mktemp("sharing")
    for name, nonterminals in (("one", 6), ("two", 5)):
        write_untrained_run(folder, name, {"nonterminals": nonterminals, "preterminals": 7, "dimension": 8})
    write_untrained_run(folder, "compound", {"family": "sc_pcfg", "nonterminals": 4, "preterminals": 6, "dimension": 8})
    text = write_text(folder / "text", 30, seed=3, longest=14).read_text().splitlines()
    text[7], text[11], text[12] = "", "zebra runs", " ".join(["cat"] * 40)
    (folder / "text").write_text("\n".join(text) + "\n")
    (folder / "short").write_text("\n".join(text[:14]) + "\n")
    (folder / "gold").write_text(GOLD)
    return folder


# ---- threads in the place of processes ------------------------------------------------------------------------------


@pytest.fixture
def together(monkeypatch):
    """A function that runs another one on so many ranks, and returns what each returned or raised."""
    ours = threading.local()

    def exchanged(value: Any) -> list[Any]:
        if getattr(ours, "slots", None) is None:
            return [value]
        ours.slots[ours.rank] = value
        ours.barrier.wait(30)
        values = list(ours.slots)
        ours.barrier.wait(30)
        return values

    monkeypatch.setattr(Collectives, "all_gather", lambda _, value: exchanged(value))
    monkeypatch.setattr(Collectives, "broadcast", lambda _, value: exchanged(value)[0])
    monkeypatch.setattr(Collectives, "all_reduce", lambda _, tensor: torch.stack(exchanged(tensor)).sum(0))

    def run(size: int, work: Callable[[Ranks], Any]) -> list[Any]:
        slots, barrier, results = [None] * size, threading.Barrier(size), [None] * size

        def on_rank(rank: int) -> None:
            ours.slots, ours.barrier, ours.rank = slots, barrier, rank
            try:
                results[rank] = work(Ranks(rank, size))
            except BaseException as error:
                results[rank] = error

        threads = [threading.Thread(target=on_rank, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    return run


def scored(
    folder: Path, ranks: Ranks, *names: str, mix: Mix = "sentences"
) -> tuple[list[float | None], dict[str, Any], int]:
    from lm_pcfg.inference.bounds import bounds_wanted

    done: list[int] = []
    mixture = load_model([folder / "runs" / name for name in names], device="cpu", ranks=ranks).grammars
    result = TextScore(bounds=bounds_wanted(mixture, 2 if names == ("compound",) else None, 0))
    text = str(folder / ("short" if names == ("compound",) else "text"))
    values = score_lines(
        mixture, text, result, max_length=20, batch_cost=200, mix=mix, warn=lambda _: None,
        on_lines=lambda lines, *_: done.append(lines), ranks=ranks,
    )  # fmt: skip
    listed = list(values)
    return listed, score_report(mixture, text, result, mix=mix), sum(done) if ranks.is_main else len(listed)


@pytest.mark.parametrize("names", [["one"], ["one", "two"], ["compound"]], ids="+".join)
def test_scores_are_equal_to_the_last_digit(folder, together, monkeypatch, names):
    monkeypatch.setattr(lines_room, "LINES_AT_A_TIME", 13)
    values, report, done = scored(folder, ALONE, *names)
    assert (values[7], values[12], done) == (None, -math.inf, len(values))
    for size in (2, 4) if names == ["one"] else (2,):
        assert together(size, lambda ranks: scored(folder, ranks, *names)) == [(values, report, done)] * size


def test_mixtures_word_by_word_are_equal_to_the_last_digit(folder, together):
    alone = scored(folder, ALONE, "one", "two", mix="words")
    assert alone[1]["nll"] != scored(folder, ALONE, "one", "two")[1]["nll"]
    assert together(2, lambda ranks: scored(folder, ranks, "one", "two", mix="words")) == [alone] * 2

    def of_lines(ranks: Ranks) -> list[float]:
        model = load_model([folder / "runs" / "one", folder / "runs" / "two"], device="cpu", ranks=ranks)
        model.batch_cost = 200
        return model.score((folder / "short").read_text().split("\n")[:7], mix="words").tolist()

    assert together(2, of_lines) == [of_lines(ALONE)] * 2


def test_a_model_that_cannot_be_mixed_word_by_word_is_told_by_one_rank(folder, together):
    ends = together(2, lambda ranks: scored(folder, ranks, "compound", mix="words"))
    assert sorted(type(end).__name__ for end in ends) == ["FailedElsewhere", "UserError"]


def test_sentences_computed_again_are_counted_on_all_ranks(together):
    def count(ranks: Ranks) -> Statistics:
        statistics = Statistics(sentences=10, recomputed=ranks.rank + 1)
        ranks.add_up(statistics)
        return statistics

    assert together(3, count) == [Statistics(sentences=30, recomputed=6)] * 3


@pytest.mark.parametrize("method", ["mbr", "viterbi"])
def test_trees_are_equal_and_in_order(folder, together, method):
    def parsed(ranks: Ranks) -> tuple[list[Tree], int]:
        done: list[int] = []
        model = load_model([folder / "runs" / "one"], device="cpu", ranks=ranks)
        model.batch_cost = 200
        text = (folder / "text").read_text().splitlines()
        return model.parse(text, method, on_lines=lambda lines, *_: done.append(lines)), sum(
            done
        ) if ranks.is_main else 29

    alone = parsed(ALONE)
    assert alone[1] == 29
    assert together(4, parsed) == [alone] * 4


def test_evaluations_are_equal(folder, together):
    def evaluated(ranks: Ranks) -> dict[str, Any]:
        model = load_model([folder / "runs" / "one"], device="cpu", ranks=ranks)
        model.batch_cost = 10
        return evaluate_model(model, load_gold(str(folder / "gold")), warn=lambda _: None)

    alone = evaluated(ALONE)
    assert alone["sentences"] == 3
    assert together(2, evaluated) == [alone] * 2


def test_each_rank_computes_its_share_alone(together):
    def shared(ranks: Ranks) -> tuple[list[int], list[int]]:
        own: list[int] = []
        values = ranks.share(range(7), lambda item: own.append(item) or item * item)  # type: ignore[func-returns-value]
        return values, own

    squares = [item * item for item in range(7)]
    assert together(3, shared) == [(squares, [0, 3, 6]), (squares, [1, 4]), (squares, [2, 5])]


def test_only_the_main_rank_reads_and_the_least_memory_decides(tmp_path, together):
    """Other hosts need not have the text; a line too long for one of them is too long for all."""
    (tmp_path / "text").write_text("a b c\na\n")
    vocabulary = load_vocabulary_of("a b c")

    def lengths(some, on_lines):
        return [len(line.split()) for line in some]

    def mapped(ranks: Ranks) -> list[tuple[Any, str]]:
        source = str(tmp_path / "text") if ranks.is_main else "/nowhere/text"
        fitting = 2.0 if ranks.rank else math.inf
        how: dict[str, Any] = {"command": "count", "max_length": 9, "fitting": fitting, "ranks": ranks}
        found = map_lines(source, vocabulary, lengths, **how, warnings=Warnings(lambda _: None))
        return [(line.value, line.skipped) for line in found]

    assert together(2, mapped) == [[(None, "long"), (1, "")]] * 2


def load_vocabulary_of(words: str):
    from lm_pcfg.corpus.vocabulary import Vocabulary, VocabularyOptions

    return Vocabulary.build([words.split()], VocabularyOptions())


# ---- failures -------------------------------------------------------------------------------------------------------


def test_a_failure_on_one_rank_stops_all_and_only_that_one_speaks(together):
    def failing(ranks: Ranks) -> None:
        def compute(item: int) -> int:
            if item == 1:
                raise UserError("this one is too large")
            return item

        ranks.share(range(6), compute)

    ends = together(3, failing)
    assert [type(end) for end in ends] == [FailedElsewhere, UserError, FailedElsewhere]
    assert str(ends[1]) == "this one is too large"


def test_an_error_of_all_ranks_is_told_by_one(monkeypatch, together):
    monkeypatch.setenv("WORLD_SIZE", "3")
    ends = together(3, lambda ranks: ended(monkeypatch, ranks, UserError("nonsense was asked for")))
    assert [type(end) for end in ends] == [UserError, FailedElsewhere, FailedElsewhere]


@pytest.mark.parametrize(("error", "others"), [(BrokenPipeError(), 0), (UserError("the disk is full"), None)])
def test_others_hear_of_the_end_of_the_main_rank_at_their_next_step(monkeypatch, together, error, others):
    """`... score text --per-sentence | head` ends all ranks without an error."""
    monkeypatch.setenv("WORLD_SIZE", "2")

    def work(ranks: Ranks) -> None:
        with joined(monkeypatch, ranks):
            if ranks.is_main:
                raise error
            ranks.on_main(list)

    main, other = together(2, work)
    assert main is error
    if others is None:
        assert isinstance(other, FailedElsewhere)
    else:
        assert isinstance(other, SystemExit)
        assert other.code == others


def test_another_model_on_another_rank_is_refused(folder, together):
    def load(ranks: Ranks) -> Model:
        return load_model([folder / "runs" / ("two" if ranks.rank else "one")], device="cpu", ranks=ranks)

    ends = together(2, load)
    assert sorted(type(end).__name__ for end in ends) == ["FailedElsewhere", "UserError"]
    assert "rank 1 has loaded another model" in str(ends[0])


def test_a_world_without_a_launcher_is_refused(folder, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    result = lm_pcfg("score", "text", "--checkpoint", "runs/one", cwd=folder)
    assert result.returncode == 1
    assert b"LOCAL_RANK does not say which" in result.stderr


def test_wrong_usage_is_told_by_the_first_rank_of_a_host(folder, monkeypatch):
    """The launcher ends the others while they wait."""
    slept: list[float] = []
    monkeypatch.setattr(cli.time, "sleep", slept.append)
    for rank in ("0", "1"):
        for name in ("RANK", "LOCAL_RANK"):
            monkeypatch.setenv(name, rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert lm_pcfg("score", "text", "--per-sentence", "--json", cwd=folder).returncode == 2
        assert len(slept) == int(rank)


def test_commands_that_ranks_cannot_share_are_refused(folder, monkeypatch):
    """Each rank would print all of it."""
    monkeypatch.setattr(cli.time, "sleep", lambda seconds: None)
    said = []
    for rank in ("0", "1"):
        for name in ("RANK", "LOCAL_RANK"):
            monkeypatch.setenv(name, rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        result = lm_pcfg("surprisal", "text", "--checkpoint", "runs/one", cwd=folder)
        assert (result.returncode, result.stdout) == (1, b"")
        said.append(result.stderr)
    assert b"surprisal runs in one process: start it without a launcher" in said[0]
    assert said[1] == b""
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert lm_pcfg("surprisal", "text", "--checkpoint", "runs/one", cwd=folder).returncode == 0


def test_other_ranks_leave_warnings_and_progress_to_the_main_one(monkeypatch, capsys):
    monkeypatch.setattr(console, "_left_to_main", True)
    console.warn("once is enough")
    with console.progress("lines", 10, seconds_between_lines=0.0) as bar:
        bar.advance(1)
        bar.message("warning: once is enough")
    assert capsys.readouterr().err == ""
    console.say("lm_pcfg: error: of its own")
    assert capsys.readouterr().err


def joined(monkeypatch, ranks: Ranks):
    """`shared_work` of ranks that have met."""
    monkeypatch.setattr(sharing, "_join", lambda: OWN.ranks)
    OWN.ranks = ranks
    return shared_work()


OWN = threading.local()


def ended(monkeypatch, ranks: Ranks, error: Exception) -> None:
    with joined(monkeypatch, ranks):
        raise error


# ---- processes ------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    [
        ["score", "text", "--json", "--batch-cost", "300"],
        ["score", "text", "--per-sentence", "--batch-cost", "300"],
        ["score", "text", "--mix", "words", "--checkpoint", "runs/two", "--batch-cost", "300"],
        ["parse", "text"],
        ["evaluate", "gold", "--json"],
    ],
    ids=lambda command: command[0] + command[2][1:] if len(command) > 2 else command[0],
)
def test_commands_print_the_same_on_1_2_and_4_ranks(folder, monkeypatch, command):
    monkeypatch.chdir(folder)
    arguments = [*command, "--checkpoint", "runs/one", "--threads", "1", "--device", "cpu"]
    alone = lm_pcfg(*arguments, cwd=folder)
    assert alone.returncode == 0, alone.stderr
    expected = (alone.stderr + alone.stdout).decode().splitlines()
    assert expected
    for size in (2, 4):
        main, *others = run_ranks(size, ["-m", "lm_pcfg", *arguments])
        said = [line for line in main.splitlines() if "the launcher's store listens" not in line]
        assert sorted(said) == sorted(expected)
        assert len(main.splitlines()) == len(said) + 1  # told once
        assert others == [""] * (size - 1)


@pytest.mark.long
def test_the_command_of_the_manual_reads_standard_input(folder):
    manual = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    (line,) = [line for line in manual.splitlines() if line.startswith("accelerate launch") and " -m lm_pcfg" in line]
    command = line.replace("launch/accelerate/", f"{ROOT}/launch/accelerate/").replace("embedded:test", "-").split()
    text, options = (folder / "text").read_bytes(), ["--json", "--checkpoint", "runs/one"]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    whole = [*launcher, *command[2:], *options]
    result = subprocess.run(whole, input=text, env=environment(), cwd=folder, capture_output=True, timeout=120)
    assert result.returncode == 0, result.stderr.decode()
    assert result.stdout == lm_pcfg("score", "-", "--threads", "1", *options, cwd=folder, text=text).stdout


@pytest.mark.long
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_ends_the_others_with_one_line(folder, monkeypatch, killed):
    """The text is a pipe that nobody writes to: the main rank waits for it, and the other for the main one."""
    monkeypatch.chdir(folder)
    pipe = folder / f"pipe{killed}"
    os.mkfifo(pipe)
    ranks = []
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    try:
        for rank in range(2):
            own = environment(RANK=str(rank), LOCAL_RANK=str(rank), **place)
            ranks.append(forks.start(["-m", "lm_pcfg", "score", pipe.name, "--checkpoint", "runs/one"], own))
        with opened_for_writing(pipe) as text:  # the main rank reads: all have met and loaded the model
            ranks[killed].kill()
            ranks[killed].wait(10)
            if killed:
                text.write(b"the cat runs\n")
        status, said = ranks[1 - killed].wait(30)
    finally:
        for process in ranks:
            process.kill()
    assert status == 1
    (line,) = [line for line in said.splitlines() if "the launcher's store listens" not in line]
    assert line.startswith(f"lm_pcfg: error: rank {1 - killed}: another process is gone or does not answer")


def opened_for_writing(pipe: Path):
    """Open a pipe as soon as somebody reads it."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return os.fdopen(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "wb")
        except OSError:
            assert time.monotonic() < deadline, "nobody reads"
            time.sleep(0.05)
