"""Settings: strict, typed, with errors of one line that say what to write instead."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from lm_pcfg.corpus.batches import BatchOptions
from lm_pcfg.corpus.vocabulary import VocabularyOptions
from lm_pcfg.errors import SettingsError
from lm_pcfg.grammar import families
from lm_pcfg.grammar.families.shared.sections import SECTIONS, Init
from lm_pcfg.settings import Section, Settings
from lm_pcfg.settings_file import dump_yaml, load_settings, settings_class

SMALLEST = "data: {train: train.txt}\nmodel: {nonterminals: 64}\n"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALLEST)
    return path


def error_of(path: Path, *overrides: str) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(path, list(overrides))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def error_of_text(path: Path, text: str) -> str:
    path.write_text(text)
    message = error_of(path)
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def test_defaults_are_those_of_the_sn_pcfg_set_up(config: Path) -> None:
    settings = load_settings(config, [])
    assert settings.name == "small"
    assert (settings.seed, settings.resume, settings.runs_folder) == (0, False, "runs")
    assert (settings.optimizer.name, settings.optimizer.learning_rate) == ("adam", 2e-3)
    assert settings.optimizer.betas == [0.75, 0.999]
    assert (settings.optimizer.clip, settings.optimizer.schedule.kind) == (3.0, "constant")
    assert (settings.batch.by, settings.batch.sentences) == ("sentences", 16)
    assert (settings.data.max_length, settings.training.epochs, settings.evaluation.patience) == (40, 30, 5)
    assert (settings.model.preterminals, settings.model.dimension) == (128, 512)
    assert (settings.model.root, settings.model.eos, settings.model.init) == ("all", "implicit", Init())
    assert (settings.loss.normalise, settings.inside.precision) == ("sentences", "fp32")
    assert settings.data.curriculum.max_length_for_epoch(3) is None


def test_overrides(config: Path) -> None:
    overrides = [
        "name=other", "optimizer.learning_rate=1e-3", "optimizer.betas=[0.9, 0.98]", "data.valid=valid.txt",
        "data.max_length=null", "model.preterminals=10_0", "data.vocabulary.lowercase=yes", "seed=1", "seed=2",
        "evaluation={patience: null}", "model.init=normal(0.15, 1e-1)", "data.curriculum.start=30", "optimizer.clip=",
        "optimizer.schedule.kind=linear",
    ]  # fmt: skip
    settings = load_settings(config, overrides)
    assert (settings.name, settings.seed) == ("other", 2)
    assert settings.optimizer.learning_rate == 1e-3
    assert settings.optimizer.betas == [0.9, 0.98]
    assert (settings.data.valid, settings.data.max_length, settings.model.preterminals) == ("valid.txt", None, 100)
    assert settings.data.vocabulary.lowercase is True
    assert settings.optimizer.schedule.kind == "linear"
    assert (settings.evaluation.patience, settings.optimizer.clip) == (None, None)
    assert settings.model.init == Init("normal", 0.15, 0.1)
    assert [settings.data.curriculum.max_length_for_epoch(epoch) for epoch in range(3)] == [30, 31, 32]


def test_sections_fit_the_corpus(config: Path) -> None:
    settings = load_settings(config, [])
    assert BatchOptions(**settings.batch.model_dump()) == BatchOptions()
    assert VocabularyOptions(**settings.data.vocabulary.model_dump()).size == 10000


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.nonterminal=3", "unknown key 'model.nonterminal' (did you mean 'model.nonterminals'?)"),
        ("modle.nonterminals=3", "unknown key 'modle' (did you mean 'model'?)"),
        ("model.learning_rate=3", "unknown key 'model.learning_rate' (did you mean 'optimizer.learning_rate'?)"),
        ("learningrate=3", "unknown key 'learningrate' (did you mean 'optimizer.learning_rate'?)"),
        ("every_steps=3", "(did you mean 'evaluation.every_steps' or 'checkpoint.every_steps'?)"),
        ("loss.xyz=3", "unknown key 'loss.xyz' (keys here: normalise)"),
        ("optimizer={schedule: {kinds: linear}}", "unknown key 'optimizer.schedule.kinds' (did you mean 'optimizer.s"),
        ("seed.x=1", "'seed' is not a section"),
        ("model=5", "model = 5 should be a section with keys such as 'family'"),
        ("model", "'model' should be of the form dotted.key=value"),
        ("=5", "'=5' should be of the form dotted.key=value"),
        ("seed=[1", "seed: line 1, column 3: "),
        ("model.nonterminals=many", "model.nonterminals = 'many' should be a whole number"),
        ("model.nonterminals=true", "model.nonterminals = True should be a whole number"),
        ("model.nonterminals=1.5", "model.nonterminals = 1.5 should be a whole number"),
        ("model.nonterminals='5'", "model.nonterminals = '5' should be a whole number"),
        ("model.nonterminals=0", "model.nonterminals = 0 should be at least 1"),
        ("model.state_dropout=1", "model.state_dropout = 1 should be below 1"),
        ("data.max_length=x", "data.max_length = 'x' should be a whole number or null"),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate = 'fast' should be a number"),
        ("optimizer.learning_rate=.nan", "optimizer.learning_rate = nan should be a finite number"),
        ("optimizer.betas=[0.9]", "optimizer.betas = [0.9] should have at least 2 items"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas = [0.9, 1.0] should be below 1"),
        ("optimizer.schedule.kind=lin", "= 'lin' should be 'constant', 'linear' or 'cosine'"),
        ("model.eos=on", "model.eos = 'on' should be 'implicit' or 'explicit'"),
        ("tracking.mlflow=maybe", "tracking.mlflow = 'maybe' should be true or false"),
        ("resume=true", "resume = True should be false, auto or the path of a checkpoint"),
        ("model.init=normal(0.1)", "model.init = 'normal(0.1)' should be xavier_normal, xavier_uniform, normal("),
        ("model.init=normal(0, 0.1)", "model.init = 'normal(0, 0.1)' should be"),
        ("name=a/b", "name = 'a/b' should be letters, digits and . _ + = - only, and begin with a letter"),
        ("name=.a", "name = '.a' should be letters, digits"),
        ("lr=0.1", "unknown key 'lr' (did you mean 'optimizer.learning_rate'?)"),
        ("batch_size=8", "unknown key 'batch_size' (did you mean 'batch.sentences'?)"),
        ("model.hidden=8", "unknown key 'model.hidden' (did you mean 'model.dimension'?)"),
        ("n=8", "(did you mean 'model.nonterminals'?)"),
        ("num_epochs=8", "(did you mean 'training.epochs'?)"),
        ("xyz=3", "unknown key 'xyz' (--print-config lists all keys)"),
        ("name=12", "name = 12 should be text (in quotes if need be)"),
    ],
)  # fmt: skip
def test_wrong_overrides(config: Path, override: str, expected: str) -> None:
    message = error_of(config, override)
    assert message.startswith("command line: ")
    assert expected in message


def test_unknown_key_in_the_file(config: Path) -> None:
    assert (
        error_of_text(config, "data: {train: x}\nmodel:\n  nonterminal: 5\n")
        == "unknown key 'model.nonterminal' (did you mean 'model.nonterminals'?)"
    )
    assert "unknown key '1'" in error_of_text(config, "1: 2\n")


def test_missing_keys(config: Path) -> None:
    assert error_of_text(config, "model: {nonterminals: 5}").startswith("missing key 'data.train' (training text")
    assert "missing key 'model.nonterminals'" in error_of_text(config, "data: {train: x}\nmodel:\n")
    assert error_of_text(config, "").endswith("(and 1 more)")
    config.write_text("seed: 3\n")
    assert load_settings(config, ["data.train=x", "model.nonterminals=5"]).seed == 3


def test_checks_across_keys(config: Path) -> None:
    assert "data: curriculum.start 50 should not be above max_length 40" in error_of(config, "data.curriculum.start=50")
    assert load_settings(config, ["data.curriculum.start=50", "data.max_length=60"]).data.curriculum.start == 50
    assert "cannot be standard input" in error_of(config, "data.train=-")


def test_families_have_settings_of_their_own(config: Path) -> None:
    assert load_settings(config, ["model.family=tables"]).model.family == "tables"
    assert load_settings(config, ["model.parameterization=tables"]).model.family == "tables"  # its older name
    for option in ("emission_temperature=2", "children=rotated", "feature_dropout=0.1"):
        message = error_of(config, "model.family=tables", f"model.{option}")
        assert f"'model.{option.split('=')[0]}' belongs to family sn_pcfg" in message
    names = ", ".join(families.names())
    assert f"model.family = 'gru' should be one of {names}" in error_of(config, "model.family=gru")
    message = error_of(config, "model.family=tables", "model.dimension=4")
    assert "'model.dimension' belongs to family sn_pcfg or" in message


def test_another_family_keeps_the_parameterization_if_it_has_it(config: Path) -> None:
    for name, kept in (("released", "paper"), ("bounded", "bounded")):
        config.write_text(f"data: {{train: x}}\nmodel: {{nonterminals: 4, parameterization: {name}}}\n")
        assert load_settings(config, ["model.family=rank_pcfg"]).model.parameterization == kept
        assert not hasattr(load_settings(config, ["model.family=n_pcfg"]).model, "parameterization")
    message = error_of(config, "model.family=tn_pcfg", "model.parameterization=released")
    assert "model.parameterization = 'released' should be 'paper' or 'bounded'" in message


def test_the_command_line_may_choose_another_family(config: Path) -> None:
    config.write_text("data: {train: x}\nmodel: {nonterminals: 4, dimension: 8, parameterization: released}\n")
    for override in ("model.family=tables", 'model.family="tables"', "model.parameterization=tables"):
        assert load_settings(config, [override]).model.family == "tables"
    assert load_settings(config, ["model.family=tables", "model.feature_dropout=0.0"]).model.family == "tables"
    config.write_text("data: {train: x}\nmodel: {nonterminals: 4, family: tables}\n")
    assert load_settings(config, ["model.parameterization=released"]).model.parameterization == "released"
    assert load_settings(config, ["model={nonterminals: 5, parameterization: paper}"]).model.family == "sn_pcfg"
    assert load_settings(config, ["model={nonterminals: 5, parameterization: tables}"]).model.nonterminals == 5
    assert load_settings(config, ["model={nonterminals: 5, word_bias: none}"]).model.family == "sn_pcfg"
    assert "'nonsense' should be one of" in error_of(config, "model={nonterminals: 5, family: nonsense}")
    assert "belongs to family sn_pcfg" in error_of(config, "model={nonterminals: 5, family: tables, children: rotated}")
    text = "data: {train: x}\nmodel: {nonterminals: 4, family: sn_pcfg, parameterization: tables}\n"
    assert "contradicts family: sn_pcfg" in error_of_text(config, text)
    text = "data: {train: x}\nmodel: {nonterminals: 4, family: tables, children: plain}\n"
    assert "'model.children' belongs to family sn_pcfg" in error_of_text(config, text)  # no old file: a mistake


def test_settings_are_read_without_torch(config: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from lm_pcfg.settings_file import load_settings;"
        f"load_settings(Path({str(config)!r}), ['model.family=tables']); assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0


def test_settings_of_earlier_versions(config: Path) -> None:
    """Run folders hold every setting with its value: what was removed is dropped at its old default, else refused."""
    old = "word_dimension: null, spelling: null, emission_smoothing: 0.0, word_bias: none, embedding_dropout: 0.0"
    old += ", rule_dropout: 0.0"
    config.write_text(
        f"data: {{train: x}}\nmodel: {{nonterminals: 4, dimension: 8, parameterization: tables, {old}}}\n"
        "optimizer: {network_rate: 1.0, schedule: {final_fraction: 0.0}}\ntracking: {wait_seconds: 20.0}\n"
    )
    assert load_settings(config, []).model.family == "tables"
    assert load_settings(config, ["model.spelling=null"]).model.nonterminals == 4
    assert error_of(config, "model.spelling=3") == (
        "command line: model.spelling = 3 is no longer supported; leave it out, or use commit 828ad98"
    )
    message = error_of_text(config, "data: {train: x}\nmodel: {nonterminals: 4, word_bias: zipf}\n")
    assert message == "model.word_bias = 'zipf' is no longer supported; leave it out, or use commit 828ad98"


def test_a_removed_setting_without_effect_is_dropped_with_a_word(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs of a search were of an experiment of their own, and still open."""
    text = config.read_text()
    before = load_settings(config, [])
    for value, words in (("lm_pcfg", ""), ("mine", "use the environment variable MLFLOW_EXPERIMENT_NAME")):
        config.write_text(f"{text}\ntracking: {{experiment: {value}}}\n")
        assert load_settings(config, []) == before
        assert words in capsys.readouterr().err
        config.write_text(text)
        assert load_settings(config, [f"tracking.experiment={value}"]) == before
        assert words in capsys.readouterr().err


