"""`accelerate launch lm_pcfg/train.py --config X.yaml [key=value ...]`: the same as `lm_pcfg train`."""

import os
import sys

if __name__ == "__main__":
    # Python put this file's own folder first on the path, where `lm_pcfg/corpus` would be importable as `corpus`. The
    # repository takes its place, so that the script also works without an installation. (pathlib would be an import
    # during which a Ctrl-C has no answer yet.)
    repository = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    sys.path[0:1] = [repository, os.path.join(repository, "kernels")]

    try:
        from lm_pcfg.__main__ import leave_on_ctrl_c, main

        leave_on_ctrl_c()
    except KeyboardInterrupt:
        print("lm_pcfg: interrupted", file=sys.stderr)
        sys.exit(130)

    from lm_pcfg.distributed import launcher

    launcher.follow()  # before the imports that take seconds

    sys.argv.insert(1, "train")
    main()
