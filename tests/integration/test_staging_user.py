"""Staging as a user types it within a job: over all of its nodes, in the background, and what stage-out makes of it."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.on_cluster import exists
from tests.integration.site_config import CONFIG
from tests.trees import compare
from tests.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.testbed import Cluster

pytestmark = pytest.mark.cluster

NODES = ("n1", "n2", "n3")
PROGRAM = "beeond_ctl.staging"


@pytest.fixture
def site(idle_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster as a site has it, with nothing of ours on it afterwards."""
    idle_cluster.write_config(CONFIG.format(kind="directory", more=""))
    idle_cluster.run("login", ["rm", "-rf", "/global/alice/user"])
    idle_cluster.run("login", ["mkdir", "/global/alice/user"], user="alice")
    yield idle_cluster
    idle_cluster.run("ctl", ["scancel", "--user=alice"], check=False)
    idle_cluster.wait_idle()
    idle_cluster.run("login", ["rm", "-rf", "/global/alice/user"])


def events(cluster: Cluster, job: int) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in cluster.read("n1", f"/var/log/beeond-ctl/jobs/{job}.jsonl").splitlines()
    ]


def said(cluster: Cluster, name: str) -> Any:
    return json.loads(cluster.read("login", f"/global/alice/user/{name}"))


def lines(cluster: Cluster, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in cluster.read("login", f"/global/alice/user/{name}").splitlines()]


def no_leftovers(cluster: Cluster) -> bool:
    found = cluster.run("login", ["find", "/global/alice/user", "-name", ".beeond-ctl*"]).stdout
    return found == ""


def script(options: str, body: str) -> str:
    return f"#!/bin/bash\n#SBATCH --ntasks-per-node=4 {options}\n{TREE}\n{textwrap.dedent(body)}"


TREE = """
make() { mkdir -p "$1"
  for i in $(seq 12); do dd if=/dev/urandom of="$1/big$i" bs=6M count=1 iflag=fullblock status=none; done
  for i in $(seq 100); do echo $i >"$1/small$i"; done; }
slow() { mkdir -p "$1"; for i in $(seq 10); do dd if=/dev/zero of="$1/$i" bs=4M count=16 status=none; done; }
"""


def test_all_nodes_copy_and_stage_out_leaves_out_what_was_flushed(site: Cluster) -> None:
    before = site.snapshots()
    site.run("login", ["mkdir", "-p", "/global/alice/user/results/old"], user="alice")
    output = site.run_job(
        "alice",
        script(
            "-N3 --beeond-stage-out=out:/global/alice/user/results:delete",
            f"""\
        cd /global/alice/user; set -e
        make "$BEEOND/out/ck1"
        slow "$BEEOND/slow"
        beeond-ctl stage out --json --workers 1 slow by-hand >by-hand.json
        {" ".join(compare("$BEEOND/slow", "by-hand"))}
        beeond-ctl flush --quiet out/ck1
        srun --ntasks=12 true
        beeond-ctl flush --wait --quiet
        {" ".join(compare("$BEEOND/out/ck1", "results/ck1"))}
        echo changed >"$BEEOND/out/ck1/small7"
        mkdir "$BEEOND/out/late"; echo late >"$BEEOND/out/late/file"
        beeond-ctl flush --list --json >flushes.json
        beeond-ctl status --json >status.json
        beeond-ctl stage out --delete --dry-run --json out results >dry-run.json
        ls results
        beeond-ctl stage out --delete out results 2>refused && echo not refused
        echo job $SLURM_JOB_ID
        """,
        ),
        timeout_s=120,
    )
    assert output.splitlines()[:2] == ["ck1", "old"]
    assert "not refused" not in output
    job = int(re.findall(r"job (\d+)", output)[0])
    by_hand = lines(site, "by-hand.json")
    last = [event for event in by_hand if event["event"] == "progress"][-1]
    assert by_hand[-1]["proved"]
    assert {node for node, done in last["nodes"].items() if done["bytes"] > 0} == set(NODES)
    (flushed,) = said(site, "flushes.json")
    assert (flushed["state"], flushed["copied"], flushed["verified"]) == ("proved", 112, 112)
    assert "--yes" in site.read("login", "/global/alice/user/refused")
    (dry,) = lines(site, "dry-run.json")
    assert (dry["copy"], dry["skip"], dry["delete_names"]) == (2, 111, ["old"])
    (status,) = said(site, "status.json")
    assert (status["expected"]["entries"], status["expected"]["rate_of"]) == (2, "the flushes")
    assert [each["state"] for each in status["flushes"]] == ["proved"]
    site.wait_idle()
    log = events(site, job)
    (step,) = [event for event in log if event.get("step") == "stage-out"]
    summary = step["summary"]
    assert (summary["proved"], summary["copied"], summary["skipped"]) == (True, 2, 111)
    (doomed,) = [event for event in log if event["event"] == "deletes"]
    assert (doomed["count"], doomed["names"]) == (1, ["'old'"])
    assert log.index(doomed) < log.index(step)
    listing = site.run(
        "login", ["sh", "-c", "cd /global/alice/user/results; ls -A; cat ck1/small7 late/file"]
    )
    assert listing.stdout.split() == ["ck1", "late", "changed", "late"]
    assert site.job_output(job).splitlines()[-1].startswith("beeond: stage-out of 2 entries (")
    assert no_leftovers(site)
    site.wait_clean(before, timeout_s=10)


