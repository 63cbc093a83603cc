// What is read of an artifact's files: its code, and its weights for a device.
#ifndef RELAXTUNE_SRC_LOADING_H_
#define RELAXTUNE_SRC_LOADING_H_

#include <dlpack/dlpack.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/module.h>

#include <map>
#include <string>

namespace relaxtune {

// The code of a shared object, as the file is now.
tvm::ffi::Module LoadCode(const std::string& path);

// The weights of a safetensors file, by name; none where there is no such file.
std::map<std::string, tvm::ffi::Tensor> LoadWeights(const std::string& path, DLDevice device);

}  // namespace relaxtune

#endif  // RELAXTUNE_SRC_LOADING_H_
