"""`make mutants`: change one thing in the code, run the tests that concern it, and name the changes that none notices.

Cosmic Ray finds the places and makes the changes; here is which modules, which changes, which tests, and the sample. A
place is drawn, then one of its mutants, by a seed: a larger sample has the smaller one in it. Results are kept in
build/mutants/session.sqlite (`cr-report` reads it): a call that was interrupted goes on, and after a change of the
tests survivors are tried again. Copies of the working tree are changed, never the tree itself.

A survivor needs a test, or a line in equivalent_mutants.toml that says why no test could notice.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import multiprocessing
import os
import random
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path

import cosmic_ray.plugins
import parso.python.tree
from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_and_test, mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.work_db import WorkDB
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkItem, WorkResult

import watchdog

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "mutants"
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")
SESSION = "session.sqlite"

#: The tests of each module, quick ones first: the first that fails ends a run. Modules that need a GPU are not here.
STREAMS = "batches batch_stream shard_stream text shards prepare prepare_layouts"
TRAINING = "training resumed_training skipped_updates"
STORAGE = f"durability checkpoint checkpoint_choice checkpoint_optimizer metrics_file saving engine_choice {TRAINING}"
MODULES = {
    "kernels/flash_inside/brackets.py": "brackets bracketed_training",
    **{
        f"kernels/flash_inside/dense/{name}.py": "dense per_sentence_rules dense_family"
        for name in ("interface", "reference", "scaled", "tables")
    },
    "kernels/flash_inside/forward.py": "forward hmm",
    "kernels/flash_inside/interface.py": "inside viterbi mbr sampling range brackets long_lines",
    "kernels/flash_inside/mbr.py": "mbr",
    "kernels/flash_inside/packing.py": "forward inside viterbi mbr sampling per_sentence_rules prefixes long_lines",
    "kernels/flash_inside/precision.py": "inside range grammar",
    "kernels/flash_inside/recomputation.py": "inside range per_sentence_rules long_lines",
    "kernels/flash_inside/reference.py": "viterbi inside range",
    "kernels/flash_inside/rules.py": "inside viterbi sampling range factored_rules",
    "kernels/flash_inside/sampling.py": "corners sampling",
    "kernels/flash_inside/scaled/chart.py": "inside mbr range per_sentence_rules factored_rules brackets long_lines",
    "kernels/flash_inside/scaled/passes.py": "inside mbr range per_sentence_rules factored_rules brackets long_lines",
    "kernels/flash_inside/trees.py": "corners viterbi sampling per_sentence_rules long_lines",
    "lm_pcfg/corpus/batches.py": STREAMS,
    "lm_pcfg/corpus/lengths.py": STREAMS,
    "lm_pcfg/corpus/sentences.py": STREAMS,
    "lm_pcfg/corpus/stream.py": STREAMS,
    "lm_pcfg/distributed/collectives.py": f"engine_choice emission_shards zero {TRAINING}",
    "lm_pcfg/distributed/learner.py": f"zero {TRAINING} captured",
    "lm_pcfg/distributed/zero.py": "zero engine_choice",
    **{f"lm_pcfg/storage/{path.name}": STORAGE for path in (ROOT / "lm_pcfg" / "storage").glob("[a-z]*.py")},
    "lm_pcfg/storage/checkpoint.py": (
        "durability checkpoint_choice checkpoint checkpoint_documents checkpoint_optimizer saving run_folder"
    ),
    "lm_pcfg/storage/durable.py": "durability checkpoint metrics_file vocabulary run_folder",
    "lm_pcfg/storage/exported.py": "export export_elsewhere",
    "lm_pcfg/storage/hashed_folder.py": "durability checkpoint checkpoint_documents checkpoint_optimizer saving",
    "lm_pcfg/storage/hub.py": "export_elsewhere export",
    "lm_pcfg/storage/metrics_file.py": f"metrics_file saving verify readers {TRAINING}",
    "lm_pcfg/storage/notes.py": f"verify run_folder {STORAGE}",
    "lm_pcfg/storage/run_folder.py": f"checkpoint_choice run_folder failed_starts engine_choice resumption {TRAINING}",
    "lm_pcfg/storage/state_file.py": f"hostile_state {STORAGE}",
    "lm_pcfg/storage/saving.py": f"saving {TRAINING}",
}

#: Of all pairs of operators those that a person could have confused. Most others are a TypeError at once.
_SWAPS = {
    "BinaryOperator": "Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Div FloorDiv_Mul Mod_FloorDiv Pow_Mul BitAnd_BitOr "
    "BitOr_BitAnd BitXor_BitAnd LShift_RShift RShift_LShift",
    "ComparisonOperator": "Eq_NotEq NotEq_Eq Lt_LtE Lt_GtE LtE_Lt LtE_Gt Gt_GtE Gt_LtE GtE_Gt GtE_Lt Is_IsNot IsNot_Is",
    "UnaryOperator": "Delete_Not Delete_USub Delete_Invert",
}
OPERATORS = [
    *(f"Replace{kind}_{swap}" for kind, swaps in _SWAPS.items() for swap in swaps.split()),
    "AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd",
    "ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ExceptionReplacer", "NumberReplacer", "RemoveDecorator",
    "ZeroIterationForLoop",
]  # fmt: skip


class RemoveStatement(Operator):
    """A call whose value nobody takes, or `x += ...`, becomes `pass`. Cosmic Ray has none of this kind."""

    def mutation_positions(self, node):
        is_call = node.type == "atom_expr" and node.children[-1].type == "trailer"
        is_addition = node.type == "expr_stmt" and getattr(node.children[1], "value", "").endswith("=")
        is_addition = is_addition and node.children[1].value != "="
        if (is_call or is_addition) and node.parent.type == "simple_stmt":
            yield node.start_pos, node.end_pos

    def mutate(self, node, index):
        return parso.python.tree.Keyword("pass", node.start_pos, prefix=node.get_first_leaf().prefix)

    @classmethod
    def examples(cls):
        return ()


_core = cosmic_ray.plugins.OPERATOR_PROVIDERS["core"]
cosmic_ray.plugins.OPERATOR_PROVIDERS.clear()
cosmic_ray.plugins.OPERATOR_PROVIDERS |= {
    "core": {name: _core[name] for name in OPERATORS},
    "lm_pcfg": {"RemoveStatement": RemoveStatement},
}


# ---- which mutants --------------------------------------------------------------------------------------------------


def drawn(seed: int, sample: int, only: str) -> list[WorkItem]:
    """Draw places, and one mutant of each; the first ones of a larger sample are those of a smaller one."""
    everything = WorkDB(":memory:", WorkDB.Mode.create)
    init([Path(name) for name in MODULES], everything, {})
    places: dict[tuple, list[MutationSpec]] = {}
    annotations = {name: list(annotation_ranges(Path(name).read_text(encoding="utf-8"))) for name in MODULES}
    for item in everything.work_items:
        (spec,) = item.mutations
        inside = any(start <= spec.start_pos < end for start, end in annotations[str(spec.module_path)])
        if not inside:
            places.setdefault((str(spec.module_path), spec.start_pos, spec.end_pos), []).append(spec)
    generator = random.Random(seed)
    shuffled = sorted(places)
    generator.shuffle(shuffled)
    chosen = []
    for place in shuffled:
        spec = generator.choice(sorted(places[place], key=lambda spec: (spec.operator_name, spec.occurrence)))
        name = f"{spec.module_path} {spec.operator_name} {spec.occurrence}"
        if only in name:
            chosen.append(WorkItem.single(hashlib.sha256(name.encode()).hexdigest()[:12], spec))
    return chosen[:sample]


def annotation_ranges(source: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield where type annotations are: nothing evaluates them."""
    for node in ast.walk(ast.parse(source)):
        for name in ("annotation", "returns"):
            if isinstance(part := getattr(node, name, None), ast.expr):
                yield (part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)


