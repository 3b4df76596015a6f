"""Waiting for a condition, with a deadline."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.testbed.host import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable


def wait_for(condition: Callable[[], object], timeout_s: float) -> None:
    """Wait until `condition` holds. Fails the test after `timeout_s` seconds, times PATIENCE."""
    timeout_s *= PATIENCE
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"did not come to pass within {timeout_s} s"
        time.sleep(0.05)
