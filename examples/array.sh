#!/bin/sh
# A job array: each of its jobs gets a file system of its own, its own input, and its own place for results.
#
#     sbatch array.sh
#
# Reads /global/YOU/sweep/1 to 3, and leaves results in /global/YOU/sweep-results/ARRAYID_1 to _3.
#
#SBATCH --job-name=array
#SBATCH --output=%x-%A_%a.out
#SBATCH --array=1-3
#SBATCH --nodes=2 --ntasks-per-node=1
#
# %A is the array's id, %a the number within the array.
#SBATCH --beeond-stage-in=/global/%u/sweep/%a:in
#SBATCH --beeond-stage-out=out:/global/%u/sweep-results/%A_%a

set -eu
mkdir "$BEEOND/out"

# Each node counts; the sum is taken from what both have written.
srun sh -c 'wc -l < "$BEEOND/in/data" > "$BEEOND/out/lines-$SLURMD_NODENAME"'
cat "$BEEOND"/out/lines-* | awk '{ total += $1 } END { print total }' > "$BEEOND/out/total"

echo "task $SLURM_ARRAY_TASK_ID: $(cat "$BEEOND/out/total") lines counted on $BEEOND_NODES"
