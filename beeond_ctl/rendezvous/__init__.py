"""Where the nodes of one job meet: authenticated, encrypted, and gone with the processes that meet.

    with Leader(key, nodes, ports, combine={"hello": agree}) as leader, Member(key, node, host, ports) as me:
        answer = me.meet("hello", {"plan": digest}, timeout_s=30)

Knows nothing of Slurm, file systems, staging or the steps of a job: only nodes, points to meet at, and
questions. Importing it imports ZeroMQ (about 15 ms): import it where it is used.
"""

from beeond_ctl.rendezvous.leader import Leader
from beeond_ctl.rendezvous.member import Member
from beeond_ctl.rendezvous.wire import MAX_BYTES

__all__ = ["MAX_BYTES", "Leader", "Member"]
