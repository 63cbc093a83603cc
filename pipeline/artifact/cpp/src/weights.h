// The weights of an artifact, on its device.
#ifndef RELAXTUNE_SRC_WEIGHTS_H_
#define RELAXTUNE_SRC_WEIGHTS_H_

#include <dlpack/dlpack.h>
#include <tvm/ffi/container/tensor.h>

#include <map>
#include <string>

namespace relaxtune {

// Those of a safetensors file, by name; none where there is no such file.
std::map<std::string, tvm::ffi::Tensor> LoadWeights(const std::string& path, DLDevice device);

}  // namespace relaxtune

#endif  // RELAXTUNE_SRC_WEIGHTS_H_
