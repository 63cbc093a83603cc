// A CUDA driver and runtime for machines without a GPU, as one library. Kernels do nothing. What the real driver refuses or
// does not survive ends the process with a message:
//   - a stream, graph, module, function or memory that is not there when it is used, in a graph: when that is launched;
//   - the host reads or writes memory of the device, or a copy one end of which is nobody's memory;
//   - a tensor map that is not aligned, or is of memory that is not the device's.
// Other rules return the real errors: no context on the thread, what a capture forbids, calls after the driver's own end.
// FAKE_CUDA_LOG names a file for the counts, FAKE_CUDA_CRASH a function in which it calls a place without code (or `end`).
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace {
enum Error { kInvalidValue = 1, kNotInitialized = 3, kDeinitialized = 4, kInvalidContext = 201, kInvalidHandle = 400,
             kCaptureUnsupported = 900, kCaptureInvalidated = 901, kNotCapturing = 903, kCaptureImplicit = 906 };
enum Mode { kGlobal = 0, kRelaxed = 2 };

// What a graph does when it is launched.
using Work = std::vector<std::function<void()>>;

struct Stream {
  uint64_t id;
  bool blocking;  // waits for the default stream, and that one for it
  bool capturing = false;
  bool invalidated = false;
  int mode = kGlobal;
  Work work = {};
};

struct Function {
  void* module;
};

// Memory of the device: the driver reaches it elsewhere than where its address is, at which nothing can be read.
struct Block {
  size_t bytes;
  char* reached;
};

struct World {
  std::recursive_mutex lock;
  std::set<Stream*> streams;
  std::map<void*, std::unique_ptr<Work>> graphs, executables;
  std::map<char*, Block> memory;
  std::map<void*, void*> pinned;
  std::map<void*, std::vector<std::unique_ptr<Function>>> modules;
  int pipe[2];
  bool initialized = false;
  uint64_t next = 7;
  long launches = 0, kernels = 0, copies = 0, captured = 0;
  World() {
    if (::pipe(pipe) != 0) std::abort();
  }
};

World& TheWorld() {
  static auto* made = new World;
  return *made;
}

thread_local void* current = nullptr;  // the context of this thread
int last_error = 0;                    // of the runtime, which others read

bool ended = false;

void Crash(const char* name) {
  const char* asked = std::getenv("FAKE_CUDA_CRASH");
  if (asked != nullptr && std::strcmp(asked, name) == 0) reinterpret_cast<void (*)()>(0x7000)();
}

struct End {
  ~End() {
    Crash("end");
    ended = true;
    World& w = TheWorld();
    const char* path = std::getenv("FAKE_CUDA_LOG");
    std::FILE* file = path == nullptr ? nullptr : std::fopen(path, "w");
    if (file == nullptr) return;
    std::fprintf(file, "{\"kernels\": %ld, \"launches\": %ld, \"copies\": %ld, \"captured\": %ld, ", w.kernels, w.launches,
                 w.copies, w.captured);
    std::fprintf(file, "\"streams\": %zu, \"executables\": %zu, \"graphs\": %zu, \"last_error\": %d}\n", w.streams.size(),
                 w.executables.size(), w.graphs.size(), last_error);
    std::fclose(file);
  }
} end;

[[noreturn]] void Fail(const char* what, const char* where) {
  std::fprintf(stderr, "fake CUDA: %s: %s\n", where, what);
  std::abort();
}

int Enter(const char* name) {
  World& w = TheWorld();
  Crash(name);
  if (ended) std::fprintf(stderr, "fake CUDA: %s after the driver's end\n", name);
  if (ended) return kDeinitialized;
  // CUDA's runtime makes the device's context when it needs one; the driver wants to be told.
  if (std::strncmp(name, "cuda", 4) == 0) w.initialized = true, current = &w;
  return w.initialized || std::strcmp(name, "cuInit") == 0 ? 0 : kNotInitialized;
}

Stream* Known(void* stream, const char* name) {
  if (stream == nullptr) return nullptr;
  auto* one = static_cast<Stream*>(stream);
  if (!TheWorld().streams.count(one)) Fail("a stream that is none", name);
  return one;
}

// What a capture forbids to others: with `everywhere`, to all of the GPU in any mode.
int Forbidden(bool everywhere) {
  int status = 0;
  for (auto* one : TheWorld().streams)
    if (one->capturing && (everywhere || one->mode != kRelaxed)) one->invalidated = true, status = kCaptureUnsupported;
  return status;
}

// Do work on a stream now, or later if it captures. `self` is the default stream where none is given.
int Give(Stream* self, std::function<void()> work) {
  World& w = TheWorld();
  if (current != &w) return kInvalidContext;
  if (self != nullptr && self->capturing) {
    if (self->invalidated) return kCaptureInvalidated;
    self->work.push_back(std::move(work));
    return 0;
  }
  if (self == nullptr)
    for (auto* one : w.streams)
      if (one->capturing && one->blocking) return one->invalidated = true, kCaptureImplicit;
  work();
  return 0;
}

// Where the driver reaches an address of the device's or of the host's memory.
char* Reached(uintptr_t address, size_t bytes) {
  auto& memory = TheWorld().memory;
  auto* asked = reinterpret_cast<char*>(address);
  auto found = memory.upper_bound(asked);
  if (found == memory.begin()) return asked;
  --found;
  auto [start, block] = *found;
  if (asked >= start + block.bytes) return asked;
  if (asked + bytes > start + block.bytes) Fail("more than there is of the device's memory", "a copy");
  return block.reached + (asked - start);
}

// Through a pipe, which refuses an address where there is no memory.
void CopyBytes(uintptr_t to, uintptr_t from, size_t bytes) {
  constexpr size_t kChunk = 4096;
  World& w = TheWorld();
  char *target = Reached(to, bytes), *source = Reached(from, bytes);
  for (size_t done = 0; done < bytes; done += kChunk) {
    auto size = static_cast<ssize_t>(std::min(kChunk, bytes - done));
    if (write(w.pipe[1], source + done, size) != size) Fail("it reads where no memory is", "a copy");
    if (read(w.pipe[0], target + done, size) != size) Fail("it writes where no memory is", "a copy");
  }
}

void CheckFunction(Function* function, const char* name) {
  for (const auto& [module, functions] : TheWorld().modules)
    for (const auto& one : functions)
      if (one.get() == function) return;
  Fail("a function of a module that is not loaded", name);
}
}  // namespace

