"""`python -m lm_pcfg.doctor NAME` makes one check and prints what it found as JSON."""

import json
import sys
from dataclasses import asdict

from lm_pcfg.doctor.checks import CHECKS
from lm_pcfg.doctor.finding import finding_of

print("\n" + json.dumps(asdict(finding_of(CHECKS[sys.argv[1]]))), flush=True)
