"""Check what a run, a checkpoint, an export or a prepared corpus is made of, and say what is damaged.

docs/training.md has what each file is compared with, and what can only be read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lm_pcfg.corpus.pieces import load_vocabulary
from lm_pcfg.corpus.shards import prepared
from lm_pcfg.corpus.shards.manifest import MANIFEST, Manifest
from lm_pcfg.corpus.shards.shapes import parse_json
from lm_pcfg.corpus.text import read_bounded
from lm_pcfg.errors import UserError
from lm_pcfg.inference.trained import read_stored
from lm_pcfg.settings_file import load_settings
from lm_pcfg.storage import checkpoint, exported, notes, run_folder
from lm_pcfg.storage.metrics_file import check_metrics
from lm_pcfg.training.documents import open_settings, open_vocabulary
from lm_pcfg.yaml_text import read_yaml

_SET_ASIDE = re.compile(r"metrics-\d+\.jsonl")  # by a run that began again


@dataclass
class Findings:
    folder: str
    counts: dict[str, int] = field(default_factory=dict)  # what was checked, by its name
    damaged: list[str] = field(default_factory=list)  # a line each


def verify(folder: Path, on_checkpoint: Callable[[], None] = lambda: None) -> Findings:
    """Check a folder of any kind; on_checkpoint is called after each checkpoint."""
    if prepared.is_prepared(folder):
        return _verify_corpus(folder)
    if exported.is_export(folder):
        found = Findings(str(folder), {"exports": 1})
        _try(lambda: read_stored(folder), found)
        return found
    if (folder / checkpoint.STATE).exists():
        found = Findings(str(folder), {"checkpoints": 1})
        _verify_checkpoint(folder, found, of_run=False)
        return found
    if not any((folder / part).exists() for part in (checkpoint.CONFIG, "checkpoints", "metrics.jsonl")):
        raise UserError(f"{folder} is neither a run, a checkpoint nor a prepared corpus; give one like runs/tiny")
    return _verify_run(folder, on_checkpoint)


def _verify_corpus(folder: Path) -> Findings:
    found = Findings(str(folder), damaged=prepared.verify_all(folder))
    if not found.damaged:
        manifest = prepared.read_manifest(folder)
        found.counts = {"shards": len(manifest.shards)}
        if problem := _other_plan(manifest):
            found.damaged.append(problem)
    return found


def _other_plan(manifest: Manifest) -> str | None:
    """Say that prepare.json tells of another corpus than the manifest, which has a checksum; None: it does not.

    What is in both is compared: manifests have no sizes and times of inputs, and those of the first versions less.
    """
    file, content = manifest.folder / prepared.PLAN, manifest.content
    plan = parse_json(read_bounded(file))
    expected = {
        "options": content.get("options", plan["options"]),
        "vocabulary": content["vocabulary"]["sha256"] if "vocabulary" in plan else None,
        "inputs": _names(content.get("inputs", plan["inputs"])),
        "numbers": list(range(len(plan["inputs"]))),
    }
    found = {
        "options": plan["options"],
        "vocabulary": plan.get("vocabulary"),
        "inputs": _names(plan["inputs"]),
        "numbers": [item.get("number") for item in plan["inputs"]],
    }
    return None if found == expected else f"{file}: is not what {MANIFEST} says that the corpus was made of"


def _names(inputs: Any) -> list[Any]:
    items = inputs if isinstance(inputs, list) else [inputs]
    return [(item.get("name"), item.get("split")) if isinstance(item, dict) else item for item in items]


def _verify_run(run: Path, on_checkpoint: Callable[[], None]) -> Findings:
    found = Findings(str(run), {"checkpoints": 0})
    newest: dict[str, Any] | None = None  # the state of the newest whole checkpoint
    for folder in reversed(checkpoint.list_checkpoints(run)):
        state = _verify_checkpoint(folder, found, of_run=newest is None)
        newest = newest or state
        found.counts["checkpoints"] += 1
        on_checkpoint()
    if newest is None:
        if not found.counts["checkpoints"] and run_folder.had_checkpoint(run):
            found.damaged.append(run_folder.none_left(run))
        elif not found.counts["checkpoints"] and notes.read_note(run / notes.STARTED_FROM):
            _try(lambda: run_folder.started_from(run), found)  # a run with checkpoints of its own does without
        _try(lambda: load_settings(run / checkpoint.CONFIG), found)
        _try(lambda: load_vocabulary(run / checkpoint.VOCABULARY), found)
    for earlier in run_folder.earlier_configs(run):
        _try(partial(read_yaml, earlier), found)  # not by today's settings: another version may have written it
    lost = notes.lost_checkpoint(run) if found.counts["checkpoints"] else None
    found.damaged += filter(None, [checkpoint.dangling_best(run), lost])
    if checkpoint.best(run) == run / "best":  # a folder, made by a copy that followed the link
        _verify_checkpoint(run / "best", found, of_run=False)
        found.counts["checkpoints"] += 1
    found.counts["metric_lines"], problems = check_metrics(run / "metrics.jsonl", (newest or {}).get("metrics"))
    for beside in sorted(entry for entry in run.iterdir() if _SET_ASIDE.fullmatch(entry.name)):
        lines, others = check_metrics(beside)
        found.counts["metric_lines"] += lines
        problems += others
    found.damaged += [*problems, *notes.damaged_notes(run)]
    return found


def _verify_checkpoint(folder: Path, found: Findings, *, of_run: bool) -> dict[str, Any] | None:
    """Check a checkpoint, and (of_run) whether config.yaml and vocab/ of its run say the same; return its state."""

    def tell(problem: str) -> None:
        if of_run:
            found.damaged.append(problem.removesuffix("; the checkpoint's own is used"))

    def check() -> dict[str, Any]:
        state = checkpoint.verify(folder)
        open_settings(folder, tell)
        if open_vocabulary(folder, tell).hash != state.get("vocabulary_hash"):
            raise UserError(f"{folder} was trained with another vocabulary than it has")
        return state

    return _try(check, found, unless=lambda: not folder.exists())  # a training has deleted it meanwhile


def _try(action: Callable[[], Any], found: Findings, unless: Callable[[], bool] = lambda: False) -> Any:
    try:
        return action()
    except (UserError, OSError) as error:
        if not unless():
            found.damaged.append(str(error))
        return None
