"""Metadata calls that take longer than they do here: what a distant file server costs (see slow_calls.c)."""

from __future__ import annotations

import subprocess
from pathlib import Path


def environment(area: Path, delay_us: int) -> dict[str, str]:
    """Variables that add `delay_us` to each metadata call of a program below `area`, where the library is made."""
    library, code = area / "slow_calls.so", Path(__file__).with_name("slow_calls.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, code, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "CALL_DELAY_US": str(delay_us), "CALL_DELAY_BELOW": str(area)}
