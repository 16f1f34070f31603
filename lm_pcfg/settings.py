"""The settings of a run, typed and strict. Those of the model are its family's: settings_file.py puts them in."""

from __future__ import annotations

import re
import unicodedata
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator
from pydantic import model_validator as check

Precision = Literal["fp64", "fp32", "tf32", "bf16"]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
LARGEST = 1e30  # number that a setting may be: the weights are fp32
_MARKS_IN_NAMES = "._+=-"


def _switch(value: object) -> object:
    words = {"yes": True, "on": True, "no": False, "off": False}
    return words.get(value.lower(), value) if isinstance(value, str) else value


def run_name(text: str) -> str:
    """Return a name of a run that is like the text; letters of all scripts stay. Nothing is left of some texts."""
    composed = unicodedata.normalize("NFC", text)  # some systems take ö apart
    parts = ("".join(some) if fit else "-" for fit, some in groupby(composed, _in_names))
    return "".join(parts).lstrip(".+=-")


def former_names(name: str) -> list[str]:
    """Return what earlier versions, which left only ASCII letters, made of the text of this name: gr-e of größe."""
    forms = (unicodedata.normalize(form, name) for form in ("NFC", "NFD"))
    former = [re.sub(r"[^A-Za-z0-9._+=-]+", "-", form).lstrip(".+=-") for form in forms]
    return [one for one in dict.fromkeys(former) if one and one != name]


def _in_names(character: str) -> bool:
    return character in _MARKS_IN_NAMES or unicodedata.category(character)[0] in "LMN"  # letters, their marks, numbers


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("should be text (in quotes if need be)")
    if not (value and all(map(_in_names, value)) and value[0] not in ".+=-"):
        raise ValueError("should be letters, digits and . _ + = - only, and begin with a letter, a digit or _")
    return value


def _resume(value: object) -> bool | str:
    value = _switch(value)
    if value is False or (isinstance(value, str) and value.strip()):
        return value
    raise ValueError("should be false, auto or the path of a checkpoint")


def _training_data(value: object) -> str | list[Any]:
    """A name; a list of names (the shards of one corpus); or a list of {path, weight} (a mixture of corpora)."""
    if isinstance(value, str) and value.strip():
        return value
    names = isinstance(value, list) and value and all(isinstance(item, str) and item.strip() for item in value)
    if names:
        return list(value)  # type: ignore[call-overload]
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        for item in value:
            weight = item.get("weight", 1)
            number = isinstance(weight, int | float) and not isinstance(weight, bool) and 0 < weight <= 1000
            if not (set(item) <= {"path", "weight"} and isinstance(item.get("path"), str) and item["path"] and number):
                raise ValueError(f"has {item}, which should be {{path: ..., weight: a number above 0}}")
        return [{"path": item["path"], "weight": item.get("weight", 1)} for item in value]
    raise ValueError("should be a path, a list of paths, or a list of {path: ..., weight: ...}")


TrainingData = Annotated[str | list[Any], PlainValidator(_training_data)]


def _brackets(value: object) -> str | dict[str, Any] | None:
    """A name, or {path, epochs}: in later epochs all trees count again."""
    if value is None or (isinstance(value, str) and value.strip()):
        return value
    if isinstance(value, dict) and set(value) == {"path", "epochs"}:
        path, epochs = value["path"], value["epochs"]
        if isinstance(path, str) and path.strip() and type(epochs) in (int, float) and 0 < epochs < 2**31:
            return value
    raise ValueError("should be a path, right-branching, or {path: ..., epochs: a number above 0}")


Brackets = Annotated[str | dict[str, Any] | None, PlainValidator(_brackets)]


def _streaming(value: object) -> bool | str:
    value = _switch(value)
    if isinstance(value, bool) or value == "auto":
        return value
    raise ValueError("should be auto, true or false")


def _shards(value: object) -> int | str:
    if value == "auto" or (type(value) is int and 1 <= value < 2**31):
        return value
    raise ValueError("should be auto or a whole number above 0")


Switch = Annotated[bool, BeforeValidator(_switch)]  # the loader keeps yes, no, on, off as text; here they mean a bool
Resume = Annotated[bool | str, PlainValidator(_resume)]
Name = Annotated[str, PlainValidator(_name)]  # of a folder, neither hidden nor like an option


class Section(BaseModel):
    # defer_build: importing is twice as fast, the first validation pays
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, defer_build=True)


def setting(default: Any, description: str, **limits: Any) -> Any:
    """A section's type as default: the section with its own defaults; `...`: has to be given."""
    if isinstance(default, type):
        return Field(default_factory=default, description=description)
    return Field(default, description=description, **limits)


class VocabularySection(Section):
    size: Count | None = setting(10000, "most word types including <unk>; null: all")
    min_count: Count = setting(1, "words rarer than this in the training text become <unk>")
    lowercase: Switch = setting(False, "lowercase all words")
    fold_numbers: Switch = setting(False, "numbers become N")


