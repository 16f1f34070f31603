"""`lm_pcfg prepare` of texts in a layout of their own: treebanks, folders as the hub has them, PTB."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lm_pcfg.corpus import embedded
from lm_pcfg.corpus.preparation import ptb
from lm_pcfg.corpus.shards.errors import ShardError
from lm_pcfg.corpus.shards.prepared import read_manifest, vocabulary_of
from lm_pcfg.corpus.treebank import TreeError, bracketed, read_tree, read_trees
from lm_pcfg.errors import UserError
from prepared import command, made, sentences
from shards import random_lines

# ---- treebanks ------------------------------------------------------------------------------------------------------

MRG = """
( (S
    (NP-SBJ-1 (DT The) (NN cat) )
    (VP (VBD was)
      (VP (VBN seen)
        (NP (-NONE- *-1) )))
    (. .) ))
( (NP (NN Dog)) ) (S (NP (PRP it)) (VP (VBZ runs)))
"""


def test_trees_give_text_and_gold_trees(tmp_path):
    (tmp_path / "wsj.mrg").write_text(MRG)
    folder = made(tmp_path / "out", tmp_path, trees=True)
    assert (folder / "text.txt").read_text() == "The cat was seen .\nDog\nit runs\n"
    trees = (folder / "trees.txt").read_text().splitlines()
    assert trees[0] == "(S (NP-SBJ-1 (DT The) (NN cat)) (VP (VBD was) (VP (VBN seen))) (. .))"
    assert trees[1] == "(NP (NN Dog))"
    vocabulary = vocabulary_of(read_manifest(folder))
    assert sentences(folder) == vocabulary.tokenise([" ".join(read_tree(tree).words) for tree in trees])
    (shard,) = (folder / "shards").glob("*.parquet")
    assert pq.read_table(shard).column("tree").to_pylist() == trees
    assert pq.read_table(shard).column("text").to_pylist() == (folder / "text.txt").read_text().splitlines()


def test_the_embedded_treebank(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = made(tmp_path / "out", "embedded:valid.trees", trees=True)
    assert (folder / "text.txt").read_bytes() == embedded.resolve("embedded:valid").read_bytes()
    assert (folder / "trees.txt").read_bytes() == embedded.resolve("embedded:valid.trees").read_bytes()


@pytest.mark.parametrize(
    ("text", "message"),
    [("(S (NN a)", "no end"), ("a b c", "outside of brackets"), ("(S (NN a) b)", "side by side"),
     ("(S (NN a b))", "a tag"), ("(S (NN a)))", "outside")],
)  # fmt: skip
def test_what_is_no_tree_is_named(tmp_path, text, message):
    with pytest.raises(TreeError, match=message):
        list(read_trees([text]))
    (tmp_path / "bad.trees").write_text(text)
    with pytest.raises(ShardError, match=r"bad\.trees: line 1"):
        made(tmp_path / "out", tmp_path / "bad.trees", trees=True)


@pytest.mark.parametrize("depth", [1, 500, 3000])
def test_trees_may_be_deep(depth):
    tree = "(X (A a) " * depth + "(B b)" + ")" * depth
    assert [bracketed(found) for found in read_trees([f"( {tree})", "( ( (NN c)))"])] == [tree, "(NN c)"]
    assert len(read_tree(tree).words) == depth + 1


def test_trees_before_a_bad_one_are_kept(tmp_path):
    good = [f"(S (NN a) (VB w{k}))" for k in range(50)]
    (tmp_path / "bad.trees").write_text("\n".join([*good, "(S (NN a) b)", "(S (NN lost))"]))
    folder = made(tmp_path / "out", tmp_path / "bad.trees", trees=True, on_error="skip")
    assert (folder / "trees.txt").read_text().splitlines() == good
    (message,) = read_manifest(folder).content["damage"]
    assert "line 51" in message


# ---- the hub's layout -----------------------------------------------------------------------------------------------


def hub_folder(folder: Path, field: str = "sentence", **splits: list[str]) -> Path:
    (folder / "data").mkdir(parents=True)
    for split, lines in splits.items():
        pq.write_table(pa.table({field: lines}), folder / "data" / f"{split}-00000-of-00001.parquet")
    return folder


def test_a_folder_in_the_hubs_layout(tmp_path):
    lines = random_lines(100)
    hub = hub_folder(tmp_path / "hub", train=lines, validation=["w1 w2"], test=["w3"])
    folder = made(tmp_path / "out", hub, split="train", text_field="sentence")
    vocabulary = vocabulary_of(read_manifest(folder))
    assert sentences(folder) == vocabulary.tokenise([line for line in lines if line])
    valid = made(tmp_path / "valid", hub, split="validation", text_field="sentence", existing=str(folder))
    assert read_manifest(valid).counts["lines"] == 1
    with pytest.raises(ShardError, match="its fields: sentence"):
        made(tmp_path / "wrong", hub, split="train")
    with pytest.raises(UserError, match=r"nosuch"):
        made(tmp_path / "wrong2", hub, split="nosuch", text_field="sentence")


def test_a_folder_in_the_hubs_layout_that_changed(tmp_path, capsys):
    hub = hub_folder(tmp_path / "hub", train=["a b"] * 5)
    options = {"split": "train", "text_field": "sentence"}
    for _ in range(2):
        made(hub / "out", hub, **options)
    assert "was prepared before" in capsys.readouterr().err
    pq.write_table(pa.table({"sentence": ["c d"] * 5}), hub / "data/train-00000-of-00001.parquet")
    with pytest.raises(UserError, match="the input files changed"):
        made(hub / "out", hub, **options)


def test_rows_of_the_hub_before_a_bad_one_are_kept(tmp_path, monkeypatch):
    from lm_pcfg.corpus.preparation import shards

    def rows_of_split(*arguments):
        yield from ["a b"] * 50
        raise ShardError("hub: damaged")

    monkeypatch.setattr(shards, "rows_of_split", rows_of_split)
    folder = made(tmp_path / "out", "some/text", split="train", on_error="skip")
    assert read_manifest(folder).counts["lines"] == 50
    assert read_manifest(folder).content["damage"] == ["hub: damaged"]


# ---- PTB ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mikolov(tmp_path_factory) -> Path:
    """Files with the lines and words of Mikolov's, though not his words."""
    folder = tmp_path_factory.mktemp("simple-examples") / "data"
    folder.mkdir()
    for part in ptb.PARTS:
        lengths = np.full(part.lines, part.words // part.lines)
        lengths[: part.words - int(lengths.sum())] += 1
        (folder / part.file).write_text("".join(f" {' '.join(['word'] * n)} \n" for n in lengths.tolist()))
    return folder


def test_prepare_ptb_as_written(mikolov, tmp_path):
    result = command("ptb", "--source", str(mikolov.parent), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [f"data/ptb/{part.file}" for part in ptb.PARTS]
    for part in ptb.PARTS:
        assert (tmp_path / "data/ptb" / part.file).read_bytes() == (mikolov / part.file).read_bytes()


def test_ptb_from_an_archive_and_from_the_hubs_layout(mikolov, tmp_path):
    with tarfile.open(tmp_path / "simple-examples.tgz", "w:gz") as tar:
        tar.add(mikolov, "simple-examples/data")
    splits = {p.hub_split: [line.strip() for line in (mikolov / p.file).read_text().splitlines()] for p in ptb.PARTS}
    hub = hub_folder(tmp_path / "hub", **splits)
    for number, source in enumerate((tmp_path / "simple-examples.tgz", tmp_path, hub)):
        for path in ptb.prepare_ptb(str(source), tmp_path / f"ptb{number}"):
            assert path.read_bytes() == (mikolov / path.name).read_bytes()


def test_ptb_that_is_not_mikolovs_is_refused(mikolov, tmp_path):
    for part in ptb.PARTS:
        content = (mikolov / part.file).read_text()
        (tmp_path / part.file).write_text(content + "one more\n" if "valid" in part.file else content)
    with pytest.raises(UserError, match=r"ptb\.valid\.txt has 3,371 lines and 70,392 words, but"):
        ptb.prepare_ptb(str(tmp_path), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "ptb.test.txt").unlink()
    with pytest.raises(UserError, match=r"no ptb\.test\.txt in it"):
        ptb.prepare_ptb(str(tmp_path), tmp_path / "out")
    with pytest.raises(UserError, match="no such folder"):
        ptb.prepare_ptb(str(tmp_path / "nowhere"), tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no ptb\.train\.txt, ptb\.valid\.txt, ptb\.test\.txt in it; give the folder"):
        ptb.prepare_ptb(str(tmp_path / "empty"), tmp_path / "out")


def test_ptb_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "ptb.train.txt").symlink_to(tmp_path / "gone.txt")
    with pytest.raises(UserError, match=r"ptb\.train\.txt: cannot be read"):
        ptb.prepare_ptb(str(tmp_path), tmp_path / "out")
