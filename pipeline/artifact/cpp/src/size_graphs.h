// CUDA graphs of an artifact with symbolic sizes: one for each set of sizes that is called again, as in Python
// (pipeline/artifact/gpu/size_graphs.py). Here each graph reads inputs of its own, into which each call copies.
#ifndef RELAXTUNE_SRC_SIZE_GRAPHS_H_
#define RELAXTUNE_SRC_SIZE_GRAPHS_H_

#include <tvm/ffi/any.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/module.h>

#include <functional>
#include <list>
#include <map>
#include <set>
#include <vector>

#include "gpu.h"

namespace relaxtune {

// What an artifact's virtual machine takes from TVM's pool in a scope; it stays taken as long as `storages` holds it.
class NotedAllocations {
 public:
  NotedAllocations(tvm::ffi::Module machine, std::vector<tvm::ffi::Any>* storages);
  ~NotedAllocations();
  NotedAllocations(const NotedAllocations&) = delete;

 private:
  tvm::ffi::Module machine_;
};

class SizeGraphs {
 public:
  using Tensors = std::vector<tvm::ffi::Tensor>;
  using Kernels = std::function<Tensors(const Tensors&)>;

  SizeGraphs(tvm::ffi::Module machine, DLDevice device) : machine_(machine), device_(device) {}
  SizeGraphs(const SizeGraphs&) = delete;
  ~SizeGraphs();

  // The outputs of one call. `given` lie on the host or on the device, and those of the first call of their sizes are brought
  // there by `place`. A graph is made of what `captured` does, which is what `kernels` do.
  Tensors Run(const std::vector<DLTensor>& given, const std::function<Tensors()>& place, const Kernels& kernels,
              const Kernels& captured);

 private:
  using Sizes = std::vector<std::vector<int64_t>>;
  struct Graph {
    void* executable;  // null where the driver makes none: these calls run their kernels for ever
    Tensors inputs, outputs;
    std::vector<tvm::ffi::Any> storages;
    std::list<Sizes>::iterator used;
  };

  Graph Captured(const std::vector<DLTensor>& given, const Kernels& kernels);
  void Forget(const Sizes& sizes);

  tvm::ffi::Module machine_;
  DLDevice device_;
  std::map<Sizes, Graph> graphs_;
  std::list<Sizes> used_;  // of the graphs, the last used one first
  std::set<Sizes> seen_;
};

}  // namespace relaxtune

#endif  // RELAXTUNE_SRC_SIZE_GRAPHS_H_