def described(spec: MutationSpec) -> tuple[str, str]:
    """Return the changed lines before and after, without their indentation."""
    before = Path(spec.module_path).read_text(encoding="utf-8")
    operator = cosmic_ray.plugins.get_operator(spec.operator_name)(**spec.operator_args)
    old, new = before.splitlines(), (mutate_code(before, operator, spec.occurrence) or "").splitlines()
    while old and new and old[0] == new[0]:
        del old[0], new[0]
    while old and new and old[-1] == new[-1]:
        del old[-1], new[-1]
    return " ".join(" ".join(old).split()), " ".join(" ".join(new).split())


def equivalent(module: str, old: str, new: str) -> bool:
    """Whether the list has this mutant. An entry without a module is of a part of a line, in any module."""
    for entry in listed_as_equivalent():
        line, becomes = entry["line"], entry["becomes"]
        if entry.get("module") == module and (line, becomes) == (old, new):
            return True
        if "module" not in entry:
            starts = [start for start in range(len(old)) if old.startswith(line, start)]
            if new in [old[:start] + becomes + old[start + len(line) :] for start in starts]:
                return True
    return False


@cache
def listed_as_equivalent() -> list[dict[str, str]]:
    return tomllib.loads(EQUIVALENT.read_text(encoding="utf-8"))["mutant"]


