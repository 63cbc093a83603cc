#include <relaxtune/artifact.h>

#include <dlfcn.h>
#include <sched.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <set>

#include "gpu.h"
#include "loading.h"
#include "manifest.h"
#include "padding.h"
#include "size_graphs.h"
#include "tensors.h"
#include "token_list.h"

namespace relaxtune {
namespace {

namespace ffi = tvm::ffi;
using ffi::Tensor;

// Compiled code reads its arguments in vectors of this many bytes.
constexpr uintptr_t kAlignment = 64;
// Of tvm/runtime/memory/memory_manager.h: memory is kept for the next call.
constexpr int kPooled = 2;
// Of tvm/runtime/device_api.h.
constexpr int kExist = 0;
// Of tvm/runtime/threading_backend.h: threads may run on all the CPUs given.
constexpr int kShareAllCpus = -3;
constexpr char kMain[] = "main";
// The same call without graphs inside, to be captured; code without such graphs has none.
constexpr char kWhole[] = "main_whole";
constexpr char kSaved[] = "relaxtune_saved_main";
// Sets of sizes whose memory the pool keeps at a time.
constexpr size_t kSizesMax = 64;

// A tensor over the caller's memory, for the time of one call.
Tensor Borrowed(const DLTensor& tensor) {
  auto* managed = new DLManagedTensor{tensor, nullptr, [](DLManagedTensor* self) { delete self; }};
  return Tensor::FromDLPack(managed);
}

// Code of earlier versions: TVM keeps a pool of threads for each calling thread, so each sets its own, once.
void ConfigureThreads(int threads) {
  thread_local int configured = 0;
  int wanted = threads > 0 ? threads : -1;
  if (configured == wanted) return;
  ffi::Array<ffi::String> cpus;
  cpu_set_t usable;
  CPU_ZERO(&usable);
  sched_getaffinity(0, sizeof(usable), &usable);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &usable)) cpus.push_back(std::to_string(cpu));
  Runtime("config_threadpool")(kShareAllCpus, threads > 0 ? threads : static_cast<int>(cpus.size()), cpus);
  configured = wanted;
}

}  // namespace

// The code of one set of shapes: the artifact's own, or a bucket's.
class Code {
 public:
  Code(const std::string& directory, const CodeEntry& entry, const std::map<std::string, Tensor>& weights,
       const std::optional<Unpadding>& unpadding, DLDevice device, const Options& options)
      : entry_(entry),
        device_(device),
        code_(LoadCode(directory + "/" + entry.file)),
        machine_(code_->GetFunction("vm_load_executable").value()().cast<ffi::Module>()) {
    if (auto set_threads = code_->GetFunction("relaxtune_cpu_threads", true)) {
      (*set_threads)(options.threads);
      pooled_ = true;
    }
    std::vector<ffi::Any> setup = {static_cast<int>(device.device_type), device.device_id, kPooled};
    if (device.device_type != kDLCPU) setup.insert(setup.end(), {static_cast<int>(kDLCPU), 0, kPooled});
    Call("vm_initialization", setup);
    for (const std::string& name : entry.weights) {
      auto found = weights.find(name);
      if (found == weights.end())
        throw Error("it lacks the weight " + name, directory + "/params.safetensors", "compile the model again");
      weights_.push_back(found->second);
    }
    if (unpadding) tokens_.emplace(*unpadding, device);
    if (entry.cuda_graph && IsStatic()) SaveWithBuffers();
    if (options.size_graphs && entry.cuda_graph && !IsStatic()) graphs_ = std::make_unique<SizeGraphs>(machine_, device);
    if (machine_->GetFunction(kWhole).has_value()) captured_ = kWhole;
  }

  const CodeEntry& entry() const { return entry_; }
  // Whether the code brings its own pool of threads.
  bool pooled() const { return pooled_; }

