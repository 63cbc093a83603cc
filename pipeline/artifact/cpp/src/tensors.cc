#include "tensors.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

#include "gpu.h"

namespace relaxtune {

namespace ffi = tvm::ffi;
using ffi::Tensor;

ffi::Function Runtime(const char* name) { return ffi::Function::GetGlobalRequired(std::string("runtime.") + name); }

size_t Bytes(const DLTensor& tensor) {
  int64_t count = std::accumulate(tensor.shape, tensor.shape + tensor.ndim, int64_t{1}, std::multiplies<int64_t>());
  return (count * tensor.dtype.bits * tensor.dtype.lanes + 7) / 8;
}

const char* Start(const DLTensor& tensor) { return static_cast<const char*>(tensor.data) + tensor.byte_offset; }

bool IsCompact(const DLTensor& tensor) {
  if (tensor.strides == nullptr) return true;
  int64_t expected = 1;
  for (int axis = tensor.ndim - 1; axis >= 0; --axis) {
    if (tensor.shape[axis] != 1 && tensor.strides[axis] != expected) return false;
    expected *= tensor.shape[axis];
  }
  return true;
}

bool OnHost(const DLTensor& tensor) {
  return tensor.device.device_type == kDLCPU || tensor.device.device_type == kDLCUDAHost;
}

Tensor Empty(const ffi::Shape& shape, DLDataType dtype, DLDevice device) {
  static const ffi::Function allocate = Runtime("TVMTensorAllocWithScope");
  return allocate(shape, dtype, device, nullptr).cast<Tensor>();
}

void Copy(const DLTensor& from, const Tensor& to) {
  const DLTensor& target = *to.GetDLTensorPtr();
  for (DLDevice device : {from.device, target.device})
    if (device.device_type == kDLCUDA)
      return Gpu::Of(device).Copy(Start(from), const_cast<char*>(Start(target)), Bytes(target));
  static const ffi::Function copy = Runtime("TVMTensorCopyFromTo");
  copy(const_cast<DLTensor*>(&from), to);
}

Tensor Copied(const DLTensor& tensor, DLDevice device) {
  Tensor copy = Empty(ffi::Shape(tensor.shape, tensor.shape + tensor.ndim), tensor.dtype, device);
  Copy(tensor, copy);
  return copy;
}

Tensor Resized(const DLTensor& tensor, int axis, int64_t size, bool left, const std::optional<std::string>& fill) {
  std::vector<int64_t> shape(tensor.shape, tensor.shape + tensor.ndim);
  const int64_t old = shape[axis];
  int64_t outer = 1;
  for (int before = 0; before < axis; ++before) outer *= shape[before];
  const size_t width = tensor.dtype.bits * tensor.dtype.lanes / 8;
  size_t row = width;
  for (int behind = axis + 1; behind < tensor.ndim; ++behind) row *= shape[behind];
  shape[axis] = size;
  Tensor made = Empty(ffi::Shape(shape), tensor.dtype, {kDLCPU, 0});
  const char* from = Start(tensor);
  char* to = static_cast<char*>(made.GetDLTensorPtr()->data);
  for (int64_t block = 0; block < outer; ++block, from += old * row) {
    for (int64_t place = 0; place < size; ++place, to += row) {
      int64_t source = left ? place - (size - old) : place;
      if (fill && (source < 0 || source >= old)) {
        for (size_t byte = 0; byte < row; byte += width) std::memcpy(to + byte, fill->data(), width);
      } else {
        std::memcpy(to, from + std::clamp<int64_t>(source, 0, old - 1) * row, row);
      }
    }
  }
  return made;
}

namespace {

template <typename T>
double Read(const char* element) {
  T value;
  std::memcpy(&value, element, sizeof(T));
  return static_cast<double>(value);
}

template <typename T>
std::string Written(T value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(T));
}

double Half(uint16_t bits) {
  int exponent = bits >> 10 & 31, fraction = bits & 1023;
  double size = exponent == 31  ? (fraction ? NAN : INFINITY)
                : exponent == 0 ? std::ldexp(fraction, -24)
                                : std::ldexp(1024 + fraction, exponent - 25);
  return bits >> 15 ? -size : size;
}

uint16_t ToHalf(double number) {
  uint16_t sign = std::signbit(number) ? 0x8000 : 0;
  // Sizes of halves are in the order of their bits.
  uint16_t low = 0, high = 0x7c00;
  while (low < high) {
    uint16_t middle = (low + high + 1) / 2;
    if (Half(middle) <= std::fabs(number)) low = middle;
    else high = middle - 1;
  }
  return sign | low;
}

}  // namespace

double Number(const char* element, DLDataType dtype) {
  switch (dtype.code << 8 | dtype.bits) {
    case kDLInt << 8 | 64: return Read<int64_t>(element);
    case kDLInt << 8 | 32: return Read<int32_t>(element);
    case kDLInt << 8 | 16: return Read<int16_t>(element);
    case kDLInt << 8 | 8: return Read<int8_t>(element);
    case kDLUInt << 8 | 64: return Read<uint64_t>(element);
    case kDLUInt << 8 | 32: return Read<uint32_t>(element);
    case kDLUInt << 8 | 16: return Read<uint16_t>(element);
    case kDLUInt << 8 | 8:
    case kDLBool << 8 | 8: return Read<uint8_t>(element);
    case kDLFloat << 8 | 64: return Read<double>(element);
    case kDLFloat << 8 | 32: return Read<float>(element);
    case kDLFloat << 8 | 16: return Half(static_cast<uint16_t>(Read<uint16_t>(element)));
    case kDLBfloat << 8 | 16: return Read<float>((std::string(2, '\0') + std::string(element, 2)).data());
    default: return NAN;
  }
}

std::string Element(double number, DLDataType dtype) {
  if (dtype.code == kDLBfloat) return Written(static_cast<float>(number)).substr(2);
  if (dtype.code == kDLFloat && dtype.bits == 16) return Written(ToHalf(number));
  if (dtype.code == kDLFloat && dtype.bits == 32) return Written(static_cast<float>(number));
  if (dtype.code == kDLFloat) return Written(number);
  return Written(static_cast<int64_t>(number)).substr(0, dtype.bits / 8);
}

}  // namespace relaxtune
