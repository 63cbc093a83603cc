#include "size_graphs.h"

#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include "tensors.h"

namespace relaxtune {

namespace ffi = tvm::ffi;

namespace {

// Sets of sizes that have a graph at a time, and those whose first call is remembered.
constexpr size_t kGraphsMax = 32;
constexpr size_t kRememberedMax = 1024;
constexpr char kAllocation[] = "vm.builtin.alloc_storage";
// Of tvm/runtime/vm/vm.h, VMInstrumentReturnKind::kNoOp.
constexpr int kGoOn = 0;

void Instrument(const ffi::Module& machine, ffi::Any instrument) {
  machine->GetFunction("set_instrument").value()(instrument);
}

}  // namespace

NotedAllocations::NotedAllocations(ffi::Module machine, std::vector<ffi::Any>* storages) : machine_(machine) {
  // Its arguments: the function, its name, whether before the call, what it returned, and the call's arguments.
  Instrument(machine_, ffi::Function::FromPacked([storages](const ffi::AnyView* words, int32_t, ffi::Any* result) {
    if (!words[2].cast<bool>() && words[1].cast<ffi::String>() == kAllocation) storages->push_back(ffi::Any(words[3]));
    *result = kGoOn;
  }));
}

NotedAllocations::~NotedAllocations() { Instrument(machine_, nullptr); }

SizeGraphs::~SizeGraphs() {
  for (const auto& [sizes, graph] : graphs_)
    if (graph.executable != nullptr) Gpu::Of(device_).Destroy(graph.executable);
}

SizeGraphs::Tensors SizeGraphs::Run(const std::vector<DLTensor>& given, const std::function<Tensors()>& place,
                                    const Kernels& kernels, const Kernels& captured) {
  Gpu& gpu = Gpu::Of(device_);
  Sizes sizes;
  for (const DLTensor& one : given) sizes.emplace_back(one.shape, one.shape + one.ndim);
  auto found = graphs_.find(sizes);
  if (found == graphs_.end() && seen_.erase(sizes) != 0) {
    gpu.Follow(gpu.pool);
    found = graphs_.emplace(sizes, Captured(given, captured)).first;
    used_.push_front(sizes);
    found->second.used = used_.begin();
    if (graphs_.size() > kGraphsMax) Forget(used_.back());
  } else if (found == graphs_.end()) {
    if (seen_.size() >= kRememberedMax) seen_.clear();
    seen_.insert(sizes);
  }
  if (found == graphs_.end() || found->second.executable == nullptr) {
    gpu.Follow(gpu.pool);
    return kernels(place());
  }
  Graph& graph = found->second;
  used_.splice(used_.begin(), used_, graph.used);
  for (size_t number = 0; number < given.size(); ++number) Copy(given[number], graph.inputs[number]);
  gpu.Launch(graph.executable);
  return graph.outputs;
}

SizeGraphs::Graph SizeGraphs::Captured(const std::vector<DLTensor>& given, const Kernels& kernels) {
  Graph graph{};
  for (const DLTensor& one : given)
    graph.inputs.push_back(Empty(ffi::Shape(one.shape, one.shape + one.ndim), one.dtype, device_));
  NotedAllocations noted(machine_, &graph.storages);
  try {
    graph.executable = Gpu::Of(device_).Captured([&] { graph.outputs = kernels(graph.inputs); });
  } catch (const std::exception&) {
    graph.executable = nullptr;  // the kernels run one by one, and say what is wrong if that was not the capture
  }
  if (graph.executable == nullptr) graph = Graph{};
  return graph;
}

void SizeGraphs::Forget(const Sizes& sizes) {
  auto found = graphs_.find(sizes);
  if (found->second.executable != nullptr) {
    Gpu::Of(device_).Wait();  // its memory goes back to the pool
    Gpu::Of(device_).Destroy(found->second.executable);
  }
  used_.erase(found->second.used);
  graphs_.erase(found);
}

}  // namespace relaxtune
