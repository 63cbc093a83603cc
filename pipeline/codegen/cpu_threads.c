// Parallel loops of CPU code, on one pool of threads for the whole process.
//
// This file is linked into the code of every artifact and of every candidate that is measured. TVM's own launcher keeps a
// pool for each calling thread, gives each of its threads one fixed part of a loop, and waits for all of them. Here a
// loop is cut into many blocks. The calling thread and the pool's threads each take blocks of a slice of their own, then
// of the others'. A caller waits for blocks that have been started and never for a thread that has not come yet, so a
// thread that the system runs late costs one block at most. Threads sleep after SPIN_NS without work.
//
// The pool belongs to the first code that the process loads: see `relaxtune_cpu_pool_1`. A forked child starts with no
// threads and makes new ones.

#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <tvm/ffi/c_api.h>
#include <unistd.h>

// Of tvm/runtime/c_backend_api.h. Barriers are not supported: no schedule asks for one.
typedef struct {
  void *barrier;
  int32_t blocks;
} Group;
typedef int (*Body)(int block, Group *group, void *data);

enum { JOBS = 32, SLICES = 64, BLOCKS_EACH = 16, THREADS_MAX = 1024, CACHE_LINE = 64 };
static const int64_t SPIN_NS = 50 * 1000;

// Blocks that nobody has taken: the first one in the upper half, the end in the lower.
typedef struct {
  _Alignas(CACHE_LINE) _Atomic uint64_t left;
} Slice;

// A loop that a caller runs. Jobs are never freed: a thread that comes late finds no block here, or one of the next job.
typedef struct {
  _Alignas(CACHE_LINE) Body body;
  void *data;
  Group group;
  _Atomic int cpu;  // of the caller
  _Atomic int slices;
  _Atomic int seats;  // threads of the pool that may still come
  _Atomic int sleeps, failed;
  _Atomic(void *) error;
  _Alignas(CACHE_LINE) _Atomic uint32_t unfinished;
  Slice slice[SLICES];
} Job;

static Job jobs[JOBS];
static struct {
  _Alignas(CACHE_LINE) _Atomic uint32_t jobs;  // a bit for each that is in use
  _Atomic int wanted;                          // threads that these jobs could use
  _Atomic int threads, spinning, sleeping;
  _Alignas(CACHE_LINE) _Atomic uint32_t launches;
} pool;

static void wait_while(_Atomic uint32_t *word, uint32_t value) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake(_Atomic uint32_t *word, int count) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0); }

static int64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

// Waits until a number changes, not beyond a time; returns whether it changed.
static int spin_while(_Atomic uint32_t *word, uint32_t value, int64_t until_ns) {
  for (unsigned turn = 1; atomic_load(word) == value; ++turn) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
    if (turn % 16 == 0 && now_ns() > until_ns) return 0;
  }
  return 1;
}

// Takes a block from the front, or from the end; -1 when none is left.
static int take_block(Slice *slice, int from_end) {
  uint64_t left = atomic_load_explicit(&slice->left, memory_order_acquire);
  for (;;) {
    uint32_t first = (uint32_t)(left >> 32), end = (uint32_t)left;
    if (first >= end) return -1;
    uint64_t less = from_end ? left - 1 : left + (UINT64_C(1) << 32);
    if (atomic_compare_exchange_weak(&slice->left, &left, less)) return (int)(from_end ? end - 1 : first);
  }
}

static void finish_blocks(Job *job, uint32_t count) {
  if (atomic_fetch_sub(&job->unfinished, count) == count && atomic_load(&job->sleeps)) wake(&job->unfinished, 1);
}

static void keep_error(Job *job) {
  void *raised = NULL, *none = NULL;
  TVMFFIErrorMoveFromRaised(&raised);
  if (!atomic_compare_exchange_strong(&job->error, &none, raised) && raised != NULL) TVMFFIObjectDecRef(raised);
  atomic_store(&job->failed, 1);
}

