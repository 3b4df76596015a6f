#!/bin/sh
# Many small files: they are copied in by all nodes at once, before the job starts, and read from the nodes' own devices
# instead of global storage, as often as the job likes.
#
#     sbatch many-small.sh
#
# Reads /global/YOU/samples, a directory of any number of files, and leaves /global/YOU/samples-JOBID.tsv.
#
#SBATCH --job-name=many-small
#SBATCH --output=%x-%j.out
#SBATCH --nodes=3 --ntasks-per-node=1
#SBATCH --beeond-stage-in=/global/%u/samples:samples
#SBATCH --beeond-stage-out=samples.tsv:/global/%u/samples-%j.tsv

set -eu
# Three passes over all files, in another order on each node: on global storage each pass would cost as much as the
# first.
srun sh -c '
    cd "$BEEOND/samples"
    for pass in 1 2 3; do
        find . -type f -print0 | sort -zR | xargs -0 cat | wc -c
    done | sort -u > "$BEEOND/bytes-$SLURM_PROCID"
'
echo "every node read $(cat "$BEEOND"/bytes-* | sort -u) bytes, three times"

# One file goes back: the size and name of each.
find "$BEEOND/samples" -type f -printf '%s\t%P\n' | sort > "$BEEOND/samples.tsv"
echo "$(wc -l < "$BEEOND/samples.tsv") files"
