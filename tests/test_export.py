"""`lm_pcfg export`: every family comes back with the same scores; damage is told; nothing else is overwritten."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import lm_pcfg
from lm_pcfg.cli import app
from lm_pcfg.corpus.pieces import train_pieces
from lm_pcfg.errors import UserError
from lm_pcfg.export.export import ExportOptions, export
from lm_pcfg.export.pruning import cut_grammar, uses_of
from lm_pcfg.grammar import families
from lm_pcfg.inference.score import TextScore, score_lines
from lm_pcfg.inference.symbols import load_text
from lm_pcfg.inference.trained import read_stored
from lm_pcfg.inference.verification import verify
from lm_pcfg.settings import EmaSection
from lm_pcfg.settings_file import load_settings
from lm_pcfg.storage import durable, exported
from lm_pcfg.storage.run_folder import choose_start
from lm_pcfg.storage.state_file import state_bytes
from small_runs import write_untrained_run
from test_every_family import section_of
from texts import write_text

LINES = ["the cat sees a dog", "", "zebra", "the old cat near the house sleeps and runs", "a zebra runs"]
WITH_SYMBOLS = ("n_pcfg", "rank_pcfg", "sn_pcfg", "tables", "tn_pcfg")
WIDE = {"nonterminals": 6, "preterminals": 8}  # enough symbols that some are hardly used


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Runs of all families, none of them trained; and of a vocabulary of pieces, of explicit ends and of averages."""
    folder = tmp_path_factory.mktemp("export")
    for name in families.names():
        sizes = section_of(name) | (WIDE if name in WITH_SYMBOLS else {})
        write_untrained_run(folder, name, sizes)
    text = write_text(folder / "pieces.txt", 200, seed=5).read_text().splitlines()
    pieces = train_pieces(text, kind="unigram", size=40)
    released = {"parameterization": "released", "children": "rotated", "root": "nonterminals", "eos": "explicit"}
    sn_pcfg = section_of("sn_pcfg") | WIDE
    write_untrained_run(folder, "pieces", sn_pcfg | released, vocabulary=pieces)
    write_untrained_run(folder, "averaged", sn_pcfg, averaged=True)
    return folder / "runs"


@pytest.fixture
def folder(runs, tmp_path) -> Path:
    """An export of a run."""
    export(runs / "sn_pcfg", tmp_path / "model", ExportOptions())
    return tmp_path / "model"


def parsed(model) -> list | None:
    try:
        return model.parse(LINES)
    except UserError:  # a family without trees
        return None


def ran(*arguments) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


# ---- the same model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*families.names(), "pieces", "averaged"])
def test_an_export_has_the_same_scores_to_the_last_digit_and_the_same_trees(runs, tmp_path, name):
    export(runs / name, tmp_path / "model", ExportOptions())
    before, after = lm_pcfg.load(runs / name), lm_pcfg.load(tmp_path / "model")
    np.testing.assert_array_equal(before.score(LINES), after.score(LINES))
    assert parsed(before) == parsed(after)
    assert before.vocabulary == after.vocabulary


def test_an_export_of_an_export_is_the_same(folder, tmp_path):
    export(folder, tmp_path / "again", ExportOptions())
    for file in (*HASHED, "MLmodel"):
        assert (tmp_path / "again" / file).read_bytes() == (folder / file).read_bytes()


def test_every_command_that_takes_a_checkpoint_takes_an_export(folder, tmp_path):
    (tmp_path / "text").write_text("the cat sees a dog\na dog runs\n")
    (tmp_path / "gold").write_text("(S (A the) (B (C cat) (D sees)))\n")
    (tmp_path / "pairs.jsonl").write_text('{"sentence_good": "the cat runs", "sentence_bad": "cat the runs"}\n')
    for command, *arguments in (
        ["score", tmp_path / "text"], ["parse", tmp_path / "text"], ["surprisal", tmp_path / "text"], ["next", "the"],
        ["sample", "-n", "1"], ["info"], ["evaluate", tmp_path / "gold"], ["suite", tmp_path / "pairs.jsonl"],
    ):  # fmt: skip
        assert ran(command, *arguments, "--checkpoint", folder).strip(), command
    assert "nothing damaged" in ran("verify", folder)