// Runs blocks of a job until none is left to be taken, beginning with a slice. A job lasts while a block of it runs.
static uint32_t run_blocks(Job *job, int first, int tell) {
  uint32_t count = 0;
  int slices = atomic_load(&job->slices);
  for (int turn = 0; turn < slices; ++turn) {
    Slice *slice = &job->slice[(first + turn) % slices];
    for (int block; (block = take_block(slice, turn > 0)) >= 0; ++count) {
      if (job->body(block, &job->group, job->data) != 0) keep_error(job);
      if (tell) finish_blocks(job, 1);
    }
  }
  return count;
}

static int take_seat(Job *job) {
  int seats = atomic_load(&job->seats);
  while (seats > 0)
    if (atomic_compare_exchange_weak(&job->seats, &seats, seats - 1)) return 1;
  return 0;
}

// The system may wake a thread on the caller's CPU where the others are busy, and would run one of both at a time. It is
// kept from that CPU until it meets a caller on another.
static void leave_cpu(int cpu, const cpu_set_t *usable) {
  if (sched_getcpu() != cpu) return;
  cpu_set_t others = *usable;
  CPU_CLR(cpu, &others);
  if (CPU_COUNT(&others) > 0) sched_setaffinity(0, sizeof others, &others);
}

static int help(int number, const cpu_set_t *usable) {
  int helped = 0;
  for (uint32_t open = atomic_load(&pool.jobs); open != 0; open &= open - 1) {
    Job *job = &jobs[__builtin_ctz(open)];
    if (!take_seat(job)) continue;
    leave_cpu(atomic_load(&job->cpu), usable);
    helped |= run_blocks(job, number, 1) > 0;
  }
  return helped;
}

static void *run_thread(void *number) {
  cpu_set_t usable;
  if (sched_getaffinity(0, sizeof usable, &usable) != 0) CPU_ZERO(&usable);
  int64_t until_ns = now_ns() + SPIN_NS;
  for (;;) {
    uint32_t seen = atomic_load(&pool.launches);
    if (help((int)(intptr_t)number, &usable)) until_ns = now_ns() + SPIN_NS;
    atomic_fetch_add(&pool.spinning, 1);
    int more = spin_while(&pool.launches, seen, until_ns);
    atomic_fetch_sub(&pool.spinning, 1);
    if (more) continue;
    atomic_fetch_add(&pool.sleeping, 1);
    wait_while(&pool.launches, seen);
    atomic_fetch_sub(&pool.sleeping, 1);
    until_ns = now_ns() + SPIN_NS;
  }
  return NULL;
}

static void start_thread(int number) {
  sigset_t all, before;
  pthread_attr_t detached;
  pthread_t thread;
  sigfillset(&all);
  pthread_attr_init(&detached);
  pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
  // The program's signals are for its own threads.
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int failed = pthread_create(&thread, &detached, run_thread, (void *)(intptr_t)number);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  pthread_attr_destroy(&detached);
  if (failed) atomic_fetch_sub(&pool.threads, 1);  // of no harm: whoever is there runs the blocks
}

// A forked child has the calling thread only, and none of the jobs of others.
static void forget_threads(void) {
  memset(&pool, 0, sizeof pool);
  for (int i = 0; i < JOBS; ++i) {
    atomic_store(&jobs[i].seats, 0);
    for (int slice = 0; slice < SLICES; ++slice) atomic_store(&jobs[i].slice[slice].left, 0);
  }
}

// pthread_atfork, of which the C library has no shared copy: candidates are linked without the compiler's driver.
extern int __register_atfork(void (*)(void), void (*)(void), void (*)(void), void *);
static void register_fork(void) { __register_atfork(NULL, NULL, forget_threads, NULL); }

static int default_threads(void);

// Starts threads where the jobs could use more, up to what this job asks for or the machine has.
static void grow(int wanted, int threads) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  static _Atomic int cores;
  int now = atomic_load(&pool.threads);
  if (now >= wanted) return;
  if (atomic_load(&cores) == 0) atomic_store(&cores, default_threads());
  int most = (threads > cores ? threads : cores) - 1;
  pthread_once(&once, register_fork);
  while (now < wanted && now < most)
    if (atomic_compare_exchange_weak(&pool.threads, &now, now + 1)) start_thread(++now);
}

