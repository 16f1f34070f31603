"""Trees with as many right spans as can be expected, from span posteriors: minimum-Bayes-risk decoding.

    best_ij = posterior_ij + max_k best_ik + best_kj

Viterbi's tree is the most probable labelled one. Here every labelling of every tree counts, in the posteriors, and the
tree that is chosen has no labels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Spans = list[tuple[int, int]]  # (first word, end) of every node, parents before children, left before right


def mbr(tables: Sequence[Tensor]) -> list[Spans]:
    """Find the binary tree of every sentence with the largest sum of span posteriors: [(first word, end), ...].

    tables: as `span_marginals` returns them, [l+1, l+1] a sentence, entry (i, j), i < j, for the words i..j-1; all of
    them on one device, from where they are copied at once. Single words and the whole sentence are among the spans;
    parents come before their children, left before right, as in `viterbi`. Of splits that are equally good the first
    is taken. A sentence the grammar cannot generate, whose table is all zeros, has []. Time: O(l^3).
    """
    sizes = []
    for number, table in enumerate(tables):
        if table.dim() != 2 or table.shape[0] != table.shape[1] or table.shape[0] < 2:
            raise ValueError(f"table {number} must be [l+1, l+1] for a sentence of l words, not {list(table.shape)}")
        sizes.append(len(table))
    if not sizes:
        return []
    packed = torch.cat([table.detach().reshape(-1) for table in tables]).double().cpu().numpy()
    trees = []
    for number, part in enumerate(np.split(packed, np.cumsum(np.square(sizes))[:-1])):
        if not np.isfinite(part).all():
            raise ValueError(f"table {number} has values that are no posteriors: NaN or infinite")
        trees.append(_best_tree(part.reshape(sizes[number], sizes[number])))
    return trees


def _best_tree(posterior: np.ndarray) -> Spans:
    words = len(posterior) - 1
    if not np.triu(posterior, 1).any():
        return []
    # Sums of the best trees over spans by their width, and by their first word or by their end, so that the parts of
    # all splits of all spans of a width are two slices: [first word, width], [end, width].
    from_word, up_to = np.zeros_like(posterior), np.zeros_like(posterior)
    split = np.zeros_like(posterior, dtype=np.int64)  # [first word, width]: words of the left part
    from_word[:-1, 1] = up_to[1:, 1] = posterior.diagonal(1)
    for width in range(2, words + 1):
        starts = words - width + 1
        sums = from_word[:starts, 1:width] + up_to[width:, width - 1 : 0 : -1]  # [starts, splits]
        best = sums.argmax(1)  # the first of equal ones
        split[:starts, width] = best + 1
        total = sums[np.arange(starts), best] + posterior.diagonal(width)
        from_word[:starts, width] = up_to[width:, width] = total
    spans, waiting = [], [(0, words)]
    while waiting:
        first, end = waiting.pop()
        spans.append((first, end))
        if end - first > 1:
            middle = first + int(split[first, end - first])
            waiting += [(middle, end), (first, middle)]
    return spans
