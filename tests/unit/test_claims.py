from __future__ import annotations

import socket
from pathlib import Path

import pytest

from beeond_ctl.errors import UserError
from beeond_ctl.lifecycle import claims

# Below the ports that Linux gives to those who ask for any: other tests run beside this one.
BLOCKS = (27000, 27016, 27032)


@pytest.fixture
def root(tmp_path: Path) -> str:
    for job in (1, 2):
        (tmp_path / "jobs" / str(job)).mkdir(parents=True)
    return str(tmp_path)


def test_two_jobs_never_hold_the_same_block(root: str) -> None:
    assert claims.claim_ports(root, 1, BLOCKS) == list(BLOCKS)
    assert claims.claim_ports(root, 2, BLOCKS) == []
    claims.keep_ports(root, 1, BLOCKS[1])
    assert claims.claim_ports(root, 2, BLOCKS) == [BLOCKS[0], BLOCKS[2]]
    claims.release(root, 1)
    assert claims.claim_ports(root, 2, BLOCKS) == list(BLOCKS)


def test_a_claim_of_a_job_that_is_gone_is_stale(root: str) -> None:
    claims.claim_ports(root, 1, BLOCKS)
    (Path(root) / "jobs" / "1").rmdir()
    assert claims.claim_ports(root, 2, BLOCKS) == list(BLOCKS)


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_block_in_which_a_stranger_listens_is_not_free(root: str, kind: int) -> None:
    with socket.socket(socket.AF_INET, kind) as stranger:
        stranger.bind(("", BLOCKS[1] + 3))
        if kind == socket.SOCK_STREAM:
            stranger.listen()
        assert claims.claim_ports(root, 1, BLOCKS) == [BLOCKS[0], BLOCKS[2]]


def test_a_mount_point_has_one_owner_who_is_named(root: str) -> None:
    claims.claim_mount(root, 1, "/beeond")
    claims.claim_mount(root, 1, "/beeond")
    claims.claim_mount(root, 2, "/beeond/2")
    with pytest.raises(UserError, match="in use by job 1"):
        claims.claim_mount(root, 2, "/beeond")
    claims.release(root, 1)
    claims.claim_mount(root, 2, "/beeond")
