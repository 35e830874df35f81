"""Stands in for a trial of `hotbunk doctor`: reports one finding, then dies, or hangs."""

import json
import sys
import time
from pathlib import Path

trial, _, findings = sys.argv[1:]
if trial == "hang":
    time.sleep(600)
finding = {"what": "engine", "found": "started", "wanted": "a start", "verdict": "ok", "remedy": ""}
Path(findings).write_text(json.dumps(finding) + "\n")
print("CUDA error: an illegal memory access", file=sys.stderr)
sys.exit(134)
