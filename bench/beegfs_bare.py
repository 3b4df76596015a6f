"""BeeGFS's daemons started by hand, as a peer: a shell on each node, at once, over directories that are there already.

What no product can beat on the same machine: no plan, no meetings, no images, and nobody looks whether a server works.
It knows what was learnt of mgmtd: the others start when it listens, and it does not name loopback.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tests.integration import test_beegfs as beegfs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.testbed import Cluster

PLACE = "/nvme/bare"
SHIFT = 2000
MGMTD, GRPC = 8008 + SHIFT, 8010 + SHIFT
DUE_S = 2.4
AGAIN_S = 0.05
"""As the product asks: not before the answer can be yes, then often."""

SERVER = (
    f"connDisableAuthentication=true connUseRDMA=false connPortShift={SHIFT} runDaemonized=false "
    "storeAllowFirstRunInit=true"
)
BEGIN = f"""
set -e; PATH={beegfs.BIN}:$PATH; cd {PLACE}
run() {{ "$@" > "log-$1" 2>&1 & echo $! > "$1.pid"; }}
"""
END = f"cd {PLACE} 2>&- || exit 0; cat ./*.pid | while read -r pid; do kill -9 $pid; done; rm -f ./*.pid"
LISTENS = f"until (: < /dev/tcp/localhost/{MGMTD}) 2>&-; do sleep 0.005; done"


def seconds(cluster: Cluster, nodes: Sequence[str], edition: str) -> float:
    """From mgmtd's start to all servers of `nodes` Online and Good."""
    lead = nodes[0]
    scripts = {node: BEGIN + _servers(lead, edition, meta=node == lead) for node in nodes}
    with ThreadPoolExecutor(len(nodes)) as pool:

        def everywhere(scripts: dict[str, str]) -> None:
            list(pool.map(lambda node: cluster.run(node, ["bash", "-c", scripts[node]]), scripts))

        everywhere({node: _numbered(number) for number, node in enumerate(nodes, 1)})
        cluster.run(lead, ["bash", "-c", BEGIN + _fresh(edition)])
        try:
            began = time.monotonic()
            cluster.run(lead, ["bash", "-c", BEGIN + _mgmtd(edition) + LISTENS])
            everywhere(scripts)
            return _online(cluster, lead, edition, len(nodes) + 1) - began
        finally:
            everywhere(dict.fromkeys(nodes, END))


def remove(cluster: Cluster, nodes: Sequence[str]) -> None:
    """Leave nothing on `nodes`."""
    for node in nodes:
        cluster.run(node, ["rm", "-rf", PLACE])


def _numbered(number: int) -> str:
    """Directories for a node's servers, who would be given the number of another who already has one."""
    return f"""
        mkdir -p {PLACE}/meta {PLACE}/storage && cd {PLACE} && echo {number} | tee meta/nodeNumID storage/nodeNumID \\
            > storage/targetNumID && echo target-{number} > storage/targetID
    """


def _fresh(edition: str) -> str:
    make = "beegfs-mgmtd --init --db-file $PWD/mgmtd/db --log-target stderr" if edition == "8" else ":"
    return f"rm -rf mgmtd; mkdir mgmtd; {make}\n"


def _mgmtd(edition: str) -> str:
    if edition == "8":
        return (
            "run beegfs-mgmtd --config-file /dev/null --db-file $PWD/mgmtd/db --log-target stderr --tls-disable "
            f"--auth-disable --license-disable --port-shift {SHIFT} --interfaces '! lo,*'\n"
        )
    return f"run beegfs-mgmtd storeMgmtdDirectory=$PWD/mgmtd logStdFile=$PWD/log {SERVER}\n"


def _servers(lead: str, edition: str, *, meta: bool) -> str:
    kinds = ("storage", "meta") if meta else ("storage",)
    logged = "logType=logfile" if edition == "8" else ""
    return "\n".join(
        f"run beegfs-{kind} sysMgmtdHost={lead} store{kind.capitalize()}Directory=$PWD/{kind} "
        f"logStdFile=$PWD/{kind}.log {logged} {SERVER}"
        for kind in kinds
    )


def _online(cluster: Cluster, lead: str, edition: str, count: int) -> float:
    """When mgmtd said that `count` targets, metadata servers' too, are Online and Good. Raises TimeoutError."""
    tool = f"{beegfs.BIN}/beegfs"
    if edition == "8":
        ask = f"{tool} --mgmtd-addr {lead}:{GRPC} --tls-disable --auth-disable --output json target list --state"
    else:
        of = (
            f"{tool}-ctl --sysMgmtdHost={lead} --connPortShift={SHIFT} --connDisableAuthentication=true "
            "--logEnabled=false"
        )
        ask = "; ".join(f"{of} --listtargets --nodetype={kind} --state" for kind in ("storage", "meta"))
    time.sleep(DUE_S)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        answer = cluster.run(lead, ["sh", "-c", ask], check=False).stdout
        if answer.count("Online") >= count and answer.count("Good") >= count:
            return time.monotonic()
        time.sleep(AGAIN_S)
    raise TimeoutError(f"not all Online after 60 s: {answer}")
