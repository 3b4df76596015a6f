"""A place for trees, and the library that makes calls fail."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.areas import area_in

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def injector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    library = tmp_path_factory.mktemp("inject") / "inject.so"
    source = Path(__file__).with_name("inject.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.fixture
def area() -> Iterator[Path]:
    with area_in() as area:
        yield area
