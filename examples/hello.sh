#!/bin/sh
# Three nodes share one file system that exists for this job alone.
#
#     sbatch hello.sh
#
#SBATCH --job-name=hello
#SBATCH --output=%x-%j.out
#SBATCH --nodes=3 --ntasks-per-node=1
#SBATCH --beeond

set -eu

# $BEEOND is the mount, the same on every node, empty and yours when the job starts. $BEEOND_NODES are its nodes.
echo "job $BEEOND_JOB_ID on $BEEOND_NODES has $BEEOND"

# What each node sees: the space of all the nodes' devices together.
srun --label df -h --output=source,fstype,size,avail,target "$BEEOND" | sort -sn

# Every node writes a file ...
srun sh -c 'echo "hello from $SLURMD_NODENAME" > "$BEEOND/$SLURMD_NODENAME.txt"'

# ... and every node reads what the others wrote.
srun --label sh -c 'cd "$BEEOND" && ls -l *.txt && cat *.txt' | sort -sn
# When the job ends the file system goes, with all that is in it. stage.sh shows how to keep results.
