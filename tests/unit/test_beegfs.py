"""Commands, configuration and answers of both generations of BeeGFS, as real daemons were seen to take them."""

from __future__ import annotations

import json
import os
import tomllib
from typing import TYPE_CHECKING, Any

import pytest

from beeond_ctl import check, storage
from beeond_ctl import config as configuration
from beeond_ctl.backends import Answer, Command, Keys, beegfs
from beeond_ctl.backends.beegfs import hashdirs, layout
from beeond_ctl.config import SiteConfig
from beeond_ctl.errors import ConfigError, NodeError, RequestError
from beeond_ctl.plan import BLOCK, Job, Plan, make_plan
from beeond_ctl.request import Request
from beeond_ctl.units import parse_size
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
    ports = {layout.port(plan, number) for number in layout.PORTS.values()}
    assert len(ports) == len(layout.PORTS)
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
        "logNumLines": "2500",
        "logNumRotatedFiles": "1",
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
    numbers = [layout.target_number(plan, node, index) for node in plan.nodes for index in (0, 1)]
    assert numbers == [1, 2, 3, 4, 5, 6]


def test_mgmtd_8_names_every_file_and_is_initialised_once() -> None:
    mgmtd = beegfs.services(make("8"), "n1", KEYS)[0]
    run, database = "/run/beeond-ctl/jobs/7", "/nvme/beeond/job-7/data/mgmtd.sqlite"
    start = ("beegfs-mgmtd", "--config-file", f"{run}/beegfs-mgmtd.toml", "--db-file", database,
             "--log-target", "stderr")  # fmt: skip
    assert mgmtd.argv == (
        "chrt", "--batch", "0",
        *start, "--tls-disable", "--auth-file", f"{run}/beegfs-auth", "--license-disable", "--port-shift", "15997",
        "--interfaces", "! lo,*",
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
    commands = (how.command, *questions, *beegfs.arrange(plan, KEYS))
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


def entry(kind: str, number: int, reachability: str = "Online", consistency: str = "Good") -> dict[str, Any]:
    """As 8.3.1 prints it."""
    code = {"meta": 2, "storage": 3}[kind]
    return {
        "alias": f"target_{kind}_{number}",
        "id": {"num_id": number, "node_type": code},
        "type": code,
        "reachability": reachability,
        "consistency": consistency,
    }


def test_7_4_wants_its_servers_online_and_good_before_anything_is_written() -> None:
    questions = beegfs.usable(make(), KEYS)
    assert questions[0].missing(LIST_7)["n1"] == "storage server Probably-offline and Good"
    assert "n3" not in questions[0].missing(LIST_7)


def test_8_is_asked_once_for_all() -> None:
    (question,) = beegfs.membership(make("8"), KEYS)
    assert question.command.argv == (
        "beegfs", "--mgmtd-addr", "n1:24007", "--tls-disable", "--auth-file", "/run/beeond-ctl/jobs/7/beegfs-auth",
        "--output", "json", "target", "list", "--state",
    )  # fmt: skip
    every = [entry("meta", 1), *(entry("storage", number, "Offline") for number in (1, 2, 3))]
    assert question.missing(json.dumps(every).encode()) == {}
    (question,) = beegfs.usable(make("8"), KEYS)
    every = [entry("meta", 1), entry("storage", 1)]
    every += [entry("storage", 2, "Offline"), entry("storage", 3, "Online", "Needs-resync")]
    assert question.missing(json.dumps(every).encode()) == {
        "n2": "storage server Offline and Good",
        "n3": "storage server Online and Needs-resync",
    }
    assert question.missing(json.dumps(every[1:]).encode())["n1"] == "meta server not registered"


def test_a_target_named_by_text_is_understood_too() -> None:
    (question,) = beegfs.usable(make("8"), KEYS)
    kinds = [("m", "meta", 1), *(("s", "storage", number) for number in (1, 2, 3))]
    every = [
        {"id": f"{letter}:{number}", "type": kind, "reachability": "Online", "consistency": "Good"}
        for letter, kind, number in kinds
    ]
    assert question.missing(json.dumps(every).encode()) == {}


def test_a_long_list_in_several_pieces_is_read_whole() -> None:
    nodes = tuple(f"n{index}" for index in range(1, 251))
    (question,) = beegfs.membership(make("8", nodes=nodes), KEYS)
    every = [entry("meta", 1), *(entry("storage", number) for number in range(1, 251))]
    text = "\n".join(json.dumps(every[first : first + 100]) for first in range(0, 251, 100))
    assert question.missing(text.encode()) == {}
    assert set(question.missing(text[: text.rindex("[{")].encode())) == set(nodes[199:])


def test_an_unreadable_answer_means_that_all_are_missing() -> None:
    (question,) = beegfs.membership(make("8"), KEYS)
    for answer in (b"", b"Error: no", b"[{", b"[1, 2]", b"\xff{}"):
        assert set(question.missing(answer)) == set(NODES)


@pytest.mark.parametrize(
    ("edition", "answer", "answered"),
    [
        ("7.4", Answer(3, b"TargetID     Reachability\n", b"[ERROR: No metadata servers found]"), True),
        ("7.4", Answer(3, b"", b"Management node communication failed: n1"), False),
        ("7.4", Answer(3, b"", b"Metadata nodes download failed"), False),
        ("8", Answer(1, b"", b"Error: unable to verify licensed status: ..."), True),
        ("8", Answer(0, b"", b""), True),
        ("8", Answer(1, b"", b"Error: rpc error: code = Unavailable desc = connection error"), False),
    ],
)
def test_an_empty_list_is_told_from_silence(edition: str, answer: Answer, answered: bool) -> None:
    assert beegfs.membership(make(edition), KEYS)[0].answered(answer) is answered


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


# --- layout -----------------------------------------------------------------------------------------------


def arranged(edition: str = "7.4", **how: Any) -> list[tuple[str, ...]]:
    """What the leader runs, without what is the same for all commands."""
    skip = 2 if edition == "7.4" else 8
    return [command.argv[skip:] for command in beegfs.arrange(make(edition, **how), KEYS)]


def test_stripes_are_as_asked_and_at_most_over_all_targets() -> None:
    assert arranged() == [("--setpattern", "--unmounted", "--chunksize=1m", "--numtargets=3", "/")]
    found = arranged("8", request=Request(stripe_count=2, chunk_size=512 * 1024))
    assert found == [
        ("entry", "set", "--mount=none", "--chunk-size", "512Ki", "--num-targets", "2", "/"),
        ("entry", "info", "--mount=none", "/"),
    ]


def test_stripe_directories_of_site_and_user_belong_to_the_user() -> None:
    how: dict[str, Any] = {"request": Request(stripe_dirs="2"), "beegfs": {"stripe_directories": [8]}}
    found = arranged(**how)
    owner = ("--createdir", "--unmounted", "--access=0700", "--uid=2001", "--gid=2001")
    assert found[1:] == [
        (*owner, "/stripe_8"), ("--setpattern", "--unmounted", "--chunksize=1m", "--numtargets=3", "/stripe_8"),
        (*owner, "/stripe_2"), ("--setpattern", "--unmounted", "--chunksize=1m", "--numtargets=2", "/stripe_2"),
    ]  # fmt: skip
    found = arranged("8", **how)
    assert found[0] == (
        "entry", "create", "directory", "--mount=none", "--permissions", "0700", "--uid", "2001", "--gid", "2001",
        "/stripe_8", "/stripe_2",
    )  # fmt: skip
    assert [words[-3:] for words in found[1:3]] == [
        ("3", "/", "/stripe_8"),
        ("--num-targets", "2", "/stripe_2"),
    ]


def test_pools_have_directories_and_the_root_is_not_left_without_targets() -> None:
    how: dict[str, Any] = {
        "storage": {"paths": ["/fast", "/large0", "/large1"]},
        "beegfs": {"licensed": True, "pools": {"quick": ["/fast"], "default": ["/large1"]}},
    }
    found = arranged(**how)
    assert found[0] == ("--addstoragepool", "--id=2", "--desc=quick", "--targets=1,4,7")
    assert found[1][-2:] == ("--numtargets=4", "/")
    assert found[3][-3:] == ("--numtargets=3", "--storagepoolid=2", "/quick")
    how["beegfs"] = {"licensed": True, "pools": {"quick": ["/fast"], "bulk": ["/large0", "/large1"]}}
    found = arranged(**how)
    assert found[2][-2:] == ("--storagepoolid=2", "/")
    assert arranged("8", **how)[0] == ("pool", "create", "quick", "--num-id", "2", "--targets", "s:1,s:4,s:7")


def test_mirroring_pairs_servers_before_anybody_mounts() -> None:
    how: dict[str, Any] = {
        "request": Request(mirror=True, stripe_count=4), "nodes": ("n1", "n2", "n3", "n4"),
        "beegfs": {"licensed": True},
    }  # fmt: skip
    found = arranged(**how)
    assert found[:3] == [
        ("--addmirrorgroup", "--automatic", "--force", "--nodetype=storage"),
        ("--addmirrorgroup", "--automatic", "--force", "--nodetype=meta"),
        ("--mirrormd",),
    ]
    assert found[3][-3:] == ("--numtargets=2", "--pattern=buddymirror", "/")
    plan = make(**how)
    assert plan.meta_nodes == ("n1", "n2")
    assert not beegfs.mounts_early(plan)


def proof(edition: str, index: int, **how: Any) -> Command:
    return beegfs.arrange(make(edition, **how), KEYS)[index]


def test_what_8_says_with_exit_code_1_is_read_back() -> None:
    how: dict[str, Any] = {"beegfs": {"stripe_directories": [1]}}
    made, info = proof("8", 0, **how).wrong, proof("8", -1, **how).wrong
    assert made is not None
    assert info is not None
    assert made(b'[{"name": "/stripe_1", "status": 0}]') == ""
    assert made(b'[{"name": "/stripe_1", "status": 7}]') == ""
    assert made(b'[{"name": "/stripe_1", "status": 5}]') == "directories were not made: /stripe_1"
    assert made(b"") == "directories were not made: /stripe_1"
    seen = [
        {"path": "/", "stripe_pattern": "RAID0 (3x1M)"},
        {"path": "/stripe_1", "stripe_pattern": "RAID0 (1x1M)"},
    ]
    assert info(json.dumps(seen).encode()) == ""
    seen[1]["stripe_pattern"] = "RAID0 (1x512K)"
    assert info(json.dumps(seen).encode()) == "stripe patterns were not set: /stripe_1 has RAID0 (1x512K)"
    seen[1]["stripe_pattern"] = "RAID0 (4x512K)"
    assert info(json.dumps(seen).encode()) == "stripe patterns were not set: /stripe_1 has RAID0 (4x512K)"


@pytest.mark.parametrize(
    ("size", "asked", "shown"), [("64KiB", "64Ki", "64K"), ("1GiB", "1024Mi", "1G"), ("2GiB", "2048Mi", "2G")]
)
def test_8_shows_a_chunk_size_with_its_own_unit(size: str, asked: str, shown: str) -> None:
    how: dict[str, Any] = {"request": Request(chunk_size=parse_size(size))}
    assert asked in arranged("8", **how)[0]
    told = proof("8", -1, **how).wrong
    assert told is not None
    assert told(json.dumps([{"path": "/", "stripe_pattern": f"RAID0 (3x{shown})"}]).encode()) == ""
    for other in (f"3x{shown}x", "3x512K", "3x", f"2x{shown}", "3xnone"):
        assert "not set: /" in told(
            json.dumps([{"path": "/", "stripe_pattern": f"RAID0 ({other})"}]).encode()
        )


# --- who serves -------------------------------------------------------------------------------------------


def test_a_node_without_storage_serves_nothing_and_leads_nobody() -> None:
    how: dict[str, Any] = {
        "nodes": ("gpu1", "n1", "n2"), "storage": {"without": ["gpu*"]}, "request": Request(meta="all"),
    }  # fmt: skip
    plan = make(**how)
    assert (plan.leader, plan.servers, plan.meta_nodes) == ("n1", ("n1", "n2"), ("n1", "n2"))
    assert names(plan, "gpu1") == []
    assert names(plan, "n1") == ["beegfs-mgmtd", "beegfs-meta", "beegfs-storage"]
    assert beegfs.mount(plan, "gpu1", KEYS).helpers[0].name == "beegfs-helperd"
    assert list(layout.targets(plan).values()) == ["n1", "n2"]
    with pytest.raises(RequestError, match=r"no node of this job has storage"):
        make(nodes=("gpu1", "gpu2"), storage={"without": ["gpu*"]})
    with pytest.raises(RequestError, match=r"meta=3 is too much: this job has 2 nodes"):
        make(nodes=("gpu1", "n1", "n2"), storage={"without": ["gpu*"]}, request=Request(meta=3))


def test_fewer_storage_servers_share_what_was_asked_for() -> None:
    plan = make(request=Request(storage=2, capacity=8 << 30))
    assert (plan.storage_nodes, plan.servers) == (("n1", "n2"), ("n1", "n2"))
    assert plan.target_capacity == 4 << 30
    assert names(plan, "n3") == []
    plan = make(request=Request(storage=1, meta=2))
    assert plan.servers == ("n1", "n2")
    assert names(plan, "n2") == ["beegfs-meta"]


def test_a_node_prefers_its_own_servers_if_it_is_asked_to() -> None:
    plan = make(request=Request(prefer_local=True), storage={"paths": ["/nvme0/b", "/nvme1/b"]})
    command = beegfs.mount(plan, "n2", KEYS).command
    assert command is not None
    files = {file.path.rpartition("/")[2]: file.content for file in command.files}
    assert files["beegfs-preferred-storage"] == "3\n4\n"
    conf = settings(files["beegfs-client.conf"])
    assert conf["tunePreferredStorageFile"] == f"{plan.run_dir}/beegfs-preferred-storage"
    assert "tunePreferredMetaFile" not in conf
    assert "tunePreferredStorageFile" not in settings(written_client(make(), "n2"))


def written_client(plan: Plan, node: str) -> str:
    command = beegfs.mount(plan, node, KEYS).command
    assert command is not None
    return command.files[0].content


def test_interfaces_are_the_ones_that_the_user_chose() -> None:
    plan = make("8", request=Request(interfaces="ib1"), beegfs={"interfaces": ["ib0", "ib1"]})
    mgmtd, *others = beegfs.services(plan, "n1", KEYS)
    assert mgmtd.argv[-2:] == ("--interfaces", "ib1")
    assert all(settings(service.files[0].content)["connInterfacesList"] == "ib1" for service in others)


@pytest.mark.parametrize("edition", ["7.4", "8"])
def test_a_metadata_server_is_started_last_and_several_twice_and_nothing_else(edition: str) -> None:
    def ones(how: str, meta: str) -> list[str]:
        services = beegfs.services(make(edition, request=Request(meta=meta)), "n1", KEYS)
        return [service.name for service in services if getattr(service, how)]

    assert ones("last", "1") == ["beegfs-meta"]
    assert ones("twice", "1") == []
    assert ones("last", "2") == []
    assert ones("twice", "2") == ["beegfs-meta"]


# --- what a site adds -------------------------------------------------------------------------------------


def test_settings_of_the_site_reach_each_program_and_its_generation() -> None:
    added = {
        "mgmtd": {"tuneNumWorkers": 9, "log-level": "info", "cap-pool-meta-limits": {"space-low": "1G"}},
        "storage": {"tuneNumWorkers": 32}, "client": {"tuneFileCacheType": "native"},
    }  # fmt: skip
    plan = make(beegfs={"settings": added})
    mgmtd, _, storage_server = beegfs.services(plan, "n1", KEYS)
    assert settings(mgmtd.files[0].content)["tuneNumWorkers"] == "9"
    assert "log-level" not in mgmtd.files[0].content
    assert settings(storage_server.files[0].content)["tuneNumWorkers"] == "32"
    assert settings(written_client(plan, "n1"))["tuneFileCacheType"] == "native"
    toml = beegfs.services(make("8", beegfs={"settings": added}), "n1", KEYS)[0].files[0].content
    read = tomllib.loads(toml)
    assert read["log-level"] == "info"
    assert read["cap-pool-meta-limits"] == {"space-low": "1G"}
    assert "tuneNumWorkers" not in read


@pytest.mark.parametrize(
    ("program", "key"),
    [
        ("storage", "connPortShift"), ("meta", "connMetaPortTCP"), ("client", "connAuthFile"),
        ("client", "sysMgmtdHost"), ("storage", "storeStorageDirectory"), ("meta", "connDisableAuthentication"),
        ("mgmtd", "db-file"), ("mgmtd", "grpc-port"), ("mgmtd", "tls-disable"), ("helperd", "runDaemonized"),
        ("storage", "connInterfacesFile"), ("meta", "storeFsUUID"), ("mgmtd", "sysAllowNewServers"),
        ("client", "tuneUseGlobalFileLocks"),
    ],
)  # fmt: skip
def test_a_setting_that_would_break_isolation_is_refused(program: str, key: str) -> None:
    with pytest.raises(ValueError, match=f"{key} is set for each instance by itself"):
        make(beegfs={"settings": {program: {key: "1"}}})


def test_a_setting_cannot_smuggle_in_a_second_line() -> None:
    for program, added in (
        ("storage", {"tuneNumWorkers": "1\nconnPortShift = 0"}),
        ("storage", {"tuneNumWorkers\nconnPortShift": "0"}),
        ("storage", {"tuneNumWorkers": {"connPortShift": 0}}),
        ("mgmtd", {"cap-pool": {"db-file": "/x"}}),
        ("ctl", {"x": "y"}),
    ):
        with pytest.raises(ValueError, match="beegfs-"):
            make(beegfs={"settings": {program: added}})


def test_beeonds_files_are_read_and_belong_to_the_configuration_from_then_on(tmp_path: Path) -> None:
    (tmp_path / "beegfs-storage.conf").write_text("# more\ntuneNumWorkers = 16\ntuneFileReadSize=64k\n\n")
    (tmp_path / "beegfs-mgmtd.toml").write_text('log-level = "info"\n')
    (tmp_path / "pools").write_text("# BeeOND's\nquick:/nvme0/b\n\nbulk:/nvme1/b,/nvme2/b\n")
    text = f"""
    [storage]
    paths = ["/nvme0/b", "/nvme1/b", "/nvme2/b"]
    [beegfs]
    licensed = true
    conf_dir = "{tmp_path}"
    pool_file = "{tmp_path}/pools"
    [beegfs.settings.storage]
    tuneNumWorkers = 8
    """
    (tmp_path / "config.toml").write_text(text)
    found = configuration.load(tmp_path / "config.toml")
    assert found.beegfs.settings == {
        "storage": {"tuneNumWorkers": 8, "tuneFileReadSize": "64k"},
        "mgmtd": {"log-level": "info"},
    }
    assert found.beegfs.pools == {"quick": ["/nvme0/b"], "bulk": ["/nvme1/b", "/nvme2/b"]}
    assert SiteConfig.model_validate(found.model_dump(mode="json")) == found


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("beegfs-meta.conf", "connAuthFile = /etc/x\n", "connAuthFile is set for each instance"),
        ("beegfs-meta.conf", "nonsense\n", "line 1: 'nonsense' is not KEY = VALUE"),
        ("pools", "quick: /a\n", "line 1: .* is not NAME:PATH,PATH"),
        ("pools", "quick:/a\nQUICK:/b\n", "line 2: pool QUICK is there twice"),
        ("pools", "quick:/elsewhere\n", "/elsewhere is not one of storage.paths"),
    ],
)
def test_a_mistake_in_beeonds_files_is_named_with_its_file(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / "pools").write_text("quick:/nvme/beeond\n")
    (tmp_path / name).write_text(content)
    text = f'[beegfs]\nlicensed = true\nconf_dir = "{tmp_path}"\npool_file = "{tmp_path}/pools"\n'
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        configuration.load(tmp_path / "config.toml")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(mirror=True), "licence"),
        (Request(meta=4), "this job has 3 nodes"),
        (Request(stripe_count=4), "this job has 3 targets"),
        (Request(stripe_count=3, storage=2), "this job has 2 targets"),
        (Request(storage=4), "this job has 3 nodes"),
        (Request(interfaces="ib0"), "this site names none"),
    ],
)
def test_what_cannot_be_is_refused(request_: Request, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make(request=request_)


def test_mirroring_wants_pairs() -> None:
    for asked, message in (
        (Request(mirror=True), "an even number with storage=N"),
        (Request(mirror=True, storage=2, meta=3), "an even number with meta=N"),
        (Request(mirror=True, storage=2, prefer_local=True), "exclude each other"),
    ):
        with pytest.raises(RequestError, match=message):
            make(request=asked, beegfs={"licensed": True})
    assert make(request=Request(mirror=True, storage=2), beegfs={"licensed": True}).meta_nodes == ("n1", "n2")


# --- metadata ---------------------------------------------------------------------------------------------


def test_the_skeleton_is_what_a_metadata_server_looks_for() -> None:
    directories = list(hashdirs.directories())
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
    assert tree == set(hashdirs.directories())


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


@pytest.mark.parametrize(
    ("edition", "there", "warned"), [("8", False, True), ("8", True, False), ("7.4", False, False)]
)
def test_a_machine_without_a_uuid_is_warned_of_where_servers_search_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edition: str, there: bool, warned: bool
) -> None:
    monkeypatch.setattr(check, "_MACHINE_UUID", tmp_path if there else tmp_path / "missing")
    monkeypatch.setattr(beegfs, "edition", lambda *_: edition)
    told = [each.text for each in check._programs(make().config) if each.verdict == "warn"]
    assert any("missing: each server" in text for text in told) == warned
