"""The page of `lm_pcfg report --html`: one file, of any run, that shows words, names and settings as text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from browser import chromium, require_chromium
from command_line import lm_pcfg
from lm_pcfg.bench.plot import MOST_POINTS, thinned
from lm_pcfg.errors import UserError
from lm_pcfg.inference.model import Model
from lm_pcfg.inference.report import Run, read_runs
from lm_pcfg.pages import model_parts
from lm_pcfg.pages.heat_map import CELL, heat_map
from lm_pcfg.pages.model_parts import Wanted
from lm_pcfg.pages.report import report_page
from lm_pcfg.pages.run_facts import differences, environment_facts, settings_part
from lm_pcfg.pages.shell import page, pairs, table, text
from lm_pcfg.pages.surprisals import LEVELS, surprisal_strip
from lm_pcfg.storage import checkpoint
from lm_pcfg.storage.state_file import state_bytes
from texts import WORDS, write_config, write_text

SCRIPT = "<script>alert(1)</script>"
IMAGE = "\"><img/src='x'onerror=alert(2)>"
LONG = "Donaudampfschiffahrtsgesellschaft" * 8
PARTS = ["Sampled sentences", "One sentence: its tree and the posteriors of its spans", "Trees of", "Surprisals of",
         "What the symbols mean"]  # fmt: skip
WITHOUT_END = {"meta", "link", "br"}


class Reader(HTMLParser):
    """Reads a page, and fails where it is not well formed or would load or run something."""

    def __init__(self, content: str):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.ids: list[str] = []
        self.links: set[str] = set()
        self.words = ""
        self.feed(content)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        assert tag not in ("script", "img", "iframe", "object", "embed", "base", "form"), tag
        for name, value in attributes:
            assert not name.startswith("on"), name
            assert name not in ("src", "srcset", "action", "style", "xlink:href"), name
            if name == "href":
                assert value is not None
                assert value == "data:," or value.startswith("#"), value
                self.links |= {value.removeprefix("#")} if value.startswith("#") else set()
            if name == "id":
                assert value is not None
                self.ids.append(value)
        if tag not in WITHOUT_END:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            assert not re.search(r"url\(|@import|//", data)
        else:
            self.words += data


def read(content: str) -> Reader:
    found = Reader(content)
    assert len(set(found.ids)) == len(found.ids)
    assert found.links <= set(found.ids)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A run of three steps on text with hostile words, in a folder with a hostile name and hostile settings."""
    folder = tmp_path_factory.mktemp("pages")
    train = write_text(folder / "train.txt", 60, seed=1)
    train.write_text(train.read_text().replace("cat", SCRIPT).replace("old", IMAGE))
    valid = write_text(folder / "valid.txt", 30, seed=2, longest=30)
    valid.write_text(valid.read_text().replace("cat", SCRIPT).replace("dog", LONG))
    result = lm_pcfg("train", "--config", str(write_config(folder, training={"max_steps": 3})), cwd=folder)
    assert result.returncode == 0, result.stderr.decode()
    run = folder / "runs" / "small"
    assert json.loads((run / "environment.json").read_text())["packages"]["torch"]  # whatever MLflow is told
    return run


def hostile(run: Path, folder: Path) -> Path:
    """The same run with a hostile name and environment."""
    copy = folder / IMAGE.replace("/", "∕")
    shutil.copytree(run, copy, symlinks=True)
    (copy / "environment.json").write_text(json.dumps({"command": [SCRIPT], "host_name": IMAGE, SCRIPT: 1}))
    return copy


def change_settings(run: Path, old: str, new: str) -> None:
    """Change the settings of a run, and of its checkpoints as if they had been written so."""
    for folder in [run, *checkpoint.list_checkpoints(run)]:
        config = (folder / "config.yaml").read_text().replace(old, new).encode()
        (folder / "config.yaml").write_bytes(config)
        if folder != run:
            state = json.loads((folder / "state.json").read_bytes())
            state["files"]["config.yaml"] = {"sha256": hashlib.sha256(config).hexdigest(), "size": len(config)}
            (folder / "state.json").write_bytes(state_bytes(state))


def page_of(*folders: Path, **options) -> str:
    return report_page(read_runs(folders, lambda message: None), **options)


# ---- the whole page -------------------------------------------------------------------------------------------------


