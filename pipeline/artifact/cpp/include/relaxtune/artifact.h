// Load an artifact and run it, without Python: needs TVM's runtime (libtvm_runtime, libtvm_ffi) and nothing else.
//
//   auto artifact = relaxtune::Artifact::Load("out/bert");
//   std::vector<DLTensor> inputs = ...;                        // on the host or on the device, in the model's order
//   std::vector<relaxtune::Output> outputs = artifact.Run(inputs);
//
// Loading runs the artifact's code: load only what you trust.
#ifndef RELAXTUNE_ARTIFACT_H_
#define RELAXTUNE_ARTIFACT_H_

#include <dlpack/dlpack.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#define RELAXTUNE_API __attribute__((visibility("default")))

namespace relaxtune {

// What went wrong, where (a file, an input), and what to do about it; `what()` is all three.
class RELAXTUNE_API Error : public std::runtime_error {
 public:
  Error(std::string problem, std::string where, std::string fix)
      : std::runtime_error(where + ": " + problem + (fix.empty() ? "" : "; " + fix)),
        problem(std::move(problem)),
        where(std::move(where)),
        fix(std::move(fix)) {}

  const std::string problem, where, fix;
};

// One axis: its size, or -1 and the name of a symbolic axis ("sequence", or a sum such as "past + sequence").
struct Axis {
  int64_t size;
  std::string name;
};

struct TensorSpec {
  std::string name;
  std::string dtype;  // as in NumPy: "float32", "int64", "bool", "bfloat16"
  std::vector<Axis> shape;
};

struct Options {
  // Whether each file's sha256 is checked first; the manifest's always is.
  bool verify = true;
  // Which device of the artifact's kind.
  int device = 0;
  // CPU threads; 0 takes TVM_NUM_THREADS of the environment, else one for each core that the process may use, within its CPU quota.
  int threads = 0;
  // Whether outputs come to the host; a run then waits for them. No difference on a CPU.
  bool host_outputs = false;
  // Whether calls with symbolic sizes run as a CUDA graph from the second call of the same sizes on: less time of the host
  // for each call, and device memory for the inputs of each of up to 32 graphs. No difference where all sizes are known.
  bool size_graphs = false;
};

struct OutputDeleter {
  void operator()(DLManagedTensorVersioned* tensor) const { tensor->deleter(tensor); }
};
// An output, on the artifact's device unless asked for on the host. Where the artifact runs as a CUDA graph, the next run writes it again.
using Output = std::unique_ptr<DLManagedTensorVersioned, OutputDeleter>;

// A loaded artifact. Threads may call one; calls take turns. A process that is forked while none calls may go on with one that
// is for a CPU. What still lives when the process ends (in a static variable),
// outputs too, makes no call to CUDA then: the system takes the device's memory back.
class RELAXTUNE_API Artifact {
 public:
  static Artifact Load(const std::string& directory, const Options& options = {});
  Artifact(Artifact&&) noexcept;
  Artifact& operator=(Artifact&&) noexcept;
  ~Artifact();

  const std::string& model() const;
  const std::vector<TensorSpec>& inputs() const;
  const std::vector<TensorSpec>& outputs() const;
  DLDevice device() const;

  // Run once. Inputs come in the model's order. One that is on the device, compact and aligned to 64 bytes is read where
  // it lies; any other is copied. On CUDA everything is put on `stream`; artifacts on streams of their own run at once, and
  // one that goes to another stream than in its last call waits for the GPU first. A call goes to the smallest shape bucket
  // that it fits: at exactly its sizes, or padded and cut back where the manifest allows that, the inputs are on the host,
  // and the outputs come there. Any other call runs with symbolic sizes.
  std::vector<Output> Run(const std::vector<DLTensor>& inputs, void* stream = nullptr);

 private:
  struct State;
  explicit Artifact(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace relaxtune

#endif  // RELAXTUNE_ARTIFACT_H_
