"""`python -m lm_pcfg.corpus.embedded [FOLDER]` writes the corpus and prints its best possible perplexity."""

import sys
from pathlib import Path

from lm_pcfg.corpus.embedded import best_possible, files

if "--checksums" in sys.argv[1:]:
    print('"""What the bytes of the generated files must be, by SHA-256."""\n')
    print("SHA256: dict[str, str] = {")
    for file_name, digest in files.checksums(files.generate()).items():
        print(f'    "{file_name}": "{digest}",')
    print("}")
else:
    paths = files.materialise(Path(sys.argv[1])) if len(sys.argv) > 1 else files.cached()
    for path in paths.values():
        print(path)
    lines = [line.split() for line in paths["test.txt"].read_text().splitlines()]
    print(f"best possible perplexity of test.txt: {best_possible(lines).ppl:.4f}")