def tell_outdated_entries() -> None:
    """An entry whose line has changed has to be judged again."""
    for entry in listed_as_equivalent():
        modules = [entry["module"]] if "module" in entry else list(MODULES)
        sources = [" ".join((ROOT / name).read_text(encoding="utf-8").split()) for name in modules]
        if not any(entry["line"] in source for source in sources):
            print(f"{EQUIVALENT.name}: no such line any more: {entry['line']}")


# ---- running them ---------------------------------------------------------------------------------------------------


def copy_tree(target: Path) -> None:
    """Copy what git would commit."""
    shutil.rmtree(target, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def enter(numbers: multiprocessing.Queue) -> None:
    """Take a copy of the tree for this process, and make it the one that tests import from."""
    tree = FOLDER / f"tree-{numbers.get()}"
    copy_tree(tree)
    temporary = tree / "build" / "tmp"
    temporary.mkdir(parents=True)
    os.chdir(tree)
    paths = [str(tree), str(tree / "kernels"), os.environ.get("PYTHONPATH", "")]
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)), "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip


def command(names: str) -> str:
    files = [f"tests/test_{name}.py" for name in names.split()]
    marks = "not long and not chaos and not kernels and not gpu"
    options = ["-q", "-x", "--tb=short", "-p", "no:cacheprovider", "-m", marks]
    return shlex.join([sys.executable, "-m", "pytest", *options, *files])


def baseline(name: str) -> tuple[str, float, str]:
    """Run tests without a mutant; return their name, seconds, and what was said if they failed."""
    began = time.monotonic()
    result = subprocess.run(shlex.split(command(name)), capture_output=True, text=True)
    return name, time.monotonic() - began, result.stdout[-3000:] if result.returncode else ""


def run(item: WorkItem, timeout: float) -> tuple[WorkItem, WorkResult, float]:
    began = time.monotonic()
    result = mutate_and_test(item.mutations, command(tests_of(item)), timeout)
    return item, result, time.monotonic() - began


def tests_of(item: WorkItem) -> str:
    return MODULES[str(item.mutations[0].module_path)]


def seconds_of(pool: ProcessPoolExecutor, names: set[str]) -> dict[str, float]:
    """Return what each file of tests takes without a mutant; none may fail."""
    file = FOLDER / "seconds.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    hashes = {name: hash_of([ROOT / "tests" / f"test_{name}.py"]) for name in sorted(names)}
    for name, seconds, failure in pool.map(baseline, [n for n in hashes if known.get(n, [0])[0] != hashes[n]]):
        if failure:
            pool.shutdown(cancel_futures=True)
            sys.exit(f"tests/test_{name}.py fails without a mutant:\n{failure}")
        known[name] = [hashes[name], seconds]
        print(f"{seconds:6.0f} s  tests/test_{name}.py without a mutant", flush=True)
        file.write_text(json.dumps(known))
    return {name: known[name][1] for name in names}


