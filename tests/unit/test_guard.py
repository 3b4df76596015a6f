"""What surrounds work on a node, with a stand-in for scontrol that is as slow as a busy slurmctld."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from beeond_ctl import events
from beeond_ctl.aside import tried
from beeond_ctl.config import SiteConfig
from beeond_ctl.errors import NodeError
from beeond_ctl.lifecycle import guard

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SCONTROL = """#!/bin/sh
file={file}
case "$1" in
show) printf 'NodeName=n1\\n   State=IDLE+DRAIN\\n   Reason=%s [root@now]\\n' "$(cat $file)" ;;
update) sleep 0.2; for word; do case "$word" in Reason=*) printf %s "${{word#Reason=}}" > $file ;; esac; done ;;
esac
"""


def test_two_jobs_that_keep_their_data_at_once_are_both_named(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "reason").write_text("broken fan")
    (tmp_path / "scontrol").write_text(SCONTROL.format(file=tmp_path / "reason"))
    (tmp_path / "scontrol").chmod(0o755)
    config = SiteConfig.model_validate(
        {
            "paths": {"run": f"{tmp_path}/run", "log": f"{tmp_path}/log"},
            "slurm": {"path": [str(tmp_path), "/usr/bin", "/bin"]},
        }
    )
    both = threading.Barrier(2)

    def fail(job_id: int) -> None:
        try:
            with guard.draining(config, "n1", job_id):
                both.wait(60)
                _fail("data kept")
        except NodeError:
            pass

    threads = [threading.Thread(target=fail, args=(job_id,)) for job_id in (7, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    text = (tmp_path / "reason").read_text()
    assert text.startswith("broken fan | ")
    assert guard.drain_prefix(7) in text
    assert guard.drain_prefix(8) in text


@contextmanager
def frozen(tmp_path: Path) -> Iterator[Path]:
    """A file system in which whoever writes sleeps in the kernel, and no signal wakes them."""
    image, point = tmp_path / "image", tmp_path / "frozen"
    point.mkdir()
    with image.open("wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    if subprocess.run(["mount", "-o", "loop", image, point], check=False).returncode != 0:
        pytest.skip("no loop mounts here")
    try:
        subprocess.run(["fsfreeze", "--freeze", point], check=True)
        try:
            yield point
        finally:
            subprocess.run(["fsfreeze", "--unfreeze", point], check=True)
    finally:
        for _ in range(100):  # who was left behind in it ends first
            if subprocess.run(["umount", point], check=False, capture_output=True).returncode == 0:
                break
            time.sleep(0.05)
        else:
            subprocess.run(["umount", "--lazy", point], check=True)


PROGRAM = """
import sys
from beeond_ctl.config import SiteConfig
from beeond_ctl.events import EventLog
from beeond_ctl.lifecycle import guard

config = SiteConfig.model_validate_json(sys.argv[1])
guard.ACCOUNTS_S = 0.3
with guard.accounted(config, "n1", 7, ends=True):
    EventLog(config.paths.log, 7, "n1").log("prolog", uid=1000)
guard.count_sweep(config, ["removed"])
"""


@pytest.mark.root
@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("fsfreeze") or not shutil.which("mkfs.ext4"),
    reason="needs root, fsfreeze and mkfs.ext4",
)
def test_a_node_whose_reports_or_metrics_hang_in_the_kernel_is_done_in_time(tmp_path: Path) -> None:
    with frozen(tmp_path) as point:
        config = SiteConfig.model_validate(
            {
                "paths": {"run": f"{tmp_path}/run", "log": f"{tmp_path}/log"},
                "metrics": {"directory": str(point)},
                "report": {"directory": str(point)},
            }
        )
        lock = os.open(tmp_path, os.O_RDONLY)
        child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, config.model_dump_json()],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=[lock],
        )  # fmt: skip
        try:
            # Both that it can be reaped and that nothing that it left behind has its pipe open.
            said, _ = child.communicate(timeout=60)
        finally:
            os.close(lock)
        assert (child.returncode, said) == (0, b"")
        told = [event.get("message", "") for event in events.read(config.paths.log, 7)]
        assert told == ["", "no answer within 0 s"]


def test_what_is_done_aside_has_nothing_open_and_says_what_went_wrong(tmp_path: Path) -> None:
    lock = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(lock, True)
    try:
        # Its answer's pipe and the listing itself.
        assert tried(lambda: _fail(f"{len(os.listdir('/proc/self/fd'))} open"), within_s=60) == "5 open"
    finally:
        os.close(lock)
    assert tried(lambda: None, within_s=60) == ""


def _fail(text: str) -> None:
    raise NodeError(text)