def test_an_export_cannot_be_trained_further(folder, tmp_path):
    with pytest.raises(UserError, match=r"exported model: .* not trained further"):
        choose_start(load_settings(folder / "config.yaml", [f"resume={folder}"]), launcher="")


def test_averaged_weights_are_exported_unless_the_others_are_asked_for(runs, tmp_path):
    scores = {}
    for weights in ("auto", "ema", "raw"):
        export(runs / "averaged", tmp_path / weights, ExportOptions(weights=weights))
        scores[weights] = lm_pcfg.load(tmp_path / weights).score(LINES[:1]).tolist()
        assert scores[weights] == lm_pcfg.load(runs / "averaged", weights=weights).score(LINES[:1]).tolist()
    assert scores["auto"] == scores["ema"] != scores["raw"]
    assert lm_pcfg.load(tmp_path / "auto", weights="ema").grammars[0].weights == "ema"
    with pytest.raises(UserError, match="exported with ema weights"):
        lm_pcfg.load(tmp_path / "auto", weights="raw")


# ---- the card -------------------------------------------------------------------------------------------------------


def test_the_card_has_figures_that_its_commands_give(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(runs, "runs", symlinks=True)
    write_text(Path("heldout.txt"), 5, seed=8)
    write_text(Path("other.txt"), 5, seed=9)
    ran("export", "runs/tables", "given", "--score", "heldout.txt", "--license", "apache-2.0", "--max-length", 8,
        "--prune", "other.txt", "--prune-below", 1, "--prune-check", "heldout.txt")  # fmt: skip
    card = Path("given/README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\n")
    commands = re.findall(r"^(lm_pcfg score .*\.txt.*)  # ppl ([0-9.]+)$", card, re.MULTILINE)
    assert len(commands) == 5
    assert len({ppl for _, ppl in commands}) == 4
    for command, ppl in commands:
        assert f"{json.loads(ran(*shlex.split(command)[1:], '--json'))['ppl']:.3f}" == ppl, command


def test_nothing_of_the_machine_is_in_an_export(runs, tmp_path):
    text = write_text(tmp_path / "heldout.txt", 3)
    options = ExportOptions(score=[str(text)], prune=str(text), prune_below=0.01)
    export(runs / "sn_pcfg", tmp_path / "model", options)
    for file in (tmp_path / "model").rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert b"heldout" in content or file.name != "README.md"
            assert str(tmp_path.parent).encode() not in content, file
            assert str(runs.parent).encode() not in content, file


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"licence": "my own\nlicence"}, "identifier"),
        ({"score": ["-"]}, "save standard input"),
        ({"score": ["nowhere.txt"]}, "nowhere.txt"),
        ({"prune": "nowhere.txt"}, "nowhere.txt"),
    ],
)
def test_what_cannot_be_done_is_told_before_anything_is_written(runs, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        export(runs / "sn_pcfg", tmp_path / "model", ExportOptions(**options))
    assert list(tmp_path.iterdir()) == []


EVALUATED = {"best_nll": 2.0, "best_step": 1, "best_impossible": 2, "valid_unknown_share": 0.00512}


@pytest.mark.parametrize(
    ("name", "weights", "changes", "decay", "said"),
    [
        ("sn_pcfg", "auto", {}, None, "Perplexity 7.389 per word, 0.51 % unknown, 2 sentences of probability 0 left"),
        ("sn_pcfg", "auto", {"best_impossible": 0, "valid_unknown_share": None}, None, "Perplexity 7.389 per word, on"),
        ("pieces", "auto", {}, None, "Perplexity 7.389 per piece, 0.51 % unknown"),
        ("sc_pcfg", "auto", {}, None, "Perplexity at most 7.389 per word"),
        ("averaged", "auto", {}, 0.9, "Perplexity 7.389 per word"),
        ("averaged", "raw", {}, 0.9, None),  # the average was evaluated
        ("sn_pcfg", "auto", {"best_step": 0}, None, None),  # another checkpoint of the run was
    ],
)
def test_the_card_has_the_evaluation_of_its_weights_alone(
    runs, tmp_path, monkeypatch, name, weights, changes, decay, said
):
    def evaluated(path, kind):
        stored = read_stored(path, kind)
        settings = stored.settings.model_copy(update={"ema": EmaSection(decay=decay)})
        return replace(stored, settings=settings, state=stored.state | EVALUATED | changes)

    monkeypatch.setattr("lm_pcfg.export.export.read_stored", evaluated)
    export(runs / name, tmp_path / "model", ExportOptions(weights=weights))
    card = (tmp_path / "model/README.md").read_text()
    kept = exported.describe(tmp_path / "model")
    if said is None:
        assert "Perplexity" not in card
        assert "weights of step 1" in card
        assert not set(kept) & set(EVALUATED)
    else:
        assert said in card
        assert kept["best_nll"] == 2.0
        assert kept.get("valid_unknown_share") == (EVALUATED | changes)["valid_unknown_share"]
    if name == "pieces":
        shown = json.loads(ran("info", tmp_path / "model", "--json"))
        assert (shown["valid_unknown_share"], shown["unit"], kept["unit"]) == (0.00512, "pieces", "pieces")


def test_names_that_are_no_utf_8(runs, tmp_path):
    odd = os.fsdecode(b"m\xff")
    with pytest.raises(UserError, match=r"'.*m\\udcff' is no UTF-8.*; name another folder"):
        export(runs / "sn_pcfg", tmp_path / odd, ExportOptions())
    assert list(tmp_path.iterdir()) == []
    text = write_text(tmp_path / odd, 3)
    export(runs / "sn_pcfg", tmp_path / "model", ExportOptions(score=[str(text)]))
    assert "lm_pcfg score 'm?' --checkpoint model" in (tmp_path / "model/README.md").read_text()


# ---- damage, and what is not an export ------------------------------------------------------------------------------

HASHED = ("config.json", "config.yaml", "model.safetensors", "vocab/words.txt", "vocab/vocabulary.json")


@pytest.mark.parametrize("name", HASHED)
def test_damage_is_told(folder, name):
    file = folder / name
    whole = file.read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 3)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(UserError, match=r"model"):
            lm_pcfg.load(folder)
        assert verify(folder).damaged
    file.write_bytes(whole[:-1])
    with pytest.raises(UserError, match=file.name):
        lm_pcfg.load(folder)
    file.unlink()
    with pytest.raises(UserError, match=f"{file.name}.* missing|{file.name}: .*no such file"):
        lm_pcfg.load(folder)


