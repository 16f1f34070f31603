"""The families of models by name. A family is one file here, and one line in `BUILT_IN`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lm_pcfg.grammar.families.shared.sections import SECTIONS
from lm_pcfg.settings import ModelSection

if TYPE_CHECKING:  # it imports torch
    from lm_pcfg.grammar.families.shared.family import Family

#: Family -> the file that has it, as a variable `FAMILY`.
BUILT_IN = {
    "c_pcfg": "lm_pcfg.grammar.families.c_pcfg",
    "n_pcfg": "lm_pcfg.grammar.families.n_pcfg",
    "rank_pcfg": "lm_pcfg.grammar.families.rank_pcfg",
    "sc_pcfg": "lm_pcfg.grammar.families.sc_pcfg",
    "sn_pcfg": "lm_pcfg.grammar.families.sn_pcfg",
    "tables": "lm_pcfg.grammar.families.tables",
    "nhmm": "lm_pcfg.grammar.families.nhmm",
    "lhmm": "lm_pcfg.grammar.families.lhmm",
    "rank_hmm": "lm_pcfg.grammar.families.rank_hmm",
    "tn_pcfg": "lm_pcfg.grammar.families.tn_pcfg",
}
_registered: dict[str, Family] = {}


def register(family: Family) -> None:
    """Make a family known by its name in this process."""
    _registered[family.name] = family


def names() -> list[str]:
    """Return the names that `model.family` may have."""
    return sorted(BUILT_IN.keys() | _registered.keys())


def get(name: str) -> Family:
    """Return a family; its file is imported when it is first asked for."""
    if name not in _registered:
        register(import_module(BUILT_IN[name]).FAMILY)
    return _registered[name]


def section_of(name: str) -> type[ModelSection]:
    """Return the settings of a family, without importing its file where they are in sections.py."""
    return SECTIONS[name] if name in SECTIONS and name not in _registered else get(name).section


def family_of(model: ModelSection) -> Family:
    """Return the family of a model's settings."""
    return get(model.family)
