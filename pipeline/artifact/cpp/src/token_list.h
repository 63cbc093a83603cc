// Where the tokens of a call are, for an artifact that leaves padding out (--unpad).
#ifndef RELAXTUNE_SRC_TOKEN_LIST_H_
#define RELAXTUNE_SRC_TOKEN_LIST_H_

#include <tvm/ffi/container/tensor.h>

#include <array>
#include <functional>
#include <map>
#include <vector>

#include "manifest.h"

namespace relaxtune {

// Lists the tokens of a mask on the device; how many there are is read from there, four bytes a call.
class TokenList {
 public:
  using Lists = std::array<tvm::ffi::Tensor, 4>;  // rows, spans, slots, count

  TokenList(const Unpadding& unpadding, DLDevice device) : unpadding_(unpadding), device_(device) {}

  // Which input the mask is.
  size_t mask() const { return unpadding_.mask; }

  // The last inputs of `main` for a mask; `list` is the artifact's function that fills the lists. They are written again
  // by the next call.
  std::vector<tvm::ffi::Tensor> Of(const tvm::ffi::Tensor& mask,
                                   const std::function<void(const tvm::ffi::Tensor&, const Lists&)>& list);

 private:
  Unpadding unpadding_;
  DLDevice device_;
  std::map<std::vector<int64_t>, Lists> held_;
};

}  // namespace relaxtune

#endif  // RELAXTUNE_SRC_TOKEN_LIST_H_
