"""The corpus as files: generated on first use, the same bytes on every machine."""

import errno
import hashlib
import os
import stat
import tempfile
from itertools import islice
from pathlib import Path

from lm_pcfg.corpus.embedded import source_grammar
from lm_pcfg.corpus.embedded.checksums import SHA256
from lm_pcfg.corpus.embedded.sampling import Sampler
from lm_pcfg.corpus.embedded.templates import source_pcfg
from lm_pcfg.storage.durable import make_folder, remove_leftovers, replace_file

PREFIX = "embedded:"


def generate() -> dict[str, bytes]:
    """File name -> content: one sentence a line in *.txt, its bracketed tree on the same line of *.trees.

    Each part has a seed of its own, so that changing the size of one leaves the others as they are.
    """
    files = {}
    for number, (part, count) in enumerate(source_grammar.SENTENCES.items()):
        derivations = list(islice(Sampler(source_pcfg(), source_grammar.SEED + number), count))
        files[f"{part}.txt"] = "".join(" ".join(d.words) + "\n" for d in derivations).encode()
        files[f"{part}.trees"] = "".join(d.tree + "\n" for d in derivations).encode()
    return files


def checksums(files: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def materialise(folder: Path) -> dict[str, Path]:
    """Write what is missing or differs; several processes may do so at once. Return the paths by file name."""
    paths = {name: folder / name for name in SHA256}
    if all(_is_right(path, SHA256[name]) for name, path in paths.items()):
        return paths
    files = generate()
    for name, digest in checksums(files).items():
        if digest != SHA256[name]:
            raise ValueError(
                f"the embedded corpus came out different ({name}): after a change of its grammar, put the table that "
                "`python -m lm_pcfg.corpus.embedded --checksums` prints into checksums.py"
            )
    make_folder(folder)
    remove_leftovers(folder)
    for name, content in files.items():
        replace_file(paths[name], content)
    return paths


def _is_right(path: Path, digest: str) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == digest


def cached() -> dict[str, Path]:
    """Write the files into the user's cache, never into the working folder; where that cannot be, among temporary ones.

    Return the paths by file name.
    """
    try:
        return materialise(cache_folder())
    except OSError:
        return materialise(_temporary_folder())


def cache_folder() -> Path:
    """Return XDG_CACHE_HOME/lm_pcfg/embedded, by default below ~/.cache."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        cache = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    except RuntimeError:  # a user without a home
        return _temporary_folder()
    return cache / "lm_pcfg" / "embedded"


def _temporary_folder() -> Path:
    """Return a folder of this user's own: in a shared one, others could put other files in the place of these."""
    own = Path(tempfile.gettempdir()) / f"lm_pcfg-{os.getuid()}"
    own.mkdir(mode=0o700, exist_ok=True)
    status = own.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o022:
        raise OSError(errno.EPERM, f"{own} is open to others; set XDG_CACHE_HOME to a folder of your own", str(own))
    return own / "embedded"


def resolve(name: str, root: Path | None = None) -> Path:
    """`embedded:test` (text) or `embedded:test.trees` -> the path of the generated file; any other name as it is.

    root: the folder of the files; None: the user's cache.
    """
    if not name.startswith(PREFIX):
        return Path(name)
    file = name.removeprefix(PREFIX)
    if f"{file}.txt" in SHA256:
        file = f"{file}.txt"
    if file not in SHA256:
        known = [PREFIX + known.removesuffix(".txt") for known in SHA256]
        raise ValueError(f"no embedded text {name!r}; there are {', '.join(known)}")
    return (materialise(root) if root else cached())[file]