static Job *open_job(void) {
  uint32_t open = atomic_load(&pool.jobs);
  while (~open != 0) {
    uint32_t bit = ~open & (open + 1);
    if (atomic_compare_exchange_weak(&pool.jobs, &open, open | bit)) return &jobs[__builtin_ctz(bit)];
  }
  return NULL;
}

static int run_alone(Body body, void *data, int blocks) {
  Group group = {NULL, blocks > 0 ? blocks : 1};
  for (int block = 0; block < group.blocks; ++block) {
    int failed = body(block, &group, data);
    if (failed != 0) return failed;
  }
  return 0;
}

static int launch(Body body, void *data, int blocks, int threads) {
  Job *job = threads > 1 ? open_job() : NULL;
  if (job == NULL) return run_alone(body, data, blocks);
  int slices = threads < SLICES ? threads : SLICES;
  if (blocks <= 0) blocks = threads * BLOCKS_EACH;
  job->body = body, job->data = data, job->group = (Group){NULL, blocks};
  atomic_store(&job->cpu, sched_getcpu());
  atomic_store(&job->sleeps, 0);
  atomic_store(&job->failed, 0);
  atomic_store(&job->error, NULL);
  atomic_store(&job->slices, slices);
  atomic_store(&job->unfinished, (uint32_t)blocks);
  for (int i = 0; i < slices; ++i) {
    uint64_t first = (uint64_t)blocks * i / slices, end = (uint64_t)blocks * (i + 1) / slices;
    atomic_store_explicit(&job->slice[i].left, first << 32 | end, memory_order_release);
  }
  int others = threads - 1;
  atomic_store(&job->seats, others);
  grow(atomic_fetch_add(&pool.wanted, others) + others, threads);
  atomic_fetch_add(&pool.launches, 1);
  int asleep = atomic_load(&pool.sleeping), missing = others - atomic_load(&pool.spinning);
  if (asleep > 0 && missing > 0) wake(&pool.launches, missing);

  finish_blocks(job, run_blocks(job, 0, 0));
  atomic_store(&job->seats, 0);
  atomic_fetch_sub(&pool.wanted, others);
  int64_t until_ns = now_ns() + SPIN_NS;
  for (uint32_t left; (left = atomic_load(&job->unfinished)) != 0;) {
    if (spin_while(&job->unfinished, left, until_ns)) continue;
    atomic_store(&job->sleeps, 1);
    wait_while(&job->unfinished, left);
  }
  int failed = atomic_load(&job->failed);
  void *error = atomic_load(&job->error);
  atomic_fetch_and(&pool.jobs, ~(1u << (job - jobs)));
  if (error != NULL) {
    TVMFFIErrorSetRaised(error);
    TVMFFIObjectDecRef(error);
  }
  return failed ? -1 : 0;
}

// The process's pool: a symbol of this kind has one definition for all libraries, the first that was loaded, and the loader
// keeps that library until the process ends. A launcher of another signature needs another name.
typedef struct {
  int (*launch)(Body, void *, int, int);
} Pool;
__attribute__((visibility("default"))) Pool relaxtune_cpu_pool_1 = {launch};
__asm__(".type relaxtune_cpu_pool_1, %gnu_unique_object");

// ---- Threads of this artifact.

static _Atomic int threads_set;

static int launch_here(Body body, void *data, int blocks) {
  int threads = atomic_load_explicit(&threads_set, memory_order_relaxed);
  if (threads == 0) atomic_store(&threads_set, threads = default_threads());
  return relaxtune_cpu_pool_1.launch(body, data, blocks, threads);
}

// Where the code of TVM finds its launcher. The code has a weak definition, which TVM's loader sets; it does not find one
// that is hidden.
__attribute__((visibility("hidden"))) int (*__TVMBackendParallelLaunch)(Body, void *, int) = launch_here;

