#include "token_list.h"

#include <tvm/ffi/extra/c_env_api.h>

#include <algorithm>

#include "tensors.h"

namespace relaxtune {

using tvm::ffi::Shape;
using tvm::ffi::Tensor;

namespace {

// Shapes of masks whose lists keep their memory at a time.
constexpr size_t kShapesMax = 64;
constexpr DLDataType kInt32{kDLInt, 32, 1};

// The first rows of a list, where it lies, with a shape of its own.
struct View {
  std::vector<int64_t> shape;
  DLManagedTensor managed;
};

Tensor First(const Tensor& list, int64_t size) {
  const DLTensor& whole = *list.GetDLTensorPtr();
  auto* view = new View{{whole.shape, whole.shape + whole.ndim}, {whole, nullptr, nullptr}};
  view->shape.front() = size;
  view->managed.dl_tensor.shape = view->shape.data();
  view->managed.dl_tensor.strides = nullptr;
  view->managed.manager_ctx = view;
  view->managed.deleter = [](DLManagedTensor* self) { delete static_cast<View*>(self->manager_ctx); };
  return Tensor::FromDLPack(&view->managed);
}

}  // namespace

std::vector<Tensor> TokenList::Of(const Tensor& mask, const std::function<void(const Tensor&, const Lists&)>& list) {
  const DLTensor& seen = *mask.GetDLTensorPtr();
  std::vector<int64_t> shape(seen.shape, seen.shape + seen.ndim);
  int64_t places = 1;
  for (int64_t size : shape) places *= size;
  if (held_.size() >= kShapesMax && !held_.count(shape)) held_.clear();
  auto found = held_.find(shape);
  if (found == held_.end()) {
    auto make = [&](const Shape& one) { return Empty(one, kInt32, device_); };
    found = held_.emplace(shape, Lists{make({places}), make({places, 2}), make(Shape(shape)), make({1})}).first;
  }
  const Lists& lists = found->second;
  list(mask, lists);
  Tensor count = Copied(*lists[3].GetDLTensorPtr(), {kDLCPU, 0});
  if (device_.device_type != kDLCPU) {
    void* stream = TVMFFIEnvGetStream(device_.device_type, device_.device_id);
    Runtime("Device_StreamSync")(device_, reinterpret_cast<int64_t>(stream));
  }
  int64_t tokens = std::max<int64_t>(*static_cast<const int32_t*>(count.GetDLTensorPtr()->data), 1);
  int64_t size = std::min((tokens + unpadding_.multiple - 1) / unpadding_.multiple * unpadding_.multiple, places);
  return {First(lists[0], size), First(lists[1], size), lists[2]};
}

}  // namespace relaxtune
