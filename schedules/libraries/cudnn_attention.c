// The attention of schedules/libraries/cudnn_attention.py: one plan of cuDNN 9 on the stream that TVM uses now.
//
// cuDNN is opened when the first attention runs, so a module that holds this code loads where the library is missing.
// The operations are described one by one through cuDNN's backend API, in the order in which its fused attention
// engines expect them (cuDNN Developer Guide, "Fused Flash Attention fprop").

#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <tvm/ffi/extra/c_env_api.h>

#include "cudnn_api.h"

// What relaxtune_cudnn_attention answers; schedules/libraries/cudnn_attention.py has a message for each.
enum { DONE = 0, NO_LIBRARY = 1, NO_PLAN = 2, FAILED = 3, NOT_ALIGNED = 4 };

enum { OPERATIONS = 32, PLANS = 16, SCALARS = 8, ALIGNMENT = 16 };
// cuDNN multiplies scores by log2(e); what is lower than this would become -inf, and a row of such all hidden.
static const float LOWEST_SCORE = -1e38f;
// Names of tensors in memory; scalars and what is computed on the way follow.
enum { ID_QUERY = 1, ID_KEY, ID_VALUE, ID_MASK, ID_OUTPUT, ID_NEXT };

// What the text that a call brings says; strides are in elements, in the order batch, head, position.
typedef struct {
  int64_t batch, heads, kv_heads, queries, keys, head_dim;
  int64_t dtype, mask_dtype;  // mask_dtype: -1 where there is no mask
  int64_t causal, window;     // window: 0 for all keys
  int64_t plan;               // place in the heuristic's list
  int64_t scale_bits;         // of a float
  int64_t query[3], key[3], value[3], output[3];
  int64_t mask_strides[4], mask_sizes[4];  // along batch, head, query, key; a size of 1 broadcasts
  int64_t offsets[4];                      // of query, key, value and output, in elements
} Attention;

typedef struct {
  int64_t id;
  union {
    float number;
    int32_t integer;
  } value;
} Scalar;

// What is made once for a text and a device. Never freed: the process may end after its CUDA context.
typedef struct Made {
  char *text;
  int device;
  Attention what;
  Descriptor plan, pack;
  void *pointers[5];  // of the pack, as they were given
  Scalar scalars[SCALARS];
  int scalar_count;
  uint64_t workspace;
  int answer;
  struct Made *next;
} Made;

// Operations under construction; `failed` stays once it is set, and everything after does nothing.
typedef struct {
  Made *made;
  Descriptor operations[OPERATIONS];
  int count;
  int64_t next_id;
  bool failed;
} Graph;

static Made *all_made;
static Device *devices;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static Descriptor new_descriptor(Graph *graph, int kind) {
  Descriptor made = NULL;
  if (!graph->failed && api.descriptor(kind, &made) != 0) graph->failed = true;
  return made;
}

static void set(Graph *graph, Descriptor descriptor, int name, int type, int64_t count, const void *value) {
  if (!graph->failed && api.set(descriptor, name, type, count, value) != 0) graph->failed = true;
}

static void set_type(Graph *graph, Descriptor descriptor, int name, int type, int value) {
  set(graph, descriptor, name, type, 1, &value);
}

static void set_descriptor(Graph *graph, Descriptor descriptor, int name, Descriptor value) {
  set(graph, descriptor, name, OF_DESCRIPTOR, 1, &value);
}

static void finalize(Graph *graph, Descriptor descriptor) {
  if (!graph->failed && api.finalize(descriptor) != 0) graph->failed = true;
}

static Descriptor tensor(Graph *graph, int64_t id, int dtype, const int64_t *sizes, const int64_t *strides) {
  const int64_t alignment = ALIGNMENT;
  Descriptor made = new_descriptor(graph, TENSOR);
  set(graph, made, TENSOR_ID, OF_INT64, 1, &id);
  set_type(graph, made, TENSOR_TYPE, OF_DATA_TYPE, dtype);
  set(graph, made, TENSOR_SIZES, OF_INT64, 4, sizes);
  set(graph, made, TENSOR_STRIDES, OF_INT64, 4, strides);
  set(graph, made, TENSOR_ALIGNMENT, OF_INT64, 1, &alignment);
  return made;
}

