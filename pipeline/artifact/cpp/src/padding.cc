#include "padding.h"

#include <algorithm>
#include <cctype>

namespace relaxtune {

using tvm::ffi::Tensor;

namespace {

// Names, integers, + - * // %, unary minus, min(a, b) and parentheses, as `relaxtune.models.dims` reads them.
class Expression {
 public:
  Expression(const std::string& text, const Sizes& sizes) : text_(text), sizes_(sizes) {}

  std::optional<int64_t> Value() {
    int64_t value = Sum();
    Space();
    return known_ && at_ == text_.size() ? std::optional<int64_t>(value) : std::nullopt;
  }

 private:
  void Space() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) ++at_;
  }
  bool Take(const char* sign) {
    Space();
    size_t length = std::char_traits<char>::length(sign);
    if (text_.compare(at_, length, sign) != 0) return false;
    at_ += length;
    return true;
  }
  int64_t Sum() {
    int64_t value = Product();
    while (true) {
      if (Take("+")) value += Product();
      else if (Take("-")) value -= Product();
      else return value;
    }
  }
  int64_t Product() {
    int64_t value = Factor();
    while (true) {
      if (Take("*")) {
        value *= Factor();
      } else if (bool whole = Take("//"); whole || Take("%")) {
        int64_t by = Factor();
        known_ = known_ && by != 0;
        if (!known_) return 0;
        int64_t rest = (value % by + by) % by;  // rounded down, with the divisor's sign
        value = whole ? (value - rest) / by : rest;
      } else {
        return value;
      }
    }
  }
  int64_t Factor() {
    if (Take("-")) return -Factor();
    if (Take("(")) {
      int64_t value = Sum();
      known_ = known_ && Take(")");
      return value;
    }
    if (Take("min(")) {
      int64_t left = Sum();
      known_ = known_ && Take(",");
      int64_t right = Sum();
      known_ = known_ && Take(")");
      return std::min(left, right);
    }
    Space();
    size_t start = at_;
    while (at_ < text_.size() && (std::isalnum(static_cast<unsigned char>(text_[at_])) || text_[at_] == '_' ||
                                  static_cast<unsigned char>(text_[at_]) > 127))
      ++at_;
    std::string word = text_.substr(start, at_ - start);
    if (word.size() < 19 && !word.empty() && word.find_first_not_of("0123456789") == std::string::npos)
      return std::stoll(word);
    auto found = sizes_.find(word);
    known_ = known_ && found != sizes_.end();
    return known_ ? found->second : 0;
  }

  const std::string& text_;
  const Sizes& sizes_;
  size_t at_ = 0;
  bool known_ = true;
};

// Whether padding of an axis, or of an expression over one, goes before.
bool PadsLeft(const std::string& axis, const std::map<std::string, std::string>& sides) {
  std::string word;
  for (size_t at = 0; at <= axis.size(); ++at) {
    bool inside = at < axis.size() && (std::isalnum(static_cast<unsigned char>(axis[at])) || axis[at] == '_');
    if (inside) {
      word += axis[at];
      continue;
    }
    auto side = sides.find(word);
    if (side != sides.end()) return side->second == "left";
    word.clear();
  }
  return false;
}

// Whether a row of a mask hides all its places: such a row is a mean over every place, padding among them.
bool HidesARow(const Manifest& manifest, const std::vector<DLTensor>& inputs) {
  for (const std::string& mask : manifest.masks) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      const DLTensor& tensor = inputs[i];
      if (manifest.main.inputs[i].name != mask || tensor.ndim == 0) continue;
      const int64_t places = tensor.shape[tensor.ndim - 1];
      const size_t width = tensor.dtype.bits / 8;
      const double fill = manifest.fills.at(mask);
      const char* element = Start(tensor);
      const char* end = element + Bytes(tensor);
      while (element < end) {
        bool hides = true;
        for (int64_t place = 0; place < places; ++place, element += width)
          hides = hides && Number(element, tensor.dtype) <= fill;
        if (hides) return true;
      }
    }
  }
  return false;
}

}  // namespace

std::optional<int64_t> SizeOf(const Axis& axis, const Sizes& sizes) {
  if (axis.size >= 0) return axis.size;
  auto found = sizes.find(axis.name);
  return found != sizes.end() ? found->second : Expression(axis.name, sizes).Value();
}

std::optional<Route> ChooseBucket(const Manifest& manifest, const std::vector<DLTensor>& inputs, const Sizes& sizes,
                                  bool may_pad) {
  for (size_t number = 0; number < manifest.buckets.size(); ++number) {
    bool fits = true, padded = false;
    for (const auto& [axis, size] : manifest.buckets[number].sizes) {
      auto given = sizes.find(axis);
      int64_t gap = given == sizes.end() ? -1 : size - given->second;
      padded = padded || gap > 0;
      fits = fits && (gap == 0 || (gap > 0 && may_pad && manifest.sides.count(axis)));
    }
    if (!fits) continue;
    if (padded && HidesARow(manifest, inputs)) return ChooseBucket(manifest, inputs, sizes, false);
    return Route{number, padded};
  }
  return std::nullopt;
}

std::vector<Tensor> Padded(const Manifest& manifest, const std::vector<DLTensor>& inputs, const Sizes& sizes) {
  std::vector<Tensor> padded;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const TensorSpec& spec = manifest.main.inputs[i];
    std::optional<Tensor> made;
    for (int axis = 0; axis < inputs[i].ndim; ++axis) {
      const DLTensor& now = made ? *made->GetDLTensorPtr() : inputs[i];
      auto want = SizeOf(spec.shape[axis], sizes);
      if (!want || *want <= now.shape[axis]) continue;
      // A first axis repeats a row: each row is one that the model could be given.
      std::optional<std::string> fill;
      if (axis > 0) fill = Element(manifest.fills.at(spec.name), now.dtype);
      made = Resized(now, axis, *want, PadsLeft(spec.shape[axis].name, manifest.sides), fill);
    }
    padded.push_back(made ? *made : Copied(inputs[i], {kDLCPU, 0}));
  }
  return padded;
}

Tensor Cut(const Manifest& manifest, size_t output, Tensor tensor, const Sizes& sizes) {
  const TensorSpec& spec = manifest.main.outputs[output];
  for (size_t axis = 0; axis < spec.shape.size(); ++axis) {
    auto want = SizeOf(spec.shape[axis], sizes);
    const DLTensor& now = *tensor.GetDLTensorPtr();
    if (!want || *want >= now.shape[axis]) continue;
    tensor = Resized(now, static_cast<int>(axis), *want, PadsLeft(spec.shape[axis].name, manifest.sides), std::nullopt);
  }
  return tensor;
}

}  // namespace relaxtune