def test_ctrl_c_stops_all_nodes_and_the_printed_command_goes_on(site: Cluster) -> None:
    output = site.run_job(
        "alice",
        script(
            "-N3 --beeond",
            f"""\
        set -m; cd /global/alice/user
        make "$BEEOND/one"; slow "$BEEOND/two"
        beeond-ctl stage out --json --workers 1 . copy >events.json 2>errors &
        until grep -Eqs '"n[23]": ."bytes": [1-9]' events.json; do kill -0 %1 || exit 1; sleep 0.05; done
        kill -INT %1; wait %1; echo status $?
        srun -N3 -n3 --ntasks-per-node=1 sh -c '
            for i in $(seq 100); do
                left=$(ps -eo args | grep -c "[b]eeond_ctl.staging"); [ $left = 0 ] && break; sleep 0.1
            done
            echo $left'
        command=$(tail -1 events.json | sed 's/.*"resume": "\\([^"]*\\)".*/\\1/')
        echo "$command"
        eval "$command --json" | tail -1
        {" ".join(compare("$BEEOND", "copy"))} --exclude=.beeond-flush
        """,
        ),
        timeout_s=120,
    )
    status, *counts, command, end = output.splitlines()
    assert status == "status 130"
    assert counts == ["0", "0", "0"]
    assert command.startswith("beeond-ctl stage out ")
    done = json.loads(end)
    assert done["proved"]
    assert done["skipped"] > 0
    assert done["copied"] + done["skipped"] == 122
    assert no_leftovers(site)


# Makes a coordinator wait when it has heard that something is copied: however quick the machine, it is never done.
HELD = """
import time
from beeond_ctl import cli
from beeond_ctl.staging.coordinator import Coordinator

def report(self, node, result, take_in=Coordinator.report):
    take_in(self, node, result)
    while self.progress().entries_done and not self.finished():
        time.sleep(0.05)

Coordinator.report = report
cli.main()
"""


def test_a_flush_is_stopped_with_its_job_and_stage_out_goes_on_with_it(site: Cluster) -> None:
    # Stands in for a database, which the cluster has not.
    site.run("n1", ["mkdir", "-p", "/opt/standin"])
    site.run(
        "n1", ["tee", "/opt/standin/sacctmgr"], input='#!/bin/sh\nprintf "%s\\n" "$@" >/opt/standin/said\n'
    )
    site.run("n1", ["chmod", "755", "/opt/standin/sacctmgr"])
    more = '[slurm]\ntell_in_accounting = true\npath = ["/opt/standin", "/usr/bin"]\n'
    site.write_config(CONFIG.format(kind="directory", more="") + more)
    site.run("login", ["tee", "/global/alice/user/held"], input=HELD, user="alice")
    job = site.submit(
        "alice",
        script(
            "-N3 --beeond-stage-out=.:/global/alice/user/all",
            f"""\
        make "$BEEOND/one"; make "$BEEOND/two"
        cd "$BEEOND"; sha256sum */* >sums
        {sys.executable} -I /global/alice/user/held flush --quiet --here --workers 1 .
        until grep -Eqs '"entries_done": [1-9]' .beeond-flush/*/status.json; do sleep 0.05; done
        """,
        ),
    )
    site.wait_job(job, timeout_s=120)
    site.wait_idle()
    *_, complaint, told = site.job_output(job).splitlines()
    assert "was stopped before it was done; stage-out does the rest" in complaint or "srun" in complaint
    assert told.startswith("beeond: stage-out of ")
    accounted = site.read("n1", "/opt/standin/said").splitlines()
    assert accounted[-3:] == [f"JobId={job}", "set", f"AdminComment={told.removeprefix('beeond: ')}"]
    (step,) = [event for event in events(site, job) if event.get("step") == "stage-out"]
    summary = step["summary"]
    assert summary["proved"]
    assert summary["skipped"] > 0
    assert summary["copied"] > 0
    assert summary["copied"] + summary["skipped"] == 225
    check = ["sh", "-c", "cd /global/alice/user/all && sha256sum --quiet -c sums && ls -A"]
    assert site.run("login", check).stdout.split() == ["one", "sums", "two"]
    assert no_leftovers(site)