static Descriptor in_memory(Graph *graph, int64_t id, int dtype, const int64_t *sizes, const int64_t *strides) {
  Descriptor made = tensor(graph, id, dtype, sizes, strides);
  finalize(graph, made);
  return made;
}

// What an operation hands to the next: one value a score, or with `columns` of 1 one a row of scores.
static Descriptor between(Graph *graph, int dtype, int64_t columns) {
  const Attention *what = &graph->made->what;
  const bool is_virtual = true;
  const int64_t sizes[] = {what->batch, what->heads, what->queries, columns};
  const int64_t strides[] = {what->heads * what->queries * columns, what->queries * columns, columns, 1};
  Descriptor made = tensor(graph, graph->next_id++, dtype, sizes, strides);
  set(graph, made, TENSOR_VIRTUAL, OF_BOOLEAN, 1, &is_virtual);
  finalize(graph, made);
  return made;
}

static Descriptor scores(Graph *graph, int dtype) { return between(graph, dtype, graph->made->what.keys); }

static Descriptor rows(Graph *graph) { return between(graph, FLOAT32, 1); }

static Descriptor scalar(Graph *graph, int dtype, double value) {
  Made *made = graph->made;
  if (made->scalar_count == SCALARS) graph->failed = true;
  if (graph->failed) return NULL;
  const bool by_value = true;
  const int64_t ones[] = {1, 1, 1, 1};
  Scalar *kept = &made->scalars[made->scalar_count++];
  kept->id = graph->next_id++;
  if (dtype == INT32) {
    kept->value.integer = (int32_t)value;
  } else {
    kept->value.number = (float)value;
  }
  Descriptor described = tensor(graph, kept->id, dtype, ones, ones);
  set(graph, described, TENSOR_BY_VALUE, OF_BOOLEAN, 1, &by_value);
  finalize(graph, described);
  return described;
}

static void add_operation(Graph *graph, Descriptor operation) {
  finalize(graph, operation);
  if (graph->count == OPERATIONS) graph->failed = true;
  if (!graph->failed) graph->operations[graph->count++] = operation;
}

static Descriptor multiply(Graph *graph, Descriptor a, Descriptor b, Descriptor c) {
  Descriptor matmul = new_descriptor(graph, MATMUL), operation = new_descriptor(graph, OPERATION_MATMUL);
  set_type(graph, matmul, MATMUL_PRECISION, OF_DATA_TYPE, FLOAT32);
  finalize(graph, matmul);
  set_descriptor(graph, operation, MATMUL_A, a);
  set_descriptor(graph, operation, MATMUL_B, b);
  set_descriptor(graph, operation, MATMUL_C, c);
  set_descriptor(graph, operation, MATMUL_DESC, matmul);
  add_operation(graph, operation);
  return c;
}

// y = mode(x, b), or with t: t ? x : b. `axis` is for POSITION alone.
static Descriptor pointwise(Graph *graph, int mode, int precision, Descriptor x, Descriptor b, Descriptor t,
                            int64_t axis, Descriptor y) {
  Descriptor how = new_descriptor(graph, POINTWISE), operation = new_descriptor(graph, OPERATION_POINTWISE);
  set_type(graph, how, POINTWISE_MODE, OF_POINTWISE, mode);
  set_type(graph, how, POINTWISE_PRECISION, OF_DATA_TYPE, precision);
  if (mode == POSITION) set(graph, how, POINTWISE_AXIS, OF_INT64, 1, &axis);
  finalize(graph, how);
  set_descriptor(graph, operation, POINTWISE_DESC, how);
  set_descriptor(graph, operation, POINTWISE_X, x);
  if (b != NULL) set_descriptor(graph, operation, POINTWISE_B, b);
  if (t != NULL) set_descriptor(graph, operation, POINTWISE_T, t);
  set_descriptor(graph, operation, POINTWISE_Y, y);
  add_operation(graph, operation);
  return y;
}

