"""Training on shards: resume, ranks, mixtures, losses, subword vocabularies, and what the commands say."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import command_line
from lm_pcfg.corpus.opening import load_corpora
from lm_pcfg.corpus.preparation.prepare import PrepareOptions, prepare
from lm_pcfg.corpus.unknown import Unknown
from lm_pcfg.corpus.vocabulary import VocabularyOptions
from lm_pcfg.distributed.engine import Engine
from lm_pcfg.errors import SettingsError, UserError
from lm_pcfg.settings_file import load_settings
from lm_pcfg.storage import checkpoint
from lm_pcfg.storage.metrics_file import read_metrics
from lm_pcfg.training import loop
from lm_pcfg.training.steps import Steps
from shards import write_shard
from texts import merged, write_config, write_text
from training_runs import metrics_without_times, stop_after

REPOSITORY = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'kernels'}", "COLUMNS": "100"}


def lm_pcfg(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    result = command_line.lm_pcfg(*arguments, cwd=cwd)
    return subprocess.CompletedProcess(arguments, result.returncode, result.stdout.decode(), result.stderr.decode())


def error_line(result: subprocess.CompletedProcess) -> str:
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    (line,) = [line for line in result.stderr.splitlines() if "error" in line]
    return line


@pytest.fixture
def shards(tmp_path) -> Path:
    """60 lines in three shards of different kinds, and the same lines prepared."""
    write_config(tmp_path)
    lines = (tmp_path / "train.txt").read_text().splitlines()
    (tmp_path / "shards").mkdir()
    write_shard(tmp_path / "shards/a.txt", lines[:25])
    write_shard(tmp_path / "shards/b.txt.gz", lines[25:40])
    write_shard(tmp_path / "shards/c.parquet", lines[40:])
    prepare([str(tmp_path / "train.txt")], tmp_path / "prepared", PrepareOptions(shard_lines=17), processes=1)
    valid = PrepareOptions(existing=str(tmp_path / "prepared"))
    prepare([str(tmp_path / "valid.txt")], tmp_path / "prepared-valid", valid, processes=1)
    return tmp_path


def settings_for(folder: Path, *overrides: str, name: str = "small", **changes):
    changes = merged({"data": {"index_folder": str(folder / "index"), "block_lines": 10}}, changes)
    return load_settings(write_config(folder, name, **changes), list(overrides))


SOURCES = {
    "raw": lambda folder: {"train": str(folder / "shards")},
    "prepared": lambda folder: {"train": str(folder / "prepared"), "valid": str(folder / "prepared-valid")},
    "mixture": lambda folder: {
        "train": [{"path": str(folder / "prepared"), "weight": 1}, {"path": str(folder / "shards"), "weight": 0.5}]
    },
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("steps", [1, 6, 12])
def test_a_resumed_run_continues_bit_for_bit(shards, monkeypatch, source, steps):
    changes = {
        "data": {**SOURCES[source](shards), "curriculum": {"start": 7}},
        "batch": {"sentences": 4, "accumulate": 2}, "evaluation": {"every_epochs": 0.5},
    }  # fmt: skip
    whole = loop.train(settings_for(shards, name="whole", **changes))
    with monkeypatch.context() as patch:
        stop_after(patch, steps)
        stopped = loop.train(settings_for(shards, name="stopped", **changes))
    assert checkpoint.verify(checkpoint.latest(stopped))["step"] == steps
    again = loop.train(settings_for(shards, "resume=auto", name="stopped", **changes))
    one, other = (load_file(checkpoint.latest(folder) / "model.safetensors") for folder in (whole, again))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert metrics_without_times(whole) == metrics_without_times(again)


def test_shards_give_the_vocabulary_and_the_counts_of_the_text(shards):
    in_memory, raw, prepared = (
        load_corpora(settings_for(shards, data=change), None, min_length=1)
        for change in ({}, SOURCES["raw"](shards), SOURCES["prepared"](shards))
    )
    assert in_memory.vocabulary == raw.vocabulary
    assert set(prepared.vocabulary.words) == set(in_memory.vocabulary.words)
    counts = {(part.train.lines, part.train.words) for part in (in_memory, raw, prepared)}
    assert len(counts) == 1
    assert in_memory.valid.fingerprint == raw.valid.fingerprint
    assert prepared.valid.word_lengths.tolist() == in_memory.valid.word_lengths.tolist()
    for eos in ("explicit", "implicit"):
        settings = settings_for(shards, f"model.eos={eos}", data=SOURCES["prepared"](shards))
        corpora = load_corpora(settings, None, min_length=1)
        again = load_corpora(settings, corpora.vocabulary, min_length=1)  # as a resumed run does
        assert again.vocabulary.hash == corpora.vocabulary.hash
        assert corpora.valid.end_of_sentence == (eos == "explicit")


def test_unknown_words_of_a_validation_text_in_any_form(shards):
    """A `<unk>` of the text itself is none; a prepared text does not tell, and is not said to have many."""
    lines = ["the <unk> cat", "<unk> <unk>", "", "the strange cat"]
    for name in ("valid.jsonl", "new.txt"):
        write_shard(shards / name, lines)
    existing = PrepareOptions(existing=str(shards / "prepared"))
    prepare([str(shards / "new.txt")], shards / "new", existing, processes=1)
    data = SOURCES["prepared"](shards)
    found = [
        load_corpora(settings_for(shards, data=data | {"valid": str(shards / name)}), None, 1).valid.unknown_words
        for name in ("new.txt", "valid.jsonl", "new")
    ]
    assert found == [Unknown(1, 3, 8), Unknown(1, 3, 8), Unknown(4, None, 8)]
    assert (found[2].share, found[2].warning("valid")) == (None, None)
    assert str(found[2]) == "4 <unk>, for unknown words or in the text itself"
    assert found[2].brief == "share of unknown words not known"
    assert Unknown(0, None, 8).share == 0.0


def test_lines_left_out_are_in_the_metrics(shards):
    write_shard(shards / "shards/d.txt", ["", "cat", "dog", "the cat", "the " * 30])
    changes = {"data": {**SOURCES["raw"](shards), "max_length": 20}, "model": {"root": "nonterminals"}}
    run = loop.train(settings_for(shards, "training.max_steps=3", **changes))
    line = next(line for line in read_metrics(run / "metrics.jsonl") if "train/loss" in line)
    one_word = sum(len(line.split()) == 1 for line in (shards / "train.txt").read_text().splitlines())
    assert (line["data/blank"], line["data/too_long"], line["data/one_word"]) == (1, 1, one_word + 2)
    assert line["data/bad_shards"] == line["data/unreadable_lines"] == line["data/lost_lines"] == 0


def test_bad_shards_are_in_the_metrics_and_lost_ones_do_not_stop_a_run(shards, monkeypatch, capsys):
    (shards / "shards/d.txt").write_bytes(b"the cat\nthe caf\xe9\n")
    (shards / "shards/e.txt").write_bytes(b"")
    with pytest.raises(UserError, match=r"d\.txt: line 2 is not valid UTF-8"):
        loop.train(settings_for(shards, data=SOURCES["raw"](shards)))
    original = loop.Steps.step

    def step(self, batches):
        (shards / "shards/c.parquet").unlink(missing_ok=True)
        (shards / "shards/a.txt").unlink(missing_ok=True)
        return original(self, batches)

    monkeypatch.setattr(loop.Steps, "step", step)
    changes = {"data": {**SOURCES["raw"](shards), "on_error": "skip"}, "batch": {"sentences": 3}}
    run = loop.train(settings_for(shards, "training.epochs=2", "training.log_every=1", **changes))
    assert (run / "FINISHED").exists()
    last = [line for line in read_metrics(run / "metrics.jsonl") if "epoch" in line][-1]
    assert (last["data/unreadable_lines"], last["data/bad_shards"]) == (1, 1)
    assert 45 <= last["data/lost_lines"] <= 90
    told = capsys.readouterr().err
    assert "e.txt: is empty" in told
    assert told.count("c.parquet: no such file") == 1


@pytest.mark.long
def test_two_ranks_share_the_shards_and_one_goes_on_alone(shards):
    changes = {
        "data": {**SOURCES["raw"](shards), "workers": 1},
        "batch": {"sentences": 3},
        "training": {"epochs": 2},
    }
    settings_for(shards, name="ranks", **changes)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
              "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0",
              str(REPOSITORY / "lm_pcfg/train.py"), "--config", "ranks.yaml"]  # fmt: skip
    environment = {**ENVIRONMENT, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command = [*launch, "training.max_steps=7"]
    result = subprocess.run(command, cwd=shards, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    state = checkpoint.verify(checkpoint.latest(shards / "runs/ranks"))
    batches = state["data"]["batches"]
    assert state["world_size"] == 2
    assert state["data"]["dealings"] == [[2, 7]]
    assert state["data"]["batch"] == 14
    alone = loop.train(load_settings(shards / "ranks.yaml", ["resume=auto"]))
    after = checkpoint.verify(checkpoint.latest(alone))
    assert after["world_size"] == 1
    # To the end of the data, not to the number of steps that two ranks, or one, would have made of it.
    assert (after["data"]["epoch"], after["data"]["batch"]) == (2, 0)
    assert after["step"] == 7 + (batches - 14) + batches


# ---- subwords -------------------------------------------------------------------------------------------------------


def test_score_reports_per_piece_per_word_and_per_byte(tmp_path):
    write_text(tmp_path / "train.txt", 300, seed=1)
    write_text(tmp_path / "valid.txt", 12, seed=2)
    options = PrepareOptions(kind="unigram", pieces=40)
    prepare([str(tmp_path / "train.txt")], tmp_path / "pieces", options, processes=1)
    run = loop.train(
        settings_for(tmp_path, "training.max_steps=5", data={"train": str(tmp_path / "pieces"), "block_lines": 999})
    )
    assert sorted(path.name for path in (run / "vocab").iterdir()) == ["pieces.model", "vocabulary.json"]
    text = tmp_path / "valid.txt"
    text.write_text(text.read_text() + "\n  naïve   cat \n", encoding="utf-8")
    result = lm_pcfg("score", "valid.txt", "--json", "--device", "cpu", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    lines = [line.split() for line in text.read_text(encoding="utf-8").splitlines() if line.split()]
    assert (report["lines"], report["words"]) == (len(lines), sum(map(len, lines)))
    assert report["bytes"] == sum(len(" ".join(line).encode()) for line in lines)
    assert report["pieces"] > report["words"]
    assert report["tokens"] == report["pieces"] + report["lines"]
    for name, count in (("ppl", "pieces"), ("ppl_per_word", "words"), ("ppl_per_byte", "bytes")):
        assert report[name] == pytest.approx(math.exp(report["nll"] / (report[count] + report["lines"])))
    assert report["characters"] == sum(len(" ".join(line)) for line in lines) == report["bytes"] - 1  # the ï has two
    bits = report["nll"] / math.log(2) / (report["characters"] + report["lines"])
    assert report["bits_per_character"] == pytest.approx(bits)
    assert report["unknown_words"] >= 1  # the ï
    # the model itself, on raw text that is tokenised as it is read
    model = str(run / "vocab/pieces.model")
    changes = {"data": {"train": str(tmp_path / "*rain.txt"), "sentencepiece": model, "block_lines": 999}}
    raw = loop.train(settings_for(tmp_path, "training.max_steps=5", name="raw", **changes))
    one, other = (load_file(checkpoint.latest(folder) / "model.safetensors") for folder in (run, raw))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert one.keys() == other.keys()


# ---- what the commands say ------------------------------------------------------------------------------------------


def test_missing_ptb_says_where_and_how(tmp_path):
    result = lm_pcfg("train", "--config", str(REPOSITORY / "configs/ptb_lm_8192.yaml"), cwd=tmp_path)
    line = error_line(result)
    assert str(tmp_path / "data/ptb/ptb.train.txt") in line
    assert "lm_pcfg prepare ptb --source DIR" in line
    assert result.stdout == ""


def test_the_ptb_recipe_is_as_the_files_are(tmp_path):
    from lm_pcfg.corpus.preparation import ptb

    settings = load_settings(REPOSITORY / "configs/ptb_lm_8192.yaml")
    assert [settings.data.train, settings.data.valid] == [str(ptb.FOLDER / part.file) for part in ptb.PARTS[:2]]


def test_info_and_dry_run(shards):
    result = lm_pcfg("info", "prepared", "--json", cwd=shards)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["lines"], report["shards"]) == (60, 4)
    shard = min((shards / "prepared/shards").glob("*.parquet"))
    settings_for(shards, name="dry", data=SOURCES["prepared"](shards))
    dry = lm_pcfg("train", "--config", "dry.yaml", "--dry-run", cwd=shards)
    assert dry.returncode == 0, dry.stderr
    assert "steps_per_epoch" in dry.stdout
    shard.write_bytes(b"x" * shard.stat().st_size)
    assert str(shard.relative_to(shards)) in error_line(lm_pcfg("info", "prepared", cwd=shards))
    assert "neither a run, a checkpoint nor a prepared corpus" in error_line(lm_pcfg("info", "shards", cwd=shards))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": "gone/*.txt"}, "no file matches"),
        ({"train": "gone"}, "gone: no such file"),
        ({"train": ["shards/a.txt", "gone.txt"]}, "gone.txt: no such file"),
        ({"train": "shards", "field": "body"}, "has no column 'body'; its columns: id, text"),
        ({"train": "shards", "streaming": False}, "reads one plain text file"),
        ({"train": "half"}, "was not prepared to its end"),
        ({"train": "prepared", "valid": "other"}, "another vocabulary"),
        ({"train": ["prepared", "other"]}, "is a prepared corpus; several of them are a mixture"),
        ({"train": "shards", "sentencepiece": "train.txt"}, "not a SentencePiece model"),
        ({"train": "prepared", "sentencepiece": "any.model"}, "brings its vocabulary"),
        ({"train": "shards", "max_length": 0}, "max_length"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)  # fmt: skip
def test_mistakes_about_data_get_one_line(shards, monkeypatch, change, message):
    monkeypatch.chdir(shards)
    (shards / "half/shards").mkdir(parents=True)
    prepare(["valid.txt"], shards / "other", PrepareOptions(words=VocabularyOptions(size=5)), processes=1)
    with pytest.raises(UserError) as caught:
        load_corpora(settings_for(shards, data=change), None, min_length=1)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ([], "should be a path, a list of paths, or a list of {path"),
        (3, "should be a path"),
        ("", "should be a path"),
        ([{"path": "a"}, "b"], "should be a path"),
        ([{"path": "a", "weight": 0}], "a number above 0"),
        ([{"path": "a", "wait": 1}], "a number above 0"),
        ([{"path": "-"}], "cannot be standard input"),
    ],
)
def test_data_train_is_checked(tmp_path, train, message):
    config = write_config(tmp_path)
    values = yaml.safe_load(config.read_text())
    values["data"]["train"] = train
    config.write_text(yaml.safe_dump(values))
    with pytest.raises(SettingsError) as caught:
        load_settings(config)
    assert message in str(caught.value)
    assert "data" in str(caught.value)


def test_a_mixture_survives_the_config_of_its_run(shards):
    settings = settings_for(shards, "training.max_steps=1", data=SOURCES["mixture"](shards))
    run = loop.train(settings)
    assert load_settings(run / "config.yaml").data.train == settings.data.train


@pytest.mark.parametrize("source", ["raw", "prepared"])
def test_words_begin_as_they_do_with_the_text_in_memory(shards, source, capsys):
    overrides = "model.init=contexts(0.1, 0.3)", "data.max_length=8"
    words = []
    for changes in ({}, {"data": SOURCES[source](shards)}):
        settings = settings_for(shards, *overrides, **changes)
        words.append(Steps(settings, Engine(settings)).learner.plain_model.words.detach())
    torch.testing.assert_close(*words)
    assert capsys.readouterr().err.count("the neighbours of") == 2


def test_a_resumed_run_does_not_count_neighbours_again(shards, capsys):
    overrides, changes = ("model.init=contexts(0.1, 0.3)", "data.max_length=8"), {"data": SOURCES["prepared"](shards)}
    loop.train(settings_for(shards, *overrides, "training.max_steps=1", **changes))
    assert "the neighbours of" in capsys.readouterr().err
    run = loop.train(settings_for(shards, *overrides, "training.max_steps=2", "resume=auto", **changes))
    assert "the neighbours of" not in capsys.readouterr().err
    assert checkpoint.verify(checkpoint.latest(run))["step"] == 2
