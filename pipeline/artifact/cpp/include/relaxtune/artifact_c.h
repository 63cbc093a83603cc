/* The C form of artifact.h. Functions return 0, or 1 with a message from relaxtune_last_error of the same thread. */
#ifndef RELAXTUNE_ARTIFACT_C_H_
#define RELAXTUNE_ARTIFACT_C_H_

#include <dlpack/dlpack.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define RELAXTUNE_C_API __attribute__((visibility("default")))

typedef struct relaxtune_artifact relaxtune_artifact;

typedef struct {
  int32_t verify;       /* not 0: each file's sha256 is checked first */
  int32_t device;       /* which device of the artifact's kind */
  int32_t threads;      /* 0: TVM_NUM_THREADS, else one for each core, within the CPU quota */
  int32_t host_outputs; /* not 0: outputs come to the host, and a run waits for them */
  int32_t size_graphs;  /* not 0: symbolic sizes run as CUDA graphs, with memory for the inputs of each */
} relaxtune_options;

/* `options` may be NULL: verified, the first device, all cores, outputs on the device,
   no graphs of symbolic sizes. */
RELAXTUNE_C_API int relaxtune_load(const char* directory, const relaxtune_options* options, relaxtune_artifact** out);
RELAXTUNE_C_API void relaxtune_free(relaxtune_artifact* artifact);
RELAXTUNE_C_API const char* relaxtune_last_error(void);

RELAXTUNE_C_API size_t relaxtune_input_count(const relaxtune_artifact* artifact);
RELAXTUNE_C_API size_t relaxtune_output_count(const relaxtune_artifact* artifact);
/* NULL where there is none of this number; the text lives as long as the artifact. */
RELAXTUNE_C_API const char* relaxtune_input_name(const relaxtune_artifact* artifact, size_t number);
RELAXTUNE_C_API const char* relaxtune_output_name(const relaxtune_artifact* artifact, size_t number);

/* Run once. `outputs` has room for relaxtune_output_count tensors; the caller calls the deleter of each. */
RELAXTUNE_C_API int relaxtune_run(relaxtune_artifact* artifact, const DLTensor* inputs, size_t count, void* stream,
                                  DLManagedTensorVersioned** outputs);

#ifdef __cplusplus
}
#endif

#endif /* RELAXTUNE_ARTIFACT_C_H_ */
