// A CUDA driver and runtime for machines without a GPU, as one library: memory of the device is the host's, kernels do
// nothing, graphs are counted. What is not there when it is used (a stream, a graph, memory) ends the process. After the
// library's own end each call is an error, as of the real driver. FAKE_CUDA_LOG names a file for the counts.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

namespace {
struct Stream {
  uint64_t id;
  bool capturing = false;
};

struct World {
  std::recursive_mutex lock;
  std::set<Stream*> streams;
  std::set<void*> graphs, executables;
  std::map<void*, size_t> memory;
  uint64_t next = 7;
  long launches = 0, kernels = 0, copies = 0, captured = 0;
};

World& TheWorld() {
  static auto* made = new World;
  return *made;
}

bool ended = false;
struct End {
  ~End() {
    ended = true;
    World& w = TheWorld();
    const char* path = std::getenv("FAKE_CUDA_LOG");
    std::FILE* file = path == nullptr ? nullptr : std::fopen(path, "w");
    if (file == nullptr) return;
    std::fprintf(file, "{\"kernels\": %ld, \"launches\": %ld, \"copies\": %ld, \"captured\": %ld, ", w.kernels, w.launches,
                 w.copies, w.captured);
    std::fprintf(file, "\"streams\": %zu, \"executables\": %zu, \"graphs\": %zu}\n", w.streams.size(),
                 w.executables.size(), w.graphs.size());
    std::fclose(file);
  }
} end;

[[noreturn]] void Fail(const char* what, const char* where) {
  std::fprintf(stderr, "fake CUDA: %s: %s\n", where, what);
  std::abort();
}

int Enter(const char* name) {
  if (!ended) return 0;
  std::fprintf(stderr, "fake CUDA: %s after the driver's end\n", name);
  return 4;
}

Stream* Known(void* stream, const char* name) {
  if (stream == nullptr) return nullptr;
  auto* one = static_cast<Stream*>(stream);
  if (!TheWorld().streams.count(one)) Fail("a stream that is none", name);
  return one;
}
}  // namespace

// The begin of a call, in its turn.
#define IN                                    \
  if (int e = Enter(__func__)) return e;      \
  World& w = TheWorld();                      \
  std::lock_guard<std::recursive_mutex> guard(w.lock);
