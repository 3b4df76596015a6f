"""An on-demand parallel file system for every Slurm job."""

import os

CONFIG_PATH = "/etc/beeond-ctl/config.toml"
CONFIG_VARIABLE = "BEEOND_CTL_CONFIG"
"""Names another file; honoured by `beeond-ctl --config` only, never by Prolog and Epilog."""

# Looking for plugins of other packages takes 10 ms of every Prolog, and they would run in root's process.
os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"
