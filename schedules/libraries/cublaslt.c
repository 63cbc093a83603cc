// The matmul of schedules/libraries/cublaslt.py: one call of cuBLASLt on the stream that TVM uses now.
//
// cuBLASLt is opened when the first matmul runs, so a module that holds this code loads where the library is missing.
// The declarations are those of cublasLt.h of CUDA 13; the numbers of its enumerations are part of its ABI.

#include <pthread.h>
#include <tvm/ffi/extra/c_env_api.h>

#include "open_library.h"

static const char *const LIBRARY = "libcublasLt.so.13";
static const char *const PATH_VARIABLE = "RELAXTUNE_CUBLASLT";

// What relaxtune_cublaslt_matmul answers; schedules/libraries/cublaslt.py has a message for each.
enum { DONE = 0, NO_LIBRARY = 1, NO_ALGORITHM = 2, FAILED = 3 };

enum { COMPUTE_FLOAT32 = 68, TYPE_FLOAT32 = 0, TYPE_FLOAT16 = 2, TYPE_BFLOAT16 = 14, TRANSPOSED = 1 };
enum { EPILOGUE_BIAS = 4, EPILOGUE_GELU = 32 };  // bits, added up
enum { DESC_TRANS_A = 3, DESC_EPILOGUE = 7, DESC_BIAS_POINTER = 8, DESC_BIAS_TYPE = 26 };
enum { PREFER_WORKSPACE = 1, PREFER_ALIGNMENT = 5 };  // alignment of A; those of B, C and D follow
enum { ALGORITHMS = 16, WORKSPACE_BYTES = 32 << 20 };

typedef struct {
  uint64_t data[8];
} Algorithm;

typedef struct {
  Algorithm algorithm;
  size_t workspace;
  int status;
  float waves;
  int reserved[4];
} Heuristic;

static struct {
  int (*create)(void **);
  int (*desc_create)(void **, int, int);
  int (*desc_set)(void *, int, const void *, size_t);
  int (*layout_create)(void **, int, uint64_t, uint64_t, int64_t);
  int (*preference_create)(void **);
  int (*preference_set)(void *, int, const void *, size_t);
  int (*preference_destroy)(void *);
  int (*heuristic)(void *, void *, void *, void *, void *, void *, void *, int, Heuristic *, int *);
  int (*matmul)(void *, void *, const void *, const void *, void *, const void *, void *, const void *, const void *,
                void *, void *, void *, const Algorithm *, void *, size_t, void *);
  int (*context_device)(int *);
  int (*allocate)(uint64_t *, size_t);
} api;

// What tells one matmul from another; compared as bytes, so made by memset.
typedef struct {
  int64_t m, n, k;
  int device, transposed, input, output, gelu, algorithm;
  uint32_t alignment[5];  // of b, a, residual, out, bias; 0 for what is absent
} Key;

// What is made once for a key, and never freed.
typedef struct Made {
  Key key;
  void *desc, *a, *b, *c;
  size_t workspace_used;
  Algorithm algorithm;
  int answer;
  struct Made *next;
} Made;

static Made *all_made;
static Device *devices;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int load(void) {
  static int state = -1;
  if (state >= 0) return state;
  void *library = open_library(LIBRARY, PATH_VARIABLE), *driver = open_driver();
  const Symbol symbols[] = {
      {library, "cublasLtCreate", &api.create},
      {library, "cublasLtMatmulDescCreate", &api.desc_create},
      {library, "cublasLtMatmulDescSetAttribute", &api.desc_set},
      {library, "cublasLtMatrixLayoutCreate", &api.layout_create},
      {library, "cublasLtMatmulPreferenceCreate", &api.preference_create},
      {library, "cublasLtMatmulPreferenceSetAttribute", &api.preference_set},
      {library, "cublasLtMatmulPreferenceDestroy", &api.preference_destroy},
      {library, "cublasLtMatmulAlgoGetHeuristic", &api.heuristic},
      {library, "cublasLtMatmul", &api.matmul},
      {driver, "cuCtxGetDevice", &api.context_device},
      {driver, "cuMemAlloc_v2", &api.allocate},
  };
  return state = take_symbols(symbols, sizeof symbols / sizeof *symbols);
}

static uint32_t alignment_of(const void *pointer) {
  if (pointer == NULL) return 0;
  uint32_t bytes = 256;
  while ((uintptr_t)pointer % bytes != 0) bytes /= 2;
  return bytes;
}

static int type_of(int code) { return code == 0 ? TYPE_FLOAT16 : code == 1 ? TYPE_BFLOAT16 : TYPE_FLOAT32; }

