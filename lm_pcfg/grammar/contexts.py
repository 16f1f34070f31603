"""Initial word embeddings, made from the neighbours of each word in the training text.

Words with the same neighbours begin alike, so from the first step on a preterminal emits words that can stand for one
another instead of a random set of them. Counts become positive pointwise mutual information, and the left singular
vectors of that matrix the embeddings (Schütze 1995; Levy and Goldberg 2014).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class EncodedText(NamedTuple):
    ids: np.ndarray  # words of sentences one after another
    lengths: np.ndarray  # of the sentences
    device: torch.device  # that computes with them


TEXT_FOR_CONTEXTS = 5_000_000  # words of training text that are looked at
NEIGHBOURS = {-1: 1.0, 1: 1.0, -2: 0.5, 2: 0.5}  # position beside the word: weight
CONTEXTS = 2000  # words that count as neighbours: the most frequent; besides them the edge of the sentence does
SMOOTHING = 0.75  # power of a neighbour's frequency, so that rare neighbours tell less
UNSURE = 5.0  # a word begins with so many occurrences that tell nothing
ITERATIONS = 3  # of the subspace; the singular vectors need not be exact
SMALLEST_STRENGTH = 1e-6  # of a singular vector, relative to the first; below is rounding, in a text of few words


def context_vectors(text: EncodedText, words: int, dimension: int, seed: int) -> Tensor:
    """[words, dimension], each row of mean square 1; random for words that have no neighbours.

    The same, but for rare roundings, for any device and number of threads: bf16 hides in what order fp64 numbers are
    summed.
    """
    generator = torch.Generator().manual_seed(seed)
    information = neighbour_information(text.ids, text.lengths, words).to(text.device, torch.float64)
    vectors, strengths = singular_vectors(information, dimension, generator)
    # The first coordinates tell most; turned at random, all tell the same, and dropout may take any of them. What they
    # turn into depends on what vectors there are, not on their signs, which a decomposition is free to choose.
    chance = torch.randn(words, dimension, dtype=torch.float64, generator=generator)
    turned = (vectors * strengths.sqrt()) @ orthonormal_rows(vectors.T @ chance.to(text.device))
    turned = turned.cpu()
    size = turned.norm(dim=1, keepdim=True)
    known = torch.from_numpy(np.bincount(text.ids, minlength=words) > 0)[:, None] & (size > 1e-6 * size.max())
    begin = torch.where(known, turned / size.clamp(min=1e-30) * math.sqrt(dimension), chance)
    return begin.bfloat16().float()


def singular_vectors(matrix: Tensor, most: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return about the `most` first left singular vectors [rows, r] of a sparse matrix, and their values [r].

    By a random subspace that comes nearer with each iteration (Halko, Martinsson and Tropp 2011).
    """
    rank = min(most, *matrix.shape)
    across = matrix.T.coalesce()
    basis = torch.randn(matrix.shape[1], rank, dtype=matrix.dtype, generator=generator).to(matrix.device)
    for _ in range(ITERATIONS):
        basis = orthonormal(across @ (matrix @ basis))
    basis = orthonormal(matrix @ basis)  # [rows, r]
    inside = across @ basis
    squares, turns = torch.linalg.eigh(inside.T @ inside)  # from the smallest on
    there = squares > SMALLEST_STRENGTH**2 * squares[-1]
    return basis @ turns[:, there], squares[there].sqrt()


def orthonormal(columns: Tensor) -> Tensor:
    """Return orthonormal columns that span the same space, row after row in memory: sparse products want it so."""
    return torch.linalg.qr(columns).Q.contiguous()


def orthonormal_rows(matrix: Tensor) -> Tensor:
    """Return the matrix of orthonormal rows nearest to this one [r, d], r <= d."""
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    return u @ v


def neighbour_information(ids: np.ndarray, lengths: np.ndarray, words: int) -> Tensor:
    """Positive pointwise mutual information of words and their neighbours.

    Sparse fp64 [words, positions x (contexts + 1)]. The last context of each position is the edge of the sentence.
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
    values_of = torch.from_numpy(np.concatenate(values))
    with torch.sparse.check_sparse_tensor_invariants():  # said once and for all: some versions warn otherwise
        return torch.sparse_coo_tensor(indices, values_of, size).coalesce()