def test_a_shell_of_salloc_passes_the_command_to_the_nodes(site: Cluster) -> None:
    script = """
        beeond-ctl flush /nowhere x 2>&1; cd /global/alice/user
        srun -N1 -n1 sh -c 'mkdir $BEEOND/out; echo 1 >$BEEOND/out/file'
        beeond-ctl stage out out copy; echo $?; cat copy/file
    """
    done = site.run("login", ["salloc", "-Q", "-N2", "--beeond", "sh", "-c", script], user="alice")
    told = done.stdout.splitlines()
    # srun says that it failed, now before, now after; and that it had to wait, where it had to.
    assert any("not below $BEEOND" in line for line in told[:-3])
    assert told[-3].startswith("copied 1, verified 1, skipped 0, failed 0;")
    assert told[-2:] == ["0", "1"]


def test_a_lost_node_does_not_take_a_flushed_checkpoint_along(site: Cluster) -> None:
    job = site.submit(
        "alice",
        script(
            "-N3 --beeond",
            """\
        mkdir -p "$BEEOND/out/ck"; for i in $(seq 60); do echo $i >"$BEEOND/out/ck/$i"; done
        beeond-ctl flush --wait --quiet out/ck /global/alice/user/ck
        touch /global/alice/user/flushed; sleep 600
        """,
        ),
    )
    wait_for(lambda: exists(site, "/global/alice/user/flushed"), 40)
    site.power_off("n3")
    try:
        text = site.run(
            "login", ["sh", "-c", "cd /global/alice/user/ck && cat * | sort -n | tail -1; ls -A | wc -l"]
        )
        assert text.stdout.split() == ["60", "60"]
    finally:
        site.run("ctl", ["scancel", str(job)])
        site.power_on("n3")
        for node in NODES:
            wait_for(partial(has_ended, site, node), 60)
            if "DRAIN" in site.node_state(node).flags or "DOWN" in site.node_state(node).flags:
                site.resume(node)
        site.run(
            "n3", ["beeond-ctl", "sweep"], check=False
        )  # as after a site's boot: nobody is owed what is there
    assert "job-" not in site.run("n3", ["ls", "/nvme/beeond"]).stdout


def has_ended(cluster: Cluster, node: str) -> bool:
    return "COMPLETING" not in cluster.node_state(node).flags


SLOW = """
    mkdir -p "$BEEOND/out" "$BEEOND/.beeond-flush/slow"; head -c 20M /dev/urandom >"$BEEOND/out/data"
    echo '{"state": "proved", "bytes": 16777216, "copied": 1, "seconds": 600}' >"$BEEOND/.beeond-flush/slow/status.json"
"""
"""20 MiB to be staged out, and a flush that has taken ten minutes for 16."""


def test_a_job_hears_by_itself_that_its_time_limit_is_nearer_than_the_end_of_its_stage_out(
    site: Cluster,
) -> None:
    before = site.snapshots()
    wait = f"#!/bin/bash\n{SLOW}\nuntil test -e /global/alice/user/go; do sleep 0.1; done"
    out = "--beeond-stage-out=out:/global/alice/user/%j"
    job = site.submit("alice", wait, "-N2", "--time=5", out)
    plain, quick = (site.submit("alice", wait, "-N1", "--time=5", *more) for more in (["--beeond"], [out]))
    wait_for(lambda: sorted(watched(site)) == [job, quick], 20)
    site.run("ctl", ["scancel", str(quick)])
    site.wait_job(quick, "CANCELLED")
    wait_for(lambda: watched(site) == [job], 20)  # a process that a watch starts is for a moment as it
    step = f"{SLOW}\nuntil grep -q warning /global/alice/user/heard; do sleep 0.1; done"
    words = ["bash", "-c", '"$@" 2>/global/alice/user/heard', "-", "srun", "-N1", "--time=5", out]
    site.run("login", [*words, "bash", "-c", step], user="alice")
    assert "srun: beeond: warning: the stage-out of this job" in site.read(
        "login", "/global/alice/user/heard"
    )
    wait_for(lambda: "beeond: warning: " in site.job_output(job), 20)
    assert plain not in watched(site)
    site.run("login", ["touch", "/global/alice/user/go"], user="alice")
    for each in (job, plain):
        site.wait_job(each, "COMPLETED")
    (told,) = [line for line in site.job_output(job).splitlines() if "warning" in line]
    assert re.search(r"will take about 12:\d\d min for 1 entry, 20MiB, at the rate of the flushes, and", told)
    assert "warning" not in site.job_output(plain)
    assert [event["output"] for event in events(site, job) if event["event"] == "warned"] == ["ok"]
    assert watched(site) == []
    site.wait_clean(before, timeout_s=10)


def watched(cluster: Cluster) -> list[int]:
    """The jobs that have a watch."""
    found = []
    for node in NODES:
        for process in cluster.processes(node, r"-m beeond_ctl\.watch "):
            found += re.findall(r"/jobs/(\d+)/watch", " ".join(process.cmdline()))
    return [int(job) for job in found]