# ---- results --------------------------------------------------------------------------------------------------------


def hash_of(paths: list[Path]) -> str:
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in sorted(paths))).hexdigest()


def open_session(items: list[WorkItem]) -> WorkDB:
    """Open the results, without those of modules that have changed since."""
    file = FOLDER / "modules.json"
    now = {name: hash_of([ROOT / name]) for name in MODULES}
    before = json.loads(file.read_text()) if file.exists() else {}
    session = WorkDB(FOLDER / SESSION, WorkDB.Mode.create)
    kept = [item for item in session.work_items if before.get(str(item.mutations[0].module_path)) ==
            now.get(str(item.mutations[0].module_path))]  # fmt: skip
    results = dict(session.results)
    session.clear()
    ids = {item.job_id for item in kept}
    session.add_work_items([*kept, *(item for item in items if item.job_id not in ids)])
    for job, result in results.items():
        if job in ids:
            session.set_result(job, result)
    file.write_text(json.dumps(now))
    return session


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sample", type=int, default=60, help="so many mutants; 0: all of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="mutants with this in the name of their module or operator")
    parser.add_argument("--list", action="store_true", help="show the mutants of the sample, run nothing")
    options = parser.parse_args()
    os.chdir(ROOT)
    FOLDER.mkdir(parents=True, exist_ok=True)
    items = drawn(options.seed, options.sample or 10**9, options.only)
    lines = {item.job_id: (str(item.mutations[0].module_path), *described(item.mutations[0])) for item in items}
    if options.list:
        for item in items:
            print(label(item, lines))
        return
    tell_outdated_entries()
    alike = {job for job, line in lines.items() if equivalent(*line)}
    session = open_session(items)
    tests = hash_of([*ROOT.glob("tests/*.py")])
    marker = FOLDER / "tests.sha256"
    again = not marker.exists() or marker.read_text() != tests
    results = dict(session.results)
    done = {job for job, result in results.items() if result.is_killed or not again}
    waiting = [item for item in items if item.job_id not in done | alike]
    print(f"{len(items)} mutants, {len(waiting)} of them to be run; {FOLDER / SESSION}", flush=True)
    watchdog.start()
    if waiting:
        context = multiprocessing.get_context("spawn")
        numbers = context.Queue()
        for number in range(options.jobs):
            numbers.put(number)
        with ProcessPoolExecutor(options.jobs, context, enter, (numbers,)) as pool:
            seconds_each = seconds_of(pool, {name for item in waiting for name in tests_of(item).split()})
            futures = [
                pool.submit(run, item, 60 + 3 * sum(seconds_each[name] for name in tests_of(item).split()))
                for item in waiting
            ]
            for number, future in enumerate(as_completed(futures), start=1):
                item, result, seconds = future.result()
                session.set_result(item.job_id, result)
                outcome = outcome_of(result)
                print(f"{number}/{len(waiting)} {seconds:4.0f} s  {outcome}  {label(item, lines)}", flush=True)
    marker.write_text(tests)
    results = dict(session.results)
    counts = Counter("equivalent" if i.job_id in alike else outcome_of(results[i.job_id]) for i in items)
    survivors = [item for item in items if item.job_id not in alike and not results[item.job_id].is_killed]
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    for item in survivors:
        print(f"survived: {label(item, lines)}")
    sys.exit(1 if survivors else 0)


def outcome_of(result: WorkResult) -> str:
    if result.worker_outcome != WorkerOutcome.NORMAL or result.test_outcome == TestOutcome.INCOMPETENT:
        return "not run"
    if not result.is_killed:
        return "SURVIVED"
    return "killed by the time limit" if result.output == "timeout" else "killed"


def label(item: WorkItem, lines: dict[str, tuple[str, str, str]]) -> str:
    (spec,) = item.mutations
    _, old, new = lines[item.job_id]
    return f"{spec.module_path}:{spec.start_pos[0]} {spec.operator_name.partition('/')[2]}\n    - {old}\n    + {new}"


if __name__ == "__main__":
    main()
