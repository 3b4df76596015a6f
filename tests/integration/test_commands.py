"""The commands that people type, on the cluster they are for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.integration.on_cluster import verdicts
from tests.testbed.product import plugin_directory
from tests.waiting import wait_for

if TYPE_CHECKING:
    from tests.testbed import Cluster

pytestmark = pytest.mark.cluster


def test_check_finds_nothing_wrong_with_a_node_that_works(cluster: Cluster) -> None:
    found = verdicts(cluster, "n1")
    assert {subject for subject, (verdict, _) in found.items() if verdict == "fail"} == set()
    assert found["PrologFlags"][0] == found["SPANK plugin"][0] == found["secret"][0] == "ok"
    assert found["PrologEpilogTimeout"][0] == "warn"  # the cluster's 300 s are less than a staging may take
    assert cluster.run("n1", ["beeond-ctl", "check"], check=False).returncode == 0


def test_check_asks_for_no_secret_where_no_jobs_run(cluster: Cluster) -> None:
    found = verdicts(cluster, "login")
    assert found["secret"][0] == found["storage"][0] == "warn"
    assert {subject for subject, (verdict, _) in found.items() if verdict == "fail"} == set()


def test_check_passes_over_a_process_with_a_name_that_is_no_text(cluster: Cluster) -> None:
    odd = r"sl\377eep"
    script = (
        f"cd /tmp && ln -s /usr/bin/sleep \"$(printf '{odd}')\" && ./sl?eep 600 >/dev/null 2>&1 & echo $!"
    )
    pid = int(cluster.run("login", ["sh", "-c", f"{{ {script}; }}"], user="alice").stdout)
    try:
        wait_for(lambda: cluster.processes("login", r"\./sl.eep 600"), 10)
        assert "fail" not in {verdict for verdict, _ in verdicts(cluster, "login").values()}
    finally:
        cluster.run("login", ["sh", "-c", f"kill {pid}; rm /tmp/sl?eep"], user="alice")


def test_check_names_what_would_bite(cluster: Cluster) -> None:
    cluster.run("n1", ["touch", f"{plugin_directory()}/beeond.so"])
    cluster.run("n1", ["chmod", "644", "/etc/beeond-ctl/secret"])
    cluster.run("n1", ["chmod", "777", "/nvme/beeond"])
    try:
        found = verdicts(cluster, "n1")
        assert cluster.run("n1", ["beeond-ctl", "check"], check=False).returncode == 1
    finally:
        cluster.run("n1", ["chmod", "600", "/etc/beeond-ctl/secret"])
        cluster.run("n1", ["chmod", "700", "/nvme/beeond"])
    assert found["secret"][0] == "fail"
    assert found["storage"][0] == "fail"
    assert "/nvme/beeond" in found["storage"][1]
    assert found["slurmd"][0] == "warn"
    assert "restart" in found["slurmd"][1]


def test_anyone_may_plan_without_privileges_and_nothing_changes(cluster: Cluster) -> None:
    before = cluster.snapshots()
    text = cluster.run("login", ["beeond-ctl", "plan", "-w", "n[1-3]", "--json"], user="alice").stdout
    made = json.loads(text)
    assert (made["backend"], made["leader"], made["nodes"]) == ("glusterfs", "n1", "n[1-3]")
    assert len(made["services"]) == 2
    cluster.wait_clean(before, timeout_s=5)


def phases(cluster: Cluster, node: str) -> list[str]:
    found = json.loads(cluster.run(node, ["beeond-ctl", "status", "--json"]).stdout)
    return [instance["phase"] for instance in found]


def test_status_shows_an_instance_to_root_and_to_its_user_and_to_no_one_else(cluster: Cluster) -> None:
    make = "rm -rf go piped; mkdir piped; mkfifo piped/pipe; touch piped/file"
    cluster.run("login", ["sh", "-c", f"cd /global/alice; {make}"], user="alice")
    job = cluster.submit(
        "alice",
        "#!/bin/sh\nbeeond-ctl status --json\nuntil [ -e /global/alice/go ]; do sleep 0.1; done\n",
        "-N2", "--beeond-stage-in=/global/alice/piped:piped", "-w", "n[1-2]",
    )  # fmt: skip
    cluster.wait_job(job, "RUNNING")
    try:
        wait_for(lambda: phases(cluster, "n2") == ["ready"], 30)
        (seen,) = json.loads(cluster.run("n2", ["beeond-ctl", "status", "--json"]).stdout)
        assert (seen["job"], seen["user"], seen["phase"], seen["nodes"]) == (job, "alice", "ready", "n[1-2]")
        assert set(seen["services"].values()) == {"running"}
        assert json.loads(cluster.run("n2", ["beeond-ctl", "status", "--json"], user="bob").stdout) == []
        assert json.loads(cluster.run("n3", ["beeond-ctl", "status", "--json"]).stdout) == []
    finally:
        cluster.run("login", ["touch", "/global/alice/go"])
    assert cluster.wait_job(job)["JobState"] == "COMPLETED"
    (own,) = json.loads(cluster.job_output(job))
    assert (own["job"], own["mount"]) == (job, f"/mnt/beeond/{job}")
    (transfer,) = own["transfers"]
    assert transfer["remarks"] == ["1 entry ('pipe') not copied: neither file, directory nor link"]
    cluster.wait_idle()


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["beeond-ctl", "nonsense"], 2, ["nonsense", "--help"]),
        (["beeond-ctl", "plan", "-w", "n[1-"], 1, ["node list"]),
        (["beeond-ctl", "plan", "-w", "n1", "--beeond", "x=1"], 2, ["'x'", "capacity"]),
        (["beeond-ctl", "recover", "7"], 2, ["root"]),
        (["beeond-ctl", "--config", "/nowhere.toml", "status"], 2, ["/nowhere.toml"]),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_and_its_exit_code(
    cluster: Cluster, argv: list[str], code: int, words: list[str]
) -> None:
    done = cluster.run("n1", argv, user="alice", check=False)
    assert (done.returncode, done.stdout) == (code, "")
    assert len(done.stderr.splitlines()) == 1
    for word in words:
        assert word in done.stderr