// The begin of a call, in its turn.
#define IN                                    \
  if (int e = Enter(__func__)) return e;      \
  World& w = TheWorld();                      \
  std::lock_guard<std::recursive_mutex> guard(w.lock);
#define IN_CONTEXT IN if (current != &w) return kInvalidContext;

// CUlaunchConfig up to its stream, and CUtensorMap's size.
struct Launch {
  unsigned grid[3], block[3], shared;
  void* stream;
};
constexpr uintptr_t kTensorMapAlignment = 64, kAddressAlignment = 16;

extern "C" {
int cuInit(unsigned) { IN w.initialized = true; return 0; }
int cuDeviceGet(int* d, int n) { IN *d = n; return n == 0 ? 0 : 101; }
int cuDeviceGetName(char* n, int len, int) { IN std::snprintf(n, len, "fake"); return 0; }
int cuDevicePrimaryCtxRetain(void** c, int) { IN *c = &w; return 0; }
int cuCtxSetCurrent(void* c) { IN if (c != &w) Fail("a context that is none", __func__); current = c; return 0; }
int cuCtxSynchronize() { IN_CONTEXT return Forbidden(true); }
int cuStreamGetId(void* s, unsigned long long* id) { IN_CONTEXT auto* k = Known(s, __func__); *id = k ? k->id : 1; return 0; }
int cuStreamIsCapturing(void* s, int* c) { IN_CONTEXT auto* k = Known(s, __func__); *c = k && k->capturing; return 0; }
int cudaStreamCreateWithFlags(void** s, unsigned f) { IN auto* one = new Stream{w.next++, f == 0}; w.streams.insert(one); *s = one; return 0; }
int cudaStreamCreate(void** s) { return cudaStreamCreateWithFlags(s, 0); }
int cuStreamCreate(void** s, unsigned f) { IN_CONTEXT return cudaStreamCreateWithFlags(s, f); }
int cudaStreamDestroy(void* s) { IN auto* k = Known(s, __func__); if (!k || k->capturing) Fail("it cannot be destroyed", __func__); w.streams.erase(k); delete k; return 0; }
int cudaStreamSynchronize(void* s) { IN auto* k = Known(s, __func__); if (k && k->capturing) return k->invalidated = true, kCaptureUnsupported; return Forbidden(false); }
int cudaStreamWaitEvent(void* s, void*, unsigned) { IN Known(s, __func__); return 0; }
int cuStreamBeginCapture_v2(void* s, int m) { IN_CONTEXT auto* k = Known(s, __func__); if (!k || k->capturing) return kCaptureUnsupported; k->capturing = true; k->invalidated = false; k->mode = m; return 0; }
int cudaStreamBeginCapture(void* s, int m) { IN return cuStreamBeginCapture_v2(s, m); }
int cuStreamEndCapture(void* s, void** g) { IN_CONTEXT auto* k = Known(s, __func__); *g = nullptr; if (!k || !k->capturing) return kNotCapturing; k->capturing = false; auto work = std::make_unique<Work>(std::move(k->work)); k->work.clear(); if (k->invalidated) return kCaptureInvalidated; *g = work.get(); w.graphs[*g] = std::move(work); return 0; }
int cudaStreamEndCapture(void* s, void** g) { IN return cuStreamEndCapture(s, g); }
int cuGraphInstantiateWithFlags(void** e, void* g, unsigned long long f) { IN_CONTEXT if (!w.graphs.count(g)) Fail("a graph that is none", __func__); if (f) return kInvalidValue; auto work = std::make_unique<Work>(*w.graphs[g]); *e = work.get(); w.executables[*e] = std::move(work); ++w.captured; return 0; }
int cudaGraphInstantiate(void** e, void* g, unsigned long long f) { IN return cuGraphInstantiateWithFlags(e, g, f); }
int cuGraphDestroy(void* g) { IN if (!w.graphs.erase(g)) Fail("a graph that is none", __func__); return 0; }
int cudaGraphDestroy(void* g) { return cuGraphDestroy(g); }
int cuGraphLaunch(void* e, void* s) { IN if (!w.executables.count(e)) Fail("a graph that is none", __func__); if (auto* k = Known(s, __func__); k && k->capturing) return k->invalidated = true, kCaptureUnsupported; ++w.launches; return Give(Known(s, __func__), [work = *w.executables[e]] { for (auto& one : work) one(); }); }
int cudaGraphLaunch(void* e, void* s) { IN int status = cuGraphLaunch(e, s); if (status) last_error = status; return status; }
int cuGraphExecDestroy(void* e) { IN_CONTEXT if (!w.executables.erase(e)) Fail("a graph that is none", __func__); return 0; }
int cudaGraphExecDestroy(void* e) { IN return cuGraphExecDestroy(e); }
int cuMemcpyAsync(uintptr_t to, uintptr_t from, size_t n, void* s) { IN ++w.copies; return Give(Known(s, __func__), [=] { CopyBytes(to, from, n); }); }
int cudaMemcpyAsync(void* to, const void* from, size_t n, int, void* s) { IN return cuMemcpyAsync((uintptr_t)to, (uintptr_t)from, n, s); }
int cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t n, void* s) { IN return cuMemcpyAsync((uintptr_t)to, (uintptr_t)from, n, s); }

