"""Work on a file system that may hang."""

from __future__ import annotations

import time

import pytest

from beeond_ctl import aside
from beeond_ctl.aside import tried
from beeond_ctl.errors import NodeError


def test_what_hangs_is_given_up_as_soon_as_a_check_says_why() -> None:
    def check() -> None:
        raise NodeError("its server died")

    began = time.monotonic()
    with pytest.raises(NodeError, match="its server died"):
        tried(lambda: time.sleep(600), within_s=600, check=check)
    assert time.monotonic() - began < 60


def test_work_that_is_done_is_not_waited_for_until_the_next_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "_CHECK_S", 120)
    began = time.monotonic()
    assert tried(lambda: None, within_s=600) == ""
    assert time.monotonic() - began < 60
