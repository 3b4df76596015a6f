"""What a user is told of a transfer that failed."""

from __future__ import annotations

from typing import Any

import pytest

from beeond_ctl.lifecycle.stage import _told
from beeond_ctl.request import Transfer

NOTHING: dict[str, Any] = {"missing": False, "cancelled": "", "problems": [], "full": False}


@pytest.mark.parametrize(
    ("inward", "summary", "told"),
    [
        (True, {"problems": ["/lustre/in: permission denied"]}, "stage-in of /lustre/in: permission denied"),
        (
            True,
            {"problems": ["1 entry ('x') not copied: no space left at the destination"], "full": True},
            "stage-in of /lustre/in: 1 entry ('x') not copied: no space left at the destination; "
            "ask for more with capacity=, or for more nodes",
        ),
        (
            False,
            {"problems": ["1 entry ('x') not copied: no space left at the destination"], "full": True},
            "stage-out to /lustre/in: 1 entry ('x') not copied: no space left at the destination",
        ),
        (False, {"cancelled": "interrupted"}, "stage-out to /lustre/in: interrupted"),
        (False, {}, "stage-out to /lustre/in: no proof"),
    ],
)
def test_it_is_one_line_with_the_place_once_and_what_to_do(
    inward: bool, summary: dict[str, Any], told: str
) -> None:
    transfer = Transfer("/lustre/in", "data") if inward else Transfer("out", "/lustre/in")
    assert _told(transfer, {**NOTHING, **summary}, inward=inward) == told
