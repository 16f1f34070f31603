"""Exported models on the Hugging Face hub: `owner/name`, or `hf://owner/name@revision`.

First config.json is downloaded, then the files that it names, which are those of an export and no others: no code is
ever fetched, much less run. What came is then checked by its hashes like any export.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from lm_pcfg.console import say
from lm_pcfg.errors import UserError
from lm_pcfg.storage import exported

#: `hf:/` with one slash: Path makes one of two.
_ADDRESS = re.compile(r"(?P<hub>hf:/+)?(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
_RUNS = "runs"  # the folder of runs: a name in it is a run, even where it is mistyped


def local_folder(path: Path) -> Path:
    """Return the folder of a model of the hub, downloaded if need be; any other path as it is.

    `owner/name` is asked for on the hub where there is no folder `owner` here.
    """
    match = _ADDRESS.fullmatch(str(path))
    if match is None:
        if str(path).startswith("hf:/"):
            raise UserError(f"{path} is no name on the hub: it should be hf://owner/name or hf://owner/name@revision")
        return path
    owner = match["name"].split("/")[0]
    if not match["hub"] and (Path(owner).exists() or owner == _RUNS):
        return path
    return _downloaded(match["name"], match["revision"])


def _downloaded(name: str, revision: str | None) -> Path:
    import huggingface_hub

    def fetch(file: str, revision: str | None) -> Path:
        return Path(
            huggingface_hub.hf_hub_download(
                name, file, revision=revision, endpoint=os.environ.get("HF_ENDPOINT"),
                cache_dir=os.environ.get("HF_HUB_CACHE"),
            )
        )  # fmt: skip

    say(f"asking the Hugging Face hub for {name} ...")
    verbosity = huggingface_hub.logging.get_verbosity()
    huggingface_hub.logging.set_verbosity_error()  # errors become one line here
    try:
        folder = fetch(exported.DESCRIPTION, revision).parent  # its name is that of the commit
        for file in exported.describe(folder)["files"]:
            fetch(file, folder.name)
    except UserError:
        raise
    except Exception as error:  # what it raises differs from version to version
        reason = " ".join(str(error).split())[:100] or type(error).__name__
        raise UserError(
            f"{name} is neither a folder here nor a model of lm_pcfg on the hub ({type(error).__name__}: {reason})"
        ) from None
    finally:
        huggingface_hub.logging.set_verbosity(verbosity)
    return folder