static Descriptor combine(Graph *graph, int mode, Descriptor x, Descriptor b, Descriptor y) {
  return pointwise(graph, mode, FLOAT32, x, b, NULL, 0, y);
}

static Descriptor reduce(Graph *graph, int operator, Descriptor x, Descriptor y) {
  Descriptor how = new_descriptor(graph, REDUCTION), operation = new_descriptor(graph, OPERATION_REDUCTION);
  set_type(graph, how, REDUCTION_PRECISION, OF_DATA_TYPE, FLOAT32);
  set_type(graph, how, REDUCTION_OPERATOR, OF_REDUCTION, operator);
  finalize(graph, how);
  set_descriptor(graph, operation, REDUCTION_DESC, how);
  set_descriptor(graph, operation, REDUCTION_X, x);
  set_descriptor(graph, operation, REDUCTION_Y, y);
  add_operation(graph, operation);
  return y;
}

static Descriptor position(Graph *graph, Descriptor score, int64_t axis) {
  return pointwise(graph, POSITION, FLOAT32, score, NULL, NULL, axis, scores(graph, INT32));
}

static Descriptor keep(Graph *graph, Descriptor score, int comparison, Descriptor left, Descriptor right) {
  Descriptor seen = pointwise(graph, comparison, BOOLEAN, left, right, NULL, 0, scores(graph, BOOLEAN));
  Descriptor hidden = scalar(graph, FLOAT32, -INFINITY);
  return pointwise(graph, SELECT, FLOAT32, score, hidden, seen, 0, scores(graph, FLOAT32));
}

// Query i stands at position i + keys - queries. To the right it sees up to there (causal) or `window - 1` keys on.
static Descriptor hide_later(Graph *graph, Descriptor score) {
  const Attention *what = &graph->made->what;
  const int64_t ahead = what->causal ? 0 : what->window - 1;
  Descriptor row = position(graph, score, 2), column = position(graph, score, 3);
  const bool moved_on = what->keys != what->queries;
  const int64_t steps[] = {moved_on ? what->keys : 0, moved_on ? what->queries : 0, ahead};
  const int modes[] = {ADD, SUBTRACT, ADD};
  for (int i = 0; i < 3; ++i) {
    if (steps[i] == 0) continue;
    Descriptor step = scalar(graph, INT32, (double)steps[i]);
    row = pointwise(graph, modes[i], INT32, row, step, NULL, 0, scores(graph, INT32));
  }
  return keep(graph, score, GREATER_OR_EQUAL, row, column);
}

// To the left it sees `window - 1` keys: j + window - (keys - queries) > i.
static Descriptor hide_earlier(Graph *graph, Descriptor score) {
  const Attention *what = &graph->made->what;
  Descriptor row = position(graph, score, 2), column = position(graph, score, 3);
  Descriptor bound = scalar(graph, FLOAT32, (double)(what->window - what->keys + what->queries));
  column = pointwise(graph, ADD, FLOAT32, column, bound, NULL, 0, scores(graph, FLOAT32));
  return keep(graph, score, GREATER, column, row);
}

static Descriptor add_mask(Graph *graph, Descriptor score) {
  const Attention *what = &graph->made->what;
  Descriptor mask = in_memory(graph, ID_MASK, (int)what->mask_dtype, what->mask_sizes, what->mask_strides);
  score = combine(graph, ADD, score, mask, scores(graph, FLOAT32));
  if (what->mask_dtype == FLOAT16) return score;
  return combine(graph, LARGER, score, scalar(graph, FLOAT32, LOWEST_SCORE), scores(graph, FLOAT32));
}

