"""Waiting for a condition, with a deadline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.testbed.host import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable


def wait_for(condition: Callable[[], object], timeout_s: float) -> None:
    """Wait until `condition` holds; fails the test as `wait_until` does."""
    wait_until("what is waited for", lambda: (bool(found := condition()), found), timeout_s, 0.05)
