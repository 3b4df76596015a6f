#!/bin/sh
# An MPI program: all processes write one shared file through MPI-IO, and then each writes a file of its own.
#
#     sbatch mpi.sh
#
# Needs mpi-files.c beside it, and Open MPI (Debian: openmpi-bin, libopenmpi-dev); with another MPI, its own compiler
# and what your site says for --mpi. Leaves the files in /global/YOU/mpi-JOBID.
#
#SBATCH --job-name=mpi
#SBATCH --output=%x-%j.out
#SBATCH --nodes=3 --ntasks-per-node=2
#SBATCH --beeond-stage-out=out:/global/%u/mpi-%j

set -eu
mkdir "$BEEOND/out"

# The program goes where all nodes find it, and is not read from global storage by each process.
mpicc -O2 -o "$BEEOND/mpi-files" mpi-files.c
srun --mpi=pmix "$BEEOND/mpi-files" "$BEEOND/out" 4
echo "$(find "$BEEOND/out" -type f | wc -l) files"
