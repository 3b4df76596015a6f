"""Commands, configuration and answers of both generations of BeeGFS, as real daemons were seen to take them."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from beeond_ctl import storage
from beeond_ctl.backends import Keys, beegfs
from beeond_ctl.config import SiteConfig
from beeond_ctl.errors import ConfigError, NodeError, RequestError
from beeond_ctl.plan import BLOCK, Job, Plan, make_plan
from beeond_ctl.request import Request
from tests.standins.beegfs import programs

if TYPE_CHECKING:
    from pathlib import Path

KEYS = Keys(authentication="5ecret" * 10)
JOB = Job(job_id=7, uid=2001, gid=2001, user="alice")
NODES = ("n1", "n2", "n3")


def make(
    edition: str = "7.4", *, request: Request | None = None, nodes: tuple[str, ...] = NODES, **sections: Any
) -> Plan:
    config = SiteConfig.model_validate({
        "backend": {"default": "beegfs", "allowed": ["beegfs"], "local_for_one_node": False}, **sections,
    })  # fmt: skip
    plan = make_plan(config, request or Request(), JOB, nodes, block=24000)
    return Plan(plan.config, plan.request, plan.job, plan.nodes, plan.backend, plan.block, edition)


def settings(text: str) -> dict[str, str]:
    return dict(line.split(" = ", 1) for line in text.splitlines())


def written_files(plan: Plan, node: str, name: str) -> dict[str, str]:
    service = next(service for service in beegfs.services(plan, node, KEYS) if service.name == name)
    return {file.path: file.content for file in service.files}


def names(plan: Plan, node: str) -> list[str]:
    return [service.name for service in beegfs.services(plan, node, KEYS)]


# --- which generation -------------------------------------------------------------------------------------


def found(*there: str) -> Any:
    return lambda name: f"/opt/beegfs/sbin/{name}" if name in there else None


@pytest.mark.parametrize("edition", ["7.4", "8"])
def test_the_generation_is_the_one_whose_programs_are_there(edition: str) -> None:
    config = make().config
    assert beegfs.edition(config, found(*programs.PROGRAMS[edition])) == edition


def test_a_node_without_beegfs_is_told_what_it_lacks() -> None:
    with pytest.raises(NodeError, match=r"beegfs-storage .*is not in"):
        beegfs.edition(make().config, found("beegfs-mgmtd", "beegfs-meta", "beegfs"))


def test_both_generations_on_a_node_need_a_choice() -> None:
    both = found(*programs.PROGRAMS["7.4"], *programs.PROGRAMS["8"])
    with pytest.raises(NodeError, match=r"set beegfs\.version"):
        beegfs.edition(make().config, both)
    assert beegfs.edition(make(beegfs={"version": "8"}).config, both) == "8"


def test_a_pinned_generation_that_is_not_there_is_an_error() -> None:
    with pytest.raises(NodeError, match=r"beegfs-ctl, beegfs-helperd of version 7\.4"):
        beegfs.edition(make(beegfs={"version": "7.4"}).config, found(*programs.PROGRAMS["8"]))


# --- ports ------------------------------------------------------------------------------------------------


def test_all_ports_fit_into_the_block_and_leave_the_last_to_the_rendezvous() -> None:
    plan = make()
    ports = {beegfs.port(plan, number) for number in beegfs.PORTS.values()}
    assert len(ports) == len(beegfs.PORTS)
    assert ports <= set(range(plan.block, plan.block + BLOCK - 1))
    assert not ports & set(plan.rendezvous_ports)


def test_a_range_below_beegfs_own_ports_is_refused() -> None:
    plan = make()
    low = Plan(plan.config, plan.request, plan.job, plan.nodes, plan.backend, 4000, "8")
    with pytest.raises(ConfigError, match=r"network\.ports"):
        beegfs.services(low, "n1", KEYS)


# --- servers ----------------------------------------------------------------------------------------------


def test_servers_are_where_the_request_wants_them() -> None:
    assert names(make(), "n1") == ["beegfs-mgmtd", "beegfs-meta", "beegfs-storage"]
    assert names(make(), "n2") == ["beegfs-storage"]
    assert names(make(request=Request(meta=2)), "n2") == ["beegfs-meta", "beegfs-storage"]
    assert names(make(request=Request(meta="all")), "n3") == ["beegfs-meta", "beegfs-storage"]
    assert names(make(beegfs={"meta": "all"}), "n3") == ["beegfs-meta", "beegfs-storage"]


def test_only_mgmtd_comes_first() -> None:
    for edition in ("7.4", "8"):
        first = [service.name for service in beegfs.services(make(edition), "n1", KEYS) if service.first]
        assert first == ["beegfs-mgmtd"]


@pytest.mark.parametrize("edition", ["7.4", "8"])
def test_every_key_is_one_that_the_program_knows(edition: str) -> None:
    plan = make(edition, beegfs={"interfaces": ["ib0", "eth0"], "rdma": True})
    helpers = beegfs.mount(plan, "n1", KEYS).helpers
    for service in (*beegfs.services(plan, "n1", KEYS), *helpers):
        for file in service.files:
            if file.path.endswith(".conf"):
                assert set(settings(file.content)) <= programs.KEYS[service.name], service.name
    command = beegfs.mount(plan, "n1", KEYS).command
    assert command is not None
    assert set(settings(command.files[0].content)) <= programs.KEYS["mount.beegfs"]


def test_a_server_is_configured_by_its_own_file_alone() -> None:
    plan = make("8", storage={"paths": ["/nvme0/b", "/nvme1/b"]}, network={"suffix": "-ib"})
    server = next(
        service for service in beegfs.services(plan, "n2", KEYS) if service.name == "beegfs-storage"
    )
    path = "/run/beeond-ctl/jobs/7/beegfs-storage.conf"
    assert server.argv == ("beegfs-storage", f"cfgFile={path}")
    assert settings(server.files[0].content) == {
        "sysMgmtdHost": "n1-ib",
        "storeStorageDirectory": "/nvme0/b/job-7/data/storage,/nvme1/b/job-7/data/storage",
        "storeAllowFirstRunInit": "true",
        "connPortShift": "15997",
        "connUseRDMA": "false",
        "logType": "logfile",
        "logStdFile": server.log,
        "connAuthFile": "/run/beeond-ctl/jobs/7/beegfs-auth",
        "runDaemonized": "false",
    }


def test_targets_have_numbers_that_the_plan_knows() -> None:
    plan = make(storage={"paths": ["/nvme0/b", "/nvme1/b"]})
    written = written_files(plan, "n2", "beegfs-storage")
    assert written["/nvme0/b/job-7/data/storage/nodeNumID"] == "2\n"
    assert written["/nvme0/b/job-7/data/storage/targetNumID"] == "3\n"
    assert written["/nvme1/b/job-7/data/storage/targetNumID"] == "4\n"
    assert written["/nvme1/b/job-7/data/storage/targetID"] == "target-4\n"
    numbers = [beegfs.target_number(plan, node, index) for node in plan.nodes for index in (0, 1)]
    assert numbers == [1, 2, 3, 4, 5, 6]


def test_mgmtd_8_names_every_file_and_is_initialised_once() -> None:
    mgmtd = beegfs.services(make("8"), "n1", KEYS)[0]
    run, database = "/run/beeond-ctl/jobs/7", "/nvme/beeond/job-7/data/mgmtd.sqlite"
    start = ("beegfs-mgmtd", "--config-file", f"{run}/beegfs-mgmtd.toml", "--db-file", database,
             "--log-target", "stderr")  # fmt: skip
    assert mgmtd.argv == (
        *start, "--tls-disable", "--auth-file", f"{run}/beegfs-auth", "--license-disable", "--port-shift", "15997",
    )  # fmt: skip
    assert mgmtd.once is not None
    assert mgmtd.once.command.argv == (*start, "--init")
    assert mgmtd.once.creates == database


@pytest.mark.parametrize("edition", ["7.4", "8"])
def test_the_key_is_in_a_file_of_roots_and_nowhere_else(edition: str) -> None:
    plan = make(edition)
    how = beegfs.mount(plan, "n1", KEYS)
    assert how.command is not None
    services = [*beegfs.services(plan, "n1", KEYS), *how.helpers]
    questions = [question.command for question in beegfs.membership(plan, KEYS)]
    commands = (how.command, *questions, *beegfs.settle(plan, KEYS))
    for argv, files in [(part.argv, part.files) for part in services] + [
        (part.argv, part.files) for part in commands
    ]:
        assert KEYS.authentication not in " ".join(argv)
        for file in files:
            if KEYS.authentication in file.content:
                assert (file.path, file.mode) == ("/run/beeond-ctl/jobs/7/beegfs-auth", 0o600)
    assert all(any(KEYS.authentication in file.content for file in service.files) for service in services)


def test_a_path_that_would_be_two_is_refused() -> None:
    with pytest.raises(ConfigError, match="plainer"):
        beegfs.services(make(storage={"paths": ["/nvme,0/b"]}), "n1", KEYS)


# --- the list of members ----------------------------------------------------------------------------------

LIST_7 = b"""\
TargetID     Reachability  Consistency   NodeID
========     ============  ===========   ======
       1 Probably-offline         Good   beegfs-storage n1 [ID: 1]
       3           Online         Good   beegfs-storage n3 [ID: 3]