  std::vector<Tensor> Run(const std::vector<DLTensor>& inputs) {
    std::vector<Tensor> arguments, outputs;
    if (!buffers_.empty()) {
      for (size_t i = 0; i < inputs.size(); ++i)
        if (Start(inputs[i]) != Start(*buffers_[i].GetDLTensorPtr())) Copy(Compact(inputs[i]), buffers_[i]);
      outputs = RunStatic();
      arguments = buffers_;
    } else if (graphs_ != nullptr && !tokens_) {
      for (const DLTensor& input : inputs) Compact(input);
      TrimPool(inputs);
      outputs = graphs_->Run(inputs, [&] { return arguments = Arguments(inputs); }, Kernels(kMain), Kernels(captured_));
    } else {
      if (device_.device_type == kDLCUDA) Gpu::Of(device_).Follow(Gpu::Of(device_).pool);
      TrimPool(inputs);
      arguments = Arguments(inputs);
      if (tokens_) {
        auto list = [this](const Tensor& mask, const TokenList::Lists& to) {
          Call("list_tokens", {mask, to[0], to[1], to[2], to[3]});
        };
        for (const Tensor& one : tokens_->Of(arguments[tokens_->mask()], list)) arguments.push_back(one);
      }
      if (graphs_ != nullptr) {
        std::vector<DLTensor> given;
        for (const Tensor& one : arguments) given.push_back(*one.GetDLTensorPtr());
        outputs = graphs_->Run(given, [&] { return arguments; }, Kernels(kMain), Kernels(captured_));
      } else {
        outputs = Machine(arguments);
      }
    }
    // The first call of any sizes is no graph's, so that it knows its arguments.
    if (!known_) Note(outputs, arguments);
    for (size_t number = 0; number < outputs.size(); ++number)
      if (shared_[number]) outputs[number] = Copied(*outputs[number].GetDLTensorPtr(), device_);
    return outputs;
  }

 private:
  ffi::Any Call(const char* name, const std::vector<ffi::Any>& arguments) {
    std::vector<ffi::AnyView> views(arguments.begin(), arguments.end());
    ffi::Any result;
    machine_->GetFunction(name).value().CallPacked(views.data(), static_cast<int>(views.size()), &result);
    return result;
  }

  std::vector<Tensor> Machine(const std::vector<Tensor>& inputs, const char* entry = kMain) {
    std::vector<ffi::Any> arguments(inputs.begin(), inputs.end());
    arguments.insert(arguments.end(), weights_.begin(), weights_.end());
    return Unpacked(Call(entry, arguments));
  }

  SizeGraphs::Kernels Kernels(const char* entry) {
    return [this, entry](const std::vector<Tensor>& inputs) { return Machine(inputs, entry); };
  }

  // The first call captures the graph, in memory of the pool; the second one tells whether calls take memory.
  std::vector<Tensor> RunStatic() {
    if (takes_memory_ && !*takes_memory_) return Unpacked(Call(kSaved, {}));
    Gpu& gpu = Gpu::Of(device_);
    gpu.Follow(gpu.pool);
    if (!known_ || takes_memory_) return Unpacked(Call(kSaved, {}));
    std::vector<ffi::Any> storages;
    NotedAllocations noted(machine_, &storages);
    std::vector<Tensor> outputs = Unpacked(Call(kSaved, {}));
    takes_memory_ = !storages.empty();
    return outputs;
  }

  // Give memory back now and then: TVM's pool keeps what each set of sizes took for that very set.
  void TrimPool(const std::vector<DLTensor>& inputs) {
    if (IsStatic()) return;
    std::vector<std::vector<int64_t>> sizes;
    for (const DLTensor& one : inputs) sizes.emplace_back(one.shape, one.shape + one.ndim);
    sizes_.insert(sizes);
    if (sizes_.size() <= kSizesMax) return;
    sizes_.clear();
    ffi::Function::GetGlobalRequired("vm.builtin.memory_manager.clear")();
  }

  static std::vector<Tensor> Unpacked(const ffi::Any& result) {
    if (auto one = result.try_cast<Tensor>()) return {*one};
    auto several = result.cast<ffi::Array<Tensor>>();
    return {several.begin(), several.end()};
  }

  // Whether all sizes are known; how many tokens a mask leaves is not.
  bool IsStatic() const {
    if (tokens_) return false;
    for (const TensorSpec& spec : entry_.inputs)
      for (const Axis& axis : spec.shape)
        if (axis.size < 0) return false;
    return true;
  }

  // A CUDA graph reads its inputs at fixed addresses.
  void SaveWithBuffers() {
    for (const TensorSpec& spec : entry_.inputs) {
      std::vector<int64_t> shape;
      for (const Axis& axis : spec.shape) shape.push_back(axis.size);
      buffers_.push_back(Empty(ffi::Shape(shape), DtypeOf(spec.dtype, spec.name), device_));
    }
    std::vector<ffi::Any> arguments = {ffi::String("main"), ffi::String(kSaved), 1};
    arguments.insert(arguments.end(), buffers_.begin(), buffers_.end());
    arguments.insert(arguments.end(), weights_.begin(), weights_.end());
    Call("save_function", arguments);
  }

