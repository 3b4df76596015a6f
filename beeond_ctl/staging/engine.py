"""Ordinary work by the thousand: `_native` where it was built, `portable` elsewhere. Runs as the user."""

from __future__ import annotations

import os

TYPE_CHECKING = False
# Only tests set the variable: programs that touch files get an environment that users have no part in.
if TYPE_CHECKING or os.environ.get("BEEOND_CTL_NATIVE") == "0":
    from beeond_ctl.staging import portable as engine

    native = False
else:
    try:
        from beeond_ctl.staging import _native as engine

        native = True
    except ImportError:
        from beeond_ctl.staging import portable as engine

        native = False

__all__ = ["engine", "native"]