def test_hostile_words_names_and_settings_stay_text(runs, tmp_path):
    content = page_of(hostile(runs, tmp_path), wanted=Wanted(trees=12, sentence=f"the {SCRIPT} likes {IMAGE} \u202e"))
    found = read(content)
    assert found.words.count(SCRIPT) > 10  # in trees, strips, symbols, settings and environment
    assert IMAGE.replace("/", "∕") in found.words
    assert "<script" not in content
    assert "\u202e" not in content  # it would turn what stands around it
    assert "default-src 'none'" in content  # and if one were forgotten, no browser would run it


def test_hostile_settings_stay_text():
    content = settings_part([Run("a", config={SCRIPT: IMAGE, "model": {IMAGE: [SCRIPT]}})])
    assert read(content).words.count(SCRIPT) >= 2
    assert "<script" not in content


def test_the_page_of_the_command_has_every_part(runs, tmp_path):
    command = ("report", str(runs), "--html", "page.html", "--trees", "5", "--samples", "4", "--json")
    result = lm_pcfg(*command, cwd=tmp_path)
    assert result.returncode == 0, result.stderr.decode()
    assert json.loads(result.stdout)["runs"][0]["run"] == "small"  # the table is printed as without a page
    content = (tmp_path / "page.html").read_text(encoding="utf-8")
    found = read(content)
    for title in ("Figures", "Learning curves", "Settings", "Environment", "The model", "Training loss", *PARTS):
        assert title in found.words
    for fact in ("model.nonterminals", "not the default", "hostname", "one process"):
        assert fact in found.words
    assert "Not shown" not in found.words
    assert content.count('class="plot"') == 3
    assert content.count('class="heat"') == 1
    assert content.count('class="strip"') in (5, 6)  # the sentence may be one of the lines
    assert content.count('class="phrase"') > 5
    assert found.counts["li"] > 1  # the legend and the samples that ended