  static const DLTensor& Compact(const DLTensor& input) {
    if (!IsCompact(input)) throw Error("its strides leave gaps", "an input", "give a compact tensor");
    return input;
  }

  std::vector<Tensor> Arguments(const std::vector<DLTensor>& inputs) const {
    std::vector<Tensor> arguments;
    for (const DLTensor& input : inputs) {
      bool here = input.device.device_type == device_.device_type && input.device.device_id == device_.device_id;
      bool aligned = reinterpret_cast<uintptr_t>(Start(Compact(input))) % kAlignment == 0;
      arguments.push_back(here && aligned ? Borrowed(input) : Copied(input, device_));
    }
    return arguments;
  }

  // Find out which outputs lie in memory of an input, a weight, a constant or an earlier output: they are copied. That is
  // how the code was compiled, so it is the same in each call.
  void Note(const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs) {
    std::vector<Tensor> others(inputs);
    others.insert(others.end(), weights_.begin(), weights_.end());
    // A constant inside the code is where two runs put their output, although the first one's is still held.
    if (weights_.empty() && buffers_.empty())
      for (const Tensor& again : Machine(inputs)) others.push_back(again);
    for (const Tensor& output : outputs) {
      const DLTensor& one = *output.GetDLTensorPtr();
      bool shared = false;
      for (const Tensor& other : others) {
        const DLTensor& taken = *other.GetDLTensorPtr();
        shared = shared || (Start(one) < Start(taken) + Bytes(taken) && Start(taken) < Start(one) + Bytes(one));
      }
      shared_.push_back(shared);
      others.push_back(output);
    }
    known_ = true;
  }

  CodeEntry entry_;
  DLDevice device_;
  ffi::Module code_, machine_;
  bool pooled_ = false;
  std::vector<Tensor> weights_, buffers_;
  std::optional<TokenList> tokens_;
  std::unique_ptr<SizeGraphs> graphs_;
  const char* captured_ = kMain;
  std::set<std::vector<std::vector<int64_t>>> sizes_;
  std::vector<bool> shared_;
  bool known_ = false;
  std::optional<bool> takes_memory_;
};

namespace {

DLDevice DeviceOf(const Manifest& manifest, const Options& options, const std::string& directory) {
  if (manifest.kind != "cuda") return {kDLCPU, 0};
  if (dlopen("libtvm_runtime_cuda.so", RTLD_NOW | RTLD_GLOBAL) == nullptr)
    throw Error(std::string("it is for a GPU, and TVM's runtime for CUDA cannot be loaded: ") + dlerror(), directory,
                "put libtvm_runtime_cuda.so beside libtvm_runtime.so, and install CUDA's runtime");
  DLDevice device{kDLCUDA, options.device};
  if (!Runtime("GetDeviceAttr")(static_cast<int>(device.device_type), device.device_id, kExist).cast<bool>())
    throw Error("it is for a GPU (" + manifest.arch + "), and there is no CUDA device " + std::to_string(options.device),
                directory, "run it where there is one");
  Gpu::Of(device);  // before the artifact, so that one that is destroyed in the process's end knows of it
  return device;
}

// An output for the caller. One that is freed while the process ends leaves its device's memory to the system.
Output Given(const Tensor& tensor) {
  DLManagedTensorVersioned* made = tensor.ToDLPackVersioned();
  if (made->dl_tensor.device.device_type != kDLCUDA) return Output(made);
  auto* given = new DLManagedTensorVersioned(*made);
  given->manager_ctx = made;
  given->deleter = [](DLManagedTensorVersioned* self) {
    auto* held = static_cast<DLManagedTensorVersioned*>(self->manager_ctx);
    if (!Gpu::ProcessEnds()) held->deleter(held);
    delete self;
  };
  return Output(given);
}

// The turn of a call: on a GPU, on the caller's stream, behind the artifact's last call.
class Turn {
 public:
  Turn(DLDevice device, void* stream, Memory& own) {
    if (device.device_type != kDLCUDA) return;
    Gpu& gpu = Gpu::Of(device);
    lock_ = std::unique_lock<std::recursive_mutex>(gpu.turn);
    gpu.MakeCurrent();
    on_.emplace(device, stream);
    gpu.RefuseCapture();
    gpu.Follow(own);
  }
  Turn(const Turn&) = delete;
  ~Turn() {
    if (lock_ && std::uncaught_exceptions() > exceptions_) Gpu::ForgetError();
  }

 private:
  const int exceptions_ = std::uncaught_exceptions();
  std::unique_lock<std::recursive_mutex> lock_;
  std::optional<Gpu::OnStream> on_;
};

}  // namespace

