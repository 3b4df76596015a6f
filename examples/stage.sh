#!/bin/sh
# Input is copied in before the job starts, results are copied back after it has ended.
#
#     sbatch stage.sh
#
# Reads /global/YOU/case7, any directory of files, and leaves their checksums in /global/YOU/results/JOBID.
# Put in the path of your site's shared file system where it says /global.
#
#SBATCH --job-name=stage
#SBATCH --output=%x-%j.out
#SBATCH --nodes=3 --ntasks-per-node=1
#
# SOURCE:DESTINATION. On global storage the path is absolute, in the job's file system it is relative to $BEEOND.
# Slurm's patterns work: %u is your name, %j the job's id. Both options may be given several times.
#SBATCH --beeond-stage-in=/global/%u/case7:in
#SBATCH --beeond-stage-out=out:/global/%u/results/%j

set -eu

# All input is in place on every node before this line runs. If something of it could not be copied the job has
# failed with the reason in this output, and not come here.
echo "input: $(find "$BEEOND/in" -type f -printf . | wc -c) files"
mkdir "$BEEOND/out"

# Each task takes every n-th file, and writes one part of the result.
srun sh -c '
    cd "$BEEOND/in"
    find . -type f -print0 | sort -z | split -t "\0" -n "r/$((SLURM_PROCID + 1))/$SLURM_NTASKS" |
        xargs -0 -r sha256sum > "$BEEOND/out/part-$SLURM_PROCID"
'
sort "$BEEOND"/out/part-* > "$BEEOND/out/checksums"
rm "$BEEOND"/out/part-*
echo "result: $(wc -l < "$BEEOND/out/checksums") checksums"

# No copying here: `out` is copied by all nodes, and verified, when this script has ended. That happens also when the
# script failed, was cancelled or ran out of time, so that what it had reached by then is not lost.