static void describe(Graph *graph) {
  const Attention *what = &graph->made->what;
  const int dtype = (int)what->dtype;
  const int64_t b = what->batch, h = what->heads, g = what->kv_heads, i = what->queries, j = what->keys;
  const int64_t d = what->head_dim;
  const int64_t *q = what->query, *k = what->key, *v = what->value, *o = what->output;
  Descriptor query =
      in_memory(graph, ID_QUERY, dtype, (int64_t[]){b, h, i, d}, (int64_t[]){q[0], q[1], q[2], 1});
  Descriptor key = in_memory(graph, ID_KEY, dtype, (int64_t[]){b, g, d, j}, (int64_t[]){k[0], k[1], 1, k[2]});
  Descriptor value = in_memory(graph, ID_VALUE, dtype, (int64_t[]){b, g, j, d}, (int64_t[]){v[0], v[1], v[2], 1});
  Descriptor output =
      in_memory(graph, ID_OUTPUT, dtype, (int64_t[]){b, h, i, d}, (int64_t[]){o[0], o[1], o[2], 1});
  Descriptor score = multiply(graph, query, key, scores(graph, FLOAT32));
  float scale = 0.0f;
  const uint32_t bits = (uint32_t)what->scale_bits;
  memcpy(&scale, &bits, sizeof scale);
  score = combine(graph, MULTIPLY, score, scalar(graph, FLOAT32, scale), scores(graph, FLOAT32));
  if (what->mask_dtype >= 0) score = add_mask(graph, score);
  if (what->causal || what->window) score = hide_later(graph, score);
  if (what->window) score = hide_earlier(graph, score);
  Descriptor highest = reduce(graph, REDUCE_MAX, score, rows(graph));
  Descriptor below = combine(graph, SUBTRACT, score, highest, scores(graph, FLOAT32));
  Descriptor weight = combine(graph, EXP, below, NULL, scores(graph, FLOAT32));
  Descriptor total = reduce(graph, REDUCE_ADD, weight, rows(graph));
  combine(graph, ADD, highest, combine(graph, LOG, total, NULL, rows(graph)), rows(graph));
  multiply(graph, combine(graph, DIVIDE, weight, total, scores(graph, dtype)), value, output);
}

// Makes the plan at the place of the heuristic's list that is asked for.
static int plan_of(Graph *graph, Descriptor operations, void *handle) {
  Made *made = graph->made;
  Descriptor heuristic = new_descriptor(graph, HEURISTIC), configs[PLANS];
  set(graph, heuristic, HEURISTIC_GRAPH, OF_DESCRIPTOR, 1, &operations);
  set_type(graph, heuristic, HEURISTIC_MODE, OF_HEURISTIC, HEURISTIC_MODE_A);
  for (int i = 0; i < PLANS; ++i) configs[i] = new_descriptor(graph, ENGINE_CONFIG);
  int64_t count = 0;
  if (graph->failed || api.finalize(heuristic) != 0 ||
      api.get(heuristic, HEURISTIC_RESULTS, OF_DESCRIPTOR, PLANS, &count, configs) != 0 || made->what.plan >= count) {
    return NO_PLAN;
  }
  Descriptor plan = new_descriptor(graph, PLAN);
  set(graph, plan, PLAN_HANDLE, OF_HANDLE, 1, &handle);
  set_descriptor(graph, plan, PLAN_CONFIG, configs[made->what.plan]);
  int64_t bytes = 0;
  if (graph->failed || api.finalize(plan) != 0 || api.get(plan, PLAN_WORKSPACE, OF_INT64, 1, &count, &bytes) != 0) {
    return NO_PLAN;
  }
  made->plan = plan;
  return bytes == 0 || api.allocate(&made->workspace, (size_t)bytes) == 0 ? DONE : FAILED;
}

static int prepare(Made *made, void *handle) {
  Graph graph = {.made = made, .next_id = ID_NEXT};
  describe(&graph);
  Descriptor operations = new_descriptor(&graph, OPERATION_GRAPH);
  set(&graph, operations, GRAPH_HANDLE, OF_HANDLE, 1, &handle);
  set(&graph, operations, GRAPH_OPERATIONS, OF_DESCRIPTOR, graph.count, graph.operations);
  finalize(&graph, operations);
  return graph.failed ? NO_PLAN : plan_of(&graph, operations, handle);
}

