"""`accelerate launch lm_pcfg/train.py --config X.yaml [key=value ...]`: the same as `lm_pcfg train`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python put this file's own folder first on the path, where `lm_pcfg/corpus` would be importable as `corpus`. The
    # repository takes its place, so that the script also works without an installation.
    repository = Path(__file__).resolve().parents[1]
    sys.path[0:1] = [str(repository), str(repository / "kernels")]

    from lm_pcfg.distributed import launcher

    launcher.follow()  # before the imports that take seconds

    from lm_pcfg.__main__ import main

    sys.argv.insert(1, "train")
    main()