def test_there_are_at_most_75_settings(config: Path) -> None:
    def count(values: object) -> int:
        return sum(map(count, values.values())) if isinstance(values, dict) else 1

    assert count(yaml.safe_load(dump_yaml(load_settings(config, [])))) <= 75


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: 1\ndata: {train: x\nmodel: 3\n", "line 3, column 6: "),
        ("a: b: c", "line 1, column 5: mapping values are not allowed here"),
        ("seed: 1\nseed: 2\n", "line 2, column 1: duplicate key 'seed'"),
        ("model:\n  nonterminals: 1\n  nonterminals: 1\n", "line 3, column 3: duplicate key 'nonterminals'"),
        ("- x", "the file = ['x'] should be a section"),
        ("data: 5", "data = 5 should be a section with keys such as 'train'"),
        ("seed: !!python/name:os.system\n", "could not determine a constructor"),
        ("seed: \x01", "not valid YAML"),
        ("data: &again {train: *again}", "its aliases"),
    ],
)
def test_wrong_files(config: Path, text: str, expected: str) -> None:
    assert expected in error_of_text(config, text)


def test_unreadable_files(tmp_path: Path) -> None:
    assert "No such file" in error_of(tmp_path / "nothing.yaml")
    assert "directory" in error_of(tmp_path)
    (tmp_path / "latin1.yaml").write_bytes(b"name: caf\xe9\n")
    assert "not UTF-8" in error_of(tmp_path / "latin1.yaml")


