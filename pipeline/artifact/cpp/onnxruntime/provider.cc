// A plug-in execution provider of ONNX Runtime: it runs artifacts that EPContext nodes with `source` "relaxtune" name.
//
// `ep_cache_context` of such a node is the artifact's folder, relative to the model's file. Tensors are ONNX Runtime's, in the
// host's memory: an artifact for a GPU copies its inputs there, and its outputs back.
#include <relaxtune/artifact.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "abi.h"

namespace {

namespace fs = std::filesystem;
using namespace relaxtune::ort;
using relaxtune::Artifact;
using relaxtune::Error;

constexpr char kName[] = "relaxtune";
constexpr char kExportAgain[] = "write the model again with `relaxtune artifact export-ep`";

// Calls of one ONNX Runtime. A failed call throws, and no exception leaves a function that ONNX Runtime calls.
struct Api {
  Table table;

  void Check(Status* status) const {
    if (status == nullptr) return;
    std::string message = GetErrorMessage::Call(table, status);
    ReleaseStatus::Call(table, status);
    throw Error(message, "ONNX Runtime", "");
  }

  template <typename Body>
  Status* Guarded(int code, Body&& body) const {
    try {
      body();
      return nullptr;
    } catch (const std::exception& e) {
      return CreateStatus::Call(table, code, e.what());
    }
  }

  template <typename Text, typename Of>
  std::string String(const Of* of) const {
    const char* text = nullptr;
    Check(Text::Call(table, of, &text));
    return text == nullptr ? "" : text;
  }

  std::vector<const Node*> Nodes(const Graph* graph) const {
    size_t count = 0;
    Check(Graph_GetNumNodes::Call(table, graph, &count));
    std::vector<const Node*> nodes(count);
    Check(Graph_GetNodes::Call(table, graph, nodes.data(), count));
    return nodes;
  }

  // A text attribute of a node; empty where it has none.
  std::string Attribute(const Node* node, const char* name) const {
    const OpAttr* attribute = nullptr;
    if (Status* missing = Node_GetAttributeByName::Call(table, node, name, &attribute))
      return ReleaseStatus::Call(table, missing), "";
    if (attribute == nullptr) return "";
    size_t size = 0;
    // Without room for the text the call fails, and gives its size.
    if (Status* too_short = ReadOpAttr::Call(table, attribute, kStringAttribute, nullptr, 0, &size))
      ReleaseStatus::Call(table, too_short);
    std::string text(size, '\0');
    if (size > 0) Check(ReadOpAttr::Call(table, attribute, kStringAttribute, text.data(), size, &size));
    return text.c_str();
  }

  // Names of a node's inputs or outputs.
  template <typename Count, typename Values>
  std::vector<std::string> Names(const Node* node) const {
    size_t count = 0;
    Check(Count::Call(table, node, &count));
    std::vector<const ValueInfo*> values(count);
    Check(Values::Call(table, node, values.data(), count));
    std::vector<std::string> names;
    for (const ValueInfo* value : values) names.push_back(value ? String<GetValueInfoName>(value) : "");
    return names;
  }

