"""What the figures mean that commands print and runs log: the one source of `lm_pcfg glossary` and docs/glossary.md.

A name stands here as it is printed. Metrics are found by their last part: `valid/ppl` and `train/ppl` under `ppl`.
"""

from __future__ import annotations

import difflib

GLOSSARY: dict[str, dict[str, str]] = {
    "Likelihood": {
        "nll": "total negative log-likelihood of the scored lines, natural logarithm (nats)",
        "ppl": "perplexity: exp(nll / tokens). Per word, or per piece if the vocabulary is of pieces (`unit`); the end "
        "of a line is one token more. Only comparable between models with the same vocabulary",
        "ppl_per_word": "the same likelihood per word between spaces, and end of line: compares models of words and of "
        "pieces, if both know the words. With unknown words it is a lower bound (>=). Without pieces it is `ppl`",
        "ppl_per_word_is_lower_bound": "whether `ppl_per_word` is such a lower bound",
        "ppl_per_byte": "the same per byte of the text, an end of line is one byte. With unknown words it is a lower "
        "bound (>=): to write out a word costs more than the one <unk> that was predicted",
        "ppl_per_byte_is_lower_bound": "whether `ppl_per_byte` is such a lower bound",
        "bits_per_character": "the same likelihood in bits (base 2) a character, an end of line is one character; with "
        "unknown words a lower bound (>=), too",
        "bits_per_character_is_lower_bound": "whether `bits_per_character` is such a lower bound",
        "ppl_per_word_at_least": "in MLflow: `ppl_per_word` where it is a lower bound; `unknown_share` is beside it",
        "ppl_per_byte_at_least": "in MLflow: the same of `ppl_per_byte`",
        "ppl_words": "exp(nll / words): ends of lines have their cost but are not counted. Always above `ppl_per_word`",
        "ppl_is": "says that `ppl` of a compound model is an upper bound",
        "ppl_at_most_elbo": "upper bound on the perplexity of a compound model, by the evidence lower bound; `_se` is "
        "its standard error",
        "ppl_at_most_importance_weighted": "a lower upper bound, by importance weighting; it falls with more `samples`",
        "samples": "latent vectors that were drawn for each line, for these bounds",
        "best_possible_ppl": "perplexity of the grammar that the embedded corpus was drawn from: none can be lower",
        "unigram_ppl": "perplexity of the model of word frequencies alone",
        "kl": "compound models: mean divergence of the encoder's distribution from N(0, I), nats a sentence. Near 0 "
        "the model has learnt to do without its latent vector",
        "loss": "what training minimises: negative log-likelihood per sentence, or per token (loss.normalise)",
        "nll_per_sentence": "the loss of the first step, nats a sentence",
        "mix": "of several checkpoints, what is averaged: their probabilities of `sentences`, or those of `words` (or "
        "pieces) given the ones before",
        "recomputed": "sentences that left the range of the number format and were computed again, exactly",
        "impossible": "sentences of probability 0; they are in no sum",
        "precision": "number format of the inside algorithm; of `evaluate`: share of the predicted spans that are gold "
        "ones, in percent",
    },
    "Text": {
        "unit": "what the vocabulary is of: words between spaces, or pieces of words (SentencePiece). Lengths, "
        "`max_length`, `ppl` and speeds count these",
        "words": "words between spaces; in metrics and dry runs: units of the vocabulary",
        "pieces": "units of the vocabulary: pieces, or words if it is of words",
        "bytes": "bytes of the words in UTF-8, with a space between two",
        "characters": "characters (code points) of the same",
        "lines": "lines that were scored",
        "tokens": "units of the vocabulary plus lines: every line also predicts its end",
        "skipped": "lines without a score: too long, too short, or of probability 0. In training: updates left out "
        "because loss or gradient were not finite",
        "skipped_lines": "sentences of probability 0, which are in no sum",
        "unknown_words": "words (or pieces) that the vocabulary does not have. The model predicts <unk> for each, "
        "which is easier than the word: the more unknown words, the lower the perplexity",
        "unknown_share": "their share of the words (or pieces). From 5 % on there is a warning",
        "valid_unknown_share": "the same of the validation text; not known of a prepared one that has <unk>",
        "training_unknown_share": "the same of the training text; the <unk> written in it count here",
        "literal_unknown": "<unk> that are written in the text, as in the Penn Treebank's. They are predicted like "
        "words, and are not in `unknown_words`. Of vocabularies of words: pieces spell <unk> like any other text, so "
        "with them it is 0",
        "vocabulary": "types that the model knows: words or pieces, with <unk>, and with <eos> where ends of lines are "
        "explicit (model.eos)",
        "types": "the same",
        "vocabulary_hash": "sha256 of the vocabulary: the same hash encodes texts alike",
        "order": "length of the longest n-gram",
        "blank": "lines without a word",
        "too_long": "lines of more than data.max_length units",
        "one_word": "lines of one word, where the model gives none a probability (model.root)",
        "unreadable_lines": "lines that are not UTF-8 or not JSON",
        "bad_shards": "files that could not be read (data.on_error)",
        "lost_lines": "lines of files that went bad since the run began",
    },
    "Grammar": {
        "spectral_radius": "growth of derivations: largest eigenvalue of the expected nonterminal children of each "
        "nonterminal. Below 1 every derivation ends",
        "subcritical": "whether this radius is below 1",
        "mass_of_finite_strings": "probability that a derivation ends, 1 if subcritical; the rest is lost to endless "
        "ones, and makes the perplexity higher",
        "mass": "the same",
        "expected_length": "mean number of words of a sentence of the grammar; infinite unless it is subcritical",
        "derivation_entropy": "entropy of a derivation with its words, nats, at least that of a sentence; infinite "
        "unless the grammar is subcritical",
        "entropy/root": "entropy of the first symbol, nats",
        "entropy/left": "mean entropy of the left child of a nonterminal, nats; `right` likewise. Entropies that stay "
        "at their highest say that symbols remain alike",
        "entropy/right": "that of the right child",
        "entropy/pairs": "that of both children together, of families with rules over pairs",
        "entropy/emission": "mean entropy of the words of a preterminal, nats",
        "longest_feature": "length of the longest vector that is multiplied with those of words: below 100 in stable "
        "trainings that were looked at, 1e3 to 1e7 in those that had exploded",
        "entropy/start": "hidden Markov models: entropy of the first state, nats",
        "entropy/transition": "hidden Markov models: mean entropy of the next state, nats",
        "effective_nonterminals": "exp(entropy) of how often nonterminals are children: so many equally frequent ones "
        "would be as varied",
        "effective_preterminals": "the same of preterminals",
        "effective_states": "the same of the states of a hidden Markov model",
        "nonterminals": "symbols that have two children each (`N` in `report`); preterminals have a word",
        "parameters": "numbers that training learns",
    },
    "Trees": {
        "s_f1": "S-F1: unlabelled F1 of spans, mean over sentences, in percent. Spans of one word and of the whole "
        "sentence do not count",
        "corpus_f1": "F1 over the spans of all sentences together, in percent",
        "recall": "share of the gold spans of a label that the trees have, in percent",
        "hits": "spans that both trees have",
        "gold": "spans of the gold trees",
        "predicted": "spans of the predicted trees",
        "by_label": "recall for each label of the gold trees",
        "by_length": "S-F1 by the number of words of a sentence",
        "without_tree": "sentences that have no tree because their probability is 0",
        "baselines": "trees without a parser on the same file; `best binary` is the most that binary trees can reach",
        "sentences": "sentences that were compared; of a dry run: those of the most expensive step",
    },
    "Runs": {
        "weights": "raw, or ema: the moving average of the weights (ema.decay)",
        "step": "optimizer steps made",
        "steps": "the same",
        "epoch": "passes over the training text that are done",
        "epochs": "passes that were begun",
        "epochs_planned": "training.epochs",
        "finished": "whether the run ended by itself",
        "failure": "why the run has failed, if it has; from its file FAILED",
        "best_valid_ppl": "lowest validation perplexity, of the evaluations with the fewest impossible sentences; per "
        "`unit`",
        "best_validation_ppl": "the same",
        "valid_ppl": "in `best/valid_ppl` of MLflow: the same",
        "best_validation_s_f1": "S-F1 of the best checkpoint, where trees choose it",
        "best_step": "the step of the best evaluation",
        "last_train_ppl": "training perplexity of the last tenth of the steps; per `unit`",
        "reach": "the validation perplexity that --reach asks for, with the step and the seconds that reached it",
        "reached_step": "the first evaluation at or below it",
        "reached_seconds": "seconds of training until then",
        "skipped_share": "share of the updates that were left out because loss or gradient were not finite",
        "gradient_norm": "mean norm of the gradient before clipping",
        "learning_rate": "of the last step",
        "train/words": "words of the updates since the line of metrics before, in units of the vocabulary",
        "words_per_second": "speed of training, in units of the vocabulary",
        "sentences_per_second": "speed of training",
        "training_seconds": "seconds of training, without evaluations and pauses",
        "seconds": "seconds since the line of metrics before, or of the evaluation",
        "data": "seconds a step that wait for data; `ranks/` has each process",
        "compute": "seconds a step that compute",
        "communication": "seconds a step that wait for other processes",
        "straggler_ratio": "computing time of the slowest process over the mean",
        "steps_per_epoch": "optimizer steps of the first epoch",
        "total_steps": "optimizer steps of the whole training",
        "first_step_seconds": "the first step, of the most expensive batches",
        "step_seconds": "the mean step, from a few timed ones",
        "evaluations": "of the whole training, if nothing ends it earlier",
        "evaluation_seconds": "one evaluation, from a part of the validation text",
        "expected_seconds": "the whole training: steps and evaluations. With a curriculum or evaluation.patience it "
        "may be less",
        "peak_memory": "the most memory that was in use",
    },
}  # fmt: skip


def find(name: str) -> str | None:
    """Return what a name means; None: it is not here."""
    terms = {term: text for section in GLOSSARY.values() for term, text in section.items()}
    last = name.rpartition("/")[2]
    if last.startswith("recall_"):
        last = "recall"
    return terms.get(name) or terms.get(last) or terms.get(last.removesuffix("_se"))


def nearest(name: str) -> list[str]:
    """Return terms with names like this one."""
    terms = [term for section in GLOSSARY.values() for term in section]
    return [term for term in terms if name in term] or difflib.get_close_matches(name, terms)


def markdown() -> str:
    """Return docs/glossary.md."""
    lines = [
        "# Glossary",
        "What the figures mean that commands print and runs log. `lm_pcfg glossary` prints the same, and",
        "`lm_pcfg glossary ppl` one of them. Metrics are found by their last part: `valid/ppl` under `ppl`. This page",
        "is written by `lm_pcfg glossary --markdown > docs/glossary.md`.",
    ]
    for section, terms in GLOSSARY.items():
        lines += ["", f"## {section}", "| | |", "|---|---|"]
        lines += [f"| `{term}` | {text.replace('<', '&lt;').replace('>', '&gt;')} |" for term, text in terms.items()]
    return "\n".join(lines) + "\n"
