#!/bin/sh
# Checkpoint and restart: each checkpoint is copied to global storage while the next step is computed already. Should the
# job not live to its end, for whatever reason, the next one goes on from the last checkpoint that was copied whole.
#
#     mkdir -p /global/$USER/simulation
#     sbatch checkpoint.sh        and again, until it has done all its steps
#
# Takes its checkpoints from /global/YOU/simulation, and leaves them there.
#
#SBATCH --job-name=checkpoint
#SBATCH --output=%x-%j.out
#SBATCH --nodes=2 --ntasks-per-node=1
#SBATCH --beeond-stage-in=/global/%u/simulation:checkpoints
#SBATCH --beeond-stage-out=checkpoints:/global/%u/simulation

set -eu
cd "$BEEOND"

# A checkpoint is one file. It has its name, here and on global storage, only once it is whole.
step=$(find checkpoints -name 'step-*' | sed 's/.*step-//' | sort -n | tail -n 1)
step=${step:-0}
echo "starting after step $step"

end=$((step + 2))
while [ "$step" -lt "$end" ]; do
    # A step of the computation: each process goes on from its line of the last checkpoint.
    export LAST="checkpoints/step-$step"
    srun sh -c '
        value=$(sed -n "$((SLURM_PROCID + 1))p" "$LAST" 2>/dev/null)
        echo $((${value:-0} + SLURM_PROCID + 1)) > "part-$SLURM_PROCID"
    '
    step=$((step + 1))
    cat part-* > checkpoint.part
    mv checkpoint.part "checkpoints/step-$step"

    # Returns at once. All nodes copy it to where --beeond-stage-out says, and this script goes on.
    beeond-ctl flush --quiet "checkpoints/step-$step"
done

# Not needed at the end of a job, which stages out what is not yet there; only to show that it is.
beeond-ctl flush --quiet --wait
echo "safe: $(cd "/global/$USER/simulation" && echo step-*)"