// Binds the plan's tensors to memory; the last binding is kept, as a model runs on the same buffers again and again.
static int bind(Made *made, void *const *pointers) {
  if (made->pack != NULL && memcmp(made->pointers, pointers, sizeof made->pointers) == 0) return DONE;
  if (made->pack != NULL) api.destroy(made->pack);
  made->pack = NULL;
  int64_t ids[5 + SCALARS];
  void *places[5 + SCALARS];
  int count = 0;
  for (int i = 0; i < 5; ++i) {
    const int64_t id = ID_QUERY + i;
    if (id == ID_MASK && made->what.mask_dtype < 0) continue;
    ids[count] = id;
    places[count++] = pointers[i];
  }
  for (int i = 0; i < made->scalar_count; ++i) {
    ids[count] = made->scalars[i].id;
    places[count++] = &made->scalars[i].value;
  }
  void *workspace = (void *)(uintptr_t)made->workspace;
  Descriptor pack = NULL;
  if (api.descriptor(VARIANT_PACK, &pack) != 0 ||
      api.set(pack, PACK_IDS, OF_INT64, count, ids) != 0 ||
      api.set(pack, PACK_POINTERS, OF_POINTER, count, places) != 0 ||
      api.set(pack, PACK_WORKSPACE, OF_POINTER, 1, &workspace) != 0 || api.finalize(pack) != 0) {
    return FAILED;
  }
  made->pack = pack;
  memcpy(made->pointers, pointers, sizeof made->pointers);
  return DONE;
}

// Reads what schedules/libraries/cudnn_attention.py wrote: the fields of Attention in their order.
static bool parse(const char *text, Attention *what) {
  int64_t *const numbers = (int64_t *)what;
  for (size_t i = 0; i < sizeof *what / sizeof *numbers; ++i) {
    char *end = NULL;
    numbers[i] = strtoll(text, &end, 10);
    if (end == text) return false;
    text = end;
  }
  return true;
}

static Made *made_for(const char *text, int device, void *handle) {
  for (Made *made = all_made; made != NULL; made = made->next) {
    if (made->device == device && strcmp(made->text, text) == 0) return made;
  }
  Made *made = calloc(1, sizeof *made);
  const size_t bytes = strlen(text) + 1;
  char *kept = malloc(bytes);
  if (made == NULL || kept == NULL) {
    free(made);
    free(kept);
    return NULL;
  }
  made->text = memcpy(kept, text, bytes);
  made->device = device;
  made->answer = parse(text, &made->what) ? prepare(made, handle) : FAILED;
  made->next = all_made;
  return all_made = made;
}

static void *moved(void *start, int64_t elements) { return (char *)start + elements * 2; }

static int run(int device, const char *text, void *query, void *key, void *value, void *mask, void *output) {
  Device *here = device_of(&devices, device, api.create);
  if (here == NULL) return FAILED;
  Made *made = made_for(text, device, here->handle);
  if (made == NULL) return FAILED;
  if (made->answer != DONE) return made->answer;
  const int64_t *offsets = made->what.offsets;
  void *const pointers[] = {moved(query, offsets[0]), moved(key, offsets[1]), moved(value, offsets[2]), mask,
                            moved(output, offsets[3])};
  for (int i = 0; i < 5; ++i) {
    if ((uintptr_t)pointers[i] % ALIGNMENT != 0) return NOT_ALIGNED;
  }
  void *stream = TVMFFIEnvGetStream(DEVICE_CUDA, device);
  if (bind(made, pointers) != DONE || api.set_stream(here->handle, stream) != 0) return FAILED;
  return api.execute(here->handle, made->plan, made->pack) == 0 ? DONE : FAILED;
}

// The attention that the text describes, on the current context's device. mask may be null where the text has none.
int relaxtune_cudnn_attention(const char *text, void *query, void *key, void *value, void *mask, void *output) {
  pthread_mutex_lock(&lock);
  int answer = NO_LIBRARY;
  if (load()) {
    int device = 0;
    answer = api.context_device(&device) == 0 ? run(device, text, query, key, value, mask, output) : FAILED;
  }
  pthread_mutex_unlock(&lock);
  return answer;
}
