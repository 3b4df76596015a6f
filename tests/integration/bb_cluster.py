"""A cluster with burst_buffer/lua whose hooks a test can hold, and what tests of directives ask of it."""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.integration.site_config import CONFIG
from tests.testbed import Cluster
from tests.testbed.host import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[2]
NODES = ("n1", "n2", "n3")
STATE = "/var/lib/slurm/slurmctld"

# A hook of a job waits, before it does anything, for as long as /run/hold/HOOK.JOB is there.
_HELD = """
for _, hook in ipairs({ "setup", "data_in", "pre_run", "data_out", "job_teardown" }) do
	local run = _G["slurm_bb_" .. hook]
	_G["slurm_bb_" .. hook] = function(job_id, ...)
		while true do
			local file = io.open("/run/hold/" .. hook .. "." .. job_id)
			if not file then return run(job_id, ...) end
			file:close()
			os.execute("sleep 0.05")
		end
	end
end
"""
# Slurm stages in for jobs of which it has foreseen a start: 100, where it is not told to look further.
_SLURM = """
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=10000,bf_interval=1,bf_min_age_reserve=1,\
default_queue_depth=1000,bf_max_job_test=1000
MailProg=/usr/local/bin/mail-to-file
"""
_MAIL = '#!/bin/sh\necho "$*" >>/run/slurm/mails\n'
_LOOKING = '[slurm]\nlook_as_user = true\nlists = "/global/%u/.beeond"\n'
_SUDO = "slurm ALL=(ALL) NOPASSWD: /usr/bin/beeond-ctl bb data_in *\n"


@contextmanager
def up(name: str, directory: Path) -> Iterator[Cluster]:
    """Such a cluster; `directory` is for what it is made of."""
    lua = directory / "burst_buffer.lua"
    lua.write_text((ROOT / "slurm/burst_buffer.lua").read_text() + _HELD)
    config = CONFIG.format(kind="directory", more="") + _LOOKING
    with Cluster.up(
        f"{name}{os.getpid() % 10000}",
        nodes=3,
        with_product=True,
        config=config,
        burst_buffer=lua,
        slurm_extra=_SLURM,
    ) as made:
        put(made, "/usr/local/bin/mail-to-file", _MAIL, "0755")
        put(made, "/etc/sudoers.d/beeond-ctl", _SUDO, "0440")
        made.run("ctl", ["mkdir", "/run/hold"])
        made.run("login", ["sh", "-c", "mkdir 'in dir'; echo hello > 'in dir/f'"], user="alice")
        yield made


def put(bb: Cluster, path: str, text: str, mode: str) -> None:
    """A file on the host of slurmctld."""
    bb.run("ctl", ["install", "-m", mode, "/dev/stdin", path], input=text)


def see_that_nothing_is_left(bb: Cluster) -> None:
    """Neither on the nodes nor in Slurm. Waits for what is on its way."""
    bb.wait_idle()
    for node in NODES:
        left = bb.run(
            node, ["ls", "-A", "/nvme/beeond", "/run/beeond-ctl/jobs", "/mnt/beeond"]
        ).stdout.split()
        assert left == ["/mnt/beeond:", "/nvme/beeond:", "/run/beeond-ctl/jobs:"]
    wait_for("no buffer", lambda: not buffers(bb))
    log = bb.log("ctl")
    waiting = [
        job for job in to_be_marked(bb) if f"teardown for JobId={job} terminated by slurmctld" not in log
    ]
    assert waiting == []


def to_be_marked(bb: Cluster) -> list[int]:
    """Jobs that burst_buffer.lua has written down to be marked."""
    found = bb.run("ctl", ["find", STATE, "-name", "beeond-mark.*", "-printf", "%f "]).stdout
    return sorted(int(name.partition(".")[2]) for name in found.split())


def buffers(bb: Cluster) -> list[int]:
    """Jobs that Slurm holds a buffer for.

    slurmctld 22.05 may kill the teardown hook of a job that is cancelled while it is pending, and then holds on to its
    buffer until it is restarted (docs/burst-buffer.md): so it is.
    """
    held = _buffers(bb)
    log = bb.log("ctl")
    if held and all(f"teardown for JobId={job} terminated by slurmctld" in log for job in held):
        restart(bb)
        wait_for("no buffer after a restart", lambda: not _buffers(bb))
        return []
    return held


def _buffers(bb: Cluster) -> list[int]:
    return [
        int(job) for job in re.findall(r"JobID=(\d+)", bb.run("ctl", ["scontrol", "show", "burst"]).stdout)
    ]


def restart(bb: Cluster) -> None:
    """Restart slurmctld alone, and wait until it answers."""
    services = "/usr/local/sbin/testbed-services restart-slurm controller </dev/null >/dev/null 2>&1"
    bb.run("ctl", ["sh", "-c", services])
    wait_for("slurmctld", lambda: bb.run("ctl", ["scontrol", "ping"], check=False).returncode == 0)


def state(bb: Cluster, job: int) -> str:
    """The job's burst-buffer state, as users see it."""
    found = re.search(r"BurstBufferState=(\S+)", show(bb, job))
    return found[1] if found else ""


def show(bb: Cluster, job: int) -> str:
    """`scontrol show job`."""
    return bb.run("ctl", ["scontrol", "show", "job", str(job)]).stdout


def listing(bb: Cluster, path: str) -> list[str]:
    """What is in a directory of global storage; nothing where there is none."""
    return sorted(bb.run("login", ["ls", "-A", path], check=False).stdout.split())


def until_in_shell(path: str) -> str:
    """Lines of a job's script that wait for a file, and remove it. Where a test fails, the job is cancelled."""
    return f"until [ -e {path} ]; do sleep 0.1; done; rm -f {path}"


def wait_for(what: str, condition: Callable[[], Any], timeout_s: float = 60) -> Any:
    """Wait until `condition` is true, and return what it says."""

    def probe() -> tuple[bool, Any]:
        found = condition()
        return bool(found), found

    return wait_until(what, probe, timeout_s)


def submit_held(bb: Cluster, hook: str, script: str, *arguments: str) -> int:
    """A job of alice's whose `hook` waits for `let_go`."""
    job = bb.submit("alice", script, "--hold", *arguments)
    bb.run("ctl", ["touch", f"/run/hold/{hook}.{job}"])
    bb.run("ctl", ["scontrol", "release", str(job)])
    return job


def let_go(bb: Cluster) -> None:
    """Let all hooks go on."""
    bb.run("ctl", ["sh", "-c", "rm -f /run/hold/*"])
