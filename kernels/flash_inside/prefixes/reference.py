"""Prefix probabilities as one would write them on a blackboard, in log space: the truth the fast programme is held to.

    pi_ij[A] = P(A derives a string that begins with w_i .. w_{j-1})
    x_ij     = D (left_NT e(w_i), if j = i + 1) + sum_{i<k<j} (left beta_ik) (right pi_kj)
    pi_ij    = Q x_ij on nonterminals; on preterminals e(w_i) if j = i + 1, else 0
    P(w_0 .. w_{j-1} ...) = root . pi_0j;   P(the sentence is w_0 .. w_{j-1}) = root . beta_0j

D and Q are those of ending.py, and the recursion is over spans, not that of scaled.py. Differentiable by autograd.
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
    right_ends = torch.where(corners.ends > 0, rules.right[:, :n] @ corners.ends + rules.right[:, n:].sum(1), 0.0)
    matrix = torch.eye(n, dtype=torch.float64, device=words.device) - (right_ends[:, None] * rules.left[:, :n]).T
    log_paths = safe_log(torch.linalg.inv(matrix).T)  # [N, N] Q; of the transpose, as in ending.py
    log_right_ends = safe_log(right_ends)

    def log_product(vector: Tensor, log_matrix: Tensor) -> Tensor:
        return log_matmul(vector[None], log_matrix)[0]

    eta: dict[tuple[int, int], Tensor] = {}  # left beta
    zeta: dict[tuple[int, int], Tensor] = {}  # right beta
    prefix_zeta: dict[tuple[int, int], Tensor] = {}  # right pi
    prefixes, sentences = [], []
    for j in range(1, length + 1):
        for i in reversed(range(j)):
            if j == i + 1:
                leaf = words[i]
                eta[i, j], zeta[i, j] = log_product(leaf, log_left[:, n:]), log_product(leaf, log_right[:, n:])
                x = log_right_ends + eta[i, j]
            else:
                splits = range(i + 1, j)
                beta = log_sum_exp(torch.stack([eta[i, k] + zeta[k, j] for k in splits]), dim=0)
                x = log_sum_exp(torch.stack([eta[i, k] + prefix_zeta[k, j] for k in splits]), dim=0)
                eta[i, j], zeta[i, j] = log_product(beta, log_left[:, :n]), log_product(beta, log_right[:, :n])
            pi = log_product(x, log_paths)  # [N]
            prefix_zeta[i, j] = log_product(pi, log_right[:, :n])
            if j == i + 1:
                both = torch.stack((prefix_zeta[i, j], log_product(leaf, log_right[:, n:])))
                prefix_zeta[i, j] = log_sum_exp(both, dim=0)
        of_prefix, of_sentence = [log_root[:n] + pi], [] if j == 1 else [log_root[:n] + beta]
        if j == 1 and len(log_root) > n:
            of_prefix.append(log_root[n:] + leaf)
            of_sentence.append(log_root[n:] + leaf)
        prefixes.append(log_sum_exp(torch.cat(of_prefix), dim=0))
        nothing = words.new_full((), NEGATIVE_INFINITY)
        sentences.append(log_sum_exp(torch.cat(of_sentence), dim=0) if of_sentence else nothing)
    return torch.stack(prefixes), torch.stack(sentences)


def next_preterminals(rules: Rules, corners: LeftCorners, emissions: Tensor, lengths: list[int]) -> Tensor:
    """Return log P(words before, preterminal of this word) of every word: fp64 [sum(lengths), P].

    It is the derivative of a prefix by the emissions of its last word, here of a word that all preterminals emit.
    """
    rows = []
    with torch.inference_mode(False), torch.enable_grad():
        fixed = Rules(*(tensor.detach().clone() for tensor in rules))
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
