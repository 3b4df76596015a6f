#!/bin/sh
# A heterogeneous job: one node prepares, two nodes compute. To Slurm each component is a job with an id of its own, so
# each has a file system of its own, over its own nodes, if its part of the options asks for one.
#
#     sbatch heterogeneous.sh
#
# Leaves /global/YOU/het-ID, ID being that of the second component.
#
#SBATCH --job-name=heterogeneous
#SBATCH --output=%x-%j.out
#SBATCH --nodes=1 --ntasks-per-node=1
#SBATCH --beeond
#SBATCH hetjob
#SBATCH --nodes=2 --ntasks-per-node=1
#SBATCH --beeond-stage-out=out:/global/%u/het-%j

set -eu
# This script runs on the first component's node, and has its $BEEOND. Steps have that of the component they run in.
echo "component 0: $BEEOND on $BEEOND_NODES"
srun --het-group=1 sh -c '[ "$SLURM_PROCID" != 0 ] || echo "component 1: $BEEOND on $BEEOND_NODES"'

seq 1000 > "$BEEOND/input"

# Between the components data goes by a pipe, by MPI, or by global storage.
srun --het-group=1 -N1 -n1 sh -c 'mkdir "$BEEOND/out"; cat > "$BEEOND/input"' < "$BEEOND/input"

# Both nodes of the second component see what one of them wrote; each takes every second line.
srun --het-group=1 sh -c '
    awk -v mine="$SLURM_PROCID" "NR % 2 == mine { sum += \$1 } END { print sum }" "$BEEOND/input" \
        > "$BEEOND/out/sum-$SLURM_PROCID"
'
