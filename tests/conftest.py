"""Fixtures shared by all tests. The Slurm cluster is made once per session, and only if a test asks for it."""

from __future__ import annotations

import os
import shutil
import signal
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.testbed import Cluster

pytest.register_assert_rewrite("tests.integration.job_faults")

# How long an example takes to be made or to pass says how busy the machine is.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

if (
    signal.getsignal(signal.SIGINT) == signal.SIG_IGN
):  # as in the background of a script: programs would ignore it, too
    signal.signal(signal.SIGINT, signal.default_int_handler)

_SLURM = os.environ.get("SLURM_HOME", "")
_NEEDS = {
    "cluster": ("slurmctld", "slurmd", "munged", "sshd", "ip", "losetup", "mkfs.xfs"),
    "gluster": ("glusterfsd", "glusterfs"),
    "root": (),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker, programs in _NEEDS.items():
            if item.get_closest_marker(marker) is None:
                continue
            if os.geteuid() != 0:
                item.add_marker(pytest.mark.skip(reason="needs root"))
            for program in programs:
                if shutil.which(program, path=f"{_SLURM}/sbin:/usr/sbin:/usr/bin:/sbin:/bin") is None:
                    item.add_marker(pytest.mark.skip(reason=f"needs {program}; run `make deps`"))


@pytest.fixture(autouse=True)
def same_umask() -> Iterator[None]:
    """Commands that are run within this process may change it for good, and what later tests make with it."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A three-node cluster with the product installed, shared by all tests of the session."""
    from tests.testbed import Cluster

    with Cluster.up(f"t{os.getpid() % 10000}", nodes=3, with_product=True) as made:
        yield made


@pytest.fixture
def idle_cluster(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with all nodes idle, and put back to that afterwards."""
    cluster.wait_idle()
    yield cluster
    cluster.wait_idle()
