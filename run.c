/* run.c: today's open language models in one C file. MIT licence.
 *
 *   cc -O3 run.c -o run -lm                        add -fopenmp for threads
 *   ./run models/story.gguf -i "Once upon a time"  a GGUF, or a .bin of llama2.c
 *   ./run models/real/smollm2.gguf -m chat         a conversation
 *
 * A model file is mapped, its vocabulary indexed, a prompt turned into numbers, and then one
 * function, forward(), is called until the text ends. C is written bottom-up, so the file reads
 * that way too. In a hurry: chapter 4 (what a model is), 6 (one forward pass), 10 (sessions), 13
 * (modes).
 *
 *    1  Ground                  strings, maps, a careful reader, files, Ctrl-C, the team of threads
 *    2  Numbers on disk         weight formats, and all code that knows an instruction set
 *    3  Vectors and matrices    activations, the matrix product
 *    4  Anatomy of a model      Config, Layer, Model
 *    5  Opening files           llama2.c's .bin, GGUF
 *    6  One forward pass        cache, attention, feed-forward
 *    7  Letters                 UTF-8, Unicode's classes, NFC, the splitters of tokenizers
 *    8  Tokens                  vocabularies, encoding, decoding, what may be shown when
 *    9  Choosing a token        penalty, temperature, top-k, min-p, top-p
 *   10  Sessions                the list of tokens that the cache agrees with
 *   12  Manners                 chat templates
 *   13  Modes                   generate, chat, tokenize, score, bench, info
 *   14  Command line and main
 *
 * Each addition has one place, with its recipe above it: a weight format (QUANTISED in chapter 2),
 * an architecture (archs[]), a part of a layer (parts[]), a splitter (pretok[]), a chat form
 * (templates[]), an option (opts[]), a mode (modes[]).
 *
 * House rules: every function static; no mutable global but the interrupt flag; a result is a
 * defined sequence of IEEE operations, whatever the threads, the batch and the instruction set;
 * nothing in a file is believed; die() for faults of users and files, assert() for our own; sizes
 * are size_t or int64_t as soon as two are multiplied; shapes stand beside tensors, rows first;
 * names are topic first.
 */
#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "run.c promises the same bits everywhere: build it without -ffast-math and -Ofast"
#endif
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=off", "no-schedule-insns") // that spills on AArch64
#else
#pragma STDC FP_CONTRACT OFF
#endif
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "run.c reads its little-endian files in place: it needs a little-endian machine"
#endif
#define VERSION "0.1"
/* ------------------------------------------------------------------------------------------------
 * Chapter 1. Ground
 *
 * What we assume of the machine, and how we die. Everything the C library does not give portably is
 * here: mapping a file, a clock, Ctrl-C, the number of cores, threads. A fault of the user or of a
 * file ends in die(): one line on stderr, exit status 1 (2 for wrong usage). A fault of our own is
 * an assert. Bytes that came from a file or a user are never believed to be text: they have a
 * length, may hold NUL, and are made harmless before they reach a terminal. Reader is the only way
 * to read a header: a cursor that remembers its first error, so that parsing code runs straight on
 * and asks once at the end. Team is how threads share work: one parallel region a pass, small
 * tickets drawn from an atomic counter, so that a slow core costs its share and no more.
 */
#define _POSIX_C_SOURCE 200809L
#define _FILE_OFFSET_BITS 64
#include <assert.h>
#include <ctype.h>
#include <errno.h>
#include <float.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif

_Static_assert(sizeof(size_t) == 8, "run.c needs a 64-bit machine");
_Static_assert(FLT_EVAL_METHOD == 0, "run.c needs float arithmetic in float: build with -msse2");

#define COUNT(a) ((int)(sizeof(a) / sizeof *(a)))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

// ---- strings: Str owns and grows, Span points into something else (a mapped file, a Str)
typedef struct { char *p; size_t n, cap; } Str;
typedef struct { const char *p; size_t n; } Span;
#define SHOWN(span) (int)MIN((span).n, 100), (span).p // for %.*s in a message
#define SPAN(literal) ((Span){literal, sizeof(literal) - 1})

// Bytes of the UTF-8 character at p: 1 to 4; 0 if the n bytes are only its beginning; -1 if it is
// invalid (stray continuation, overlong, surrogate, above U+10FFFF). Stops at the first wrong byte.
static int utf8_length(const char *p, size_t n) {
    uint8_t a = (uint8_t)p[0];
    if (a < 0x80) return 1;
    if (a < 0xC2 || a > 0xF4) return -1;
    int need = a < 0xE0 ? 2 : a < 0xF0 ? 3 : 4;
    uint8_t lo = a == 0xE0 ? 0xA0 : a == 0xF0 ? 0x90 : 0x80;
    uint8_t hi = a == 0xED ? 0x9F : a == 0xF4 ? 0x8F : 0xBF;
    for (int i = 1; i < need; i++, lo = 0x80, hi = 0xBF) {
        if ((size_t)i >= n) return 0;
        if ((uint8_t)p[i] < lo || (uint8_t)p[i] > hi) return -1;
    }
    return need;
}

static bool is_control(const char *p) { // of one character: could it steer a terminal?
    uint8_t c = (uint8_t)p[0];
    return c < 32 || c == 127 || (c == 0xC2 && (uint8_t)p[1] < 0xA0);
}

// A line on stderr. What is no printable text in it came from a file or a user: shown as '?'.
__attribute__((format(printf, 2, 3))) static void say(const char *kind, const char *format, ...) {
    char line[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    fflush(stdout);
    fputs(kind, stderr);
    for (size_t at = 0, n = strlen(line); at < n;) {
        int length = utf8_length(line + at, n - at);
        if (length < 1 || is_control(line + at)) fputc('?', stderr);
        else fwrite(line + at, 1, (size_t)length, stderr);
        at += (size_t)MAX(length, 1);
    }
    fputc('\n', stderr);
}

// The end for a user's or a file's fault: what, where, the value found, the value expected.
#define die(...) (say("error: ", __VA_ARGS__), exit(1))
#define warn_line(...) say("warning: ", __VA_ARGS__)
static void *xalloc(size_t count, size_t size) { // zeroed; never NULL
    if (size && count > PTRDIFF_MAX / size) die("out of memory: %zu times %zu bytes", count, size);
    void *p = calloc(count ? count : 1, size ? size : 1);
    if (!p) die("out of memory: %zu bytes", count * size);
    return p;
}

static void *grown(void *p, size_t *cap, size_t n, size_t size) { // p with room for n items
    if (n <= *cap) return p;
    size_t new_cap = MAX(n, 2 * *cap + 64);
    p = new_cap > PTRDIFF_MAX / size ? NULL : realloc(p, new_cap * size);
    if (!p) die("out of memory: %zu times %zu bytes", new_cap, size);
    *cap = new_cap;
    return p;
}

static void str_add(Str *s, const void *bytes, size_t n) { // s->p[s->n] is always 0 after this
    s->p = grown(s->p, &s->cap, s->n + n + 1, 1);
    if (n) memcpy(s->p + s->n, bytes, n);
    s->p[s->n += n] = 0;
}

__attribute__((format(printf, 2, 3))) static void str_printf(Str *s, const char *format, ...) {
    char line[1024];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(line, sizeof line, format, args);
    va_end(args);
    str_add(s, line, (size_t)MIN(MAX(n, 0), (int)sizeof line - 1));
}

static void str_free(Str *s) { free(s->p), *s = (Str){0}; }
static Span str_span(const Str *s) { return (Span){s->p, s->n}; }

static bool span_same(Span a, Span b) { return a.n == b.n && (!a.n || !memcmp(a.p, b.p, a.n)); }

static bool span_is(Span a, const char *text) { return span_same(a, (Span){text, strlen(text)}); }

static void warn_lines(const Str *lines) { // each ends with a newline
    for (size_t at = 0; at < lines->n;) {
        size_t n = strcspn(lines->p + at, "\n");
        warn_line("%.*s", (int)n, lines->p + at);
        at += n + 1;
    }
}

// ---- Map: from byte strings to their index in an array of Spans that somebody else owns.
// Open addressing, at most half full; slot 0 means empty, else index + 1. Honest names need a dozen
// probes; a bound on them keeps hostile ones from making every search a walk through the table.
enum { MAX_PROBES = 1000 };
typedef struct { uint32_t *slot; uint32_t mask; } Map;

static uint32_t span_hash(Span s) {
    uint64_t h = 0x9E3779B97F4A7C15u ^ s.n;
    for (size_t n; s.n; s.p += n, s.n -= n) {
        uint64_t w = 0;
        memcpy(&w, s.p, n = MIN(s.n, 8));
        h = (h ^ w) * 0xFF51AFD7ED558CCDu, h ^= h >> 32;
    }
    return (uint32_t)(h * 0xC4CEB9FE1A85EC53u >> 32);
}

static Map map_new(size_t count) { // room for count entries, count < 2^30
    size_t size = 16;
    while (size < 2 * count) size *= 2;
    return (Map){xalloc(size, sizeof(uint32_t)), (uint32_t)(size - 1)};
}

static uint32_t *map_slot(const Map *m, const Span *keys, Span key) { // where it is or belongs
    uint32_t i = span_hash(key) & m->mask;
    for (int probes = 0; m->slot[i] && !span_same(keys[m->slot[i] - 1], key); probes++) {
        if (probes == MAX_PROBES) die("a file whose names were made to collide");
        i = (i + 1) & m->mask;
    }
    return &m->slot[i];
}

static int64_t map_find(const Map *m, const Span *keys, Span key) { // index, or -1
    return (int64_t)*map_slot(m, keys, key) - 1;
}

// Enters keys[index]; if an equal key is there already, its index is returned and nothing changes.
static int64_t map_add(Map *m, const Span *keys, uint32_t index) {
    uint32_t *slot = map_slot(m, keys, keys[index]);
    if (!*slot) *slot = index + 1;
    return (int64_t)*slot - 1;
}

// ---- Reader: a cursor over bytes nobody vouches for. The first error stays; after it every read
// gives 0.
typedef struct {
    const char *name;         // of the file, for messages
    const uint8_t *base;
    size_t size, at;
    size_t error_at;          // where the first error was met
    const char *error;        // what was wrong, or NULL
} Reader;

static void rd_fail(Reader *r, const char *what) {
    if (!r->error) r->error = what, r->error_at = r->at;
}

static const uint8_t *rd_bytes(Reader *r, uint64_t n) { // n bytes in place, or NULL
    if (n > r->size - r->at) rd_fail(r, "the file ends too early");
    if (r->error) return NULL;
    r->at += (size_t)n;
    return r->base + r->at - n;
}

static uint64_t rd_uint(Reader *r, int bytes) { // little-endian, as this machine
    const uint8_t *p = rd_bytes(r, (size_t)bytes);
    uint64_t v = 0;
    if (p) memcpy(&v, p, (size_t)bytes);
    return v;
}

static float f32_at(const uint8_t *p) { // files do not align their floats
    float f;
    memcpy(&f, p, 4);
    return f;
}

static Span rd_string(Reader *r) { // u64 length, bytes
    uint64_t n = rd_uint(r, 8);
    const uint8_t *p = rd_bytes(r, n);
    return p ? (Span){(const char *)p, (size_t)n} : (Span){"", 0};
}

// The end for a fault at byte `at` of the file.
#define rd_die(r, at, format, ...)                                                                 \
    die("%s: byte %zu of %zu: " format, (r)->name, (size_t)(at), (r)->size, ##__VA_ARGS__)

static void rd_check(const Reader *r) { // dies if anything went wrong
    if (r->error) rd_die(r, r->error_at, "%s", r->error);
}

// ---- files, clock, Ctrl-C, cores: the only platform code
enum { MAX_THREADS = 256 };

// Read-only and in place, kept for the life of the process.
static Reader file_map(const char *name) {
    int fd = open(name, O_RDONLY | O_CLOEXEC | O_NONBLOCK); // a pipe must not block
    struct stat st;
    if (fd < 0 || fstat(fd, &st) < 0) die("%s: cannot open: %s", name, strerror(errno));
    if (!S_ISREG(st.st_mode)) die("%s: not a regular file", name);
    Reader r = {.name = name, .base = (const uint8_t *)"", .size = (size_t)st.st_size};
    if (r.size) {
        void *p = mmap(NULL, r.size, PROT_READ, MAP_SHARED, fd, 0);
        if (p == MAP_FAILED) die("%s: cannot map %zu bytes: %s", name, r.size, strerror(errno));
        r.base = p;
    }
    close(fd);
    return r;
}

static bool file_same(const char *a, const char *b) {
    struct stat s, t;
    return !stat(a, &s) && !stat(b, &t) && s.st_dev == t.st_dev && s.st_ino == t.st_ino;
}

static bool file_exists(const char *name) { return access(name, R_OK) == 0; }

static double now(void) { // seconds
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static uint64_t time_seed(void) { return (uint64_t)(1e9 * now()) ^ (uint64_t)getpid() << 32; }

static volatile sig_atomic_t interrupted; // the one mutable global: set by Ctrl-C

static void on_interrupt(int sig) { interrupted = sig; }

// The second Ctrl-C ends the program as it would without us. No SA_RESTART: a waiting read returns.
static void interrupt_arm(void) {
    struct sigaction action = {.sa_handler = on_interrupt, .sa_flags = SA_RESETHAND};
    interrupted = 0;
    sigaction(SIGINT, &action, NULL);
}

static int64_t memory_size(void) { // bytes of the machine's memory, as far as it says
#ifdef _SC_PHYS_PAGES
    long pages = sysconf(_SC_PHYS_PAGES), size = sysconf(_SC_PAGESIZE);
    if (pages > 0 && size > 0) return (int64_t)pages * size;
#endif
    return INT64_MAX;
}

// Cores for this process: the processors that it may use, but no more than the machine has cores,
// because two threads on one core share its arithmetic. Linux numbers the threads of a core; one
// that is switched off leaves a gap in the numbers. Other systems say nothing: processors count.
static int core_count(void) {
    int cpus = 1, cores = 0, first;
#ifdef _OPENMP
    cpus = omp_get_num_procs();
#endif
    for (int i = 0; cores < cpus && i < 4 * MAX_THREADS; i++) {
        char name[80];
        snprintf(name, sizeof name, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list",
                 i);
        FILE *f = fopen(name, "r");
        if (!f && i >= 2 * cpus) break;
        if (f && fscanf(f, "%d", &first) == 1 && first == i) cores++;
        if (f) fclose(f);
    }
    return cores ? cores : cpus;
}

// ---- Team: threads that walk the same code together
typedef struct {
    int n;                              // threads in the team
    int isa;                            // instruction set of the kernels, chapter 2
    _Alignas(64) atomic_long ticket;    // next piece of the present step
    _Alignas(64) atomic_int here;       // threads that have finished the present step
    atomic_uint step;                    // steps finished so far
} Team;

typedef struct {                        // one thread's view
    Team *team;
    int rank;                           // 0 .. team->n - 1
    uint8_t *scratch;                   // its own, 64-byte aligned, matmul_scratch() bytes
} Worker;

// The next piece of work of this step: 0, 1, 2, ... each handed out once.
static long team_take(Team *t) {
    return atomic_fetch_add_explicit(&t->ticket, 1, memory_order_relaxed);
}

// Ends a step: nobody goes on before all have arrived. Spins for some microseconds, then naps:
// where other programs want the cores, a thread that naps is back much sooner than one that yields.
static void team_wait(Team *t) {
    unsigned step = atomic_load_explicit(&t->step, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&t->here, 1, memory_order_acq_rel) == t->n - 1) {
        atomic_store_explicit(&t->ticket, 0, memory_order_relaxed);
        atomic_store_explicit(&t->here, 0, memory_order_relaxed);
        atomic_store_explicit(&t->step, step + 1, memory_order_release);
        return;
    }
    for (int spin = 0; atomic_load_explicit(&t->step, memory_order_acquire) == step; spin++)
        if (spin > 20000) nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
}

// A step as a loop, for (long i; team_next(team, count, &i);): 0 ... count - 1, each in one of the
// threads; it ends for all of them when all is done.
static bool team_next(Team *t, long count, long *i) {
    *i = team_take(t);
    if (*i >= count) team_wait(t);
    return *i < count;
}

// Runs work(arg, rank) once in each of t->n threads; fewer if the machine gives fewer.
static void team_run(Team *t, void (*work)(void *arg, int rank), void *arg) {
#ifdef _OPENMP
    #pragma omp parallel num_threads(t->n)
    {
        #pragma omp single
        t->n = omp_get_num_threads();
        work(arg, omp_get_thread_num());
    }
#else
    t->n = 1;
    work(arg, 0);
#endif
}

// ---- random numbers: xorshift*, llama2.c's generator, so that its seeds keep their texts
static uint32_t rng_next(uint64_t *state) {
    *state ^= *state >> 12, *state ^= *state << 25, *state ^= *state >> 27;
    return (uint32_t)(*state * 0x2545F4914F6CDD1Du >> 32);
}

static float rng_float(uint64_t *state) { // [0, 1)
    return (float)(rng_next(state) >> 8) / 16777216.0f;
}
/* ------------------------------------------------------------------------------------------------
 * Chapter 2. Numbers on disk
 *
 * A weight matrix stays in the mapped file as it was written: rows of floats, or rows of blocks of
 * 32 or 256 small integers that share a scale. Whatever knows such a layout, and whatever knows an
 * instruction set, is in this chapter; the rest of the program asks formats[] and kernels[].
 * What the product of a row of weights and a row of activations *is*, to the bit, depends on
 * neither. Float rows: eight lanes, lane k mod 8, one fused multiply-add a weight in rising k, the
 * lanes folded by one fixed tree after every 2,048. Quantised rows meet 16-bit activations in
 * blocks of 32: the products of a block are summed exactly in 32-bit integers, in any order, then
 * one fused multiply-add with the scales goes into lane (block mod 8). The plain C kernels below
 * are that definition. It costs one conversion and one multiply-add a block, and buys the same text
 * on every machine and in every batch. Two kinds of kernels share it: dots for a few columns, which
 * read weights once and open eight blocks at a time in registers, and panels for many, which are
 * opened once into the cache. (Where the compiler has no fast fma(), float rows of plain C
 * multiply and add: other last bits.)
 */
#ifdef __SSE2__
#include <immintrin.h>
#endif
#if defined(__x86_64__) && defined(__GNUC__) && !defined(PLAIN_C)
#define HAVE_X86 1
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__GNUC__) && !defined(PLAIN_C)
#define HAVE_NEON 1
#include <arm_neon.h>
#ifdef __linux__
#include <sys/auxv.h>
#endif
#endif

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#pragma clang diagnostic ignored "-Wpass-failed" // where a count is not known after all
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif
#if defined(__x86_64__) && !defined(__clang__)
#define KEEP(v) __asm__("" : "+v"(v)) // in its register: gcc re-associates sums, repeats loads
#else
#define KEEP(v) (void)(v)
#endif

#ifdef HAVE_X86
// Vector code is compiled for its instruction set whatever the command line says; isa_best() looks
// before any of it runs.
#define AVX2_TARGET __attribute__((target("avx2,fma,f16c")))
#define AVX2 AVX2_TARGET __attribute__((always_inline)) static inline
#define AVX2_CALL AVX2_TARGET __attribute__((noinline)) static
#define AVX512_TARGET \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
#define AVX512 AVX512_TARGET __attribute__((always_inline)) static inline
#define AVX512_CALL AVX512_TARGET __attribute__((noinline)) static
#define SIMD simd_avx2
#define SIMD_INLINE AVX2
#define SIMD_CALL AVX2_CALL
#elif defined(HAVE_NEON) // every AArch64 has it
#define NEON INLINE
#define NEON_CALL __attribute__((noinline)) static
#define SIMD simd_neon
#define SIMD_INLINE NEON
#define SIMD_CALL NEON_CALL
#else
#define SIMD simd_c
#define SIMD_CALL static
#endif

enum { ISA_C, ISA_AVX2, ISA_AVX512, ISA_NEON = 1, ISA_SDOT, ISA_I8MM, ISA_COUNT }; // they rise
enum { LANES = 8, FLOAT_BLOCK = 2048 };

typedef struct Format Format;
typedef struct {            // a matrix in the file: [rows][cols], each row a run of blocks
    const Format *format;
    const uint8_t *data;
    int64_t rows, cols;
    size_t stride;          // bytes a row
    const uint8_t *scales;  // .bin v2 only: one f32 for every `group` weights through all rows
    int group;
    float *bias;            // [rows], or NULL: none
} Tensor;

typedef struct {            // activations: n rows of floats, and the same as 16-bit blocks of 32
    int n;
    int64_t cols;
    float *x;               // row i at x + i * ldx
    int16_t *q;             // row i at q + i * ldq; a block's 16 even-numbered values, then the odd
    uint8_t *bytes;         // row i at bytes + 2 * i * ldq: the same in another order (pair_at)
    float *dx;              // row i at dx + i * ldb: one scale a block
    int32_t *sum;           // row i at sum + 3 * i * ldb: [3][ldb] a block's first 16, second 16;
                            // of sums() from bytes at offset 128: what they are 128 times too large
    int64_t ldx, ldq, ldb;  // in elements; odd numbers of cache lines, so that rows do not collide
} Acts;

typedef struct {            // y[i][r] = row r of w times row i of x, (n, w->rows)
    const Tensor *w;
    float *y;
    int first, n;           // of these rows of x: row `first` makes y[0]
} Product;

typedef uint64_t V64 __attribute__((vector_size(64))); // GNU C's vectors: bytes as words,
typedef uint64_t V32 __attribute__((vector_size(32)));
typedef uint64_t V16 __attribute__((vector_size(16)));
typedef uint32_t V8u __attribute__((vector_size(32))); // and eights of numbers
typedef int32_t V8i __attribute__((vector_size(32)));
typedef int32_t V4i __attribute__((vector_size(16)));
typedef int16_t V8h __attribute__((vector_size(16)));
typedef uint16_t V8s __attribute__((vector_size(16)));
typedef int16_t V16h __attribute__((vector_size(32)));
typedef uint16_t V16u __attribute__((vector_size(32)));
typedef float V8f __attribute__((vector_size(32)));
typedef double V8d __attribute__((vector_size(64)));
typedef float V16f __attribute__((vector_size(64)));
typedef struct {            // eight blocks of 32 weights, opened: one is (u - offset) * s + m
    V32 u[8];               // a byte a weight, a block each; or, paired, of blocks i and i + 4 the
                            // first halves in u[i] and the second in u[i + 4]; or, where registers
    V64 w[4];               // are wide, blocks i and i + 4
    V8f s[2], m[2];         // of block i in element i; [1]: of its second 16 weights, in formats
                            // whose scales or minima serve 16
    V8i sc[2], mn[2];       // formats of 256 weights: s and m in units of the file's d and dmin
} Group;

// Many columns: the rows of a tile are opened, FLOAT_BLOCK of K at a time, into panels that stay in
// the cache while all columns pass, some at a time; part[] keeps eight lanes of every product.
enum { PANEL_ROWS = 48, PANEL_K = 256, PANEL_BLOCKS = 16 }; // at most
enum { PANEL_COLUMNS = 512, PANEL_NEAR = 32 }; // columns of a pass, and of those at a time
typedef union {
    float w[PANEL_K * PANEL_ROWS]; // [k][row]
    struct {
        // [block][step][row]: four bytes. Pairs: 16 steps of two integers, weights 0 2, 4 6 ...,
        // then 1 3, 5 7 ...; quads: 8 steps of four bytes as in Group. Octs: 4 steps of eight
        uint8_t q[PANEL_BLOCKS * 16 * PANEL_ROWS * 4];
        float s[PANEL_BLOCKS * 2 * PANEL_ROWS], m[PANEL_BLOCKS * 2 * PANEL_ROWS]; // [block][2][row]
    };
} Panel;

// The kinds of kernels. Dot: four rows of p->w times n <= COLUMNS columns from `first` on.
// Load: the eight blocks at p; the first n of them are the tensor's at `at`.
// Pack: weights k ... k + len - 1 of rows row ... into a panel; past the last row it is repeated.
// Tile: the lanes of a few columns += the panel's weights times len activations of x.
enum { COLUMNS = 8 };
typedef void Dot(const Product *p, const int64_t *row, const Acts *x, int first, int n);
typedef void Load(const Tensor *t, const uint8_t *p, const uint8_t *at, int n, Group *g);
typedef void Pack(const Tensor *t, int64_t row, int64_t k, int len, int rows, Panel *p);
typedef void Tile(const Format *f, const Panel *p, const Acts *x, int column, int len, float *part);

struct Format {
    const char *name;
    uint32_t id;           // GGUF's tensor type
    int block, bytes;      // weights a block, bytes a block
    bool quantised;        // meets 16-bit activations
    int offset;            // of the integers
    int scales, minima;    // for 32 weights: 1 or 2, 0 to 2
    int bits_at;           // place of 32 fifth bits, bit k for weight k; 0: none
    int d_at;              // place of the block's f16 scale, its f16 minimum follows; -1: elsewhere
    const uint8_t *table;  // what the nibbles stand for, offset added
    Load *load[3];          // for group_open: the weights to u, to u paired, to w
    Load *open;            // vector code: all of it
    void (*expand)(const Tensor *t, int64_t row, int64_t k, int n, float *out);
    Dot *dot[ISA_COUNT];
};

typedef struct {
    int above;         // so many columns, panels are faster than dots (measured)
    int rows, columns; // of a tile: as many rows has a panel
    Pack *pack;
    Tile *tile;
} PanelKernels;

// ---- small floats
// f16:  | s | exponent 5 | mantissa 10 |      bf16:  the upper half of an f32
static float f32_of_bits(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static uint16_t u16_at(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }

static float f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = h >> 10 & 31, m = h & 1023;
    // a NaN is made quiet, as the hardware does
    if (e == 31) return f32_of_bits(sign | 0x7F800000 | m << 13 | (m ? 0x400000 : 0));
    if (e) return f32_of_bits(sign | (e + 112) << 23 | m << 13);
    float f = (float)m * 0x1p-24f;
    return sign ? -f : f;
}

static uint16_t f32_to_f16(float f) { // to nearest, ties to even
    uint32_t u;
    memcpy(&u, &f, 4);
    uint32_t sign = u >> 16 & 0x8000, a = u & 0x7FFFFFFF;
    if (a > 0x7F800000) return (uint16_t)(sign | 0x7E00 | (a >> 13 & 0x1FF));
    if (a >= 0x477FF000) return (uint16_t)(sign | 0x7C00); // 65520 and more
    if (a >= 0x38800000) return (uint16_t)(sign | (a - 0x38000000 + 0xFFF + (a >> 13 & 1)) >> 13);
    uint32_t shift = 126 - (a >> 23), m = (a & 0x7FFFFF) | 0x800000; // units of 2^-24
    if (shift > 24) return (uint16_t)sign;
    uint32_t q = m >> shift, rest = m & ((1u << shift) - 1), half = 1u << (shift - 1);
    return (uint16_t)(sign | (q + (rest > half || (rest == half && (q & 1)))));
}

static void narrow_c(const float *x, int64_t n, uint16_t *to) { // to f16
    for (int64_t i = 0; i < n; i++) to[i] = f32_to_f16(x[i]);
}

static float bf16_to_f32(uint16_t h) { return f32_of_bits((uint32_t)h << 16); }

static float f16_at(const uint8_t *p) { return f16_to_f32(u16_at(p)); }

// Where fma() would be a slow library call, float rows multiply and add instead.
#if defined(FP_FAST_FMAF) || defined(__FMA__) || defined(__aarch64__)
#define FMA_IS_FAST 1
#else
#define FMA_IS_FAST 0
#endif

// ---- loaders. A loader turns eight blocks of 32 weights into bytes, 32 at a time. It is written
// once, in GNU C's vectors: compilers make AVX2, SSE2 or NEON code of them, or plain arithmetic on
// 64-bit words. A row's end is made eight blocks by group_pad.
// What needs instructions that C has no word for (f16, look-up) is left to group_open.
#define ALL(x) {x, x, x, x, x, x, x, x}
#define EACH(byte) ((byte) * 0x0101010101010101u) // in each byte of a word
#define SHIFT(v, left) ((left) > 0 ? (v) << (left) : (v) >> -(left))
#define NEGATIVE(v) ((V8i)(v) >> 31) // a mask; gcc takes a comparison apart where 32 are two 16

// q8_0, 34 bytes:   | d f16 | 32 signed bytes |
// bin8, 32 bytes:   | 32 signed bytes |: llama2.c's version 2 where no group crosses a row
static float bin8_scale(const Tensor *t, const uint8_t *p) {
    size_t k = (size_t)(p - t->data), g = (size_t)t->group;
    return f32_at(t->scales + 4 * (k / g));
}

INLINE void bin8_scales(const Tensor *t, const uint8_t *p, int n, Group *g) {
    const size_t k = (size_t)(p - t->data);
    const int shift = __builtin_ctz((unsigned)t->group);
    float d[8] = {0};
    if (n == 8 && t->group == 1 << shift)
        UNROLL for (int i = 0; i < 8; i++)
            d[i] = f32_at(t->scales + 4 * ((k + 32 * (size_t)i) >> shift));
    else
        for (int i = 0; i < n; i++) d[i] = bin8_scale(t, p + 32 * i);
    memcpy(&g->s[0], d, sizeof d);
}

// q4_0, 18 bytes:   | d f16 | 16 bytes of nibbles |                   iq4_nl: the same
// q4_1, 20 bytes:   | d f16 | m f16 | 16 bytes of nibbles |
// q5_0, 22 bytes:   | d f16 | 32 fifth bits | 16 bytes of nibbles |
// q5_1, 24 bytes:   | d f16 | m f16 | 32 fifth bits | 16 bytes of nibbles |
// mxfp4, 17 bytes:  | E | 16 bytes of nibbles |                       scale 2^(E - 128)
// Nibbles: byte k holds weight k in its low half and weight k + 16 in its high half.
INLINE void mxfp4_scales(const uint8_t *p, Group *g) { // E < 2: subnormal
    uint32_t e[8];
    UNROLL for (int i = 0; i < 8; i++) e[i] = p[17 * i];
    V8u v = {e[0], e[1], e[2], e[3], e[4], e[5], e[6], e[7]}, small = (V8u)NEGATIVE(v - 2);
    g->s[0] = (V8f)((small & ((v + 1) << 21)) | (~small & ((v - 1) << 23)));
}

// Nibbles of iq4_nl and iq4_xs: this - 128; of mxfp4, twice the value of E2M1: this - 12
static const uint8_t iq4_table[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                      129, 141, 153, 166, 181, 197, 217, 241};
static const uint8_t fp4_table[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

INLINE void ints_of_bytes(uint64_t b, V8i *v) {
    V32 pair = (V32){b, b, b, b} >> (V32){0, 16, 32, 48};
    *v = (V8i)((pair & 0xFF) | (pair & 0xFF00) << 24);
}

// Of 16 bytes the even-numbered to v[0], the others to v[1]
INLINE void ints_of_pairs(uint64_t a, uint64_t b, V8i v[2]) {
    const V16 all = {a, b};
    const V8s even = (V8s)all & 255, odd = (V8s)all >> 8;
    for (int i = 0; i < 8; i++) v[0][i] = even[i];
    for (int i = 0; i < 8; i++) v[1][i] = odd[i];
}

// q4_K, 144 bytes:  | d f16 | dmin f16 | 12 bytes of scales | 4 x 32 bytes: low nibbles, high |
// q5_K, 176 bytes:  with 32 bytes of fifth bits before the nibbles: bit i of byte k for sub-block i
// The 12 bytes: a scale and a minimum of 6 bits for each of 8 sub-blocks.
// bytes 0-3  | sc[4..7] bits 5-4 | sc[0..3]           |
// bytes 4-7  | mn[4..7] bits 5-4 | mn[0..3]           |
// bytes 8-11 | mn[4..7] bits 3-0 | sc[4..7] bits 3-0  |
INLINE void q4_K_scales(const uint8_t *p, Group *g) {
    uint32_t a, b, c;
    memcpy(&a, p, 4), memcpy(&b, p + 4, 4), memcpy(&c, p + 8, 4);
    uint32_t sc_high = (c & 0x0F0F0F0F) | (a >> 2 & 0x30303030);
    uint32_t mn_high = (c >> 4 & 0x0F0F0F0F) | (b >> 2 & 0x30303030);
    ints_of_bytes((a & 0x3F3F3F3F) | (uint64_t)sc_high << 32, &g->sc[0]);
    ints_of_bytes((b & 0x3F3F3F3F) | (uint64_t)mn_high << 32, &g->mn[0]);
}

// q2_K, 84 bytes:   | 16 x scale, min (nibbles) | 2 x 32 bytes: 4 bit pairs | d f16 | dmin f16 |
// tq2_0, 66 bytes:  | 2 x 32 bytes: 4 bit pairs | d f16 |
// Bit pair i of byte k belongs to weight k of block i in a half of 128.
INLINE void q2_K_scales(const uint8_t *p, Group *g) {
    uint64_t a, b;
    memcpy(&a, p, 8), memcpy(&b, p + 8, 8);
    ints_of_pairs(a & EACH(15), b & EACH(15), g->sc);
    ints_of_pairs(a >> 4 & EACH(15), b >> 4 & EACH(15), g->mn);
}

// q3_K, 110 bytes:  | 32 bytes of third bits | 2 x 32 bytes: 4 bit pairs | 12 of scales | d f16 |
// Third bits as q5_K's fifth. Scales of 6 bits, 32 too large: nibbles k and 8 + k in byte k; bytes
// 8 to 11 hold their upper bits: pair i of byte k for scale 4 i + k.
INLINE void q3_K_scales(const uint8_t *p, Group *g) {
    uint64_t low;
    uint32_t c;
    memcpy(&low, p, 8), memcpy(&c, p + 8, 4);
    uint64_t a = (c & 0x03030303) | (uint64_t)(c >> 2 & 0x03030303) << 32;
    uint64_t b = (c >> 4 & 0x03030303) | (uint64_t)(c >> 6 & 0x03030303) << 32;
    ints_of_pairs((low & EACH(15)) | a << 4, (low >> 4 & EACH(15)) | b << 4, g->sc);
    g->sc[0] -= 32, g->sc[1] -= 32;
}

// q6_K, 210 bytes:  | 2 x 64 low nibbles | 2 x 32 upper bit pairs | 16 signed scales | d f16 |
// In each half of 128: four blocks of 32; nibbles of block i in bytes 32 * (i % 2) ..., low: i < 2
INLINE void q6_K_scales(const uint8_t *p, Group *g) {
    uint64_t a, b;
    memcpy(&a, p, 8), memcpy(&b, p + 8, 8);
    ints_of_pairs(a ^ EACH(128), b ^ EACH(128), g->sc);
    g->sc[0] -= 128, g->sc[1] -= 128;
}

// iq4_xs, 136 bytes: | d f16 | 8 upper bit pairs | 8 low nibbles | 8 x 16 bytes of nibbles |
// The first two make the scales, 32 too large.
INLINE void iq4_xs_scales(const uint8_t *p, Group *g) {
    uint32_t low, high = u16_at(p + 2);
    memcpy(&low, p + 4, 4);
    V8u v = (V8u){low, low, low, low, low, low, low, low} >> (V8u){0, 4, 8, 12, 16, 20, 24, 28};
    V8u w = (V8u){high, high, high, high, high, high, high, high} >>
            (V8u){0, 2, 4, 6, 8, 10, 12, 14};
    g->sc[0] = (V8i)((v & 15) | (w & 3) << 4) - 32;
}

// tq1_0, 54 bytes:  | 32 bytes, 5 digits | 16 bytes, 5 | 4 bytes, 4 | d f16 |   digit - 1: a weight
// A byte is a fraction of base 3, in 256ths: times 3, what passes 255 is the next digit. First the
// first digits of all 32 bytes, then their second ones, ...
static void digits_open(const uint8_t *p, uint8_t out[256]) {
    for (int part = 0, n = 32; part < 3; p += n, part++, n = part == 1 ? 16 : 4)
        for (int digit = 0, power = 1; digit < (n == 4 ? 4 : 5); digit++, power *= 3)
            for (int k = 0; k < n; k++) *out++ = (uint8_t)((p[k] * power & 255) * 3 >> 8);
}

// The weights, compiled for registers of 32 and of 64 bytes, and paired. both_: 32 bytes at p and,
// in a wide register, 32 at q; paired, 16 of each. twice_: 16 bytes at p two times, the same of q;
// later_: shifts what is from q.
INLINE void both_32(const uint8_t *p, const uint8_t *q, V32 *v) { memcpy(v, p, 32), (void)q; }

INLINE void twice_32(const uint8_t *p, const uint8_t *q, V32 *v) {
    V16 half;
    (void)q;
    memcpy(&half, p, 16);
    KEEP(half); // gcc would read it in two pieces
    *v = (V32){half[0], half[1], half[0], half[1]};
}

INLINE void later_32(V32 *v, int bits) { (void)v, (void)bits; }

static const V32 high_32 = {0, 0, 4, 4};
#ifdef HAVE_X86
AVX512 void both_64(const uint8_t *p, const uint8_t *q, V64 *v) {
    __m256i a = _mm256_loadu_si256((const void *)p), b = _mm256_loadu_si256((const void *)q);
    *v = (V64)_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
}

AVX512 void twice_64(const uint8_t *p, const uint8_t *q, V64 *v) {
    __m512i a = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)p));
    *v = (V64)_mm512_mask_broadcast_i32x4(a, 0xFF00, _mm_loadu_si128((const void *)q));
}

AVX512 void later_64(V64 *v, int bits) {
    const uint64_t b = (uint64_t)bits;
    *v >>= (V64){0, 0, 0, 0, b, b, b, b};
}

static const V64 high_64 = {0, 0, 4, 4, 0, 0, 4, 4};

typedef V32 V32p;
AVX2 void both_32p(const uint8_t *p, const uint8_t *q, V32 *v) {
    __m128i a = _mm_loadu_si128((const void *)p), b = _mm_loadu_si128((const void *)q);
    *v = (V32)_mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1);
}

AVX2 void later_32p(V32 *v, int bits) {
    const uint64_t b = (uint64_t)bits;
    *v >>= (V32){0, 0, b, b};
}
#endif

#define LOADERS(W, CALL, count, halves, u)                                                        \
    CALL void bytes_##W(const uint8_t *p, int bytes, Group *g) {                                  \
        UNROLL for (int h = 0; h < halves; h++, p += 16)                                          \
            UNROLL for (int i = 0; i < count; i++) {                                              \
                V##W v; /* not at once into g: gcc would copy by halves, and wait to read it all */\
                both_##W(p + bytes * i, p + bytes * (i + 4), &v);                                 \
                g->u[i + 4 * h] = v ^ EACH(128);                                                  \
            }                                                                                     \
    }                                                                                             \
    CALL void nibbles_K_##W(const uint8_t *p, Group *g) {                                         \
        UNROLL for (int h = 0; h < halves; h++)                                                   \
            UNROLL for (int i = 0; i < count; i += 2) {                                           \
                V##W v;                                                                           \
                both_##W(p + 16 * (i + h), p + 16 * (i + h) + 64, &v);                            \
                g->u[i + 4 * h] = v & EACH(15), g->u[i + 4 * h + 1] = v >> 4 & EACH(15);          \
            }                                                                                     \
    }                                                                                             \
    CALL void bits_K_##W(const uint8_t *p, int to, Group *g) { /* bit i to bit `to` of block i */ \
        UNROLL for (int h = 0; h < halves; h++, p += 16) {                                        \
            V##W v;                                                                               \
            both_##W(p, p, &v), later_##W(&v, 4);                                                 \
            UNROLL for (int i = 0; i < count; i++)                                                \
                g->u[i + 4 * h] |= SHIFT(v, to - i) & EACH(1 << to);                              \
        }                                                                                         \
    }                                                                                             \
    CALL void pairs_##W(const uint8_t *p, Group *g) {                                             \
        UNROLL for (int h = 0; h < halves; h++, p += 16)                                          \
            UNROLL for (int i = 0; i < count; i++) {                                              \
                V##W v;                                                                           \
                both_##W(p + i / 4 * 32, p + 32, &v);                                             \
                g->u[i + 4 * h] = v >> i % 4 * 2 & EACH(3);                                       \
            }                                                                                     \
    }                                                                                             \
    CALL void sixes_##W(const uint8_t *p, Group *g) {                                             \
        UNROLL for (int h = 0; h < halves; h++, p += 16)                                          \
            UNROLL for (int i = 0; i < count; i++) {                                              \
                V##W low, high;                                                                   \
                both_##W(p + i / 4 * 64 + i % 2 * 32, p + 64 + i % 2 * 32, &low);                 \
                both_##W(p + 128 + i / 4 * 32, p + 160, &high);                                   \
                g->u[i + 4 * h] = (low >> i % 4 / 2 * 4 & EACH(15)) |                             \
                                  (SHIFT(high, 4 - i % 4 * 2) & EACH(0x30));                      \
            }                                                                                     \
    }                                                                                             \
    CALL void digits_##W(const uint8_t *p, Group *g) {                                            \
        uint8_t out[256];                                                                         \
        digits_open(p, out);                                                                      \
        for (int h = 0; h < halves; h++)                                                          \
            for (int i = 0; i < count; i++)                                                       \
                both_##W(out + 32 * i + 16 * h, out + 32 * (i + 4) % 256 + 16 * h,                \
                         &g->u[i + 4 * h]);                                                       \
    }
#define NIBBLES(W, CALL, count, u)                                                                \
    CALL void nibbles_##W(const uint8_t *p, int bytes, Group *g) {                                \
        UNROLL for (int i = 0; i < count; i++) {                                                  \
            V##W v;                                                                               \
            twice_##W(p + bytes * i, p + bytes * (i + 4), &v);                                    \
            g->u[i] = v >> high_##W & EACH(15);                                                   \
        }                                                                                         \
    }
LOADERS(32, INLINE, 8, 1, u)
NIBBLES(32, INLINE, 8, u)
#ifdef HAVE_X86
LOADERS(64, AVX512, 4, 1, w)
NIBBLES(64, AVX512, 4, w)
LOADERS(32p, AVX2, 4, 2, u)
AVX2 void nibbles_32p(const uint8_t *p, int bytes, Group *g) {
    UNROLL for (int i = 0; i < 4; i++) {
        V32 v;
        both_32p(p + bytes * i, p + bytes * (i + 4), &v);
        g->u[i] = v & EACH(15), g->u[i + 4] = v >> 4 & EACH(15);
    }
}
#endif

/* To add a weight format: a line here, and where no loader above fits, one more: name, GGUF type,
 * weights and bytes a block, offset of the integers, scales and minima for 32, places of the fifth
 * bits and of d, table, loader. Kernels count on what test_formats says of these. */
#define QUANTISED(X)                                                                             \
    X(q8_0, 8, 32, 34, 128, 1, 0, 0, 0, NULL, WIDTH(bytes)(p + 2, 34, g))                        \
    X(bin8, 1001, 32, 32, 128, 1, 0, 0, -1, NULL,                                                \
      (WIDTH(bytes)(p, 32, g), bin8_scales(t, at, n, g)))                                        \
    X(q4_0, 2, 32, 18, 8, 1, 0, 0, 0, NULL, WIDTH(nibbles)(p + 2, 18, g))                        \
    X(q4_1, 3, 32, 20, 0, 1, 1, 0, 0, NULL, WIDTH(nibbles)(p + 4, 20, g))                        \
    X(q5_0, 6, 32, 22, 16, 1, 0, 2, 0, NULL, WIDTH(nibbles)(p + 6, 22, g))                       \
    X(q5_1, 7, 32, 24, 0, 1, 1, 4, 0, NULL, WIDTH(nibbles)(p + 8, 24, g))                        \
    X(iq4_nl, 20, 32, 18, 128, 1, 0, 0, 0, iq4_table, WIDTH(nibbles)(p + 2, 18, g))              \
    X(mxfp4, 39, 32, 17, 12, 1, 0, 0, -1, fp4_table,                                             \
      (WIDTH(nibbles)(p + 1, 17, g), mxfp4_scales(p, g)))                                        \
    X(q2_K, 10, 256, 84, 0, 2, 2, 0, 80, NULL, (WIDTH(pairs)(p + 16, g), q2_K_scales(p, g)))     \
    X(q3_K, 11, 256, 110, 4, 2, 0, 0, 108, NULL,                                                 \
      (WIDTH(pairs)(p + 32, g), WIDTH(bits_K)(p, 2, g), q3_K_scales(p + 96, g)))                 \
    X(q4_K, 12, 256, 144, 0, 1, 1, 0, 0, NULL,                                                   \
      (WIDTH(nibbles_K)(p + 16, g), q4_K_scales(p + 4, g)))                                      \
    X(q5_K, 13, 256, 176, 0, 1, 1, 0, 0, NULL,                                                   \
      (WIDTH(nibbles_K)(p + 48, g), WIDTH(bits_K)(p + 16, 4, g), q4_K_scales(p + 4, g)))         \
    X(q6_K, 14, 256, 210, 32, 2, 0, 0, 208, NULL, (WIDTH(sixes)(p, g), q6_K_scales(p + 192, g))) \
    X(iq4_xs, 23, 256, 136, 128, 1, 0, 0, 0, iq4_table,                                          \
      (WIDTH(nibbles)(p + 8, 16, g), iq4_xs_scales(p, g)))                                       \
    X(tq1_0, 34, 256, 54, 1, 1, 0, 0, 52, NULL,                                                  \
      (WIDTH(digits)(p, g), g->sc[0] = (V8i){0} + 1))                                            \
    X(tq2_0, 35, 256, 66, 1, 1, 0, 0, 64, NULL, (WIDTH(pairs)(p, g), g->sc[0] = (V8i){0} + 1))
// Float formats: name, GGUF type, bytes, the value at p. bin is version 2 whose groups cross rows;
// it has no vector dot, its rows are always expanded first.
#define FLOATS(X)                              \
    X(f32, 0, 4, f32_at(p))                    \
    X(f16, 1, 2, f16_at(p))                    \
    X(bf16, 30, 2, bf16_to_f32(u16_at(p)))
#define FLOATS_AND_BIN(X) FLOATS(X) X(bin, 1000, 1, (float)(int8_t)*p * bin8_scale(t, p))

enum { // the order of formats[]
#define X(name, ...) F_##name,
    FLOATS_AND_BIN(X) QUANTISED(X)
#undef X
    F_COUNT
};

static const Format formats[F_COUNT]; // below: the functions first

// ---- one weight as a number
static const uint8_t *weight_at(const Tensor *t, int64_t row, int64_t k, int block, int bytes) {
    return t->data + (size_t)row * t->stride + (size_t)(k / block * bytes);
}

#define X(name, id, bytes, value)                                                           \
    static void name##_expand(const Tensor *t, int64_t row, int64_t k, int n, float *out) { \
        const uint8_t *p = weight_at(t, row, k, 1, bytes);                                  \
        for (int i = 0; i < n; i++, p += (bytes)) out[i] = value;                           \
    }
FLOATS_AND_BIN(X)
#undef X

// ---- what an instruction set does in its own way. All kernels below are written once, in terms of
// these: each is compiled with one of the tables as a constant, so that the calls are inlined.
// Pointers instead of values: how a vector is passed depends on the instruction set.
enum { BY_BLOCKS, PAIRED, WIDE };
typedef struct {
    void (*fma)(const V8f *a, const V8f *b, V8f *c);       // c += a * b, rounded once
    void (*fma_or)(const V8f *a, const V8f *b, V8f *c);    // or twice where it would be slow
    void (*spread)(const float *a, V8f *b);                // to all eight
    void (*store)(const V8f *a, float *to);
    float (*fold)(const V8f *l);                           // T of the definition
    void (*floats)(const V8i *a, V8f *b);
    void (*load)(uint32_t id, const uint8_t *p, V8f *v);   // eight weights of f32, f16, bf16
    void (*halves)(const uint8_t *p, int step, V8f *v);    // f16
    void (*look_up)(const uint8_t table[16], Group *g);
    void (*fifth_bits)(const uint8_t *p, int step, Group *g); // u |= 16 where the bit is set
    // of eight blocks times q or bytes: sums of their first, second 16
    void (*sums)(const Format *f, const Group *g, const int16_t *q, const uint8_t *bytes, V8i s[2]);
    // 32 integers; the first or second block of the pair at bytes
    void (*pack)(const V8i v[4], int16_t *q, uint8_t *bytes, int second, int32_t sum[3]);
    int order;     // of opened weights
    bool by_bytes; // sums() takes upper and lower bytes of activations
    // Where registers have 64 bytes, what belongs together lies in Group's w and Pair's w
    bool wide;
    void (*pair)(uint32_t id, const uint8_t *p, const uint8_t *q, V16f *v); // as load, of each
    void (*twice)(const float *p, V16f *v); // eight, two times
    void (*fma_pair)(const V16f *a, const V16f *b, V16f *c);
    void (*store_wide)(const V16f *v, float *p, float *q);
    void (*fma_wide)(const float *a, const V16f *b, V16f *c); // a to all
} Simd;

// Where fmaf() would be a slow call: the product is exact in double, the sum rounded there.
// Rounding again, to float, is wrong only where the sum became halfway between two floats: then it
// goes back by a last bit, to the side it was on.
static float fma_one(float a, float b, float c) {
    if (FMA_IS_FAST) return fmaf(a, b, c);
    const double product = (double)a * b, sum = product + c;
    const double of_c = sum - product, error = (product - (sum - of_c)) + (c - of_c); // exact
    uint64_t bits;
    memcpy(&bits, &sum, 8);
    if (bits << 36 || !(error > 0 || error < 0)) return (float)sum; // error: NaN where sum is
    return (float)nextafter(sum, error > 0 ? INFINITY : -INFINITY);
}

static void fma_c(const V8f *a, const V8f *b, V8f *c) {
    if (!FMA_IS_FAST) {
        V8d sum;
        for (int i = 0; i < 8; i++) sum[i] = (double)(*a)[i] * (*b)[i] + (*c)[i];
        V4i part[4]; // their even-numbered elements hold the 29 bits that float has not
        memcpy(part, &sum, sizeof sum);
        for (int i = 0; i < 4; i++) part[i] = part[i] << 4 == 0;
        part[0] |= part[1] | part[2] | part[3];
        if (!(part[0][0] | part[0][2])) {
            for (int i = 0; i < 8; i++) (*c)[i] = (float)sum[i];
            return;
        }
    }
    for (int i = 0; i < 8; i++) (*c)[i] = fma_one((*a)[i], (*b)[i], (*c)[i]);
}

static void fma_or_c(const V8f *a, const V8f *b, V8f *c) {
    if (FMA_IS_FAST) fma_c(a, b, c);
    else *c += *a * *b;
}

static void spread_c(const float *a, V8f *b) { *b = (V8f)ALL(*a); }

static void store_c(const V8f *a, float *to) { memcpy(to, a, 32); }

static float fold_c(const V8f *v) {
    const V8f l = *v;
    return ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]));
}

static void floats_c(const V8i *a, V8f *b) {
    for (int i = 0; i < 8; i++) (*b)[i] = (float)(*a)[i];
}

static void load_c(uint32_t id, const uint8_t *p, V8f *v) {
    for (int i = 0; i < 8; i++)
        (*v)[i] = id == 0 ? f32_at(p + 4 * i) : id == 1 ? f16_at(p + 2 * i)
                                                         : bf16_to_f32(u16_at(p + 2 * i));
}

static void halves_c(const uint8_t *p, int step, V8f *v) {
    for (int i = 0; i < 8; i++) (*v)[i] = f16_at(p + step * i);
}

static void look_up_c(const uint8_t table[16], Group *g) {
    for (int k = 0; k < 256; k++) ((uint8_t *)g->u)[k] = table[((uint8_t *)g->u)[k]];
}

static void fifth_bits_c(const uint8_t *p, int step, Group *g) {
    for (int k = 0; k < 256; k++)
        ((uint8_t *)g->u)[k] |= (p[k / 32 * step + k % 32 / 8] >> k % 8 & 1) << 4;
}

// Eight weights times eight integers: four sums of two
static V4i pairs_dot(V8s w, const int16_t *q) {
    V8h in;
    memcpy(&in, q, 16);
#ifdef __SSE2__
    return (V4i)_mm_madd_epi16((__m128i)w, (__m128i)in);
#else
    V4i sum;
    for (int i = 0; i < 4; i++) sum[i] = w[2 * i] * in[2 * i] + w[2 * i + 1] * in[2 * i + 1];
    return sum;
#endif
}

INLINE void blocks_sums(int scales, const Group *g, const int16_t *q, V8i s[2]) {
    s[1] = (V8i){0};
    for (int i = 0; i < 8; i++, q += 32) {
        V4i part[2];
        UNROLL for (int z = 0; z < 2; z++) {
            V8s w;
            memcpy(&w, (const uint8_t *)&g->u[i] + 16 * z, 16);
            part[z] = pairs_dot(w & 255, q + 8 * z) + pairs_dot(w >> 8, q + 8 * z + 16);
        }
        if (scales == 1) part[0] += part[1];
        UNROLL for (int z = 0; z < scales; z++)
            s[z][i] = (part[z][0] + part[z][2]) + (part[z][1] + part[z][3]);
    }
}

static void sums_c(const Format *f, const Group *g, const int16_t *q, const uint8_t *bytes,
                   V8i s[2]) {
    (void)bytes;
    if (f->scales == 1) blocks_sums(1, g, q, s);
    else blocks_sums(2, g, q, s);
}

// 32 integers by bytes, in their order: the upper ones, 64 bytes on the lower ones
INLINE void bytes_pack(const int16_t *q, uint8_t *bytes, V16u *lower) {
    V16u even, odd, upper;
    memcpy(&even, q, 32), memcpy(&odd, q + 16, 32);
    upper = even >> 8 | (odd & 0xFF00), *lower = (even & 255) | odd << 8;
    memcpy(bytes, &upper, 32), memcpy(bytes + 64, lower, 32);
}

static void pack_c(const V8i v[4], int16_t *q, uint8_t *bytes, int second, int32_t sum[3]) {
    (void)bytes, (void)second;
    sum[0] = sum[1] = sum[2] = 0;
    for (int k = 0; k < 32; k++) {
        int16_t value = (int16_t)v[k / 8][k % 8]; // what was no number may be anything here
        q[k % 2 * 16 + k / 2] = value, sum[k / 16] += value;
    }
}

static const Simd simd_c = {fma_c,    fma_or_c, spread_c, store_c,   fold_c,       floats_c,
                            load_c,   halves_c, look_up_c, fifth_bits_c, sums_c, pack_c,
                            BY_BLOCKS, false, .wide = false};

#ifdef HAVE_X86
AVX2 __m256i load32(const void *p) { return _mm256_loadu_si256(p); }

AVX2 void fma_avx2(const V8f *a, const V8f *b, V8f *c) { *c = _mm256_fmadd_ps(*a, *b, *c); }

AVX2 void spread_avx2(const float *a, V8f *b) { *b = _mm256_broadcast_ss(a); }

AVX2 void store_avx2(const V8f *a, float *to) { _mm256_storeu_ps(to, *a); }

AVX2 float fold_avx2(const V8f *l) {
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(*l), _mm256_extractf128_ps(*l, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}

AVX2 void floats_avx2(const V8i *a, V8f *b) { *b = _mm256_cvtepi32_ps((__m256i)*a); }

AVX2 void load_avx2(uint32_t id, const uint8_t *p, V8f *v) {
    if (id == 0) *v = _mm256_loadu_ps((const float *)p);
    else if (id == 1) *v = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
    else {
        __m256i h = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
        *v = (V8f)_mm256_slli_epi32(h, 16);
    }
}

AVX2 void halves_avx2(const uint8_t *p, int step, V8f *v) {
    int16_t h[8];
    UNROLL for (int i = 0; i < 8; i++) h[i] = (int16_t)u16_at(p + step * i);
    *v = _mm256_cvtph_ps(_mm_setr_epi16(h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7]));
}

AVX2 void look_up_avx2(const uint8_t table[16], Group *g) {
    __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)table));
    UNROLL for (int i = 0; i < 8; i++) g->u[i] = (V32)_mm256_shuffle_epi8(t, (__m256i)g->u[i]);
}

AVX2 void fifth_bits_avx2(const uint8_t *p, int step, Group *g) {
    const __m256i byte = (__m256i)(V32){0, EACH(1), EACH(2), EACH(3)};
    const __m256i bit = _mm256_set1_epi64x((int64_t)0x8040201008040201);
    UNROLL for (int i = 0; i < 8; i++) {
        int32_t all;
        memcpy(&all, p + step * i, 4);
        __m256i v = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(all), byte), bit);
        g->u[i] |= (V32)_mm256_cmpeq_epi8(v, bit) & EACH(16);
    }
}

// The halves of eight vectors summed: their lower ones to s[0], their upper ones to s[1]
AVX2 void halves_sum(const __m256i v[8], V8i s[2]) {
    __m256i part[2];
    UNROLL for (int h = 0; h < 2; h++)
        part[h] = _mm256_hadd_epi32(_mm256_hadd_epi32(v[4 * h], v[4 * h + 1]),
                                    _mm256_hadd_epi32(v[4 * h + 2], v[4 * h + 3]));
    s[0] = (V8i)_mm256_permute2x128_si256(part[0], part[1], 0x20);
    s[1] = (V8i)_mm256_permute2x128_si256(part[0], part[1], 0x31);
}

AVX2 void sums_avx2(const Format *f, const Group *g, const int16_t *q, const uint8_t *bytes,
                    V8i s[2]) {
    __m256i v[8];
    (void)f, (void)bytes;
    UNROLL for (int i = 0; i < 8; i++, q += 32) {
        __m256i w = (__m256i)g->u[i], even = _mm256_and_si256(w, _mm256_set1_epi16(255));
        v[i] = _mm256_add_epi32(_mm256_madd_epi16(even, load32(q)),
                                _mm256_madd_epi16(_mm256_srli_epi16(w, 8), load32(q + 16)));
    }
    halves_sum(v, s);
}

AVX2 void ints_pack(const V8i v[4], int16_t *q, int32_t sum[3]) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7), one = _mm256_set1_epi16(1);
    __m256i part[2];
    UNROLL for (int i = 0; i < 2; i++) { // even-numbered, odd-numbered
        __m256 a = i ? _mm256_shuffle_ps((__m256)v[0], (__m256)v[1], 0xDD)
                     : _mm256_shuffle_ps((__m256)v[0], (__m256)v[1], 0x88);
        __m256 b = i ? _mm256_shuffle_ps((__m256)v[2], (__m256)v[3], 0xDD)
                     : _mm256_shuffle_ps((__m256)v[2], (__m256)v[3], 0x88);
        __m256i all = _mm256_packs_epi32((__m256i)a, (__m256i)b);
        all = _mm256_permutevar8x32_epi32(all, order);
        _mm256_storeu_si256((__m256i *)(void *)(q + 16 * i), all);
        part[i] = _mm256_madd_epi16(all, one);
    }
    __m256i s = _mm256_add_epi32(part[0], part[1]);
    s = _mm256_hadd_epi32(s, s), s = _mm256_hadd_epi32(s, s);
    sum[0] = _mm256_extract_epi32(s, 0), sum[1] = _mm256_extract_epi32(s, 4), sum[2] = 0;
}

// Eight vectors of eight words each, stored as columns of eight, `step` words apart: halves change
// places, then each half of four vectors is transposed.
AVX2 void columns_store(const void *v, void *out, int step) {
    const __m256i *in = v;
    __m256i a[8], w[8];
    UNROLL for (int i = 0; i < 4; i++) {
        a[i] = _mm256_permute2x128_si256(in[i], in[i + 4], 0x20);
        a[i + 4] = _mm256_permute2x128_si256(in[i], in[i + 4], 0x31);
    }
    UNROLL for (int i = 0; i < 8; i += 4) {
        __m256i b0 = _mm256_unpacklo_epi32(a[i], a[i + 2]);
        __m256i b1 = _mm256_unpackhi_epi32(a[i], a[i + 2]);
        __m256i b2 = _mm256_unpacklo_epi32(a[i + 1], a[i + 3]);
        __m256i b3 = _mm256_unpackhi_epi32(a[i + 1], a[i + 3]);
        w[i] = _mm256_unpacklo_epi32(b0, b2), w[i + 1] = _mm256_unpackhi_epi32(b0, b2);
        w[i + 2] = _mm256_unpacklo_epi32(b1, b3), w[i + 3] = _mm256_unpackhi_epi32(b1, b3);
    }
    UNROLL for (int i = 0; i < 8; i++)
        _mm256_storeu_si256((__m256i *)((int32_t *)out + i * step), w[i]);
}

// Blocks i and i + 4 in the halves of a register: no sum crosses them. Activations: of both blocks
// the even-numbered of the first half, the odd ones, then those of the second half
AVX2 void pack_avx2(const V8i v[4], int16_t *q, uint8_t *bytes, int second, int32_t sum[3]) {
    ints_pack(v, q, sum);
    UNROLL for (int i = 0; i < 4; i++)
        memcpy(bytes + (i % 2 * 2 + i / 2) * 32 + 16 * second, q + 8 * i, 16);
}

AVX2 void fifth_bits_paired(const uint8_t *p, int step, Group *g) {
    const __m256i bit = _mm256_set1_epi64x((int64_t)0x8040201008040201);
    UNROLL for (int i = 0; i < 4; i++, p += step) {
        int32_t a, b;
        memcpy(&a, p, 4), memcpy(&b, p + 4 * step, 4);
        __m256i all = _mm256_set_m128i(_mm_set1_epi32(b), _mm_set1_epi32(a));
        UNROLL for (int h = 0; h < 2; h++) {
            const uint64_t low = EACH(2 * h), high = EACH(2 * h + 1);
            __m256i v = _mm256_shuffle_epi8(all, (__m256i)(V32){low, high, low, high});
            v = _mm256_cmpeq_epi8(_mm256_and_si256(v, bit), bit);
            g->u[i + 4 * h] |= (V32)v & EACH(16);
        }
    }
}

AVX2 void sums_paired(const Format *f, const Group *g, const int16_t *q, const uint8_t *bytes,
                      V8i s[2]) { // of whole blocks: for formats of one scale
    __m256i v[4];
    (void)f, (void)q;
    UNROLL for (int i = 0; i < 4; i++) {
        v[i] = _mm256_setzero_si256();
        UNROLL for (int h = 0; h < 2; h++, bytes += 64) {
            const __m256i w = (__m256i)g->u[i + 4 * h], odd = _mm256_srli_epi16(w, 8);
            const __m256i even = _mm256_and_si256(w, _mm256_set1_epi16(255));
            v[i] = _mm256_add_epi32(v[i], _mm256_madd_epi16(even, load32(bytes)));
            v[i] = _mm256_add_epi32(v[i], _mm256_madd_epi16(odd, load32(bytes + 32)));
        }
    }
    s[0] = (V8i)_mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
    s[1] = (V8i){0};
}

#define AVX2_OWN fma_avx2, fma_avx2, spread_avx2, store_avx2, fold_avx2, floats_avx2, load_avx2
static const Simd simd_avx2 = {AVX2_OWN, halves_avx2, look_up_avx2, fifth_bits_avx2, sums_avx2,
                               pack_avx2, BY_BLOCKS, false, .wide = false};
static const Simd simd_paired = {AVX2_OWN, halves_avx2, look_up_avx2, fifth_bits_paired,
                                 sums_paired, pack_avx2, PAIRED, false, .wide = false};

// AVX-512 with VNNI: two blocks a register. Sums of bytes, one side signed, the other not: upper
// bytes of the activations times weights, then 256 times that and lower bytes times weights, whose
// sign matters only where the offset is 128: then the lower bytes meet weights - 128.
AVX512 void halves_avx512(const uint8_t *p, int step, V8f *v) {
    if (step < 18 || step > 20 || step % 2) { // else all lie in 128 bytes, and these in the blocks
        halves_avx2(p, step, v);
        return;
    }
    uint16_t at[32] = {0}; // place of a half in the first 64 bytes, or in those from block 4 on
    UNROLL for (int i = 0; i < 8; i++) at[i] = (uint16_t)(i / 4 * 32 + i % 4 * step / 2);
    __m512i h = _mm512_permutex2var_epi16(_mm512_loadu_si512(p), _mm512_loadu_si512(at),
                                          _mm512_loadu_si512(p + 4 * step));
    *v = _mm256_cvtph_ps(_mm512_castsi512_si128(h));
}

AVX512 void look_up_avx512(const uint8_t table[16], Group *g) {
    __m512i t = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)table));
    UNROLL for (int i = 0; i < 4; i++) g->w[i] = (V64)_mm512_shuffle_epi8(t, (__m512i)g->w[i]);
}

AVX512 void fifth_bits_avx512(const uint8_t *p, int step, Group *g) {
    const __m512i bit = _mm512_set1_epi8(16);
    UNROLL for (int i = 0; i < 4; i++, p += step) {
        uint32_t a, b;
        memcpy(&a, p, 4), memcpy(&b, p + 4 * step, 4);
        __m512i w = (__m512i)g->w[i];
        g->w[i] = (V64)_mm512_mask_add_epi8(w, a | (uint64_t)b << 32, w, bit);
    }
}

AVX512 void sums_avx512(const Format *f, const Group *g, const int16_t *q, const uint8_t *bytes,
                        V8i s[2]) {
    const __m512i order = _mm512_setr_epi64(0, 1, 4, 5, 2, 3, 6, 7);
    __m512i v[4], a[2];
    (void)q;
    UNROLL for (int i = 0; i < 4; i++, bytes += 128) {
        const __m512i upper = _mm512_loadu_si512(bytes), lower = _mm512_loadu_si512(bytes + 64);
        const __m512i w = (__m512i)g->w[i], z = (__m512i)(g->w[i] ^ EACH(128));
        v[i] = _mm512_slli_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), w, upper), 8);
        v[i] = _mm512_dpbusd_epi32(v[i], lower, f->offset == 128 ? z : w);
    }
    UNROLL for (int i = 0; i < 2; i++)
        a[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]),
                                _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]));
    a[0] = _mm512_add_epi32(_mm512_unpacklo_epi64(a[0], a[1]), _mm512_unpackhi_epi64(a[0], a[1]));
    a[0] = _mm512_permutexvar_epi64(order, a[0]);
    s[0] = (V8i)_mm512_castsi512_si256(a[0]);
    s[1] = (V8i)_mm512_extracti64x4_epi64(a[0], 1);
}

AVX512 void pack_avx512(const V8i v[4], int16_t *q, uint8_t *bytes, int second, int32_t sum[3]) {
    ints_pack(v, q, sum);
    V16u lower;
    bytes_pack(q, bytes + 32 * second, &lower);
    // the whole sum is 256 times that of the upper bytes, and this
    __m256i s = _mm256_sad_epu8((__m256i)lower, _mm256_setzero_si256());
    const __m128i t = _mm_add_epi64(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
    sum[2] = sum[0] + sum[1] - _mm_cvtsi128_si32(t) - _mm_extract_epi32(t, 2);
}

AVX512 void pair_wide(uint32_t id, const uint8_t *p, const uint8_t *q, V16f *v) {
    if (id == 0) {
        const __m256 a = _mm256_loadu_ps((const float *)p), b = _mm256_loadu_ps((const float *)q);
        *v = _mm512_insertf32x8(_mm512_castps256_ps512(a), b, 1);
        return;
    }
    const __m128i a = _mm_loadu_si128((const void *)p), b = _mm_loadu_si128((const void *)q);
    const __m256i h = _mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1);
    if (id == 1) *v = _mm512_cvtph_ps(h);
    else *v = (V16f)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16);
}

AVX512 void twice_wide(const float *p, V16f *v) {
    *v = _mm512_broadcast_f32x8(_mm256_loadu_ps(p));
}

AVX512 void fma_pair_wide(const V16f *a, const V16f *b, V16f *c) {
    *c = _mm512_fmadd_ps(*a, *b, *c);
}

AVX512 void store_wide(const V16f *v, float *p, float *q) {
    _mm256_storeu_ps(p, _mm512_castps512_ps256(*v));
    _mm256_storeu_ps(q, _mm512_extractf32x8_ps(*v, 1));
}

AVX512 void fma_wide(const float *a, const V16f *b, V16f *c) {
    *c = _mm512_fmadd_ps(_mm512_set1_ps(*a), *b, *c);
}

static const Simd simd_avx512 = {AVX2_OWN, halves_avx512, look_up_avx512, fifth_bits_avx512,
                                 sums_avx512, pack_avx512, WIDE, true, true,
                                 pair_wide, twice_wide, fma_pair_wide, store_wide, fma_wide};
#endif

#ifdef HAVE_NEON
// NEON's vectors have 16 bytes: all is done by halves.
#define HALVES UNROLL for (int h = 0; h < 2; h++)

NEON uint8x16_t half(const void *v, int h) { return vld1q_u8((const uint8_t *)v + 16 * h); }
NEON float32x4_t half_f32(const V8f *v, int h) { return vld1q_f32((const float *)v + 4 * h); }
NEON void half_set(void *v, int h, uint8x16_t to) { vst1q_u8((uint8_t *)v + 16 * h, to); }
NEON void half_f32_set(V8f *v, int h, float32x4_t to) { vst1q_f32((float *)v + 4 * h, to); }

NEON void fma_neon(const V8f *a, const V8f *b, V8f *c) {
    HALVES half_f32_set(c, h, vfmaq_f32(half_f32(c, h), half_f32(a, h), half_f32(b, h)));
}

NEON void spread_neon(const float *a, V8f *b) { HALVES half_f32_set(b, h, vdupq_n_f32(*a)); }
NEON void store_neon(const V8f *a, float *to) { HALVES vst1q_f32(to + 4 * h, half_f32(a, h)); }

NEON float fold_neon(const V8f *l) {
    float32x4_t a = vaddq_f32(half_f32(l, 0), half_f32(l, 1));
    return vpadds_f32(vadd_f32(vget_low_f32(a), vget_high_f32(a)));
}

NEON void floats_neon(const V8i *a, V8f *b) {
    HALVES half_f32_set(b, h, vcvtq_f32_s32(vld1q_s32((const int32_t *)a + 4 * h)));
}

NEON void load_neon(uint32_t id, const uint8_t *p, V8f *v) {
    HALVES {
        uint16x4_t u = vreinterpret_u16_u8(vld1_u8(p + 8 * h));
        half_f32_set(v, h, id == 0   ? vreinterpretq_f32_u8(half(p, h))
                           : id == 1 ? vcvt_f32_f16(vreinterpret_f16_u16(u))
                                     : vreinterpretq_f32_u32(vshll_n_u16(u, 16)));
    }
}

NEON void halves_neon(const uint8_t *p, int step, V8f *v) {
    uint16_t f[8];
    UNROLL for (int i = 0; i < 8; i++) f[i] = u16_at(p + step * i);
    load_neon(1, (const uint8_t *)f, v);
}

NEON void look_up_neon(const uint8_t table[16], Group *g) {
    UNROLL for (int i = 0; i < 8; i++)
        HALVES half_set(&g->u[i], h, vqtbl1q_u8(vld1q_u8(table), half(&g->u[i], h)));
}

NEON void fifth_bits_neon(const uint8_t *p, int step, Group *g) {
    const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
    UNROLL for (int i = 0; i < 8; i++, p += step)
        HALVES {
            uint8x16_t v = vcombine_u8(vdup_n_u8(p[2 * h]), vdup_n_u8(p[2 * h + 1]));
            v = vandq_u8(vtstq_u8(v, bit), vdupq_n_u8(16));
            half_set(&g->u[i], h, vorrq_u8(half(&g->u[i], h), v));
        }
}

NEON int32x4_t mla_s16(int32x4_t s, uint16x8_t w, const int16_t *q) { // four sums of two products
    int16x8_t a = vreinterpretq_s16_u16(w), b = vld1q_s16(q);
    return vmlal_high_s16(vmlal_s16(s, vget_low_s16(a), vget_low_s16(b)), a, b);
}

NEON void sums_neon(const Format *f, const Group *g, const int16_t *q, const uint8_t *bytes,
                    V8i s[2]) {
    (void)f, (void)bytes;
    HALVES { // four blocks at a time
        int32x4_t part[2][4];
        UNROLL for (int i = 0; i < 4; i++, q += 32)
            UNROLL for (int z = 0; z < 2; z++) {
                uint16x8_t w = vreinterpretq_u16_u8(half(&g->u[4 * h + i], z));
                part[z][i] = mla_s16(vdupq_n_s32(0), vandq_u16(w, vdupq_n_u16(255)), q + 8 * z);
                part[z][i] = mla_s16(part[z][i], vshrq_n_u16(w, 8), q + 8 * z + 16);
            }
        UNROLL for (int z = 0; z < 2; z++) {
            int32x4_t a = vpaddq_s32(part[z][0], part[z][1]);
            int32x4_t b = vpaddq_s32(part[z][2], part[z][3]);
            vst1q_s32((int32_t *)&s[z] + 4 * h, vpaddq_s32(a, b));
        }
    }
}

NEON void pack_neon(const V8i v[4], int16_t *q, uint8_t *bytes, int second, int32_t sum[3]) {
    (void)bytes, (void)second;
    HALVES { // lower 16 bits of every other integer
        int32x4x2_t a = vld2q_s32((const int32_t *)&v[2 * h]);
        int32x4x2_t b = vld2q_s32((const int32_t *)&v[2 * h + 1]);
        UNROLL for (int i = 0; i < 2; i++)
            vst1q_s16(q + 16 * i + 8 * h, vcombine_s16(vmovn_s32(a.val[i]), vmovn_s32(b.val[i])));
        sum[h] = vaddlvq_s16(vld1q_s16(q + 8 * h)) + vaddlvq_s16(vld1q_s16(q + 16 + 8 * h));
    }
    sum[2] = 0;
}

NEON void columns_store(const void *v, void *out, int step) { // as above
    HALVES {
        uint32x4x4_t a = vld4q_u32((const uint32_t *)v + 32 * h); // 0 4 of two rows, 1 5 ...
        uint32x4x4_t b = vld4q_u32((const uint32_t *)v + 32 * h + 16);
        UNROLL for (int i = 0; i < 8; i++) {
            uint32x4_t w = i < 4 ? vuzp1q_u32(a.val[i % 4], b.val[i % 4])
                                 : vuzp2q_u32(a.val[i % 4], b.val[i % 4]);
            vst1q_u8((uint8_t *)out + 4 * (step * i + 4 * h), vreinterpretq_u8_u32(w));
        }
    }
}

static const Simd simd_neon = {fma_neon,    fma_neon,  spread_neon, store_neon, fold_neon,
                               floats_neon, load_neon, halves_neon, look_up_neon,
                               fifth_bits_neon, sums_neon, pack_neon, BY_BLOCKS, false,
                               .wide = false};

// The dot products of ARMv8.2, four products of bytes to a sum: upper bytes, signed, times weights
// (signed if their offset is 128), then 256 times that and lower bytes times weights, none signed.
// Assembler, since not all compilers let a function have the instructions that a file has not.
// Below ARMv8.1 assemblers want another .arch; above, that would take away what a file has.
#ifdef __ARM_FEATURE_DOTPROD
#define DOT_PRODUCT ""
#elif defined(__ARM_FEATURE_ATOMICS)
#define DOT_PRODUCT ".arch_extension dotprod\n\t"
#else
#define DOT_PRODUCT ".arch armv8.2-a+dotprod\n\t"
#endif
#ifdef __ARM_FEATURE_MATMUL_INT8
#define I8MM ""
#elif defined(__ARM_FEATURE_ATOMICS)
#define I8MM ".arch_extension i8mm\n\t"
#else
#define I8MM ".arch armv8.2-a+dotprod+i8mm\n\t"
#endif
#if (defined(__clang__) && __clang_major__ >= 11) || (!defined(__clang__) && __GNUC__ >= 10)
#define HAVE_I8MM 1 // else their assembler may not know it
#endif
#define BYTES_PRODUCT(name, arch)                                                                \
    NEON int32x4_t name(int32x4_t s, uint8x16_t a, uint8x16_t b) {                               \
        __asm__(arch #name " %0.4s, %1.16b, %2.16b" : "+w"(s) : "w"(a), "w"(b));                 \
        return s;                                                                                \
    }
BYTES_PRODUCT(sdot, DOT_PRODUCT)
BYTES_PRODUCT(udot, DOT_PRODUCT)
#ifdef HAVE_I8MM
BYTES_PRODUCT(usmmla, I8MM) // two rows times two rows of eight: four sums
BYTES_PRODUCT(ummla, I8MM)
#endif

NEON void sums_sdot(const Format *f, const Group *g, const int16_t *q, const uint8_t *bytes,
                    V8i s[2]) {
    (void)q;
    HALVES { // four blocks at a time
        int32x4_t part[2][4];
        UNROLL for (int i = 0; i < 4; i++)
            UNROLL for (int z = 0; z < 2; z++) {
                const uint8_t *at = bytes + 128 * i + 32 * h + 16 * z;
                const uint8x16_t w = half(&g->u[4 * h + i], z);
                const uint8x16_t x = f->offset == 128 ? veorq_u8(w, vdupq_n_u8(128)) : w;
                const int32x4_t upper = sdot(vdupq_n_s32(0), x, vld1q_u8(at));
                part[z][i] = udot(vshlq_n_s32(upper, 8), w, vld1q_u8(at + 64));
            }
        UNROLL for (int z = 0; z < 2; z++) {
            int32x4_t a = vpaddq_s32(part[z][0], part[z][1]);
            int32x4_t b = vpaddq_s32(part[z][2], part[z][3]);
            vst1q_s32((int32_t *)&s[z] + 4 * h, vpaddq_s32(a, b));
        }
    }
}

NEON void pack_sdot(const V8i v[4], int16_t *q, uint8_t *bytes, int second, int32_t sum[3]) {
    V16u lower;
    pack_neon(v, q, bytes, second, sum), bytes_pack(q, bytes + 32 * second, &lower), sum[2] = 0;
    HALVES sum[2] += vaddlvq_u8(half(&lower, h));
}

static const Simd simd_sdot = {fma_neon,    fma_neon,  spread_neon, store_neon, fold_neon,
                               floats_neon, load_neon, halves_neon, look_up_neon,
                               fifth_bits_neon, sums_sdot, pack_sdot, BY_BLOCKS, true,
                               .wide = false};
#endif

// ---- quantised weights: groups and dots
#define LOAD(W, CALL, name, load)                                                             \
    CALL void name##_load_##W(const Tensor *t, const uint8_t *p, const uint8_t *at, int n,    \
                              Group *g) {                                                     \
        (void)t, (void)at, (void)n, load;                                                     \
    }
#define WIDTH(loader) loader##_32
#define X(name, id, block, bytes, offset, scales, minima, bits, d_at, table, load) \
    LOAD(32, INLINE, name, load)
QUANTISED(X)
#undef X
#undef WIDTH
#ifdef HAVE_X86
#define WIDTH(loader) loader##_32p
#define X(name, id, block, bytes, offset, scales, minima, bits, d_at, table, load) \
    LOAD(32p, AVX2, name, load)
QUANTISED(X)
#undef X
#undef WIDTH
#define WIDTH(loader) loader##_64
#define X(name, id, block, bytes, offset, scales, minima, bits, d_at, table, load) \
    LOAD(64, AVX512, name, load)
QUANTISED(X)
#undef X
#define LOADS(name) name##_load_32, name##_load_32p, name##_load_64
#else
#define LOADS(name) name##_load_32
#endif

INLINE void group_open(const Simd *v, const Format *f, const Tensor *t, const uint8_t *p,
                       const uint8_t *at, int n, Group *g) {
    f->load[v->order](t, p, at, n, g);
    if (f->bits_at) v->fifth_bits(p + f->bits_at, f->bytes, g);
    if (f->table) v->look_up(f->table, g);
    const int step = f->block == 32 ? f->bytes : 0;
    if (f->d_at >= 0) v->halves(p + f->d_at, step, &g->s[0]);
    if (f->minima) v->halves(p + f->d_at + 2, step, &g->m[0]);
    if (step && n < 8) {
        const V8i there = (V8i){0, 1, 2, 3, 4, 5, 6, 7} < n;
        g->s[0] = (V8f)((V8i)g->s[0] & there);
        if (f->minima) g->m[0] = (V8f)((V8i)g->m[0] & there);
    }
    if (step) return;
    g->s[1] = g->s[0], g->m[1] = g->m[0];
    UNROLL for (int h = 0; h < 2; h++) {
        V8f units;
        if (h < f->scales) v->floats(&g->sc[h], &units), g->s[h] *= units;
        if (h < f->minima) v->floats(&g->mn[h], &units), g->m[h] = -(g->m[h] * units);
    }
}

// Eight blocks at p of which a row has n: the others meet activations that are 0 and scales that
// group_open makes 0, and a step of +0 changes no lane (lanes start at +0, and a product with an
// integer is never so small that it rounds to -0). Where they would lie behind the matrix, zeros
// take their place.
enum { PAD = 8 * 34 }; // bytes of the largest eight blocks that may be cut
static const uint8_t *group_pad(const Tensor *t, const uint8_t *p, int n, uint8_t room[PAD]) {
    if (n >= 8 || (size_t)(p - t->data) + PAD <= (size_t)t->rows * t->stride) return p;
    memset(room, 0, PAD);
    memcpy(room, p, (size_t)(n * t->format->bytes));
    return room;
}

static void open_c(const Tensor *t, const uint8_t *p, const uint8_t *at, int n, Group *g) {
    group_open(&simd_c, t->format, t, p, at, n, g);
}

// The minimum is added to the rounded product: two roundings
static void quantised_expand(const Tensor *t, int64_t row, int64_t k, int n, float *out) {
    const Format *f = t->format;
    const uint8_t *p = weight_at(t, row, k, f->block, f->bytes);
    for (int j = 0; j < n; j += 256, p += 256 / f->block * f->bytes) {
        uint8_t room[PAD];
        Group g;
        const int left = MIN(8, (n - j) / 32);
        open_c(t, group_pad(t, p, left, room), p, left, &g);
        for (int i = 0; i < MIN(256, n - j); i++) {
            int b = i / 32, h = i % 32 / 16;
            float product = (float)(((uint8_t *)g.u)[i] - f->offset) * g.s[f->scales == 2 && h][b];
            out[j + i] = f->minima ? product + g.m[f->minima == 2 && h][b] : product;
        }
    }
}

typedef struct { // a row of activations
    const int16_t *q;
    const uint8_t *bytes;
    const float *dx;
    const int32_t *sum;
    int64_t ldb;
} Column;

INLINE Column column_at(const Acts *x, int64_t i) {
    return (Column){x->q + i * x->ldq, x->bytes + 2 * i * x->ldq, x->dx + i * x->ldb,
                    x->sum + 3 * i * x->ldb, x->ldb};
}

typedef struct { // what eight of its blocks bring to every row of weights
    V8f dx, sum[2]; // of formats with minima, their sums (or those of halves);
    V8i less[2];    // of others, offset times these
} Blocks;

INLINE void blocks_at(const Simd *v, const Format *f, int scales, int minima, const Column *x,
                      int64_t j, Blocks *b) {
    V8i halves[2], both;
    memcpy(&b->dx, x->dx + j, 32);
    memcpy(&halves[0], x->sum + j, 32), memcpy(&halves[1], x->sum + x->ldb + j, 32);
    both = halves[0] + halves[1];
    if (v->by_bytes && f->offset == 128) memcpy(&both, x->sum + 2 * x->ldb + j, 32);
    UNROLL for (int h = 0; h < minima; h++) v->floats(minima == 1 ? &both : &halves[h], &b->sum[h]);
    UNROLL for (int h = 0; h < scales; h++)
        b->less[h] = (scales == 1 ? both : halves[h]) * f->offset;
}

// The eight blocks of a group times those of a column from j on: lane i takes its steps for block i
INLINE void group_step(const Simd *v, const Format *f, int scales, int minima, const Group *g,
                       const Column *x, int64_t j, const Blocks *b, V8f *lanes) {
    V8i s[2];
    v->sums(f, g, x->q + 32 * j, x->bytes + 64 * j, s);
    if (scales == 1) s[0] += s[1];
    UNROLL for (int h = 0; h < scales; h++) {
        V8f product = b->dx * g->s[h], sum;
        if (!minima) s[h] -= b->less[h];
        v->floats(&s[h], &sum);
        v->fma(&product, &sum, lanes);
    }
    UNROLL for (int h = 0; h < minima; h++) {
        V8f product = b->dx * g->m[h];
        v->fma(&product, &b->sum[h], lanes);
    }
}

// Four rows times n columns. known: f is a constant, its group is opened inline.
INLINE void quantised_dot(const Simd *v, const Format *f, bool known, int scales, int minima,
                          const Product *y, const int64_t *row, const Acts *x, int first, int n) {
    const Tensor *t = y->w;
    const int bytes = 256 / f->block * f->bytes;
    const int64_t blocks = t->cols / 32;
    V8f l[4][COLUMNS];
    Column column[COLUMNS];
    uint8_t room[PAD];
    const uint8_t *p[4];
    for (int c = 0; c < n; c++) column[c] = column_at(x, first + c);
    for (int r = 0; r < 4; r++) {
        p[r] = t->data + (size_t)row[r] * t->stride;
        for (int c = 0; c < n; c++) l[r][c] = (V8f){0};
    }
    for (int64_t j = 0; j < blocks; j += 8) {
        Blocks b[COLUMNS];
        for (int c = 0; c < n; c++) blocks_at(v, f, scales, minima, &column[c], j, &b[c]);
        for (int r = 0; r < 4; r++) {
            const uint8_t *const at = p[r], *in = at;
            const int left = (int)MIN(8, blocks - j);
            Group g;
            UNROLL for (int i = 0; i < bytes; i += 64) __builtin_prefetch(in + 1024 + i);
            if (f->block == 32 && left < 8) in = group_pad(t, at, left, room);
            if (known) group_open(v, f, t, in, at, left, &g);
            else f->open(t, in, at, left, &g);
            for (int c = 0; c < n; c++)
                group_step(v, f, scales, minima, &g, &column[c], j, &b[c], &l[r][c]);
            p[r] = at + bytes;
        }
    }
    for (int c = 0; c < n; c++)
        for (int r = 0; r < 4; r++)
            y->y[(first + c) * t->rows + row[r]] = v->fold(&l[r][c]);
}

static void quantised_dot_c(const Product *p, const int64_t *row, const Acts *x, int first, int n) {
    const Format *f = p->w->format;
    quantised_dot(&simd_c, f, true, f->scales, f->minima, p, row, x, first, n);
}

#if defined(HAVE_X86) || defined(HAVE_NEON)
#define X(name, ...)                                                                             \
    SIMD_CALL void name##_open(const Tensor *t, const uint8_t *p, const uint8_t *at, int n,      \
                               Group *g) {                                                       \
        group_open(&SIMD, &formats[F_##name], t, p, at, n, g);                                   \
    }
QUANTISED(X)
#undef X

// Several columns: a group is opened once for all
#define SOME_COLUMNS(isa, CALL)                                                                  \
    CALL void columns_##isa(const Product *p, const int64_t *row, const Acts *x, int first,      \
                            int n) {                                                             \
        const Format *f = p->w->format;                                                          \
        const int s = f->scales, m = f->minima;                                                  \
        if (n == 4) quantised_dot(&simd_##isa, f, false, s, m, p, row, x, first, 4);             \
        else if (n == 3) quantised_dot(&simd_##isa, f, false, s, m, p, row, x, first, 3);        \
        else quantised_dot(&simd_##isa, f, false, s, m, p, row, x, first, 2);                    \
    }

// One column, the case of decode, is compiled for each format
#define DOT(isa, simd, CALL, some, name, scales, minima)                                         \
    CALL void name##_dot_##isa(const Product *p, const int64_t *row, const Acts *x, int first,   \
                               int n) {                                                          \
        for (; n > 4; n -= 4, first += 4) columns_##some(p, row, x, first, 4);                   \
        if (n > 1) columns_##some(p, row, x, first, n);                                          \
        else quantised_dot(simd, &formats[F_##name], true, scales, minima, p, row, x, first, 1); \
    }
#ifdef HAVE_X86
SOME_COLUMNS(avx2, AVX2_CALL)
#define DOTS(name) name##_dot_avx2, name##_dot_avx512
#define X(name, id, block, bytes, offset, scales, minima, ...) \
    DOT(avx2, scales == 1 ? &simd_paired : &simd_avx2, AVX2_CALL, avx2, name, scales, minima) \
    DOT(avx512, &simd_avx512, AVX512_CALL, avx2, name, scales, minima)
#else
SOME_COLUMNS(neon, NEON_CALL)
SOME_COLUMNS(sdot, NEON_CALL)
#define DOTS(name) name##_dot_neon, name##_dot_sdot, name##_dot_sdot
#define X(name, id, block, bytes, offset, scales, minima, ...) \
    DOT(neon, &simd_neon, NEON_CALL, neon, name, scales, minima)           \
    DOT(sdot, &simd_sdot, NEON_CALL, sdot, name, scales, minima)
#endif
QUANTISED(X)
#undef X
#endif

// ---- float weights: dots
// Lanes += n weights, eight at a time, of four rows times those of cols <= 3 columns
INLINE void float_lanes(const Simd *v, uint32_t id, int bytes, const uint8_t *const at[4], int n,
                        int cols, const float *in, int64_t ldx, V8f (*l)[COLUMNS]) {
    for (int k = 0; k < n; k += 8) {
        V8f w = {0}, column[COLUMNS]; // 0: gcc warns
        UNROLL for (int c = 0; c < cols; c++)
            v->load(0, (const uint8_t *)(in + c * ldx + k), &column[c]);
        UNROLL for (int r = 0; r < 4; r++) {
            v->load(id, at[r] + k * bytes, &w);
            UNROLL for (int c = 0; c < cols; c++) v->fma_or(&w, &column[c], &l[r][c]);
        }
    }
}

// The same for two rows a register and eight columns
INLINE void float_lanes_wide(const Simd *v, uint32_t id, int bytes, const uint8_t *const at[4],
                             int n, const float *const in[8], V16f (*l)[8]) {
    for (int k = 0; k < n; k += 8) {
        V16f w[2], column;
        UNROLL for (int r = 0; r < 2; r++)
            v->pair(id, at[2 * r] + k * bytes, at[2 * r + 1] + k * bytes, &w[r]);
        UNROLL for (int c = 0; c < 8; c++) {
            v->twice(in[c] + k, &column);
            UNROLL for (int r = 0; r < 2; r++) v->fma_pair(&w[r], &column, &l[r][c]);
        }
    }
}

// Four rows times n columns, from the file where it has whole eights of floats. cols: n, or 8, and
// then the last column is taken again where there are less.
INLINE void float_dot(const Simd *v, const Format *f, int cols, const Product *p,
                      const int64_t *row, const Acts *x, int first, int n_cols) {
    const Tensor *t = p->w;
    float y[4][COLUMNS] = {{0}}, open[4][FLOAT_BLOCK]; // not p->y: row[] may name a row twice
    for (int64_t k = 0; k < t->cols; k += FLOAT_BLOCK) {
        const int n = (int)MIN(FLOAT_BLOCK, t->cols - k);
        const bool whole = f->id < 1000 && n % 8 == 0;
        const float *in = x->x + first * x->ldx + k, *each[8];
        const uint8_t *at[4];
        V8f l[4][COLUMNS];
        V16f wide[2][8];
        UNROLL for (int c = 0; c < 8; c++) each[c] = in + MIN(c, n_cols - 1) * x->ldx;
        UNROLL for (int r = 0; r < 4; r++) {
            at[r] = whole ? weight_at(t, row[r], k, 1, f->bytes) : (const uint8_t *)open[r];
            if (!whole) f->expand(t, row[r], k, n, open[r]);
            for (int i = n; i % 8; i++) open[r][i] = -0.0f; // times 0 changes no lane
            UNROLL for (int c = 0; c < cols; c++) {
                if (cols == 8) wide[r / 2][c] = (V16f){0};
                else l[r][c] = (V8f){0};
            }
        }
        if (cols == 8 && whole) float_lanes_wide(v, f->id, f->bytes, at, n, each, wide);
        else if (cols == 8) float_lanes_wide(v, 0, 4, at, n, each, wide);
        else if (whole) float_lanes(v, f->id, f->bytes, at, n, cols, in, x->ldx, l);
        else float_lanes(v, 0, 4, at, n, cols, in, x->ldx, l);
        UNROLL for (int r = 0; r < 4; r++)
            UNROLL for (int c = 0; c < cols; c++) {
                if (cols == 8) memcpy(&l[r][c], (V8f *)&wide[r / 2][c] + r % 2, 32);
                float sum = v->fold(&l[r][c]);
                y[r][c] = k ? y[r][c] + sum : sum;
            }
    }
    for (int r = 0; r < 4; r++)
        for (int c = 0; c < n_cols; c++) p->y[(first + c) * t->rows + row[r]] = y[r][c];
}

static void float_dot_c(const Product *p, const int64_t *row, const Acts *x, int first, int n) {
    for (int c = 0; c < n; c++) float_dot(&simd_c, p->w->format, 1, p, row, x, first + c, 1);
}

// Four columns at once want more than 16 registers
#define FLOAT_DOT(isa, CALL, wide, name)                                                         \
    CALL void name##_dot_##isa(const Product *p, const int64_t *row, const Acts *x, int first,   \
                               int n) {                                                          \
        const Format *f = &formats[F_##name];                                                    \
        const Simd *v = &simd_##isa;                                                             \
        if (wide && n > 4) float_dot(v, f, 8, p, row, x, first, n);                              \
        else if (wide && n == 4) float_dot(v, f, 4, p, row, x, first, 4);                        \
        else {                                                                                   \
            for (; n > 3 || n == 2; n -= 2, first += 2) float_dot(v, f, 2, p, row, x, first, 2); \
            if (n == 3) float_dot(v, f, 3, p, row, x, first, 3);                                 \
            if (n == 1) float_dot(v, f, 1, p, row, x, first, 1);                                 \
        }                                                                                        \
    }
#ifdef HAVE_X86
#define FLOAT_DOTS(name) DOTS(name)
#define X(name, ...)                        \
    FLOAT_DOT(avx2, AVX2_CALL, false, name) \
    FLOAT_DOT(avx512, AVX512_CALL, true, name)
FLOATS_AND_BIN(X)
#undef X
#elif defined(HAVE_NEON)
#define FLOAT_DOTS(name) name##_dot_neon, name##_dot_neon, name##_dot_neon
#define X(name, ...) FLOAT_DOT(neon, NEON_CALL, false, name)
FLOATS_AND_BIN(X)
#undef X
#endif

// Where in Acts.bytes blocks j and j + 4 of eight lie, or j - 4 and j: 128 bytes
static uint8_t *pair_at(const Acts *a, int64_t row, int64_t j) {
    return a->bytes + 2 * row * a->ldq + j / 8 * 512 + j % 4 * 128;
}

// ---- activations as 16-bit blocks. NaN or infinity make the scale NaN, and with it every result.
// Adding 1.5 * 2^23 rounds to integers; the sum's low bits are the integer.
INLINE void quantise(const Simd *v, const Acts *a, int row, int64_t from, int64_t to) {
    const float *x = a->x + row * a->ldx, magic = 12582912.0f, zero[8] = {0};
    float *dx = a->dx + row * a->ldb;
    int32_t *sum = a->sum + 3 * row * a->ldb, sums[3];
    const int64_t end = to == a->cols ? (to + 255) / 256 * 8 : to / 32; // kernels walk eight blocks
    for (int64_t j = from / 32; j < end; j++) {
        V8f in[4];
        V8i m = {0}, big, out[4]; // |x| keep their order as integers; NaN is above all
        UNROLL for (int i = 0; i < 4; i++) {
            memcpy(&in[i], 32 * j < to ? x + 32 * j + 8 * i : zero, 32);
            V8i bits = (V8i)in[i] & 0x7FFFFFFF;
            big = NEGATIVE(m - bits), m = (bits & big) | (m & ~big);
        }
        const int32_t top[4] = {MAX(m[0], m[4]), MAX(m[1], m[5]), MAX(m[2], m[6]), MAX(m[3], m[7])};
        const int32_t two[2] = {MAX(top[0], top[2]), MAX(top[1], top[3])};
        const float most = f32_of_bits((uint32_t)MAX(two[0], two[1]));
        const bool finite = most < INFINITY, some = finite && most >= 0x1p-100f;
        dx[j] = !finite ? NAN : some ? most / 32767 : 0;
        const float r = some ? 32767 / most : 0;
        UNROLL for (int i = 0; i < 4; i++) {
            V8f rounded = in[i] * r + magic; // where dx is NaN, it may be anything
            out[i] = (V8i)rounded - 0x4B400000;
        }
        v->pack(out, a->q + row * a->ldq + 32 * j, pair_at(a, row, j), j % 8 / 4, sums);
        for (int i = 0; i < 3; i++) sum[j + i * a->ldb] = sums[i];
    }
}

#define QUANTISE(isa, CALL)                                                      \
    CALL void quantise_##isa(const Acts *a, int row, int64_t from, int64_t to) { \
        quantise(&simd_##isa, a, row, from, to);                                 \
    }
QUANTISE(c, static)
#ifdef HAVE_X86
QUANTISE(avx2, AVX2_CALL)
QUANTISE(avx512, AVX512_CALL)
#elif defined(HAVE_NEON)
QUANTISE(neon, NEON_CALL)
QUANTISE(sdot, NEON_CALL)
#endif

#if defined(HAVE_X86) || defined(HAVE_NEON)
// ---- panels: packing
// The last weights of a row; what is past its end is for nobody
static void last_weights(const Tensor *t, int64_t row, int64_t k, float w[8]) {
    for (int i = 0; i < 8; i++) w[i] = -0.0f;
    t->format->expand(t, row, k, (int)MIN(8, t->cols - k), w);
}

SIMD_INLINE void floats_pack(uint32_t id, int bytes, const Tensor *t, int64_t row, int64_t k,
                             int len, int rows, Panel *p) {
    for (int r = 0; r < rows; r += 8) {
        const uint8_t *in[8];
        UNROLL for (int z = 0; z < 8; z++)
            in[z] = weight_at(t, MIN(row + r + z, t->rows - 1), k, 1, bytes);
        for (int i = 0; i < len; i += 8) {
            V8f w[8];
            if (i + 8 > len || id >= 1000)
                for (int z = 0; z < 8; z++)
                    last_weights(t, MIN(row + r + z, t->rows - 1), k + i, (float *)&w[z]);
            else UNROLL for (int z = 0; z < 8; z++) SIMD.load(id, in[z] + i * bytes, &w[z]);
            columns_store(w, p->w + i * rows + r, rows);
        }
    }
}

SIMD_CALL void float_pack(const Tensor *t, int64_t row, int64_t k, int len, int rows, Panel *p) {
    const uint32_t id = t->format->id;
    if (id == 0) floats_pack(0, 4, t, row, k, len, rows, p);
    else if (id == 1) floats_pack(1, 2, t, row, k, len, rows, p);
    else floats_pack(id, t->format->bytes, t, row, k, len, rows, p);
}

// Eight rows of n blocks: as pairs of integers, of two bytes, or quads or octs of bytes
SIMD_INLINE void groups_pack(int bytes, const Format *f, const Group *g, int n, int block, int r,
                             int rows, Panel *p) {
    const V16h offset = (V16h){0} + (int16_t)f->offset;
    float *s = p->s + block * 2 * rows + r, *m = p->m + block * 2 * rows + r;
    V8i v[8];
    for (int i = 0; i < n; i++) {
        uint8_t *q = p->q + (block + i) * (bytes == 2 ? 64 : 32) * rows + r * MAX(bytes, 4);
        for (int z = 0; z < 32 && bytes == 8; z++)
            memcpy(q + (z % 4 * rows + z / 4) * 8, (const uint8_t *)&g[z / 4].u[i] + z % 4 * 8, 8);
        if (bytes == 8) continue;
        UNROLL for (int z = 0; z < 8; z++)
            v[z] = bytes == 4 ? (V8i)g[z].u[i] : (V8i)(((V16h)g[z].u[i] & 255) - offset);
        columns_store(v, q, rows);
        if (bytes == 4) continue;
        UNROLL for (int z = 0; z < 8; z++) v[z] = (V8i)((V16h)((V16u)g[z].u[i] >> 8) - offset);
        columns_store(v, q + 8 * rows * 4, rows);
    }
    for (int i = 0; i < f->scales; i++, s += rows) {
        UNROLL for (int z = 0; z < 8; z++) v[z] = (V8i)g[z].s[i];
        columns_store(v, s, 2 * rows);
    }
    for (int i = 0; i < f->minima; i++, m += rows) {
        UNROLL for (int z = 0; z < 8; z++) v[z] = (V8i)g[z].m[i];
        columns_store(v, m, 2 * rows);
    }
}

SIMD_INLINE void quantised_pack(int bytes_each, const Tensor *t, int64_t row, int64_t k, int len,
                                int rows, Panel *p) {
    const Format *f = t->format;
    const uint8_t *in = t->data + k / f->block * f->bytes;
    const int bytes = 256 / f->block * f->bytes;
    uint8_t room[PAD];
    Group g[8];
    for (int b = 0; b < len / 32; b += 8, in += bytes)
        for (int r = 0, n = MIN(8, len / 32 - b); r < rows; r += 8) {
            for (int i = 0; i < 8; i++) {
                const uint8_t *at = in + (size_t)MIN(row + r + i, t->rows - 1) * t->stride;
                f->open(t, group_pad(t, at, n, room), at, n, &g[i]);
            }
            groups_pack(bytes_each, f, g, n, b, r, rows, p);
        }
}

#define QUANTISED_PACK(how, bytes_each)                                                          \
    SIMD_CALL void how##_pack(const Tensor *t, int64_t row, int64_t k, int len, int rows,        \
                              Panel *p) {                                                        \
        quantised_pack(bytes_each, t, row, k, len, rows, p);                                     \
    }
QUANTISED_PACK(pairs, 2)
#ifdef HAVE_NEON
QUANTISED_PACK(quads, 4)
#ifdef HAVE_I8MM
QUANTISED_PACK(octs, 8)
#endif
#endif

// ---- panels: tiles. A tile is the part of a panel's products that fits in registers: the rows of
// the panel, side by side in a few registers, times a few columns, whose activations are broadcast.
// Its sums: part[tile][lane][column][row]. The same text is compiled for registers of 128 (NEON),
// 256 and 512 bits; the dots above wait for memory and need no more than 256.
#define TILE_TYPES(bits)                                                                \
    typedef float F##bits __attribute__((vector_size(bits / 8), aligned(4)));            \
    typedef int16_t W##bits __attribute__((vector_size(bits / 8), aligned(4)));
#ifdef HAVE_NEON
TILE_TYPES(128)
#define INLINE_128 NEON
#define CALL_128 NEON_CALL
typedef struct { int32x4_t half[2]; } S128; // of each row two sums: of pairs, or upper and lower
enum { FLOAT_ROWS_128 = 16, FLOATS_128 = 5, INTEGER_ROWS_128 = 8 };
enum { COLUMNS_pairs_128 = 5, COLUMNS_quads_128 = 5, COLUMNS_octs_128 = 4 };

NEON F128 all_128(float x) { return vdupq_n_f32(x); }
NEON F128 fma_128(F128 a, F128 b, F128 c) { return vfmaq_f32(c, a, b); }
NEON S128 pairs_mul_128(S128 s, W128 w, const uint8_t *in, int flip) {
    const int16x4_t x = vreinterpret_s16_s32(vld1_dup_s32((const int32_t *)(const void *)in));
    (void)flip;
    s.half[0] = vmlal_s16(s.half[0], vget_low_s16(w), x);
    s.half[1] = vmlal_s16(s.half[1], vget_high_s16(w), x);
    return s;
}
NEON S128 quads_mul_128(S128 s, W128 w, const uint8_t *in, int flip) { // as sums_sdot
    const int32_t *x = (const int32_t *)(const void *)in;
    const uint8x16_t u = vreinterpretq_u8_s16(w);
    const uint8x16_t upper = vreinterpretq_u8_s32(vld1q_dup_s32(x));
    const uint8x16_t lower = vreinterpretq_u8_s32(vld1q_dup_s32(x + 16));
    s.half[0] = sdot(s.half[0], veorq_u8(u, vdupq_n_u8((uint8_t)flip)), upper);
    s.half[1] = udot(s.half[1], u, lower);
    return s;
}
NEON F128 pairs_sums_128(S128 s, int32_t less) {
    (void)less;
    return vcvtq_f32_s32(vpaddq_s32(s.half[0], s.half[1]));
}
NEON F128 quads_sums_128(S128 s, int32_t less) {
    const int32x4_t sum = vaddq_s32(vshlq_n_s32(s.half[0], 8), s.half[1]);
    return vcvtq_f32_s32(vsubq_s32(sum, vdupq_n_s32(less)));
}
#else
#define INLINE_256 AVX2
#define INLINE_512 AVX512
#define CALL_256 AVX2_CALL
#define CALL_512 AVX512_CALL
TILE_TYPES(256)
TILE_TYPES(512)
typedef __m256i S256;
typedef __m512i S512;
enum { FLOAT_ROWS_256 = 16, FLOATS_256 = 6, INTEGER_ROWS_256 = 16, COLUMNS_pairs_256 = 4 };
enum { FLOAT_ROWS_512 = 48, FLOATS_512 = 8, INTEGER_ROWS_512 = 48, COLUMNS_pairs_512 = 8 };

INLINE_256 F256 all_256(float x) { return _mm256_set1_ps(x); }
INLINE_512 F512 all_512(float x) { return _mm512_set1_ps(x); }
INLINE_256 F256 fma_256(F256 a, F256 b, F256 c) { return _mm256_fmadd_ps(a, b, c); }
INLINE_512 F512 fma_512(F512 a, F512 b, F512 c) { return _mm512_fmadd_ps(a, b, c); }
INLINE int32_t word_at(const uint8_t *p) {
    int32_t word;
    memcpy(&word, p, 4);
    return word;
}
INLINE_256 S256 pairs_mul_256(S256 s, W256 w, const uint8_t *in, int flip) {
    (void)flip;
    s = _mm256_add_epi32(s, _mm256_madd_epi16((__m256i)w, _mm256_set1_epi32(word_at(in))));
    KEEP(s);
    return s;
}
INLINE_512 S512 pairs_mul_512(S512 s, W512 w, const uint8_t *in, int flip) {
    (void)flip;
    return _mm512_dpwssd_epi32(s, (__m512i)w, _mm512_set1_epi32(word_at(in)));
}
INLINE_256 F256 pairs_sums_256(S256 s, int32_t less) { return (void)less, _mm256_cvtepi32_ps(s); }
INLINE_512 F512 pairs_sums_512(S512 s, int32_t less) { return (void)less, _mm512_cvtepi32_ps(s); }
#endif

// Floats: one lane after the other. x ends at its last column: what comes after is for nobody.
#define FLOAT_TILE(bits)                                                                          \
    INLINE_##bits void floats_##bits(int cols, const Panel *p, const Acts *x, int column, int len,\
                                     float *part) {                                               \
        enum { COLS = FLOATS_##bits, ROWS = FLOAT_ROWS_##bits, EACH = bits / 32 };                \
        const float *in[COLS];                                                                    \
        UNROLL for (int c = 0; c < cols; c++) in[c] = x->x + MIN(column + c, x->n - 1) * x->ldx;  \
        for (int l = 0; l < LANES; l++) {                                                         \
            F##bits *lane = (F##bits *)(part + (column * LANES + l * COLS) * ROWS);               \
            const F##bits *w = (const F##bits *)(p->w + l * ROWS);                                \
            F##bits s[COLS][ROWS / EACH];                                                         \
            UNROLL for (int c = 0; c < cols; c++)                                                 \
                UNROLL for (int i = 0; i < ROWS / EACH; i++) s[c][i] = lane[c * ROWS / EACH + i]; \
            for (int k = l; k < len; k += LANES, w += LANES * ROWS / EACH)                        \
                UNROLL for (int c = 0; c < cols; c++) {                                           \
                    const F##bits a = all_##bits(in[c][k]);                                       \
                    UNROLL for (int i = 0; i < ROWS / EACH; i++)                                  \
                        s[c][i] = fma_##bits(w[i], a, s[c][i]);                                   \
                }                                                                                 \
            UNROLL for (int c = 0; c < cols; c++)                                                 \
                UNROLL for (int i = 0; i < ROWS / EACH; i++) lane[c * ROWS / EACH + i] = s[c][i]; \
        }                                                                                         \
    }                                                                                             \
    CALL_##bits void float_tile_##bits(const Format *f, const Panel *p, const Acts *x, int column,\
                                       int len, float *part) {                                    \
        (void)f;                                                                                  \
        enum { FULL = FLOATS_##bits, HALF = FULL / 2 };                                           \
        if (x->n - column > HALF) floats_##bits(FULL, p, x, column, len, part);                   \
        else floats_##bits(HALF, p, x, column, len, part);                                        \
    }

// Integers: the sums of one half of a block, or all of it, as floats: v[column][row]. A pair, or
// quad, of activations is broadcast and multiplied with those of all rows. The weights of pairs
// have no offset any more; others have: what is too much, less[], goes at the end.
enum { STEPS_pairs = 16, STEPS_quads = 8, STEPS_octs = 8 }; // words of a row in a block
#define STEPPED_SUMS(bits, how)                                                                   \
    INLINE_##bits void how##_##bits(int cols, int scales, const uint8_t *w,                       \
                                    const uint8_t *const *in, const int32_t *less, int flip,      \
                                    F##bits *v) {                                                 \
        enum { ROWS = INTEGER_ROWS_##bits, EACH = ROWS * 32 / bits };                             \
        const int steps = 8 / scales;                                                             \
        S##bits s[COLUMNS_##how##_##bits][EACH];                                                  \
        UNROLL for (int c = 0; c < cols; c++)                                                     \
            UNROLL for (int i = 0; i < EACH; i++) s[c][i] = (S##bits){0};                         \
        UNROLL for (int z = 0; z < STEPS_##how; z += 8) /* of each eight, four are a half's */ \
            UNROLL for (int i = 0; i < steps; i++) {                                              \
                const W##bits *at = (const W##bits *)(w + (z + i) * ROWS * 4);                    \
                UNROLL for (int c = 0; c < cols; c++)                                             \
                    UNROLL for (int y = 0; y < EACH; y++)                                         \
                        s[c][y] = how##_mul_##bits(s[c][y], at[y], in[c] + 4 * (z + i), flip);    \
            }                                                                                     \
        UNROLL for (int c = 0; c < cols; c++)                                                     \
            UNROLL for (int i = 0; i < EACH; i++)                                                 \
                v[c * EACH + i] = how##_sums_##bits(s[c][i], less[c]);                            \
    }
#ifdef HAVE_NEON
STEPPED_SUMS(128, pairs)
STEPPED_SUMS(128, quads)

#ifdef HAVE_I8MM
NEON void octs_128(int cols, int scales, const uint8_t *w, const uint8_t *const *in,
                   const int32_t *less, int flip, F128 *v) {
    enum { PAIRS = INTEGER_ROWS_128 / 2 };
    int32x4_t s[2][COLUMNS_octs_128 / 2][PAIRS]; // of upper, lower bytes
    (void)flip;
    UNROLL for (int z = 0; z < 2; z++)
        UNROLL for (int c = 0; c < cols / 2; c++)
            UNROLL for (int i = 0; i < PAIRS; i++) s[z][c][i] = vdupq_n_s32(0);
    UNROLL for (int k = 0; k < 4 / scales; k++)
        UNROLL for (int z = 0; z < 2; z++)
            UNROLL for (int c = 0; c < cols / 2; c++) {
                const int at = 8 * k + 64 * z;
                const uint8x8_t one = vld1_u8(in[2 * c] + at), two = vld1_u8(in[2 * c + 1] + at);
                const uint8x16_t x = vcombine_u8(one, two);
                UNROLL for (int i = 0; i < PAIRS; i++) {
                    const uint8x16_t u = vld1q_u8(w + (k * PAIRS + i) * 16);
                    s[z][c][i] = z ? ummla(s[z][c][i], u, x) : usmmla(s[z][c][i], u, x);
                }
            }
    UNROLL for (int c = 0; c < cols; c++)
        UNROLL for (int i = 0; i < PAIRS; i += 2) {
            int32x4_t sum[2];
            UNROLL for (int z = 0; z < 2; z++)
                sum[z] = c % 2 ? vuzp2q_s32(s[z][c / 2][i], s[z][c / 2][i + 1])
                               : vuzp1q_s32(s[z][c / 2][i], s[z][c / 2][i + 1]);
            v[(c * PAIRS + i) / 2] = quads_sums_128((S128){{sum[0], sum[1]}}, less[c]);
        }
}
#endif
#else
STEPPED_SUMS(256, pairs)
STEPPED_SUMS(512, pairs)
#endif

INLINE const uint8_t *pairs_at(const Acts *x, int64_t row, int64_t block) {
    return (const uint8_t *)(x->q + row * x->ldq + 32 * block);
}
INLINE int32_t pairs_less(const Format *f, int scales, const int32_t *sum, int64_t ldb) {
    return (void)f, (void)scales, (void)sum, (void)ldb, 0;
}
#ifdef HAVE_NEON
#define quads_at octs_at
INLINE const uint8_t *octs_at(const Acts *x, int64_t row, int64_t block) {
    return pair_at(x, row, block) + block % 8 / 4 * 32;
}
INLINE int32_t octs_less(const Format *f, int scales, const int32_t *sum, int64_t ldb) {
    return f->offset * (scales == 1 ? sum[0] + sum[ldb] : sum[0]);
}
INLINE int32_t quads_less(const Format *f, int scales, const int32_t *sum, int64_t ldb) {
    return f->offset == 128 ? 128 * sum[2 * ldb] : octs_less(f, scales, sum, ldb);
}
#endif

// end_: a block is done, lane += dx * scale * sum
#define QUANTISED_TILE(bits, how)                                                                 \
    INLINE_##bits void how##_end_##bits(int cols, int each, const F##bits *v, const float *scale, \
                                        const float *const *dx, int block, float *lane) {         \
        UNROLL for (int c = 0; c < cols; c++) {                                                   \
            const F##bits d = all_##bits(dx[c][block]), *s = (const F##bits *)scale;              \
            F##bits *l = (F##bits *)lane + c * each;                                              \
            UNROLL for (int i = 0; i < each; i++)                                                 \
                l[i] = fma_##bits(d * s[i], v[c * each + i], l[i]);                               \
        }                                                                                         \
    }                                                                                             \
    INLINE_##bits void how##_blocks_##bits(int cols, int scales, int minima, const Format *f,     \
                                           const Panel *p, const Acts *x, int column, int len,    \
                                           float *part) {                                         \
        enum { COLS = COLUMNS_##how##_##bits, ROWS = INTEGER_ROWS_##bits };                       \
        enum { EACH = ROWS * 32 / bits };                                                         \
        const int half = 4 * 4, flip = f->offset == 128 ? 128 : 0;                                \
        const uint8_t *w = p->q, *in[COLS];                                                       \
        const float *dx[COLS];                                                                    \
        const int32_t *sum[COLS];                                                                 \
        int32_t less[COLS];                                                                       \
        F##bits v[COLS * EACH];                                                                   \
        int64_t row[COLS];                                                                        \
        UNROLL for (int c = 0; c < cols; c++) {                                                   \
            row[c] = MIN(column + c, x->n - 1); /* past the last: for nobody */                   \
            dx[c] = x->dx + row[c] * x->ldb;                                                      \
            sum[c] = x->sum + 3 * row[c] * x->ldb;                                                \
        }                                                                                         \
        for (int b = 0; b < len / 32; b++, w += STEPS_##how * ROWS * 4) {                         \
            float *lane = part + (column * LANES + b % LANES * COLS) * ROWS;                      \
            UNROLL for (int h = 0; h < scales; h++) {                                             \
                UNROLL for (int c = 0; c < cols; c++) {                                           \
                    in[c] = how##_at(x, row[c], b) + h * half;                                    \
                    less[c] = how##_less(f, scales, sum[c] + b + h * x->ldb, x->ldb);             \
                }                                                                                 \
                how##_##bits(cols, scales, w + h * half * ROWS, in, less, flip, v);               \
                how##_end_##bits(cols, EACH, v, p->s + (2 * b + h) * ROWS, dx, b, lane);          \
            }                                                                                     \
            UNROLL for (int h = 0; h < minima; h++) {                                             \
                UNROLL for (int c = 0; c < cols; c++)                                             \
                    UNROLL for (int i = 0; i < EACH; i++)                                         \
                        v[c * EACH + i] = all_##bits(                                             \
                            (float)(minima == 2 ? sum[c][b + h * x->ldb]                          \
                                                : sum[c][b] + sum[c][b + x->ldb]));               \
                how##_end_##bits(cols, EACH, v, p->m + (2 * b + h) * ROWS, dx, b, lane);          \
            }                                                                                     \
        }                                                                                         \
    }                                                                                             \
    INLINE_##bits void how##_kinds_##bits(int cols, const Format *f, const Panel *p, const Acts *x,\
                                          int column, int len, float *part) {                     \
        if (f->minima == 2) how##_blocks_##bits(cols, 2, 2, f, p, x, column, len, part);          \
        else if (f->scales == 2) how##_blocks_##bits(cols, 2, 0, f, p, x, column, len, part);     \
        else if (f->minima) how##_blocks_##bits(cols, 1, 1, f, p, x, column, len, part);          \
        else how##_blocks_##bits(cols, 1, 0, f, p, x, column, len, part);                         \
    }                                                                                             \
    CALL_##bits void how##_tile_##bits(const Format *f, const Panel *p, const Acts *x, int column,\
                                       int len, float *part) {                                    \
        enum { COLS = COLUMNS_##how##_##bits };                                                   \
        if (COLS > 4 && x->n - column > 4) how##_kinds_##bits(COLS, f, p, x, column, len, part);  \
        else how##_kinds_##bits(4, f, p, x, column, len, part);                                   \
    }
#ifdef HAVE_NEON
FLOAT_TILE(128)
QUANTISED_TILE(128, pairs)
QUANTISED_TILE(128, quads)
#ifdef HAVE_I8MM
QUANTISED_TILE(128, octs)
#endif
#else
FLOAT_TILE(256)
QUANTISED_TILE(256, pairs)
FLOAT_TILE(512)
QUANTISED_TILE(512, pairs)
#endif

#define VECTOR(name) name
#else
#define VECTOR(name) NULL
#define DOTS(name) NULL
#define FLOAT_DOTS(name) NULL
#endif

// y = the folded lanes of n columns and so many rows of a panel; y += them, if more
SIMD_CALL void fold_panel(const float *part, int columns, int panel_rows, int n, int rows,
                          bool more, float *y, int64_t ldy) {
    const int s = columns * panel_rows; // from lane to lane
    for (int c = 0; c < n; c++, y += ldy) {
        const float *at = part + c / columns * LANES * s + c % columns * panel_rows;
        for (int r = 0; r < rows && c + 4 < n; r += 16) __builtin_prefetch(y + 4 * ldy + r, 1);
        for (int r = 0; r < rows; r += 8) {
            float room[8] = {0}, *to = rows - r < 8 ? room : y + r; // at the matrix's end
            V8f l[LANES], old;
            UNROLL for (int i = 0; i < LANES; i++)
                SIMD.load(0, (const uint8_t *)(at + i * s + r), &l[i]);
            l[0] = ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]));
            if (more) {
                if (to == room) memcpy(room, y + r, sizeof *y * (size_t)(rows - r));
                SIMD.load(0, (const uint8_t *)to, &old), l[0] = old + l[0];
            }
            SIMD.store(&l[0], to);
            if (to == room) memcpy(y + r, room, sizeof *y * (size_t)(rows - r));
        }
    }
}

// ---- the tables
#define PANELS(bits, how, above_floats, above_integers)                                           \
    {{above_floats, FLOAT_ROWS_##bits, FLOATS_##bits, float_pack, float_tile_##bits},             \
     {above_integers, INTEGER_ROWS_##bits, COLUMNS_##how##_##bits, how##_pack,                    \
      how##_tile_##bits}}
static const struct {
    void (*quantise)(const Acts *a, int row, int64_t from, int64_t to);
    PanelKernels panel[2]; // of floats, of integers
} kernels[ISA_COUNT] = {
    {quantise_c, {{.above = INT_MAX}, {.above = INT_MAX}}},
#ifdef HAVE_X86
    {quantise_avx2, PANELS(256, pairs, 16, 6)},
    {quantise_avx512, PANELS(512, pairs, 12, 2)},
#elif defined(HAVE_NEON)
    {quantise_neon, PANELS(128, pairs, 12, 6)},
    {quantise_sdot, PANELS(128, quads, 12, 6)},
#ifdef HAVE_I8MM
    {quantise_sdot, PANELS(128, octs, 12, 6)},
#endif
#endif
};

static const Format formats[F_COUNT] = {
#define X(name, id, size, value)                                                  \
    {#name, id, 1, size, false, 0, 1, 0, 0, -1, NULL, {NULL}, NULL, name##_expand,     \
     {float_dot_c, FLOAT_DOTS(name)}},
    FLOATS_AND_BIN(X)
#undef X
#define X(name, id, block, bytes, offset, scales, minima, bits, d_at, table, load)      \
    {#name, id, block, bytes, true, offset, scales, minima, bits, d_at, table,          \
     {LOADS(name)}, VECTOR(name##_open), quantised_expand,                              \
     {quantised_dot_c, DOTS(name)}},
    QUANTISED(X)
#undef X
};

static const Format *format_of(uint32_t gguf_type) { // NULL when unknown
    for (int i = 0; i < F_COUNT; i++)
        if (formats[i].id == gguf_type) return &formats[i];
    return NULL;
}

static void tensor_row(const Tensor *t, int64_t row, float *out) { // weights as numbers
    t->format->expand(t, row, 0, (int)t->cols, out);
}

static int isa_best(void) {
#ifdef HAVE_X86
    unsigned a, b, c, d;
    bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
    if (f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                       __builtin_cpu_supports("avx512vnni")
                   ? ISA_AVX512 : ISA_AVX2;
#elif defined(HAVE_NEON)
    bool sdot = sizeof DOT_PRODUCT == 1, i8mm = sizeof I8MM == 1; // compiled for them
#ifdef __APPLE__
    sdot = true; // all have it
#elif defined(__linux__)
    sdot |= getauxval(AT_HWCAP) >> 20 & 1;  // HWCAP_ASIMDDP
    i8mm |= getauxval(AT_HWCAP2) >> 13 & 1; // HWCAP2_I8MM, which old headers do not name
#endif
#ifndef HAVE_I8MM
    i8mm = false;
#endif
    return sdot && i8mm ? ISA_I8MM : sdot ? ISA_SDOT : ISA_NEON;
#endif
    return ISA_C;
}
// ---- the hot loops that are not matrix products
// sum of x[k]^2, lane k mod 8
INLINE float sum_squares(const Simd *v, const float *x, int64_t n) {
    V8f l = {0}, in;
    float part[8] = {0};
    int64_t k = 0;
    for (; k + 8 <= n; k += 8) memcpy(&in, x + k, 32), v->fma_or(&in, &in, &l);
    memcpy(part, x + k, sizeof(float) * (size_t)(n - k)); // 0 * 0 changes no lane
    memcpy(&in, part, 32), v->fma_or(&in, &in, &l);
    return v->fold(&l);
}

// The largest of x[from] ... x[to - 1]; any order gives the same
INLINE float row_max(const float *x, int64_t from, int64_t to) {
    float l[8];
    int64_t k = from;
    for (int i = 0; i < 8; i++) l[i] = x[from];
    for (; k + 8 <= to; k += 8)
        for (int i = 0; i < 8; i++) l[i] = MAX(x[k + i], l[i]);
    for (int i = 0; k < to; k++, i++) l[i] = MAX(x[k], l[i]);
    for (int i = 1; i < 8; i++) l[0] = MAX(l[i], l[0]);
    return l[0];
}

// EXP of the definition. x = n ln 2 + r with n a whole number and |r| <= ln 2 / 2; e^r by its
// series to the seventh power (off by 5e-9 of the value), 2^n by adding to the exponent. The
// rounding to n is the addition of 1.5 * 2^23, which also leaves n in the low bits. NaN stays NaN.
#define CHOOSE(mask, a, b) ((V8f)(((mask) & (V8i)(a)) | (~(mask) & (V8i)(b))))
static const V8f exp_low = ALL(-87.0f), exp_high = ALL(88.0f), exp_round = ALL(12582912.0f),
                 log2_e = ALL(1.44269504f),
                 ln2[2] = {ALL(-0.693359375f), ALL(2.12194440e-4f)}, // n * the first is exact
                 exp_series[8] = {ALL(1.0f / 5040), ALL(1.0f / 720), ALL(1.0f / 120),
                                  ALL(1.0f / 24), ALL(1.0f / 6), ALL(0.5f), ALL(1.0f), ALL(1.0f)};

INLINE void exp8(const Simd *v, V8f *x) {
    const V8f given = *x;
    V8f in = CHOOSE(NEGATIVE(given - exp_low), exp_low, given), t = exp_round, r, p = exp_series[0];
    in = CHOOSE(NEGATIVE(exp_high - in), exp_high, in), r = in;
    v->fma_or(&in, &log2_e, &t);
    V8f n = t - exp_round;
    for (int i = 0; i < 2; i++) v->fma_or(&n, &ln2[i], &r);
    UNROLL for (int i = 1; i < 8; i++) {
        V8f next = exp_series[i];
        v->fma_or(&p, &r, &next), p = next;
    }
    p = (V8f)((V8u)p + ((V8u)t << 23));
    *x = CHOOSE(NEGATIVE(0x7F800000 - ((V8i)given & 0x7FFFFFFF)), given, p);
}

INLINE float exp_one(const Simd *v, float x) {
    V8f e = ALL(x);
    exp8(v, &e);
    return e[0];
}

// x[i] = EXP(x[i] - max) for from <= i < to, and their sum in lane i mod 8
INLINE float exps(const Simd *v, float *x, int64_t from, int64_t to, float max) {
    float l[8] = {0};
    V8f sum, e;
    int64_t i = from;
    for (; i < to && (i & 7); i++) l[i & 7] += x[i] = exp_one(v, x[i] - max);
    memcpy(&sum, l, 32);
    for (; i + 8 <= to; i += 8) {
        memcpy(&e, x + i, 32), e -= max;
        exp8(v, &e), sum += e;
        memcpy(x + i, &e, 32);
    }
    memcpy(l, &sum, 32);
    for (; i < to; i++) l[i & 7] += x[i] = exp_one(v, x[i] - max);
    memcpy(&sum, l, 32);
    return v->fold(&sum);
}

/* Attention over the cache of one kv head. Keys lie eight positions to a block, [block][d][8], so
 * that a vector holds one element of eight keys and no sum runs across lanes; values lie
 * [position][d]. Both are float or half. score = (fma chain over d) * scale; mix = fma chain over
 * positions. */
enum { QUERY_TILE = 4 }; // queries that share one reading of the keys and values

typedef struct { // sixteen floats: in two registers, or in a wide one
    V8f p[2];
    V16f w;
} Pair;

// Eight values at each of two places
INLINE void pair_load(const Simd *v, bool half, const void *p, int64_t a, int64_t b, Pair *to) {
    const uint8_t *in = p;
    const int bytes = half ? 2 : 4;
    if (v->wide) {
        v->pair(half, in + a * bytes, in + b * bytes, &to->w);
        return;
    }
    v->load(half, in + a * bytes, &to->p[0]), v->load(half, in + b * bytes, &to->p[1]);
}

INLINE void pair_store(const Simd *v, const Pair *x, float *a, float *b) {
    if (v->wide) v->store_wide(&x->w, a, b);
    else v->store(&x->p[0], a), v->store(&x->p[1], b);
}

INLINE void pair_fma(const Simd *v, const float *x, const Pair *a, Pair *c) {
    V8f all;
    if (v->wide) {
        v->fma_wide(x, &a->w, &c->w);
        return;
    }
    v->spread(x, &all);
    v->fma_or(&all, &a->p[0], &c->p[0]), v->fma_or(&all, &a->p[1], &c->p[1]);
}

// out[j][8 b + lane] for nq queries q[j][d] and blocks from <= b < to
INLINE void scores(const Simd *v, int nq, bool half, const float *const *q, float *const *out,
                   const void *keys, int d, int64_t from, int64_t to, float scale) {
    for (int64_t b = from; b < to; b += 2) { // the last alone is taken twice
        const int64_t at = b * d * 8, next = b + 1 < to ? at + 8 * d : at;
        Pair s[QUERY_TILE], key;
        UNROLL for (int j = 0; j < nq; j++) {
            if (v->wide) s[j].w = (V16f){0};
            else s[j].p[0] = s[j].p[1] = (V8f){0};
        }
        for (int k = 0; k < d; k++) {
            pair_load(v, half, keys, at + 8 * k, next + 8 * k, &key);
            UNROLL for (int j = 0; j < nq; j++) pair_fma(v, q[j] + k, &key, &s[j]);
        }
        UNROLL for (int j = 0; j < nq; j++) {
            pair_store(v, &s[j], out[j] + 8 * b, out[j] + 8 * (b + 1 < to ? b + 1 : b));
            for (int64_t i = 8 * b; i < 8 * MIN(b + 2, to); i++) out[j][i] *= scale;
        }
    }
}

// out[j][k] = fma chain over positions from <= i < to of e[j][i] * values[i][k], going on from out.
// Here for dimensions k ... k + 16 * pairs - 1, whose sums stay in registers; where the other half
// of a pair is 0 on, for eight, taken twice.
INLINE void mix_tile(const Simd *v, int nq, bool half, int pairs, int other, const float *const *e,
                     float *const *out, const void *values, int d, int k, int64_t from,
                     int64_t to) {
    Pair s[QUERY_TILE][2], x[2];
    UNROLL for (int j = 0; j < nq; j++)
        UNROLL for (int z = 0; z < pairs; z++)
            pair_load(v, false, out[j] + k + 16 * z, 0, other, &s[j][z]);
    int64_t i = from;
    do { // not for: gcc 12 then keeps the sums in registers
        UNROLL for (int z = 0; z < pairs; z++) {
            const int64_t at = i * d + k + 16 * z;
            pair_load(v, half, values, at, at + other, &x[z]);
        }
        UNROLL for (int j = 0; j < nq; j++)
            UNROLL for (int z = 0; z < pairs; z++) pair_fma(v, e[j] + i, &x[z], &s[j][z]);
    } while (++i < to);
    UNROLL for (int j = 0; j < nq; j++)
        UNROLL for (int z = 0; z < pairs; z++) {
            float *to_z = out[j] + k + 16 * z;
            pair_store(v, &s[j][z], to_z, to_z + other);
        }
}

INLINE void mix(const Simd *v, int nq, bool half, const float *const *e, float *const *out,
                const void *values, int d, int64_t from, int64_t to) {
    int k = 0;
    if (from >= to) return;
    if (nq <= 2 || v->wide) // more dimensions at once where registers are left
        for (; k + 32 <= d; k += 32) mix_tile(v, nq, half, 2, 8, e, out, values, d, k, from, to);
    for (; k + 16 <= d; k += 16) mix_tile(v, nq, half, 1, 8, e, out, values, d, k, from, to);
    for (; k + 8 <= d; k += 8) mix_tile(v, nq, half, 1, 0, e, out, values, d, k, from, to);
    for (; k < d; k++) // one by one: eight would reach past the row
        for (int64_t i = from; i < to; i++)
            for (int j = 0; j < nq; j++) {
                const uint8_t *at = (const uint8_t *)values + (i * d + k) * (half ? 2 : 4);
                V8f a = {e[j][i]}, b = {half ? f16_at(at) : f32_at(at)}, c = {out[j][k]};
                v->fma_or(&a, &b, &c);
                out[j][k] = c[0];
            }
}

#ifdef HAVE_X86
AVX2_CALL void narrow_avx2(const float *x, int64_t n, uint16_t *to) {
    for (; n >= 8; n -= 8, x += 8, to += 8) {
        __m128i h = _mm256_cvtps_ph(_mm256_loadu_ps(x), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128((void *)to, h);
    }
    narrow_c(x, n, to);
}
#elif defined(HAVE_NEON)
NEON_CALL void narrow_neon(const float *x, int64_t n, uint16_t *to) {
    for (; n >= 4; n -= 4, x += 4, to += 4)
        vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(x))));
    narrow_c(x, n, to);
}
#endif

typedef struct { // those of one instruction set
    void (*narrow)(const float *x, int64_t n, uint16_t *to); // f32 to f16
    float (*sum_squares)(const float *x, int64_t n);
    float (*exps)(float *x, int64_t from, int64_t to, float max);
    float (*row_max)(const float *x, int64_t from, int64_t to);
    void (*scores)(bool half, const float *const *q, int nq, const void *keys, int d,
                   int64_t from, int64_t to, float scale, float *const *out);
    void (*mix)(bool half, const float *const *e, int nq, const void *values, int d,
                int64_t from, int64_t to, float *const *out);
} VecOps;

// Plain C takes one query after the other; in vector code their number and the type of the cache
// become constants
#define ONE_BY_ONE(f, simd, in, out, ...) \
    for (int j = 0; j < nq; j++) f(simd, 1, half, in + j, out + j, __VA_ARGS__)
#define TOGETHER(f, simd, ...)                                                          \
    if (nq == 1 && half) f(simd, 1, true, __VA_ARGS__);                                 \
    else if (nq == 1) f(simd, 1, false, __VA_ARGS__);                                   \
    else if (nq == 2 && half) f(simd, 2, true, __VA_ARGS__);                            \
    else if (nq == 2) f(simd, 2, false, __VA_ARGS__);                                   \
    else if (nq == 3 && half) f(simd, 3, true, __VA_ARGS__);                            \
    else if (nq == 3) f(simd, 3, false, __VA_ARGS__);                                   \
    else if (half) f(simd, 4, true, __VA_ARGS__);                                       \
    else f(simd, 4, false, __VA_ARGS__)
#define VEC_OPS(isa, CALL, QUERIES)                                                     \
    CALL float sum_squares_##isa(const float *x, int64_t n) {                           \
        return sum_squares(&simd_##isa, x, n);                                          \
    }                                                                                   \
    CALL float exps_##isa(float *x, int64_t from, int64_t to, float max) {              \
        return exps(&simd_##isa, x, from, to, max);                                     \
    }                                                                                   \
    CALL float row_max_##isa(const float *x, int64_t from, int64_t to) {                \
        return row_max(x, from, to);                                                    \
    }                                                                                   \
    CALL void scores_##isa(bool half, const float *const *q, int nq, const void *keys,  \
                           int d, int64_t from, int64_t to, float scale,                \
                           float *const *out) {                                         \
        QUERIES(scores, &simd_##isa, q, out, keys, d, from, to, scale);                 \
    }                                                                                   \
    CALL void mix_##isa(bool half, const float *const *e, int nq, const void *values,   \
                        int d, int64_t from, int64_t to, float *const *out) {           \
        QUERIES(mix, &simd_##isa, e, out, values, d, from, to);                         \
    }
VEC_OPS(c, static, ONE_BY_ONE)
#ifdef HAVE_X86
VEC_OPS(avx2, AVX2_CALL, TOGETHER)
VEC_OPS(avx512, AVX512_CALL, TOGETHER)
#elif defined(HAVE_NEON)
VEC_OPS(neon, SIMD_CALL, TOGETHER)
#endif

static const VecOps vec_ops[ISA_COUNT] = {
    {narrow_c, sum_squares_c, exps_c, row_max_c, scores_c, mix_c},
#ifdef HAVE_X86
    {narrow_avx2, sum_squares_avx2, exps_avx2, row_max_avx2, scores_avx2, mix_avx2},
    {narrow_avx2, sum_squares_avx512, exps_avx512, row_max_avx512, scores_avx512, mix_avx512},
#elif defined(HAVE_NEON)
    {narrow_neon, sum_squares_neon, exps_neon, row_max_neon, scores_neon, mix_neon},
    {narrow_neon, sum_squares_neon, exps_neon, row_max_neon, scores_neon, mix_neon},
    {narrow_neon, sum_squares_neon, exps_neon, row_max_neon, scores_neon, mix_neon},
#endif
};
/* ------------------------------------------------------------------------------------------------
 * Chapter 3. Vectors and matrices
 *
 * Nearly all time goes into one operation: rows of weights times rows of activations. For few rows
 * of activations it is a read of the weights, and what counts is to keep the memory busy: a thread
 * walks four far streams of rows at once, because the prefetcher starts anew at every page. For
 * many rows it is arithmetic: weights are opened once into panels that stay in the cache while all
 * rows pass. Which way is taken, how rows are shared out and how many threads there are cannot be
 * seen in the result. Products that read the same activations (q, k and v; gate and up) are given
 * as one list and shared out together, so that threads meet once and not once a matrix.
 */

// Bytes of a row: an odd number of cache lines, so that long rows do not share their cache sets
static int64_t odd_lines(int64_t bytes) {
    return ((bytes + 63) / 64 | 1) * 64;
}

// The shape of n rows, without memory: x [n][ldx], q [n][ldq], dx [n][ldb], sum [n][3][ldb]
static Acts acts_shape(int n, int64_t cols) {
    int64_t blocks = (cols + 255) / 256 * 8; // kernels walk eight blocks at a time
    return (Acts){.n = n, .cols = cols, .ldx = odd_lines(cols * 4) / 4,
                  .ldq = odd_lines(blocks * 64) / 2, .ldb = odd_lines(blocks * 4) / 4};
}

static size_t acts_bytes(int max_n, int64_t max_cols) {
    Acts a = acts_shape(max_n, max_cols);
    return (size_t)max_n * (size_t)(a.ldx * 4 + a.ldq * 4 + a.ldb * 16);
}

static Acts acts_at(uint8_t *mem, int n, int64_t cols) { // mem: 64-byte aligned
    Acts a = acts_shape(n, cols);
    a.x = (float *)(void *)mem;
    a.q = (int16_t *)(void *)(a.x + n * a.ldx);
    a.bytes = (uint8_t *)(a.q + n * a.ldq);
    a.dx = (float *)(void *)(a.bytes + 2 * n * a.ldq);
    a.sum = (int32_t *)(void *)(a.dx + n * a.ldb);
    return a;
}

// x from row `first` and element k (a multiple of 256) on
static Acts acts_part(const Acts *x, int first, int n, int64_t k) {
    Acts a = *x;
    a.n = n;
    a.x += first * x->ldx + k;
    a.q += first * x->ldq + k;
    a.bytes += 2 * (first * x->ldq + k);
    a.dx += first * x->ldb + k / 32;
    a.sum += 3 * first * x->ldb + k / 32;
    return a;
}

// After columns from ... to - 1 of row `row` of a->x were filled; `from` is a multiple of 32. Float
// kernels walk eight floats at a time, integer kernels eight blocks: what follows the row must be
// 0, not a stranger's NaN.
static void acts_quantise(int isa, const Acts *a, int row, int64_t from, int64_t to) {
    for (int64_t k = to; to == a->cols && k % 8; k++) a->x[row * a->ldx + k] = 0;
    if (a->cols % 32) return;
    kernels[isa].quantise(a, row, from, to);
}

static void acts_copy(const Acts *to, int row, const Acts *from, int from_row) {
    memcpy(to->x + row * to->ldx, from->x + from_row * from->ldx, sizeof(float) * (size_t)to->ldx);
    memcpy(to->q + row * to->ldq, from->q + from_row * from->ldq, 2 * (size_t)to->ldq);
    memcpy(to->bytes + 2 * row * to->ldq, from->bytes + 2 * from_row * from->ldq,
           2 * (size_t)to->ldq);
    memcpy(to->dx + row * to->ldb, from->dx + from_row * from->ldb, 4 * (size_t)to->ldb);
    memcpy(to->sum + 3 * row * to->ldb, from->sum + 3 * from_row * from->ldb, 12 * (size_t)to->ldb);
}

typedef struct {
    Panel panel[FLOAT_BLOCK / PANEL_K];
    float part[(PANEL_COLUMNS + 7) * PANEL_ROWS * LANES]; // the last tile may be wider than needed
} Scratch;

static size_t matmul_scratch(void) { return (sizeof(Scratch) + 63) / 64 * 64; } // bytes

enum { STREAM_ROWS = 16 }; // rows of each of the four streams in a ticket

static bool by_panels(const Worker *w, const Acts *x, const Tensor *t) {
    int isa = w->team->isa;
    return isa != ISA_C && x->n > kernels[isa].panel[t->format->quantised].above;
}

// Rows a ticket. Small matrices are cut finer, so that no thread waits long for the last ticket.
static int64_t ticket_rows(const Worker *w, const Acts *x, const Tensor *t) {
    if (by_panels(w, x, t)) return kernels[w->team->isa].panel[t->format->quantised].rows;
    return MAX(4, MIN(STREAM_ROWS, t->rows / 4 / (8 * w->team->n)));
}

static long product_tickets(const Worker *w, const Acts *x, const Tensor *t) {
    int64_t rows = by_panels(w, x, t) ? t->rows : (t->rows + 3) / 4;
    int64_t each = ticket_rows(w, x, t);
    return (long)((rows + each - 1) / each);
}

// Four streams, a quarter of the matrix apart. Where rows run out the first stream's is made again:
// no other thread writes it.
static void product_dots(const Worker *w, const Acts *x, const Product *p, long ticket) {
    const Tensor *t = p->w;
    const int64_t quarter = (t->rows + 3) / 4, each = ticket_rows(w, x, t);
    Dot *dot = t->format->dot[w->team->isa];
    for (int64_t i = ticket * each; i < MIN(quarter, (ticket + 1) * each); i++) {
        int64_t row[4];
        for (int r = 0; r < 4; r++) row[r] = i + r * quarter < t->rows ? i + r * quarter : i;
        for (int c = 0; c < x->n; c += COLUMNS) dot(p, row, x, c, MIN(COLUMNS, x->n - c));
    }
}

// The rows of a panel against all columns. Float lanes are folded at every FLOAT_BLOCK, integer
// lanes at the end of the row.
static void product_panels(const Worker *w, const Acts *x, const Product *p, long ticket) {
    const Tensor *t = p->w;
    const bool quantised = t->format->quantised;
    const PanelKernels *k = &kernels[w->team->isa].panel[quantised];
    const int step = quantised ? 32 * PANEL_BLOCKS : PANEL_K;
    const int64_t row = ticket * k->rows;
    const int rows = (int)MIN(k->rows, t->rows - row), tile = k->rows * LANES; // floats a column
    Scratch *s = (Scratch *)(void *)w->scratch;
    for (int first = 0; first < x->n; first += PANEL_COLUMNS) {
        const int n = MIN(PANEL_COLUMNS, x->n - first);
        for (int64_t from = 0; from < t->cols; from += FLOAT_BLOCK) {
            const int64_t to = MIN(t->cols, from + FLOAT_BLOCK);
            const bool end = !quantised || to == t->cols;
            for (int64_t at = from; at < to; at += step)
                k->pack(t, row, at, (int)MIN(step, to - at), k->rows,
                        &s->panel[(at - from) / step]);
            for (int c = 0; c < n; c += PANEL_NEAR / k->columns * k->columns) {
                const int near = MIN(PANEL_NEAR / k->columns * k->columns, n - c);
                float *part = s->part + c * tile;
                if (!quantised || !from)
                    memset(part, 0, sizeof *part * (size_t)((near + 7) * tile));
                for (int64_t at = from; at < to; at += step) {
                    const Acts x_part = acts_part(x, first + c, near, at);
                    for (int i = 0; i < near; i += k->columns)
                        k->tile(t->format, &s->panel[(at - from) / step], &x_part, i,
                                (int)MIN(step, to - at), part);
                }
                if (end) fold_panel(part, k->columns, k->rows, near, rows, !quantised && from,
                                 p->y + (first + c) * t->rows + row, t->rows);
            }
        }
    }
}

// All threads of the team call it with the same list; all products are one row of tickets.
static void matmul(Worker *w, const Acts *x, const Product *list, int count) {
    for (;;) {
        long ticket = team_take(w->team), tickets = 0;
        Acts part;
        int i = 0;
        for (; i < count; i++, ticket -= tickets) {
            part = acts_part(x, list[i].first, list[i].n, 0);
            if (ticket < (tickets = product_tickets(w, &part, list[i].w))) break;
        }
        if (i == count) break;
        if (by_panels(w, &part, list[i].w)) product_panels(w, &part, &list[i], ticket);
        else product_dots(w, &part, &list[i], ticket);
    }
    team_wait(w->team);
}
/* ------------------------------------------------------------------------------------------------
 * Chapter 4. Anatomy of a model
 *
 * A model is knobs, tensors and rules. The knobs (sizes, epsilon, rope base) are numbers of the
 * file. The tensors say which parts exist: a missing bias is zero, a missing output matrix means
 * that the embedding serves for it. What a file cannot say stands in one row of archs[]. A layer
 * describes itself: its kind, heads, window, rope table and place in the cache are data that the
 * forward pass looks up, so that layers of one model may differ. Shapes are written (rows,
 * columns), rows first; a matrix of shape (out, in) maps in numbers to out.
 */
enum { // what a row of archs[] may say: which parts its layers must have, ...
    NORM_BEFORE = 1 << 0,               // attn_norm
    NORM_FFN = 1 << 1,                  // ffn_norm, named so; else
    NORM_FFN_MOVED = 1 << 2,            // the same under the name post_attention_norm
    NORM_AFTER = 1 << 3,                // norms of what a block gives, before it is added
    NORM_QK = 1 << 4, NORM_QK_WIDE = 1 << 5, // of each head; of all heads as one vector
    SINKS = 1 << 6,                     // a logit of every head that draws attention to nothing
    SHARED = 1 << 7,                    // the expert that every token uses stands behind a gate
    // ... and what they do
    TURN_HALVES = 1 << 8,               // rope turns elements i, i + n/2 together; else 2i, 2i + 1
    GELU = 1 << 9, CLAMPED = 1 << 10,   // the gate's activation; else SiLU
    EMBED_SCALED = 1 << 11,             // embeddings are multiplied by sqrt(dim)
    WEIGHTS_SUM_1 = 1 << 12,            // of the chosen experts; else as the softmax over all says
    WINDOW_ROPE = 1 << 13,              // layers with a window turn by a table without scaling
    YARN_EXACT = 1 << 14,               // its ramp ends between elements
    ROPE_SWITCH = 1 << 15,              // no rope at all where rope.scaling.finetuned is false
    NORMS = NORM_BEFORE | NORM_FFN,
};

/* To add an architecture: one row here with what its files leave unsaid; if it brings a mechanism
 * that no row has yet, one knob in Config or Layer, filled in chapter 5, and one branch in chapter
 * 6; then a tiny reference model in tests/families.py. (Sources: transformers, llama.cpp.) */
typedef struct {
    const char *name;                   // general.architecture of a GGUF
    int flags;
    int period;                         // of so many layers the last sees all keys, the others have
                                        // the window, if the file has one; 0: all have it
    int no_rope;                        // every so many-th layer has no rope
    int window;                         // where the file names none
    float base;                         // of rope, where the file names none; 0: 10,000
    float score_cap, logit_cap;         // where the file names none: c tanh(x / c); 0: none
    int layers_own_scale;               // models of so many layers scale scores by dim / n_heads
} Arch;

static const Arch archs[] = {
    // Llama 1 to 3.x, TinyLlama, SmolLM2, Mistral, Mixtral; .bin files
    {.name = "llama", .flags = NORMS | WEIGHTS_SUM_1},
    {.name = "mistral3", .flags = NORMS | WEIGHTS_SUM_1}, // Ministral 3, newer Mistral Small
    {.name = "qwen2", .flags = NORMS | TURN_HALVES},
    {.name = "qwen2moe", .flags = NORMS | TURN_HALVES | SHARED},
    {.name = "qwen3", .flags = NORMS | TURN_HALVES | NORM_QK},
    {.name = "qwen3moe", .flags = NORMS | TURN_HALVES | NORM_QK | WEIGHTS_SUM_1},
    {.name = "gemma", .flags = NORMS | TURN_HALVES | GELU | EMBED_SCALED},
    {.name = "gemma2", .flags = NORMS | NORM_AFTER | TURN_HALVES | GELU | EMBED_SCALED,
     .period = 2, .window = 4096, .score_cap = 50, .logit_cap = 30, .layers_own_scale = 46},
    {.name = "gemma3",
     .flags = NORMS | NORM_AFTER | NORM_QK | TURN_HALVES | GELU | EMBED_SCALED | WINDOW_ROPE,
     .period = 6, .base = 1e6f, .layers_own_scale = 62},
    {.name = "phi3", .flags = NORMS | TURN_HALVES},
    {.name = "olmo2", .flags = NORM_AFTER | NORM_QK_WIDE | TURN_HALVES | WINDOW_ROPE,
     .period = 4},                      // Olmo 3 too
    {.name = "granite", .flags = NORMS | ROPE_SWITCH},
    {.name = "granitemoe", .flags = NORMS | ROPE_SWITCH | WEIGHTS_SUM_1},
    {.name = "smollm3", .flags = NORMS, .no_rope = 4},
    {.name = "gpt-oss",
     .flags = NORM_BEFORE | NORM_FFN_MOVED | SINKS | TURN_HALVES | CLAMPED | WEIGHTS_SUM_1
              | YARN_EXACT, .period = 2},
};

typedef struct { // rotary position table: angle of pair i at p is p * inv_freq[i]
    int n_rot;                          // how many elements of a head turn; the rest is copied
    double *inv_freq;                   // (n_rot / 2)
    double *inv_long;                   // longrope: instead, where the cache holds over short_len
    float scale;                        // of cosine and sine
} Rope;

enum { ROPE_FULL, ROPE_WINDOW, N_ROPES }; // tables of a model, alike in n_rot; 0: it is not used

typedef struct {
    const Arch *arch;
    int dim;                            // width of the residual stream
    int n_layers;
    int n_heads, n_kv_heads, head_size; // of all layers that do not say otherwise
    int hidden_dim;                     // width of the feed-forward part; with experts, the shared
    int n_experts, n_used, expert_dim;  // experts of a layer, and of a token; their width
    bool weights_sum_1;                 // of the chosen experts
    int seq_len, short_len;             // positions it was trained for; and before it was stretched
    int vocab_size;                     // rows of the embedding; may exceed the tokenizer's entries
    float norm_eps;
    float embed_scale, residual_scale;  // of embeddings; of what blocks add to the stream
    float score_cap, logit_cap;         // c tanh(x / c), 0: none
    float logit_divisor;
    float heat;                         // Ministral 3: queries at position p are multiplied by
                                        // 1 + heat * ln(1 + floor(p / short_len))
    Rope rope[N_ROPES];
} Config;

typedef struct {
    int n_heads, n_kv_heads, head_size;
    int hidden_dim;                     // of w1 .. w2: with experts, the shared one's; 0: none
    int n_experts, expert_dim;          // 0: dense
    int window;                         // keys a query sees, itself included; 0: all before it
    int rope;                           // index of its rope table, -1: none
    int slot;                           // which part of the cache it writes and reads
    float score_scale;                  // of query times key
    float *attn_norm, *ffn_norm;        // (dim) in front of a block; NULL: as it is
    float *attn_post, *ffn_post;        // (dim) behind it
    Tensor wq;                          // (n_heads * head_size, dim)
    Tensor wk, wv;                      // (n_kv_heads * head_size, dim)
    Tensor wo;                          // (dim, n_heads * head_size)
    float *q_norm, *k_norm;             // (head_size), or all heads
    float *sinks;                       // (n_heads)
    Tensor w1, w3;                      // (hidden_dim, dim): gate_proj and up_proj
    Tensor w2;                          // (dim, hidden_dim): down_proj
    float *shared_gate;                 // (dim) of the shared expert
    Tensor router;                      // (n_experts, dim)
    Tensor e1, e3;                      // (n_experts * expert_dim, dim): gate, up of all experts
    Tensor e2;                          // (n_experts * dim, expert_dim): down
} Layer;

typedef struct { int32_t next; uint32_t left; } Merge; // left: bytes of the left part; index = rank

typedef struct {
    enum { VOCAB_NONE, VOCAB_SPM, VOCAB_BPE } kind; // texts with U+2581 for spaces; of mapped bytes
    bool bin;                // tokenizer.bin: spaces are spaces, every token prints its text
    Span space;              // SPM: how texts write it
    int size;
    Span *text;              // [size] as in the file
    uint8_t *type;           // [size] TYPE_
    Map index;               // text -> id; of equal texts the first
    float *score;            // [size] which tokens to merge first; NULL: the merges say it
    Merge *merge;            // [n_merges] the ways to make one token form a list
    int32_t *merge_of;       // [size] its first element, or -1
    int byte_id[256];        // SPM: the token "<0xHH>" of a byte, or NO_TOKEN
    bool glue[256];          // SPM: bytes that stand before a space within some token
    const struct Pretok *pre; // BPE: how texts are cut into words, chapter 7
    struct Unicode *uni;     // for `pre`
    uint8_t *longest;        // [65536] special tokens (control, unknown, user-defined) by first two
                             // bytes: the longest's length; those of 256 bytes are never found
    int bos, eos, unk;       // or NO_TOKEN
    bool add_bos, add_eos, space_prefix;
    bool strip_after;        // Phi-3: white space after special tokens is dropped
    bool *stop;              // [size] ends a reply
} Vocab;

typedef struct Gguf Gguf;               // keys and tensor table of a GGUF, chapter 5

typedef struct {                        // read-only once opened
    Reader file;
    Gguf *gguf;                         // NULL: llama2.c's .bin
    int version;                        // of the container
    Config config;
    Layer *layers;
    Tensor embedding;                   // (vocab_size, dim)
    Tensor output;                      // (vocab_size, dim); the embedding again when tied
    float *output_norm;                 // (dim)
    Vocab vocab;
    Span chat_template;                 // as the file has it; empty where it has none
    int64_t weight_bytes;               // what one decoded token reads
    bool packed;                        // some matrix is of a smaller type than f32
    Str warnings;                       // lines for stderr, printed unless -q
} Model;

/* ------------------------------------------------------------------------------------------------
 * Chapter 5. Opening files
 *
 * Nothing in a file is believed. Headers are read through Reader; a count is compared with the
 * bytes that are left before anything is sized by it; sizes are multiplied only after each factor
 * was bounded; the shape of every tensor is compared with what the sizes imply before a pointer to
 * it exists. Weights stay where they are in the mapped file; only the short vectors (norms, biases)
 * are copied out, as float. Both kinds of file fill the same Model through the same table of parts.
 *
 *   .bin v0   7 x i32: dim hidden layers heads kv_heads +-vocab seq_len, then f32 tensors, by kind
 *   .bin v1   u32 magic, i32 version, the 7 x i32, u8 shared, zeros to 256, f32 tensors
 *   .bin v2   as v1 with i32 group after shared; norms f32, matrices int8 and a f32 scale a group
 *   GGUF      "GGUF", u32 version, u64 tensors, u64 pairs
 *             pairs: string key, u32 type, value      strings: u64 length, bytes
 *             tensors: string name, u32 n, n x u64 dims (columns first), u32 type, u64 offset
 *             padding to the alignment, data
 */
enum {
    MAX_DIM = 1 << 20, MAX_LAYERS = 1 << 14, MAX_VOCAB = 1 << 24, MAX_POSITIONS = INT_MAX - 64,
    MAX_KEYS = 1 << 16, MAX_TENSORS = 1 << 18, MAX_EXPERTS = 1024,
};
enum { TYPE_F32 = 0, TYPE_BIN_FLAT = 1000, TYPE_BIN_BLOCKS = 1001 }; // rows of formats[]

// ---- the parts of a layer, the same in every kind of file
enum { NO_DIM, DIM, Q_DIM, KV_DIM, HEAD, HEADS, HIDDEN, SHARED_DIM, EXPERTS, EXPERT_DIM,
       ALL_EXPERT_DIM, ALL_DIM }; // what a part's sizes follow, see part_size

typedef struct {
    const char *name;                   // in a GGUF: blk.N.NAME.weight, and a bias if there is one
    size_t at;                          // place in Layer: of a Tensor, or where rows is NO_DIM of a
                                        // float *
    int rows, cols;                     // a layer where one of them is 0 does not have the part
    int flags;                          // 0, or architectures without any of these do not have it
    const char *fused;                  // some files hold all parts of this name as one tensor
} Part;

#define PART(title, field, out, in)                                                                \
    .name = title, .at = offsetof(Layer, field), .rows = out, .cols = in
enum { ATTN_NORM, WQ, WK, WV, WO, FFN_NORM, W1, W2, W3 }; // the order of .bin v0

/* To add a part: a field in Layer, a row here, its use in chapter 6. */
static const Part parts[] = {
    [ATTN_NORM] = {PART("attn_norm", attn_norm, NO_DIM, DIM), .flags = NORM_BEFORE},
    [WQ] = {PART("attn_q", wq, Q_DIM, DIM), .fused = "attn_qkv"},
    [WK] = {PART("attn_k", wk, KV_DIM, DIM), .fused = "attn_qkv"},
    [WV] = {PART("attn_v", wv, KV_DIM, DIM), .fused = "attn_qkv"},
    [WO] = {PART("attn_output", wo, DIM, Q_DIM)},
    [FFN_NORM] = {PART("ffn_norm", ffn_norm, NO_DIM, DIM), .flags = NORM_FFN},
    [W1] = {PART("ffn_gate", w1, HIDDEN, DIM), .fused = "ffn_up"},
    [W2] = {PART("ffn_down", w2, DIM, HIDDEN)},
    [W3] = {PART("ffn_up", w3, HIDDEN, DIM), .fused = "ffn_up"},
    {PART("post_attention_norm", ffn_norm, NO_DIM, DIM), .flags = NORM_FFN_MOVED},
    {PART("post_attention_norm", attn_post, NO_DIM, DIM), .flags = NORM_AFTER},
    {PART("post_ffw_norm", ffn_post, NO_DIM, DIM), .flags = NORM_AFTER},
    {PART("attn_q_norm", q_norm, NO_DIM, HEAD), .flags = NORM_QK},
    {PART("attn_k_norm", k_norm, NO_DIM, HEAD), .flags = NORM_QK},
    {PART("attn_q_norm", q_norm, NO_DIM, Q_DIM), .flags = NORM_QK_WIDE},
    {PART("attn_k_norm", k_norm, NO_DIM, KV_DIM), .flags = NORM_QK_WIDE},
    {PART("attn_sinks", sinks, NO_DIM, HEADS), .flags = SINKS},
    {PART("ffn_gate_inp", router, EXPERTS, DIM)},
    {PART("ffn_gate_exps", e1, ALL_EXPERT_DIM, DIM)},
    {PART("ffn_down_exps", e2, ALL_DIM, EXPERT_DIM)},
    {PART("ffn_up_exps", e3, ALL_EXPERT_DIM, DIM)},
    {PART("ffn_gate_shexp", w1, SHARED_DIM, DIM)},
    {PART("ffn_down_shexp", w2, DIM, SHARED_DIM)},
    {PART("ffn_up_shexp", w3, SHARED_DIM, DIM)},
    {PART("ffn_gate_inp_shexp", shared_gate, NO_DIM, DIM), .flags = SHARED},
};

static int64_t part_size(const Model *m, const Layer *l, int what) {
    int64_t dim = m->config.dim, head = l->head_size, experts = l->n_experts, wide = l->hidden_dim;
    const int64_t sizes[] = {
        [NO_DIM] = 1, [DIM] = dim, [Q_DIM] = l->n_heads * head, [KV_DIM] = l->n_kv_heads * head,
        [HEAD] = head, [HEADS] = l->n_heads, [HIDDEN] = experts ? 0 : wide,
        [SHARED_DIM] = experts ? wide : 0, [EXPERTS] = experts, [EXPERT_DIM] = l->expert_dim,
        [ALL_EXPERT_DIM] = experts * l->expert_dim, [ALL_DIM] = experts * dim,
    };
    return sizes[what];
}

static bool part_exists(const Model *m, const Layer *l, const Part *p) {
    bool usual = !p->flags || m->config.arch->flags & p->flags;
    return usual && part_size(m, l, p->rows) && part_size(m, l, p->cols);
}

// A copy of a tensor of one row or one column, as floats.
static float *vector_copy(const Tensor *t) {
    float *v = xalloc((size_t)(t->rows * t->cols), sizeof *v);
    for (int64_t i = 0; i < t->rows; i++) tensor_row(t, i, v + i * t->cols);
    return v;
}

// Counts a matrix among the bytes that a token reads; of experts, those of the ones in use.
static void matrix_count(Model *m, const Tensor *t, bool experts) {
    int64_t bytes = (int64_t)t->stride * t->rows
                    + (t->scales ? t->rows * t->cols / t->group * 4 : 0);
    m->weight_bytes += experts ? bytes / m->config.n_experts * m->config.n_used : bytes;
    m->packed |= t->format->id != TYPE_F32;
}

static void part_set(Model *m, Layer *l, const Part *p, const Tensor *t) {
    void *field = (char *)l + p->at;
    if (p->rows == NO_DIM) *(float **)field = vector_copy(t);
    else *(Tensor *)field = *t;
    if (p->rows != NO_DIM) matrix_count(m, t, p->rows == ALL_EXPERT_DIM || p->rows == ALL_DIM);
}

// Layers that are all alike, as the sizes in Config say.
static void layers_init(Model *m) {
    const Config *c = &m->config;
    m->layers = xalloc((size_t)c->n_layers, sizeof *m->layers);
    for (int i = 0; i < c->n_layers; i++)
        m->layers[i] = (Layer){
            .n_heads = c->n_heads, .n_kv_heads = c->n_kv_heads, .head_size = c->head_size,
            .hidden_dim = c->hidden_dim, .n_experts = c->n_experts, .expert_dim = c->expert_dim,
            .slot = i, .score_scale = 1.0f / sqrtf((float)c->head_size),
        };
}

static void rope_init(Rope *r, int n_rot, double base, double factor) {
    r->n_rot = n_rot, r->scale = 1;
    r->inv_freq = xalloc((size_t)n_rot / 2 + 1, sizeof *r->inv_freq);
    for (int i = 0; i < n_rot / 2; i++) r->inv_freq[i] = pow(base, -2.0 * i / n_rot) / factor;
}

// ---- llama2.c's .bin
static const uint8_t bin_magic[4] = {0x32, 0x34, 0x6b, 0x61}; // 0x616b3432, "ak42" to its author

typedef struct {                        // walks the tensors of a .bin, which have no names
    const Reader *r;
    uint64_t at;                        // may pass the end of the file, which bin_open compares
    int group;                          // version 2: weights to a scale; else 0
} BinCursor;

static const uint8_t *bin_bytes(BinCursor *b, uint64_t n) { // NULL past the end
    b->at += n;                         // stays under 2^63: see the bounds in bin_header
    return b->at <= b->r->size ? b->r->base + b->at - n : NULL;
}

static Tensor bin_tensor(BinCursor *b, int64_t rows, int64_t cols, bool matrix) {
    bool quantised = matrix && b->group;
    Tensor t = {.rows = rows, .cols = cols, .format = format_of(TYPE_F32)};
    t.stride = (size_t)cols * (quantised ? 1 : 4);
    t.data = bin_bytes(b, (uint64_t)rows * t.stride);
    if (quantised) {
        if (rows * cols % b->group)
            rd_die(b->r, 37, "group_size %d does not divide a matrix of %" PRId64 " x %" PRId64,
                   b->group, rows, cols);
        bool aligned = cols % b->group == 0 && b->group % 32 == 0;
        t.format = format_of(aligned ? TYPE_BIN_BLOCKS : TYPE_BIN_FLAT), t.group = b->group;
        t.scales = bin_bytes(b, (uint64_t)(rows * cols / b->group * 4));
    }
    return t;
}

// One kind of tensor for all layers, one after another.
static void bin_layers(Model *m, BinCursor *b, int part) {
    const Part *p = &parts[part];
    for (Layer *l = m->layers; l < m->layers + m->config.n_layers; l++) {
        int64_t rows = part_size(m, l, p->rows), cols = part_size(m, l, p->cols);
        Tensor t = bin_tensor(b, rows, cols, p->rows != NO_DIM);
        if (t.data) part_set(m, l, p, &t);
    }
}

static int bin_int(Reader *r, const char *field, int64_t low, int64_t high) {
    int32_t v = (int32_t)rd_uint(r, 4);
    rd_check(r);
    if (v < low || v > high)
        rd_die(r, r->at - 4, "%s is %d, expected %" PRId64 " to %" PRId64 " (is it a llama2.c "
               "model? formats before GGUF are not read)", field, v, low, high);
    return v;
}

static bool bin_header(Model *m, Reader *r, BinCursor *b) { // gives: is the classifier shared
    Config *c = &m->config;
    c->dim = bin_int(r, "dim", 1, MAX_DIM);
    c->hidden_dim = bin_int(r, "hidden_dim", 1, MAX_DIM);
    c->n_layers = bin_int(r, "n_layers", 1, MAX_LAYERS);
    c->n_heads = bin_int(r, "n_heads", 1, c->dim);
    c->n_kv_heads = bin_int(r, "n_kv_heads", 1, c->n_heads);
    if (c->dim % c->n_heads || c->dim / c->n_heads % 2 || c->n_heads % c->n_kv_heads)
        rd_die(r, r->at - 8, "n_heads is %d, n_kv_heads %d, expected to cut dim %d into even heads "
               "and these into groups", c->n_heads, c->n_kv_heads, c->dim);
    int vocab = bin_int(r, "vocab_size", m->version ? 1 : -MAX_VOCAB, MAX_VOCAB);
    if (!vocab) rd_die(r, r->at - 4, "vocab_size is 0");
    c->vocab_size = abs(vocab);         // version 0: below 0 where the classifier is not shared
    c->seq_len = bin_int(r, "seq_len", 1, MAX_POSITIONS);
    c->head_size = c->dim / c->n_heads;
    c->norm_eps = 1e-5f;                // llama2.c's constant; no version of the file states it
    c->embed_scale = c->residual_scale = c->logit_divisor = 1;
    b->at = m->version ? 256 : r->at;
    bool shared = m->version ? rd_uint(r, 1) : vocab > 0;
    if (m->version == 2) b->group = bin_int(r, "group_size", 1, MAX_DIM);
    return shared;
}

static void bin_open(Model *m) {
    Reader *r = &m->file;
    Config *c = &m->config;
    BinCursor b = {.r = r};
    if (r->size >= 8 && !memcmp(r->base, bin_magic, 4)) {
        r->at = 4;
        m->version = (int32_t)rd_uint(r, 4);
        if (m->version != 1 && m->version != 2)
            rd_die(r, 4, ".bin version %d, expected 1 or 2 (version 0 has no magic)", m->version);
    }
    bool shared = bin_header(m, r, &b);
    c->arch = &archs[0];
    layers_init(m);
    rope_init(&c->rope[ROPE_FULL], c->head_size, 10000.0, 1.0);
    Tensor norm;
    if (m->version == 0) {
        m->embedding = bin_tensor(&b, c->vocab_size, c->dim, true);
        for (int part = ATTN_NORM; part <= W3; part++) bin_layers(m, &b, part);
        norm = bin_tensor(&b, 1, c->dim, false);
        bin_bytes(&b, (uint64_t)c->seq_len * (uint64_t)c->head_size * 4); // cos and sin, not used
    } else {
        bin_layers(m, &b, ATTN_NORM), bin_layers(m, &b, FFN_NORM);
        norm = bin_tensor(&b, 1, c->dim, false);
        m->embedding = bin_tensor(&b, c->vocab_size, c->dim, true);
        for (int part = WQ; part <= W3; part++)
            if (part != FFN_NORM) bin_layers(m, &b, part);
    }
    m->output = shared ? m->embedding : bin_tensor(&b, c->vocab_size, c->dim, true);
    if (b.at != r->size)
        die("%s: %zu bytes, expected %" PRIu64 " for dim %d, hidden_dim %d, n_layers %d, "
            "vocab_size %d, seq_len %d%s", r->name, r->size, b.at, c->dim, c->hidden_dim,
            c->n_layers, c->vocab_size, c->seq_len, b.group ? ", int8" : "");
    m->output_norm = vector_copy(&norm);
}

// ---- GGUF: pairs and tensor table
enum { GGUF_U8, GGUF_I8, GGUF_U16, GGUF_I16, GGUF_U32, GGUF_I32, GGUF_F32, GGUF_BOOL, GGUF_STRING,
       GGUF_ARRAY, GGUF_U64, GGUF_I64, GGUF_F64, GGUF_TYPES };
static const struct { char name[8]; uint8_t bytes; } gguf_types[GGUF_TYPES] = { // bytes: at least
    {"u8", 1}, {"i8", 1}, {"u16", 2}, {"i16", 2}, {"u32", 4}, {"i32", 4}, {"f32", 4}, {"bool", 1},
    {"string", 8}, {"array", 12}, {"u64", 8}, {"i64", 8}, {"f64", 8},
};

typedef struct {
    uint32_t type;                      // of the value, or of the elements of an array
    bool array;
    uint64_t count;                     // elements; 1 for a scalar
    size_t at;                          // where the first one starts
} GgufValue;

typedef struct {
    uint32_t type;
    const Format *format;               // NULL: not known here
    uint64_t dims[4], offset, bytes;
    const Reader *r;                    // the file it is in, at its first byte
    size_t at;
    bool used;
} GgufTensor;

struct Gguf {
    Reader *r;
    Span arch;                          // general.architecture
    int n_tensors;
    Span *keys, *names;
    GgufValue *values;
    GgufTensor *tensors;
    Map key_map, name_map;
    uint64_t alignment;
    Gguf *next;                         // the other files of a model in several
};

// Moves past the value of `key`, whose type was just read.
static void gguf_skip(Reader *r, Span key, GgufValue *v) {
    v->count = 1;
    if (v->type == GGUF_ARRAY) {
        v->array = true;
        v->type = (uint32_t)rd_uint(r, 4), v->count = rd_uint(r, 8);
    }
    rd_check(r);
    if (v->type >= GGUF_TYPES || (v->array && v->type == GGUF_ARRAY))
        rd_die(r, r->at, "key %.*s: %s of type %u, expected 0 to 12 and no array of arrays",
               SHOWN(key), v->array ? "elements" : "a value", v->type);
    if (v->count > (r->size - r->at) / gguf_types[v->type].bytes)
        rd_die(r, r->at, "key %.*s: %" PRIu64 " elements, but only %zu bytes follow", SHOWN(key),
               v->count, r->size - r->at);
    v->at = r->at;
    if (v->type != GGUF_STRING) rd_bytes(r, v->count * gguf_types[v->type].bytes);
    else for (uint64_t i = 0; i < v->count && !r->error; i++) rd_string(r);
}

static void gguf_pairs(Gguf *g, uint64_t n) {
    Reader *r = g->r;
    if (n > MAX_KEYS || n > (r->size - r->at) / 13)
        rd_die(r, 16, "%" PRIu64 " metadata pairs, more than the file can hold", n);
    g->keys = xalloc((size_t)n, sizeof *g->keys), g->values = xalloc((size_t)n, sizeof *g->values);
    g->key_map = map_new((size_t)n);
    for (int i = 0; i < (int)n; i++) {
        size_t at = r->at;
        g->keys[i] = rd_string(r);
        g->values[i].type = (uint32_t)rd_uint(r, 4);
        gguf_skip(r, g->keys[i], &g->values[i]);
        rd_check(r);
        if (map_add(&g->key_map, g->keys, (uint32_t)i) != i)
            rd_die(r, at, "key %.*s stands twice", SHOWN(g->keys[i]));
    }
}

// A name of a key that begins with a dot stands behind the name of the architecture.
static const GgufValue *gguf_find(const Gguf *g, const char *key) {
    char full[160];
    int n = *key == '.' ? (int)MIN(g->arch.n, 100) : 0;
    snprintf(full, sizeof full, "%.*s%s", n, g->arch.p, key);
    int64_t i = map_find(&g->key_map, g->keys, (Span){full, strlen(full)});
    return i < 0 ? NULL : &g->values[i];
}

// The end for what a value is; gguf_wrong: for what its type is.
#define gguf_die(g, v, format, ...)                                                                \
    rd_die((g)->r, (v)->at, "key %.*s is " format, SHOWN((g)->keys[(v) - (g)->values]), __VA_ARGS__)

_Noreturn static void gguf_wrong(const Gguf *g, const char *key, bool array, const char *expected) {
    static const char *const of[] = {"", "an array of "};
    const GgufValue *v = gguf_find(g, key);
    gguf_die(g, v, "%s%s, expected %s%s", of[v->array], gguf_types[v->type].name, of[array],
             expected);
}

// The value of a key, NULL if the file has none; one of another type is wrong.
static const GgufValue *gguf_typed(const Gguf *g, const char *key, uint32_t type, bool array) {
    const GgufValue *v = gguf_find(g, key);
    if (v && (v->type != type || v->array != array))
        gguf_wrong(g, key, array, gguf_types[type].name);
    return v;
}

// Element i of a value as a whole number (too large: the largest); false if its type is none.
static bool gguf_element(const Gguf *g, const GgufValue *v, uint64_t i, int64_t *out) {
    char kind = gguf_types[v->type].name[0];
    uint64_t u = 0, bytes = gguf_types[v->type].bytes, spare = 64 - 8 * bytes;
    if (kind != 'u' && kind != 'i' && kind != 'b') return false;
    memcpy(&u, g->r->base + v->at + i * bytes, (size_t)bytes);
    *out = kind == 'i' ? (int64_t)(u << spare) >> spare : (int64_t)MIN(u, (uint64_t)INT64_MAX);
    return true;
}

// A whole number in low .. high; `missing` if the file has no such key. Where the value is a list,
// its element `layer`; a list is wrong where that is -1.
#define NEEDED INT64_MIN // as `missing`: the key must be there
static int64_t gguf_layer_int(const Gguf *g, const char *key, int layer, int64_t low, int64_t high,
                              int64_t missing) {
    const GgufValue *v = gguf_find(g, key);
    int64_t n;
    if (!v && missing == NEEDED) die("%s: key %.*s%s is missing", g->r->name, SHOWN(g->arch), key);
    if (!v) return missing;
    uint64_t i = v->array ? (uint64_t)layer : 0;
    if (i >= v->count && layer >= 0)
        gguf_die(g, v, "%" PRIu64 " numbers, expected one a layer", v->count);
    if (i >= v->count || !gguf_element(g, v, i, &n)) gguf_wrong(g, key, false, "a whole number");
    if (n < low || n > high)
        gguf_die(g, v, "%" PRId64 ", expected %" PRId64 " to %" PRId64, n, low, high);
    return n;
}

static int64_t gguf_int(const Gguf *g, const char *key, int64_t low, int64_t high, int64_t none) {
    return gguf_layer_int(g, key, -1, low, high, none);
}

// A finite number, at least 0 or above it.
enum { FROM_0, ABOVE_0 };
static double gguf_number(const Gguf *g, const char *key, int above, double missing) {
    const GgufValue *v = gguf_typed(g, key, GGUF_F32, false);
    double x = v ? (double)f32_at(g->r->base + v->at) : missing;
    if (!(x >= (above ? DBL_MIN : 0) && x < 1e30))
        gguf_die(g, v, "%g, expected a number %s", x, above ? "above 0" : "from 0 on");
    return x;
}

// Puts the reader at the first element; gives their count, 0 if the key is missing.
static uint64_t gguf_array(const Gguf *g, const char *key, uint32_t type, Reader *out) {
    const GgufValue *v = gguf_typed(g, key, type, true);
    if (v) out->at = v->at;
    return v ? v->count : 0;
}

static Span gguf_string(const Gguf *g, const char *key) { // empty if missing
    const GgufValue *v = gguf_typed(g, key, GGUF_STRING, false);
    Reader r = *g->r;
    if (v) r.at = v->at;
    return v ? rd_string(&r) : SPAN("");
}

// Checks and sizes one row of the tensor table; where its bytes lie is checked when all are known.
static void gguf_tensor_info(Gguf *g, int i) {
    Reader *r = g->r;
    GgufTensor *t = &g->tensors[i];
    size_t at = r->at;
    Span name = g->names[i] = rd_string(r);
    uint32_t n_dims = (uint32_t)rd_uint(r, 4);
    for (uint32_t d = 0; d < 4; d++) t->dims[d] = d < n_dims ? rd_uint(r, 8) : 1;
    t->type = (uint32_t)rd_uint(r, 4), t->offset = rd_uint(r, 8);
    rd_check(r);
    if (n_dims < 1 || n_dims > 4)
        rd_die(r, at, "tensor %.*s: %u dimensions, expected 1 to 4", SHOWN(name), n_dims);
    if (map_add(&g->name_map, g->names, (uint32_t)i) != i)
        rd_die(r, at, "tensor %.*s stands twice", SHOWN(name));
    uint64_t count = 1, most = 8 * (uint64_t)r->size; // weights: no type takes under a bit
    for (int d = 0; d < 4; d++) {
        if (t->dims[d] < 1 || t->dims[d] > most / count)
            rd_die(r, at, "tensor %.*s: dimension %d is %" PRIu64 ", expected 1 to what %zu bytes "
                   "hold", SHOWN(name), d, t->dims[d], r->size);
        count *= t->dims[d];
    }
    const Format *f = t->format = t->type < 1000 ? format_of(t->type) : NULL; // more: our own ids
    if (!f) return;                     // an unknown type is refused where the tensor is used
    if (t->dims[0] % (uint64_t)f->block)
        rd_die(r, at, "tensor %.*s: rows of %" PRIu64 ", expected a multiple of %d for %s",
               SHOWN(name), t->dims[0], f->block, f->name);
    t->bytes = count / (uint64_t)f->block * (uint64_t)f->bytes;
}

static void gguf_tensors(Gguf *g, uint64_t n) {
    Reader *r = g->r;
    if (n > MAX_TENSORS || n > (r->size - r->at) / 32)
        rd_die(r, 8, "%" PRIu64 " tensors, more than the file can hold", n);
    g->n_tensors = (int)n;
    g->names = xalloc((size_t)n, sizeof *g->names);
    g->tensors = xalloc((size_t)n, sizeof *g->tensors);
    g->name_map = map_new((size_t)n);
    for (int i = 0; i < g->n_tensors; i++) gguf_tensor_info(g, i);
    uint64_t data = (r->at + g->alignment - 1) & ~(g->alignment - 1), room = r->size - data;
    if (n && data > r->size) rd_die(r, r->size, "the file ends before its tensor data");
    for (int i = 0; i < g->n_tensors; i++) {
        GgufTensor *t = &g->tensors[i];
        if (t->offset > room || t->bytes > room - t->offset)
            rd_die(r, data, "tensor %.*s: %" PRIu64 " bytes at offset %" PRIu64 ", but the data "
                   "has %" PRIu64 " (is the file cut short?)", SHOWN(g->names[i]), t->bytes,
                   t->offset, room);
        t->r = r, t->at = (size_t)(data + t->offset);
    }
}

static Gguf *gguf_read(Reader *r) {
    Gguf *g = xalloc(1, sizeof *g);
    g->r = r;
    if (rd_uint(r, 4) != 0x46554747) rd_die(r, 0, "not a GGUF file"); // "GGUF"
    uint32_t version = (uint32_t)rd_uint(r, 4);
    uint64_t n_tensors = rd_uint(r, 8), n_keys = rd_uint(r, 8);
    rd_check(r);
    if (version != 2 && version != 3)
        rd_die(r, 4, "GGUF version %u, expected 2 or 3, little-endian", version);
    gguf_pairs(g, n_keys);
    g->arch = gguf_string(g, "general.architecture");
    g->alignment = (uint64_t)gguf_int(g, "general.alignment", 1, 1 << 20, 32);
    if (g->alignment & (g->alignment - 1))
        gguf_wrong(g, "general.alignment", false, "a power of two");
    gguf_tensors(g, n_tensors);
    return g;
}

// A large model may lie in several files, NAME-00001-of-00003.gguf and so on. The keys of the first
// one count; tensors are looked for in all.
static void gguf_join(Gguf *g) {
    int count = gguf_int(g, "split.count", 0, 99999, 0);
    int no = gguf_int(g, "split.no", 0, 99999, 0);
    if (count < 2) return;
    const char *name = g->r->name;
    char end[32];
    snprintf(end, sizeof end, "-00001-of-%05d.gguf", count);
    size_t stem = strlen(name) - MIN(strlen(name), strlen(end));
    if (no || strcmp(name + stem, end))
        die("%s: part %d of %d: give the first part, by a name ending in %s", name, no + 1, count,
            end);
    for (int i = 1; i < count; i++) {
        Str path = {0};                 // kept: messages name the file
        str_add(&path, name, stem);
        str_printf(&path, "-%05d-of-%05d.gguf", i + 1, count);
        Reader *r = xalloc(1, sizeof *r);
        *r = file_map(path.p);
        Gguf *part = gguf_read(r);
        if (gguf_int(part, "split.no", 0, 99999, -1) != i
            || gguf_int(part, "split.count", 0, 99999, 0) != count)
            die("%s: not part %d of %d", path.p, i + 1, count);
        part->next = g->next, g->next = part;
    }
}

// ---- GGUF: from names to a model
static GgufTensor *gguf_tensor_find(const Gguf *g, const char *name) {
    for (; g; g = g->next) {
        int64_t i = map_find(&g->name_map, g->names, (Span){name, strlen(name)});
        if (i >= 0) return &g->tensors[i];
    }
    return NULL;
}

// As (rows, cols): rows go through all dimensions but the first. One row or column takes in all.
// False if there is none, which is an error unless it is optional.
static bool gguf_tensor(const Gguf *g, const char *name, int64_t rows, int64_t cols, bool optional,
                        Tensor *out) {
    GgufTensor *t = gguf_tensor_find(g, name);
    int64_t wide = cols == 1 ? rows : cols, high = cols == 1 ? 1 : rows; // as the file says it
    if (!t && !optional)
        die("%s: tensor %s is missing, expected (%" PRId64 ", %" PRId64 ")", g->r->name, name, wide,
            high);
    if (!t) return false;
    t->used = true;
    const Format *f = t->format;
    if (!f)
        rd_die(t->r, t->at, "tensor %s has weight type %u, which is not known here", name, t->type);
    uint64_t far = t->dims[1] * t->dims[2] * t->dims[3]; // each bounded: see gguf_tensor_info
    if (t->dims[0] * far != (uint64_t)(rows * cols) || (high > 1 && t->dims[0] != (uint64_t)wide))
        rd_die(t->r, t->at, "tensor %s is (%" PRIu64 ", %" PRIu64 ", %" PRIu64 "), expected (%"
               PRId64 ", %" PRId64 ")", name, t->dims[0], t->dims[1], t->dims[2] * t->dims[3],
               wide, high);
    if (cols % f->block) die("%s: %s in blocks", g->r->name, name);
    *out = (Tensor){.format = f, .data = t->r->base + t->at, .rows = rows, .cols = cols,
                    .stride = (size_t)(cols / f->block) * (size_t)f->bytes};
    return true;
}

// Mechanisms that no row of archs[] has: a file that asks for one is refused, not run without.
static void gguf_foreign(const Gguf *g) {
    static const struct { const char *key; int low, high; } keys[] = {
        {".expert_group_count", 0, 1}, {".leading_dense_block_count", 0, 0},
        {".nextn_predict_layers", 0, 0}, {".attention.causal", 1, 1},
        {".use_parallel_residual", 0, 0},
    };
    for (int i = 0; i < COUNT(keys); i++)
        gguf_int(g, keys[i].key, keys[i].low, keys[i].high, keys[i].low);
    if (gguf_int(g, ".expert_gating_func", 0, 3, 1) == 2)
        gguf_wrong(g, ".expert_gating_func", false, "softmax (1 or 3), not sigmoid");
    double scale = gguf_number(g, ".expert_weights_scale", FROM_0, 1);
    if ((scale && scale != 1) || gguf_number(g, ".attention.clamp_kqv", FROM_0, 0))
        die("%s: scaled expert weights or clamped queries, which are not known here", g->r->name);
}

// The sizes, for layers that are alike, then multipliers and caps.
static void gguf_config(Model *m, const Gguf *g) {
    Config *c = &m->config;
    gguf_foreign(g);
    const Arch *a = c->arch;
    c->dim = gguf_int(g, ".embedding_length", 1, MAX_DIM, NEEDED);
    c->n_layers = gguf_int(g, ".block_count", 1, MAX_LAYERS, NEEDED);
    c->seq_len = (int)MIN(gguf_int(g, ".context_length", 1, INT64_MAX, NEEDED), MAX_POSITIONS);
    c->norm_eps = gguf_number(g, ".attention.layer_norm_rms_epsilon", ABOVE_0, 1e-5);
    c->n_heads = gguf_layer_int(g, ".attention.head_count", 0, 1, c->dim, NEEDED);
    c->head_size = gguf_int(g, ".attention.key_length", 1, 1 << 14, c->dim / c->n_heads);
    gguf_int(g, ".attention.value_length", c->head_size, c->head_size, 0); // the same here
    c->n_experts = gguf_int(g, ".expert_count", 0, MAX_EXPERTS, 0);
    if (c->n_experts) { // the keys of these widths are missing in some files: the tensors say them
        c->n_used = gguf_int(g, ".expert_used_count", 1, c->n_experts, NEEDED);
        const GgufTensor *expert = gguf_tensor_find(g, "blk.0.ffn_down_exps.weight"),
                         *shared = gguf_tensor_find(g, "blk.0.ffn_down_shexp.weight");
        c->expert_dim = expert ? MIN(expert->dims[0], MAX_DIM) : 1;
        c->hidden_dim = shared ? MIN(shared->dims[0], MAX_DIM) : 0;
        bool sum_1 = a->flags & WEIGHTS_SUM_1;
        c->weights_sum_1 = gguf_int(g, ".expert_weights_norm", 0, 1, sum_1);
    }
    double embed = a->flags & EMBED_SCALED ? sqrt((double)c->dim) : 1;
    c->embed_scale = gguf_number(g, ".embedding_scale", ABOVE_0, embed);
    c->residual_scale = gguf_number(g, ".residual_scale", ABOVE_0, 1);
    c->logit_divisor = gguf_number(g, ".logit_scale", ABOVE_0, 1);
    c->score_cap = gguf_number(g, ".attn_logit_softcapping", FROM_0, (double)a->score_cap);
    c->logit_cap = gguf_number(g, ".final_logit_softcapping", FROM_0, (double)a->logit_cap);
    c->heat = gguf_number(g, ".attention.temperature_scale", FROM_0, 0);
    c->short_len = gguf_int(g, ".rope.scaling.original_context_length", 1, INT_MAX, c->seq_len);
}

// Heads, width, window and rope of layer i.
static void gguf_layer(Model *m, const Gguf *g, int i) {
    const Config *c = &m->config;
    const Arch *a = c->arch;
    Layer *l = &m->layers[i];
    l->n_heads = gguf_layer_int(g, ".attention.head_count", i, 1, c->dim, NEEDED);
    l->n_kv_heads = gguf_layer_int(g, ".attention.head_count_kv", i, 1, l->n_heads, l->n_heads);
    if (l->n_heads % l->n_kv_heads || (int64_t)l->n_heads * l->head_size > MAX_DIM)
        die("%s: layer %d: %d heads of %d, %d for keys, expected a divisor and at most %d in all",
            g->r->name, i, l->n_heads, l->head_size, l->n_kv_heads, MAX_DIM);
    if (!l->n_experts)
        l->hidden_dim = gguf_layer_int(g, ".feed_forward_length", i, 1, MAX_DIM, NEEDED);
    bool own = a->layers_own_scale == c->n_layers; // Gemma's 27B models
    double size = own ? (double)c->dim / l->n_heads : (double)l->head_size;
    l->score_scale = gguf_number(g, ".attention.scale", ABOVE_0, 1 / sqrt(size));

    // a list says of each layer whether it has the window; a number is the period
    const char *key = ".attention.sliding_window_pattern";
    const GgufValue *pattern = gguf_find(g, key);
    int64_t n = gguf_layer_int(g, key, i, 0, INT_MAX, a->period);
    bool slides = pattern && pattern->array ? n > 0 : !n || i % n < n - 1;
    if (slides) l->window = gguf_int(g, ".attention.sliding_window", 0, INT_MAX, a->window);
    l->rope = l->window && a->flags & WINDOW_ROPE ? ROPE_WINDOW : ROPE_FULL;
    bool none = a->flags & ROPE_SWITCH && !gguf_int(g, ".rope.scaling.finetuned", 0, 1, 1);
    if (none || (a->no_rope && (i + 1) % a->no_rope == 0)) l->rope = -1;
}

// YaRN: slow pairs turn `factor` times slower, fast ones as ever, those between in between.
static void rope_yarn(Rope *r, const Gguf *g, double base, double factor, const Config *c) {
    bool exact = c->arch->flags & YARN_EXACT;
    double fast = gguf_number(g, ".rope.scaling.yarn_beta_fast", ABOVE_0, 32), ends[2];
    double slow = gguf_number(g, ".rope.scaling.yarn_beta_slow", ABOVE_0, 1);
    double damp = gguf_number(g, ".rope.scaling.yarn_log_multiplier", FROM_0, 0);
    for (int i = 0; i < 2; i++) { // the pair that turns so often in the original context
        double turns = i ? slow : fast;
        ends[i] = r->n_rot * log(c->short_len / (2 * acos(-1) * turns)) / (2 * log(base));
    }
    double low = MAX(0, exact ? ends[0] : floor(ends[0]));
    double high = MIN(r->n_rot - 1, exact ? ends[1] : ceil(ends[1]));
    for (int i = 0; i < r->n_rot / 2; i++) {
        double ramp = MAX(0, MIN(1, (i - low) / MAX(0.001, high - low)));
        r->inv_freq[i] *= 1 - ramp + ramp / factor;
    }
    double grow = 0.1 * log(factor);
    grow = factor > 1 ? (grow + 1) / (damp * grow + 1) : 1;
    r->scale = gguf_number(g, ".rope.scaling.yarn_attn_factor", ABOVE_0, grow);
}

// The angles divided by a tensor, one divisor of at least `least` a pair; NULL if there is none.
static double *rope_divided(const Gguf *g, const char *name, float least, const Rope *r) {
    Tensor t;
    if (!gguf_tensor(g, name, 1, r->n_rot / 2, true, &t)) return NULL;
    float *divisor = vector_copy(&t);
    double *inv = xalloc((size_t)t.cols, sizeof *inv);
    for (int i = 0; i < t.cols; i++) {
        if (!(divisor[i] >= least && divisor[i] < 1e31f))
            die("%s: tensor %s: element %d is %g, expected %g or more", g->r->name, name, i,
                (double)divisor[i], (double)least);
        inv[i] = r->inv_freq[i] / (double)divisor[i];
    }
    free(divisor);
    return inv;
}

static void gguf_ropes(Model *m, const Gguf *g) {
    Config *c = &m->config;
    Rope *r = &c->rope[ROPE_FULL];
    int n_rot = gguf_int(g, ".rope.dimension_count", 2, c->head_size, c->head_size);
    if (n_rot % 2) die("%s: heads of %d (rope %d), expected even", g->r->name, c->head_size, n_rot);
    double own_base = (double)c->arch->base;
    double base = gguf_number(g, ".rope.freq_base", ABOVE_0, own_base ? own_base : 10000);
    double factor = gguf_number(g, ".rope.scaling.factor", FROM_0, 0);
    if (!factor) factor = gguf_number(g, ".rope.scale_linear", ABOVE_0, 1); // the old name
    Span type = gguf_string(g, ".rope.scaling.type");
    bool yarn = span_is(type, "yarn"), linear = !type.n || span_is(type, "linear");
    if (!yarn && !linear && !span_is(type, "none") && !span_is(type, "longrope"))
        gguf_wrong(g, ".rope.scaling.type", false, "none, linear, yarn or longrope");
    rope_init(r, n_rot, base, linear ? factor : 1);
    if (yarn) rope_yarn(r, g, base, factor, c);
    r->scale *= gguf_number(g, ".rope.scaling.attn_factor", ABOVE_0, 1);
    if (c->arch->flags & WINDOW_ROPE) // Gemma 3's window layers have a base of their own
        rope_init(&c->rope[ROPE_WINDOW], n_rot,
                  gguf_number(g, ".rope.freq_base_swa", ABOVE_0, own_base ? 10000 : base), 1);
    // Llama 3.1's scaling comes as divisors of 1 and more (old files that hold frequencies under
    // this name are refused); longrope's as two sets, for short and for long contexts.
    double *inv = rope_divided(g, "rope_freqs.weight", 1, r);
    r->inv_long = rope_divided(g, "rope_factors_long.weight", FLT_MIN, r);
    if (!r->inv_long && span_is(type, "longrope"))
        gguf_wrong(g, ".rope.scaling.type", false, "its factors as tensors");
    if (!inv) inv = rope_divided(g, "rope_factors_short.weight", FLT_MIN, r);
    if (inv) free(r->inv_freq), r->inv_freq = inv;
}

// What a file holds beyond the parts known here may matter: fluent and wrong is worse than warned.
static void gguf_unused(Model *m, const Gguf *g) {
    int count = 0;
    Span first = {0};
    for (; g; g = g->next)
        for (int i = 0; i < g->n_tensors; i++)
            if (!g->tensors[i].used && !count++) first = g->names[i];
    if (count)
        str_printf(&m->warnings, "%s: %d tensors are not used, %.*s the first\n", m->file.name,
                   count, SHOWN(first));
}

// Part p of layer n, or its bias, as a column; where several parts are one tensor, its share.
static bool gguf_part(const Model *m, const Gguf *g, int n, const Part *p, bool bias, Tensor *out) {
    const Layer *l = &m->layers[n];
    const char *suffix = bias ? "bias" : "weight";
    int64_t rows = part_size(m, l, p->rows), cols = bias ? 1 : part_size(m, l, p->cols);
    int64_t all = 0, before = 0;
    char name[64], fused[64];
    snprintf(name, sizeof name, "blk.%d.%s.%s", n, p->name, suffix);
    const GgufTensor *own = gguf_tensor_find(g, name);
    if (p->fused && (!own || (int64_t)own->dims[bias ? 0 : 1] != rows)) {
        snprintf(fused, sizeof fused, "blk.%d.%s.%s", n, p->fused, suffix);
        for (const Part *q = parts; q < parts + COUNT(parts); q++) {
            if (!q->fused || strcmp(q->fused, p->fused)) continue;
            all += part_size(m, l, q->rows);
            if (q < p) before = all;
        }
        if (gguf_tensor(g, fused, all, cols, true, out)) {
            out->data += (size_t)before * out->stride;
            out->rows = rows;
            return true;
        }
    }
    return gguf_tensor(g, name, rows, cols, bias, out);
}

static void gguf_weights(Model *m, const Gguf *g) {
    Config *c = &m->config;
    Tensor t, bias;
    const GgufTensor *embedding = gguf_tensor_find(g, "token_embd.weight");
    c->vocab_size = embedding ? (int)MIN(embedding->dims[1], MAX_VOCAB) : 1;
    gguf_tensor(g, "token_embd.weight", c->vocab_size, c->dim, false, &m->embedding);
    if (!gguf_tensor(g, "output.weight", c->vocab_size, c->dim, true, &m->output))
        m->output = m->embedding;
    gguf_tensor(g, "output_norm.weight", 1, c->dim, false, &t);
    m->output_norm = vector_copy(&t);
    layers_init(m);
    gguf_ropes(m, g);
    for (int n = 0; n < c->n_layers; n++) {
        Layer *l = &m->layers[n];
        gguf_layer(m, g, n);
        for (const Part *p = parts; p < parts + COUNT(parts); p++) {
            if (!part_exists(m, l, p)) continue;
            gguf_part(m, g, n, p, false, &t);
            bool biased = p->rows != NO_DIM && gguf_part(m, g, n, p, true, &bias);
            if (biased) t.bias = vector_copy(&bias);
            part_set(m, l, p, &t);
        }
    }
}

// ---- opening either kind
enum { NEED_VOCAB = 1, NEED_WEIGHTS = 2 };

static void vocab_from_bin(Vocab *v, Reader *r, int vocab_size); // chapter 8
static void vocab_from_gguf(Vocab *v, const Gguf *g, Str *warnings);

// The vocabulary of a .bin: FILE of -z, or STEM.tokenizer.bin or tokenizer.bin beside the model, or
// tokenizer.bin in the working folder; the first that exists counts.
static void bin_vocab(Model *m, const char *path) {
    const char *model = m->file.name, *slash = strrchr(model, '/'), *dot = strrchr(model, '.');
    size_t folder = slash ? (size_t)(slash + 1 - model) : 0;
    size_t stem = dot && dot >= model + folder ? (size_t)(dot - model) : strlen(model);
    const size_t before[] = {stem, folder, 0};
    Str beside = {0};
    for (int i = 0; !path && i < COUNT(before); i++) {
        beside.n = 0;
        str_add(&beside, model, before[i]);
        str_printf(&beside, "%stokenizer.bin", i ? "" : ".");
        if (file_exists(beside.p)) path = beside.p;
    }
    if (!path)
        die("%s: no vocabulary: neither %.*s.tokenizer.bin nor tokenizer.bin beside it or here (-z "
            "FILE)", model, (int)stem, model);
    Reader r = file_map(path);
    vocab_from_bin(&m->vocab, &r, m->config.vocab_size);
    str_free(&beside);
}

static void gguf_open(Model *m, int need) {
    const Gguf *g = m->gguf = gguf_read(&m->file);
    m->version = m->file.base[4];
    m->chat_template = gguf_string(g, "tokenizer.chat_template");
    Span kind = gguf_string(g, "tokenizer.ggml.model");
    bool known = span_is(kind, "llama") || span_is(kind, "gpt2") || span_is(kind, "gemma4");
    if (need & NEED_VOCAB || (!need && known)) vocab_from_gguf(&m->vocab, g, &m->warnings);
    if (need == NEED_VOCAB) return;
    gguf_join(m->gguf);
    if (!need) return;
    if (!g->n_tensors && !g->next) die("%s: a vocabulary without a model", m->file.name);
    Str list = {0};
    for (int i = 0; i < COUNT(archs); i++) {
        str_printf(&list, " %s", archs[i].name);
        if (span_is(g->arch, archs[i].name)) m->config.arch = &archs[i];
    }
    if (!m->config.arch)
        die("%s: architecture `%.*s`, expected one of:%s", m->file.name, SHOWN(g->arch), list.p);
    str_free(&list);
    gguf_config(m, g);
    gguf_weights(m, g);
    gguf_unused(m, g);
    if (need & NEED_VOCAB && m->vocab.size > m->config.vocab_size)
        die("%s: %d tokens, but the embedding has %d rows", m->file.name, m->vocab.size,
            m->config.vocab_size);
}

// Opens a mapped model file; `need` says what has to be there, 0: read what is there.
static void model_open(Model *m, Reader file, const char *tokenizer, int need) {
    m->file = file;
    if (file.size >= 4 && !memcmp(file.base, "GGUF", 4)) gguf_open(m, need);
    else {
        bin_open(m);
        if (need & NEED_VOCAB) bin_vocab(m, tokenizer);
    }
    if (m->layers) matrix_count(m, &m->output, false);
}
/* ------------------------------------------------------------------------------------------------
 * Chapter 6. One forward pass
 *
 * n rows in, one path: decoding is n = 1, a prompt is read n = chunk rows at a time, scoring asks
 * for the logits of every row. All threads of the team walk the same code: a step hands out tickets
 * (rows of activations, rows of a matrix, heads) and ends when all are done. What a row computes
 * depends on its token, its position and the cache, never on its company: no sum is split over
 * tickets, and each output element is one fixed sequence of operations (chapter 3). So chunk and
 * thread count change the time, not one bit of the text. The price is that threads meet eight times
 * a layer. Nothing is allocated here: a session sizes everything when it starts.
 */
typedef struct { int token, pos; } Row; // one position of one sequence

enum { WANT_NONE, WANT_LAST, WANT_ALL }; // which rows' logits somebody will read

typedef struct {
    const Model *model;
    Team team;
    Worker worker[MAX_THREADS];
    int seq_len;                        // positions the cache has room for
    int chunk;                          // most rows of one pass
    bool half;                          // cache in half precision
    uint8_t *cache;                     // by slot: keys, then values; see kv_keys
    size_t slot_bytes;
    int *tokens;                        // what the cache holds, (seq_len)
    int n_tokens;
    int64_t fed;                        // rows read so far, for the statistics
    Row *rows;                          // (chunk)
    float *x;                           // residual stream, (chunk, dim)
    float *branch;                      // what a block adds to it, (chunk, dim)
    float *q, *k, *v;                   // (chunk, heads * head_size), widest layer
    float *h1, *h3;                     // gate and up, (chunk, hidden_dim); of experts: (pairs,
                                        // expert_dim), a pair being a row and an expert it uses
    float *turn;                        // cos and sin of this pass, (ropes, chunk, n_rot / 2, 2)
    float *route;                       // router logits, (chunk, n_experts)
    float *share;                       // weights of a row's experts, (chunk, n_used)
    int *chosen;                        // its experts, (chunk, n_used)
    int *place;                         // where each pair stands in order of experts, (pairs)
    int n_in_use;                       // experts that have pairs
    Tensor *expert;                     // their gate, up and down matrices, (n_in_use, 3)
    Product *product;                   // gate and up, (n_in_use, 2); down from 2 n_experts on
    float *expert_out;                  // what the experts give, (pairs, dim)
    float *logits;                      // (logit_rows, vocab_size)
    int logit_rows;
    uint8_t *acts;                      // activations in front of a matrix, chapter 3
    uint8_t *pair_acts;                 // the same for all pairs, or for the hidden of dense rows
    float *scores;                      // per worker, (QUERY_TILE, seq_len rounded up to blocks)
    uint8_t *memory;                    // all of these but the cache lie in here
    float *trace; // tests only: residual after each layer, (layers, chunk, dim)
} Session;

typedef struct {
    Session *s;
    int n;                              // rows
    int first;                          // the rows before it end with their keys and values
} Pass;

// ---- the cache: in a slot first the keys of all kv heads, (kv head, block, head_size, 8
// positions), then the values, (kv head, position, head_size)
static int64_t kv_room(const Session *s) { return ((int64_t)s->seq_len + 7) / 8 * 8; }

static uint8_t *kv_keys(const Session *s, const Layer *l, int head) {
    return s->cache + s->slot_bytes * (size_t)l->slot
           + (size_t)head * (size_t)kv_room(s) * (size_t)l->head_size * (s->half ? 2 : 4);
}

static uint8_t *kv_values(const Session *s, const Layer *l, int head) {
    return kv_keys(s, l, l->n_kv_heads + head);
}

static void kv_store(const Session *s, const Layer *l, int head, int pos, const float *k,
                     const float *v) {
    const int64_t d = l->head_size, size = s->half ? 2 : 4;
    uint8_t *key = kv_keys(s, l, head) + (pos / 8 * d * 8 + pos % 8) * size;
    uint8_t *value = kv_values(s, l, head) + pos * d * size;
    if (s->half) {
        uint16_t *narrowed = (uint16_t *)(void *)value; // first the key, then what belongs there
        vec_ops[s->team.isa].narrow(k, d, narrowed);
        for (int64_t i = 0; i < d; i++) memcpy(key + 16 * i, narrowed + i, 2);
        vec_ops[s->team.isa].narrow(v, d, narrowed);
    } else {
        for (int64_t i = 0; i < d; i++) memcpy(key + 32 * i, k + i, 4);
        memcpy(value, v, 4 * (size_t)d);
    }
}

// Bytes of cache that one position takes.
static int64_t cache_bytes_per_token(const Model *m, bool half) {
    int64_t bytes = 0;
    for (int i = 0; i < m->config.n_layers; i++)
        bytes += 2LL * m->layers[i].n_kv_heads * m->layers[i].head_size * (half ? 2 : 4);
    return bytes;
}

// ---- rows
static void row_add(float *x, const float *bias, int64_t from, int n) { // bias[from ...] or none
    for (int i = 0; bias && i < n; i++) x[i] += bias[from + i];
}

// RMSNorm: y = x / sqrt(mean x^2 + eps) * weight. No weight: y = x
static void row_norm(const Session *s, float *y, const float *x, const float *weight, int n) {
    float sum = weight ? vec_ops[s->team.isa].sum_squares(x, n) : 0;
    float scale = 1.0f / sqrtf(sum / (float)n + s->model->config.norm_eps);
    for (int i = 0; i < n; i++) y[i] = weight ? x[i] * scale * weight[i] : x[i];
}

// x = c tanh(x / c), as c (1 - 2 / (exp(2 x / c) + 1))
static void row_cap(const Session *s, float *x, int64_t from, int64_t to, float c) {
    if (!c) return;
    for (int64_t i = from; i < to; i++) x[i] = 2 * x[i] / c;
    vec_ops[s->team.isa].exps(x, from, to, 0);
    for (int64_t i = from; i < to; i++) x[i] = c * (1 - 2 / (x[i] + 1));
}

// Elements from .. to - 1 of a row of h = act(gate) * up; their biases begin at bias_from. Every
// activation here is gate * sigmoid(z) with its own z.
static void row_gate(const Session *s, const Acts *h, int64_t row, int64_t from, int64_t to,
                     const float *gate_bias, const float *up_bias, int64_t bias_from) {
    int flags = s->model->config.arch->flags, n = (int)(to - from);
    float *gate = s->h1 + row * h->cols + from, *up = s->h3 + row * h->cols + from;
    float *out = h->x + row * h->ldx + from;
    row_add(gate, gate_bias, bias_from, n);
    row_add(up, up_bias, bias_from, n);
    for (int i = 0; flags & CLAMPED && i < n; i++) {
        gate[i] = MIN(gate[i], 7.0f);
        up[i] = 1 + MAX(-7.0f, MIN(up[i], 7.0f));
    }
    for (int i = 0; i < n; i++) {
        float g = gate[i], z = flags & CLAMPED ? 1.702f * g : g;
        if (flags & GELU) z = 1.59576912f * (g + 0.044715f * g * g * g); // 2 sqrt(2 / pi) (...)
        out[i] = -z;
    }
    vec_ops[s->team.isa].exps(out, 0, n, 0);
    for (int i = 0; i < n; i++) out[i] = gate[i] / (1.0f + out[i]) * up[i];
    acts_quantise(s->team.isa, h, (int)row, from, to);
}

// Between two blocks: what the last one gave joins the stream, x += scale * norm(branch + bias),
// and the next matrices read the norm of that. Row j of branch and activations is row first + j.
static void rows_join(const Pass *p, Worker *w, const float *bias, const float *post,
                      const float *next, Acts *a, float *trace) {
    Session *s = p->s;
    const Config *c = &s->model->config;
    for (long j; team_next(w->team, p->n - p->first, &j);) {
        float *x = s->x + (p->first + j) * c->dim, *branch = s->branch + j * c->dim;
        row_add(branch, bias, 0, c->dim);
        if (post) row_norm(s, branch, branch, post, c->dim);
        for (int k = 0; k < c->dim; k++) x[k] += c->residual_scale * branch[k];
        if (trace) memcpy(trace + (p->first + j) * c->dim, x, sizeof *x * (size_t)c->dim);
        row_norm(s, a->x + j * a->ldx, x, next, c->dim);
        acts_quantise(s->team.isa, a, (int)j, 0, c->dim);
    }
}

static float *rope_turn(const Session *s, int table, int row) { // (n_rot / 2, 2)
    return s->turn + ((int64_t)table * s->chunk + row) * s->model->config.rope[table].n_rot;
}

// Angles are formed in double: in float they would be off by 1e-4 at position 4,096.
static void rope_angles(const Session *s, int row) {
    for (int t = 0; t < N_ROPES; t++) {
        const Rope *r = &s->model->config.rope[t];
        bool far = r->inv_long && s->seq_len > s->model->config.short_len;
        const double *inv = far ? r->inv_long : r->inv_freq;
        float *turn = rope_turn(s, t, row);
        for (int i = 0; i < r->n_rot / 2; i++) {
            double angle = s->rows[row].pos * inv[i];
            turn[2 * i] = (float)cos(angle) * r->scale;
            turn[2 * i + 1] = (float)sin(angle) * r->scale;
        }
    }
}

static void rope_apply(const Session *s, const Layer *l, float *heads, int n, int row) {
    if (l->rope < 0) return;
    const float *turn = rope_turn(s, l->rope, row);
    int half = s->model->config.rope[l->rope].n_rot / 2;
    bool pairs = !(s->model->config.arch->flags & TURN_HALVES);
    for (float *h = heads; h < heads + (int64_t)n * l->head_size; h += l->head_size)
        for (int i = 0; i < half; i++) {
            float *a = pairs ? h + 2 * i : h + i, *b = pairs ? a + 1 : a + half;
            float cosine = turn[2 * i], sine = turn[2 * i + 1], x = *a, y = *b;
            *a = x * cosine + y * -sine; // x c - y s would be fused by gcc -O3 -mfma
            *b = x * sine + y * cosine;
        }
}

// ---- attention
// Queries and keys fresh from their matrices, those of kv head h: biases, norms, rope, temperature,
// store. Where the norm goes over all heads, h is 0 and stands for all.
static void attention_prepare(const Session *s, const Layer *l, int row, int h, int kv_heads) {
    const Config *c = &s->model->config;
    int d = l->head_size, group = l->n_heads / l->n_kv_heads, pos = s->rows[row].pos;
    int q_dim = kv_heads * group * d, kv_dim = kv_heads * d, q_at = h * group * d, kv_at = h * d;
    float *q = s->q + (int64_t)row * l->n_heads * d + q_at;
    float *k = s->k + (int64_t)row * l->n_kv_heads * d + kv_at;
    float *v = s->v + (int64_t)row * l->n_kv_heads * d + kv_at;
    row_add(q, l->wq.bias, q_at, q_dim);
    row_add(k, l->wk.bias, kv_at, kv_dim);
    row_add(v, l->wv.bias, kv_at, kv_dim);
    bool wide = c->arch->flags & NORM_QK_WIDE;
    for (int i = 0; l->q_norm && i < q_dim; i += wide ? q_dim : d)
        row_norm(s, q + i, q + i, l->q_norm, wide ? q_dim : d);
    for (int i = 0; l->k_norm && i < kv_dim; i += wide ? kv_dim : d)
        row_norm(s, k + i, k + i, l->k_norm, wide ? kv_dim : d);
    rope_apply(s, l, q, kv_heads * group, row);
    rope_apply(s, l, k, kv_heads, row);
    float heat = c->heat ? (float)(1 + (double)c->heat * log(1 + pos / c->short_len)) : 1;
    for (int i = 0; c->heat && i < q_dim; i++) q[i] *= heat;
    for (int i = 0; i < kv_heads; i++) kv_store(s, l, h + i, pos, k + i * d, v + i * d);
}

// One tile: up to QUERY_TILE queries of one kv head, query t being head t % group of row first +
// t / group.
// Scores of a query are all there before its softmax, so no result hangs on how rows were tiled.
static void attention_tile(const Pass *p, Worker *w, const Layer *l, Acts *a, int kv_head,
                           int tile) {
    Session *s = p->s;
    const VecOps *ops = &vec_ops[s->team.isa];
    int d = l->head_size, group = l->n_heads / l->n_kv_heads, first = tile * QUERY_TILE;
    int nq = MIN(QUERY_TILE, (p->n - p->first) * group - first);
    int64_t room = kv_room(s), from[QUERY_TILE], to[QUERY_TILE], lo = room, hi = 0;
    float *score[QUERY_TILE], *out[QUERY_TILE], z[QUERY_TILE];
    const float *q[QUERY_TILE], *e[QUERY_TILE];
    for (int t = 0; t < nq; t++) {
        int j = (first + t) / group, row = p->first + j,
            head = kv_head * group + (first + t) % group;
        q[t] = s->q + ((int64_t)row * l->n_heads + head) * d;
        out[t] = a->x + j * a->ldx + (int64_t)head * d;
        e[t] = score[t] = s->scores + ((int64_t)w->rank * QUERY_TILE + t) * room;
        to[t] = s->rows[row].pos + 1;
        from[t] = l->window && to[t] > l->window ? to[t] - l->window : 0;
        lo = MIN(lo, from[t]), hi = MAX(hi, to[t]);
    }
    ops->scores(s->half, q, nq, kv_keys(s, l, kv_head), d, lo / 8, (hi + 7) / 8, l->score_scale,
                score);
    int64_t all_from = 0, all_to = room;                // the range that every query sees
    for (int t = 0; t < nq; t++) {
        row_cap(s, score[t], from[t], to[t], s->model->config.score_cap);
        float max = ops->row_max(score[t], from[t], to[t]);
        float sink = l->sinks ? l->sinks[kv_head * group + (first + t) % group] : -INFINITY;
        max = MAX(max, sink);
        z[t] = ops->exps(score[t], from[t], to[t], max);
        if (l->sinks) z[t] += ops->exps(&sink, 0, 1, max);
        memset(out[t], 0, sizeof(float) * (size_t)d);
        all_from = MAX(all_from, from[t]), all_to = MIN(all_to, to[t]);
    }
    const void *values = kv_values(s, l, kv_head);
    if (all_from > all_to) all_from = all_to;           // windows that do not meet
    for (int t = 0; t < nq; t++)
        ops->mix(s->half, e + t, 1, values, d, from[t], MAX(from[t], all_from), out + t);
    ops->mix(s->half, e, nq, values, d, all_from, all_to, out);
    for (int t = 0; t < nq; t++) {
        ops->mix(s->half, e + t, 1, values, d, MAX(from[t], all_to), to[t], out + t);
        for (int i = 0; i < d; i++) out[t][i] /= z[t];
        int64_t row = (first + t) / group, at = out[t] - (a->x + row * a->ldx);
        if (d % 32 == 0) acts_quantise(s->team.isa, a, (int)row, at, at + d);
    }
}

// From the activations `a` of all rows to the branch of those from p->first on.
static void layer_attention(const Pass *p, Worker *w, const Layer *l, const Acts *a) {
    Session *s = p->s;
    int q_dim = l->n_heads * l->head_size, rows = p->n - p->first;
    Acts att = acts_at(s->acts, rows, q_dim);
    matmul(w, a, (Product[]){{&l->wq, s->q, 0, p->n}, {&l->wk, s->k, 0, p->n},
                             {&l->wv, s->v, 0, p->n}}, 3);
    int at_once = s->model->config.arch->flags & NORM_QK_WIDE ? l->n_kv_heads : 1;
    int pieces = l->n_kv_heads / at_once;
    for (long i; team_next(w->team, (long)p->n * pieces, &i);)
        attention_prepare(s, l, (int)i / pieces, (int)i % pieces, at_once);
    // the last tiles first: they see the most keys, and a long ticket at the end keeps all waiting
    int tiles = (rows * (l->n_heads / l->n_kv_heads) + QUERY_TILE - 1) / QUERY_TILE;
    for (long i; team_next(w->team, (long)tiles * l->n_kv_heads, &i);)
        attention_tile(p, w, l, &att, (int)(i % l->n_kv_heads),
                       tiles - 1 - (int)(i / l->n_kv_heads));
    if (l->head_size % 32)              // else attention_tile has done it
        for (long i; team_next(w->team, rows, &i);)
            acts_quantise(s->team.isa, &att, (int)i, 0, q_dim);
    matmul(w, &att, (Product[]){{&l->wo, s->branch, 0, rows}}, 1);
}

// ---- feed-forward: w2 (act(w1 h) * w3 h)
static void ffn_dense(const Pass *p, Worker *w, const Layer *l, const Acts *a) {
    Session *s = p->s;
    int hidden = l->hidden_dim, rows = p->n - p->first;
    int part = rows < w->team->n ? 512 : hidden, pieces = (hidden + part - 1) / part;
    Acts h = acts_at(s->pair_acts, rows, hidden);
    matmul(w, a, (Product[]){{&l->w1, s->h1, 0, rows}, {&l->w3, s->h3, 0, rows}}, 2);
    for (long i; team_next(w->team, (long)rows * pieces, &i);) {
        int64_t from = i % pieces * part, to = MIN(hidden, from + part);
        row_gate(s, &h, i / pieces, from, to, l->w1.bias, l->w3.bias, from);
    }
    matmul(w, &h, (Product[]){{&l->w2, s->branch, 0, rows}}, 1);
}

// Softmax over the router's logits; the n_used largest, the lower index among equals.
static void experts_choose(const Session *s, const Layer *l, int row) {
    const Config *c = &s->model->config;
    const VecOps *ops = &vec_ops[s->team.isa];
    int n = l->n_experts, *chosen = s->chosen + row * c->n_used;
    float *p = s->route + (int64_t)row * n, *share = s->share + row * c->n_used, sum = 0;
    row_add(p, l->router.bias, 0, n);
    float all = ops->exps(p, 0, n, ops->row_max(p, 0, n));
    for (int k = 0; k < c->n_used; k++) {
        int best = 0;
        for (int e = 1; e < n; e++) if (p[e] > p[best]) best = e;
        chosen[k] = best, share[k] = p[best], sum += p[best];
        p[best] = -1;                   // a NaN model may choose one twice, which is harmless
    }
    for (int k = 0; k < c->n_used; k++) share[k] /= c->weights_sum_1 ? sum : all;
}

// Pairs in order of their experts, so that an expert meets its rows as one batch; and the products
// of the experts in use, gate and up in one list, down in another.
static void experts_plan(Session *s, const Layer *l, int rows) {
    const Tensor *const whole[3] = {&l->e1, &l->e3, &l->e2};
    float *const y[3] = {s->h1, s->h3, s->expert_out};
    int pairs = rows * s->model->config.n_used, end = 0;
    s->n_in_use = 0;
    for (int e = 0; e < l->n_experts; e++) {
        int first = end, n = s->n_in_use;
        for (int i = 0; i < pairs; i++) if (s->chosen[i] == e) s->place[i] = end++;
        if (end == first) continue;
        for (int i = 0; i < 3; i++) {
            Tensor *t = &s->expert[3 * n + i];
            *t = *whole[i], t->rows /= l->n_experts;
            t->data += (size_t)(e * t->rows) * t->stride;
            s->product[i < 2 ? 2 * n + i : 2 * l->n_experts + n] =
                (Product){t, y[i] + first * t->rows, first, end - first};
        }
        s->n_in_use++;
    }
}

// Adds to the branch the sum over a row's experts of share * expert(row), in order of choice.
static void ffn_experts(const Pass *p, Worker *w, const Layer *l, const Acts *a) {
    Session *s = p->s;
    const Config *c = &s->model->config;
    int dim = c->dim, hidden = l->expert_dim, rows = p->n - p->first;
    int pairs = rows * c->n_used;
    Acts in = acts_at(s->pair_acts, pairs, dim), h = acts_at(s->pair_acts, pairs, hidden);
    matmul(w, a, (Product[]){{&l->router, s->route, 0, rows}}, 1);
    for (long i; team_next(w->team, rows, &i);) experts_choose(s, l, (int)i);
    for (long i; team_next(w->team, 1, &i);) experts_plan(s, l, rows);
    for (long i; team_next(w->team, pairs, &i);)
        acts_copy(&in, s->place[i], a, (int)i / c->n_used);
    matmul(w, &in, s->product, 2 * s->n_in_use);
    for (long i; team_next(w->team, pairs, &i);)
        row_gate(s, &h, s->place[i], 0, hidden, l->e1.bias, l->e3.bias,
                 (int64_t)s->chosen[i] * hidden);
    matmul(w, &h, s->product + 2 * l->n_experts, s->n_in_use);
    for (long i; team_next(w->team, rows, &i);) {
        float *branch = s->branch + i * dim, shared = 1;
        if (l->shared_gate) {           // the sigmoid of its product with the row
            shared = 0;
            const float *x = a->x + i * a->ldx;
            for (int k = 0; k < dim; k++) shared -= x[k] * l->shared_gate[k];
            vec_ops[s->team.isa].exps(&shared, 0, 1, 0);
            shared = 1 / (1 + shared);
        }
        for (int k = 0; k < dim; k++) branch[k] = l->hidden_dim ? branch[k] * shared : 0;
        for (int j = 0; j < c->n_used; j++) {
            int64_t pair = i * c->n_used + j;
            float *y = s->expert_out + s->place[pair] * (int64_t)dim;
            row_add(y, l->e2.bias, s->chosen[pair] * (int64_t)dim, dim);
            for (int k = 0; k < dim; k++) branch[k] += s->share[pair] * y[k];
        }
    }
}

static void forward_worker(void *arg, int rank) {
    Pass p = *(const Pass *)arg;
    Session *s = p.s;
    Worker *w = &s->worker[rank];
    const Model *m = s->model;
    int dim = m->config.dim, wanted = p.n - p.first;
    Acts a = acts_at(s->acts, p.n, dim);
    for (long i; team_next(w->team, p.n, &i);) {
        float *x = s->x + i * dim;
        tensor_row(&m->embedding, s->rows[i].token, x);
        for (int k = 0; k < dim; k++) x[k] *= m->config.embed_scale;
        rope_angles(s, (int)i);
        row_norm(s, a.x + i * a.ldx, x, m->layers[0].attn_norm, dim);
        acts_quantise(s->team.isa, &a, (int)i, 0, dim);
    }
    p.first = 0;
    for (int i = 0; i < m->config.n_layers; i++) {
        const Layer *l = &m->layers[i];
        bool last = i + 1 == m->config.n_layers;
        if (last) p.first = p.n - wanted; // of the last layer only they are read
        layer_attention(&p, w, l, &a);
        if (last && !wanted) return;
        a = acts_at(s->acts, p.n - p.first, dim);
        rows_join(&p, w, l->wo.bias, l->attn_post, l->ffn_norm, &a, NULL);
        if (l->hidden_dim) ffn_dense(&p, w, l, &a);
        if (l->n_experts) ffn_experts(&p, w, l, &a);
        rows_join(&p, w, l->w2.bias, l->ffn_post, last ? m->output_norm : l[1].attn_norm, &a,
                  s->trace ? s->trace + (int64_t)i * s->chunk * dim : NULL);
    }
    int64_t vocab = m->config.vocab_size;
    matmul(w, &a, (Product[]){{&m->output, s->logits, 0, wanted}}, 1);
    if (m->config.logit_divisor == 1 && !m->config.logit_cap) return;
    for (long i; team_next(w->team, wanted, &i);) {
        float *logits = s->logits + i * vocab;
        for (int64_t k = 0; k < vocab; k++) logits[k] /= m->config.logit_divisor;
        row_cap(s, logits, 0, vocab, m->config.logit_cap);
    }
}

// One pass over s->rows[0 .. n), 1 <= n <= chunk: their keys and values enter the cache. Gives the
// logits of the rows wanted, (1 or n, vocab_size), or NULL; WANT_ALL needs logit_rows >= n.
static float *forward(Session *s, int n, int want) {
    assert(n >= 1 && n <= s->chunk && (want != WANT_ALL || n <= s->logit_rows));
    Pass pass = {s, n, want == WANT_ALL ? 0 : want == WANT_LAST ? n - 1 : n};
    team_run(&s->team, forward_worker, &pass);
    return want == WANT_NONE ? NULL : s->logits;
}
/* ------------------------------------------------------------------------------------------------
 * Chapter 7. Letters
 *
 * Before a text becomes tokens it is cut into words, and what a word is stands in a regular
 * expression that came with the model: each family's authors wrote their own, and one wrong cut
 * shifts the ids of all that follows. So we keep the authors' expressions as data and interpret
 * them. What makes this small: a text is decoded once into Letters, which carry their Unicode
 * class, and a repeated set can only be followed back one letter at a time, so that the matcher
 * recurses on the pattern and never on the text: a megabyte of spaces needs no more stack than one.
 * The price: groups give nothing back, which no pre-tokeniser needs, and tables of 2 MB, expanded
 * in about a millisecond. Qwen's texts are brought into the composed form first (NFC: an e and an
 * accent become one letter). Bytes that are no UTF-8 are letters too, of one byte each with codes
 * above all others, so nothing a user types is lost or refused.
 */
enum { UNI_COUNT = 0x110000 };         // code points; invalid byte b has code UNI_COUNT + b

// Takes one character from the n > 0 bytes at p: its length.
static int utf8_next(const char *p, size_t n, uint32_t *code) {
    int length = utf8_length(p, n);
    uint8_t first = (uint8_t)p[0];
    *code = length < 1 ? 0x110000u + first : length == 1 ? first : first & (0x7Fu >> length);
    for (int i = 1; i < length; i++) *code = *code << 6 | (p[i] & 63u);
    return MAX(length, 1);
}

static void utf8_put(Str *out, uint32_t c) {
    char b[4];
    int n = c < 0x80 || c >= UNI_COUNT ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (int i = n - 1; i > 0; i--, c >>= 6) b[i] = (char)(0x80 | (c & 63));
    b[0] = (char)(n == 1 ? c : (0xF00u >> n & 0xFF) | c);
    str_add(out, b, (size_t)n);
}

// ---- numbers in order: a heap, smallest first
typedef struct { uint64_t *p; size_t n, cap; } Heap;

static void heap_push(Heap *h, uint64_t key) {
    h->p = grown(h->p, &h->cap, h->n + 1, sizeof *h->p);
    size_t i = h->n++;
    for (; i && h->p[(i - 1) / 2] > key; i = (i - 1) / 2) h->p[i] = h->p[(i - 1) / 2];
    h->p[i] = key;
}

static uint64_t heap_pop(Heap *h) { // h->n > 0
    uint64_t top = h->p[0], key = h->p[--h->n];
    size_t i = 0, child;
    for (; (child = 2 * i + 1) < h->n; i = child) {
        if (child + 1 < h->n && h->p[child + 1] < h->p[child]) child++;
        if (h->p[child] >= key) break;
        h->p[i] = h->p[child];
    }
    h->p[i] = key;
    return top;
}

// A number as 32 bits that sort as the numbers do, the largest first; 0 and -0 alike; and back.
static uint64_t best_first(float x) {
    uint32_t bits;
    x = 0.0f - x;
    memcpy(&bits, &x, 4);
    return bits ^ (bits >> 31 ? 0xFFFFFFFF : 0x80000000);
}

static float best_first_value(uint64_t order) {
    return 0.0f - f32_of_bits((uint32_t)order ^ (order >> 31 ? 0x80000000 : 0xFFFFFFFF));
}

// ---- Unicode 16: classes of code points, combining classes, canonical decompositions. White space
// is one more class: it overlaps no other. Lt counts as Lu and Lm as Lo, because every expression
// that tells letters apart names them together; Han letters are Lo that one expression sets apart.
enum { UNI_OTHER, UNI_LU, UNI_LL, UNI_LO, UNI_HAN, UNI_M, UNI_N, UNI_P, UNI_S, UNI_SPACE };
enum { UNI_SPLITS = 16, UNI_UNSTABLE = 32, UNI_CCC = 8 };            // bits of Unicode.of
enum { UNI_N_SPLITS = 2081, UNI_N_JOINS = 961, UNI_N_SECONDS = 98, UNI_CODE = 0x1FFFFF };

typedef struct Unicode {
    uint16_t of[UNI_COUNT + 256];       // class; UNI_SPLITS: it decomposes; UNI_UNSTABLE: composing
                                        // may change a text with it; combining class << UNI_CCC
    uint64_t split[UNI_N_SPLITS];       // sorted: code << 42 | first << 21 | second or 0
    uint64_t join[UNI_N_JOINS];         // sorted: first << 42 | second << 21 | code
} Unicode;

// All of it as small numbers, packed by a range coder: tests/unicode.py wrote it, says the order.
static const char uni_table[] =
"UP~{'rj^pK^#0^Oo;Q<xM#.tpv}APt~7yWq9DoS*73iwBv~IJivt0oBm~l0|q#s^aJixQL0[pDyESQ%e0C^XoO)fNYZAk||L_#"
"i]j.IMSjGU0w8q70H7{5q;@-6:}fqFe{PFUYp%JLO6ngtDjp@8Jvu1|u&.gK''8<nPPA=Ub~o;E:me%Va]hTQ^No>A%EkauDS@"
"(HS{8*#0-4wkEy_G,bZ!}!Heb`(tBjk_'W9m|08lu:FaikbCKm=0~PW_6Zkv)5Gs.h1]q~Oka[eb}DF_PR=C=FTR91J}D'q9z#"
"fzda%L<%4nP&e|00ls|2TKO+6dlKd`E%+tZiLF0V=+161bmDV1F5,^-w>%2SF-X[!.>q9Al{'Z=ZFF)EyNXATA,.ogYNzm$HL-"
"H>7KezuSt:B).Vq/w+}rtNq/Z[rtP')]$.t6MQqOz+&XZj<v_8Q`BXo){x8!|b|43Sc99{O>KsxGM<<OviNoaQCo6UwZ:idO}^"
"%T8bL|p@CU7)h%Zg<Yf8e2z[(Z=n!h:ZXCjvZp{+gC|Ka&sy4N9aJ4Z5>},M[~-Kyy=KTLNCP^eW<*bI--j:nC$lyR}RK0aVt/"
"a+AaS)nI5PEEw,i8U8<n1$W19^Zq%+OZ1%rfGiwC@Y&5>&Iu.RN,@2goNYEojp>#cIM,4TX{9EauRn<(x9(x,WTN+SJ7'a-&Y:"
"NdE1iM%)MAg`e#>L3hE,|T`q&~hl)qJi=t)e=D,HH4IJbSF$2^,P&-V*i>rk!/cHo8*{e^JBx'dqBYPEzB-}e-A%V4iu{TAq.f"
"]N>wx.U`ACxsOM%R=Q)n@Xi/d)Ph&f.r}$Mq|RbGtTO@-0b|xi7Ba3IVoz39$V&P*Qq$&{XVJzpe!iFk^wJ'2R[7D8A$MMR9f0"
"b2}0jJ*R.`91VAah_Jk8_ezP'V1u.!|bs'tjsMW;ZDAijK3Y-]Io91U;;=Hn$DL9=!Tt^O>2m^yM,|b$+R/J#q&8[nK>o-=69Q"
"!(q8RVva~iDT*na%b['Pw)}U9i.OpG6p$mr)0OPo/,:bC$O)[69~9s54=&E2bj<^f3^pjuW6e.X`V00%gtt#0.$ck8Qwa!p9]f"
"VfY,NjE!5al`n6xEkk%qtPtA`pxbHIO]c`Wh6ag-:)LWzMpN19D;t%Eto#0Cgv1kg.fdLURW|L(:[in3qB:u|C/LpYr/)Eu8H,"
"G=bj;mz>9E#oXZmns%z~7Hn&r2>X9-S0O'u{aR<{9!-/dCR}1#1kaA$lF+xKK}F#kwV!eeleUY`uWq%dDYA^0j::tX9u[j[l_q"
"BGm*V5j4xPNZ,/sJBg'U#}elu*7D.ky(|.`/4$Epgi&)x;Q(7u'SyhR{7{!(ko~IdlI9^.MU)h<En-2lwV]G1qoudd/rZM}RKN"
"/Uy8F3aPXtiJbJzQ:GK4(!oA-+a>K]6+UM[Zl37]~]0,;Msiy<=<.Hfn[$W>2AqkmP3#JXHrGdng%(^hm4dMJUhRG)X89j*eFP"
"*rAGBmbBKSQy;;`YX;Be#Z[cwPwEjX$d*IbIMW':%ZgJhHL0gjc2uFkAvLsO*m0#D'dt-Os6^GUtrQ[zueoX+<QJ$1,Zj!X,j2"
"w-mDd5T*38rldP08EC9O$D7<yQ9N,eXzozO}g_|6yoCz!0Ou{1C=`dmQmZdhIV1M6yheEXA[WdtZ`n[~=)4FeY:|V.j=&QiF/7"
"'6sFKEAor+GVqBGW@`h*!]bxpQnHK4bFXq%QVb|*{/&Ri*6z,qP1Q;o7bicELToe|*ilr|iAOgjC%c%#Y,u/tiBT2A3(zlp9>l"
"VEq{bF&<_P}$U*|;i0[k4Sw)5uAY|;L!w_qO6Ckh<~L'Q$5}z$xP6MkmPU)jP#/hrHKJSU,h]VOGTK^Tub:Wn{FV`F$-(PlfEv"
"V[;'RQh`Qbt]9D<ycv0Uz=<}'}k[1=4gjSFILb%}+_hD-Ap'<e{Sy|NiLQdg;+~`~Fwki.3{Ia!v_OWY.9F}Rf$p;i8tAHE>9V"
"3_Mwo$mNhoAa)td`WGvJ<tvqa<du*EMlR^[;hag[rTGXSKdgE#0joh(mVBjx_i`'/KK^,Z[u_R.0%K|Ws#S4<!qa,T$_xONHUF"
"}-}'Rv31g8i>7C-@VK&kX+>@|W|=~1D>%KS=>hd!<}Q6Z!L>9%w{d2wj/5U6[gmq1}n#yOSohtvEnx1R-(Kvz6vzq]R'{K.cE<"
"n##o&y.{q1't)1PtzY(dx,hG{50:fY6@ieu6k/ZnqZlq[H;IF&cZVAg/ikNP@iX]LB8tJx|)iaC@ycFlNe8a7HFHRdpnNtUw>Z"
"E_#'H>1U)@^{NaZ)ZWqv$nbUawhOc%w;@6MYO,_WOF>LZ:gKSU.ja@w&:Iey6vz}cc3,VX}N|on&/Djh.5,h^xCqeo3j-p3=jS"
"ek]IWmsx^:_!q0d<:L;:iwf;BN~zwOG!Ccok^(UgoXIQN/n(ySOpS+>fjY#s=]}Jz,QT!jZhT1rD;Q*!l'xFWL/6'i7Gj2DTkQ"
"RGgiCo[,y!t:>taNM`n_Uk+aXl6T'oZ{^EkgZM{,#y8k/@WSA62$|ct96UjEPcd&,<@t{mL4Gyli178Lv){2TN/JlyUYbf%_M#"
".VN9@PJ[8e]3,l']!/Z;)k=!GEFlV0IN+Xn$;`Pg_GAVk/5{jpO!&}W:V'}EdWu9%cSKkai;'J68qzl[CBoqX5|A<qSw(lF0s>"
"BB2Ik/n~N%9okMT1Wyb@Ks8Jl6ILRB`$,85rYC'Jwf.8>0)Ke-PF|p2F7n'KN;wL9ar/UQjYATZ=%3&>}ahKksf_,s7XH1+9To"
"~p@/)[$qqN29%n.FqYPrUE7NGk>ZpB,)Ce-L@WYKe>oBxR4=.==Vnz5Qz+Y:UdL|nU4r`w_ka0>l9zPD88<xW5>RJ}a<5W6XzF"
"lLYP`u<4PHh->/*>qq/Bl!c2t+*s@l.Hn#dl_]<u1RpR-1'!kp4>ti{.e|&1MLX~'+/]H}:<*$O;_zRUy:h<{ncI>.c5]d/W:*"
"x,ybguG[~*j/CVPV/)60N|i)LA3AnI*^@>a{0}4G-U;wms&@m.!dcoP&l7{nw0Qb*Xt1#,:&OH+l06~<<<~lSEN`r'~Qz4M;dO"
"g/gU2o=KI.X<QlVHS/=oqZC-/LI`:}>^.6<iHvP*aBr-$L&n.>f4JGpI=9+PWxFMBQ,J;KjI%~o00JEw`Ou:PehH.0,51s[!82"
"!8jH&]OW@d:vBQH~2q|m1_X(kUTebGoEPg/vAx{A-0JWD|[*q8P<(/}_p~9$aNf0eWhXzF0_-6d&UdPlE=[AN%Ww(H&z1Z<%o4"
"xap8>cKRwZ^Q$9p|56YgORROg.bV0e>]$O}{4R8/!96kD2h&}h8ldm}zAWq{r8{x,M%j;I^E2IAlx[.(Yw|g06CaewWZko/OGO"
"w%9vNu!!l=iWn#lS)i8+X(1>]l*K_;~O`fKDIFZ1Bg<LoExZrFk+dy7UN+`4;tZ[L~GOxlv-!fghVr=wJnB^6*$fgRTUa}jeYe"
"m'Aq70%JQ[HpurbXukk,;@L`YYJGc=lNn(HrU)t(T{0|[>2}gKw&~qPf`Us(:Nyh'yRf;^aDnDnwrz3`Q;+/q3ZZrZ*v5oDN2t"
"d>!_S:fjgkyaDK#WbpJl(`v#S4(u!m'0+87apw%Fvg&-ZeRs<9<RBU~A;KA4CMbI;X_:29_VApGM1XYc`RZI6FfBeJ%Vek`T`l"
"}'hW+.1U8j7MFFdk8&]YmG_N!S+(BHx2~E_;KDV7GToXZ,V]93*X~<}D)Rr{Rv5f2J*`+:1lgf`u$eJM6S@I8ratffdwXj/k@a"
"u>GQqbP}fkD,0Diq;PefXT4bs.G&ZCd$jab+Y$`N>|*+iX`6]E$y}/18Lg~nTi8j_9RalC^D^Prwx6(^*|!S^V^va+YAamdZ$d"
"ZQPn!1fuRXC&Gc!}6s-$fFJ=}+3,F8;x7ZVyLO'Wk5pl,Nmz;-Yxy+RXKg;8#3i5/0^4O+kAA=`7mDQ]AuxyHj.-^qtey@RXtc"
"lNMfw`AoS)d+'#DPEPw`qayb^98=hxz]ilC}_`pJ{'1TS&/IdJ,raak4e_PiQ6=5dLkV`C5j9j(m|4ARD'kEulMGG8!drYtM^)"
"{e$ErviQ,@hHOGNMeN`N8,HimRbJS$Xve6FZB9_mHP+l-1$.grM<^|6BY8bV|p<_):|B22=Z.006JJruV!0~_>x3^4n`czXE_U"
"9b/OoTlX`01Vr:W&SR=0{fji>@Ur5pZe;kWoG=]L=AG2I-|K/AR~hKP&Z;je2f]%Rq>hy-_I4&/RZq`P(5t}AwDNmPOR:$>9G/"
"gh*F0cRq%YKa5lITa=CB-fywy_#:m3i%Jo8~XEktQURP|~H_4Iw0!Vat2*'tBwnp6A|MU1&%~]/|BU-!%<$pO8n7GfE>iC9r8z"
"MG^j,*@B!LKw=ykt7vsMb{AMLb#%Qyf<sENN6I[vtrBT<Z)v<=bI>|+[|k}vHO@{5afl4tW=mOsEX9Dp*Sv{>(%<pN6K}bSDU>"
",bet6bT;'JgF`pbWQwHL~/)vgu=J]wl9.H{|Co`*Kh+s1*`*f]mF4HrMRy%RV.+*aAJ(XzSu%q-;5WV;8f*qT[,lh~Z.QcC(g|"
"Kq5*@f<}iU/b/e6b!Cwm{'d+rPkz+kVLvp:N1$NS,28Jw~4V*@M5Ea_{[!:f84=)fnJea+yL`%)skj`QLQ$U248d32K<aEB1NI"
"V^8m8fAW:YlF;|%rgPaK[yzJ@@*&)dC2mZ0%jk*h2*sQc|PDb0J%8OQ_kKH5Bcy5<43DE|{Pb3GMUIZgIJ>5$0|5QfgXi7=)~<"
"{:]TJ-nLUs&hs8@OATZ6yw:MqE:zVMGoS)8iZh!^vv50'v^_+HKD6(^mZ7!T+gkLrK#T&'2WoZ=%g]+6+C0Wc>9hrl#xa{k.a!"
"i<$;~.isxQqD>vHfSMN4*0+N`KS`)[ZA4w;3N&K@3yyVc>i#6C'IjQZMOQX_9_~Ui};|2ro:>p|0NJ!)-3viqkANVfa1Z7q*fw"
"LZKtfT/#a=s_QZQ)=Ni+'MvS.{Hsrt>GKBLx0_<,;x5DR:nr{T:<<Z-$+5u~;TQ1te~{<]/=q&wiOA-k,=>).dx<bhh]8rycwq"
"hZ_V@Pm>sW6|wEJ_z[$a{2{J_[DT',ySy+Q*Uv/2=P>JP_m>+tbZh!=g@6AN*mPke&>c,djk|rG:=RhE]Dg{9g*WM%[K<dunu]"
"AIByn86H2>X%/<)N1EzU6S,WZ=#}Z<5.3dOgSh`x)b$u)D[5$`17vJqAS9NSj;$OpL|~oM$gIeG>6.~n_~>]KJ]x0:6|pdn:g("
"rv7t)%G;Q<<^JM9R=Jo*Qka3i'w%N6)Io1RTuy9YW[O']4UQKj.pYBW~t_`W>/Y=YW//P%%bg.BY-gI$bg7Kk8{&*iKTyN;}'^"
")>=1BW*C*1yPILis$Z)r&T)0}g:`TP7#(FV/|J5>~cL85+-6<{}4f3i<y<dRHJxUw{!9``G-[ZI1J77rJmQ2/u3/>f!S1Bu;xI"
"NA&w'@D}vaDv,Wn+.6y[W`w/`aiL!~F8zklr;Pe#L=LdD^P!9.a-}$N[AFBV/<9M`'ER:#]>+g]>z=EkmX'PMi0p/7Owij0)U4"
"-d{PO&Biv{Pe-RM{3KG>/qPB:D_f!_`j^rv_4^]YQkqU>UZ^}E(W;tA1Y|/9<C|3=oW72#n1l:7#<chGoxYEcRwdf)wIo;XhF;"
"tk6RQtyE*X(Piu2injj#E:}W7c)>tByOWqBv1d1Ng+QUC~;0c-={EnD8DKX&qjsK@R/Bo6@L`N]pVp{X,Z}*h8H&j1i5~08`oF"
"@yh/p'lCg#b~eLuta9nUnRl#VxLTStjM%H]%0&o.]1Q`<FEm~IS7Dbs#>'O!ykvfYL6YOH[nC^UJlG1ve3y{I/(=Ph(}ObIx&w"
";9+<`';D3@)esO<M{!osUD,_P]],zx8.~.`3i_yQCf*i<O1NZS1HEK[@2;1SgMW<e>+)5#;46jg,Jee@FpvCeZ6t87v8n(:9m%"
"S&t9sYx~Y*bQyaUCabTpIvdzcH}da[)er;>|d=C#`gu~%8x|8,%{JoUX:62$!=+l}EVahru:cmKYxb,g`gm6C8A|Yl-j^uDy_&"
"oIsaLWH$i&|Kg$vcUZO5@}-}3BtS^{SXkLbRk~)cs!Qb(a0[p`&V0We'g>6X*[Lr9=Fy/Y+Daj:8aSwi^J7<Q781x_hi2V<$.$"
"Y<[+_0yd$R3AOJJy.wXe4!6pafL,O<op}!-hOT5Y.O-y^jm*q5X)/laAxR183loQ:2CJ&cFrlzFesXs19;Xr2>^h^}+kT{|5)H"
"Gbg0E]+$>Gzt^}{()~|O-+<!,|zYEV9:ILO!AeRX}%2tBbUu_*Z={H>7o=9yDJ{zR_i/3:(7eL!.V^b/P|vH3;!_<`~(C*/ln;"
"~Dy!.uVvJ8*xA09w/BOO-,w[ZY+)'W!q+SA-MK.;+H&lH3kg)h!s~u&!LH2eSuvsCEFlm6V*QA8H#kvC5Owa[RSz>T(d+u(N+I"
"faC`T>*9fws}~XxW:)DMQ{i.a*]Naxer88zrz`cfuM|=dG^$qi~d:vw<[-ES$HmJ)(5=fW$3_`,t*rT3;Sil5fvf,dP/}Me%ID"
"`dPj[+T@b(R)w0:qB}.>{CS(LlF2H294GQs#|h,t')q0[Vu.#RyxxP/f%&!3v]=mwUg4`A>JkMw.F&t0RIsHZF6Q[3kSG6i0<3"
"okUP1alYIV'Rvn!=P6[yu@Zb'_$wogon:a,Pvx4n*yKcPIa8q*sVQ>;XCNyS4V0{x6B@lo)u%stnBD5'D=@nP}bRV4>!Ne:U2N"
"7FT[^sXNV<$/g.Q2,aC*RIJ%F=hVLTu[oeeU)#MvO[`I>=2JKN.+MX,5DkY|wm*9q1jr+}[)D7;S}|.px:Jx&A@j&x*LGS[;AA"
"53wKh*gnfJ$.V^(l%u'R6:ky(NGKQDMK{hCPU5eDgp9e#0W7+uD#~@$!}Y|vQ+$Rc+`bmADf<f(|,F`C%RqyX2V3QxUG6RL%BP"
"eQ^)8B0tW9nHLeQc'0|S'(yBM%E>NH>G1%o)GKppkkMV7Z[sc`DDEwBmAf##knppA[MkcF=Erh{VP]|T3.~'2/T9y!U";

// The decoder. Numbers of one kind are alike, so the chance of each of their bits is learnt from
// those before it: in 4096ths of a one, less 2048, for [kind][length][bits so far; late: place].
typedef struct {
    const char *p;
    uint32_t range, code;               // code < range: where in it the rest of the digits points
    int16_t chance[281][24][88];
} Packed;

static uint32_t packed_bit(Packed *d, int16_t *chance) {
    for (; d->range < 1 << 24; d->range *= 91) { // 91 digits: ! to ~ without " ? and backslash
        int c = (uint8_t)*d->p++;
        d->code = d->code * 91 + (uint32_t)(c - '!' - (c > '"') - (c > '?') - (c > '\\'));
    }
    int p = 2048 + *chance;
    uint32_t bound = (d->range >> 12) * (uint32_t)p, bit = d->code < bound;
    if (!bit) d->code -= bound;
    d->range = bit ? bound : d->range - bound;
    *chance += (int16_t)(bit ? (4096 - p) >> 3 : -(p >> 3));
    return bit;
}

static uint32_t packed_number(Packed *d, uint32_t kind) { // n + 1: length in ones, then its bits
    uint32_t n = 1, length = 0;
    while (packed_bit(d, &d->chance[kind][length][0])) length++;
    for (uint32_t i = length; i-- > 0;)
        n = 2 * n + packed_bit(d, &d->chance[kind][length][n < 64 ? n : 64 + i]);
    return n - 1;
}

static void uni_decompositions(Unicode *u, Packed *d) {
    Heap joins = {0};
    uint32_t seconds[UNI_N_SECONDS] = {0, 1, 2, 3}, last[5] = {0}, code = 0, place = 0, apart = 0;
    for (int i = 4; i < UNI_N_SECONDS; i++) seconds[i] = seconds[i - 1] + packed_number(d, 20);
    for (int i = 0; i < UNI_N_SPLITS; i++) {
        code += packed_number(d, 21);
        place = packed_number(d, 22 + MIN(place, 2));
        uint32_t second = seconds[place], k = MIN(second, 4), step;
        memmove(seconds + 1, seconds, place * sizeof *seconds);
        seconds[0] = second;
        step = packed_number(d, 27 + k + 5 * MIN(place, 1)); // its lowest bit is the sign
        uint64_t first = last[k] += step & 1 ? ~(step >> 1) : step >> 1;
        bool single = second < 4;
        if (!single) apart = packed_number(d, 25 + apart);
        u->split[i] = (uint64_t)code << 42 | first << 21 | (single ? 0 : second);
        if (!single && !apart) heap_push(&joins, first << 42 | (uint64_t)second << 21 | code);
        u->of[code] |= UNI_SPLITS | (single || apart ? UNI_UNSTABLE : 0);
        if (!single) u->of[second] |= UNI_UNSTABLE;
    }
    for (int i = 0; i < UNI_N_JOINS; i++) u->join[i] = heap_pop(&joins);
    free(joins.p);
}

static Unicode *uni_new(void) {
    Unicode *u = xalloc(1, sizeof *u);
    Packed *d = xalloc(1, sizeof *d);
    d->p = uni_table, d->range = 1;
    for (uint32_t at = 0, end, class = UNI_OTHER; at < UNI_COUNT; at = end) {
        class = packed_number(d, class);
        end = at + packed_number(d, 10 + class) + 1;
        for (; class != UNI_OTHER && at < end; at++) { // pages of empty planes are never touched
            uint32_t ccc = class == UNI_M ? packed_number(d, 40 + (u->of[at - 1] >> UNI_CCC)) : 0;
            u->of[at] = (uint16_t)(class | ccc << UNI_CCC | (ccc ? UNI_UNSTABLE : 0));
        }
    }
    uni_decompositions(u, d);
    for (uint32_t c = 0x1161; c <= 0x11C2; c++) u->of[c] |= UNI_UNSTABLE; // Hangul: vowels, finals
    for (int b = 128; b < 256; b++) u->of[UNI_COUNT + b] = UNI_S; // as U+FFFD
    free(d);
    return u;
}

// ---- NFC (Unicode Standard Annex 15): letters are taken apart, runs of marks sorted by combining
// class, and what belongs together joined again; Hangul by arithmetic. Near-linear for any text.
static uint64_t uni_find(const uint64_t *sorted, int n, uint64_t key) { // the first not below, or 0
    int low = 0;
    for (int high = n; low < high;) {
        int mid = (low + high) / 2;
        if (sorted[mid] < key) low = mid + 1;
        else high = mid;
    }
    return low < n ? sorted[low] : 0;
}

static uint32_t uni_join(const Unicode *u, uint64_t a, uint64_t b) { // what a and b make, or 0
    if (a - 0x1100 < 19 && b - 0x1161 < 21)
        return (uint32_t)(0xAC00 + ((a - 0x1100) * 21 + b - 0x1161) * 28);
    if (a - 0xAC00 < 11172 && (a - 0xAC00) % 28 == 0 && b - 0x11A8 < 27)
        return (uint32_t)(a + b - 0x11A7);
    uint64_t found = uni_find(u->join, UNI_N_JOINS, a << 42 | b << 21);
    return found >> 21 == (a << 21 | b) ? (uint32_t)found & UNI_CODE : 0;
}

// The composed form of a text: itself where nothing can change, else in *out.
static Span text_compose(const Unicode *u, Span text, Str *out) {
    uint32_t code = 0;
    size_t at = 0;
    while (at < text.n && !(u->of[code] & UNI_UNSTABLE))
        at += (size_t)utf8_next(text.p + at, text.n - at, &code);
    if (!(u->of[code] & UNI_UNSTABLE)) return text;
    Heap a = {0}, marks = {0};          // a: the letters taken apart; only an array here
    for (at = 0; at <= text.n;) {       // the last round enters a NUL, so that no mark waits
        uint32_t piece[5] = {0};
        int k = 0;
        at += at < text.n ? (size_t)utf8_next(text.p + at, text.n - at, &piece[0]) : 1;
        while (u->of[piece[k]] & UNI_SPLITS) { // the last piece is the first of the letter
            uint64_t split = uni_find(u->split, UNI_N_SPLITS, (uint64_t)piece[k] << 42);
            uint32_t second = split & UNI_CODE;
            if (second) piece[k++] = second;
            piece[k] = split >> 21 & UNI_CODE;
        }
        a.p = grown(a.p, &a.cap, a.n + marks.n + 5, sizeof *a.p);
        for (; k >= 0; k--) {
            uint64_t ccc = u->of[piece[k]] >> UNI_CCC;
            if (ccc) heap_push(&marks, ccc << 56 | (a.n + marks.n) << 21 | piece[k]);
            else {
                while (marks.n) a.p[a.n++] = heap_pop(&marks) & UNI_CODE;
                a.p[a.n++] = piece[k];
            }
        }
    }
    size_t kept = 0, base = 0;          // base: the letter that what follows may join
    uint64_t before = 0;                // combining class of the last one kept
    for (size_t i = 0; i + 1 < a.n; i++) {
        uint64_t c = a.p[i], ccc = u->of[c] >> UNI_CCC, joined = 0;
        bool near = before < ccc || kept == base + 1; // else what stands between is in the way
        if (near && u->of[c] & UNI_UNSTABLE) joined = uni_join(u, a.p[base], c);
        if (joined) a.p[base] = joined;
        else {
            if (!ccc) base = kept;
            before = ccc, a.p[kept++] = c;
        }
    }
    for (size_t i = 0; i < kept; i++) utf8_put(out, (uint32_t)a.p[i]);
    free(a.p), free(marks.p);
    return str_span(out);
}
// ---- Re: a matcher for what pre-tokenisers use. Escapes begin with %, which C leaves alone.
//   pattern = branch { "|" branch }                 the first branch that fits is taken
//   branch  = { item [ "?" | "*" | "+" | "{n}" | "{n,m}" ] }
//   item    = set | "(?:" pattern ")" | "(?=" pattern ")" | "(?!" pattern ")" | "(?<!" set ")"
//   set     = "[" ["^"] { member ["-" member] } "]" | member
//   member  = character | "%" letter of re_classes | "%" other character
// A group gives nothing back of what it took. The patterns are ours (a table below): trusted.
typedef struct { uint32_t code; uint8_t class, bytes, cut; } Letter; // cut: a word begins with it

typedef struct {
    const Letter *text;
    int begin, end;          // of the fragment; look-around sees no more of the text
} Re;

#define BIT(class) (1 << UNI_##class)
static const uint16_t re_classes[128] = {                   // \p{L} is %L here, \s is %s, ...
    ['L'] = BIT(LU) | BIT(LL) | BIT(LO) | BIT(HAN), ['M'] = BIT(M), ['N'] = BIT(N), ['P'] = BIT(P),
    ['Y'] = BIT(S), ['U'] = BIT(LU), ['l'] = BIT(LL),       // symbols; upper case; lower case
    ['o'] = BIT(LO) | BIT(HAN), ['h'] = BIT(HAN), ['x'] = BIT(LO), // other letters, Han, not Han
    ['s'] = BIT(SPACE), ['S'] = 0xFFFF & ~BIT(SPACE),
};
#undef BIT

static bool re_set(const char *p, Letter l) { // does the set at p hold l?
    bool many = *p == '[', negated = many && p[1] == '^', hit = false;
    p += many + negated;
    do {
        uint16_t classes = *p == '%' ? re_classes[(uint8_t)p[1]] : 0;
        uint32_t lo = 0, hi;
        p += *p == '%';
        p += classes ? 1 : utf8_next(p, 4, &lo);
        bool range = many && *p == '-' && !classes;
        if (range) p++, p += *p == '%', p += utf8_next(p, 4, &hi);
        hit = classes ? classes >> l.class & 1 : l.code >= lo && l.code <= (range ? hi : lo);
    } while (many && *p != ']' && !hit);
    return hit != negated;
}

static const char *re_skip(const char *p) { // the end of the item at p
    uint32_t code;
    char end = *p == '[' ? ']' : *p == '(' ? ')' : 0;
    p += *p == '%';
    p += utf8_next(p, 4, &code);
    while (end && *p != end) p = end == ')' ? re_skip(p) : p + 1 + (*p == '%');
    return p + (end != 0);
}

static int re_match(Re *r, const char *p, int i);

// Matches one branch from p on at letter i: the index after the match, or -1.
static int re_branch(Re *r, const char *p, int i) {
    if (!*p || *p == '|' || *p == ')') return i;
    const char *q = re_skip(p);
    int least = *q != '?' && *q != '*', most = *q == '*' || *q == '+' ? INT_MAX : 1;
    int j = i, end = -1;
    if (*q == '{') {
        char *rest;
        least = most = (int)strtol(q + 1, &rest, 10);
        if (*rest == ',') most = (int)strtol(rest + 1, &rest, 10);
        q = rest + 1;
    } else q += !least || most > 1;
    if (*p == '(' && p[2] == '<')
        return i > r->begin && re_set(p + 4, r->text[i - 1]) ? -1 : re_branch(r, q, i);
    if (*p == '(' && p[2] != ':')
        return (re_match(r, p + 3, i) >= 0) == (p[2] == '=') ? re_branch(r, q, i) : -1;
    if (*p == '(') {
        int n = 0;
        for (; n < most && (j = re_match(r, p + 3, i)) > i; n++) i = j;
        return n < least ? -1 : re_branch(r, q, i);
    }
    while (j < r->end && j - i < most && re_set(p, r->text[j])) j++;
    for (; j >= i + least && end < 0; j--) end = re_branch(r, q, j); // gives back one by one
    return end;
}

static int re_match(Re *r, const char *p, int i) { // the same for a pattern: its branches in order
    for (;; p++) {
        int end = re_branch(r, p, i);
        if (end >= 0) return end;
        while (*p && *p != '|' && *p != ')') p = re_skip(p);
        if (*p != '|') return -1;
    }
}

// The n letters of a text, behind them one more, cut into words. Matches become words, gaps between
// matches too; each pattern is run on every piece that the earlier ones left.
static Letter *letters_cut(const Unicode *u, Span text, const char *const *patterns, int *n) {
    Letter *letter = xalloc(text.n + 1, sizeof *letter);
    *n = 0;
    for (size_t at = 0; at < text.n; at += letter[(*n)++].bytes) {
        uint32_t code;
        uint8_t bytes = (uint8_t)utf8_next(text.p + at, text.n - at, &code);
        letter[*n] = (Letter){code, u->of[code] & 15, bytes, 0};
    }
    letter[*n].cut = 1;
    for (; *patterns; patterns++) {
        Re r = {.text = letter};
        for (int i = 0; i < *n;) {
            r.begin = i, r.end = i + 1;
            while (!letter[r.end].cut) r.end++;
            while (i < r.end) {
                int end = re_match(&r, *patterns, i);
                if (end > i) letter[i].cut = letter[end].cut = 1;
                i = MAX(end, i + 1);
            }
        }
    }
    return letter;
}

// ---- the expressions, as their authors wrote them (llama.cpp: src/llama-vocab.cpp and the models'
// tokenizer.json), but for some spellings: "(?i:'s)" is "'[sS]" here, "$" is "(?![%s%S])", a long
// list of cased letters a shorter one that holds the same, and what can only match where a run
// begins says so with "(?<!", lest long runs take quadratic time.
#define RE_ENDINGS "(?:'[sS\u017ftTmMdD]|'[rR][eE]|'[vV][eE]|'[lL][lL])"
#define RE_SPACES "|%s+(?!%S)|%s+"
#define RE_LINES "|%s*[\r\n]+" RE_SPACES
#define RE_TAIL "[\r\n]*" RE_LINES
#define RE_MARKS "| ?[^%s%L%N]+"
#define RE_GPT2 "'s|'t|'re|'ve|'m|'ll|'d| ?%L+| ?%N+" RE_MARKS RE_SPACES
#define RE_WORDS(numbers) "[^\r\n%L%N]?%L+|" numbers RE_MARKS
#define RE_LLAMA3(numbers) RE_ENDINGS "|" RE_WORDS(numbers) RE_TAIL
#define RE_CASED(any, endings, numbers) \
    "[^\r\n%L%N]?[%U" any "]*[%l" any "]+" endings \
    "|[^\r\n%L%N]?[%U" any "]+[%l" any "]*" endings "|" numbers RE_MARKS
#define RE_GPT4O(numbers) RE_CASED("%o%M", RE_ENDINGS "?", numbers) "[\r\n/]*" RE_LINES
#define RE_DEEPSEEK "[!\"#$%%&'()*+,%-./:;<=>?@%[\\%]^_`{|}~][A-Za-z]+" \
    "|[^\r\n%L%P%Y]?[%L%M]+| ?[%P%Y]+"
#define RE_KANA "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
#define RE_CJK "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
#define RE_BLOOM " ?[^(%s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
#define RE_THREES(after) "(?<!%N)%N{1,2}(?=(?:%N{3})+(?!" after "))", "%N{1,3}" // from the right

enum { PRE_WHOLE = 1,            // a word that is a token is taken whole, whatever its merges
       PRE_BOS = 2,              // BOS in front, unless the file says otherwise
       PRE_NFC = 4,              // the text is composed first
       PRE_PLAIN = 8 };          // tokens are plain text with U+2581 for spaces, no mapped bytes

typedef struct Pretok {
    const char *names;           // values of tokenizer.ggml.pre, separated by spaces
    int flags;                   // PRE_
    const char *patterns[7];     // applied one after the other
} Pretok;

// To add a pre-tokeniser: one row. 1. Find `pre` in the file (run -m info) and the expressions in
// its tokenizer.json. 2. Write them here, % for the backslash; a new class goes into re_classes, a
// new group into re_branch. 3. Add texts with the ids of the tokenizers library to tests/.
static const Pretok pretok[] = {
    {"default", 0, {"[%P$+<=>^~|]+", RE_GPT2, "%N+", "[0-9][0-9][0-9]"}},
    {"gpt-2 phi-2 mpt olmo jais jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code "
     "roberta-bpe modern-bert gigachat a.x-4.0 mellum exaone4 trillion granite-docling", 0,
     {RE_GPT2}},
    {"smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", 0, {"%N", RE_GPT2}},
    {"falcon", 0, {"[%P$+<=>^~|`]+", RE_GPT2, "[0-9][0-9][0-9]"}},
    {"chameleon", PRE_BOS,
     {"<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", "[\t\n]|    |  ", "%N", "[%P!-/:-@%[-`{-~]",
      RE_GPT2}},
    {"poro-chat bloom gpt3-finnish", 0, {RE_BLOOM}},
    {"viking", 0, {RE_BLOOM, "%N"}},
    {"llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral lfm2 midm-2.0 jina-v5-nano",
     PRE_WHOLE | PRE_BOS, {RE_LLAMA3("%N{1,3}")}},
    // converters give these names to copies of Llama 3 as well, whose authors' code ignores merges
    {"smaug-bpe dbrx chatglm-bpe glm4 glm5", PRE_WHOLE, {RE_LLAMA3("%N{1,3}")}},
    {"minicpm5", PRE_WHOLE, {"%N{1,3}", RE_LLAMA3("%N+")}},
    {"jais-2", 0,
     {RE_ENDINGS "|" RE_WORDS("%N{1,3}") "[\r\n]*|(?<![^%S\r\n])%s*[\r\n]+|%s{512}(?!%S)"
      "|%s{256}(?!%S)|%s{128}(?!%S)|%s{64}(?!%S)|%s{32}(?!%S)|%s{16}(?!%S)|%s{8}(?!%S)"
      "|%s{4}(?!%S)|%s{1,2}(?!%S)|%s"}},
    {"qwen2 f2llmv2", PRE_NFC, {RE_LLAMA3("%N")}},
    {"deepseek-r1-qwen megrez stablelm2 hunyuan kormo solar-open grok-2", 0, {RE_LLAMA3("%N")}},
    {"qwen35", PRE_NFC, {RE_ENDINGS "|[^\r\n%L%N]?[%L%M]+|%N| ?[^%s%L%M%N]+" RE_TAIL}},
    {"ufakzeka", 0, {RE_WORDS("%N") RE_TAIL}},
    {"seed-coder", 0, {RE_ENDINGS "|" RE_WORDS("%N") RE_LINES}},
    {"laguna", 0, {"[^\n]+|\n+", RE_LLAMA3("%N")}},
    {"bailingmoe bailingmoe2 llada-moe", 0,
     {RE_ENDINGS "|" RE_WORDS("%N") "[\r\n]*|%s*[\r\n]" RE_SPACES}},
    {"exaone-moe", 0,
     {RE_ENDINGS "|[^\r\n%L%N]?(?:%L%M*(?: %L%M*)*)+|%N" RE_MARKS "[\r\n/]?|%s*[\r\n]" RE_SPACES}},
    {"tekken", PRE_WHOLE | PRE_BOS, {RE_CASED("%o%M", "", "%N") "[\r\n/]*" RE_LINES}},
    {"gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m", PRE_WHOLE,
     {RE_GPT4O("%N{1,3}")}},
    {"tiny_aya cohere2moe", 0, {RE_THREES("[%L%M%N_]"), RE_GPT4O("%N{1,3}")}},
    {"kimi-k2", 0,
     {"[%h\u2e80-\u2fd5\u3007\u3021-\u3029\u3038-\u303a]+|"
      RE_CASED("%x%M", RE_ENDINGS "?", "%N{1,3}") RE_TAIL}},
    {"youtu", PRE_WHOLE,
     {"[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c"
      "\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|" RE_KANA, RE_GPT4O("%N")}},
    {"superbpe", 0, {RE_THREES("%N")}},
    {"deepseek-llm", 0,
     {"[\r\n]", "%s?(?:[A-Za-z]+|(?![\u0560-\u0588\u10c6-\u10ff\u1c80-\u1c8a\u2d00-\u2d2d"
      "\ua790-\uab68\U00010570-\U000105bc\U00010d50-\U00010d85\U00016e40-\U00016e7f"
      "\U0001d400-\U0001df2a])[%U%l])+",
      "%s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
      "(?<!%s)%s+(?![%s%S])", RE_CJK, "%N+"}},
    {"deepseek-coder", 0, {"[\r\n]", "%s?%L+", "%s?%P+", RE_CJK, "%N"}},
    {"deepseek-v3 hunyuan-dense joyai-llm hy_v4", 0, {"%N{1,3}", RE_KANA, RE_DEEPSEEK RE_TAIL}},
    {"spark2_5", 0, {"%N{1,3}", RE_KANA, RE_DEEPSEEK "|[\r\n]" RE_SPACES, "%N"}},
    {"afmoe", 0,
     {RE_THREES("%N"), "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff"
      "\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f"
      "\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+", RE_DEEPSEEK RE_TAIL}},
    {"gemma4 sarvam-moe granite-embed-multi-311m", PRE_PLAIN, {0}},
};

static const Pretok *pretok_find(Span name) { // NULL if there is none
    for (int i = 0; i < COUNT(pretok); i++)
        for (const char *p = pretok[i].names; *p; p += strcspn(p, " "), p += *p == ' ')
            if (strcspn(p, " ") == name.n && !memcmp(p, name.p, name.n)) return &pretok[i];
    return NULL;
}

/* ------------------------------------------------------------------------------------------------
 * Chapter 8. Tokens
 *
 * A model reads numbers; its vocabulary says which piece of text each one stands for. A text can be
 * cut into such pieces in many ways and the model knows one of them, found alike everywhere: begin
 * with single characters (or bytes) and join the best two neighbours until no two make a token.
 * Only "best" differs: SentencePiece files score the tokens, byte-level files rank the merges of
 * their training. So there is one merge loop, near-linear for any text, over a heap of pairs, and
 * one table, text -> id, for both: a merge is kept under the token it gives. The price: a pair is
 * hashed whenever it is met. The gain: 150,000 tokens are ready in milliseconds. Control tokens are
 * cut out first (bytes that a user typed never become one), and Stream turns pieces back into text
 * that is always valid UTF-8.
 */
typedef struct { int32_t *p; size_t n, cap; } Ids;

static void ids_add(Ids *ids, int id) {
    ids->p = grown(ids->p, &ids->cap, ids->n + 1, sizeof *ids->p);
    ids->p[ids->n++] = id;
}

// ---- the vocabulary
enum { TYPE_NORMAL = 1, TYPE_UNKNOWN, TYPE_CONTROL, TYPE_USER, TYPE_UNUSED, TYPE_BYTE };
enum { NO_TOKEN = -1 };
#define TOK_BAR "\xE2\x96\x81" // U+2581: a space in SentencePiece's texts

static int tok_find(const Vocab *v, Span text) { // by its text in the file
    return v->size ? (int)map_find(&v->index, v->text, text) : NO_TOKEN;
}

static int tok_find_piece(const Vocab *v, Span text) { // only what merging may make
    int id = tok_find(v, text), type = id < 0 ? TYPE_CONTROL : v->type[id];
    return type == TYPE_CONTROL || type == TYPE_UNKNOWN || type == TYPE_BYTE ? NO_TOKEN : id;
}

// Byte-level BPE writes each byte as one printable character: those of Latin-1 that print stand for
// themselves, the other 68 bytes are U+0100, U+0101, ... in order (a space is U+0120).
static uint32_t byte_to_code(uint8_t b) {
    return b <= 32 ? 256u + b : b >= 127 && b <= 160 ? 162u + b : b == 173 ? 323 : b;
}

static int code_to_byte(uint32_t c) { // or -1
    if (c < 256) return byte_to_code((uint8_t)c) == c ? (int)c : -1;
    return c <= 288 ? (int)c - 256 : c <= 322 ? (int)c - 162 : c == 323 ? 173 : -1;
}

static bool span_at(Span s, size_t i, Span part) { // does part stand at byte i of s?
    return part.n <= s.n - i && s.p[i] == *part.p && !memcmp(s.p + i, part.p, part.n);
}

// ---- building one
static void vocab_new(Vocab *v, int size, bool scores) {
    v->size = size;
    v->text = xalloc((size_t)size, sizeof *v->text);
    v->type = xalloc((size_t)size, sizeof *v->type);
    v->stop = xalloc((size_t)size, sizeof *v->stop);
    if (scores) v->score = xalloc((size_t)size, sizeof *v->score);
}

// Enters the texts; for SentencePiece, finds the byte tokens.
static void vocab_index(Vocab *v) {
    v->index = map_new((size_t)v->size);
    for (int id = 0; id < v->size; id++) {
        if (id + 16 < v->size) // the table is larger than the caches: ask for its lines early
            __builtin_prefetch(&v->index.slot[span_hash(v->text[id + 16]) & v->index.mask]);
        map_add(&v->index, v->text, (uint32_t)id);
    }
    for (int b = 0; b < 256 && v->kind == VOCAB_SPM; b++) {
        char text[8];
        snprintf(text, sizeof text, "<0x%02X>", (unsigned)b);
        int id = tok_find(v, (Span){text, 6});
        if (id >= 0 && v->type[id] == TYPE_NORMAL) v->type[id] = TYPE_BYTE;
        v->byte_id[b] = id >= 0 && v->type[id] == TYPE_BYTE ? id : NO_TOKEN;
    }
}

// What encoding asks before it looks a text up: could a special token begin with these two bytes,
// could a token join this byte to a space after it?
static void vocab_hints(Vocab *v) {
    v->longest = xalloc(1 << 16, 1);
    for (int id = 0; id < v->size; id++) {
        Span s = v->text[id];
        for (size_t i = 1; v->kind == VOCAB_SPM && i < s.n; i++)
            if (span_at(s, i, v->space)) v->glue[(uint8_t)s.p[i - 1]] = true;
        bool special = v->type[id] >= TYPE_UNKNOWN && v->type[id] <= TYPE_USER;
        if (!special || !s.n || s.n > UINT8_MAX) continue;
        int at = (uint8_t)s.p[0] << 8, end = at + 255;
        if (s.n > 1) at = end = at | (uint8_t)s.p[1];
        for (; at <= end; at++) v->longest[at] = (uint8_t)MAX(v->longest[at], s.n);
    }
}

static bool merge_gives(const Vocab *v, int id, Span line, uint32_t left) { // its space left out
    return id < v->size && v->text[id].n == line.n - 1 && !memcmp(v->text[id].p, line.p, left) &&
           !memcmp(v->text[id].p + left, line.p + left + 1, line.n - left - 1);
}

// Merges are lines "left right". One that gives no token is never used and dropped, like lines
// without two parts and repeated ones (the first rank counts). Nearly every merge makes the token
// of the merge before it or the next one: a look there saves most of the searching.
static void vocab_read_merges(Vocab *v, Reader r, uint64_t n) {
    v->merge = xalloc((size_t)n, sizeof *v->merge);
    v->merge_of = xalloc((size_t)v->size, sizeof *v->merge_of);
    memset(v->merge_of, 0xFF, (size_t)v->size * sizeof *v->merge_of);
    Str joined = {0};
    int last = 0;
    for (uint64_t rank = 0; rank < n && !r.error; rank++) {
        Span s = rd_string(&r);
        const char *space = s.n > 2 ? memchr(s.p + 1, ' ', s.n - 2) : NULL;
        if (!space || s.n > UINT32_MAX) continue;
        uint32_t left = (uint32_t)(space - s.p);
        int id = last;
        if (!merge_gives(v, id, s, left) && !merge_gives(v, ++id, s, left)) {
            joined.n = 0;
            str_add(&joined, s.p, left), str_add(&joined, space + 1, s.n - left - 1);
            id = tok_find_piece(v, (Span){joined.p, joined.n});
        }
        if (id < 0) continue;
        last = id;
        int32_t m = v->merge_of[id];
        while (m >= 0 && v->merge[m].left != left) m = v->merge[m].next;
        if (m >= 0) continue;
        v->merge[rank] = (Merge){v->merge_of[id], left};
        v->merge_of[id] = (int32_t)rank;
    }
    str_free(&joined);
    rd_check(&r);
}

// Files made without the original tokenizer.model have one score for all. The order of the ids is
// the order of the merges then, only pieces of spaces come last (verified with three vocabularies).
static void vocab_repair_scores(Vocab *v) {
    float low = INFINITY, high = -INFINITY;
    for (int id = 0; id < v->size; id++)
        if (v->type[id] == TYPE_NORMAL)
            low = MIN(low, v->score[id]), high = MAX(high, v->score[id]);
    for (int id = 0; id < v->size && low == high; id++) {
        Span s = v->text[id];
        size_t i = 0;
        while (i < s.n && span_at(s, i, SPAN(TOK_BAR))) i += 3;
        v->score[id] = i < s.n ? -(float)id : -1e9f;
    }
}

// Texts of control tokens, whatever a file calls them: no user can type them. From the fifth on
// they end a reply (llama.cpp: src/llama-vocab.cpp). `</s>` is not among them: in Gemma's files it
// is an HTML tag like others, so it ends a reply only where the file makes it control.
static const char *const tok_controls[] = {
    "<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", // gpt-oss
    "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>",
    "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>", "<turn|>", "<eos>",
    "<EOT>", "\u2581<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>", "<|tool_response>", "[e~[",
    "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>",
    "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
};

static void vocab_control(Vocab *v, int id, bool stop) { // does it end a reply too?
    if (id >= 0) v->type[id] = TYPE_CONTROL, v->stop[id] |= stop;
}

static void vocab_specials(Vocab *v, const Gguf *g, Str *warnings) {
    static const char *const names[] = {"unknown", "bos", "eos", "eot", "eom", "fim_pad", "fim_rep",
                                        "fim_sep"};
    int ids[COUNT(names)];
    for (int i = 0; i < COUNT(names); i++) {
        char key[64];
        snprintf(key, sizeof key, "tokenizer.ggml.%s_token_id", names[i]);
        int64_t missing = v->score && i < 3 && i < v->size ? i : NO_TOKEN; // SentencePiece's own
        int64_t id = gguf_int(g, key, INT64_MIN, INT64_MAX, missing);
        ids[i] = id >= 0 && id < v->size ? (int)id : NO_TOKEN;
        if (id != ids[i])
            str_printf(warnings, "special token %" PRId64 " is ignored: %d tokens\n", id, v->size);
        if (i) vocab_control(v, ids[i], i > 1);
    }
    v->unk = ids[0], v->bos = ids[1], v->eos = ids[2];
    for (int i = 0; i < COUNT(tok_controls); i++)
        vocab_control(v, tok_find(v, (Span){tok_controls[i], strlen(tok_controls[i])}), i >= 4);
    int s = tok_find(v, SPAN("</s>")), end = tok_find(v, SPAN("<|end|>"));
    if (s >= 0 && v->type[s] == TYPE_CONTROL) v->stop[s] = true;
    bool harmony = tok_find(v, SPAN("<|return|>")) >= 0 && tok_find(v, SPAN("<|call|>")) >= 0;
    bool solar = tok_find(v, SPAN("<|flush|>")) >= 0 && tok_find(v, SPAN("<|calls|>")) >= 0;
    if ((harmony || solar) && end >= 0 && end != v->eos) v->stop[end] = false; // of one message
}

// Warnings are appended, one line each. Texts stay in the file.
static void vocab_from_gguf(Vocab *v, const Gguf *g, Str *warnings) {
    Reader tokens = *g->r, merges = tokens, scores = tokens, types = tokens;
    Span model = gguf_string(g, "tokenizer.ggml.model"), pre = gguf_string(g, "tokenizer.ggml.pre");
    uint64_t n = gguf_array(g, "tokenizer.ggml.tokens", GGUF_STRING, &tokens);
    uint64_t n_merges = gguf_array(g, "tokenizer.ggml.merges", GGUF_STRING, &merges);
    uint64_t n_scores = gguf_array(g, "tokenizer.ggml.scores", GGUF_F32, &scores);
    uint64_t n_types = gguf_array(g, "tokenizer.ggml.token_type", GGUF_I32, &types);
    *v = (Vocab){.bos = NO_TOKEN, .eos = NO_TOKEN, .unk = NO_TOKEN, .space = SPAN(TOK_BAR)};
    if (span_is(model, "no_vocab") || span_is(model, "none") || (!model.n && !n)) return;
    bool spm = span_is(model, "llama"), gemma4 = span_is(model, "gemma4");
    if (!spm && !gemma4 && !span_is(model, "gpt2"))
        die("%s: tokenizer.ggml.model is \"%.*s\", expected llama, gpt2 or gemma4", g->r->name,
            SHOWN(model));
    if (!n || n > 1 << 28 || n_merges > 1 << 30 || (n_scores && n_scores != n)
        || (n_types && n_types != n))
        die("%s: %" PRIu64 " tokens, %" PRIu64 " merges, %" PRIu64 " scores, %" PRIu64 " types",
            g->r->name, n, n_merges, n_scores, n_types);
    v->pre = spm ? NULL : pretok_find(gemma4 ? model : pre);
    if (!spm && !v->pre) {
        v->pre = &pretok[0];
        str_printf(warnings, "pre-tokenizer \"%.*s\" is unknown: \"default\" is used instead, many "
                   "texts may get wrong ids\n", SHOWN(pre));
    }
    int flags = spm ? PRE_PLAIN | PRE_BOS : v->pre->flags;
    v->kind = flags & PRE_PLAIN ? VOCAB_SPM : VOCAB_BPE;
    vocab_new(v, (int)n, spm);
    for (int id = 0; id < v->size; id++) {
        v->text[id] = rd_string(&tokens);
        uint32_t type = n_types ? (uint32_t)rd_uint(&types, 4) : TYPE_NORMAL;
        v->type[id] = type && type < TYPE_BYTE ? (uint8_t)type : TYPE_NORMAL; // see vocab_index
        if (spm && n_scores) v->score[id] = f32_at(rd_bytes(&scores, 4));
    }
    rd_check(&tokens);
    vocab_index(v);
    vocab_specials(v, g, warnings);
    vocab_hints(v);
    if (spm) vocab_repair_scores(v);
    else vocab_read_merges(v, merges, n_merges);
    if (v->kind == VOCAB_BPE) v->uni = uni_new();
    int add_bos = gguf_int(g, "tokenizer.ggml.add_bos_token", 0, 1, -1);
    v->add_bos = v->bos >= 0 && (gemma4 || (add_bos < 0 ? flags & PRE_BOS : add_bos));
    v->add_eos = v->eos >= 0 && gguf_int(g, "tokenizer.ggml.add_eos_token", 0, 1, 0);
    v->space_prefix = spm && gguf_int(g, "tokenizer.ggml.add_space_prefix", 0, 1, 1);
    v->strip_after = spm && tok_find(v, SPAN("<|placeholder1|>")) >= 0; // Phi-3
}

// llama2.c's tokenizer.bin: u32 longest, then for each token f32 score, i32 length, bytes. How many
// there are is for the model to say. Ids 1 and 2 are BOS and EOS, whatever their texts; these have
// newlines around them for display, which tok_piece puts back.
static void vocab_from_bin(Vocab *v, Reader *r, int vocab_size) {
    *v = (Vocab){.kind = VOCAB_SPM, .bin = true, .space = SPAN(" "), .space_prefix = true};
    vocab_new(v, vocab_size, true);
    uint64_t longest = rd_uint(r, 4), n = 0;
    for (; !r->error && r->at < r->size; n++) {
        const uint8_t *score = rd_bytes(r, 4);
        uint64_t length = rd_uint(r, 4);
        if (length > longest || length > 1 << 20) rd_fail(r, "a token longer than the longest");
        Span text = {(const char *)rd_bytes(r, length), (size_t)length};
        if (r->error || n >= (uint64_t)v->size) continue;
        if ((n == 1 || n == 2) && text.n > 2 && *text.p == '\n') text.p++, text.n -= 2;
        v->text[n] = text;
        v->score[n] = f32_at(score);
        v->type[n] = n == 0 ? TYPE_UNKNOWN : n <= 2 ? TYPE_CONTROL : TYPE_NORMAL;
    }
    rd_check(r);
    if (n != (uint64_t)vocab_size)
        die("%s: holds %" PRIu64 " tokens, the model has %d", r->name, n, vocab_size);
    vocab_index(v);
    vocab_hints(v);
    v->unk = 0, v->bos = vocab_size > 1 ? 1 : NO_TOKEN, v->eos = vocab_size > 2 ? 2 : NO_TOKEN;
    v->add_bos = v->bos >= 0;
    vocab_control(v, v->eos, true);
}

// ---- merging
typedef struct {             // the symbol that begins at this byte of the word
    uint32_t length, before; // bytes of it and of the one before it
    uint32_t order;          // of joining it with the next: smaller comes first
} Symbol;
#define NEVER UINT32_MAX     // an order: they make no token

typedef struct { // memory that the words of one text share
    const Vocab *v;
    Ids *out;
    Str text;
    Symbol *symbol;          // [cap]
    size_t cap;
    Heap heap;
    bool *whole;             // [size] merging this token's text is known to give it
} Encoder;

// Enters the pair that begins at byte i. Order: score from high to low or rank from low to high,
// then from left to right.
static void tok_pair(Encoder *e, Span word, uint32_t i) {
    const Vocab *v = e->v;
    Symbol *s = &e->symbol[i], *next = s + s->length;
    s->order = NEVER;
    if (i + s->length == word.n) return;
    int id = tok_find_piece(v, (Span){word.p + i, s->length + next->length});
    if (id < 0) return;
    if (v->score) s->order = (uint32_t)best_first(v->score[id]);
    else {
        int32_t m = v->merge_of[id];
        while (m >= 0 && v->merge[m].left != s->length) m = v->merge[m].next;
        s->order = (uint32_t)m; // -1 is NEVER
    }
    if (s->order != NEVER) heap_push(&e->heap, (uint64_t)s->order << 32 | i);
}

// Appends a symbol's token; else its bytes' tokens; else, without those, one unknown token.
// Byte-level vocabularies lack some bytes that no text has: dropped, as by the tokenizers library.
static void tok_add(const Vocab *v, Span s, Ids *out) {
    int id = tok_find_piece(v, s);
    if (id >= 0) ids_add(out, id);
    for (size_t i = 0; id < 0 && v->kind == VOCAB_SPM && i < s.n; i++) {
        int byte = v->byte_id[(uint8_t)s.p[i]];
        if (byte < 0) id = v->unk, i = s.n;
        if (byte >= 0 || id >= 0) ids_add(out, byte >= 0 ? byte : id);
    }
}

static void tok_merge(Encoder *e, Span word) { // appends the ids of one word
    e->symbol = grown(e->symbol, &e->cap, word.n + 1, sizeof *e->symbol); // one to write behind
    Symbol *s = e->symbol;
    uint32_t n = (uint32_t)word.n, before = 0, code;
    for (uint32_t i = 0; i < n; i += before) {
        s[i] = (Symbol){(uint32_t)utf8_next(word.p + i, n - i, &code), before, NEVER};
        before = s[i].length;
    }
    for (uint32_t i = 0; i < n; i += s[i].length) tok_pair(e, word, i);
    while (e->heap.n) {
        uint64_t key = heap_pop(&e->heap);
        uint32_t i = (uint32_t)key, next = i + s[i].length;
        if (s[i].order != key >> 32) continue; // the symbol is gone or has grown since
        s[i].length += s[next].length, s[next].order = NEVER;
        s[i + s[i].length].before = s[i].length;
        tok_pair(e, word, i);
        if (i) tok_pair(e, word, i - s[i].before);
    }
    for (uint32_t i = 0; i < n; i += s[i].length)
        tok_add(e->v, (Span){word.p + i, s[i].length}, e->out);
}

// A word whose own token merging arrives at takes that token at once; which words do is remembered:
// prose twice as fast.
static void tok_word(Encoder *e, Span word) {
    int id = tok_find_piece(e->v, word);
    if (id >= 0 && (e->whole[id] || (e->v->pre && e->v->pre->flags & PRE_WHOLE))) {
        ids_add(e->out, id);
        return;
    }
    size_t before = e->out->n;
    tok_merge(e, word);
    if (id >= 0) e->whole[id] = e->out->n == before + 1 && e->out->p[before] == id;
}

// SentencePiece: spaces become U+2581 and one may go in front. The text is cut before a space that
// no token could join to what stands before it: small heaps, and words that `whole` knows.
static void tok_spaced(Encoder *e, Span raw) {
    const Vocab *v = e->v;
    Str *word = &e->text;
    word->n = 0;
    if (v->space_prefix) str_add(word, v->space.p, v->space.n);
    for (size_t i = 0; i < raw.n; i++) {
        bool bar = span_at(raw, i, SPAN(TOK_BAR)), space = bar || raw.p[i] == ' '; // the same here
        Span next = space ? v->space : (Span){raw.p + i, 1};
        if (space && word->n && !v->glue[(uint8_t)word->p[word->n - 1]])
            tok_word(e, str_span(word)), word->n = 0;
        str_add(word, next.p, next.n), i += bar ? 2 : 0;
    }
    tok_word(e, str_span(word));
}

// Byte-level BPE: cuts the text into words by `pre` and maps their bytes.
static void tok_words(Encoder *e, Span raw) {
    const Vocab *v = e->v;
    Str composed = {0};
    if (v->pre->flags & PRE_NFC) raw = text_compose(v->uni, raw, &composed);
    int n;
    Letter *letter = letters_cut(v->uni, raw, v->pre->patterns, &n);
    for (int i = 0; i < n;) {
        const char *p = raw.p;
        do raw.p += letter[i].bytes;
        while (!letter[++i].cut);
        e->text.n = 0;
        for (; p < raw.p; p++) utf8_put(&e->text, byte_to_code((uint8_t)*p));
        tok_word(e, str_span(&e->text));
    }
    free(letter), str_free(&composed);
}

// ---- encoding
enum { TOK_SPECIAL = 1 };               // control tokens written in the text count
enum { TOK_MAX_TEXT = INT32_MAX / 4 };  // bytes; a space can grow to three, offsets are 32 bits

// The longest special token with which `rest` begins and that may match there, or NO_TOKEN. Control
// and unknown tokens need TOK_SPECIAL and bytes of which none was `typed` by a user.
static int special_at(const Vocab *v, Span rest, const uint8_t *typed, int flags) {
    int at = (uint8_t)rest.p[0] << 8 | (rest.n > 1 ? (uint8_t)rest.p[1] : 0);
    size_t longest = MIN(rest.n, v->longest[at]), untyped = 0;
    while (flags & TOK_SPECIAL && untyped < longest && !(typed && typed[untyped])) untyped++;
    for (size_t n = longest; n > 0; n--) {
        int id = tok_find(v, (Span){rest.p, n}), type = id < 0 ? TYPE_NORMAL : v->type[id];
        if (type == TYPE_USER) return id;
        if ((type == TYPE_CONTROL || type == TYPE_UNKNOWN) && n <= untyped) return id;
    }
    return NO_TOKEN;
}

// Appends the ids of a text, without BOS. typed: NULL, or for each byte of the text a byte that is
// not 0 where a user typed it: no control token matches there, user-defined ones do.
static void tok_encode(const Vocab *v, Span text, const uint8_t *typed, int flags, Ids *out) {
    if (v->kind == VOCAB_NONE) die("the model has no tokenizer: give token ids (--ids)");
    if (text.n > TOK_MAX_TEXT) die("a text of %zu bytes; at most %d", text.n, TOK_MAX_TEXT);
    Encoder e = {.v = v, .out = out, .whole = xalloc((size_t)v->size, sizeof *e.whole)};
    for (size_t i = 0, from = 0; i <= text.n && text.n; i++) {
        Span rest = {text.p + i, text.n - i}, raw = {text.p + from, i - from};
        int id = rest.n ? special_at(v, rest, typed ? typed + i : NULL, flags) : NO_TOKEN;
        if (id < 0 && rest.n) continue;
        if (raw.n && v->kind == VOCAB_SPM) tok_spaced(&e, raw);
        else if (raw.n) tok_words(&e, raw);
        if (id < 0) break;
        ids_add(out, id);
        from = i + v->text[id].n;
        bool keep = id == v->bos || id == v->unk || span_is(v->text[id], "<|endoftext|>");
        if (v->strip_after && !keep)
            while (from < text.n && isspace((unsigned char)text.p[from])) from++;
        i = from - 1;
    }
    free(e.symbol), free(e.heap.p), free(e.whole), str_free(&e.text);
}

// ---- decoding
// Appends the bytes of a token. prev: the id before it, -1 if there is none: at the beginning, and
// after BOS, the space that encoding put in front of the text is taken away again.
static void tok_piece(const Vocab *v, int id, int prev, Str *out) {
    if (id < 0 || id >= v->size) return; // rows that pad the embedding
    Span s = v->text[id];
    int type = v->type[id];
    bool around = v->bin && type == TYPE_CONTROL, first = prev < 0 || prev == v->bos;
    if (type != TYPE_NORMAL && type != TYPE_USER && type != TYPE_BYTE && !v->bin) return;
    if (type == TYPE_BYTE) str_add(out, &(char){(char)strtol(s.p + 3, NULL, 16)}, 1), s.n = 0;
    if (around) str_add(out, "\n", 1);
    if (v->space_prefix && first && type == TYPE_NORMAL && s.n && span_at(s, 0, v->space))
        s.p += v->space.n, s.n -= v->space.n;
    for (uint32_t code; s.n;) {
        size_t n = (size_t)utf8_next(s.p, s.n, &code);
        int byte = v->kind == VOCAB_BPE ? code_to_byte(code) : code == 0x2581 ? ' ' : -1;
        if (byte >= 0 && type != TYPE_USER) str_add(out, &(char){(char)byte}, 1);
        else str_add(out, s.p, n);
        s.p += n, s.n -= n;
    }
    if (around) str_add(out, "\n", 1);
}

static void tok_name(const Vocab *v, int id, Str *out) { // control tokens show their texts
    size_t before = out->n;
    tok_piece(v, id, INT_MAX, out);
    if (out->n > before) return;
    if (id < 0 || id >= v->size || !v->text[id].n) str_printf(out, "[%d]", id);
    else str_add(out, v->text[id].p, v->text[id].n);
}

// ---- Stream: from pieces to what may be shown. It holds back an unfinished character and whatever
// may become a stop string, and lets out nothing but valid UTF-8. On a terminal control characters
// are replaced (no model sends escape codes), before stop strings are looked for.
typedef struct {
    const Span *stops;       // [n_stops] none empty
    int n_stops;
    bool terminal;
    bool stopped;            // a stop string came: all that follows is dropped
    Str raw;                 // the unfinished character
    Str held;                // text given out by the last call, and after it text not shown yet
    size_t shown;            // bytes of the former
} Stream;

static void str_drop(Str *s, size_t n) { // the first n bytes
    if (n) memmove(s->p, s->p + n, s->n -= n);
}

// Bytes of held that may be shown: those before the first stop string, or before what may become
// one. Which begins first counts, so that the pieces a text comes in make no difference.
static size_t stream_ready(Stream *s, bool end) {
    for (size_t at = 0; at < s->held.n; at++)
        for (int i = 0; i < s->n_stops; i++) {
            Span t = s->stops[i];
            size_t n = MIN(t.n, s->held.n - at);
            if (memcmp(s->held.p + at, t.p, n) || (n < t.n && end)) continue;
            s->stopped = n == t.n;
            return at;
        }
    return s->held.n;
}

// Adds bytes and returns what may be shown now (valid until the next call). end: the last of them,
// nothing waits any more.
static Span stream_push(Stream *s, Span bytes, bool end) {
    size_t at = 0;
    if (!s->stopped) str_add(&s->raw, bytes.p, bytes.n);
    for (uint32_t code; at < s->raw.n;) { // whole characters go from raw to held
        const char *p = s->raw.p + at;
        int n = utf8_length(p, s->raw.n - at);
        if (!n && !end) break;
        bool hidden = s->terminal && n > 0 && is_control(p) && *p != '\n' && *p != '\t';
        at += (size_t)utf8_next(p, s->raw.n - at, &code);
        utf8_put(&s->held, hidden || n < 1 ? 0xFFFD : code); // U+FFFD for invalid bytes
    }
    str_drop(&s->raw, at);
    str_drop(&s->held, s->shown);
    s->shown = s->stopped ? 0 : stream_ready(s, end);
    return (Span){s->held.p, s->shown};
}

static void stream_free(Stream *s) { str_free(&s->raw), str_free(&s->held); }
/* ------------------------------------------------------------------------------------------------
 * Chapter 9. Choosing a token
 *
 * Logits in, one index out. The steps and their order: repetition penalty; at temperature 0 the
 * largest logit, the lowest id among equals; else top-k; division by the temperature and softmax;
 * min-p; top-p; one draw. Zero means off for each. With llama2.c's options alone this is llama2.c's
 * sampler: the same generator, one number a token, candidates walked in id order without top-p and
 * in falling probability with it, so its seeds give its texts. The vocabulary is never sorted: a
 * heap gives up its best until enough probability is gathered.
 */
enum { PENALTY_WINDOW = 64 };           // tokens that the repetition penalty looks back on

typedef struct {
    float temperature, top_p, min_p, repeat_penalty;
    int top_k;
    uint64_t rng;
    int isa;                            // of the exponentials
    uint64_t *list;                     // (vocab_size) candidates: best_first << 32 | id
    Heap heap;
} Sampler;

static void penalise(float *logits, int n, const int *recent, int n_recent, float penalty) {
    int from = MAX(0, n_recent - PENALTY_WINDOW);
    for (int i = from; i < n_recent; i++) {
        int id = recent[i], j = from;
        while (recent[j] != id) j++;
        if (j == i && id < n)
            logits[id] = logits[id] > 0 ? logits[id] / penalty : logits[id] * penalty;
    }
}

static int argmax(int isa, const float *logits, int n) {
    float max = vec_ops[isa].row_max(logits, 0, n);
    int best = 0;
    while (best < n - 1 && logits[best] != max) best++;
    return best;
}

// Leaves the best of n candidates in the list, best first: at most `most`, and no more than it
// takes for their sum to pass `enough`. Gives their number.
static int keep_best(Sampler *s, int n, int most, float enough, float *sum) {
    int kept = 0;
    s->heap.n = 0;
    for (int i = 0; i < n; i++) heap_push(&s->heap, s->list[i]);
    for (*sum = 0; kept < MIN(n, most) && *sum <= enough; kept++) {
        s->list[kept] = heap_pop(&s->heap);
        *sum += best_first_value(s->list[kept] >> 32);
    }
    return kept;
}

_Noreturn static void die_not_finite(void) {
    die("the model's logits are not finite numbers (a damaged file?)");
}

// The next token after the n_recent tokens before it; logits (n) are used up.
static int sample(Sampler *s, float *logits, int n, const int *recent, int n_recent) {
    uint32_t bits, not_finite = 0;
    for (int i = 0; i < n; i++) {       // an exponent of ones is infinite or no number
        memcpy(&bits, &logits[i], 4);
        not_finite |= (bits & 0x7F800000) + 0x00800000;
    }
    if (not_finite >> 31) die_not_finite();
    if (s->repeat_penalty > 0 && s->repeat_penalty != 1)
        penalise(logits, n, recent, n_recent, s->repeat_penalty);
    int top = argmax(s->isa, logits, n);
    if (s->temperature == 0) return top;

    for (int i = 0; i < n; i++) s->list[i] = best_first(logits[i]) << 32 | (uint32_t)i;
    float total;
    int size = s->top_k > 0 && s->top_k < n ? keep_best(s, n, s->top_k, INFINITY, &total) : n;
    for (int i = 0; i < size; i++) logits[i] = best_first_value(s->list[i] >> 32) / s->temperature;
    float max = vec_ops[s->isa].row_max(logits, 0, size);
    if (!isfinite(max)) return top;     // so low a temperature that the division overflowed
    float sum = vec_ops[s->isa].exps(logits, 0, size, max), best = 1 / sum;
    // below (1 - p) / (n - 1) a candidate cannot be among those that top-p keeps
    float least = s->top_p > 0 && s->top_p < 1 && size > 1 ? (1 - s->top_p) / (float)(size - 1) : 0;
    least = MAX(least, s->min_p * best);
    int kept = 0;
    total = 0;
    for (int i = 0; i < size; i++) {
        float p = logits[i] / sum;
        if (p < least && p < best) continue;
        s->list[kept++] = best_first(p) << 32 | (uint32_t)s->list[i];
        total += p;
    }
    if (s->top_p > 0 && s->top_p < 1) kept = keep_best(s, kept, kept, s->top_p, &total);
    else if (kept == size) total = 1;   // nothing was left out: the whole of the softmax
    float coin = rng_float(&s->rng) * total, reached = 0;
    int i = 0;                          // the last one, where rounding left a gap at the end
    while (i < kept - 1 && coin >= (reached += best_first_value(s->list[i] >> 32))) i++;
    return (int)(uint32_t)s->list[i];
}
/* ------------------------------------------------------------------------------------------------
 * Chapter 10. Sessions
 *
 * A session is a list of tokens that the cache must agree with. session_sync is the one way to
 * change it: what the new list shares with the old at its start stays, the rest is forgotten and
 * the new tokens are read in chunks. A chat simply gives its whole conversation every turn.
 * Forgetting costs nothing: rows past the end of the list are overwritten before anyone reads them.
 * The cache is reserved at once but touched only as positions are used, so a large -c costs address
 * space, not memory.
 */
static void session_cache(Session *s, size_t kv) { // floats of the widest layer's keys
    const double bytes = (double)cache_bytes_per_token(s->model, s->half) * (double)kv_room(s);
    const double most = memory_size();
    if (bytes > most)
        die("the cache for %d positions takes %.1f GB, this machine has %.1f: use a smaller -c",
            s->seq_len, bytes / 1e9, most / 1e9);
    s->slot_bytes = 2 * kv * (size_t)kv_room(s) * (s->half ? 2 : 4); // keys and values
    s->cache = xalloc(s->slot_bytes, (size_t)s->model->config.n_layers);
}

// A session of seq_len positions; logits for `logit_rows` rows at once. All scratch is one piece of
// memory, of which the system gives a page when it is first touched.
static Session *session_new(const Model *m, int seq_len, int chunk, bool half, int threads,
                            int logit_rows) {
    const Config *c = &m->config;
    Session *s = aligned_alloc(64, sizeof *s);
    if (!s) die("out of memory: %zu bytes", sizeof *s);
    memset(s, 0, sizeof *s);
    s->model = m, s->seq_len = seq_len, s->chunk = MIN(chunk, seq_len), s->half = half;
    s->team = (Team){.n = threads, .isa = isa_best()}, s->logit_rows = MIN(logit_rows, s->chunk);
    size_t n = (size_t)s->chunk, heads = 0, kv = 0, hidden = 0, dim = (size_t)c->dim;
    for (const Layer *l = m->layers; l < m->layers + c->n_layers; l++) {
        heads = MAX(heads, (size_t)l->n_heads * (size_t)l->head_size);
        kv = MAX(kv, (size_t)l->n_kv_heads * (size_t)l->head_size);
        hidden = MAX(hidden, (size_t)l->hidden_dim);
    }
    session_cache(s, kv);
    size_t pairs = n * (size_t)c->n_used, expert = (size_t)c->expert_dim;
    size_t acts = acts_bytes(s->chunk, (int64_t)MAX(MAX(heads, hidden), dim));
    size_t pair_acts = MAX(acts, acts_bytes((int)pairs, (int64_t)MAX(dim, expert)));
    const struct { void *field; size_t bytes;
    } parts_of_it[] = {
        {&s->tokens, (size_t)seq_len * sizeof(int)},
        {&s->rows, n * sizeof(Row)},
        {&s->x, n * dim * 4},
        {&s->branch, n * dim * 4},
        {&s->q, n * heads * 4},
        {&s->k, n * kv * 4},
        {&s->v, n * kv * 4},
        {&s->h1, MAX(n * hidden, pairs * expert) * 4},
        {&s->h3, MAX(n * hidden, pairs * expert) * 4},
        {&s->turn, n * (size_t)(c->rope[ROPE_FULL].n_rot + c->rope[ROPE_WINDOW].n_rot) * 4},
        {&s->acts, acts},
        {&s->pair_acts, pair_acts},
        {&s->route, n * (size_t)c->n_experts * 4},
        {&s->share, pairs * 4},
        {&s->chosen, pairs * 4},
        {&s->place, pairs * 4},
        {&s->expert, 3 * (size_t)c->n_experts * sizeof(Tensor)},
        {&s->product, 3 * (size_t)c->n_experts * sizeof(Product)},
        {&s->expert_out, pairs * dim * 4},
        {&s->scores, (size_t)threads * QUERY_TILE * (size_t)kv_room(s) * 4},
        {&s->logits, (size_t)s->logit_rows * (size_t)c->vocab_size * 4},
        {&s->worker[0].scratch, (size_t)threads * matmul_scratch()},
    };
    size_t total = 64;
    for (int i = 0; i < COUNT(parts_of_it); i++) total += (parts_of_it[i].bytes + 63) / 64 * 64;
    s->memory = xalloc(total, 1);
    uint8_t *at = s->memory + (64 - (uintptr_t)s->memory % 64);
    for (int i = 0; i < COUNT(parts_of_it); i++) {
        memcpy(parts_of_it[i].field, &at, sizeof at);
        at += (parts_of_it[i].bytes + 63) / 64 * 64;
    }
    for (int i = 0; i < threads; i++)
        s->worker[i] = (Worker){&s->team, i, s->worker[0].scratch + (size_t)i * matmul_scratch()};
    return s;
}

// Appends n <= chunk tokens in one pass; the caller has made sure that they fit.
static float *session_feed(Session *s, const int *ids, int n, int want) {
    assert(s->n_tokens + n <= s->seq_len);
    for (int i = 0; i < n; i++) {
        s->rows[i] = (Row){ids[i], s->n_tokens + i};
        s->tokens[s->n_tokens + i] = ids[i];
    }
    s->n_tokens += n, s->fed += n;
    return forward(s, n, want);
}

// Makes the session hold exactly these n tokens, n <= seq_len, and gives the logits after the last
// one; NULL if there is none or Ctrl-C came in between. `progress` goes to stderr.
static float *session_sync(Session *s, const int *ids, int n, bool progress) {
    int common = 0;
    while (common < s->n_tokens && common < n - 1 && s->tokens[common] == ids[common]) common++;
    s->n_tokens = common;
    double start = now();
    float *logits = NULL;
    bool shown = false;
    while (s->n_tokens < n && !interrupted) {
        int step = MIN(s->chunk, n - s->n_tokens);
        logits = session_feed(s, ids + s->n_tokens, step,
                              s->n_tokens + step == n ? WANT_LAST : WANT_NONE);
        if (progress && s->n_tokens < n && now() - start > 1.0) {
            fprintf(stderr, "\rreading %d of %d tokens", s->n_tokens, n);
            shown = true;
        }
    }
    if (shown) fprintf(stderr, "\r%40s\r", "");
    return s->n_tokens == n ? logits : NULL;
}
/* ------------------------------------------------------------------------------------------------
 * Chapter 12. Manners
 *
 * An instruct model expects its conversation in the form it was trained on. Files bring that form
 * as a program in a template language; in truth it is a few strings around each message, and these
 * are the rows of templates[]. The row is recognised by marks in the file's own template. A
 * conversation is rendered as one text and tokenised as a whole, so that words and spaces join
 * across the borders as they do in the reference, with one byte of memory for each byte of text:
 * does it come from a message? Where it does, no control token is recognised. What a user types is
 * data, whatever it looks like. Models that think write their thoughts between two marks in front
 * of the answer; whether these stay in the conversation is the template's choice.
 */
enum { SYSTEM, USER, REPLY };           // roles
typedef struct { int role; Str text; } Message;
typedef struct { Message *p; int n; size_t cap; } Conversation;

enum {                                  // rules of a template
    TRIM_SYSTEM = 1, TRIM_USER = 2, TRIM_REPLY = 4, // white space around these is dropped,
    TRIM_ALL = 7, TRIM_SYSTEM_END = 8,  // or only behind the system text, or only newlines in
    TRIM_NEWLINES = 16,                 // front of a reply: with FORGET, of what is left of it
    EMPTY_IS_NONE = 32,                 // an empty system text counts as none given
    IN_FIRST = 64, IN_LAST = 128,       // the system text stands inside the first, last user
    TRIM_JOINT = 256,                   // message; white space is dropped around both together
    FORGET = 512,                       // earlier replies lose all up to the end of their thinking
    SWITCH_ON = 1024, SWITCH_OFF = 2048, // thinking can be switched; by default it is on, off
    BOS = 4096,                         // a conversation begins with it, whatever the file says
};

/* To add a template: a row with marks that its text holds (!: must not hold), then the form of each
 * kind of message, where {} is its text, {bos} and {eos} are the vocabulary's own, {date FORMAT} is
 * --date, and {+TEXT} and {-TEXT} stand with thinking on, off. Rows are tried from the top.
 * tests/templates.py makes the renderings. */
typedef struct {
    const char *name;
    int rules;
    const char *mark[4], *system, *user, *reply;
    const char *ask;       // where a reply begins; NULL: as in `reply`, without a space at the end
    const char *start;     // before everything; NULL: BOS, where the file's template speaks of it
    const char *preset;    // the system text if none is given; NULL: see form_preset
    const char *more[2];   // with thinking, it goes on with what the file has between these
    const char *date;      // NULL: 2024-07-26, Llama 3's
    const char *think[2];  // marks around thinking; NULL: <think> and </think>
} Template;

#define TURNS(a, b, c) .user = a "user" b "{}" c, a "assistant" b "{}" c
#define ROLES(a, b, c) .system = a "system" b "{}" c, TURNS(a, b, c)
#define CHATML ROLES("<|im_start|>", "\n", "<|im_end|>\n")
#define GRANITE ROLES("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>\n")
#define LLAMA3(roles) roles("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>")
#define DEEPSEEK(reply) .system = "{}", "<｜User｜>{}", reply "{}<｜end▁of▁sentence｜>"
#define MISTRAL(user) .system = "{}\n\n", user
#define SMOLLM3(today, tail) TRIM_SYSTEM_END | TRIM_NEWLINES | EMPTY_IS_NONE | SWITCH_ON, \
    .system = "<|im_start|>system\n## Metadata\n\nKnowledge Cutoff Date: June 2025\n" today \
        "Reasoning Mode: {+/think}{-/no_think}\n\n## Custom Instructions\n\n{}\n\n" tail, \
    "<|im_start|>user\n{}<|im_end|>\n", \
    "<|im_start|>assistant\n{-<think>\n\n</think>\n}{}<|im_end|>\n", .date = "2025-07-08", \
    .preset = "You are a helpful AI assistant named SmolLM, trained by Hugging Face.", \
    .more = {"Hugging Face.", "\n\n"}

static const Template templates[] = {
    {"smollm3", SMOLLM3("Today Date: {date %d %B %Y}\n", ""),
     .mark = {"Reasoning Mode: ", "Today Date: "}},
    {"smollm3-gguf", SMOLLM3("", "<|im_end|>\n"), .mark = {"Reasoning Mode: "}}, // as many have it
    {"qwen3.5", TRIM_ALL | TRIM_NEWLINES | FORGET | SWITCH_ON,
     {"<|im_start|>", "enable_thinking is false", "'<think>\\n' }}", "!bos_token"}, CHATML,
     "<|im_start|>assistant\n<think>\n{-\n</think>\n\n}"},
    {"qwen3", TRIM_NEWLINES | FORGET | SWITCH_ON, {"<|im_start|>", "enable_thinking is false"},
     CHATML, "<|im_start|>assistant\n{-<think>\n\n</think>\n\n}"},
    {"qwen3-thinking", TRIM_NEWLINES | FORGET, // QwQ too
     {"<|im_start|>", "assistant\\n<think>\\n'", "!enable_thinking"}, CHATML,
     "<|im_start|>assistant\n<think>\n"},
    {"lfm2", EMPTY_IS_NONE, {"<|im_start|>", "\" + ns.system_prompt + \"<|im_end|>"}, CHATML},
    {"chatml", 0, {"<|im_start|>"}, CHATML}, // Qwen 1.5 to 2.5, SmolLM2 and many more
    {"mistral-v7-tekken", BOS, {"[SYSTEM_PROMPT]", "![SYSTEM_PROMPT] "},
     .system = "[SYSTEM_PROMPT]{}[/SYSTEM_PROMPT]", "[INST]{}[/INST]", "{}{eos}",
     .date = "2025-06-20", .think = {"[THINK]", "[/THINK]"}},
    {"mistral-v7", BOS, {"[SYSTEM_PROMPT]"},
     .system = "[SYSTEM_PROMPT] {}[/SYSTEM_PROMPT]", "[INST] {}[/INST]", " {}{eos}"},
    {"mistral-v3-tekken", BOS | IN_LAST, {"\"[INST]\""}, MISTRAL("[INST]{}[/INST]"), "{}{eos}"},
    {"mistral-v3", BOS | IN_LAST | TRIM_REPLY, {"\"[INST] \""},
     MISTRAL("[INST] {}[/INST]"), " {}{eos}"},
    {"mistral-v1", BOS | IN_FIRST, {"' [INST] '"}, MISTRAL(" [INST] {} [/INST]"), " {}{eos}"},
    {"llama2", TRIM_USER | TRIM_REPLY | IN_FIRST | TRIM_JOINT, {"[INST]", "<<SYS>>"}, .start = "",
     .system = "<<SYS>>\n{}\n<</SYS>>\n\n", "{bos}[INST] {} [/INST]", " {} {eos}"},
    {"mistral", BOS | IN_FIRST, {"[INST]"}, MISTRAL("[INST] {} [/INST]"), "{}{eos}"}, // the first
    {"llama3.1", BOS | TRIM_ALL, {"<|start_header_id|>", "Cutting Knowledge Date"}, LLAMA3(TURNS),
     .system = "<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December "
     "2023\nToday Date: {date %d %b %Y}\n\n{}<|eot_id|>", .preset = ""},
    {"llama3", BOS | TRIM_ALL, {"<|start_header_id|>"}, LLAMA3(ROLES)},
    {"gemma", BOS | TRIM_USER | TRIM_REPLY | IN_FIRST, {"<start_of_turn>"}, .system = "{}\n\n",
     "<start_of_turn>user\n{}<end_of_turn>\n", "<start_of_turn>model\n{}<end_of_turn>\n"},
    {"phi3", 0, {"<|assistant|>", "<|end|>", "bos_token"}, ROLES("<|", "|>\n", "<|end|>\n")},
    {"phi3.5", EMPTY_IS_NONE, {"<|assistant|>", "<|end|>"}, ROLES("<|", "|>\n", "<|end|>\n")},
    {"olmo2", BOS, {"<|assistant|>", "<|user|>", "bos_token"},
     .system = "<|system|>\n{}\n", "<|user|>\n{}\n", "<|assistant|>\n{}{eos}\n"},
    {"zephyr", 0, {"<|assistant|>", "<|user|>", "eos_token"}, ROLES("<|", "|>\n", "{eos}\n")},
    {"deepseek-v3.1", BOS | FORGET | SWITCH_OFF, {"<｜User｜>", "if not thinking"},
     DEEPSEEK("<｜Assistant｜></think>"), "<｜Assistant｜>{+<think>}{-</think>}"},
    {"deepseek-r1", BOS | FORGET, {"<｜User｜>", "<｜Assistant｜><think>\\n"},
     DEEPSEEK("<｜Assistant｜>"), "<｜Assistant｜><think>\n"},
    {"deepseek-r1-0528", BOS | FORGET, {"<｜User｜>", "split('</think>')"}, // the first R1 too
     DEEPSEEK("<｜Assistant｜>")},
    {"deepseek-v3", BOS, {"<｜User｜>"}, DEEPSEEK("<｜Assistant｜>")},
    {"deepseek-v2", BOS, {"'Assistant: ' + message['content'] + eos_token"},
     .system = "{}\n\n", "User: {}\n\n", "Assistant: {}{eos}"},
    {"granite-3.3", 0, {"<|start_of_role|>", "April 2024. Today's Date: "}, GRANITE,
     .preset = "Knowledge Cutoff Date: April 2024. Today's Date: {date %B %d, %Y}. You are "
     "Granite, developed by IBM. You are a helpful AI assistant.", .date = "2025-04-16"},
    {"granite-4", EMPTY_IS_NONE, {"<|start_of_role|>", "if ns.system_message"}, GRANITE},
    {"granite-3", 0, {"<|start_of_role|>"}, GRANITE},
    {"gpt-oss", EMPTY_IS_NONE | SWITCH_ON, {"<|start|>", "<|channel|>"},
     .system = "<|start|>developer<|message|># Instructions\n\n{}\n\n<|end|>",
     "<|start|>user<|message|>{}<|end|>", "<|start|>assistant<|channel|>final<|message|>{}<|end|>",
     "<|start|>assistant",
     "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI."
     "\nKnowledge cutoff: 2024-06\nCurrent date: {date %Y-%m-%d}\n\nReasoning: {+medium}{-low}\n\n"
     "# Valid channels: analysis, commentary, final. Channel must be included for every message."
     "<|end|>", .date = "2025-08-05",
     .think = {"<|start|>assistant<|channel|>analysis<|message|>",
               "<|start|>assistant<|channel|>final<|message|>"}},
    {"plain", BOS, {NULL}, .system = "{}\n", "{}\n", "{}\n"},
};

// A template and all that decides about its text.
typedef struct {
    const Template *t;
    const Vocab *v;
    Str file;                           // the template of the model's file
    bool think;
    struct tm date;
    Str preset;                         // the system text when none is given; p = NULL: none
} Form;

static bool span_starts(Span s, const char *word) {
    return span_at(s, 0, (Span){word, strlen(word)});
}

static const char *span_find(Span s, const char *word) { // NULL: it is not there
    size_t n = strlen(word);
    for (size_t at = 0; at + n <= s.n; at++)
        if (!memcmp(s.p + at, word, n)) return s.p + at;
    return NULL;
}

static Span span_from(Span s, const char *p) { return (Span){p, (size_t)(s.p + s.n - p)}; }

// Bytes at the end of s with which `word` begins.
static size_t span_overlap(Span s, const char *word) {
    size_t n = MIN(s.n, strlen(word));
    while (n && memcmp(s.p + s.n - n, word, n)) n--;
    return n;
}

// The escapes of C in place: \n \t \r \\ \" \' \0 \xHH; anything else stays as it is.
static void unescape(Str *s) {
    static const char from[] = "ntr\\\"'0", to[] = "\n\t\r\\\"'\0";
    size_t n = 0;
    for (size_t i = 0; i < s->n; i++) { // looks no further than the 0 behind the text
        const char *p = s->p + i, *known = *p == '\\' && p[1] ? strchr(from, p[1]) : NULL;
        bool hex = *p == '\\' && p[1] == 'x' && isxdigit((uint8_t)p[2]) && isxdigit((uint8_t)p[3]);
        char code = hex ? (char)strtol((char[]){p[2], p[3], 0}, NULL, 16) : *p;
        s->p[n++] = known ? to[known - from] : code;
        i += known ? 1 : hex ? 3 : 0;
    }
    if (s->p) s->p[s->n = n] = 0;
}

static const Template *template_named(const char *name) {
    for (int i = 0; i < COUNT(templates); i++)
        if (!strcmp(name, templates[i].name)) return &templates[i];
    return NULL;
}

static const Template *template_find(Span file) { // the row for a template text, or NULL
    for (const Template *t = templates; t < templates + COUNT(templates); t++) {
        bool fits = t->mark[0] != NULL;
        for (int k = 0; k < COUNT(t->mark) && t->mark[k]; k++)
            fits &= !span_find(file, t->mark[k] + (*t->mark[k] == '!')) == (*t->mark[k] == '!');
        if (fits) return t;
    }
    return NULL;
}

// A text under construction and, byte for byte, whether it came from a message.
typedef struct { Str text, typed; } Rendering;

static void render_bytes(Rendering *r, Span s, bool typed) {
    str_add(&r->text, s.p, s.n);
    for (size_t i = 0; i < s.n; i++) str_add(&r->typed, typed ? "\1" : "\0", 1);
}

// A form up to its {}, or all of it where it has none; gives what is left.
static const char *render_form(Rendering *r, const Form *f, const char *form) {
    for (;; form++) {
        size_t n = strcspn(form, "{");
        render_bytes(r, (Span){form, n}, false);
        form += n;
        if (!*form) return form;
        Span word = {form + 1, strcspn(form + 1, "}")};
        form += 1 + word.n;
        if (!word.n) return form + 1;
        int id = span_is(word, "bos") ? f->v->bos : span_is(word, "eos") ? f->v->eos : NO_TOKEN;
        if (id >= 0) render_bytes(r, f->v->text[id], false);
        else if (span_starts(word, "date ")) {
            char format[32], date[64];
            snprintf(format, sizeof format, "%.*s", (int)word.n - 5, word.p + 5);
            render_bytes(r, (Span){date, strftime(date, sizeof date, format, &f->date)}, false);
        } else if (*word.p == (f->think ? '+' : '-'))
            render_bytes(r, span_from(word, word.p + 1), false);
    }
}

static void rendering_free(Rendering *r) { str_free(&r->text), str_free(&r->typed); }

static bool is_white(uint32_t c) { // what the reference's strip() takes away
    return (c < 128 && isspace((int)c)) || (c >= 0x1C && c <= 0x1F) || c == 0x85 || c == 0xA0
           || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029
           || c == 0x202F || c == 0x205F || c == 0x3000;
}

static Span span_trim(Span s) {
    size_t from = 0, to = 0;
    for (size_t at = 0; at < s.n;) {
        uint32_t code;
        size_t next = at + (size_t)utf8_next(s.p + at, s.n - at, &code);
        if (!is_white(code)) from = to ? from : at, to = next;
        at = next;
    }
    return (Span){s.p + from, to - from};
}

// What stands between two texts, where it is text and not code that makes one; p = NULL: nowhere.
static Span span_between(Span s, const char *before, const char *behind) {
    const char *end = s.p, *code;       // each byte is searched once, however often `before` comes
    for (const char *found; before && *before && (found = span_find(s, before));) {
        s = span_from(s, found + strlen(before));
        if (end < s.p && !(end = span_find(s, behind))) break;
        Span text = {s.p, (size_t)(end - s.p)};
        if (strchr("'\"", *text.p)) continue;
        if (!(code = span_find(text, "}}"))) return text;
        s = span_from(s, code);
    }
    return (Span){0};
}

// The system text of a conversation that gives none: the row's; or what the file's template says,
// in default_system_message (a date may be joined to it) or in a whole message of the row's form.
static void form_preset(Form *f) {
    const Template *t = f->t;
    Rendering r = {0};
    Span text = {0}, file = str_span(&f->file);
    if (t->preset) {
        render_form(&r, f, t->preset);
        if (f->think) text = span_between(file, t->more[0], t->more[1]);
    } else {
        text = span_between(file, "default_system_message = '", "' %}");
        if (!text.p) text = span_between(file, "default_system_message = \"", "\" %}");
        render_bytes(&r, (Span){t->system, strcspn(t->system, "{")}, false);
        if (!text.p) text = span_between(file, r.text.p, strstr(t->system, "{}") + 2);
        rendering_free(&r);
    }
    const char *today = "\" + today + \"", *found = span_find(text, today);
    if (found) {
        render_bytes(&r, (Span){text.p, (size_t)(found - text.p)}, false);
        render_form(&r, f, "{date %Y-%m-%d}");
        text = span_from(text, found + strlen(today));
    }
    if (text.p) render_bytes(&r, text, false);
    f->preset = r.text;
    str_free(&r.typed);
}

// YYYY-MM-DD, a day that exists.
static bool date_parse(const char *text, struct tm *date) {
    int year, month, day, n = 0;
    if (sscanf(text, "%4d-%2d-%2d%n", &year, &month, &day, &n) != 3 || n != 10 || text[n])
        return false;
    struct tm day_of = {.tm_year = year - 1900, .tm_mon = month - 1, .tm_mday = day, .tm_hour = 12};
    *date = day_of;
    return mktime(&day_of) != -1 && day_of.tm_mday == day && day_of.tm_mon == month - 1;
}

enum { THINK_UNSAID, THINK_ON, THINK_OFF, THINK_HIDE }; // --think

static Form form_new(const Template *t, const Vocab *v, Span file, int think, const char *date) {
    Form f = {.t = t, .v = v};
    str_add(&f.file, file.p, file.n), unescape(&f.file);
    f.think = think == THINK_UNSAID ? !(t->rules & SWITCH_OFF) : think != THINK_OFF;
    date_parse(date ? date : t->date ? t->date : "2024-07-26", &f.date);
    form_preset(&f);
    return f;
}

// The row for a model's chat: that of its own template or, with a warning, what its vocabulary
// suggests.
static const Template *template_of(const Model *m, bool quiet) {
    const Template *t = m->gguf ? template_find(m->chat_template) : template_named("llama2");
    if (t) return t;
    t = template_named(tok_find(&m->vocab, SPAN("<|im_start|>")) >= 0 ? "chatml" : "plain");
    if (!quiet)
        warn_line("%s: %s; the chat uses the form `%s` (--template NAME forces another)",
                  m->file.name, m->chat_template.n ? "a chat template of an unknown kind"
                                : "no chat template: is this an instruct model?", t->name);
    return t;
}

static void message_add(Conversation *c, int role, Span text) {
    c->p = grown(c->p, &c->cap, (size_t)c->n + 1, sizeof *c->p);
    c->p[c->n] = (Message){.role = role};
    str_add(&c->p[c->n++].text, text.p, text.n);
}

// Takes `n` messages out, from the one at `at` on.
static void messages_drop(Conversation *c, int at, int n) {
    for (int i = at; i < at + n; i++) str_free(&c->p[i].text);
    memmove(c->p + at, c->p + at + n, sizeof(Message) * (size_t)(c->n - at - n));
    c->n -= n;
}

static const char *think_mark(const Template *t, int which) { // 0 before thinking, 1 behind it
    return t->think[which] ? t->think[which] : which ? "</think>" : "<think>";
}

// A reply as far as it came: what was thought, and the answer, p = NULL where it has not begun.
// What may become a mark belongs to neither; at the `end` nothing may. The first `seed` bytes are
// the prompt's.
typedef struct { Span thought, answer; } Parts;

static Parts reply_parts(const Template *t, Span reply, size_t seed, bool end) {
    const char *open = think_mark(t, 0), *close = think_mark(t, 1);
    Span text = reply;
    while (text.n && isspace((uint8_t)*text.p)) text.p++, text.n--;
    bool maybe = !strncmp(text.p, open, text.n) || !strncmp(text.p, close, text.n);
    if (span_starts(text, open)) text = span_from(text, text.p + strlen(open));
    else if (maybe && !end) return (Parts){0};
    else if (!span_starts(text, close)) return (Parts){{0}, span_from(reply, reply.p + seed)};
    const char *found = span_find(text, close);
    if (found)
        return (Parts){{text.p, (size_t)(found - text.p)}, span_from(text, found + strlen(close))};
    text.n -= end ? 0 : span_overlap(text, close);
    return (Parts){text, {0}};
}

// White space, and earlier thinking, as the template has it.
static Span message_text(const Template *t, const Message *m) {
    Span text = str_span(&m->text), trimmed = span_trim(text);
    if (t->rules & TRIM_SYSTEM << m->role) text = trimmed;
    if (t->rules & TRIM_SYSTEM_END && m->role == SYSTEM)
        text.n = (size_t)(trimmed.p + trimmed.n - text.p);
    if (m->role != REPLY) return text;
    const char *close = think_mark(t, 1), *found;
    bool whole = t->rules & FORGET;     // as yet
    for (; t->rules & FORGET && (found = span_find(text, close)); whole = false)
        text = span_from(text, found + strlen(close));
    while (t->rules & TRIM_NEWLINES && !whole && text.n && *text.p == '\n') text.p++, text.n--;
    return text;
}

static void render_system(Rendering *r, const Form *f, Span text, bool typed) {
    if (!text.p) return;                // not even a preset
    const char *rest = render_form(r, f, f->t->system);
    render_bytes(r, text, typed);
    render_form(r, f, rest);
}

// The conversation without the `skip` messages that follow the system message, ending where the
// model is to reply. An empty system message is a message.
static Rendering render(const Form *f, const Conversation *c, int skip) {
    const Template *t = f->t;
    Rendering r = {0};
    Span system = str_span(&f->preset);
    int from = c->n && c->p[0].role == SYSTEM;
    bool typed = from && (message_text(t, c->p).n || !(t->rules & EMPTY_IS_NONE));
    if (typed) system = message_text(t, c->p);
    from += skip;
    int place = t->rules & IN_FIRST ? from : t->rules & IN_LAST ? c->n - 1 : -1;
    bool bos = t->rules & BOS || span_find(str_span(&f->file), "bos_token");
    render_form(&r, f, t->start ? t->start : bos ? "{bos}" : "");
    if (place < 0) render_system(&r, f, system, typed);
    for (int i = from; i < c->n; i++) {
        const char *rest = render_form(&r, f, c->p[i].role == USER ? t->user : t->reply);
        Span text = message_text(t, &c->p[i]);
        if (i == place) render_system(&r, f, system, typed);
        if (i == place && system.p && t->rules & TRIM_JOINT) {
            text = (Span){c->p[i].text.p, (size_t)(text.p + text.n - c->p[i].text.p)};
            if (!text.n) r.text.n = r.typed.n = span_trim(str_span(&r.text)).n;
        }
        render_bytes(&r, text, true);
        render_form(&r, f, rest);
    }
    render_form(&r, f, t->ask ? t->ask : t->reply);
    if (!t->ask && r.text.p[r.text.n - 1] == ' ') r.text.n--, r.typed.n--;
    return r;
}
/* ------------------------------------------------------------------------------------------------
 * Chapter 13. Modes
 *
 * What the program does with a model: one function a mode, listed in modes[] of chapter 14. stdout
 * gets the text (or the result) and nothing else; numbers, progress and warnings go to stderr.
 */
enum { DEFAULT_STEPS = 256, DEFAULT_CONTEXT = 4096, SCORE_PIECE = 512 };

typedef struct {                        // what a user may say, see opts[]
    const char *model, *tokenizer, *input, *file, *system, *template, *date, *logits;
    double temperature, top_k, top_p, min_p, repeat_penalty;
    uint64_t seed;                      // 0: from the clock
    double steps, threads, chunk, context; // not given: steps is NAN, context 0
    int mode, think, kv;                // the word's place, from 1 on; 0 where not given
    Span *stops;                        // --stop, in order
    int n_stops;
    bool escapes, ids, no_bos, special, pieces, no_echo, quiet, show_prompt, help, version;
    bool samples;                       // an option of sampling was given
} Options;

#define note(o, ...) ((o)->quiet ? (void)0 : warn_line(__VA_ARGS__))

/* The table of options is the parser and the help text. To add one: a field in Options, a row here,
 * its use. */
enum { FLAG, TEXT, TEXTS, WORD, SEED, WHOLE, REAL };

typedef struct {
    char letter;                        // 0: long name only
    const char *name;
    int kind;
    size_t at;                          // place in Options
    const char *arg, *help;             // WORD: arg lists the words, kept as 1, 2, ...
    double usual, low, high;            // WHOLE, REAL
    const char *key;                    // a file may state it for a chat: general.sampling.KEY
} Opt;

#define AT(field) .at = offsetof(Options, field)
static const Opt opts[] = {
    {'m', "mode", WORD, AT(mode), "generate|chat|tokenize|score|bench|info", "(generate)"},
    {'i', "input", TEXT, AT(input), "TEXT", "prompt, first message, text to tokenize or score"},
    {'f', "file", TEXT, AT(file), "FILE", "the same from a file, - is stdin"},
    {'e', "escapes", FLAG, AT(escapes), "", "in -i, \\n, \\t, \\xHH ... are C's escapes"},
    {'n', "steps", WHOLE, AT(steps), "N",
     "positions with the prompt (256, in a chat 0; 0: up to the context)", NAN, -1e9, 1e9},
    {'t', "temperature", REAL, AT(temperature), "X", "0 is greedy", 1, -1e6, 1e6, "temp"},
    {'p', "top-p", REAL, AT(top_p), "X", "the likeliest up to a sum of X", 0.9, -1e6, 1e6, "top_p"},
    {0, "top-k", WHOLE, AT(top_k), "N", "keep the N likeliest; 0: off", 0, -1e9, 1e9, "top_k"},
    {0, "min-p", REAL, AT(min_p), "X", "drop below X of the best's probability", 0, 0, 1, "min_p"},
    {0, "repeat-penalty", REAL, AT(repeat_penalty), "X", "weaken the last 64 tokens", 0, 0, 100,
     "penalty_repeat"},
    {'s', "seed", SEED, AT(seed), "N", "of the draws; 0 or less: from the clock"},
    {'y', "system", TEXT, AT(system), "TEXT", "system message of a chat; \"\" is an empty one"},
    {0, "template", TEXT, AT(template), "NAME", "force a chat form; `list` lists them"},
    {0, "think", WORD, AT(think), "on|off|hide", "let a chat's model think, or think unseen"},
    {0, "date", TEXT, AT(date), "YYYY-MM-DD", "the date that a chat form tells the model"},
    {0, "show-prompt", FLAG, AT(show_prompt), "", "print to stderr what the model is given"},
    {0, "stop", TEXTS, AT(stops), "TEXT", "end a reply before this text; may be repeated"},
    {0, "no-echo", FLAG, AT(no_echo), "", "do not repeat the prompt"},
    {'z', "tokenizer", TEXT, AT(tokenizer), "FILE", "vocabulary of a .bin (if not beside it)"},
    {0, "ids", FLAG, AT(ids), "", "the input is token ids; nothing is added to them"},
    {0, "no-bos", FLAG, AT(no_bos), "", "no BOS before the text"},
    {0, "special", FLAG, AT(special), "", "control tokens written in the text count"},
    {0, "pieces", FLAG, AT(pieces), "", "tokenize: one line a token, id and piece"},
    {0, "logits", TEXT, AT(logits), "FILE", "score: write every position's logits, float32"},
    {'c', "context", WHOLE, AT(context), "N",
     "positions of the cache (the file's, up to 4096)", 0, 1, 1e9},
    {0, "kv", WORD, AT(kv), "f32|f16", "the cache's type (f32 where the weights are f32)"},
    {0, "threads", WHOLE, AT(threads), "N", "default: one a core", 0, -1e9, 1e9},
    {0, "chunk", WHOLE, AT(chunk), "N", "rows of a prompt read in one pass", 256, 1, 4096},
    {'q', "quiet", FLAG, AT(quiet), "", "nothing on stderr but errors"},
    {'h', "help", FLAG, AT(help), "", "this text"},
    {0, "version", FLAG, AT(version), "", "the version"},
};

// ---- input: -i, -f or nothing, used byte for byte
static Str read_input(const Options *o) {
    Str s = {0};
    str_add(&s, "", 0);
    if (o->input) str_add(&s, o->input, strlen(o->input));
    if (o->escapes) unescape(&s);
    if (!o->file) return s;
    FILE *f = strcmp(o->file, "-") ? fopen(o->file, "rb") : stdin;
    if (!f) die("%s: cannot open: %s", o->file, strerror(errno));
    char part[65536];
    for (size_t n; !interrupted && (n = fread(part, 1, sizeof part, f)) > 0;) str_add(&s, part, n);
    if (interrupted) exit(130);
    if (ferror(f)) die("%s: cannot read: %s", o->file, strerror(errno));
    if (f != stdin) fclose(f);
    return s;
}

// The ids of the input; --ids: numbers, each below the count of embedding rows (or of tokens).
static Ids input_ids(const Options *o, const Model *m) {
    Str text = read_input(o);
    Span list = o->ids ? span_trim(str_span(&text)) : (Span){0};
    Ids ids = {0};
    int limit = MAX(m->config.vocab_size, m->vocab.size);
    for (const char *p = list.p, *end = list.p + list.n; p < end;) {
        char *stop;
        long id = strtol(p, &stop, 10); // what is too large is limit or more, too
        if (stop == p || (stop < end && !isspace((uint8_t)*stop)) || id < 0 || id >= limit)
            die("--ids: byte %td: `%.20s`, expected a token id from 0 to %d", p - text.p, p,
                limit - 1);
        ids_add(&ids, (int)id), p = stop;
    }
    if (o->ids) return ids;
    if (!o->no_bos && m->vocab.add_bos) ids_add(&ids, m->vocab.bos);
    tok_encode(&m->vocab, str_span(&text), NULL, o->special ? TOK_SPECIAL : 0, &ids);
    if (m->vocab.add_eos) ids_add(&ids, m->vocab.eos);
    return ids;
}

// ---- output
static void out_flush(void) { // a reader that went away ends the program quietly
    if (!fflush(stdout) && !ferror(stdout)) return;
    if (errno == EPIPE) exit(0);
    if (errno == EINTR && interrupted) exit(130);
    die("cannot write: %s", strerror(errno));
}

static void put(Span s) {
    if (s.n) fwrite(s.p, 1, s.n, stdout), out_flush();
}

// A text that may be shown, and a newline: what could steer a terminal or is no UTF-8 as escapes,
// and where it has to stay on one line newlines too.
static void add_shown(Str *out, Span s, bool one_line) {
    for (size_t n; s.n; s.p += n, s.n -= n) {
        int length = utf8_length(s.p, s.n);
        n = (size_t)MAX(length, 1);
        bool kept = !one_line && (*s.p == '\n' || *s.p == '\t');
        if (*s.p == '\n' && !kept) str_printf(out, "\\n");
        else if (*s.p == '\\' && one_line) str_printf(out, "\\\\");
        else if (length > 0 && (kept || !is_control(s.p))) str_add(out, s.p, n);
        else for (size_t i = 0; i < n; i++) str_printf(out, "\\x%02x", (uint8_t)s.p[i]);
    }
    str_add(out, "\n", 1);
}

static bool shows_progress(const Options *o) { return !o->quiet && isatty(fileno(stderr)); }

// ---- what all modes that run the model share
static Session *start_session(const Options *o, const Model *m, int positions, int logit_rows) {
    int threads = core_count(), most = MIN(MAX_THREADS, 4 * threads);
    if (o->threads) threads = (int)MAX(o->threads, 1);
    else if (m->weight_bytes < 16000000) threads = 1; // they would mostly wait for each other
    bool half = o->kv ? o->kv == 2 : m->packed;
    return session_new(m, positions, (int)o->chunk, half, MIN(threads, most), logit_rows);
}

// Positions of the cache: -c, or `usual` where the model was trained for so many.
static int context_size(const Options *o, const Model *m, int64_t usual) {
    if (!o->context) return (int)MIN(m->config.seq_len, usual);
    if (o->context > m->config.seq_len)
        note(o, "-c %.0f is more than the %d positions the model was trained for", o->context,
             m->config.seq_len);
    return (int)o->context;
}

static double sampling_stated(const Gguf *g, const Opt *opt) { // by the file; NAN: nothing of use
    char key[64];
    if (!g || !opt->key) return NAN;
    snprintf(key, sizeof key, "general.sampling.%s", opt->key);
    const GgufValue *v = gguf_find(g, key);
    int64_t n;
    double x = NAN;
    if (v && !v->array && v->type == GGUF_F32) x = (double)f32_at(g->r->base + v->at);
    else if (v && !v->array && gguf_element(g, v, 0, &n)) x = (double)n;
    return x >= 0 && x <= opt->high ? x : NAN;
}

// What the file states counts in a chat where no sampling option is given.
static Sampler start_sampler(const Options *o, const Session *s, bool chat) {
    Options use = *o;
    for (int i = 0; chat && !o->samples && i < COUNT(opts); i++) {
        double stated = sampling_stated(s->model->gguf, &opts[i]);
        if (!isnan(stated)) *(double *)((char *)&use + opts[i].at) = stated;
    }
    if (use.top_p < 0 || use.top_p > 1) use.top_p = 0.9; // this and the next line as llama2.c
    if (use.temperature < 0) use.temperature = 0;
    uint64_t seed = o->seed ? o->seed : time_seed() | 1;
    if (!o->quiet && use.temperature > 0) fprintf(stderr, "seed: %" PRIu64 "\n", seed);
    return (Sampler){
        .temperature = (float)use.temperature, .top_p = (float)use.top_p,
        .min_p = (float)use.min_p, .repeat_penalty = (float)use.repeat_penalty,
        .top_k = (int)use.top_k, .rng = seed, .isa = s->team.isa,
        .list = xalloc((size_t)s->model->config.vocab_size, sizeof(uint64_t)),
    };
}

// ---- generate and chat: a model that speaks
typedef struct {
    const Options *o;
    const Model *m;
    Session *s;
    Sampler sampler;
    Ids ids;                            // what the model has read and said
    size_t limit;                       // positions they may fill
    Form form;                          // of a chat, else form.t is NULL
    Conversation talk;                  // of a chat
    Stream stream;                      // what goes to stdout
    Str reply;                          // of a chat: all that came behind the prompt's last bytes,
    size_t seed, thought, said;         // `seed` of them; thinking and answer given out, in bytes
    int prev;
    double prompt, made;                // tokens read and made so far, and the seconds it took
    double prompt_s, made_s;
} Speaker;

static Speaker speaker_new(const Options *o, const Model *m, int positions, bool chat) {
    Speaker s = {.o = o, .m = m, .limit = (size_t)positions, .prev = NO_TOKEN};
    s.s = start_session(o, m, positions, 1);
    s.sampler = start_sampler(o, s.s, chat);
    s.stream = (Stream){.stops = o->stops, .terminal = isatty(fileno(stdout))};
    return s;
}

static void speaker_put(Speaker *s, Span text) { put(stream_push(&s->stream, text, false)); }

// Gives out what is new in a chat's reply: thinking where it is to be shown, and the answer.
static void speaker_reply(Speaker *s, bool end) {
    Parts p = reply_parts(s->form.t, str_span(&s->reply), s->seed, end);
    bool show = s->o->think != THINK_HIDE && s->o->think != THINK_OFF;
    if (show && p.thought.n > s->thought) {
        if (!s->thought) speaker_put(s, SPAN("<think>"));
        speaker_put(s, span_from(p.thought, p.thought.p + s->thought));
        s->thought = p.thought.n;
    }
    if (!p.answer.p) return;
    if (s->thought && !s->said && (p.answer.n || end)) speaker_put(s, SPAN("</think>"));
    s->stream.n_stops = s->o->n_stops;  // in thinking they do not count
    while (!show && p.thought.n && p.answer.n && isspace((uint8_t)*p.answer.p))
        p.answer.p++, p.answer.n--;     // between hidden thinking and the answer
    speaker_put(s, span_from(p.answer, p.answer.p + s->said));
    s->said = p.answer.n;
}

static void speaker_say(Speaker *s, int id) {
    const Vocab *v = &s->m->vocab;
    const Template *t = s->form.t;
    size_t before = s->reply.n = t ? s->reply.n : 0;
    tok_piece(v, id, s->prev, &s->reply);
    s->prev = id;
    if (t && s->reply.n == before && id < v->size) { // control: a part of marks or of nothing
        str_add(&s->reply, v->text[id].p, v->text[id].n);
        const char *text = s->reply.p + before;
        if (!strstr(think_mark(t, 0), text) && !strstr(think_mark(t, 1), text))
            s->reply.n = before;
    }
    if (t) speaker_reply(s, false);
    else speaker_put(s, str_span(&s->reply));
}

// Samples and shows tokens until an end token, a stop string, Ctrl-C, or `limit` tokens in all;
// counts and times what was read and made.
static void speak(Speaker *s) {
    const Vocab *v = &s->m->vocab;
    Ids *ids = &s->ids;
    size_t before = ids->n;
    int64_t fed = s->s->fed;
    double start = now();
    // ids that may be sampled: embedding rows beyond the tokenizer's entries mean nothing
    int n = MIN(v->size ? v->size : INT_MAX, s->m->config.vocab_size);
    while (ids->n < s->limit && !s->stream.stopped) {
        float *logits = session_sync(s->s, ids->p, (int)ids->n, shows_progress(s->o));
        if (ids->n == before) {
            s->prompt += (double)(s->s->fed - fed), s->prompt_s += now() - start;
            start = now();
        }
        if (!logits || interrupted) break;
        int next = sample(&s->sampler, logits, n, ids->p, (int)ids->n);
        // generate on a .bin ends at BOS alone, as llama2.c
        if (s->form.t || s->m->gguf ? next < v->size && v->stop[next] : next == v->bos) break;
        ids_add(ids, next);
        speaker_say(s, next);
    }
    s->made += (double)(ids->n - before), s->made_s += now() - start;
    if (s->form.t) speaker_reply(s, true);
    put(stream_push(&s->stream, SPAN(""), true));
    put(SPAN("\n"));
}

static double rate(double amount, double seconds) { return seconds > 1e-9 ? amount / seconds : 0; }

static void speaker_stats(const Speaker *s) {
    double speed = rate(s->made, s->made_s), read = rate(s->prompt, s->prompt_s);
    if (s->o->quiet || !s->made) return;
    fprintf(stderr,
            "achieved tok/s: %.2f (%.0f tokens, %.2f GB/s; prompt %.0f tokens, %.2f tok/s)\n",
            speed, s->made, speed * (double)s->m->weight_bytes / 1e9, s->prompt, read);
}

static void cmd_generate(const Options *o, const Model *m) {
    Ids ids = input_ids(o, m);
    if (!ids.n) ids_add(&ids, m->vocab.bos >= 0 ? m->vocab.bos : MAX(m->vocab.eos, 0));
    int64_t prompt = (int64_t)ids.n, steps = INT_MAX; // -n 0: as far as the context goes
    if (isnan(o->steps)) steps = prompt < DEFAULT_STEPS ? DEFAULT_STEPS : prompt + DEFAULT_STEPS;
    else if (o->steps > 0) steps = (int64_t)o->steps;
    int64_t wanted = steps < INT_MAX ? steps : prompt;
    int context = context_size(o, m, MAX(DEFAULT_CONTEXT, wanted));
    if (MIN(prompt, steps) > context)
        die("the prompt has %zu tokens, the context %d positions (-c N makes it larger)", ids.n,
            context);
    bool cut = prompt > steps;          // only the user's own -n may cut a prompt
    if (cut)
        note(o, "the prompt has %zu tokens, -n is %.0f: nothing is generated", ids.n, o->steps);
    steps = MIN(steps, context);
    Speaker s = speaker_new(o, m, (int)steps, false);
    s.ids = ids, s.limit = cut ? 0 : (size_t)steps + 1; // the last token is not read
    bool bos = ids.p[0] == m->vocab.bos; // it marks the beginning and is not shown
    s.prev = o->no_echo ? ids.p[prompt - 1] : bos ? ids.p[0] : NO_TOKEN;
    for (int64_t i = bos; !o->no_echo && i < (cut ? steps + bos : prompt); i++)
        speaker_say(&s, ids.p[i]);
    s.stream.n_stops = o->n_stops;      // in a prompt that is repeated they do not count
    speak(&s);
    speaker_stats(&s);
}

// ---- chat
// One line of stdin; at a terminal a backslash at its end goes on in the next. False at the end.
static bool read_line(Str *line, bool terminal) {
    line->n = 0;
    for (int c; (c = getc(stdin)) != EOF;) {
        if (c != '\n') { str_add(line, &(char){(char)c}, 1); continue; }
        if (line->n && line->p[line->n - 1] == '\r') line->n--;
        if (!terminal || !line->n || line->p[line->n - 1] != '\\') return true;
        line->p[line->n - 1] = '\n';
    }
    if (ferror(stdin) && !interrupted) die("stdin: cannot read: %s", strerror(errno));
    return line->n && !interrupted;
}

static void show_prompt(const Vocab *v, const Ids *ids) { // what the model has been given so far
    Str text = {0}, shown = {0};
    fprintf(stderr, "prompt ids:");
    for (size_t i = 0; i < ids->n; i++) fprintf(stderr, " %d", ids->p[i]);
    for (size_t i = 0; i < ids->n; i++) tok_name(v, ids->p[i], &text);
    add_shown(&shown, str_span(&text), false);
    fprintf(stderr, "\n%s", shown.p);
    str_free(&text), str_free(&shown);
}

// The conversation without the `skip` messages that follow the system message, as ids.
static size_t chat_ids(Speaker *s, int skip) {
    Rendering r = render(&s->form, &s->talk, skip);
    s->ids.n = 0;
    s->seed = span_overlap(span_trim(str_span(&r.text)), think_mark(s->form.t, 0));
    tok_encode(&s->m->vocab, str_span(&r.text), (const uint8_t *)r.typed.p, TOK_SPECIAL, &s->ids);
    rendering_free(&r);
    return s->ids.n;
}

// The conversation as ids. If it leaves no room for a reply the oldest turns are dropped, the
// system message never, and the user is told. False if the last message alone is too long: it is
// left out.
static bool chat_prompt(Speaker *s) {
    int first = s->talk.p[0].role == SYSTEM, last = s->talk.n - 1, skip = 0;
    size_t room = s->limit - MIN(s->limit / 4, 64) - 1;
    if (chat_ids(s, last - first) > room) {
        note(s->o, "this message makes %zu tokens of %zu: it is left out (-c N makes room)",
             s->ids.n, s->limit);
        messages_drop(&s->talk, last, 1);
        return false;
    }
    while (chat_ids(s, skip) > room) skip += 2;
    if (skip)
        note(s->o, "context full (%zu positions): the oldest messages are forgotten", s->limit);
    messages_drop(&s->talk, first, skip);
    return true;
}

// What a reply is in the conversation: it ends before a stop string; where the marks of thinking
// are control tokens, which are no text, the answer alone is kept.
static Span chat_text(const Speaker *s) {
    Span whole = str_span(&s->reply);
    Parts p = reply_parts(s->form.t, whole, s->seed, true);
    const char *found;
    for (int i = 0; p.answer.p && i < s->o->n_stops; i++)
        if ((found = span_find(p.answer, s->o->stops[i].p)))
            p.answer.n = (size_t)(found - p.answer.p), whole.n = (size_t)(found - whole.p);
    return s->form.t->think[0] || !p.thought.p ? p.answer : whole;
}

static void chat_reply(Speaker *s) {
    stream_free(&s->stream);
    s->stream = (Stream){.stops = s->o->stops, .terminal = s->stream.terminal};
    s->reply.n = s->thought = s->said = 0, s->prev = NO_TOKEN;
    str_add(&s->reply, think_mark(s->form.t, 0), s->seed);
    speak(s);
    if (s->ids.n == s->limit)
        note(s->o, "context full (%zu positions): the reply ends here", s->limit);
    if (interrupted && s->reply.n == s->seed) messages_drop(&s->talk, s->talk.n - 1, 1);
    else message_add(&s->talk, REPLY, chat_text(s));
}

static void cmd_chat(const Options *o, const Model *m) {
    const Template *t = o->template ? template_named(o->template) : template_of(m, o->quiet);
    if ((o->think == THINK_ON || o->think == THINK_OFF) && !(t->rules & (SWITCH_ON | SWITCH_OFF)))
        note(o, "--think: the chat form `%s` has no switch for thinking", t->name);
    int context = context_size(o, m, (int64_t)MAX(o->steps, DEFAULT_CONTEXT)); // no steps: NAN
    Speaker s = speaker_new(o, m, o->steps > 0 ? (int)MIN(o->steps, context) : context, true);
    s.form = form_new(t, &m->vocab, m->chat_template, o->think, o->date);
    if (o->system) message_add(&s.talk, SYSTEM, (Span){o->system, strlen(o->system)});
    bool terminal = isatty(fileno(stdin)), first = o->input || o->file;
    Str line = read_input(o);
    for (;; first = false) {
        if (!first && terminal) put(SPAN("User: "));
        if (!first && !read_line(&line, terminal)) break;
        interrupt_arm();
        if (span_trim(str_span(&line)).n == 0) continue;
        message_add(&s.talk, USER, str_span(&line));
        if (!chat_prompt(&s)) continue;
        if (o->show_prompt) show_prompt(&m->vocab, &s.ids);
        if (terminal) put(SPAN("Assistant: "));
        chat_reply(&s);
        interrupt_arm();
    }
    if (terminal) put(SPAN("\n"));
    speaker_stats(&s);
}

// ---- tokenize
static void cmd_tokenize(const Options *o, const Model *m) {
    Ids ids = input_ids(o, m);
    Str out = {0}, name = {0};
    for (size_t i = 0; i < ids.n; i++) {
        str_printf(&out, "%d%s", ids.p[i], o->pieces || i + 1 < ids.n ? " " : "");
        if (!o->pieces) continue;
        name.n = 0;
        tok_name(&m->vocab, ids.p[i], &name);
        add_shown(&out, str_span(&name), true);
    }
    if (!o->pieces) str_add(&out, "\n", 1);
    put(str_span(&out));
}

// ---- score
// Negative log of the probability that logits (n) give to id; the logits are used up.
static double score_nll(const VecOps *ops, float *logits, int n, int id) {
    float max = ops->row_max(logits, 0, n), chosen = logits[id];
    double sum = 0;                     // in float, a large vocabulary's would be 1e-5 too low
    ops->exps(logits, 0, n, max);
    for (int i = 0; i < n; i++) sum += (double)logits[i];
    double nll = log(sum) - ((double)chosen - (double)max);
    if (!isfinite(nll)) die_not_finite();
    return nll;
}

// A text longer than the context is scored as llama.cpp's perplexity tool does: in pieces, BOS in
// the place of the first of each, the second half of each counts.
static void cmd_score(const Options *o, const Model *m) {
    Ids ids = input_ids(o, m);
    int context = context_size(o, m, SCORE_PIECE), vocab = m->config.vocab_size, row = 0;
    int64_t n = (int64_t)ids.n, size = MIN(n, context);
    bool pieces = n > context, bos = m->vocab.add_bos && !o->no_bos && !o->ids;
    if (n < 2) die("score: the text has %zu tokens, at least 2 are needed", ids.n);
    if (pieces && o->logits)
        die("--logits: the text has %zu tokens, the context %d positions: use -c %zu", ids.n,
            context, ids.n);
    if (pieces && context < 4) die("score: a text in pieces needs -c 4 or more");
    if (o->logits && file_same(o->logits, m->file.name))
        die("%s: the logits would overwrite the model", o->logits);
    FILE *dump = o->logits ? fopen(o->logits, "wb") : NULL;
    if (o->logits && !dump) die("%s: cannot open: %s", o->logits, strerror(errno));
    Session *s = start_session(o, m, context, MAX(32, (64 << 20) / 4 / vocab)); // 64 MiB of logits
    double counted = 0, sum = 0, squares = 0;
    for (int64_t at = 0; at + size <= n && !interrupted; at += row) {
        if (pieces && bos) ids.p[at] = m->vocab.bos;
        s->n_tokens = 0;
        for (row = 0; row < size && !interrupted;) { // row i of a piece predicts its id i + 1
            int rows = (int)MIN(s->logit_rows, size - row);
            float *logits = session_feed(s, ids.p + at + row, rows, WANT_ALL);
            size_t bytes = (size_t)vocab * sizeof *logits;
            if (dump && fwrite(logits, bytes, (size_t)rows, dump) != (size_t)rows)
                die("%s: cannot write: %s", o->logits, strerror(errno));
            for (int end = row + rows; row < end; row++, logits += vocab) {
                if (row + 1 >= size || (pieces && row < size / 2)) continue;
                double nll = score_nll(&vec_ops[s->team.isa], logits, vocab, ids.p[at + row + 1]);
                counted++, sum += nll, squares += nll * nll;
            }
        }
        if (pieces && shows_progress(o))
            fprintf(stderr, "\r%.0f of %zu tokens, perplexity %.4f", (double)(at + row), ids.n,
                    exp(sum / MAX(counted, 1)));
    }
    if (pieces && shows_progress(o)) fprintf(stderr, "\n");
    if (dump && fclose(dump)) die("%s: cannot write: %s", o->logits, strerror(errno));
    double nll = sum / counted, variance = MAX(squares / counted - nll * nll, 0);
    double error = counted > 1 ? exp(nll) * sqrt(variance / (counted - 1)) : 0;
    if (interrupted) return;
    fprintf(stdout, "tokens %.0f nll %.5f ppl %.5f error %.5f\n", counted, nll, exp(nll), error);
}

// ---- bench
static void cmd_bench(const Options *o, const Model *m) {
    static const struct { const char *phase; int tokens, depth; } phases[] = {
        {"prefill", 512, 0}, {"decode", 64, 0}, {"decode", 64, 512}, {"decode", 64, 4096}};
    int room = context_size(o, m, 4096 + 64);
    Session *s = start_session(o, m, room, 1);
    uint64_t rng = 42;
    int *ids = xalloc((size_t)room, sizeof *ids);
    for (int i = 0; i < room; i++)
        ids[i] = (int)(rng_next(&rng) % (uint32_t)m->config.vocab_size);
    session_sync(s, ids, MIN(8, room), false); // first touch of the weights is not timed
    put(SPAN("phase,tokens,depth,threads,tokens_per_s,gb_per_s\n"));
    for (int i = 0; i < COUNT(phases) && phases[i].depth < room; i++) {
        int depth = phases[i].depth, n = MIN(phases[i].tokens, room - depth);
        int step = i ? 1 : n, passes = i ? n : (n + s->chunk - 1) / s->chunk;
        session_sync(s, ids, depth, false);
        double start = now(), cache = i ? (double)cache_bytes_per_token(m, s->half) : 0;
        for (int at = step; at <= n; at += step) session_sync(s, ids, depth + at, false);
        double seconds = now() - start;
        double bytes = passes * ((double)m->weight_bytes + cache * (depth + n / 2.0));
        if (interrupted) break;
        fprintf(stdout, "%s,%d,%d,%d,%.2f,%.2f\n", phases[i].phase, n, depth, s->team.n,
                rate(n, seconds), rate(bytes, seconds) / 1e9);
        out_flush();
    }
}

// ---- info: what is in the file, one `key: value` a line, as far as it says so
static void info_text(Str *out, const char *key, Span value) { // no value can forge a line
    str_printf(out, "%s: ", key);
    add_shown(out, value, true);
}

static bool info_types(const Model *m, Str *out) { // is the cache f16 by default?
    const Gguf *g = m->gguf;
    const Config *c = &m->config;
    int64_t count[COUNT(formats) + 1] = {0}, parameters = 0;
    bool half = m->version == 2;        // of a .bin
    bool tied = m->output.data == m->embedding.data;
    if (!g) parameters = c->dim + (int64_t)c->dim * c->vocab_size * (tied ? 1 : 2);
    for (const Part *p = parts; !g && p < parts + COUNT(parts); p++)
        if (part_exists(m, m->layers, p)) // all layers are alike
            parameters += c->n_layers * part_size(m, m->layers, p->rows)
                          * part_size(m, m->layers, p->cols);
    bool untied = g && gguf_tensor_find(g, "output.weight");
    for (; g; g = g->next)
        for (int i = 0; i < g->n_tensors; i++) {
            const GgufTensor *t = &g->tensors[i];
            count[t->format ? t->format - formats : COUNT(formats)]++;
            half |= t->type != TYPE_F32 && !(untied && span_is(g->names[i], "token_embd.weight"));
            parameters += (int64_t)(t->dims[0] * t->dims[1] * t->dims[2] * t->dims[3]);
        }
    str_printf(out, "parameters: %" PRId64 "\ntypes:%s", parameters,
               m->gguf ? "" : half ? " int8" : " f32");
    for (int i = 0; i < COUNT(count); i++)
        if (count[i])
            str_printf(out, " %s %" PRId64, i < COUNT(formats) ? formats[i].name : "unknown",
                       count[i]);
    str_printf(out, "\n");
    return half;
}

enum { I_LAYERS, I_WIDTH, I_HIDDEN, I_HEADS, I_KV_HEADS, I_HEAD_SIZE, I_CONTEXT, N_SIZES };
static const struct { const char *name, *key; } info_sizes[N_SIZES] = {
    {"layers", ".block_count"}, {"width", ".embedding_length"}, {"hidden", ".feed_forward_length"},
    {"heads", ".attention.head_count"}, {"kv_heads", ".attention.head_count_kv"},
    {"head_size", ".attention.key_length"}, {"context", ".context_length"},
};

static void cmd_info(const Options *o, const Model *m) {
    (void)o;
    Str out = {0}, stops = {0}, stated = {0};
    const Gguf *g = m->gguf;
    const Vocab *v = &m->vocab;
    const Config *c = &m->config;
    int64_t n, size[N_SIZES] = {c->n_layers, c->dim, c->hidden_dim, c->n_heads, c->n_kv_heads,
                                c->head_size, c->seq_len}; // of a .bin
    str_printf(&out, "format: %s %d\n", g ? "GGUF" : ".bin version", m->version);
    info_text(&out, "family", g ? gguf_string(g, "general.architecture") : SPAN("llama"));
    info_text(&out, "name", g ? gguf_string(g, "general.name") : SPAN(""));
    str_printf(&out, "file_bytes: %zu\n", m->file.size);
    int bytes = info_types(m, &out) ? 2 : 4;
    for (int k = 0; g && k < N_SIZES; k++) { // of several, one a layer, the largest
        const GgufValue *value = gguf_find(g, info_sizes[k].key);
        if (!value && k == I_KV_HEADS) size[k] = size[I_HEADS];
        if (!value && k == I_HEAD_SIZE) size[k] = size[I_WIDTH] / MAX(size[I_HEADS], 1);
        for (uint64_t i = 0; value && i < value->count && gguf_element(g, value, i, &n); i++)
            size[k] = MAX(size[k], n);
    }
    for (int k = 0; size[I_WIDTH] && k < N_SIZES; k++) // else a vocabulary alone
        str_printf(&out, "%s: %" PRId64 "\n", info_sizes[k].name, size[k]);
    if (size[I_WIDTH])
        str_printf(&out, "cache_bytes_per_token: %.0f\n", 2.0 * bytes * (double)size[I_LAYERS]
                   * (double)size[I_KV_HEADS] * (double)size[I_HEAD_SIZE]);
    for (int i = 0; i < v->size; i++)
        if (v->stop[i]) str_printf(&stops, stops.n ? " %d " : "%d ", i), tok_name(v, i, &stops);
    if (!g) str_printf(&out, "vocabulary: %d\nbos: 1\nstops: 1 <s>\n", m->config.vocab_size);
    else if (v->size) {
        const char *added = v->add_bos ? "" : " (not added)";
        str_printf(&out, "vocabulary: %d\nbos: %d%s\n", v->size, v->bos, added);
        info_text(&out, "stops", str_span(&stops));
    }
    const Template *t = g ? template_find(m->chat_template) : template_named("llama2");
    str_printf(&out, "template: %s\n", t ? t->name : m->chat_template.n ? "unknown" : "none");
    info_text(&out, "pre", g ? gguf_string(g, "tokenizer.ggml.pre") : SPAN(""));
    for (int i = 0; i < COUNT(opts); i++)
        if (!isnan(sampling_stated(g, &opts[i])))
            str_printf(&stated, " %s %g", opts[i].key, sampling_stated(g, &opts[i]));
    if (stated.n) str_printf(&stated, " (in a chat where no sampling option is given)");
    str_printf(&out, "sampling:%s\n", stated.n ? stated.p : " none stated");
    put(str_span(&out));
}
/* ------------------------------------------------------------------------------------------------
 * Chapter 14. Command line and main
 *
 * llama2.c's letters keep their meaning; what is new has a long name. Numbers are read whole, an
 * unknown option is named, and wrong usage ends with status 2.
 */
// To add a mode: a cmd_ function in chapter 13, a row here, its name in the row of --mode.
static const struct { void (*run)(const Options *, const Model *); int need; } modes[] = {
    {cmd_generate, NEED_VOCAB | NEED_WEIGHTS},
    {cmd_chat, NEED_VOCAB | NEED_WEIGHTS},
    {cmd_tokenize, NEED_VOCAB},
    {cmd_score, NEED_VOCAB | NEED_WEIGHTS},
    {cmd_bench, NEED_WEIGHTS},
    {cmd_info, 0},
};

static void usage(FILE *f) {
    fprintf(f, "usage: run MODEL [options]\nMODEL is a GGUF file or a .bin of llama2.c.\n"
               "example: run models/story.gguf -i \"Once upon a time\" -t 0.8\n\n");
    for (int i = 0; i < COUNT(opts); i++) {
        char letter[] = {'-', opts[i].letter, ',', 0}, left[80];
        snprintf(left, sizeof left, "%3s --%s %s", opts[i].letter ? letter : "", opts[i].name,
                 opts[i].arg);
        fprintf(f, "  %-26s %s", left, opts[i].help);
        if (opts[i].usual > 0) fprintf(f, "; default %g", opts[i].usual);
        fprintf(f, "\n");
    }
}

#define die_usage(...) (say("error: ", __VA_ARGS__), exit(2))

static void opt_set(Options *o, const Opt *opt, const char *value) {
    void *field = (char *)o + opt->at;
    if (opt->kind == FLAG) *(bool *)field = true;
    else if (opt->kind == TEXT) *(const char **)field = value;
    else if (opt->kind == TEXTS) {
        if (!*value) die_usage("--%s: an empty text", opt->name);
        o->stops[o->n_stops++] = (Span){value, strlen(value)};
    }
    else if (opt->kind == WORD) {
        const char *word = opt->arg;
        int place = 1;
        for (; !span_is((Span){word, strcspn(word, "|")}, value); word++, place++)
            if (!*(word += strcspn(word, "|")))
                die_usage("--%s: `%s`, expected %s", opt->name, value, opt->arg);
        *(int *)field = place;
    } else if (opt->kind == SEED) { // more digits than a double has
        char *end;
        errno = 0;
        unsigned long long x = strtoull(value, &end, 10);
        if (end == value || *end || errno) die_usage("--seed: `%s` is not a whole number", value);
        *(uint64_t *)field = strchr(value, '-') ? 0 : x;
    } else {
        char *end;
        double x = strtod(value, &end);
        bool whole = opt->kind == WHOLE;
        if (end == value || *end || !isfinite(x) || (whole && x != floor(x)))
            die_usage("--%s: `%s` is not a %snumber", opt->name, value, whole ? "whole " : "");
        if (x < opt->low || x > opt->high)
            die_usage("--%s: %g, expected %g to %g", opt->name, x, opt->low, opt->high);
        *(double *)field = x;
        o->samples |= opt->key != NULL;
    }
}

static Options opts_parse(int argc, char **argv) {
    Options o = {.mode = 1, .stops = xalloc((size_t)argc, sizeof(Span))};
    for (int k = 0; k < COUNT(opts); k++)
        if (opts[k].kind >= WHOLE) *(double *)((char *)&o + opts[k].at) = opts[k].usual;
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i];
        const Opt *opt = NULL;
        bool named = a[0] == '-' && a[1];
        for (int k = 0; named && !opt && k < COUNT(opts); k++)
            if (a[1] == '-' ? !strcmp(a + 2, opts[k].name) : a[1] == opts[k].letter && !a[2])
                opt = &opts[k];
        if (named && !opt) die_usage("unknown option `%s` (--help lists them)", a);
        if (!named && o.model)
            die_usage("`%s`: one model file at a time (an option's value without its option?)", a);
        if (!named) o.model = a;
        else if (opt->kind != FLAG && ++i == argc) die_usage("option `%s` needs a value", a);
        else opt_set(&o, opt, argv[i]);
    }
    Str names = {0};
    for (int i = 0; i < COUNT(templates); i++) str_printf(&names, " %s", templates[i].name);
    if (o.template && !strcmp(o.template, "list")) exit(printf("%s\n", names.p + 1) < 0);
    if (o.template && !template_named(o.template))
        die_usage("--template: `%s`, expected one of%s", o.template, names.p);
    if (o.date && !date_parse(o.date, &(struct tm){0}))
        die_usage("--date: `%s`, expected a day as YYYY-MM-DD", o.date);
    if (o.input && o.file) die_usage("both -i and -f are given: one input at a time");
    return o;
}

static int run(int argc, char **argv) {
    Options o = opts_parse(argc, argv);
    if (o.version) fprintf(stdout, "run.c %s\n", VERSION);
    else if (o.help || !o.model) usage(o.help ? stdout : stderr);
    out_flush();
    if (o.version || o.help || !o.model) return o.version || o.help ? 0 : 2;
    signal(SIGPIPE, SIG_IGN);
    interrupt_arm();
    Model m = {0};
    model_open(&m, file_map(o.model), o.tokenizer, modes[o.mode - 1].need);
    if (o.tokenizer && m.gguf) note(&o, "-z: a GGUF brings its own vocabulary");
    if (!o.quiet) warn_lines(&m.warnings);
    modes[o.mode - 1].run(&o, &m);
    out_flush();
    return interrupted ? 130 : 0;
}

#ifndef TESTING
int main(int argc, char **argv) { return run(argc, argv); }
#endif