// cuBLASLt counts by columns: row-major C[m, n] is its C'[n, m], so its first factor is our B and its second our A.
static int prepare(Made *made, Device *device, void *bias) {
  const Key *key = &made->key;
  const int input = type_of(key->input), output = type_of(key->output), transposed = key->transposed ? TRANSPOSED : 0;
  const uint64_t rows = transposed ? key->k : key->n, columns = transposed ? key->n : key->k;
  if (api.desc_create(&made->desc, COMPUTE_FLOAT32, TYPE_FLOAT32) != 0 ||
      api.desc_set(made->desc, DESC_TRANS_A, &transposed, sizeof transposed) != 0 ||
      api.layout_create(&made->a, input, rows, columns, rows) != 0 ||
      api.layout_create(&made->b, input, key->k, key->m, key->k) != 0 ||
      api.layout_create(&made->c, output, key->n, key->m, key->n) != 0) {
    return FAILED;
  }
  const int epilogue = (bias != NULL ? EPILOGUE_BIAS : 0) + (key->gelu ? EPILOGUE_GELU : 0);
  if (epilogue != 0 && api.desc_set(made->desc, DESC_EPILOGUE, &epilogue, sizeof epilogue) != 0) return FAILED;
  if (bias != NULL && (api.desc_set(made->desc, DESC_BIAS_TYPE, &output, sizeof output) != 0 ||
                       api.desc_set(made->desc, DESC_BIAS_POINTER, &bias, sizeof bias) != 0)) {
    return FAILED;
  }
  void *preference = NULL;
  if (api.preference_create(&preference) != 0) return FAILED;
  const size_t workspace = WORKSPACE_BYTES;
  int status = api.preference_set(preference, PREFER_WORKSPACE, &workspace, sizeof workspace);
  for (int i = 0; i < 4 && status == 0; ++i) {
    // Without a residual, C is D.
    const uint32_t *bytes = &key->alignment[i == 2 && key->alignment[2] == 0 ? 3 : i];
    status = api.preference_set(preference, PREFER_ALIGNMENT + i, bytes, sizeof *bytes);
  }
  Heuristic found[ALGORITHMS];
  int count = 0;
  if (status == 0) {
    api.heuristic(device->handle, made->desc, made->a, made->b, made->c, made->c, preference, ALGORITHMS, found,
                  &count);
  }
  api.preference_destroy(preference);
  if (status != 0) return FAILED;
  if (key->algorithm >= count || found[key->algorithm].status != 0) return NO_ALGORITHM;
  made->algorithm = found[key->algorithm].algorithm;
  made->workspace_used = found[key->algorithm].workspace;
  if (made->workspace_used > 0 && device->workspace == 0) {
    return api.allocate(&device->workspace, WORKSPACE_BYTES) == 0 ? DONE : FAILED;
  }
  return DONE;
}

static Made *made_for(const Key *key, Device *device, void *bias) {
  for (Made *made = all_made; made != NULL; made = made->next) {
    if (memcmp(&made->key, key, sizeof *key) == 0) return made;
  }
  Made *made = calloc(1, sizeof *made);
  if (made == NULL) return NULL;
  made->key = *key;
  made->answer = prepare(made, device, bias);
  made->next = all_made;
  return all_made = made;
}

static int run(const Key *key, void *a, void *b, void *bias, void *residual, void *out) {
  Device *device = device_of(&devices, key->device, api.create);
  Made *made = device != NULL ? made_for(key, device, bias) : NULL;
  if (made == NULL) return FAILED;
  if (made->answer != DONE) return made->answer;
  if (bias != NULL && api.desc_set(made->desc, DESC_BIAS_POINTER, &bias, sizeof bias) != 0) return FAILED;
  const float one = 1.0f, factor = residual != NULL ? 1.0f : 0.0f;
  void *stream = TVMFFIEnvGetStream(DEVICE_CUDA, key->device);
  const int status = api.matmul(device->handle, made->desc, &one, b, made->a, a, made->b, &factor,
                                residual != NULL ? residual : out, made->c, out, made->c, &made->algorithm,
                                (void *)(uintptr_t)device->workspace, made->workspace_used, stream);
  return status == 0 ? DONE : FAILED;
}

// out[m, n] = gelu?(a[m, k] @ b (+ bias[n]) (+ residual[m, n])); b is [k, n], or [n, k] when transposed. bias and
// residual may be null and have out's dtype. Dtypes: 0 float16, 1 bfloat16, 2 float32 (output only). gelu: 0, or 1 for
// its tanh form. algorithm: place in the list that cuBLASLt's heuristic returns.
int relaxtune_cublaslt_matmul(void *a, void *b, void *bias, void *residual, void *out, int64_t m, int64_t n, int64_t k,
                              int transposed, int input, int output, int gelu, int algorithm) {
  Key key;
  memset(&key, 0, sizeof key);
  key.m = m;
  key.n = n;
  key.k = k;
  key.transposed = transposed;
  key.input = input;
  key.output = output;
  key.gelu = gelu;
  key.algorithm = algorithm;
  const void *const pointers[] = {b, a, residual, out, bias};
  for (int i = 0; i < 5; ++i) key.alignment[i] = alignment_of(pointers[i]);
  pthread_mutex_lock(&lock);
  int answer = NO_LIBRARY;
  if (load()) answer = api.context_device(&key.device) == 0 ? run(&key, a, b, bias, residual, out) : FAILED;
  pthread_mutex_unlock(&lock);
  return answer;
}
