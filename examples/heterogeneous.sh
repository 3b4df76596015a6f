#!/bin/sh
# A heterogeneous job: the file system is over the two nodes of the first component, which compute; the node of the second,
# perhaps one with other devices, sees the same files at the same place, without serving any.
#
#     sbatch heterogeneous.sh
#
# Leaves /global/YOU/het-ID.
#
#SBATCH --job-name=heterogeneous
#SBATCH --output=%x-%j.out
#SBATCH --nodes=2 --ntasks-per-node=1
#SBATCH --beeond=share=1
#SBATCH --beeond-stage-out=out:/global/%u/het-%j
#SBATCH hetjob
#SBATCH --nodes=1 --ntasks-per-node=1
#SBATCH --beeond=join=0

set -eu
# This script runs on the first component's first node. `share=1` lets component 1 in, which asks for it with `join=0`.
mkdir "$BEEOND/out"
seq 1000 > "$BEEOND/input"

# Both nodes of the first component read it; each takes every second line.
srun sh -c '
    awk -v mine="$SLURM_PROCID" "NR % 2 == mine { sum += \$1 } END { print sum }" "$BEEOND/input" \
        > "$BEEOND/out/sum-$SLURM_PROCID"
'

# The second component takes up what they left.
srun --het-group=1 sh -c 'cat "$BEEOND"/out/sum-* | awk "{ sum += \$1 } END { print sum }" > "$BEEOND/out/total"
    echo "$SLURMD_NODENAME has $BEEOND of $BEEOND_NODES"'
