"""A place for trees, and the library that makes calls fail."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

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
    """A directory in memory where there is one: these tests sync thousands of times."""
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path("/tmp")
    area = base / f"staging-faults-{os.getpid()}-{random.getrandbits(32):x}"
    area.mkdir()
    yield area
    shutil.rmtree(area)