def test_the_card_may_be_edited(folder):
    (folder / "README.md").write_text("# Mine\n")
    (folder / "MLmodel").write_text("anything\n")
    assert lm_pcfg.load(folder).score(LINES[:1]).size
    assert not verify(folder).damaged


def changed(folder: Path, **changes) -> Path:
    """Forge config.json: its checksum is right."""
    description = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_bytes(state_bytes(description | changes))
    return folder


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "vocab/../../secret", "code.py", "vocab/code.py"])
def test_names_cannot_leave_the_folder_and_code_is_refused(folder, name):
    (folder.parent / "secret").write_text("secret")
    files = json.loads((folder / "config.json").read_text())["files"]
    with pytest.raises(UserError, match=r"config\.json"):
        lm_pcfg.load(changed(folder, files=files | {name: files["config.yaml"]}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "type 'gpt2'"),
        ({"form": "pickle"}, "how the model is stored"),
        ({"weights": ["ema"]}, "how the model is stored"),
        ({"form": "grammar"}, "tensors that make no grammar"),
        ({"vocabulary_hash": "0"}, "another vocabulary"),
        ({"format": 2}, "unknown format 2"),
    ],
)
def test_a_forged_description_is_refused(folder, changes, message):
    with pytest.raises(UserError, match=message):
        lm_pcfg.load(changed(folder, **changes))