def test_yaml_surprises_stay_out(config: Path) -> None:
    """YAML 1.1 would read a string, a bool, a date, 8 and 90 here."""
    values = {"2e-3": 2e-3, "1E5": 1e5, "3.": 3.0, ".5": 0.5}
    for text, value in values.items():
        config.write_text(SMALLEST + f"optimizer: {{learning_rate: {text}}}\n")
        assert load_settings(config, []).optimizer.learning_rate == value
    for name in ("on", "no", "2024-01-01", "010", "1_0x"):
        assert load_settings(config, [f"name={name}"]).name == name
    assert "'010' should be a whole number" in error_of(config, "seed=010")
    assert "'1:30' should be a whole number" in error_of(config, "seed=1:30")
    for off in ("off", "no", "false"):
        assert load_settings(config, [f"resume={off}", f"tracking.mlflow={off}"]).resume is False
    assert load_settings(config, ["resume=auto"]).resume == "auto"
    assert load_settings(config, ["resume=runs/a/checkpoints/step-1"]).resume == "runs/a/checkpoints/step-1"


def test_name_from_the_file(tmp_path: Path) -> None:
    names = {"a b": "a-b", ".hidden": "hidden", "größe": "größe", "…": "run", "ptb_4096.v2": "ptb_4096.v2"}
    names |= {"a--b": "a--b", "a - b": "a---b", "a  b": "a-b"}  # as ever: runs of these names are resumed
    names["gro\u0308\u00dfe"] = "größe"  # as some systems write it
    for stem, name in names.items():
        path = tmp_path / f"{stem}.yaml"
        path.write_text(SMALLEST)
        assert load_settings(path, []).name == name


