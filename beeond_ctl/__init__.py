"""An on-demand parallel file system for every Slurm job."""

import os

# Looking for plugins of other packages takes 10 ms of every Prolog, and they would run in root's process.
os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"
