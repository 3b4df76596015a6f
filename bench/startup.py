"""How long the controller's processes take to start: paid by every job, and at every submission."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.row import Row, process_s

ROUNDS = 15
COMMAND = str(Path(sys.prefix) / "bin" / "beeond-ctl")
ENV = {"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
BARE = "python3 -c pass"
TOP = 6


def rows() -> list[Row]:
    """Whole processes, and the imports of a Prolog that cost most."""
    with tempfile.NamedTemporaryFile() as options:
        options.write(b"beeond\0capacity=1TiB\0beeond-stage-in\0/global/a:in\0")
        options.flush()
        cases = {
            BARE: [sys.executable, "-c", "pass"],
            # without a request in its environment it returns once everything it needs is imported
            "beeond-ctl prolog: interpreter and imports": [COMMAND, "prolog"],
            "beeond-ctl request encode (at submission)": [COMMAND, "request", "encode"],
            "beeond-ctl --help": [COMMAND, "--help"],
        }
        times: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(ROUNDS):
            for name, argv in cases.items():
                times[name].append(process_s(argv, ENV, stdin=options.name))
    medians = {name: statistics.median(found) * 1000 for name, found in times.items()}
    bare = medians.pop(BARE)
    found = [Row(name, value, "ms", BARE, bare) for name, value in medians.items()]
    return found + [Row(f"of a Prolog's imports: {name}", ms, "ms") for name, ms in _offenders()]


def _offenders() -> list[tuple[str, float]]:
    """Top-level packages by the time their modules take by themselves, several runs' least; in milliseconds."""
    best: dict[str, float] = {}
    code = "import beeond_ctl.cli, beeond_ctl.lifecycle.bringup, beeond_ctl.rendezvous"
    for _ in range(3):
        argv = [sys.executable, "-X", "importtime", "-c", code]
        text = subprocess.run(argv, env=ENV, check=True, stderr=subprocess.PIPE, text=True).stderr
        sums: dict[str, float] = {}
        for own, name in re.findall(r"^import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)", text, re.MULTILINE):
            package = name.split(".")[0]
            sums[package] = sums.get(package, 0) + int(own) / 1000
        best = {name: min(value, best.get(name, value)) for name, value in sums.items()}
    return sorted(best.items(), key=lambda item: -item[1])[:TOP]