  // A number that the user gave with the provider; `otherwise` where none is given.
  int Option(const SessionOptions* options, const char* name, int otherwise) const {
    std::string key = std::string("ep.") + kName + "." + name;
    int found = 0;
    Check(HasSessionConfigEntry::Call(table, options, key.c_str(), &found));
    if (!found) return otherwise;
    char text[32] = {};
    size_t size = sizeof(text), used = 0;
    Check(GetSessionConfigEntry::Call(table, options, key.c_str(), text, &size));
    try {
      int number = std::stoi(text, &used);
      if (number >= 0 && used == std::strlen(text)) return number;
    } catch (const std::exception&) {
      // The text is no number.
    }
    throw Error(std::string("option ") + name + " is '" + text + "'", kName, "give a number of 0 or more");
  }
};

// Element types by their numbers in ONNX Runtime; those without bits are none of an artifact.
constexpr DLDataType kDtypes[] = {
    {}, {kDLFloat, 32, 1}, {kDLUInt, 8, 1}, {kDLInt, 8, 1}, {kDLUInt, 16, 1}, {kDLInt, 16, 1}, {kDLInt, 32, 1},
    {kDLInt, 64, 1}, {}, {kDLBool, 8, 1}, {kDLFloat, 16, 1}, {kDLFloat, 64, 1}, {kDLUInt, 32, 1}, {kDLUInt, 64, 1}, {}, {},
    {kDLBfloat, 16, 1}, {kDLFloat8_e4m3fn, 8, 1}, {}, {kDLFloat8_e5m2, 8, 1}};

struct Tensor {
  DLDataType dtype;
  std::vector<int64_t> shape;
};

Tensor Describe(const Api& api, const Value* value) {
  TensorInfo* found = nullptr;
  api.Check(GetTensorTypeAndShape::Call(api.table, value, &found));
  const auto release = [&api](TensorInfo* info) { ReleaseTensorTypeAndShapeInfo::Call(api.table, info); };
  std::unique_ptr<TensorInfo, decltype(release)> info(found, release);
  int type = 0;
  size_t rank = 0;
  api.Check(GetTensorElementType::Call(api.table, found, &type));
  if (type < 0 || type >= static_cast<int>(std::size(kDtypes)) || kDtypes[type].bits == 0)
    throw Error("element type " + std::to_string(type) + " of ONNX Runtime is none of an artifact", kName, kExportAgain);
  api.Check(GetDimensionsCount::Call(api.table, found, &rank));
  Tensor tensor{kDtypes[type], std::vector<int64_t>(rank)};
  api.Check(GetDimensions::Call(api.table, found, tensor.shape.data(), rank));
  return tensor;
}

// The places of the artifact's tensors among those of the node by which ONNX Runtime replaced the EPContext node.
std::vector<size_t> Places(const std::vector<std::string>& names, const std::vector<std::string>& fused, size_t expected,
                           const char* kind, const std::string& directory) {
  if (names.size() != expected)
    throw Error("the model has " + std::to_string(names.size()) + " " + kind + " of it, it has " + std::to_string(expected),
                directory, kExportAgain);
  std::vector<size_t> places;
  for (const std::string& name : names)
    places.push_back(std::find(fused.begin(), fused.end(), name) - fused.begin());
  return places;
}

// An artifact in the place of a node.
struct Kernel : NodeComputeInfo {
  Kernel(Api api, const std::string& directory, const relaxtune::Options& options)
      : api(api), directory(directory), artifact(Artifact::Load(directory, options)) {
    CreateState = [](NodeComputeInfo*, ComputeContext*, void** state) -> Status* { return *state = nullptr, nullptr; };
    Compute = [](NodeComputeInfo* self, void*, KernelContext* context) {
      auto* kernel = static_cast<Kernel*>(self);
      return kernel->api.Guarded(kInvalidArgument, [&] { kernel->Run(context); });
    };
    ReleaseState = [](NodeComputeInfo*, void*) {};
  }

  void Run(KernelContext* context) {
    std::vector<Tensor> described;
    std::vector<DLTensor> given;
    for (size_t place : inputs) {
      const Value* value = nullptr;
      void* data = nullptr;
      api.Check(KernelContext_GetInput::Call(api.table, context, place, &value));
      api.Check(GetTensorMutableData::Call(api.table, const_cast<Value*>(value), &data));
      described.push_back(Describe(api, value));
      const Tensor& tensor = described.back();
      given.push_back({data, {kDLCPU, 0}, static_cast<int32_t>(tensor.shape.size()), tensor.dtype, nullptr, nullptr, 0});
    }
    for (size_t number = 0; number < given.size(); ++number) given[number].shape = described[number].shape.data();
    std::vector<relaxtune::Output> made = artifact.Run(given);
    for (size_t number = 0; number < made.size(); ++number)
      if (outputs[number] < outputs_taken) Give(made[number]->dl_tensor, artifact.outputs()[number].name, context, outputs[number]);
  }

  void Give(const DLTensor& made, const std::string& name, KernelContext* context, size_t place) const {
    Value* value = nullptr;
    void* data = nullptr;
    api.Check(KernelContext_GetOutput::Call(api.table, context, place, made.shape, made.ndim, &value));
    DLDataType dtype = Describe(api, value).dtype;
    if (std::memcmp(&dtype, &made.dtype, sizeof(dtype)) != 0)
      throw Error("the model has another dtype than the artifact", directory + ", output " + name, kExportAgain);
    api.Check(GetTensorMutableData::Call(api.table, value, &data));
    size_t bytes = made.dtype.bits / 8;
    for (int axis = 0; axis < made.ndim; ++axis) bytes *= made.shape[axis];
    if (bytes > 0) std::memcpy(data, static_cast<const char*>(made.data) + made.byte_offset, bytes);
  }

  Api api;
  std::string directory;
  Artifact artifact;
  // By number of the artifact's tensor, its place in the node; an output that nobody reads has none.
  std::vector<size_t> inputs, outputs;
  size_t outputs_taken = 0;
};

// The provider of one session.
struct Provider : Ep {
  Provider(Api api, Table ep_api, const SessionOptions* given) : api(api), ep_api(ep_api) {
    options.threads = api.Option(given, "threads", 0);
    options.device = api.Option(given, "device", 0);
    options.verify = api.Option(given, "verify", 1) != 0;
    options.host_outputs = true;
    GetName = [](const Ep*) { return kName; };
    GetCapability = [](Ep* self, const Graph* graph, GraphSupport* support) {
      auto* provider = static_cast<Provider*>(self);
      return provider->api.Guarded(kEpFail, [&] { provider->Claim(graph, support); });
    };
    Compile = [](Ep* self, const Graph** graphs, const Node** fused, size_t count, NodeComputeInfo** kernels, Node**) {
      auto* provider = static_cast<Provider*>(self);
      return provider->api.Guarded(kEpFail, [&] {
        for (size_t number = 0; number < count; ++number) kernels[number] = provider->Load(graphs[number], fused[number]);
      });
    };
    ReleaseNodeComputeInfos = [](Ep*, NodeComputeInfo** kernels, size_t count) {
      for (size_t number = 0; number < count; ++number) delete static_cast<Kernel*>(kernels[number]);
    };
  }

