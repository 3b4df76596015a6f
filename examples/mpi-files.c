/* Writes what mpi.sh asks for, and checks what was written: one file that all processes share, and one file for each.
 *
 *     mpicc -O2 -o mpi-files mpi-files.c
 *     srun --mpi=pmix ./mpi-files DIRECTORY MIB_PER_PROCESS
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What process RANK writes: bytes that no other one writes there. */
static void fill(char *block, size_t size, int rank)
{
	for (size_t i = 0; i < size; i++)
		block[i] = (char)(i * 31 + (size_t)rank * 7 + 1);
}

static void stop_if(int failed, const char *what, const char *path)
{
	if (!failed)
		return;
	fprintf(stderr, "%s %s failed\n", what, path);
	MPI_Abort(MPI_COMM_WORLD, 1);
}

/* Every process writes its block of the file, all at once; then each reads the next one's. */
static double shared_file(const char *path, char *block, char *read, size_t size, int rank, int ranks)
{
	MPI_File file;
	MPI_Status status;
	int next = (rank + 1) % ranks;
	double start = MPI_Wtime();

	stop_if(MPI_File_open(MPI_COMM_WORLD, path, MPI_MODE_CREATE | MPI_MODE_RDWR, MPI_INFO_NULL, &file), "opening", path);
	stop_if(MPI_File_write_at_all(file, (MPI_Offset)rank * (MPI_Offset)size, block, (int)size, MPI_BYTE, &status),
		"writing", path);
	/* What others wrote may be read after sync, barrier, sync: so says the MPI standard. */
	stop_if(MPI_File_sync(file), "syncing", path);
	double seconds = MPI_Wtime() - start;
	MPI_Barrier(MPI_COMM_WORLD);
	stop_if(MPI_File_sync(file), "syncing", path);
	stop_if(MPI_File_read_at_all(file, (MPI_Offset)next * (MPI_Offset)size, read, (int)size, MPI_BYTE, &status),
		"reading", path);
	fill(block, size, next);
	stop_if(memcmp(read, block, size) != 0, "checking", path);
	fill(block, size, rank);
	stop_if(MPI_File_close(&file), "closing", path);
	return seconds;
}

/* Every process writes a file of its own; then each reads the next one's. */
static double own_file(const char *directory, char *block, char *read, size_t size, int rank, int ranks)
{
	char path[4096];
	int next = (rank + 1) % ranks;
	double start = MPI_Wtime();

	snprintf(path, sizeof path, "%s/rank-%d", directory, rank);
	FILE *file = fopen(path, "w");
	stop_if(!file || fwrite(block, 1, size, file) != size || fclose(file), "writing", path);
	MPI_Barrier(MPI_COMM_WORLD);
	double seconds = MPI_Wtime() - start;
	snprintf(path, sizeof path, "%s/rank-%d", directory, next);
	file = fopen(path, "r");
	stop_if(!file || fread(read, 1, size, file) != size || fclose(file), "reading", path);
	fill(block, size, next);
	stop_if(memcmp(read, block, size) != 0, "checking", path);
	return seconds;
}

int main(int argc, char **argv)
{
	int rank, ranks;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	if (argc != 3)
		stop_if(1, "usage: mpi-files DIRECTORY MIB_PER_PROCESS;", "this");
	size_t size = (size_t)atoi(argv[2]) << 20;
	char *block = malloc(size), *read = malloc(size), path[4096];
	stop_if(!block || !read, "reserving memory for", "blocks");
	snprintf(path, sizeof path, "%s/shared", argv[1]);

	fill(block, size, rank);
	double together = shared_file(path, block, read, size, rank, ranks);
	double apart = own_file(argv[1], block, read, size, rank, ranks);
	if (rank == 0) {
		double mib = (double)ranks * atoi(argv[2]);
		printf("%d processes, %.0f MiB: one file %.0f MiB/s, a file each %.0f MiB/s, all read back and equal\n", ranks,
		       mib, mib / together, mib / apart);
	}
	free(block);
	free(read);
	return MPI_Finalize();
}
