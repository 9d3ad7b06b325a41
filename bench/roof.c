/* roof.c: how fast can this machine read memory? Prints the best GB/s of plain read loops, every thread walking one stream or
 * four streams a quarter apart: the limit for decoding, which is a read of the weights.
 *
 *   cc -O3 -march=native -fopenmp bench/roof.c -o roof && ./roof [threads] [MiB]
 */
#define _POSIX_C_SOURCE 200809L
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifdef _OPENMP
#include <omp.h>
#endif

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static uint64_t read_part(const uint64_t *p, size_t n, int streams) { // xor of n words, n a multiple of 64
    uint64_t sum[16] = {0};
    size_t part = n / (size_t)streams / 16 * 16;
    for (size_t i = 0; i < part; i += 16)
        for (int s = 0; s < streams; s++)
            for (int k = 0; k < 16; k++) sum[k] ^= p[(size_t)s * part + i + (size_t)k];
    for (int k = 1; k < 16; k++) sum[0] ^= sum[k];
    return sum[0];
}

int main(int argc, char **argv) {
    int threads = argc > 1 ? atoi(argv[1]) : 1;
    size_t bytes = (size_t)(argc > 2 ? atoi(argv[2]) : 512) << 20, words = bytes / 8;
    uint64_t *memory = malloc(bytes), result = 0;
    if (!memory || threads < 1) return 1;
    memset(memory, 1, bytes);
    for (int streams = 1; streams <= 4; streams += 3) {
        double best = 0;
        for (int round = 0; round < 7; round++) {
            double start = now();
            #pragma omp parallel for num_threads(threads) reduction(^ : result)
            for (int t = 0; t < threads; t++) {
                size_t each = words / (size_t)threads / 64 * 64;
                result ^= read_part(memory + (size_t)t * each, each, streams);
            }
            double rate = (double)bytes / (now() - start) / 1e9;
            if (rate > best) best = rate;
        }
        printf("streams %d threads %d GB/s %.2f\n", streams, threads, best);
    }
    return result == 42;                // keeps the loops alive
}
