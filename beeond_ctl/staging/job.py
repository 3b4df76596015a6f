"""What is to be copied, and for whom. Pure, and read in before a transfer's first process starts: no data classes,
whose module takes as long as all else until then.
"""

from __future__ import annotations

import os
from typing import NamedTuple


class Identity(NamedTuple):
    """Whose files are copied: what a child process becomes before it touches any."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()


class Job(NamedTuple):
    """One transfer. Both paths are absolute; a directory's contents go into `destination`, a file becomes it.

    `flags` are those of `beeond_ctl.request.FLAGS`. `durable` tells whether the copy has to survive a crash
    of the machines it is on: not so where the destination itself does not, as with an instance.

    `only`, a path below `source`, limits it to this entry and what is below, which goes to the same place below
    `destination`. `flushes` is a directory with journals of such partial transfers (see `flushed`): what they prove
    counts for this one. It lies in the source, but does not belong to it. `alone`: none of them runs any more, so that
    what a killed one left at the destination may be removed. `live`: others may write to the source meanwhile and
    afterwards, so that only files that they have left alone are proved (see `quiet`); needs `flushes`. `listed` is a
    list of what is in the source, if there is one (see `listing`), which is used up. `outside` is a directory that the
    copy must not lie in, whatever links lead there: that of an instance, which goes with the source. `others` are the
    destinations of the same job's other transfers, which the flag `delete` must not reach. `all_or_nothing`:
    nobody uses the destination before all is proved, and if it is not, it is removed as a whole.
    """

    source: bytes
    destination: bytes
    flags: tuple[str, ...] = ()
    durable: bool = True
    only: bytes = b""
    flushes: bytes = b""
    alone: bool = False
    live: bool = False
    listed: bytes = b""
    outside: bytes = b""
    others: tuple[bytes, ...] = ()
    all_or_nothing: bool = False

    def ends(self) -> tuple[bytes, bytes]:
        """From where to where it copies: `only`, if that is there."""
        if not self.only:
            return self.source, self.destination
        return os.path.join(self.source, self.only), os.path.join(self.destination, self.only)
