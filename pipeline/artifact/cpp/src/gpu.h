// What is needed of CUDA's driver: TVM's runtime loads it, and no header of CUDA is needed to build.
#ifndef RELAXTUNE_SRC_GPU_H_
#define RELAXTUNE_SRC_GPU_H_

#include <dlpack/dlpack.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>

namespace relaxtune {

// What calls work in, and the stream that the last of them went to.
struct Memory {
  std::optional<int64_t> last;
};

// One GPU of this process. As in Python (pipeline/artifact/gpu/turns.py): calls take turns; a call on another stream than
// the last one in the same memory waits for the whole GPU. That memory is an artifact's own, or TVM's pool, from which
// calls take memory unless they launch a CUDA graph.
class Gpu {
 public:
  static Gpu& Of(DLDevice device);
  // Whether the process ends. The driver may have ended too, and TVM's destructors, which call it, throw: so what is still
  // held is left to the system.
  static bool ProcessEnds();
  // Clear this thread's last error of CUDA's runtime: TVM's failed calls leave it, and others read it after their next
  // launch.
  static void ForgetError();

  std::recursive_mutex turn;
  Memory pool;

  void MakeCurrent();
  // Refuse a current stream that the caller captures: CUDA launches no graph there. Its capture goes on.
  void RefuseCapture();
  // Wait until all that any stream was given is done, also streams that were destroyed since.
  void Wait();
  // Wait if the last call in this memory went to another stream than the current one.
  void Follow(Memory& memory);

  // The current stream of this thread, and another one for the time of a scope.
  void* Stream() const;
  class OnStream {
   public:
    OnStream(DLDevice device, void* stream);
    ~OnStream();
    OnStream(const OnStream&) = delete;

   private:
    DLDevice device_;
    void* before_ = nullptr;
  };

  // Copy between addresses of the host or the device, after what the current stream was given before: TVM copies on the
  // default stream, for which others do not wait.
  void Copy(const void* from, void* to, size_t bytes);

  // What `work` gives the current stream, as an executable graph; null where the driver makes none. Nothing runs.
  template <typename F>
  void* Captured(F&& work) {
    void* stream = BeginCapture();
    try {
      OnStream on(device_, stream);
      work();
    } catch (...) {
      if (void* made = EndCapture(stream)) Destroy(made);
      throw;
    }
    return EndCapture(stream);
  }
  void Launch(void* graph);
  void Destroy(void* graph);

 private:
  explicit Gpu(DLDevice device);
  void* BeginCapture();
  void* EndCapture(void* stream);

  DLDevice device_;
  void* context_ = nullptr;
};

}  // namespace relaxtune

#endif  // RELAXTUNE_SRC_GPU_H_
