// Tensors of TVM's runtime, and copies of them.
#ifndef RELAXTUNE_SRC_TENSORS_H_
#define RELAXTUNE_SRC_TENSORS_H_

#include <dlpack/dlpack.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include <optional>
#include <string>

namespace relaxtune {

// A function of TVM's runtime. By its name, since the wheel lacks headers that the runtime's own headers include.
tvm::ffi::Function Runtime(const char* name);

size_t Bytes(const DLTensor& tensor);
const char* Start(const DLTensor& tensor);
bool IsCompact(const DLTensor& tensor);
bool OnHost(const DLTensor& tensor);

tvm::ffi::Tensor Empty(const tvm::ffi::Shape& shape, DLDataType dtype, DLDevice device);
// Copies of compact tensors. Where one is on a GPU, the copy goes to its current stream.
void Copy(const DLTensor& from, const tvm::ffi::Tensor& to);
tvm::ffi::Tensor Copied(const DLTensor& tensor, DLDevice device);

// A compact tensor of the host with another size along one axis: cut, or padded, on its left or its right side. What is
// added holds `fill`, the bytes of one element; without it the nearest place is repeated.
tvm::ffi::Tensor Resized(const DLTensor& tensor, int axis, int64_t size, bool left, const std::optional<std::string>& fill);

// An element of the host's memory as a number, and a number as an element's bytes.
double Number(const char* element, DLDataType dtype);
std::string Element(double number, DLDataType dtype);

}  // namespace relaxtune

#endif  // RELAXTUNE_SRC_TENSORS_H_
