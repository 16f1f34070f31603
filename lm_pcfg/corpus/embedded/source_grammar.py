"""The hand-written source grammar: every knob of the embedded language is in this file.

A rule is one line, `Parent -> Child [Child] weight`. Weights are integers, relative to the other rules of the same
parent. A bracket holds the number:

    n, m    `sg` or `pl`
    sg, pl  exactly that number

A variable of the parent stands for every value: one copy of the rule each. A variable that appears only among the
children is drawn with the weights below, independently of everything else. The number of a subject is thus carried to
its verb, whatever stands between them, and that of a determiner across the adjectives to its noun. A preterminal is a
symbol without rules: its words are in lexicon.py.
"""

# -- knobs: after a change, `python -m lm_pcfg.corpus.embedded --checksums` prints the new table for checksums.py
NUMBER_WEIGHTS = {"sg": 3, "pl": 2}

# The word of rank r = 1, 2, ... inside its class has the weight ZIPF_SCALE // (r + ZIPF_SHIFT).
ZIPF_SCALE = 1_000_000
ZIPF_SHIFT = 1

SEED = 20260501
SENTENCES = {"train": 20_000, "valid": 1_000, "test": 2_000}

START = "TOP"

# Recursive: NP, VP, Nom and S. Ambiguous: a PP after an object belongs to the noun or to the verb.
RULES = """
TOP     -> S                    98
TOP     -> Call                  2
S       -> NP[n]     VP[n]      96
S       -> S         AndS        4
AndS    -> And       S           1

NP[n]   -> Det[n]    Nom[n]     74
NP[n]   -> NP[n]     PP         10
NP[n]   -> NP[n]     RC[n]       5
NP[pl]  -> Noun[pl]             22
NP[pl]  -> NP[m]     AndNP       5
AndNP   -> And       NP[m]       1
Nom[n]  -> Noun[n]              72
Nom[n]  -> Adj       Nom[n]     28

PP      -> Prep      NP[m]       1
RC[n]   -> That      VP[n]      65
RC[n]   -> That      Gap        35
Gap     -> NP[m]     VT[m]       1

VP[n]   -> VI[n]                22
VP[n]   -> VT[n]     NP[m]      50
VP[n]   -> VP[n]     PP         16
VP[n]   -> VP[n]     Adv         8
VP[n]   -> SayVP[n]              6
SayVP[n] -> Say[n]   ThatS       1
ThatS   -> That      S           1
"""