extern "C" {
int cuInit(unsigned) { IN return 0; }
int cuDeviceGet(int* d, int n) { IN *d = n; return n == 0 ? 0 : 101; }
int cuDeviceGetName(char* n, int len, int) { IN std::snprintf(n, len, "fake"); return 0; }
int cuDevicePrimaryCtxRetain(void** c, int) { IN *c = &w; return 0; }
int cuCtxSetCurrent(void* c) { IN if (c != &w) Fail("a context that is none", __func__); return 0; }
int cuCtxSynchronize() { IN for (auto* s : w.streams) if (s->capturing) return 900; return 0; }
int cuStreamGetId(void* s, unsigned long long* id) { IN *id = Known(s, __func__)->id; return 0; }
int cuStreamIsCapturing(void* s, int* c) { IN auto* k = Known(s, __func__); *c = k && k->capturing; return 0; }
int cudaStreamCreateWithFlags(void** s, unsigned) { IN auto* one = new Stream{w.next++}; w.streams.insert(one); *s = one; return 0; }
int cudaStreamCreate(void** s) { return cudaStreamCreateWithFlags(s, 0); }
int cuStreamCreate(void** s, unsigned f) { return cudaStreamCreateWithFlags(s, f); }
int cudaStreamDestroy(void* s) { IN auto* k = Known(s, __func__); if (!k || k->capturing) Fail("it cannot be destroyed", __func__); w.streams.erase(k); delete k; return 0; }
int cudaStreamSynchronize(void* s) { IN auto* k = Known(s, __func__); return k && k->capturing ? 900 : 0; }
int cudaStreamWaitEvent(void* s, void*, unsigned) { IN Known(s, __func__); return 0; }
int cudaStreamBeginCapture(void* s, int) { IN auto* k = Known(s, __func__); if (!k) return 900; k->capturing = true; return 0; }
int cuStreamBeginCapture_v2(void* s, int m) { return cudaStreamBeginCapture(s, m); }
int cudaStreamEndCapture(void* s, void** g) { IN auto* k = Known(s, __func__); if (!k || !k->capturing) return 901; k->capturing = false; *g = new char; w.graphs.insert(*g); return 0; }
int cuStreamEndCapture(void* s, void** g) { return cudaStreamEndCapture(s, g); }
int cuGraphInstantiateWithFlags(void** e, void* g, unsigned long long) { IN if (!w.graphs.count(g)) Fail("a graph that is none", __func__); *e = new char; w.executables.insert(*e); ++w.captured; return 0; }
int cudaGraphInstantiate(void** e, void* g, unsigned long long f) { return cuGraphInstantiateWithFlags(e, g, f); }
int cuGraphDestroy(void* g) { IN if (!w.graphs.erase(g)) Fail("a graph that is none", __func__); delete static_cast<char*>(g); return 0; }
int cudaGraphDestroy(void* g) { return cuGraphDestroy(g); }
int cuGraphLaunch(void* e, void* s) { IN Known(s, __func__); if (!w.executables.count(e)) Fail("a graph that is none", __func__); ++w.launches; return 0; }
int cudaGraphLaunch(void* e, void* s) { return cuGraphLaunch(e, s); }
int cuGraphExecDestroy(void* e) { IN if (!w.executables.erase(e)) Fail("a graph that is none", __func__); delete static_cast<char*>(e); return 0; }
int cudaGraphExecDestroy(void* e) { return cuGraphExecDestroy(e); }
int cuMemcpyAsync(uintptr_t to, uintptr_t from, size_t n, void* s) { IN auto* k = Known(s, __func__); ++w.copies; if (!(k && k->capturing)) std::memcpy((void*)to, (void*)from, n); return 0; }
int cudaMemcpyAsync(void* to, const void* from, size_t n, int, void* s) { return cuMemcpyAsync((uintptr_t)to, (uintptr_t)from, n, s); }
int cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t n, void* s) { return cuMemcpyAsync((uintptr_t)to, (uintptr_t)from, n, s); }
int cudaMalloc(void** p, size_t n) { IN *p = std::aligned_alloc(256, (n + 511) / 256 * 256); std::memset(*p, 0, n); w.memory[*p] = n; return 0; }
int cudaMallocHost(void** p, size_t n) { return cudaMalloc(p, n); }
int cudaFree(void* p) { IN if (!p) return 0; if (!w.memory.erase(p)) Fail("memory that is none", __func__); std::free(p); return 0; }
int cudaFreeHost(void* p) { return cudaFree(p); }
int cudaMemGetInfo(size_t* f, size_t* t) { IN *f = *t = size_t{1} << 30; return 0; }
int cuModuleLoadData(void** m, const void*) { IN *m = new char; return 0; }
int cuModuleUnload(void* m) { IN delete static_cast<char*>(m); return 0; }
int cuModuleGetFunction(void** f, void*, const char* name) { IN *f = const_cast<char*>("function"); return 0; }
int cuFuncSetAttribute(void*, int, int) { IN return 0; }
int cuLaunchKernelEx(const void*, void*, void**, void**) { IN ++w.kernels; return 0; }
int cuTensorMapEncodeTiled() { IN return 0; }
int cuGetErrorName(int, const char** n) { *n = "FAKE"; return 0; }
int cuGetErrorString(int, const char** n) { *n = "fake"; return 0; }
int cudaDeviceGetAttribute(int* v, int a, int) { IN *v = a == 75 ? 9 : a == 76 ? 0 : a == 10 ? 32 : 1024; return 0; }
int cudaEventCreate(void** e) { IN *e = new char; return 0; }
int cudaEventDestroy(void* e) { IN delete static_cast<char*>(e); return 0; }
int cudaEventElapsedTime(float* t, void*, void*) { *t = 1; return 0; }
int cudaEventRecord(void*, void* s) { IN Known(s, __func__); return 0; }
int cudaEventSynchronize(void*) { IN return 0; }
int cudaGetDevice(int* d) { IN *d = 0; return 0; }
int cudaSetDevice(int) { IN return 0; }
int cudaGetDeviceCount(int* n) { IN *n = 1; return 0; }
int cudaGetDeviceProperties(void*, int) { Fail("not there", __func__); }
const char* cudaGetErrorName(int) { return "fake"; }
const char* cudaGetErrorString(int) { return "fake"; }
int cudaGetLastError() { return 0; }
int cudaPeekAtLastError() { return 0; }
}