int cudaMalloc(void** p, size_t n) {
  IN if (int e = Forbidden(false)) return e;
  const size_t whole = (n + 4095) / 4096 * 4096;
  int file = memfd_create("fake_cuda", 0);
  if (file < 0 || ftruncate(file, whole) != 0) Fail("there is no memory", __func__);
  void* reached = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  *p = mmap(nullptr, whole, PROT_NONE, MAP_SHARED, file, 0);
  close(file);
  if (reached == MAP_FAILED || *p == MAP_FAILED) Fail("there is no memory", __func__);
  w.memory[static_cast<char*>(*p)] = {whole, static_cast<char*>(reached)};
  return 0;
}

int cudaFree(void* p) {
  IN if (int e = Forbidden(false)) return e;
  auto found = w.memory.find(static_cast<char*>(p));
  if (p == nullptr) return 0;
  if (found == w.memory.end()) Fail("memory that is none", __func__);
  munmap(found->second.reached, found->second.bytes);
  munmap(p, found->second.bytes);
  w.memory.erase(found);
  return 0;
}

int cudaMallocHost(void** p, size_t n) { IN *p = std::aligned_alloc(256, (n + 511) / 256 * 256); w.pinned[*p] = *p; return 0; }
int cudaFreeHost(void* p) { IN if (!w.pinned.erase(p)) Fail("memory that is none", __func__); std::free(p); return 0; }
int cudaMemGetInfo(size_t* f, size_t* t) { IN *f = *t = size_t{1} << 30; return 0; }
int cuModuleLoadData(void** m, const void*) { IN_CONTEXT *m = new char; w.modules[*m]; return 0; }
int cuModuleUnload(void* m) { IN_CONTEXT if (!w.modules.erase(m)) Fail("a module that is none", __func__); delete static_cast<char*>(m); return 0; }
int cuModuleGetFunction(void** f, void* m, const char*) { IN_CONTEXT if (!w.modules.count(m)) Fail("a module that is none", __func__); w.modules[m].push_back(std::make_unique<Function>(Function{m})); *f = w.modules[m].back().get(); return 0; }
int cuFuncSetAttribute(void* f, int, int) { IN_CONTEXT CheckFunction(static_cast<Function*>(f), __func__); return 0; }
int cuLaunchKernelEx(const Launch* l, void* f, void**, void**) { IN return Give(Known(l->stream, __func__), [f] { ++TheWorld().kernels; CheckFunction(static_cast<Function*>(f), "a launch"); }); }