// Sets how many threads the loops of this code run on, 0 for the default; returns how many these are.
__attribute__((visibility("default"))) int __tvm_ffi_relaxtune_cpu_threads(void *self, const TVMFFIAny *args, int32_t count,
                                                                          TVMFFIAny *result) {
  (void)self;
  int64_t asked = count == 1 && args[0].type_index == kTVMFFIInt ? args[0].v_int64 : 0;
  int threads = asked > 0 ? (int)(asked < THREADS_MAX ? asked : THREADS_MAX) : default_threads();
  atomic_store(&threads_set, threads);
  result->type_index = kTVMFFIInt;
  result->zero_padding = 0;
  result->v_int64 = threads;
  return 0;
}

// ---- How many threads by default: $TVM_NUM_THREADS, else the cores that the process may use, within its CPU quota.

static int read_line(const char *path, char *line, int size) {
  FILE *file = fopen(path, "re");
  char *read = file != NULL ? fgets(line, size, file) : NULL;
  if (file != NULL) fclose(file);
  return read != NULL;
}

static int cores_of_affinity(void) {
  cpu_set_t usable, cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof usable, &usable) != 0) return (int)sysconf(_SC_NPROCESSORS_ONLN);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &usable)) continue;
    char path[96], line[64];
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
    CPU_SET(read_line(path, line, sizeof line) ? atoi(line) : cpu, &cores);  // a core is its first hardware thread
  }
  return CPU_COUNT(&cores);
}

static int ceil_of(int64_t quota, int64_t period) { return quota > 0 && period > 0 ? (int)((quota + period - 1) / period) : 0; }

// Returns the CPUs that a control group's folder allows, in either version's files; 0 for no limit.
static int quota_in(const char *folder) {
  char path[640], line[64];
  long long quota = 0, period = 0;
  snprintf(path, sizeof path, "%s/cpu.max", folder);
  if (read_line(path, line, sizeof line)) return sscanf(line, "%lld %lld", &quota, &period) == 2 ? ceil_of(quota, period) : 0;
  snprintf(path, sizeof path, "%s/cpu.cfs_quota_us", folder);
  if (!read_line(path, line, sizeof line)) return 0;
  quota = atoll(line);
  snprintf(path, sizeof path, "%s/cpu.cfs_period_us", folder);
  return read_line(path, line, sizeof line) ? ceil_of(quota, atoll(line)) : 0;
}

// Returns the least quota of the process's control group and of those around it; 0 for no limit.
static int quota_of(const char *groups, const char *root) {
  char line[512], folder[600];
  int least = 0;
  FILE *file = fopen(groups, "re");
  while (file != NULL && fgets(line, sizeof line, file) != NULL) {
    line[strcspn(line, "\n")] = 0;
    char *controllers = strchr(line, ':'), *path = controllers != NULL ? strchr(controllers + 1, ':') : NULL;
    if (path == NULL) continue;
    *path++ = 0, ++controllers;
    int is_first = strcmp(controllers, "cpu") == 0 || strncmp(controllers, "cpu,", 4) == 0;
    if (*controllers != 0 && !is_first && strcmp(controllers, "cpuacct,cpu") != 0) continue;
    // A container may see the host's path and have its own group at the root: all folders up to that are looked at.
    for (char *end = path + strlen(path);; end = strrchr(path, '/')) {
      if (end == NULL) break;
      *end = 0;
      snprintf(folder, sizeof folder, "%s%s%s%s", root, *controllers != 0 ? "/" : "", controllers, path);
      int quota = quota_in(folder);
      if (quota > 0 && (least == 0 || quota < least)) least = quota;
    }
  }
  if (file != NULL) fclose(file);
  return least;
}

static int default_threads(void) {
  const char *wanted = getenv("TVM_NUM_THREADS");
  int threads = wanted != NULL ? atoi(wanted) : 0;
  if (threads <= 0) {
    int quota = quota_of("/proc/self/cgroup", "/sys/fs/cgroup");
    threads = cores_of_affinity();
    if (quota > 0 && quota < threads) threads = quota;
  }
  return threads < 1 ? 1 : threads < THREADS_MAX ? threads : THREADS_MAX;
}
