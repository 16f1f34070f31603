"""Prefix probabilities as one would write them on a blackboard, in log space: the truth the fast programme is held to.

    pi_ij[A] = P(A derives a string that begins with w_i .. w_{j-1})
    x_ij     = sum_{i<k<j} (left beta_ik) (right pi_kj),   pi_ij = Q x_ij             on nonterminals, j > i + 1
    right pi = again x_ij, or of one word leaves e(w_i);   root . pi = start . x_0j, or of one word first . e(w_0)
    P(w_0 .. w_{j-1} ...) = root . pi_0j;   P(the sentence is w_0 .. w_{j-1}) = root . beta_0j

The four tensors are those of ending.py (which tests compare with many digits), and the recursion is over spans, not
that of chain.py. Differentiable by autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_inside.precision import upcast
from flash_inside.prefixes.ending import LeftCorners
from flash_inside.reference import NEGATIVE_INFINITY, log_matmul, log_sum_exp, safe_log
from flash_inside.rules import Rules, connection


def prefix(
    rules: Rules, corners: LeftCorners, emissions: Tensor, lengths: list[int], dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Return log P of every prefix, and of every prefix as a whole sentence: [sum(lengths)] each."""
    rules = Rules(*(upcast(tensor) for tensor in rules))
    parts = [_of_sentence(rules, corners, upcast(words)) for words in emissions.split(lengths)]
    prefixes, sentences = (torch.cat(part) for part in zip(*parts, strict=True))
    joined = connection(rules, emissions)
    return (prefixes + joined).to(dtype), (sentences + joined).to(dtype)


def _of_sentence(rules: Rules, corners: LeftCorners, words: Tensor) -> tuple[Tensor, Tensor]:
    """words: [l, P] log-emissions -> log P of its l prefixes, and of these as sentences: [l] each."""
    length, n = words.shape[0], rules.nonterminals
    log_root, log_left, log_right = (safe_log(tensor) for tensor in rules)
    log_start, log_first, log_again, log_leaves = (safe_log(tensor) for tensor in corners.tensors)

    def log_product(vector: Tensor, log_matrix: Tensor) -> Tensor:
        return log_matmul(vector[None], log_matrix)[0]

    eta: dict[tuple[int, int], Tensor] = {}  # left beta
    zeta: dict[tuple[int, int], Tensor] = {}  # right beta
    prefix_zeta: dict[tuple[int, int], Tensor] = {}  # right pi
    prefixes, sentences = [], []
    for j in range(1, length + 1):
        leaf = words[j - 1]
        eta[j - 1, j], zeta[j - 1, j] = log_product(leaf, log_left[:, n:]), log_product(leaf, log_right[:, n:])
        prefix_zeta[j - 1, j] = log_product(leaf, log_leaves)
        for i in reversed(range(j - 1)):
            splits = range(i + 1, j)
            beta = log_sum_exp(torch.stack([eta[i, k] + zeta[k, j] for k in splits]), dim=0)
            x = log_sum_exp(torch.stack([eta[i, k] + prefix_zeta[k, j] for k in splits]), dim=0)
            eta[i, j], zeta[i, j] = log_product(beta, log_left[:, :n]), log_product(beta, log_right[:, :n])
            prefix_zeta[i, j] = log_product(x, log_again)
        if j == 1:
            prefixes.append(log_sum_exp(log_first + leaf, dim=0))
            nothing = words.new_full((), NEGATIVE_INFINITY)
            sentences.append(log_sum_exp(log_root[n:] + leaf, dim=0) if len(log_root) > n else nothing)
        else:
            prefixes.append(log_sum_exp(log_start + x, dim=0))
            sentences.append(log_sum_exp(log_root[:n] + beta, dim=0))
    return torch.stack(prefixes), torch.stack(sentences)


def next_preterminals(rules: Rules, corners: LeftCorners, emissions: Tensor, lengths: list[int]) -> Tensor:
    """Return log P(words before, preterminal of this word) of every word: fp64 [sum(lengths), P].

    It is the derivative of a prefix by the emissions of its last word, here of a word that all preterminals emit.
    """
    rows = []
    with torch.inference_mode(False), torch.enable_grad():
        fixed = Rules(*(tensor.detach().double().clone() for tensor in rules))
        still = LeftCorners(*(tensor.detach().clone() for tensor in corners))
        for words in emissions.detach().clone().split(lengths):
            for k in range(len(words)):
                last = words.new_zeros(words.shape[1], dtype=torch.float64).requires_grad_()
                log_p = _of_sentence(fixed, still, torch.cat((words[:k].double(), last[None])))[0][-1]
                if log_p == NEGATIVE_INFINITY:
                    rows.append(torch.full_like(last, NEGATIVE_INFINITY).detach())
                else:
                    rows.append((torch.autograd.grad(log_p, last)[0].log() + log_p).detach())
    return torch.stack(rows)