int cuTensorMapEncodeTiled(void* map, int, unsigned, void* address) {
  IN_CONTEXT
  if (reinterpret_cast<uintptr_t>(map) % kTensorMapAlignment != 0) Fail("a map that is not aligned", __func__);
  if (reinterpret_cast<uintptr_t>(address) % kAddressAlignment != 0) Fail("an address that is not aligned", __func__);
  if (Reached(reinterpret_cast<uintptr_t>(address), 1) == address) Fail("memory that is not the device's", __func__);
  std::memset(map, 0, 128);
  return 0;
}

int cuGetErrorName(int, const char** n) { *n = "FAKE"; return 0; }
int cuGetErrorString(int, const char** n) { *n = "fake"; return 0; }
int cudaDeviceGetAttribute(int* v, int a, int) { IN *v = a == 75 ? 9 : a == 76 ? 0 : a == 10 ? 32 : 1024; return 0; }
int cudaEventCreate(void** e) { IN *e = new char; return 0; }
int cudaEventDestroy(void* e) { IN delete static_cast<char*>(e); return 0; }
int cudaEventElapsedTime(float* t, void*, void*) { *t = 1; return 0; }
int cudaEventRecord(void*, void* s) { IN Known(s, __func__); return 0; }
int cudaEventSynchronize(void*) { IN return 0; }
int cudaGetDevice(int* d) { if (int e = ended ? kDeinitialized : 0) return e; *d = 0; return 0; }
int cudaSetDevice(int) { IN return 0; }
int cudaGetDeviceCount(int* n) { *n = 1; return 0; }
int cudaGetDeviceProperties(void*, int) { Fail("not there", __func__); }
const char* cudaGetErrorName(int) { return "fake"; }
const char* cudaGetErrorString(int) { return "fake"; }
int cudaGetLastError() { return std::exchange(last_error, 0); }
int cudaPeekAtLastError() { return last_error; }
}
