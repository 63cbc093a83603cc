#include "gpu.h"

#include <dlfcn.h>
#include <relaxtune/artifact.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>

#include "tensors.h"

namespace relaxtune {
namespace {

std::atomic<bool> process_ends{false};

// CUDA_ERROR_DEINITIALIZED: the process ends, and the driver has ended before.
constexpr int kEnded = 4;
// CU_STREAM_CAPTURE_MODE_RELAXED: allocations of other threads are no fault of a capture.
constexpr int kRelaxed = 2;
// No stream has this identity: the default one, which is never destroyed, is not asked for its own.
constexpr int64_t kDefaultStream = -1;

template <typename... Arguments>
int Ask(const char* name, Arguments... arguments) {
  static void* library = dlopen("libcuda.so.1", RTLD_NOW);
  auto* function = library == nullptr ? nullptr : reinterpret_cast<int (*)(Arguments...)>(dlsym(library, name));
  if (function == nullptr) throw Error(std::string("it has no ") + name, "the CUDA driver", "install CUDA's driver");
  return function(arguments...);
}

template <typename... Arguments>
void Require(const char* name, Arguments... arguments) {
  int status = Ask(name, arguments...);
  if (status != 0) throw Error(std::string(name) + " is error " + std::to_string(status), "the CUDA driver", "");
}

}  // namespace

Gpu& Gpu::Of(DLDevice device) {
  static std::mutex making;
  // Never destroyed: artifacts may go after it when the process ends.
  static auto* made = new std::map<int, std::unique_ptr<Gpu>>();
  std::lock_guard<std::mutex> lock(making);
  auto& found = (*made)[device.device_id];
  if (found == nullptr) found.reset(new Gpu(device));
  return *found;
}

Gpu::Gpu(DLDevice device) : device_(device) {
  int number = 0;
  Require("cuInit", 0u);
  Require("cuDeviceGet", &number, static_cast<int>(device.device_id));
  Require("cuDevicePrimaryCtxRetain", &context_, number);
  // Runs before the driver's own end, which was registered earlier, and after the destructors of what is made later.
  static const int registered = std::atexit([] { process_ends = true; });
  if (registered != 0) throw Error("no function can be registered for its end", "this process", "");
}

bool Gpu::ProcessEnds() { return process_ends; }

void Gpu::MakeCurrent() { Require("cuCtxSetCurrent", context_); }

void Gpu::Wait() {
  int status = Ask("cuCtxSetCurrent", context_);
  if (status == 0) status = Ask("cuCtxSynchronize");
  if (status != 0 && status != kEnded)
    throw Error("cuCtxSynchronize is error " + std::to_string(status), "the CUDA driver", "");
}

void Gpu::Follow(Memory& memory) {
  int64_t stream = kDefaultStream;
  if (Stream() != nullptr) Require("cuStreamGetId", Stream(), &stream);
  if (memory.last && *memory.last != stream) Wait();
  memory.last = stream;
}

void Gpu::RefuseCapture() {
  int capturing = 0;
  if (Stream() != nullptr) Require("cuStreamIsCapturing", Stream(), &capturing);
  if (capturing != 0)
    throw Error("it is being captured into a CUDA graph, which cannot hold a call of an artifact", "the stream",
                "call the artifact outside the capture: it launches graphs of its own");
}

void Gpu::ForgetError() {
  static void* runtime = dlopen("libcudart.so.13", RTLD_NOW | RTLD_NOLOAD);  // TVM's, whose name pipeline.codegen has
  static auto* forget = reinterpret_cast<int (*)()>(runtime == nullptr ? nullptr : dlsym(runtime, "cudaGetLastError"));
  if (forget != nullptr) forget();
}

void* Gpu::Stream() const { return TVMFFIEnvGetStream(device_.device_type, device_.device_id); }

Gpu::OnStream::OnStream(DLDevice device, void* stream) : device_(device) {
  TVMFFIEnvSetStream(device.device_type, device.device_id, stream, &before_);
}

Gpu::OnStream::~OnStream() { TVMFFIEnvSetStream(device_.device_type, device_.device_id, before_, nullptr); }

void Gpu::Copy(const void* from, void* to, size_t bytes) {
  if (bytes != 0) Require("cuMemcpyAsync", reinterpret_cast<uintptr_t>(to), reinterpret_cast<uintptr_t>(from), bytes, Stream());
}

void* Gpu::BeginCapture() {
  auto* stream = reinterpret_cast<void*>(Runtime("Device_StreamCreate")(device_).cast<int64_t>());
  int status = Ask("cuStreamBeginCapture_v2", stream, kRelaxed);
  if (status == 0) return stream;
  Runtime("Device_StreamFree")(device_, reinterpret_cast<int64_t>(stream));
  throw Error("cuStreamBeginCapture_v2 is error " + std::to_string(status), "the CUDA driver", "");
}

void* Gpu::EndCapture(void* stream) {
  void *graph = nullptr, *executable = nullptr;
  int status = Ask("cuStreamEndCapture", stream, &graph);
  if (status == 0) status = Ask("cuGraphInstantiateWithFlags", &executable, graph, 0ull);
  if (graph != nullptr) Ask("cuGraphDestroy", graph);
  Runtime("Device_StreamFree")(device_, reinterpret_cast<int64_t>(stream));
  if (status != 0) ForgetError();
  return status == 0 ? executable : nullptr;
}

void Gpu::Launch(void* graph) { Require("cuGraphLaunch", graph, Stream()); }

void Gpu::Destroy(void* graph) { Ask("cuGraphExecDestroy", graph); }

}  // namespace relaxtune