  // Take each EPContext node that names an artifact.
  void Claim(const Graph* graph, GraphSupport* support) const {
    for (const Node* node : api.Nodes(graph)) {
      bool ours = api.String<Node_GetOperatorType>(node) == "EPContext" &&
                  api.String<Node_GetDomain>(node) == "com.microsoft" && api.Attribute(node, "source") == kName;
      if (ours) api.Check(AddNodesToFuse::Call(ep_api, support, &node, 1, nullptr));
    }
  }

  NodeComputeInfo* Load(const Graph* graph, const Node* fused) const {
    const Node* node = api.Nodes(graph).at(0);
    fs::path model = api.String<Graph_GetModelPath>(graph), folder = api.Attribute(node, "ep_cache_context");
    if (model.empty())
      throw Error("the model was not loaded from a file, and its artifact is found beside that file", kName,
                  "give InferenceSession the path of the model");
    // Loading runs code: a model names no folder outside of its own.
    fs::path inside = folder.lexically_normal();
    if (inside.empty() || inside.is_absolute() || *inside.begin() == "..")
      throw Error("its artifact '" + folder.string() + "' is not inside the model's folder", model, kExportAgain);
    std::string directory = model.parent_path() / inside;
    if (!fs::is_directory(directory))
      throw Error("the model's artifact is missing", directory, std::string("copy the model's folder whole, or ") + kExportAgain);
    auto kernel = std::make_unique<Kernel>(api, directory, options);
    const auto taken = api.Names<Node_GetNumOutputs, Node_GetOutputs>(fused);
    kernel->inputs = Places(api.Names<Node_GetNumInputs, Node_GetInputs>(node),
                            api.Names<Node_GetNumInputs, Node_GetInputs>(fused), kernel->artifact.inputs().size(), "inputs",
                            directory);
    kernel->outputs = Places(api.Names<Node_GetNumOutputs, Node_GetOutputs>(node), taken, kernel->artifact.outputs().size(),
                             "outputs", directory);
    kernel->outputs_taken = taken.size();
    return kernel.release();
  }

  Api api;
  Table ep_api;
  relaxtune::Options options;
};

struct Factory : EpFactory {
  explicit Factory(Table table) : api{table}, ep_api(GetEpApi::Call(table)) {
    GetName = [](const EpFactory*) { return kName; };
    GetVendor = [](const EpFactory*) { return kName; };
    GetVendorId = [](const EpFactory*) { return uint32_t{0}; };
    GetVersion = [](const EpFactory*) { return RELAXTUNE_VERSION; };
    GetSupportedDevices = [](EpFactory* self, const HardwareDevice* const* devices, size_t count, EpDevice** supported,
                             size_t most, size_t* found) -> Status* {
      auto* factory = static_cast<Factory*>(self);
      *found = 0;
      for (size_t number = 0; number < count && *found < std::min<size_t>(most, 1); ++number)
        if (HardwareDevice_Type::Call(factory->api.table, devices[number]) == kCpu)
          if (Status* failed = CreateEpDevice::Call(factory->ep_api, self, devices[number], nullptr, nullptr, &supported[(*found)++]))
            return failed;
      return nullptr;
    };
    CreateEp = [](EpFactory* self, const HardwareDevice* const*, const KeyValuePairs* const*, size_t,
                  const SessionOptions* options, const Logger*, Ep** made) {
      auto* factory = static_cast<Factory*>(self);
      return factory->api.Guarded(kInvalidArgument, [&] { *made = new Provider(factory->api, factory->ep_api, options); });
    };
    ReleaseEp = [](EpFactory*, Ep* provider) { delete static_cast<Provider*>(provider); };
    // Memory and copies are ONNX Runtime's own of the host, without streams.
    CreateDataTransfer = [](EpFactory*, void** transfer) -> Status* { return *transfer = nullptr, nullptr; };
    IsStreamAware = [](const EpFactory*) { return false; };
  }

  Api api;
  Table ep_api;
};

}  // namespace

extern "C" {

__attribute__((visibility("default"))) Status* CreateEpFactories(const char*, Table base, const Logger*,
                                                                 EpFactory** factories, size_t most, size_t* found) {
  *found = 0;
  Table table = GetApi::Call(base, kVersion);
  if (table == nullptr || most == 0) return nullptr;  // older than 1.23: ONNX Runtime says that no factory was made
  factories[(*found)++] = new Factory(table);
  return nullptr;
}

__attribute__((visibility("default"))) Status* ReleaseEpFactory(EpFactory* factory) {
  delete static_cast<Factory*>(factory);
  return nullptr;
}

}  // extern "C"
