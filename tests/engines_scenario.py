"""What test_engines.py runs on every rank: python engines_scenario.py FOLDER ENGINE... (see there)."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from lm_pcfg.distributed.engine import Engine
from lm_pcfg.grammar.grammar import Grammar
from lm_pcfg.settings_file import load_settings
from lm_pcfg.storage import checkpoint, state_file
from lm_pcfg.storage.metrics_file import read_metrics
from lm_pcfg.training import evaluation, loop, resumption

BATCHES_A_STEP = 4  # of all ranks together, so that every world size makes the same steps
STEPS, SAVED = 30, 15


def use_engine(name: str) -> None:
    """What `accelerate launch` would have said: one process start serves several engines."""
    AcceleratorState._reset_state(True)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = str(name.startswith("zero")).lower()
    if name.startswith("zero"):
        os.environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = name[-1]
        if os.environ.get("WORLD_SIZE") == "4":  # 995 parameters are several buckets
            zero = {"stage": int(name[-1]), "reduce_bucket_size": 300}
            file = Path(tempfile.mkdtemp()) / "deepspeed.json"
            file.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}))
            os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(file)


def settings_of(folder: Path, name: str, *overrides: str):
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    accumulate = f"batch.accumulate={max(1, BATCHES_A_STEP // world_size)}"
    return load_settings(folder / "small.yaml", [f"name={name}", accumulate, *overrides])


def expectations(engine: str) -> list[str]:
    asked = {"single": "single", "ddp": "ddp"}.get(engine, "deepspeed")
    stage = [f"engine.zero_stage={engine[-1]}"] if asked == "deepspeed" else []
    return [f"engine.expect={asked}", f"engine.world_size={os.environ.get('WORLD_SIZE', '1')}", *stage]


def train_and_resume(folder: Path, engine: str) -> None:
    """30 steps; then steps 16 to 30 again, from the checkpoint of whoever trained last at another world size."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    name = f"{engine}-{world_size}"
    overrides = expectations(engine)
    loop.train(settings_of(folder, name, *overrides))
    others = sorted(path.name for path in (folder / "runs").iterdir() if not path.name.endswith(("again", world_size)))
    if others:
        other = others[hash_of(engine) % len(others)]
        source = folder / "runs" / other / "checkpoints" / f"step-{SAVED:08d}"
        loop.train(settings_of(folder, f"{name}-again", f"resume={source}", *overrides))


def hash_of(engine: str) -> int:
    return sum(engine.encode())


def restores_exactly(folder: Path, engine: str) -> None:
    """Every checkpoint there is, loaded and gathered again: the same bits in weights, average and optimizer state."""
    settings = settings_of(folder, "restored")
    trainer = loop.Steps(settings, Engine(settings))
    for run in sorted((folder / "runs").iterdir()):
        source = run / "checkpoints" / f"step-{SAVED:08d}"
        if not source.is_dir():
            continue
        resumption.restore(trainer, source, same_run=False)
        for file, tensors in trainer.tensors().items():
            saved = load_file(source / f"{file}.safetensors")
            assert saved.keys() == tensors.keys(), (engine, run.name, file, saved.keys() ^ tensors.keys())
            for tensor_name, tensor in saved.items():
                assert torch.equal(tensor, tensors[tensor_name]), (engine, run.name, file, tensor_name)


def skips_together(folder: Path, engine: str) -> None:
    """One rank's loss, then one rank's gradient, is not finite: no rank takes the step, and all go on."""
    settings = settings_of(folder, "skipping")
    trainer = loop.Steps(settings, Engine(settings))
    last_rank = trainer.engine.rank == trainer.engine.world_size - 1
    original = Grammar.log_likelihood_unchecked

    class SpoiltGradient(torch.autograd.Function):
        @staticmethod
        def forward(context, values):
            return values.clone()

        @staticmethod
        def backward(context, gradient):
            return gradient * float("inf")

    def weights():
        return {
            name: tensor.clone() for name, tensor in trainer.learner.gathered(trainer.learner.local_weights()).items()
        }

    for spoil in (lambda values: values + float("nan"), SpoiltGradient.apply):
        before, moments = weights(), trainer.learner.optimizer_tensors()
        if last_rank:

            def spoilt(*arguments, spoil=spoil, **options):
                log_z, trusted = original(*arguments, **options)
                return spoil(log_z), trusted

            Grammar.log_likelihood_unchecked = spoilt
        assert not trainer.step(trainer.stream.next_step()), engine
        Grammar.log_likelihood_unchecked = original
        after, still = weights(), trainer.learner.optimizer_tensors()
        assert all(torch.equal(before[name], after[name]) for name in before), engine
        assert all(torch.equal(moments[name], still[name]) for name in moments), engine
        assert trainer.step(trainer.stream.next_step()), engine
        changed = weights()
        assert not all(torch.equal(after[name], changed[name]) for name in after), engine
        assert all(torch.isfinite(tensor).all() for tensor in changed.values()), engine
    # Every rank has counted the same.
    counts = trainer.engine.all_gather((trainer.position.step, trainer.position.skipped))
    assert set(counts) == {(4, 2)}, counts


