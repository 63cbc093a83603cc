// program DIR X Y ROWS: run an artifact of one float32 input [ROWS, 32] on the bytes of file X, and write its first output
// to Y. Before, a wrong dtype and a wrong shape have to be refused, with what, where and the fix.
#include <relaxtune/artifact.h>

#include <cstdio>
#include <fstream>
#include <iterator>

extern "C" void print_crashes();

int main(int, char** words) {
  print_crashes();
  try {
    auto artifact = relaxtune::Artifact::Load(words[1]);
    std::ifstream file(words[2], std::ios::binary);
    std::vector<char> x((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    int64_t shape[2] = {std::stoi(words[4]), 32}, wrong_shape[2] = {shape[0], 31};
    DLTensor tensor{x.data(), {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape, nullptr, 0};
    DLTensor wrong_dtype = tensor, wrong_size = tensor;
    wrong_dtype.dtype.bits = 16, wrong_size.shape = wrong_shape;
    for (const DLTensor& wrong : {wrong_dtype, wrong_size}) {
      try {
        artifact.Run({wrong});
        return 3;
      } catch (const relaxtune::Error& e) {
        std::printf("%s|%s|%s\n", e.problem.c_str(), e.where.c_str(), e.fix.c_str());
      }
    }
    auto moved = std::move(artifact);
    moved.Run({tensor});
    auto outputs = moved.Run({tensor});
    const DLTensor& again = outputs.front()->dl_tensor;
    int64_t bytes = again.dtype.bits / 8;
    for (int axis = 0; axis < again.ndim; ++axis) bytes *= again.shape[axis];
    std::ofstream(words[3], std::ios::binary).write(static_cast<const char*>(again.data), bytes);
  } catch (const relaxtune::Error& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
