"""Trees that somebody else's parser predicted, read beside the gold trees of the same sentences.

Two styles are read: Penn brackets, `(S (NP (DT the) (NN cat)) (VP (VBD sat)))`, and brackets without labels,
`((the cat) sat)`. Brackets alone do not always tell which it is: `((the cat) (sat down))` could be four words, or two
with their tags. The gold trees do. Each word of Penn brackets has a tag beside it, so the wrong style gives at most
half as many words, or at least twice as many. The file is read in the style that gives each sentence its words.

The number of words decides, not the words: a parser may have seen `<unk>`, `N` or lower case.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from lm_pcfg.corpus.treebank import TOKEN, Tree, TreeError, numbered_trees, with_words

NO_LABEL = "X"  # of phrases and words in brackets without labels


def read_predictions(
    lines: Iterable[str], name: str, gold: Sequence[Tree], removed: Collection[str] = ()
) -> list[Tree]:
    """Return a tree for each gold tree, over its words without those whose gold tag is in `removed`.

    A prediction is over all words of the gold tree or over those that are left, and may be empty. If the file has a
    line for each gold tree, and no bracket stays open at the end of a line, then a line is a tree, and a blank line is
    an empty tree, as `()` is. Otherwise the file is a stream of trees, where blank lines have no meaning. The messages
    of TreeError begin with `name`.
    """
    lines = list(lines)
    a_line_each = len(lines) == len(gold) and all(map(_is_balanced, lines))
    failures: list[tuple[int, TreeError]] = []
    for style in (_penn, _without_labels):
        found: list[Tree] = []
        try:
            for line, tree in style(lines, a_line_each):
                if len(found) == len(gold):
                    raise TreeError(f"line {line}: another tree, but there are only {len(gold)} gold trees")
                found.append(_over_words_left(tree, gold[len(found)], removed, line))
            if len(found) < len(gold):
                raise TreeError(f"line {len(lines)}: only {len(found)} trees, but there are {len(gold)} gold trees")
            return found
        except TreeError as error:
            failures.append((len(found), error))
    _, reason = max(failures, key=lambda failure: failure[0])  # of the style that went further
    raise TreeError(f"{name}: {reason}")


def _over_words_left(predicted: Tree, gold: Tree, removed: Collection[str], line: int) -> Tree:
    kept = [tag not in removed for tag in gold.tags]
    words = len(predicted.words)
    if words in (0, sum(kept)):
        return predicted
    if words == len(kept):
        return with_words(predicted, kept)
    left = f", or {sum(kept)} without punctuation" if not all(kept) else ""
    raise TreeError(f"line {line}: a tree of {words} words, but its gold tree has {len(kept)}{left}")


def _penn(lines: Sequence[str], a_line_each: bool) -> Iterator[tuple[int, Tree]]:
    if not a_line_each:
        yield from numbered_trees(lines)
        return
    for number, line in enumerate(lines, start=1):
        found = list(numbered_trees([line], number)) or [(number, Tree((), (), ()))]
        if len(found) > 1:
            raise TreeError(f"line {number}: {len(found)} trees on one line")
        yield found[0]


def _without_labels(lines: Sequence[str], a_line_each: bool) -> Iterator[tuple[int, Tree]]:
    """Read brackets without labels: those of Penn once each bracket and word is labelled."""
    labelled = [_EMPTY_OR_TOKEN.sub(_with_label, line) for line in lines]
    if a_line_each:  # whatever is on a line is one tree: `sat` and `(the cat) sat` are, too
        labelled = [line if line.strip() in ("", "()") else f"({line})" for line in labelled]
    return _penn(labelled, a_line_each)


_EMPTY_OR_TOKEN = re.compile(rf"\(\s*\)|{TOKEN.pattern}")


def _with_label(token: re.Match[str]) -> str:
    text = token[0]
    if text == "(":
        return f"({NO_LABEL} "
    if text == ")":
        return text
    return f"({NO_LABEL} {text})" if not text.startswith("(") else "()"


def _is_balanced(line: str) -> bool:
    depth = 0
    for bracket in TOKEN.findall(line):
        depth += (bracket == "(") - (bracket == ")")
        if depth < 0:
            return False
    return depth == 0