"""


def test_7_4_asks_for_storage_and_metadata_and_is_content_with_registered_ones() -> None:
    questions = beegfs.membership(make(), KEYS)
    assert [question.command.argv[1:] for question in questions] == [
        ("--cfgFile=/run/beeond-ctl/jobs/7/beegfs-ctl.conf", "--listtargets", f"--nodetype={kind}", "--state",
         "--longnodes")
        for kind in ("storage", "meta")
    ]  # fmt: skip
    assert questions[0].missing(LIST_7) == {"n2": "storage server not registered"}
    assert questions[1].missing(LIST_7) == {}
    assert set(questions[0].missing(b"")) == {"n1", "n2", "n3"}


def entry(kind: str, number: int, reachability: str = "Online", consistency: str = "Good") -> dict[str, str]:
    return {
        "id": f"{kind[0]}:{number}",
        "type": kind,
        "reachability": reachability,
        "consistency": consistency,
    }


def test_8_waits_for_online_and_good() -> None:
    (question,) = beegfs.membership(make("8"), KEYS)
    assert question.command.argv == (
        "beegfs", "--mgmtd-addr", "n1:24007", "--tls-disable", "--auth-file", "/run/beeond-ctl/jobs/7/beegfs-auth",
        "--output", "json", "target", "list", "--state",
    )  # fmt: skip
    every = [entry("meta", 1), *(entry("storage", number) for number in (1, 2, 3))]
    assert question.missing(json.dumps(every).encode()) == {}
    every[2] = entry("storage", 2, "Offline")
    every[3] = entry("storage", 3, "Online", "Needs-resync")
    assert question.missing(json.dumps(every).encode()) == {
        "n2": "storage server Offline and Good",
        "n3": "storage server Online and Needs-resync",
    }
    assert question.missing(json.dumps(every[1:]).encode())["n1"] == "meta server not registered"


def test_a_long_list_in_several_pieces_is_read_whole() -> None:
    nodes = tuple(f"n{index}" for index in range(1, 251))
    (question,) = beegfs.membership(make("8", nodes=nodes), KEYS)
    every = [entry("meta", 1), *(entry("storage", number) for number in range(1, 251))]
    text = "\n".join(json.dumps(every[first : first + 100]) for first in range(0, 251, 100))
    assert question.missing(text.encode()) == {}
    assert set(question.missing(text[: text.rindex("[")].encode())) == set(nodes[199:])


def test_an_unreadable_answer_means_that_all_are_missing() -> None:
    (question,) = beegfs.membership(make("8"), KEYS)
    for answer in (b"", b"Error: no", b"[{", b"[1, 2]", b"\xff{}"):
        assert set(question.missing(answer)) == set(NODES)


# --- clients ----------------------------------------------------------------------------------------------


def test_only_7_4_has_a_helper_for_its_mount() -> None:
    assert [service.name for service in beegfs.mount(make("7.4"), "n2", KEYS).helpers] == ["beegfs-helperd"]
    assert beegfs.mount(make("8"), "n2", KEYS).helpers == ()


def test_the_mount_is_without_devices_and_set_user_id() -> None:
    command = beegfs.mount(make(), "n2", KEYS).command
    assert command is not None
    assert command.argv == (
        "mount", "-n", "-t", "beegfs", "-o", "nodev,nosuid,cfgFile=/run/beeond-ctl/jobs/7/beegfs-client.conf",
        "beegfs_nodev", "/mnt/beeond/7",
    )  # fmt: skip


def test_stripes_are_as_asked_and_at_most_over_all_targets() -> None:
    def pattern(edition: str, request: Request | None = None) -> tuple[str, ...]:
        return beegfs.settle(make(edition, request=request), KEYS)[1].argv

    assert pattern("7.4")[2:] == ("--setpattern", "--unmounted", "--chunksize=1m", "--numtargets=3", "/")
    assert pattern("8", Request(stripe_count=2, chunk_size=512 * 1024))[-8:] == (
        "entry", "set", "--mount=none", "--chunk-size", "512Ki", "--num-targets", "2", "/",
    )  # fmt: skip


def test_stripe_directories_are_the_users_and_no_link_is_followed() -> None:
    commands = [command.argv for command in beegfs.settle(make(beegfs={"stripe_directories": [8]}), KEYS)]
    assert commands[0] == ("chmod", "0700", "/mnt/beeond/7")
    assert commands[2] == ("mkdir", "-m", "0700", "/mnt/beeond/7/stripe_8")
    assert commands[3][-2:] == ("--numtargets=3", "/stripe_8")
    assert commands[4] == ("chown", "-h", "2001:2001", "/mnt/beeond/7/stripe_8")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(mirror=True), "licence"),
        (Request(meta=4), "this job has 3 nodes"),
        (Request(stripe_count=4), "this job has 3 targets"),
    ],
)
def test_what_cannot_be_is_refused(request_: Request, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make(request=request_)


# --- metadata ---------------------------------------------------------------------------------------------


def test_the_skeleton_is_what_a_metadata_server_looks_for() -> None:
    directories = list(beegfs.skeleton_directories())
    assert len(directories) == len(set(directories)) == 4 * (1 + 128 + 128 * 128) + 1
    for top in programs.skeleton_tops():
        assert f"{top}/7F/7F" in directories
    seen = {""}
    for path in directories:
        assert path.rpartition("/")[0] in seen, "a directory comes before the one that it is in"
        seen.add(path)


def test_the_list_for_mkfs_opens_and_closes_every_directory() -> None:
    tree: set[str] = set()
    here: list[str] = []
    for line in beegfs.skeleton().splitlines()[3:]:
        if line == "$":
            if here:
                here.pop()
        else:
            here.append(line.split()[0])
            tree.add("/".join(here))
    assert here == []
    assert tree == set(beegfs.skeleton_directories())


def test_only_nodes_with_a_metadata_server_have_metadata() -> None:
    plan = make(request=Request(meta=2))
    assert plan.meta_nodes == ("n1", "n2")
    assert plan.metadata is not None
    assert plan.metadata.image == "/nvme/beeond/job-7/metadata"
    assert plan.metadata.template.startswith("/nvme/beeond/metadata-")


def test_a_copy_without_shared_blocks_is_the_same_and_as_sparse(tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    with source.open("wb") as file:
        for offset in (0, 5 << 20, 40 << 20):
            file.seek(offset)
            file.write(os.urandom(100_000))
        file.truncate(64 << 20)
    with source.open("rb") as reading, copy.open("wb") as writing:
        storage._clone(reading.fileno(), writing.fileno())
    assert copy.read_bytes() == source.read_bytes()
    assert copy.stat().st_blocks * 512 < 4 << 20
