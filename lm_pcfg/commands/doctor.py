"""`lm_pcfg doctor` tells what is wrong with an installation."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer

from lm_pcfg.commands.output import Json
from lm_pcfg.console import progress


def doctor(as_json: Json = False) -> None:
    """Check Python, PyTorch, GPUs, Triton, process groups, DeepSpeed, SLURM, MLflow, the disk and the embedded corpus.

    It says what is wrong and how to mend it, for you or for a bug report: names of machines and users, passwords and
    tokens are left out. The status is 1 if something is broken that a training needs.
    """
    from lm_pcfg.doctor import checks

    with progress("checks", len(checks.CHECKS)) as bar:
        findings = checks.examine(done=lambda name: bar.advance(1, name))
    about, broken = checks.about(), [one.name for one in findings if one.state == "broken"]
    if as_json:
        print(json.dumps({**about, "broken": broken, "checks": [asdict(one) for one in findings]}))
    else:
        print(f"lm_pcfg {about['lm_pcfg']} on {about['system']}, {about['cpus']} CPUs")
        for one in findings:
            print(f"{one.state:<8} {one.name:<16} {one.found}")
            if one.mend:
                print(f"{'':<25} -> {one.mend}")
        print(f"broken: {', '.join(broken)}" if broken else "nothing that a training needs is broken")
    if broken:
        raise typer.Exit(1)