def test_dump_is_resolved_and_comes_back(config: Path) -> None:
    settings = load_settings(
        config, ["model.init=normal(0.15, 1e-05)", "optimizer.clip=1e-12", "evaluation.every_epochs=2"]
    )
    text = dump_yaml(settings)
    assert "preterminals: 128" in text
    assert "init: normal(0.15, 1e-05)" in text
    assert "betas: [0.75, 0.999]" in text
    config.write_text(text)
    again = load_settings(config, [])
    assert again == settings
    assert dump_yaml(again) == text
    assert list(yaml.safe_load(text)) == list(Settings.model_fields)  # any YAML reader takes it, in our order


@hypothesis_settings(deadline=None, max_examples=50)
@given(
    train=st.text(min_size=1).filter(lambda text: text.strip() and text != "-"),
    rate=st.floats(min_value=0, max_value=1e30, exclude_min=True),
    symbols=st.floats(min_value=1e-300, max_value=1e300),
)
def test_any_value_comes_back(
    tmp_path_factory: pytest.TempPathFactory, train: str, rate: float, symbols: float
) -> None:
    values = {
        "data": {"train": train},
        "model": {"nonterminals": 3, "init": f"normal({symbols!r}, 0.1)"},
        "optimizer": {"learning_rate": rate},
    }
    settings = settings_class("sn_pcfg").model_validate(values)
    assert settings.model.init.symbols == symbols
    path = tmp_path_factory.mktemp("settings") / "run.yaml"
    path.write_text(dump_yaml(settings), encoding="utf-8")
    assert load_settings(path, []) == settings


