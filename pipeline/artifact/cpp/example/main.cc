// Run an artifact on zeros, and print its outputs and the median latency: relaxtune_example DIR [RUNS]
#include <relaxtune/artifact.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

namespace {

using Clock = std::chrono::steady_clock;

double Milliseconds(Clock::time_point since) {
  return std::chrono::duration<double, std::milli>(Clock::now() - since).count();
}

// What one thinks that a symbolic axis of the example has.
constexpr int64_t kSymbolicSize = 16;

struct Input {
  std::vector<int64_t> shape;
  std::unique_ptr<void, decltype(&std::free)> data{nullptr, &std::free};
  DLTensor tensor;
};

Input Zeros(const relaxtune::TensorSpec& spec) {
  Input input;
  int64_t bytes = 8;
  for (const relaxtune::Axis& axis : spec.shape) {
    input.shape.push_back(axis.size < 0 ? kSymbolicSize : axis.size);
    bytes *= input.shape.back();
  }
  bytes = (bytes + 63) / 64 * 64 + 64;
  input.data.reset(std::aligned_alloc(64, bytes));
  std::memset(input.data.get(), 0, bytes);
  uint8_t code = spec.dtype.rfind("int", 0) == 0 ? kDLInt : spec.dtype == "bool" ? kDLBool : kDLFloat;
  if (spec.dtype == "bfloat16") code = kDLBfloat;
  auto digits = spec.dtype.find_first_of("0123456789");
  uint8_t bits = digits == std::string::npos ? 8 : static_cast<uint8_t>(std::stoi(spec.dtype.substr(digits)));
  input.tensor = {input.data.get(), {kDLCPU, 0}, static_cast<int32_t>(spec.shape.size()), {code, bits, 1}, nullptr,
                  nullptr, 0};
  return input;
}

int64_t ResidentKilobytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.rfind("VmHWM:", 0) == 0) return std::stoll(line.substr(6));
  return 0;
}

}  // namespace

int main(int count, char** words) {
  if (count < 2) return std::fprintf(stderr, "usage: %s DIR [RUNS]\n", words[0]), 2;
  int runs = count > 2 ? std::stoi(words[2]) : 20;
  try {
    auto started = Clock::now();
    relaxtune::Options options;
    options.host_outputs = true;  // a run ends when its outputs are here
    auto artifact = relaxtune::Artifact::Load(words[1], options);
    double loaded_ms = Milliseconds(started);
    std::vector<Input> inputs;
    for (const auto& spec : artifact.inputs()) inputs.push_back(Zeros(spec));
    std::vector<DLTensor> tensors;
    for (Input& input : inputs) {
      input.tensor.shape = input.shape.data();
      tensors.push_back(input.tensor);
    }
    auto outputs = artifact.Run(tensors);
    double first_ms = Milliseconds(started);
    std::vector<double> latencies;
    for (int run = 0; run < runs; ++run) {
      auto begun = Clock::now();
      outputs = artifact.Run(tensors);
      latencies.push_back(Milliseconds(begun));
    }
    std::sort(latencies.begin(), latencies.end());
    for (size_t number = 0; number < outputs.size(); ++number) {
      const DLTensor& tensor = outputs[number]->dl_tensor;
      std::printf("%s:", artifact.outputs()[number].name.c_str());
      for (int axis = 0; axis < tensor.ndim; ++axis) std::printf(" %ld", static_cast<long>(tensor.shape[axis]));
      std::printf("\n");
    }
    std::printf("load_ms %.3f first_ms %.3f median_ms %.4f peak_kb %ld\n", loaded_ms, first_ms,
                latencies.empty() ? 0.0 : latencies[latencies.size() / 2], static_cast<long>(ResidentKilobytes()));
  } catch (const relaxtune::Error& e) {
    return std::fprintf(stderr, "%s\n", e.what()), 1;
  }
  return 0;
}