def test_only_an_export_is_overwritten(runs, folder, tmp_path):
    export(runs / "tables", folder, ExportOptions())  # an earlier export
    assert lm_pcfg.load(folder).grammars[0].settings.model.family == "tables"
    (tmp_path / "empty").mkdir()
    export(runs / "tables", tmp_path / "empty", ExportOptions())
    (tmp_path / "file").write_text("mine")
    (folder / "notes.txt").write_text("mine")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "gpt2"}')
    for place in (tmp_path / "file", folder, other, runs / "tables", tmp_path):
        before = sorted(path for path in place.rglob("*")) if place.is_dir() else place.read_text()
        with pytest.raises(UserError, match="new folder"):
            export(runs / "sn_pcfg", place, ExportOptions())
        assert before == (sorted(path for path in place.rglob("*")) if place.is_dir() else place.read_text())
    with pytest.raises(UserError, match="to itself"):
        export(tmp_path / "empty", tmp_path / "empty", ExportOptions())


def test_a_failure_leaves_the_earlier_export(runs, folder, monkeypatch):
    before = {path: path.read_bytes() for path in folder.parent.rglob("*") if path.is_file()}

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable, "put_in_place", full)
    with pytest.raises(UserError, match=r"cannot write .*model: No space left"):
        export(runs / "tables", folder, ExportOptions())
    assert before == {path: path.read_bytes() for path in folder.parent.rglob("*") if path.is_file()}


def perplexity_of(trained, file: Path) -> float:
    result = TextScore()
    list(score_lines([trained], str(file), result, max_length=250, warn=print))
    return result.total.perplexity


