// kept DIR: an artifact of one float32 input [n, 32] and its outputs live until the process's destructors.
#include <relaxtune/artifact.h>

#include <cstdio>

extern "C" void print_crashes();

namespace {
std::unique_ptr<relaxtune::Artifact> artifact;
std::vector<relaxtune::Output> outputs;
}  // namespace

int main(int, char** words) {
  print_crashes();
  try {
    artifact = std::make_unique<relaxtune::Artifact>(relaxtune::Artifact::Load(words[1]));
    std::vector<float> x(4 * 32);
    int64_t shape[2] = {4, 32};
    DLTensor tensor{x.data(), {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape, nullptr, 0};
    for (int call = 0; call < 3; ++call) outputs = artifact->Run({tensor});
  } catch (const relaxtune::Error& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
