"""An on-demand parallel file system for every Slurm job."""
