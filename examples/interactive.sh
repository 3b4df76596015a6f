#!/bin/sh
# Interactive work: salloc waits until the file system is there, with the input in it, and then runs a command, by
# default your shell, on the host where you are.
#
#     sh interactive.sh        (here the commands come from below; you would leave out all from `sh -eu` on, and type them)
#
# Leaves /global/YOU/interactive-JOBID.
set -eu
salloc --nodes=2 --ntasks-per-node=1 --job-name=interactive \
    --beeond-stage-out="notes:/global/%u/interactive-%j" sh -eu /dev/fd/3 3<<'COMMANDS'
# $BEEOND is set in steps, and not in this shell: it is not on the job's nodes, and cannot see the file system.
# For a shell that can: srun --pty bash
# As --overlap: a step does not wait until slurmctld has noted that the one before it has ended.
export SLURM_OVERLAP=1
srun -N1 -n1 sh -c 'mkdir "$BEEOND/notes"'
srun sh -c 'echo "$(hostname) sees $(ls "$BEEOND")" > "$BEEOND/notes/$SLURMD_NODENAME"'
srun -N1 -n1 sh -c 'cat "$BEEOND"/notes/*'
COMMANDS
# With the shell the job ends: what is in `notes` is copied out then.