def test_ten_thousand_logged_steps_and_twenty_trees_fit_into_three_megabytes(runs, tmp_path):
    copy = tmp_path / "long"
    shutil.copytree(runs, copy, symlinks=True)
    train = [{"step": n, "train/learning_rate": 0.1, "train/ppl": 30.0 + n % 7, "train/loss": 3.0 + n % 5 / 9,
              "train/seconds": 0.1} for n in range(1, 10_001)]  # fmt: skip
    valid = [{"step": n, "valid/ppl": 35.0 + n % 3, "valid/s_f1": 40.0 + n % 11} for n in range(1, 10_001)]
    lines = [line for pair in zip(train, valid, strict=True) for line in pair]
    (copy / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    sentences = write_text(tmp_path / "sentences.txt", 20, longest=9)
    sentences.write_text("\n".join(" ".join(WORDS[n % 16] for n in range(start, start + 30)) for start in range(20)))
    content = page_of(copy, source=str(sentences), wanted=Wanted(trees=20))
    assert content.count("<svg xmlns=") == 20 + 1  # and that of the sentence
    assert len(content.encode()) < 3 << 20
    curves = re.findall(r'<path d="M([^"]*)" stroke="#0072b2"', content)
    assert max(curve.count("L") for curve in curves) in range(MOST_POINTS // 2, MOST_POINTS)


def test_several_runs_are_compared(runs, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(runs, other, symlinks=True)
    change_settings(other, "seed: 0", "seed: 7")
    content = page_of(runs, other, wanted=Wanted(trees=1, samples=1))
    found = read(content)
    assert "Where they differ" in found.words
    assert re.search(r'<th>seed</th><td data-name="small">0</td><td data-name="other">7</td>', content)
    assert "model.eos</th>" not in content  # the same in both
    assert "The model of other" in found.words
    assert "cannot be compared" not in found.words


# ---- what is missing ------------------------------------------------------------------------------------------------


def test_without_a_model_the_curves_are_shown_and_the_page_says_what_is_missing(runs, tmp_path):
    copy = tmp_path / "run"
    copy.mkdir()
    shutil.copy(runs / "metrics.jsonl", copy)
    parts: list[int] = []
    content = page_of(copy, on_part=parts.append)
    found = read(content)
    assert content.count('class="plot"') == 3
    assert "No samples, trees, surprisals or symbols" in found.words
    assert "config.yaml cannot be read" in found.words
    assert "no environment.json" in found.words
    assert sum(parts) == 6
    (copy / "metrics.jsonl").write_text("")
    (copy / "config.yaml").write_text("[1")
    assert "There are no metrics yet" in read(page_of(copy)).words


def test_what_a_family_cannot_do_is_told_in_its_place(runs, monkeypatch):
    def refuse(self, *arguments, **options):
        raise UserError("a model of this family has no <such> thing")

    for name in ("surprisal", "symbols", "parse", "draw"):
        monkeypatch.setattr(Model, name, refuse)
    found = read(page_of(runs))
    assert found.words.count("Not shown: a model of this family has no <such> thing.") == len(PARTS)


def test_the_text_is_that_of_the_run_or_the_embedded_one(runs, tmp_path, monkeypatch):
    model = model_parts.Model([])
    settings = type("Settings", (), {"data": type("Data", (), {"valid": str(tmp_path / "gone.txt")})})
    model.grammars = (type("Trained", (), {"settings": settings}),)
    monkeypatch.setattr(model_parts, "FALLBACK_TEXT", str(runs.parents[1] / "valid.txt"))
    found = model_parts.own_text(model, 4)
    assert len(found.lines) == 4
    assert "gone.txt" in found.note
    assert "embedded corpus" in found.note
    settings.data.valid = None
    assert "no validation text" in model_parts.own_text(model, 4).note
    settings.data.valid = str(runs.parents[1] / "train.txt")
    assert model_parts.own_text(model, 4).note == ""


def test_lines_worth_showing_come_first(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("a\n\n" + "a b c d\n" * 3 + " ".join("abc" * 20) + "\n")
    assert model_parts.read_text(str(text), 3).lines == ["a b c d"] * 3
    assert len(model_parts.read_text(str(text), 9).lines) == 5  # all but the blank one
    for content, name in (("\n", "blank.txt"), ("{}", "x.jsonl"), ("x " * 61, "long.txt")):
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=name):
            model_parts.read_text(str(tmp_path / name), 3)


def test_mistakes(runs, tmp_path):
    for options, status, reason in (
        (("--text", "a.txt"), 2, "add --html"),
        (("--html", "a.html", "--sentence", " "), 2, "should have words"),
        (("--html", "a.html", "--text", "none.txt"), 1, "none.txt: no such file"),
        (("--html", "no/a.html", "--trees", "0"), 1, "cannot write no/a.html"),
    ):
        result = lm_pcfg("report", str(runs), *options, cwd=tmp_path)
        assert result.returncode == status
        assert reason in " ".join(result.stderr.decode().split())
    content = page_of(runs, wanted=Wanted(trees=1, sentence="the " * 61))
    assert "Not shown: 61 words; a sentence of 60 at most has a heat map" in read(content).words


# ---- what pages are made of -----------------------------------------------------------------------------------------


def test_a_heat_map_has_a_cell_for_every_span_that_is_probable():
    words = ["the", "<b>", "x" * 40]
    posteriors = [[0.0, 1.0, 0.25, 1.0], [0.0, 0.0, 1.0, 0.75], [0.0, 0.0, 0.0, 1.0], [0.0] * 4]
    picture = heat_map(words, posteriors, {(0, 3), (1, 3)})
    assert read(f"<body>{picture}</body>").words.count("<b>") == 3  # the word and two names of spans
    cells = re.findall(r'<rect( class="of-tree")? x="([\d.]+)" y="([\d.]+)" .*? fill-opacity="([\d.]+)"', picture)
    assert [(bool(edge), opacity) for edge, _, _, opacity in cells] == [
        (False, "0.250"),
        (True, "1.000"),
        (True, "0.750"),
    ]
    (x1, y1), (x2, y2), (x3, y3) = [(float(x), float(y)) for _, x, y, _ in cells]
    assert (y1 - y2, y3 - y1) == (CELL, 0)  # the whole sentence is above its parts
    assert x2 - x1 == pytest.approx(x3 - x2) == pytest.approx(CELL / 2)  # amid them
    assert f"{'x' * 17}…" in picture
    assert picture.count("h30v30") == 3
    turned = heat_map(["\u05d0", "\u05d1", "\u05d2"], posteriors)
    places = [float(x) for x in re.findall(r'<rect x="([\d.]+)"', turned)]
    assert places[0] > places[2]  # Hebrew: the first two words stand on the right


def test_a_strip_is_the_stronger_coloured_the_more_surprising():
    strip = surprisal_strip(["a", "<i>", "c", "d"], [0.0, 7.5, float("inf"), float("nan")], end=99.0)
    assert re.findall(r'<span class="b(\d+)">', strip) == ["0", "5", str(LEVELS), "0", str(LEVELS)]
    assert re.findall("<small>(.*?)</small>", strip) == ["0.0", "7.5", "∞", "?", "99.0"]
    assert "<bdi>&lt;i&gt;</bdi>" in strip
    assert "end" not in surprisal_strip(["a"], [1.0])


def test_a_long_curve_is_thinned_and_keeps_its_peaks():
    points = [(float(n), 5.0 + n % 3) for n in range(10_000)]
    points[1234] = (1234.0, 99.0)
    points[8888] = (8888.0, -99.0)
    few = thinned(points)
    assert len(few) <= MOST_POINTS
    assert few == sorted(few)
    assert {points[0], points[1234], points[8888], points[-1]} <= set(few)
    assert thinned(points[:MOST_POINTS]) == points[:MOST_POINTS]


def test_what_cannot_be_compared_is_told(tmp_path):
    for name, vocabulary, valid in (("a", "1", "x"), ("b", "2", "x")):
        folder = tmp_path / name
        (folder / "vocab").mkdir(parents=True)
        (folder / "vocab" / "vocabulary.json").write_text(json.dumps({"sha256": vocabulary}))
        (folder / "config.yaml").write_text(f"data: {{valid: {valid}}}\nloss: {{normalise: {name}}}\n")
    runs = read_runs([tmp_path / "a", tmp_path / "b"], pytest.fail)
    notes = report_page(runs, wanted=Wanted())
    assert "different vocabularies" in notes
    assert "different units of the loss" in notes
    assert "validation texts" not in notes
    assert "different" not in report_page(runs[:1], wanted=Wanted())
    same = differences({"a": {"name": "a", "x": 1}, "b": {"name": "b", "x": 1}})
    assert "the same" in same
    assert '<td data-name="b">-</td>' in differences({"a": {"x": [1]}, "b": {}})
    (tmp_path / "a" / "environment.json").write_text("[" * 100_000)
    assert environment_facts(runs[0]) == {}


def test_a_page_runs_its_own_script_and_no_other():
    content = page("A & B", pairs({"<a>": None}) + table(["x", "<y>"], [["1", 2]]), script="let a = 1 < 2;")
    digest = base64.b64encode(hashlib.sha256(b"let a = 1 < 2;").digest()).decode()
    assert f"script-src 'sha256-{digest}'" in content
    assert "script-src" not in page("x", "")
    assert content.index("<script>let a = 1 < 2;</script>") > content.index("</table>")
    assert "&lt;y&gt;" in content
    assert text("") == ""
    assert text('a"\x00\n<') == "a&quot;&lt;"


# ---- in a browser ---------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_browser_shows_it_on_any_screen_without_an_error(runs, tmp_path):
    require_chromium()
    file = tmp_path / "page.html"
    file.write_text(page_of(hostile(runs, tmp_path), runs, wanted=Wanted(trees=20)), encoding="utf-8")
    with chromium(tmp_path) as browser:
        for width, scheme, dark in ((1200, "light", False), (390, "light", False), (390, "dark", True)):
            browser.look(width, scheme=scheme)
            browser.open(file.as_uri())
            assert browser.overflow() == 0
            browser.value("document.querySelectorAll('details').forEach(one => one.open = true)")
            assert browser.overflow() == 0, f"{width} pixels, everything unfolded"
            (red, *_) = map(int, re.findall(r"\d+", browser.value("getComputedStyle(document.body).backgroundColor")))
            assert (red < 80) == dark
            assert SCRIPT in browser.value("document.body.innerText")
            assert browser.value("document.scripts.length + document.images.length") == 0
        assert browser.errors == []
        assert set(browser.requests) == {file.as_uri()}
        file.write_text(page("x", "", script="document.title = 'ran'") + f"{SCRIPT}<img src=http://127.0.0.1/x>")
        browser.open(file.as_uri())
        browser.wait_for("document.title == 'ran'")
        browser.wait_for("new Promise(done => setTimeout(() => done(true), 200))")
        assert len(browser.errors) >= 2  # the policy forbids the script and the picture that are not the page's own
        assert not any("dialogue" in error for error in browser.errors)