class CurriculumSection(Section):
    start: Count | None = setting(None, "most words of a sentence in the first epoch; null: no curriculum")
    increase_per_epoch: Count = setting(1, "by how many words that grows each epoch")

    def max_length_for_epoch(self, epoch: int) -> int | None:
        """Most words of a sentence in an epoch (from 0); None: any."""
        return None if self.start is None else self.start + epoch * self.increase_per_epoch


class DataSection(Section):
    train: TrainingData = setting(
        ..., "training text, one sentence a line: a file, folder, pattern, prepared corpus or embedded:train; "
        "a list of files; or a mixture, a list of {path, weight}",
    )  # fmt: skip
    valid: str | None = setting(
        None, "validation text or prepared corpus; null: no evaluation while training", min_length=1
    )
    brackets: Brackets = setting(
        None, "a file of trees of the training text, perhaps partial ones, or right-branching: trees that cross their "
        "brackets do not count in training; {path, epochs}: only in the first epochs, 0.5 of one, say",
    )  # fmt: skip
    field: str = setting("text", "which field of JSON lines or Parquet holds the text", min_length=1)
    streaming: Annotated[bool | str, PlainValidator(_streaming)] = setting(
        "auto", "true: read blocks of shards as they are needed; false: all into memory; auto: false for one text file"
    )
    workers: int = setting(0, "processes that read ahead for each rank, if streaming; 0: none", ge=0, le=256)
    block_lines: Count = setting(16384, "lines that are shuffled and batched together, if streaming")
    on_error: Literal["fail", "skip"] = setting(
        "fail", "a shard or line that cannot be read: stop, or leave out and count"
    )
    verify: Literal["off", "once", "always"] = setting(
        "off", "compare shards with their sha256: once, when the run starts; always: also whenever one is opened"
    )
    index_folder: str = setting("data/index", "where the index of raw shards is kept", min_length=1)
    max_length: Count | None = setting(
        40,
        "training sentences of more words (of more pieces, if the model counts those) are left out; null: keep all",
    )
    vocabulary: VocabularySection = setting(VocabularySection, "which words are known")
    sentencepiece: str | None = setting(
        None, "an existing SentencePiece model: pieces instead of words (data.vocabulary is not used)", min_length=1
    )
    curriculum: CurriculumSection = setting(CurriculumSection, "short sentences first")

    @check(mode="after")
    def _fits(self) -> DataSection:
        paths = [self.train] if isinstance(self.train, str) else self.train
        if "-" in (*(item["path"] if isinstance(item, dict) else item for item in paths), self.valid):
            raise ValueError("train and valid cannot be standard input (-): they are read more than once; save a file")
        if self.brackets == "-" or (isinstance(self.brackets, dict) and self.brackets["path"] == "-"):
            raise ValueError("brackets cannot be standard input (-): they are read more than once; save a file")
        start = self.curriculum.start
        if start is not None and self.max_length is not None and start > self.max_length:
            raise ValueError(f"curriculum.start {start} should not be above max_length {self.max_length}")
        return self


class BatchSection(Section):
    by: Literal["sentences", "cost"] = setting("sentences", "a number of sentences, or a budget of cost")
    sentences: Count = setting(16, "sentences a batch, if by sentences")
    cost: Count = setting(8000, "if by cost: budget of words squared, summed over sentences (8000: 16 of PTB)")
    accumulate: Count = setting(1, "micro-batches of each rank for one optimizer step")


class ModelSection(Section):
    """What the models of all families have; each family adds its own settings."""

    family: str = setting("sn_pcfg", "family of models, one of lm_pcfg/grammar/families")
    eos: Literal["implicit", "explicit"] = setting("implicit", "explicit: every line ends in an <eos> terminal")


class InsideSection(Section):
    backend: Literal["auto", "torch", "reference", "triton"] = setting("auto", "implementation of the inside algorithm")
    precision: Precision = setting("fp32", "precision of the inside algorithm in training")


class NetworksSection(Section):
    precision: Literal["fp32", "tf32", "bf16"] = setting(
        "fp32",
        "precision of the networks' products in training (sn_pcfg in bf16: of all they do); evaluation is in fp32",
    )
    cuda_graphs: Switch = setting(
        True, "replay the networks' launches instead of repeating them (one process on a GPU)"
    )


class EmissionSection(Section):
    shards: Annotated[int | str, PlainValidator(_shards)] = setting(
        "auto", "processes that share the emission's normalisers; auto: all"
    )


class ScheduleSection(Section):
    kind: Literal["constant", "linear", "cosine"] = setting("constant", "how the learning rate falls")
    warmup_steps: int = setting(0, "steps in which the learning rate rises from 0", ge=0)


class OptimizerSection(Section):
    name: Literal["adam", "adamw"] = setting("adam", "adamw decouples weight decay from the gradient")
    learning_rate: float = setting(2e-3, "highest learning rate", gt=0, le=LARGEST)
    betas: list[Fraction] = setting([0.75, 0.999], "Adam's decay of both moments", min_length=2, max_length=2)
    weight_decay: float = setting(0.0, "with adam a penalty in the gradient, with adamw decoupled", ge=0, le=LARGEST)
    clip: float | None = setting(
        3.0, "largest gradient norm, on the scale of loss.normalise; null: no clipping", gt=0, le=LARGEST
    )
    schedule: ScheduleSection = setting(ScheduleSection, "of the learning rate")


