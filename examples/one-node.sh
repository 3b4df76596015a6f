#!/bin/sh
# A job of one node: $BEEOND is a directory on the node's own NVMe, without a parallel file system in between.
# That is what work on many small files wants.
#
#     sbatch one-node.sh
#
# Makes /global/YOU/notes-JOBID.tar
#
#SBATCH --job-name=one-node
#SBATCH --output=%x-%j.out
#SBATCH --nodes=1
#SBATCH --beeond-stage-out=notes.tar:/global/%u/notes-%j.tar

set -eu
echo "$BEEOND is $(stat -f -c %T "$BEEOND"), for $(stat -c '%U, mode %a' "$BEEOND")"

mkdir "$BEEOND/notes"
cd "$BEEOND/notes"
for number in $(seq 1000); do
    echo "note $number" > "$number"
done

# Global storage gets one large file instead of a thousand small ones. Only what is named by --beeond-stage-out leaves
# the job: the notes themselves are gone when it ends.
tar -cf "$BEEOND/notes.tar" -C "$BEEOND" notes
cd /
echo "packed $(tar -tf "$BEEOND/notes.tar" | grep -c '[0-9]$') notes"
