// The part of ONNX Runtime's C interface that the provider calls and implements, since its wheel has no headers.
//
// ONNX Runtime only appends to these tables: a function keeps its place and its arguments in all later versions. Places and
// signatures are those of onnxruntime_c_api.h and onnxruntime_ep_c_api.h, version 23. Types without a body are opaque.
#ifndef RELAXTUNE_ONNXRUNTIME_ABI_H_
#define RELAXTUNE_ONNXRUNTIME_ABI_H_

#include <cstddef>
#include <cstdint>

namespace relaxtune::ort {

// The version of the interface that the provider needs; also the first ONNX Runtime (1.23) that loads it.
constexpr uint32_t kVersion = 23;

struct Status;
struct Graph;
struct Node;
struct OpAttr;
struct ValueInfo;
struct Value;
struct TensorInfo;
struct KernelContext;
struct ComputeContext;
struct SessionOptions;
struct HardwareDevice;
struct EpDevice;
struct KeyValuePairs;
struct GraphSupport;
struct Logger;

enum ErrorCode : int { kInvalidArgument = 2, kEpFail = 11 };
constexpr int kStringAttribute = 5;
constexpr int kCpu = 0;

// A table of functions, called by their places.
using Table = void* const*;

template <size_t kPlace, typename Signature>
struct Entry;
template <size_t kPlace, typename Result, typename... Arguments>
struct Entry<kPlace, Result(Arguments...)> {
  static Result Call(Table table, Arguments... arguments) {
    return reinterpret_cast<Result (*)(Arguments...)>(table[kPlace])(arguments...);
  }
};

// Of OrtApiBase.
using GetApi = Entry<0, Table(uint32_t version)>;

// Of OrtApi.
using CreateStatus = Entry<0, Status*(int code, const char* message)>;
using GetErrorMessage = Entry<2, const char*(const Status*)>;
using ReleaseStatus = Entry<93, void(Status*)>;
using GetTensorMutableData = Entry<51, Status*(Value*, void** data)>;
using GetTensorElementType = Entry<60, Status*(const TensorInfo*, int* type)>;
using GetDimensionsCount = Entry<61, Status*(const TensorInfo*, size_t* count)>;
using GetDimensions = Entry<62, Status*(const TensorInfo*, int64_t* sizes, size_t count)>;
using GetTensorTypeAndShape = Entry<65, Status*(const Value*, TensorInfo**)>;
using ReleaseTensorTypeAndShapeInfo = Entry<99, void(TensorInfo*)>;
using KernelContext_GetInput = Entry<90, Status*(const KernelContext*, size_t number, const Value**)>;
using KernelContext_GetOutput = Entry<91, Status*(KernelContext*, size_t number, const int64_t* sizes, size_t count, Value**)>;
using HasSessionConfigEntry = Entry<237, Status*(const SessionOptions*, const char* key, int* found)>;
using GetSessionConfigEntry = Entry<238, Status*(const SessionOptions*, const char* key, char* value, size_t* size)>;
using ReadOpAttr = Entry<272, Status*(const OpAttr*, int type, void* data, size_t length, size_t* needed)>;
using GetValueInfoName = Entry<289, Status*(const ValueInfo*, const char** name)>;
using HardwareDevice_Type = Entry<307, int(const HardwareDevice*)>;
using GetEpApi = Entry<317, Table()>;
using Graph_GetModelPath = Entry<334, Status*(const Graph*, const char** path)>;
using Graph_GetNumNodes = Entry<344, Status*(const Graph*, size_t* count)>;
using Graph_GetNodes = Entry<345, Status*(const Graph*, const Node** nodes, size_t count)>;
using Node_GetOperatorType = Entry<350, Status*(const Node*, const char** name)>;
using Node_GetDomain = Entry<351, Status*(const Node*, const char** name)>;
using Node_GetNumInputs = Entry<353, Status*(const Node*, size_t* count)>;
using Node_GetInputs = Entry<354, Status*(const Node*, const ValueInfo** values, size_t count)>;
using Node_GetNumOutputs = Entry<355, Status*(const Node*, size_t* count)>;
using Node_GetOutputs = Entry<356, Status*(const Node*, const ValueInfo** values, size_t count)>;
using Node_GetAttributeByName = Entry<361, Status*(const Node*, const char* name, const OpAttr**)>;

// Of OrtEpApi.
using CreateEpDevice = Entry<0, Status*(void* factory, const HardwareDevice*, const KeyValuePairs* metadata,
                                        const KeyValuePairs* options, EpDevice**)>;
using AddNodesToFuse = Entry<2, Status*(GraphSupport*, const Node* const* nodes, size_t count, const void* options)>;

// What the provider implements. A function that is null is left out by it; the version says where a table ends.
struct NodeComputeInfo {
  uint32_t version = kVersion;
  Status* (*CreateState)(NodeComputeInfo*, ComputeContext*, void** state) = nullptr;
  Status* (*Compute)(NodeComputeInfo*, void* state, KernelContext*) = nullptr;
  void (*ReleaseState)(NodeComputeInfo*, void* state) = nullptr;
};

struct Ep {
  uint32_t version = kVersion;
  const char* (*GetName)(const Ep*) = nullptr;
  Status* (*GetCapability)(Ep*, const Graph*, GraphSupport*) = nullptr;
  Status* (*Compile)(Ep*, const Graph** graphs, const Node** fused, size_t count, NodeComputeInfo**, Node** contexts) = nullptr;
  void (*ReleaseNodeComputeInfos)(Ep*, NodeComputeInfo**, size_t count) = nullptr;
  void* optional[8] = {};
};

struct EpFactory {
  uint32_t version = kVersion;
  const char* (*GetName)(const EpFactory*) = nullptr;
  const char* (*GetVendor)(const EpFactory*) = nullptr;
  Status* (*GetSupportedDevices)(EpFactory*, const HardwareDevice* const* devices, size_t count, EpDevice** supported,
                                 size_t most, size_t* found) = nullptr;
  Status* (*CreateEp)(EpFactory*, const HardwareDevice* const* devices, const KeyValuePairs* const* metadata, size_t count,
                      const SessionOptions*, const Logger*, Ep**) = nullptr;
  void (*ReleaseEp)(EpFactory*, Ep*) = nullptr;
  uint32_t (*GetVendorId)(const EpFactory*) = nullptr;
  const char* (*GetVersion)(const EpFactory*) = nullptr;
  void* optional[3] = {};
  Status* (*CreateDataTransfer)(EpFactory*, void** transfer) = nullptr;
  bool (*IsStreamAware)(const EpFactory*) = nullptr;
  void* stream = nullptr;
};

}  // namespace relaxtune::ort

#endif  // RELAXTUNE_ONNXRUNTIME_ABI_H_
