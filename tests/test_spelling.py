"""Embeddings shared by words that are written alike."""

from __future__ import annotations

import torch

from lm_pcfg.grammar.build import build_model
from lm_pcfg.grammar.spelling import Spelling, parts_of
from lm_pcfg.settings import ModelSection

WORDS = ["<unk>", "walking", "talking", "walked", "talked", "N", "s&p", "sea"]
SIZES = {"nonterminals": 4, "preterminals": 6, "dimension": 5}


def filled(least: int = 1, dimension: int = 5) -> Spelling:
    spelling = Spelling(WORDS, dimension, least).double()
    torch.nn.init.normal_(spelling.table, generator=torch.Generator().manual_seed(1))
    return spelling


def test_parts_of_a_word():
    assert parts_of("cat") == {"<c", "t>", "<ca", "cat", "at>", "<cat", "cat>", "<cat>"}
    assert parts_of("N") == {"<N", "N>", "<N>"}
    assert parts_of("<unk>") == parts_of("<eos>") == set()
    assert max(map(len, parts_of("incomprehensible"))) == 6


def test_a_part_that_too_few_words_have_has_no_embedding():
    shared = {part for part in set().union(*map(parts_of, WORDS)) if sum(part in parts_of(word) for word in WORDS) > 1}
    assert {"alking", "ing>", "<walk", "ked>", "<s"} <= shared
    assert len(Spelling(WORDS, 5, 2).table) == len(shared)
    assert len(Spelling(WORDS, 5, len(WORDS)).table) == 0
    assert torch.equal(Spelling(WORDS, 5, len(WORDS))(), torch.zeros(len(WORDS), 5))


def test_a_word_is_the_sum_of_its_parts():
    """Against the definition, word by word; also as GPUs compute it."""
    spelling = filled(least=2)
    counts = {part: sum(part in parts_of(word) for word in WORDS) for word in WORDS for part in parts_of(word)}
    rows = {part: row for row, part in enumerate(sorted(part for part, n in counts.items() if n >= 2))}
    expected = torch.zeros(len(WORDS), 5, dtype=torch.float64)
    for word, row in zip(WORDS, expected, strict=True):
        own = [spelling.table[rows[part]] for part in parts_of(word) if part in rows]
        if own:
            row += torch.stack(own).sum(0).detach() / len(own) ** 0.5
    torch.testing.assert_close(spelling(), expected)
    torch.testing.assert_close(spelling._matrix(torch.device("cpu"), torch.float64) @ spelling.table, expected)
    assert torch.equal(expected[0], torch.zeros(5))  # <unk> is not written
    assert expected[WORDS.index("sea")].abs().sum() > 0


def test_gradients():
    spelling = filled(dimension=2)
    assert torch.autograd.gradcheck(
        lambda table: torch.func.functional_call(spelling, {"table": table}, ()),
        spelling.table.detach().requires_grad_(),
    )


def test_a_model_begins_as_without_and_learns_from_all_words_with_a_part():
    plain, spelled = (build_model(ModelSection(**SIZES, spelling=least), WORDS, 3).double() for least in (None, 2))
    weights = dict(spelled.named_parameters())
    for name, parameter in plain.named_parameters():
        assert torch.equal(weights[name], parameter), name
    for one, two in zip(plain().tensors, spelled().tensors, strict=True):
        assert torch.equal(one, two)
    words = torch.tensor([WORDS.index("walking"), WORDS.index("sea")])
    loss = -spelled().log_likelihood(words, [2], precision="fp64").sum()
    loss.backward()
    with torch.no_grad():
        weights["spelling.table"] -= 1e-3 * weights["spelling.table"].grad
    before, after = (
        model().emission.log_probabilities(torch.arange(len(WORDS))).logsumexp(1) for model in (plain, spelled)
    )
    gain = (after - before).tolist()
    assert gain[WORDS.index("talking")] > gain[WORDS.index("N")]  # never seen, but "alking" was


def test_without_memory_until_weights_are_put_in():
    """As validation uses a model: its skeleton is on `meta`, and plain attributes stay where they are."""
    model = build_model(ModelSection(**SIZES, spelling=2), WORDS, 3)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    skeleton = build_model(ModelSection(**SIZES, spelling=2), WORDS, 3).to("meta")
    for one, two in zip(model().tensors, torch.func.functional_call(skeleton, weights, (None,)).tensors, strict=True):
        assert torch.equal(one, two)
