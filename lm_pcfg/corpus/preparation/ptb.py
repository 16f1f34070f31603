"""The Penn Treebank's language-modelling text (Mikolov's split), where the configs expect it."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lm_pcfg.errors import UserError
from lm_pcfg.storage.durable import replace_file

FOLDER = Path("data/ptb")
HUB_NAME = "ptb-text-only/ptb_text_only"
HUB_FIELD = "sentence"


@dataclass(frozen=True)
class Part:
    file: str
    hub_split: str
    lines: int
    words: int


PARTS = (
    Part("ptb.train.txt", "train", 42_068, 887_521),
    Part("ptb.valid.txt", "validation", 3_370, 70_390),
    Part("ptb.test.txt", "test", 3_761, 78_669),
)
COMMAND = "lm_pcfg prepare ptb --source DIR"


def is_expected(name: str) -> bool:
    """Whether a path of a config is one of these files."""
    return Path(name).name in {part.file for part in PARTS}


def missing(key: str, name: str) -> str:
    return (
        f"{name}: the Penn Treebank is not there ({key} expects it at {Path(name).absolute()}); `{COMMAND}` puts it "
        "there: DIR holds ptb.train.txt, ptb.valid.txt and ptb.test.txt, or use --source hub"
    )


def prepare_ptb(source: str, folder: Path = FOLDER) -> list[Path]:
    """Take the three files from a folder, an archive (simple-examples.tgz) or the hub; check them; put them in place.

    None is written unless all three are right.
    """
    contents = _from_folder(Path(source)) if Path(source).exists() else _from_hub(source)
    for part in PARTS:
        _check(part, contents[part.file], source)
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for part in PARTS:
            replace_file(folder / part.file, contents[part.file])
            written.append(folder / part.file)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror})") from None
    return written


def _check(part: Part, content: bytes, source: str) -> None:
    lines = content.split(b"\n")
    lines = lines if lines[-1].strip() else lines[:-1]
    words = sum(len(line.split()) for line in lines)
    if (len(lines), words) != (part.lines, part.words):
        raise UserError(
            f"{source}: {part.file} has {len(lines):,} lines and {words:,} words, but Mikolov's split has "
            f"{part.lines:,} and {part.words:,}; nothing was written"
        )


def _from_folder(source: Path) -> dict[str, bytes]:
    if source.is_file():
        return _from_archive(source)
    found: dict[str, bytes] = {}
    for root, folders, files in os.walk(source):
        folders.sort()
        for part in PARTS:
            if part.file in files and part.file not in found:
                found[part.file] = _content(Path(root) / part.file)
    if not found and (
        archives := sorted([*source.rglob("simple-examples.tgz"), *source.rglob("simple-examples.tar.gz")])
    ):
        return _from_archive(archives[0])
    if not found and any(path.is_file() for path in source.rglob("*")):
        return _from_tables(str(source))
    return _complete(found, str(source))


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); is it whole, and may you read it?") from None


def _complete(found: dict[str, bytes], source: str) -> dict[str, bytes]:
    lacking = [part.file for part in PARTS if part.file not in found]
    if lacking:
        raise UserError(
            f"{source}: no {', '.join(lacking)} in it; give the folder with Mikolov's ptb.train.txt, ptb.valid.txt and "
            "ptb.test.txt (simple-examples/data), or --source hub"
        )
    return found


def _from_archive(archive: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = Path(member.name).name
                if member.isfile() and is_expected(name) and name not in found:
                    content = tar.extractfile(member)
                    assert content is not None
                    found[name] = content.read()
    except (tarfile.TarError, OSError, EOFError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{archive}: cannot be read as an archive ({reason}); give the folder it was unpacked to"
        ) from None
    return _complete(found, str(archive))


def _from_hub(source: str) -> dict[str, bytes]:
    if source != "hub" and source.count("/") != 1:
        raise UserError(f"{source}: no such folder; give the folder with Mikolov's files, or --source hub")
    return _from_tables(HUB_NAME if source == "hub" else source)


def _from_tables(name: str) -> dict[str, bytes]:
    """Read the parts from a folder in the hub's layout, or from the hub: a table of sentences for each."""
    from lm_pcfg.corpus.preparation.hub import rows_of_split, splits_of

    contents = {}
    names = splits_of(name)
    for part in PARTS:
        split = next((split for split in names if split == part.hub_split or split == part.hub_split[:5]), None)
        if split is None:
            return _complete({}, name)
        contents[part.file] = _joined(rows_of_split(name, split, (HUB_FIELD, "text")))
    return contents


def _joined(sentences: Iterable[str]) -> bytes:
    """Join sentences as in Mikolov's files, with a space before and after each."""
    out = io.StringIO()
    for sentence in sentences:
        out.write(f" {' '.join(sentence.split())} \n")
    return out.getvalue().encode("utf-8")
