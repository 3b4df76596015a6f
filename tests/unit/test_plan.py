from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beeond_ctl.backends.beegfs import layout
from beeond_ctl.config import parse
from beeond_ctl.errors import RequestError
from beeond_ctl.plan import BLOCK, CANDIDATES, Job, choose_backend, make_plan, port_blocks
from beeond_ctl.request import Request

JOB = Job(42, 1000, 1000, "alice")
SITE = parse("")


def test_every_node_computes_the_same_plan() -> None:
    nodes = tuple(f"n{i}" for i in range(1, 5))
    assert make_plan(SITE, Request(), JOB, nodes) == make_plan(SITE, Request(), JOB, nodes)


@given(st.integers(1, 2**31), st.integers(0, 50))
def test_port_blocks_lie_in_the_range_and_do_not_overlap(job_id: int, restart: int) -> None:
    blocks = port_blocks(SITE, Job(job_id, 1, 1, "u", restart))
    assert len(set(blocks)) == CANDIDATES
    assert all(block >= 21000 and block + BLOCK - 1 <= 24999 for block in blocks)
    assert all(abs(a - b) >= BLOCK for a in blocks for b in blocks if a != b)


def test_a_rerun_of_a_job_gets_other_ports_than_its_first_run() -> None:
    assert port_blocks(SITE, JOB) != port_blocks(SITE, Job(42, 1000, 1000, "alice", restart=1))


def test_one_node_gets_a_local_directory_unless_asked_otherwise() -> None:
    assert choose_backend(SITE, Request(), 1) == "local"
    assert choose_backend(SITE, Request(), 2) == "glusterfs"
    assert choose_backend(SITE, Request(backend="glusterfs"), 1) == "glusterfs"
    assert choose_backend(SITE, Request(share="1"), 1) == "glusterfs"


def test_guests_mount_what_the_other_nodes_serve_and_keep_their_state_apart() -> None:
    alone = make_plan(SITE, Request(share="1", capacity=2**30), JOB, ("n1", "n2"))
    plan = make_plan(
        SITE, Request(share="1", capacity=2**30), JOB, ("n1", "n2"), guests=("g1", "a1"), run_as=43
    )
    assert (plan.nodes, plan.own_nodes) == (("n1", "n2", "g1", "a1"), ("n1", "n2"))
    assert (plan.servers, plan.leader) == (alone.servers, "n1")
    for name in ("mount_point", "targets", "target_capacity", "rendezvous_ports"):
        assert getattr(plan, name) == getattr(alone, name)
    assert plan.run_dir == alone.run_dir.replace("/42", "/43")


@pytest.mark.parametrize(
    ("site", "request_", "nodes", "words"),
    [
        ("", Request(backend="lustre"), 2, ["backend=lustre", "glusterfs"]),
        ("", Request(backend="local"), 2, ["one node"]),
        ("", Request(backend="local", share="1"), 1, ["share does not apply to backend local"]),
        ('[backend]\ndefault = "local"', Request(share="1"), 1, ["share cannot be had"]),
        ("", Request(join=0), 2, ["join=0 has no plan of its own", "component 0"]),
        ("", Request(mount="/beeond"), 2, ["mount=/beeond", "none"]),
        ('[mount]\nchoices = ["/beeond"]', Request(mount="/etc"), 2, ["mount=/etc", "/beeond"]),
        ("", Request(stripe_count=4), 2, ["stripe-count", "glusterfs"]),
        ('[storage]\nkind = "image"', Request(capacity=2**30), 3, ["capacity=1GiB", "1.5GiB"]),
    ],
)
def test_what_the_site_cannot_do_is_refused(
    site: str, request_: Request, nodes: int, words: list[str]
) -> None:
    with pytest.raises(RequestError) as caught:
        make_plan(parse(site), request_, JOB, tuple(f"n{i}" for i in range(nodes)))
    for word in words:
        assert word in str(caught.value)


def test_a_very_large_job_has_servers_on_as_many_nodes_as_beegfs_has_numbers_for() -> None:
    paths = ", ".join(f'"/nvme{index}/b"' for index in range(12))
    site = parse(f'[backend]\ndefault = "beegfs"\n[storage]\npaths = [{paths}]\n[beegfs]\nlicensed = true')
    nodes = tuple(f"n{index}" for index in range(6000))
    plan = make_plan(site, Request(meta="all"), JOB, nodes)
    assert plan.storage_nodes == plan.meta_nodes == plan.servers == nodes[:5461]
    assert max(layout.targets(plan)) == 5461 * 12
    for asked in (Request(storage=5462), Request(meta=5462)):
        with pytest.raises(RequestError, match="this job has 5461 nodes that BeeGFS has numbers for"):
            make_plan(site, asked, JOB, nodes)
    with pytest.raises(RequestError, match="even number with storage=N"):
        make_plan(site, Request(mirror=True), JOB, nodes)
    assert len(make_plan(site, Request(), JOB, nodes[:5461]).servers) == 5461
    gluster = make_plan(site, Request(backend="glusterfs"), JOB, nodes)
    assert gluster.servers == nodes


def test_capacity_is_spread_over_all_targets() -> None:
    site = parse('[storage]\nkind = "image"\npaths = ["/a/b", "/c/d"]')
    plan = make_plan(site, Request(capacity=2**40), JOB, ("n1", "n2"))
    assert plan.target_capacity == 2**38
    assert [target.image for target in plan.targets] == ["/a/b/job-42/image", "/c/d/job-42/image"]


def test_planning_loads_nothing_that_touches_the_machine() -> None:
    code = (
        "import sys; import beeond_ctl.plan, beeond_ctl.request, beeond_ctl.config; "
        "print([m for m in ('subprocess', 'zmq', 'click', 'paramiko', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
