// cuDNN's backend API, opened at its first use. The declarations are those of cudnn_graph.h of cuDNN 9; the numbers of
// its enumerations are part of its ABI.
#ifndef RELAXTUNE_CUDNN_API_H_
#define RELAXTUNE_CUDNN_API_H_

#include "open_library.h"

static const char *const LIBRARY = "libcudnn.so.9";
static const char *const PATH_VARIABLE = "RELAXTUNE_CUDNN";

enum { FLOAT32 = 0, FLOAT16 = 2, INT32 = 4, BFLOAT16 = 9, BOOLEAN = 11 };
enum { ADD = 0, MULTIPLY = 1, LARGER = 3, DIVIDE = 6, SUBTRACT = 9, EXP = 13, LOG = 15 };
enum { GREATER = 302, GREATER_OR_EQUAL = 303, POSITION = 501, SELECT = 601 };
enum { REDUCE_ADD = 0, REDUCE_MAX = 3 };
enum { OF_HANDLE = 0, OF_DATA_TYPE = 1, OF_BOOLEAN = 2, OF_INT64 = 3, OF_POINTER = 6 };
enum { OF_HEURISTIC = 8, OF_POINTWISE = 14, OF_DESCRIPTOR = 15, OF_REDUCTION = 18 };
enum { ENGINE_CONFIG = 3, HEURISTIC = 4, PLAN = 5, OPERATION_GRAPH = 15, VARIANT_PACK = 16, TENSOR = 17 };
enum { POINTWISE = 0, OPERATION_POINTWISE = 13, MATMUL = 18, OPERATION_MATMUL = 19 };
enum { REDUCTION = 21, OPERATION_REDUCTION = 22 };
enum { POINTWISE_MODE = 0, POINTWISE_PRECISION = 1, POINTWISE_AXIS = 9 };
enum { HEURISTIC_MODE = 200, HEURISTIC_GRAPH = 201, HEURISTIC_RESULTS = 202 };
enum { PLAN_HANDLE = 400, PLAN_CONFIG = 401, PLAN_WORKSPACE = 402 };
enum { POINTWISE_DESC = 750, POINTWISE_X = 751, POINTWISE_B = 752, POINTWISE_Y = 753, POINTWISE_T = 758 };
enum { GRAPH_HANDLE = 800, GRAPH_OPERATIONS = 801 };
enum { TENSOR_ALIGNMENT = 900, TENSOR_TYPE = 901, TENSOR_SIZES = 902, TENSOR_STRIDES = 903 };
enum { TENSOR_ID = 906, TENSOR_VIRTUAL = 907, TENSOR_BY_VALUE = 908 };
enum { PACK_IDS = 1000, PACK_POINTERS = 1001, PACK_WORKSPACE = 1003 };
enum { MATMUL_PRECISION = 1500, MATMUL_A = 1520, MATMUL_B = 1521, MATMUL_C = 1522, MATMUL_DESC = 1523 };
enum { REDUCTION_OPERATOR = 1600, REDUCTION_PRECISION = 1601 };
enum { REDUCTION_X = 1610, REDUCTION_Y = 1611, REDUCTION_DESC = 1612 };

enum { HEURISTIC_MODE_A = 3, OLDEST = 91002 };

typedef void *Descriptor;

static struct {
  size_t (*version)(void);
  int (*create)(void **);
  int (*set_stream)(void *, void *);
  int (*descriptor)(int, Descriptor *);
  int (*destroy)(Descriptor);
  int (*finalize)(Descriptor);
  int (*set)(Descriptor, int, int, int64_t, const void *);
  int (*get)(Descriptor, int, int, int64_t, int64_t *, void *);
  int (*execute)(void *, Descriptor, Descriptor);
  int (*context_device)(int *);
  int (*allocate)(uint64_t *, size_t);
} api;

static int load(void) {
  static int state = -1;
  if (state >= 0) return state;
  void *library = open_library(LIBRARY, PATH_VARIABLE), *driver = open_driver();
  const Symbol symbols[] = {
      {library, "cudnnGetVersion", &api.version},
      {library, "cudnnCreate", &api.create},
      {library, "cudnnSetStream", &api.set_stream},
      {library, "cudnnBackendCreateDescriptor", &api.descriptor},
      {library, "cudnnBackendDestroyDescriptor", &api.destroy},
      {library, "cudnnBackendFinalize", &api.finalize},
      {library, "cudnnBackendSetAttribute", &api.set},
      {library, "cudnnBackendGetAttribute", &api.get},
      {library, "cudnnBackendExecute", &api.execute},
      {driver, "cuCtxGetDevice", &api.context_device},
      {driver, "cuMemAlloc_v2", &api.allocate},
  };
  return state = take_symbols(symbols, sizeof symbols / sizeof *symbols) && api.version() >= OLDEST;
}

#endif  // RELAXTUNE_CUDNN_API_H_
