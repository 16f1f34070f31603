"""The benchmark runs where there is no GPU too, and refuses to time what is wrong."""

from __future__ import annotations

import csv

import pytest
import torch

import flash_inside
from flash_inside.benchmarks import accuracy, extremes, inside, kernel_times, methods, normalizers, sizes, viterbi
from grammars import random_emissions, random_rules


@pytest.mark.parametrize("baseline", [methods.log_einsum_exp, methods.log_sum_exp])
def test_baselines_equal_the_reference_with_gradients(baseline):
    rules = random_rules(5, 7, root="nonterminals", dtype=torch.float32)
    inputs = [tensor.requires_grad_() for tensor in (*rules, random_emissions(12, 7, dtype=torch.float32))]
    results = []
    for function in (baseline, lambda *given: flash_inside.inside(*given, "fp32", "reference")):
        log_z = function(flash_inside.Rules(*inputs[:3]), inputs[3], [6, 6])
        results.append((log_z, *torch.autograd.grad(log_z.sum(), inputs)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def shown_sizes(rows):
    return "\n".join(f"{row['nonterminals']}x{row['words']}x{row['sentences']}" for row in rows if row["p50_ms"])


def test_one_csv_and_one_plot(tmp_path, capsys):
    arguments = ["--grid", "8x5x2,12x4x3", "--methods", "torch,log-einsum-exp,log-sum-exp", "--seconds", "0"]
    table, plot = tmp_path / "inside.csv", tmp_path / "inside.svg"
    files = ["--csv", str(table), "--plot", str(plot), "--device", "cpu", "--precision", "fp32"]
    assert inside.main(arguments + files, draw=shown_sizes) == 0
    rows = list(csv.DictReader(table.open()))
    assert len(rows) == 6
    assert all(float(row["p20_ms"]) <= float(row["p50_ms"]) <= float(row["p80_ms"]) for row in rows)
    assert all(float(row["error"]) < 1e-5 for row in rows)
    assert plot.read_text().split() == ["8x5x2"] * 3 + ["12x4x3"] * 3
    assert "12 x   4 x   3" in capsys.readouterr().out


def test_one_grammar_per_sentence(capsys):
    arguments = ["--grid", "8x5x3", "--methods", "torch-per-sentence", "--seconds", "0"]
    assert inside.main([*arguments, "--device", "cpu", "--precision", "fp32"]) == 0
    assert "torch-per-sentence" in capsys.readouterr().out
    inputs = sizes.make_inputs(sizes.parse_grid("8x5x3")[0], "bf16", torch.device("cpu"), per_sentence=True)
    assert [tuple(tensor.shape) for tensor in inputs] == [(3, 8), (3, 8, 24), (3, 8, 24), (15, 16)]


def test_what_is_wrong_is_not_timed(monkeypatch, capsys):
    for wrong in ((0.5, 0.0), (0.0, 0.5), (float("nan"), 0.0), (0.0, float("nan"))):  # log Z, gradients
        monkeypatch.setattr(inside, "errors_of", lambda *_, wrong=wrong: wrong)
        assert inside.main(["--grid", "4x3x1", "--methods", "torch", "--device", "cpu"]) == 1
        assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("benchmark", "arguments", "said"),
    [
        (inside, "--methods magic", "unknown method magic"),
        (inside, "--grid 8x5", "'8x5': sizes are NxWORDSxSENTENCES"),
        (inside, "--grid 8x1x2", "'8x1x2': sizes are NxWORDSxSENTENCES"),
        (inside, "--device tpu", "--device tpu: should be cuda or cpu"),
        (inside, "--device cuda:99", "--device cuda:99: there is no"),
        (inside, "--csv {folder}", "is a folder; name a file in it"),
        (inside, "--plot {folder}/a.svg", "nothing here draws: `lm_pcfg bench inside --plot` does"),
        (kernel_times, "--passes 0", "'0' should be a whole number, at least 1"),
        (kernel_times, "--csv {folder}", "is a folder; name a file in it"),
        (inside, "--seconds inf", "'inf' should be a number, at least 0"),
        (normalizers, "--seconds -1", "'-1' should be a number, at least 0"),
        (normalizers, "--csv {folder}", "is a folder; name a file in it"),
        (normalizers, f"--csv {{folder}}/{'a' * 300}", "cannot be written: File name too long"),
        (viterbi, "--backend magic", "invalid choice: 'magic'"),
        (viterbi, "--backend triton --device cpu", "--backend triton needs a GPU"),
        (viterbi, "--repeats 0", "'0' should be a whole number, at least 1"),
        (extremes, "--backend triton --device cpu", "--backend triton needs a GPU"),
        (extremes, "--backend reference --precision bf16", "--backend reference computes in fp32 here, not in bf16"),
        (extremes, "--backend reference --precision tf32", "--backend reference computes in fp32 here, not in tf32"),
        (extremes, "--longest 1", "'1' should be a whole number, at least 2"),
        (extremes, "--shortest 9 --longest 8", "--shortest 9 is more than --longest 8"),
        (extremes, "--nonterminals -3", "'-3' should be a whole number, at least 1"),
    ],
)
def test_wrong_arguments_are_refused(benchmark, arguments, said, tmp_path, capsys):
    with pytest.raises(SystemExit) as status:
        benchmark.main(arguments.format(folder=tmp_path).split())
    assert status.value.code == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_plot_that_cannot_be_written_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        inside.main(["--plot", f"{tmp_path}/none/a.svg"], draw=shown_sizes)
    assert "there is no folder" in capsys.readouterr().err


def test_a_table_without_rows_is_not_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(inside, "_measure", lambda *_: pytest.fail("measured"))
    (tmp_path / "empty.csv").write_text(",".join(inside.FIELDS) + "\n")
    shown = ["--from-csv", str(tmp_path / "empty.csv"), "--device", "cpu"]
    assert inside.main(shown) == 0
    assert capsys.readouterr().out == ""
    assert inside.main([*shown, "--table1"]) == 1
    assert "none of the sizes is in the table" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        inside.main([*shown, "--grid", "4x3x1"])
    assert "--grid has no effect with --from-csv" in capsys.readouterr().err


def test_sentences_beyond_all_memory_are_said_to_be(capsys):
    """Their chart is: the rules and the words would fit."""
    assert inside.main(["--grid", "32x99999x1", "--methods", "torch", "--seconds", "0", "--device", "cpu"]) == 1
    assert "out of memory" in capsys.readouterr().out


def test_a_method_that_does_not_fit_in_memory_leaves_the_others(monkeypatch, capsys):
    function = methods.function_of

    def large(method, *others):
        if method == "log-sum-exp":
            torch.empty(1 << 60)
        return function(method, *others)

    monkeypatch.setattr(accuracy, "function_of", large)
    arguments = ["--grid", "4x3x1", "--methods", "log-sum-exp,torch", "--seconds", "0", "--precision", "fp32"]
    assert inside.main([*arguments, "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [("out of memory" in line, " ms " in line) for line in lines] == [(True, False), (False, True)]


@pytest.mark.parametrize("benchmark", [inside, kernel_times, viterbi, normalizers])
@pytest.mark.parametrize("nonterminals", ["1000000", "9" * 20])
def test_a_size_beyond_all_memory_is_said_at_once(benchmark, nonterminals, capsys):
    grid = f"{nonterminals}x{nonterminals}x2000000" if benchmark is normalizers else f"{nonterminals}x3x1"
    assert benchmark.main(["--grid", grid, "--device", "cpu"]) == 1
    assert "out of memory" in capsys.readouterr().out


def test_times_by_kernel(tmp_path, capsys):
    table = tmp_path / "kernels.csv"
    assert kernel_times.main(["--grid", "8x5x2", "--passes", "2", "--device", "cpu", "--csv", str(table)]) == 0
    rows = list(csv.DictReader(table.open()))
    times = [float(row["ms"]) for row in rows]
    assert times == sorted(times, reverse=True)
    assert "aten::mm" in {row["kernel"] for row in rows}
    assert "8x5x2" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [(0.5, 0.0), (0.0, float("nan"))])
def test_what_is_wrong_is_not_taken_apart(wrong, monkeypatch, capsys):
    monkeypatch.setattr(kernel_times, "errors_of", lambda *_: wrong)
    assert kernel_times.main(["--grid", "8x5x2,4x3x1", "--device", "cpu"]) == 1
    assert capsys.readouterr().out == "8x5x2: WRONG\n4x3x1: WRONG\n"


def test_products_are_one_kernel_and_gaps_are_counted():
    spans = [
        ("nvjet_tst_128x256", 10, 12),
        ("sm90_xmma_gemm_bf16", 12, 13),
        ("split_sum_kernel", 0, 4),
        ("void at::native::fill<float>(int)", 3, 6),  # on another stream
    ]
    assert kernel_times.by_kernel(spans) == {
        "split_sum_kernel": (1, 4), "at::native::fill": (1, 3), "products (cuBLAS)": (2, 3), "no kernel": (1, 4),
    }  # fmt: skip


def test_table_of_the_paper(capsys):
    grid = ["--table1", "--grid", "8x5x2,600x3x1", "--methods", "torch,log-einsum-exp,log-sum-exp"]
    assert inside.main([*grid, "--seconds", "0", "--device", "cpu", "--precision", "fp32"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in lines[2:]] == [
        "log-sum-exp", "log-einsum-exp", "FlashInside (torch)", "log-einsum-exp", "FlashInside (torch)",
    ]  # fmt: skip
    assert lines[2].split("|")[5].strip() == "1.0x"


def test_a_run_cut_short_keeps_what_it_measured_and_can_be_drawn_later(tmp_path, monkeypatch, capsys):
    table, plot = tmp_path / "inside.csv", tmp_path / "inside.svg"
    measure = inside._measure

    def stop_at_the_second(method, size, *others):
        if size.nonterminals == 8:
            raise KeyboardInterrupt
        return measure(method, size, *others)

    monkeypatch.setattr(inside, "_measure", stop_at_the_second)
    arguments = ["--grid", "4x3x1,8x3x1", "--methods", "torch", "--seconds", "0", "--device", "cpu"]
    with pytest.raises(KeyboardInterrupt):
        inside.main([*arguments, "--precision", "fp32", "--csv", str(table)])
    measured = capsys.readouterr().out
    assert inside.main(["--from-csv", str(table), "--plot", str(plot)], draw=shown_sizes) == 0
    assert capsys.readouterr().out == measured
    assert plot.read_text() == "4x3x1"
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    first, second = table.read_text().splitlines()
    time_of = second.split(",")[inside.FIELDS.index("p50_ms")]
    (tmp_path / "letters.csv").write_text(f"{first}\n{second.replace(time_of, 'abc')}\n")
    for wrong, said in (
        ("other.csv", "was not written by this benchmark"), ("none.csv", "No such file"), ("letters.csv", "'abc'"),
    ):  # fmt: skip
        with pytest.raises(SystemExit):
            inside.main(["--from-csv", str(tmp_path / wrong)])
        assert said in capsys.readouterr().err


def test_lengths_of_the_treebank(capsys):
    arguments = ["--grid", "8xptbx4", "--methods", "torch", "--seconds", "0", "--device", "cpu", "--precision", "fp32"]
    assert inside.main(arguments) == 0
    assert "8 x ptb x   4" in capsys.readouterr().out
    assert sizes.ptb_lengths(3, seed=1) == sizes.ptb_lengths(3, seed=1)
    assert sum(sizes.PTB_LINES) == 42_068
    assert sum(number * lines for number, lines in enumerate(sizes.PTB_LINES, 1)) == 887_521


def test_normalizers(tmp_path, capsys):
    table = tmp_path / "emission.csv"
    arguments = ["--grid", "40x30x8,64x50x16", "--precision", "fp32", "--seconds", "0", "--device", "cpu"]
    assert normalizers.main([*arguments, "--csv", str(table)]) == 0
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["preterminals"] for row in rows] == ["40", "64"]
    assert all(float(row["p50_ms"]) > 0 and float(row["error"]) < 1e-4 for row in rows)


def test_a_size_that_does_not_fit_leaves_the_others_alone(tmp_path, capsys):
    table = tmp_path / "emission.csv"
    arguments = ["--grid", f"{10**15}x10x8,40x30x8", "--precision", "fp32", "--seconds", "0", "--device", "cpu"]
    assert normalizers.main([*arguments, "--csv", str(table)]) == 0
    assert f"{10**15}x10x8 fp32 out of memory\n40x30x8 fp32 " in capsys.readouterr().out
    with table.open() as file:
        assert [row["note"] for row in csv.DictReader(file)] == ["out of memory", ""]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--device", "gpu"], "--device gpu: should be cuda or cpu"),
        (["--csv", "."], ". is a folder; name a file in it"),
        (["--csv", "none/a.csv"], "there is no folder none"),
        (["--grid", "4x5"], "sizes are PRETERMINALSxWORDSxDIMENSION"),
    ],
)
def test_wrong_arguments_are_found_before_anything_is_measured(wrong, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        normalizers.main(["--grid", "4x5x6", *wrong])
    assert said in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(capsys):
    with pytest.raises(SystemExit, match="2"):
        normalizers.main(["--device", "cuda:0"])
    assert "--device cuda:0: there is no GPU here" in capsys.readouterr().err


def test_wrong_normalizers_are_not_timed(monkeypatch, capsys):
    monkeypatch.setattr(normalizers, "log_normalizers", lambda a, b, precision: a.sum(1) + b.sum() * 0)
    assert normalizers.main(["--grid", "4x5x6", "--seconds", "0", "--device", "cpu"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_extremes(monkeypatch, capsys):
    arguments = ["--batches", "3", "--nonterminals", "8", "--device", "cpu"]
    assert extremes.main(arguments) == 0
    assert " 0 wrong, 0 not finite" in capsys.readouterr().out
    monkeypatch.setitem(extremes.TOLERANCE, "fp32", (0.0, 0.0))
    assert extremes.main(arguments) == 1
    assert " 3 wrong, 0 not finite" in capsys.readouterr().out


def test_viterbi(monkeypatch, capsys):
    arguments = ["--grid", "6x5x2,7x2x1", "--repeats", "1", "--device", "cpu"]
    assert viterbi.main(arguments) == 0
    assert [line.split()[::2] for line in capsys.readouterr().out.splitlines()] == [["6x5x2", "ms"], ["7x2x1", "ms"]]
    monkeypatch.setattr(viterbi, "TOLERANCE_OF_TREES", -1.0)
    assert viterbi.main(arguments) == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spans", "valid"),
    [
        ([(0, 1)], True),
        ([(0, 2), (0, 1), (1, 2)], True),
        ([(0, 3), (0, 1), (1, 3), (1, 2), (2, 3)], True),
        ([(0, 3), (0, 2), (0, 1), (1, 2), (2, 3)], True),
        ([(0, 3), (0, 2), (0, 1), (1, 2)], False),
        ([(0, 3), (0, 1), (1, 2), (2, 3)], False),
        ([(0, 2), (0, 1), (1, 2), (1, 2)], False),
        ([(0, 1), (1, 2)], False),
    ],
)
def test_what_a_binary_tree_is(spans, valid):
    assert viterbi.is_binary_tree(spans, max(end for _, end in spans)) is valid
