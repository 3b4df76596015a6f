#!/bin/sh
# Two jobs, the second of which takes up what the first has left.
#
#     sh chain.sh
#
# Leaves /global/YOU/chain-ID/squares and, from that, /global/YOU/chain-ID/sum.
set -eu

first=$(sbatch --parsable <<'FIRST'
#!/bin/sh
#SBATCH --job-name=chain-1
#SBATCH --output=%x-%j.out
#SBATCH --nodes=2 --ntasks-per-node=1
#SBATCH --beeond-stage-out=out:/global/%u/chain-%j
set -eu
mkdir "$BEEOND/out"
srun sh -c 'seq "$SLURM_PROCID" 2 100 | awk "{ print \$1 * \$1 }" > "$BEEOND/part-$SLURM_PROCID"'
cat "$BEEOND"/part-* > "$BEEOND/out/squares"
FIRST
)

# afterok waits for the first job's Epilogs, so its results are out by then. It looks at the exit code of the script
# alone: where results could not be copied, the second job starts as well. A file has its name only once it is complete,
# so see whether what you need is there.
second=$(sbatch --parsable --dependency="afterok:$first" \
    --beeond-stage-in="/global/$USER/chain-$first:in" --beeond-stage-out="sum:/global/$USER/chain-$first/sum" <<'SECOND'
#!/bin/sh
#SBATCH --job-name=chain-2
#SBATCH --output=%x-%j.out
#SBATCH --nodes=2 --ntasks-per-node=1
set -eu
[ -s "$BEEOND/in/squares" ]
awk '{ sum += $1 } END { print sum }' "$BEEOND/in/squares" > "$BEEOND/sum"
SECOND
)
echo "$first $second"
