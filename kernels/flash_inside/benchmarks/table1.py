"""The paper's table 1 from measured rows: speed relative to the textbook's method, memory relative to FlashInside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

GRID = "512x20x16,8192x20x16,512x40x16,8192x40x16"
LARGEST_LOG_SUM_EXP = 512  # the paper has no figure beyond: its [spans, 2N, N] tensors do not fit
NAMES = {"triton": "FlashInside (triton)", "torch": "FlashInside (torch)"}


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Markdown. The first method of a size in the order log-sum-exp, log-einsum-exp is its 1x of speed."""
    lines = ["| algorithm | N | words | ms | speed | GiB | memory |", "|---|---|---|---|---|---|---|"]
    sizes = list(dict.fromkeys((row["nonterminals"], row["words"], row["sentences"]) for row in rows))
    for size in sizes:
        here = {
            str(row["method"]): row for row in rows if (row["nonterminals"], row["words"], row["sentences"]) == size
        }
        timed = {method: row for method, row in here.items() if row["p50_ms"] not in ("", None)}
        textbook = next((timed[m] for m in ("log-sum-exp", "log-einsum-exp") if m in timed), None)
        ours = timed.get("triton") or timed.get("torch")
        for method in ("log-sum-exp", "log-einsum-exp", "torch", "triton"):
            if method not in here:
                continue
            start = f"| {NAMES.get(method, method)} | {size[0]} | {size[1]} |"
            if method not in timed:
                lines.append(f"{start} {here[method]['note']} | | | |")
                continue
            row = timed[method]
            speed = _ratio(textbook, row, "p50_ms") if textbook else ""
            memory = _ratio(row, ours, "peak_gib") if ours and row["peak_gib"] != "" else ""  # "": on a CPU
            lines.append(f"{start} {row['p50_ms']} | {speed} | {row['peak_gib']} | {memory} |")
    return "\n".join(lines)


def _ratio(above: Mapping[str, object], below: Mapping[str, object], field: str) -> str:
    numerator, denominator = float(str(above[field])), float(str(below[field]))
    return f"{numerator / denominator:.1f}x" if denominator else ""