struct Artifact::State {
  Manifest manifest;
  DLDevice device;
  Options options;
  std::vector<Code> codes;  // the artifact's own, then its buckets'
  std::mutex turn;
  Memory memory;
  // The process that loaded it; 0 where processes that are forked later may run it, too.
  pid_t process = 0;

  bool IsForked() const { return process != 0 && process != getpid(); }

  // Memory goes back to the pool when the GPU has done its work there.
  ~State() {
    if (codes.empty() || device.device_type != kDLCUDA) return;
    if (Gpu::ProcessEnds() || IsForked()) {
      new std::vector<Code>(std::move(codes));
      return;
    }
    try {
      Gpu::Of(device).Wait();
    } catch (const Error&) {
      // The driver has failed, and every later call says so.
    }
  }
};

Artifact::Artifact(std::unique_ptr<State> state) : state_(std::move(state)) {}
Artifact::Artifact(Artifact&&) noexcept = default;
Artifact& Artifact::operator=(Artifact&&) noexcept = default;
Artifact::~Artifact() = default;

Artifact Artifact::Load(const std::string& directory, const Options& options) {
  auto state = std::make_unique<State>();
  state->manifest = ReadManifest(directory, options.verify);
  const Manifest& manifest = state->manifest;
  state->device = DeviceOf(manifest, options, directory);
  state->options = options;
  try {
    auto weights = LoadWeights(directory + "/params.safetensors", state->device);
    auto add = [&](const CodeEntry& entry) {
      state->codes.emplace_back(directory, entry, weights, manifest.unpadding, state->device, options);
    };
    add(manifest.main);
    std::for_each(manifest.buckets.begin(), manifest.buckets.end(), add);
    if (!state->codes[0].pooled()) state->process = getpid();
  } catch (const ffi::Error& e) {
    throw Error(std::string("it cannot be loaded: ") + e.message(), directory, "compile the model again");
  }
  return Artifact(std::move(state));
}

const std::string& Artifact::model() const { return state_->manifest.model; }
const std::vector<TensorSpec>& Artifact::inputs() const { return state_->manifest.main.inputs; }
const std::vector<TensorSpec>& Artifact::outputs() const { return state_->manifest.main.outputs; }
DLDevice Artifact::device() const { return state_->device; }

std::vector<Output> Artifact::Run(const std::vector<DLTensor>& inputs, void* stream) {
  if (state_->IsForked())
    throw Error("it was loaded before this process was forked, and neither CUDA nor code of earlier versions works in a forked process",
                state_->manifest.model, "load it after the fork");
  auto sizes = CheckInputs(state_->manifest, inputs);
  const Manifest& manifest = state_->manifest;
  // What is padded has to be read here, and what is cut too.
  bool may_pad = state_->device.device_type == kDLCPU || state_->options.host_outputs;
  for (const DLTensor& input : inputs) may_pad = may_pad && OnHost(input) && IsCompact(input);
  auto route = ChooseBucket(manifest, inputs, sizes, may_pad);
  std::lock_guard<std::mutex> turn(state_->turn);
  Code& code = state_->codes[route ? route->bucket + 1 : 0];
  std::vector<Output> outputs;
  try {
    if (!code.pooled() && state_->device.device_type == kDLCPU) ConfigureThreads(state_->options.threads);
    Turn on_device(state_->device, stream, state_->memory);
    std::vector<Tensor> padded, made;
    if (route && route->padded) {
      Sizes wider = sizes;
      for (const auto& [axis, size] : code.entry().sizes) wider[axis] = size;
      padded = Padded(manifest, inputs, wider);
      std::vector<DLTensor> larger;
      for (const Tensor& tensor : padded) larger.push_back(*tensor.GetDLTensorPtr());
      made = code.Run(larger);
    } else {
      made = code.Run(inputs);
    }
    if (state_->options.host_outputs && state_->device.device_type != kDLCPU) {
      for (Tensor& tensor : made) tensor = Copied(*tensor.GetDLTensorPtr(), {kDLCPU, 0});
      Runtime("Device_StreamSync")(state_->device, reinterpret_cast<int64_t>(stream));
    }
    if (!padded.empty())
      for (size_t number = 0; number < made.size(); ++number) made[number] = Cut(manifest, number, made[number], sizes);
    for (const Tensor& tensor : made) outputs.push_back(Given(tensor));
  } catch (const ffi::Error& e) {
    throw Error(std::string("the code refuses these inputs: ") + e.message(), state_->manifest.model, "");
  }
  return outputs;
}

}  // namespace relaxtune
