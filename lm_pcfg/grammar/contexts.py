"""Initial word embeddings, made from the neighbours of each word in the training text.

Words with the same neighbours begin alike, so from the first step on a preterminal emits words that can stand for one
another instead of a random set of them. Counts become positive pointwise mutual information, and the left singular
vectors of that matrix the embeddings (Schütze 1995; Levy and Goldberg 2014).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

EncodedText = tuple[np.ndarray, np.ndarray]  # (ids, lengths) of sentences one after another

NEIGHBOURS = {-1: 1.0, 1: 1.0, -2: 0.5, 2: 0.5}  # position beside the word: weight
CONTEXTS = 2000  # words that count as neighbours: the most frequent; besides them the edge of the sentence does
SMOOTHING = 0.75  # power of a neighbour's frequency, so that rare neighbours tell less
UNSURE = 5.0  # a word begins with so many occurrences that tell nothing
ITERATIONS = 3  # of the subspace; the singular vectors need not be exact


def context_vectors(ids: np.ndarray, lengths: np.ndarray, words: int, dimension: int, seed: int) -> Tensor:
    """[words, dimension], each row of mean square 1; random for words that have no neighbours.

    ids: of words below `words`, sentences one after another; lengths: theirs.
    """
    information = neighbour_information(ids, lengths, words)
    rank = min(dimension, *information.shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vectors, strengths, _ = torch.svd_lowrank(information, q=rank, niter=ITERATIONS)
    vectors = functional.pad(vectors * strengths.sqrt(), (0, dimension - rank))
    generator = torch.Generator().manual_seed(seed)
    # The first coordinates tell most; turned at random, all tell the same, and dropout may take any of them.
    turned = vectors @ torch.linalg.qr(torch.randn(dimension, dimension, generator=generator)).Q
    size = turned.norm(dim=1, keepdim=True)
    known = torch.from_numpy(np.bincount(ids, minlength=words) > 0)[:, None] & (size > 1e-6 * size.max())
    chance = torch.randn(words, dimension, generator=generator)
    return torch.where(known, turned / size.clamp(min=1e-30) * math.sqrt(dimension), chance)


def neighbour_information(ids: np.ndarray, lengths: np.ndarray, words: int) -> Tensor:
    """Positive pointwise mutual information of words and their neighbours: sparse [words, positions x (contexts + 1)].

    The last context of each position is the edge of the sentence.
    """
    ids = ids.astype(np.int64)
    contexts = min(CONTEXTS, words)
    column_of = np.full(words, -1)
    column_of[np.argsort(-np.bincount(ids, minlength=words), kind="stable")[:contexts]] = np.arange(contexts)
    width = contexts + 1
    ends = np.repeat(np.cumsum(lengths), lengths)
    starts = ends - np.repeat(lengths, lengths)
    rows, columns, values = [], [], []
    for number, (offset, weight) in enumerate(NEIGHBOURS.items()):
        place = np.arange(len(ids)) + offset
        inside = (place >= starts) & (place < ends)
        neighbour = np.where(inside, column_of[ids[np.where(inside, place, 0)]], contexts)
        cells, counts = np.unique((ids * width + neighbour)[neighbour >= 0], return_counts=True)
        row, column = np.divmod(cells, width)
        of_word = np.bincount(row, counts, words)
        share = np.bincount(column, counts, width) ** SMOOTHING
        share /= share.sum()
        seen = (counts + UNSURE * share[column]) / (of_word[row] + UNSURE)
        information = weight * np.log(seen / share[column])
        positive = information > 0.0
        rows.append(row[positive])
        columns.append(column[positive] + number * width)
        values.append(information[positive])
    indices = torch.from_numpy(np.stack((np.concatenate(rows), np.concatenate(columns))))
    size = words, len(NEIGHBOURS) * width
    values_of = torch.from_numpy(np.concatenate(values)).float()
    with torch.sparse.check_sparse_tensor_invariants():  # said once and for all: some versions warn otherwise
        return torch.sparse_coo_tensor(indices, values_of, size).coalesce()