def evaluates_alike(folder: Path, engine: str) -> None:
    """The evaluation of one checkpoint, to compare bit for bit."""
    settings = settings_of(folder, "evaluated")
    trainer = loop.Steps(settings, Engine(settings))
    source = folder / "runs" / "single-1" / "checkpoints" / f"step-{SAVED:08d}"
    resumption.restore(trainer, source, same_run=False)
    result = loop.evaluate(trainer.skeleton, trainer.evaluated_weights(), trainer.corpora, settings, trainer.engine)
    if trainer.engine.is_main:
        file = folder / f"evaluated-{engine}-{trainer.engine.world_size}.json"
        file.write_text(json.dumps([result.score.nll.hex(), result.score.words, result.score.lines]))


def stops_in_an_evaluation(folder: Path, engine: str) -> None:
    """The last rank alone is asked to, the others hear of it in mid-text; resumed, it ends as the undisturbed run."""
    world_size = os.environ["WORLD_SIZE"]
    whole, stopped = (folder / "runs" / f"{engine}-{world_size}{end}" for end in ("", "-stopped-again"))
    signalled = os.environ["RANK"] == str(int(world_size) - 1)
    original = evaluation.sentence_log_probabilities

    def disturbed(*arguments, on_batch, **how):
        def meanwhile(lines: int) -> None:
            if signalled:
                os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(600):
                time.sleep(0.1)
                on_batch(lines)
            raise AssertionError("not heard in a minute")

        return original(*arguments, on_batch=meanwhile, **how)

    evaluation.sentence_log_probabilities = disturbed
    overrides = [*expectations(engine), "resume=auto"]
    loop.train(settings_of(folder, stopped.name, *overrides))
    evaluation.sentence_log_probabilities = original
    writes = os.environ["RANK"] == "0"
    if writes:
        state = checkpoint.verify(checkpoint.latest(stopped))
        assert (state["step"], state["evaluation_pending"]) == (SAVED, True)
        assert not (stopped / "FINISHED").exists()
    loop.train(settings_of(folder, stopped.name, *overrides))
    if writes:
        assert (stopped / "FINISHED").exists()
        assert evaluations(stopped) == evaluations(whole)


def evaluations(run: Path) -> list[dict]:
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "valid/nll" in line]
    return [{key: value for key, value in line.items() if "time" not in key and "second" not in key} for line in lines]


def opens_all_others(folder: Path) -> None:
    """One process without any engine continues what each of them has saved, to the end."""
    for run in ("ddp-4", "zero1-2", "zero2-4", "zero3-2"):
        source = folder / "runs" / run / "checkpoints" / f"step-{SAVED:08d}"
        loop.train(settings_of(folder, f"single-1-from-{run}", f"resume={source}", *expectations("single")))


def main(folder: Path, engines: list[str]) -> None:
    assert state_file.FORMAT == 1
    if engines == ["last"]:
        opens_all_others(folder)
        restores_exactly(folder, "single")
        return
    for engine in engines:
        use_engine(engine)
        train_and_resume(folder, engine)
    for engine in engines:
        use_engine(engine)
        restores_exactly(folder, engine)
        skips_together(folder, engine)
        evaluates_alike(folder, engine)
        if os.environ.get("WORLD_SIZE", "1") == "2" and engine in ("ddp", "zero3"):
            stops_in_an_evaluation(folder, engine)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
