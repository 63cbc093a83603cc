// Which shape bucket a call goes to, how its inputs are padded up to it, and how its outputs are cut back.
#ifndef RELAXTUNE_SRC_PADDING_H_
#define RELAXTUNE_SRC_PADDING_H_

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "manifest.h"
#include "tensors.h"

namespace relaxtune {

using Sizes = std::map<std::string, int64_t>;

struct Route {
  size_t bucket;
  bool padded;
};

// The bucket with the least work that a call fits, as the Python runtime chooses it; none where it runs with symbolic
// sizes. With `may_pad` only where `inputs` can be read here.
std::optional<Route> ChooseBucket(const Manifest& manifest, const std::vector<DLTensor>& inputs, const Sizes& sizes,
                                  bool may_pad);

// The inputs of the host, as large as a bucket takes them.
std::vector<tvm::ffi::Tensor> Padded(const Manifest& manifest, const std::vector<DLTensor>& inputs, const Sizes& sizes);

// An output of the host without what padding added.
tvm::ffi::Tensor Cut(const Manifest& manifest, size_t output, tvm::ffi::Tensor tensor, const Sizes& sizes);

// The size of an axis, which may be an expression ("past + sequence"); none where the sizes do not decide it.
std::optional<int64_t> SizeOf(const Axis& axis, const Sizes& sizes);

}  // namespace relaxtune

#endif  // RELAXTUNE_SRC_PADDING_H_
