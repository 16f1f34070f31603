"""Shared set-up: tests import `grammars.py` beside them, and leave one core to the rest of the machine."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