# ---- pruning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*WITH_SYMBOLS, "pieces"])
def test_pruning_keeps_the_loss_that_it_states(runs, tmp_path, name):
    text, second = write_text(tmp_path / "text", 8, seed=3), write_text(tmp_path / "second", 4, seed=4)
    grammar = lm_pcfg.load(runs / name).grammars[0]
    uses = uses_of(grammar.grammar, load_text(grammar, str(text), max_length=250, warn=print))
    below = uses.sort().values[5].item()  # five symbols have fewer uses
    options = ExportOptions(prune=str(text), prune_below=below, prune_check=str(second))
    report = export(runs / name, tmp_path / "model", options)
    n = grammar.grammar.nonterminals
    assert report["nonterminals"] == (uses[:n] >= below).sum()
    assert report["nonterminals"] + report["preterminals"] == len(uses) - 5
    for model, ending in ((grammar, "_before"), (lm_pcfg.load(tmp_path / "model").grammars[0], "")):
        for file, key in ((text, "prune_ppl"), (second, "prune_check_ppl")):
            assert perplexity_of(model, file) == report[key + ending]
    assert report["prune_ppl"] != report["prune_ppl_before"]
    assert "model.preterminals=" in report["trained_with"] or "model.nonterminals=" in report["trained_with"]
    export(tmp_path / "model", tmp_path / "again", ExportOptions())  # it stays known that it was pruned
    assert exported.verify(tmp_path / "again") == exported.verify(tmp_path / "model")
    assert (report["form"] == "networks") == (name in ("sn_pcfg", "tables", "pieces"))
    smaller = lm_pcfg.load(tmp_path / "model").grammars[0].grammar
    for tensor in smaller.rules:  # probabilities again
        rows = tensor.double().flatten(1).sum(1) if tensor.dim() > 1 else tensor.sum()
        torch.testing.assert_close(rows, torch.ones_like(rows), rtol=0, atol=1e-5)
    # The same as dividing the rows by what is left of them.
    cut = cut_grammar(grammar.grammar, uses, below)
    for side in ("left", "right", "pairs"):
        if hasattr(cut, side):
            torch.testing.assert_close(getattr(smaller, side), getattr(cut, side), rtol=1e-5, atol=1e-7)
    columns = [one.emission.log_probabilities(torch.arange(5)) for one in (smaller, cut)]
    torch.testing.assert_close(*columns, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", WITH_SYMBOLS)
def test_uses_are_those_of_trees(runs, tmp_path, name):
    """A sentence of l words has l preterminals and l - 1 nonterminals."""
    trained = lm_pcfg.load(runs / name).grammars[0]
    text = load_text(trained, str(write_text(tmp_path / "text", 8, seed=3)), max_length=250, warn=print)
    uses, n = uses_of(trained.grammar, text), trained.grammar.nonterminals
    assert uses[n:].sum().item() == pytest.approx(text.lengths.sum(), rel=1e-4)
    assert uses[:n].sum().item() == pytest.approx((text.lengths - 1).sum(), rel=1e-4)


def test_nothing_unused_nothing_changed(runs, tmp_path):
    text = write_text(tmp_path / "text", 8, seed=3)
    export(runs / "sn_pcfg", tmp_path / "model", ExportOptions(prune=str(text), prune_below=1e-30))
    before, after = lm_pcfg.load(runs / "sn_pcfg"), lm_pcfg.load(tmp_path / "model")
    np.testing.assert_array_equal(before.score(LINES), after.score(LINES))


def test_a_parent_whose_children_are_gone_goes_too(runs):
    grammar = lm_pcfg.load(runs / "sn_pcfg").grammars[0].grammar
    left = grammar.left.clone()
    left[2] = torch.nn.functional.one_hot(torch.tensor(0), left.shape[1])  # nonterminal 2 has child 0 alone
    uses = torch.ones(left.shape[1], dtype=torch.float64)
    uses[0] = 0.0
    cut = cut_grammar(grammar._replace(left=left), uses, 0.5)
    assert cut.nonterminals == grammar.nonterminals - 2
    assert cut.left.isfinite().all()


@pytest.mark.parametrize("name", [name for name in families.names() if name not in WITH_SYMBOLS])
def test_families_without_symbols_of_their_own_refuse_to_be_pruned(runs, tmp_path, name):
    text = write_text(tmp_path / "text", 3)
    with pytest.raises(UserError, match=f"family {name} cannot be pruned: .*; leave --prune out"):
        export(runs / name, tmp_path / "model", ExportOptions(prune=str(text)))
    assert not (tmp_path / "model").exists()


def test_pruning_everything_is_refused(runs, tmp_path):
    text = write_text(tmp_path / "text", 3)
    with pytest.raises(UserError, match=r"no nonterminal would be left: .* lower --prune-below"):
        export(runs / "sn_pcfg", tmp_path / "model", ExportOptions(prune=str(text), prune_below=1e9))
    result = CliRunner().invoke(app, ["export", str(runs / "sn_pcfg"), str(tmp_path / "m"), "--prune-check", str(text)])
    assert result.exit_code == 2


def test_a_damaged_or_odd_grammar_form_is_refused(runs, tmp_path):
    text = write_text(tmp_path / "text", 8, seed=3)
    folder = tmp_path / "model"
    export(runs / "n_pcfg", folder, ExportOptions(prune=str(text), prune_below=0.1))
    stored = exported.load(folder)
    for name, tensor in stored.model.items():
        odd = tmp_path / f"odd-{name}"
        documents = {file: (folder / file).read_bytes() for file in stored.state["files"] if "safetensors" not in file}
        for other in (tensor[:-1].clone(), tensor.long(), tensor[None]):
            exported.save(odd, stored.model | {name: other}, documents, stored.state, {})
            with pytest.raises(UserError, match="make no grammar"):
                lm_pcfg.load(odd)


def test_a_model_of_another_kind_is_named_in_a_line_of_bounded_length(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x" * 100}))
    with pytest.raises(UserError, match=rf"has a model of type '{'x' * 39}: lm_pcfg opens"):
        exported.describe(tmp_path)


def test_what_looks_like_an_export(tmp_path):
    assert not exported.is_export(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert exported.is_export(tmp_path)
    (tmp_path / "state.json").touch()
    assert not exported.is_export(tmp_path)