def test_every_setting_is_described() -> None:
    def check(section: type[Section]) -> int:
        count = 0
        for key, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{key}"
            assert "\n" not in field.description
            kind = field.annotation
            count += check(kind) if isinstance(kind, type) and issubclass(kind, Section) else 1
        return count

    for family in SECTIONS:
        assert check(settings_class(family)) > 40


def test_settings_do_not_change(config: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_settings(config, []).seed = 3  # type: ignore[misc]


@pytest.mark.parametrize("value", ["0", "-1", "2.5", "half", "[1]", "true", "null"])
def test_a_number_or_a_word(config: Path, value: str) -> None:
    with pytest.raises(
        SettingsError, match=r"^command line: emission\.shards = .* should be auto or a whole number above 0$"
    ):
        load_settings(config, [f"emission.shards={value}"])


# ---- bounds ---------------------------------------------------------------------------------------------------------


def bomb(levels: int) -> str:
    lines = ["a0: &a0 [x,x,x,x,x,x,x,x,x]"]
    return "\n".join(lines + [f"a{k}: &a{k} [{','.join([f'*a{k - 1}'] * 9)}]" for k in range(1, levels)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (bomb(9), "stand for too many values"), ("a: &a [*a]", "stand for too many values"),
        ("name: " + "x" * 1_000_001, "more than 1,000,000 characters"), ("a: " + "[" * 900, "not valid YAML"),
        ("seed: " + "1" * 5000, "4300 digits"),
    ],
    ids=["aliases", "a value in itself", "long", "deep", "digits"],
)  # fmt: skip
def test_small_files_take_neither_time_nor_memory(config, text, message):
    began = time.perf_counter()
    assert message in error_of_text(config, text)
    assert time.perf_counter() - began < 5


def test_aliases_that_stand_for_little_are_read(config):
    config.write_text("data: &data {train: x}\nmodel: {nonterminals: &n 4, preterminals: *n}\n")
    assert load_settings(config, []).model.preterminals == 4


@pytest.mark.parametrize(
    "override",
    ["model.init=normal(" + "1" * 32_000 + ", 1)", "model.init=normal(" + "1" * 32_000, "optimizer.learning_rate=1e300",
     "optimizer.clip=1e300", "optimizer.weight_decay=1e300"],
    ids=lambda override: override[:20] + override[-3:],
)  # fmt: skip
def test_numbers_that_no_weight_can_hold_are_refused(config, override):
    began = time.perf_counter()
    error_of(config, override)
    assert time.perf_counter() - began < 5


def test_a_config_without_end_is_refused(config):
    with pytest.raises(SettingsError, match="characters"):
        load_settings(Path("/dev/zero"), [])