class LossSection(Section):
    normalise: Literal["sentences", "tokens"] = setting("sentences", "what the summed loss is divided by")


class TrainingSection(Section):
    epochs: Count = setting(30, "most passes over the training text")
    max_steps: Count | None = setting(None, "most optimizer steps; null: as the epochs need")
    log_every: Count = setting(50, "steps between two lines of metrics")


class EvaluationSection(Section):
    every_epochs: float | None = setting(1.0, "epochs (or a fraction of one) between two evaluations; null: off", gt=0)
    every_steps: Count | None = setting(None, "also evaluate every so many steps; null: off")
    patience: Count | None = setting(5, "evaluations without improvement before training stops; null: never")
    precision: Precision = setting("fp32", "precision of the inside algorithm in evaluation")
    batch_cost: Count = setting(25600, "budget of words squared of an evaluation batch")
    max_length: Count | None = setting(250, "longer validation sentences (words or pieces) are left out; null: none")
    trees: str | None = setting(
        None, "gold trees in Penn brackets, whose S-F1 is logged at every evaluation (punctuation is left out)",
        min_length=1,
    )  # fmt: skip
    select: Literal["likelihood", "trees"] = setting(
        "likelihood", "what makes a checkpoint the best: the validation text's likelihood, or S-F1"
    )

    @check(mode="after")
    def _trees_to_select_by(self) -> EvaluationSection:
        if self.select == "trees" and self.trees is None:
            raise ValueError("select trees needs gold trees: give evaluation.trees")
        return self


class EmaSection(Section):
    decay: float | None = setting(None, "decay of the moving average of the weights; null: off", gt=0, lt=1)


class CheckpointSection(Section):
    every_steps: Count | None = setting(None, "save every so many steps, besides at every evaluation; null: off")
    keep_last: Count = setting(2, "newest checkpoints that are kept, besides the best")
    keep_best: int = setting(1, "checkpoints of the best evaluations that are kept; the first is `best`", ge=1, le=100)


class TrackingSection(Section):
    mlflow: Switch = setting(True, "log to MLflow besides metrics.jsonl")


class EngineSection(Section):
    """The launcher chooses the engine; what is asked for here is checked against what it really gave."""

    expect: Literal["any", "single", "ddp", "deepspeed"] = setting("any", "engine without which the run is refused")
    zero_stage: Literal[1, 2, 3] | None = setting(None, "ZeRO stage without which the run is refused; null: any")
    world_size: Count | None = setting(None, "processes without which the run is refused; null: any number")
    backend: Literal["auto", "nccl", "gloo"] = setting("auto", "of collectives; with gloo, processes may share a GPU")
    timeout_seconds: Count = setting(600, "seconds after which a process that does not answer is given up")


class Settings(Section):
    name: Name = setting("run", "of the run and its folder; by default that of the config file")
    runs_folder: str = setting("runs", "folder of the run folders", min_length=1)
    seed: int = setting(0, "seed of all randomness", ge=0, lt=2**63)
    resume: Resume = setting(False, "false, auto (continue if the run exists) or the path of a checkpoint")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "where to compute")
    threads: int | None = setting(
        None, "CPU threads of a process; null: the cores of the machine, shared out", ge=1, le=4096
    )
    data: DataSection = setting(..., "text")
    batch: BatchSection = setting(BatchSection, "how sentences are put together")
    model: ModelSection = setting(..., "the grammar")
    inside: InsideSection = setting(InsideSection, "the inside algorithm")
    networks: NetworksSection = setting(NetworksSection, "the parameter networks")
    emission: EmissionSection = setting(EmissionSection, "the emission matrix")
    optimizer: OptimizerSection = setting(OptimizerSection, "the optimizer")
    loss: LossSection = setting(LossSection, "the loss")
    training: TrainingSection = setting(TrainingSection, "how long to train")
    evaluation: EvaluationSection = setting(EvaluationSection, "on the validation text")
    ema: EmaSection = setting(EmaSection, "moving average of the weights")
    checkpoint: CheckpointSection = setting(CheckpointSection, "what is kept")
    tracking: TrackingSection = setting(TrackingSection, "where metrics go")
    engine: EngineSection = setting(EngineSection, "how processes work together")

    @check(mode="after")
    def _backend_has_precision(self) -> Settings:
        for precision in (self.inside.precision, self.evaluation.precision):
            if self.inside.backend == "reference" and precision not in ("fp64", "fp32"):
                raise ValueError(f"inside.backend reference computes in fp64 or fp32, not {precision}")
            if self.inside.backend == "triton" and precision == "fp64":
                raise ValueError("inside.backend triton computes in fp32, tf32 or bf16, not fp64")
        return self
