"""What tests of copying share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from beeond_ctl.staging import spawn
from beeond_ctl.staging.worker import Copier
from tests.areas import area_in

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def area() -> Iterator[Path]:
    with area_in() as area:
        yield area


@pytest.fixture(params=["native", "portable"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the programs that touch files use the native part, or do without it."""
    wanted = "1" if request.param == "native" else "0"
    monkeypatch.setattr(spawn, "_ENVIRONMENT", {**spawn._ENVIRONMENT, "BEEOND_CTL_NATIVE": wanted})


@pytest.fixture
def copier() -> Iterator[Copier]:
    copier = Copier(None)
    yield copier
    copier.close()
