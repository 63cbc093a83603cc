#include "manifest.h"

#include <sys/utsname.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/extra/json.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <set>
#include <sstream>

#include "padding.h"
#include "sha256.h"
#include "tensors.h"

namespace relaxtune {
namespace {

namespace fs = std::filesystem;
namespace json = tvm::ffi::json;
using tvm::ffi::Any;
using tvm::ffi::String;

constexpr char kDamaged[] = "copy the artifact again, or compile the model again";
constexpr int64_t kFormatVersion = 1;

// The text of a JSON value as Python's json.dumps(sort_keys=True, separators=(",", ":")) has it, numbers as they are
// written. The manifest's own hash is the one of this text, without its last key.
class Canonical {
 public:
  explicit Canonical(const std::string& text) : text_(text) {}

  std::string Value(bool top = false) {
    Space();
    if (At() == '{') return Members(top);
    if (At() == '[') return Items();
    if (At() == '"') return Text();
    size_t start = at_;
    while (at_ < text_.size() && !std::strchr(",]} \n\r\t", text_[at_])) ++at_;
    return text_.substr(start, at_ - start);
  }

 private:
  char At() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  void Space() {
    while (at_ < text_.size() && std::strchr(" \n\r\t", text_[at_])) ++at_;
  }
  // Step over a comma, and over the closing sign; whether the value goes on.
  bool More(char closing) {
    Space();
    if (At() == ',') ++at_, Space();
    if (At() != closing && At() != '\0') return true;
    ++at_;
    return false;
  }
  std::string Text() {
    size_t start = at_++;
    while (at_ < text_.size() && text_[at_] != '"') at_ += text_[at_] == '\\' ? 2 : 1;
    return text_.substr(start, ++at_ - start);
  }
  std::string Members(bool top) {
    std::vector<std::pair<std::string, std::string>> members;
    ++at_;
    while (More('}')) {
      std::string key = Text();
      Space(), ++at_;
      std::string value = Value();
      if (!top || key != "\"manifest_sha256\"") members.emplace_back(key.substr(1, key.size() - 2), value);
    }
    std::sort(members.begin(), members.end());
    std::string joined;
    for (const auto& [key, value] : members) joined += (joined.empty() ? "\"" : ",\"") + key + "\":" + value;
    return "{" + joined + "}";
  }
  std::string Items() {
    std::string joined;
    ++at_;
    while (More(']')) {
      joined += joined.empty() ? "" : ",";
      joined += Value();
    }
    return "[" + joined + "]";
  }

  const std::string& text_;
  size_t at_ = 0;
};

json::Object Member(const json::Object& object, const char* key) { return object[String(key)].cast<json::Object>(); }

std::vector<std::string> Texts(const Any& list) {
  std::vector<std::string> found;
  for (const Any& one : list.cast<json::Array>()) found.push_back(one.cast<String>());
  return found;
}

std::vector<TensorSpec> Specs(const Any& list) {
  std::vector<TensorSpec> found;
  for (const Any& one : list.cast<json::Array>()) {
    auto object = one.cast<json::Object>();
    TensorSpec spec{object[String("name")].cast<String>(), object[String("dtype")].cast<String>(), {}};
    for (const Any& axis : object[String("shape")].cast<json::Array>()) {
      if (auto size = axis.try_cast<int64_t>()) spec.shape.push_back({*size, ""});
      else spec.shape.push_back({-1, axis.cast<String>()});
    }
    found.push_back(std::move(spec));
  }
  return found;
}

std::map<std::string, int64_t> Numbers(const json::Object& object) {
  std::map<std::string, int64_t> found;
  for (const auto& [key, value] : object) found[key.cast<String>()] = value.cast<int64_t>();
  return found;
}

Manifest Parse(const json::Object& body, const std::string& where) {
  Manifest found;
  auto target = Member(body, "target");
  found.model = body[String("model")].cast<String>();
  found.kind = target[String("kind")].cast<String>();
  found.arch = target[String("arch")].cast<String>();
  auto versions = Member(body, "versions");
  if (versions.count(String("machine"))) found.machine = versions[String("machine")].cast<String>();
  found.cpu_features = Texts(target[String("cpu_features")]);
  found.main = {"model.so", Specs(body[String("inputs")]), Specs(body[String("outputs")]),
                Texts(body[String("weights")]), target[String("cuda_graph")].cast<bool>(), {}};
  found.maxima = Numbers(Member(body, "maxima"));
  if (body.count(String("minima"))) found.minima = Numbers(Member(body, "minima"));
  if (body.count(String("limits")) && body[String("limits")] != nullptr) {
    for (const Any& one : body[String("limits")].cast<json::Array>()) {
      auto limit = one.cast<json::Object>();
      auto text = [&](const char* key) -> std::string { return limit[String(key)].cast<String>(); };
      found.limits.push_back({text("axis"), text("sign"), text("size"), text("table")});
    }
    for (const Any& one : body[String("indices")].cast<json::Array>()) {
      auto limit = one.cast<json::Object>();
      auto number = [&](const char* key) { return limit[String(key)].cast<int64_t>(); };
      found.indices.push_back({limit[String("input")].cast<String>(), number("least"), number("most"), number("rows"),
                               limit[String("table")].cast<String>()});
    }
  } else {
    const auto symbolic = [](const TensorSpec& spec) {
      return std::any_of(spec.shape.begin(), spec.shape.end(), [](const Axis& axis) { return axis.size < 0; });
    };
    if (std::any_of(found.main.inputs.begin(), found.main.inputs.end(), symbolic))
      std::cerr << "relaxtune: " << where << " is of a version that did not keep the limits of its axes: sizes beyond a "
                << "table of the model are not refused; compile it again" << std::endl;
  }
  if (body.count(String("unpadding")) && body[String("unpadding")] != nullptr) {
    auto unpadding = Member(body, "unpadding");
    std::string mask = unpadding[String("mask")].cast<String>();
    size_t place = 0;
    while (place < found.main.inputs.size() && found.main.inputs[place].name != mask) ++place;
    if (place == found.main.inputs.size()) throw Error("its mask " + mask + " is no input", where, kDamaged);
    found.unpadding = {place, unpadding[String("multiple")].cast<int64_t>()};
  }
  if (body[String("buckets")] != nullptr) {
    auto buckets = Member(body, "buckets");
    found.masks = Texts(buckets[String("masks")]);
    for (const auto& [name, fill] : Member(buckets, "fills")) found.fills[name.cast<String>()] = fill.cast<double>();
    for (const Any& one : buckets[String("padding")].cast<json::Array>()) {
      auto axis = one.cast<json::Object>();
      if (axis[String("side")] != nullptr)
        found.sides[axis[String("axis")].cast<String>()] = axis[String("side")].cast<String>();
    }
    for (const Any& one : buckets[String("entries")].cast<json::Array>()) {
      auto entry = one.cast<json::Object>();
      found.buckets.push_back({entry[String("file")].cast<String>(), Specs(entry[String("inputs")]),
                               Specs(entry[String("outputs")]), Texts(entry[String("weights")]),
                               entry[String("cuda_graph")].cast<bool>(), Numbers(Member(entry, "sizes"))});
    }
  }
  for (const auto& [name, entry] : Member(body, "files")) {
    auto file = entry.cast<json::Object>();
    found.files[name.cast<String>()] = {file[String("sha256")].cast<String>(), file[String("bytes")].cast<int64_t>()};
  }
  return found;
}

std::pair<std::string, int64_t> HashFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  Sha256 hash;
  int64_t size = 0;
  std::vector<char> chunk(1 << 20);
  while (file.read(chunk.data(), chunk.size()), file.gcount() > 0) {
    hash.Update(chunk.data(), file.gcount());
    size += file.gcount();
  }
  return {hash.Hex(), size};
}

void CheckFiles(const Manifest& manifest, const std::string& directory) {
  for (const auto& [name, expected] : manifest.files) {
    std::string path = directory + "/" + name;
    if (!fs::is_regular_file(path)) throw Error("the artifact lacks this file", path, kDamaged);
    if (HashFile(path) != expected)
      throw Error("it was changed after it was written: its sha256 is not the manifest's", path, kDamaged);
  }
  const std::set<std::string> own = {"manifest.json", "manifest.sig"};
  for (const auto& entry : fs::directory_iterator(directory)) {
    std::string name = entry.path().filename();
    if (!manifest.files.count(name) && !own.count(name))
      throw Error("the manifest does not know this file", entry.path(), "remove it");
  }
}

// Names of the kernel and of LLVM for the same instructions, without their dots, dashes and underscores.
std::string Feature(std::string name) {
  const auto joins = [](char c) { return c == '.' || c == '-' || c == '_'; };
  name.erase(std::remove_if(name.begin(), name.end(), joins), name.end());
  const std::map<std::string, std::string> known = {{"pni", "sse3"}, {"abm", "lzcnt"}, {"bmi1", "bmi"}};
  auto other = known.find(name);
  return other == known.end() ? name : other->second;
}

void CheckProcessor(const Manifest& manifest, const std::string& directory) {
  utsname system{};
  uname(&system);
  if (!manifest.machine.empty() && manifest.machine != system.machine)
    throw Error("it is for " + manifest.machine + " processors, this machine is " + system.machine, directory,
                "compile it for this one");
  std::ifstream info("/proc/cpuinfo");
  std::string line;
  while (std::getline(info, line) && line.rfind("flags", 0) != 0) continue;
  if (line.rfind("flags", 0) != 0) return;  // not an x86 processor
  std::set<std::string> here;
  std::istringstream flags(line.substr(line.find(':') + 1));
  for (std::string flag; flags >> flag;) here.insert(Feature(flag));
  for (const std::string& needed : manifest.cpu_features)
    if (!here.count(Feature(needed)))
      throw Error("it was compiled for the processor " + manifest.arch + "; this machine's lacks " + needed, directory,
                  "compile the model here");
}

bool IsName(const std::string& axis) { return axis.find_first_of(" +-*/()") == std::string::npos; }

// Whether an axis may have no places: the length of a cache may before its first token; tokens may not.
bool MayBeEmpty(const std::string& axis, const std::vector<TensorSpec>& specs) {
  for (const TensorSpec& spec : specs)
    for (size_t place = 0; place < spec.shape.size(); ++place)
      if (spec.shape[place].name == axis && (spec.shape.size() <= 2 || place == 0)) return false;
  return true;
}

std::string Text(const TensorSpec& spec) {
  std::string text = spec.name + ": " + spec.dtype + "[";
  for (size_t i = 0; i < spec.shape.size(); ++i) {
    const Axis& axis = spec.shape[i];
    text += (i ? ", " : "") + (axis.size < 0 ? axis.name : std::to_string(axis.size));
  }
  return text + "]";
}

void CheckTables(const Manifest& manifest, const std::map<std::string, int64_t>& sizes) {
  for (const AxisLimit& limit : manifest.limits) {
    auto size = SizeOf({-1, limit.axis}, sizes), bound = SizeOf({-1, limit.size}, sizes);
    bool least = limit.sign == ">=";
    if (limit.sign == "=" || !size || !bound || (least ? *size >= *bound : *size <= *bound)) continue;
    throw Error("axis " + limit.axis + " has size " + std::to_string(*size) + ", " +
                    (limit.table.empty() ? "the graph" : limit.table) + " takes " + std::to_string(*bound) +
                    (least ? " or more" : " at most"),
                manifest.model, least ? "give larger inputs" : "give smaller inputs");
  }
}

// Check what is looked up in tables, where it is in the host's memory.
void CheckIndices(const Manifest& manifest, const std::vector<DLTensor>& inputs) {
  for (const IndexLimit& limit : manifest.indices) {
    const auto& specs = manifest.main.inputs;
    size_t place = 0;
    while (place < specs.size() && specs[place].name != limit.input) ++place;
    if (place == specs.size() || !OnHost(inputs[place]) || !IsCompact(inputs[place])) continue;
    const DLTensor& given = inputs[place];
    const char* start = Start(given);
    for (size_t at = 0, step = given.dtype.bits / 8; at < Bytes(given); at += step) {
      double value = Number(start + at, given.dtype);
      if (value >= limit.least && value <= limit.most) continue;
      throw Error("input " + limit.input + " has the value " + std::to_string(static_cast<int64_t>(value)) + ", " +
                      limit.table + " has " + std::to_string(limit.rows) + " rows and takes " +
                      std::to_string(limit.least) + " to " + std::to_string(limit.most),
                  manifest.model, "give indices of its rows");
    }
  }
}

}  // namespace

Manifest ReadManifest(const std::string& directory, bool verify) {
  std::string path = directory + "/manifest.json";
  if (!fs::is_directory(directory))
    throw Error("this is no artifact", directory, "name the directory that `relaxtune compile --out` wrote");
  if (!fs::is_regular_file(path)) throw Error("this is no artifact: it has no manifest.json", directory, "");
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file) throw Error("it cannot be read", path, kDamaged);
  String problem;
  Any parsed = json::Parse(text, &problem);
  auto body = parsed.try_cast<json::Object>();
  if (!body || !body->count(String("format_version")) || !body->count(String("manifest_sha256")))
    throw Error("it is not the manifest of an artifact: " + std::string(problem), path, kDamaged);
  auto version = (*body)[String("format_version")].try_cast<int64_t>();
  if (version != kFormatVersion)
    throw Error("its format version is not " + std::to_string(kFormatVersion) + ", which this library reads", path,
                "compile the model again, or take the library of the relaxtune that wrote it");
  Sha256 hash;
  std::string canonical = Canonical(text).Value(true);
  hash.Update(canonical.data(), canonical.size());
  if ((*body)[String("manifest_sha256")].cast<String>() != hash.Hex())
    throw Error("it was changed after it was written: its content is not what its sha256 states", path, kDamaged);
  Manifest manifest;
  try {
    manifest = Parse(*body, path);
  } catch (const tvm::ffi::Error& e) {
    throw Error("it is damaged: " + std::string(e.message()), path, kDamaged);
  }
  for (const auto& [name, entry] : manifest.files)
    if (fs::path(name).filename() != name) throw Error("it names " + name + ", no file of the artifact", path, kDamaged);
  if (verify) CheckFiles(manifest, directory);
  CheckProcessor(manifest, directory);
  return manifest;
}

DLDataType DtypeOf(const std::string& name, const std::string& where) {
  try {
    return tvm::ffi::StringToDLDataType(name);
  } catch (const tvm::ffi::Error&) {
    throw Error("no dtype is called " + name, where, kDamaged);
  }
}

std::map<std::string, int64_t> CheckInputs(const Manifest& manifest, const std::vector<DLTensor>& inputs) {
  const auto& specs = manifest.main.inputs;
  std::string takes = "the model takes ";
  for (size_t i = 0; i < specs.size(); ++i) takes += (i ? ", " : "") + Text(specs[i]);
  if (inputs.size() != specs.size())
    throw Error(std::to_string(inputs.size()) + " inputs instead of " + std::to_string(specs.size()), manifest.model,
                takes);
  std::map<std::string, int64_t> sizes;
  for (size_t i = 0; i < specs.size(); ++i) {
    const TensorSpec& spec = specs[i];
    const DLTensor& given = inputs[i];
    std::string where = manifest.model + ", input " + spec.name;
    if (std::string got = tvm::ffi::DLDataTypeToString(given.dtype); got != spec.dtype)
      throw Error("expected dtype " + spec.dtype + ", got " + got, where, takes);
    bool fits = static_cast<size_t>(given.ndim) == spec.shape.size();
    std::string got;
    for (int axis = 0; axis < given.ndim; ++axis) {
      got += (axis ? "x" : "") + std::to_string(given.shape[axis]);
      if (!fits) continue;
      const Axis& expected = spec.shape[axis];
      // An axis such as "past + new" is computed inside the code, which checks it itself.
      if (expected.size < 0 && !IsName(expected.name)) continue;
      int64_t size = expected.size;
      if (size < 0) size = sizes.emplace(expected.name, given.shape[axis]).first->second;
      fits = size == given.shape[axis];
    }
    if (!fits) throw Error("got shape " + (got.empty() ? "of a scalar" : got), where, takes);
  }
  for (const auto& [axis, size] : sizes) {
    if (size == 0 && !MayBeEmpty(axis, specs))
      throw Error("axis " + axis + " has size 0, expected 1 or more", manifest.model, takes);
    auto least = manifest.minima.find(axis);
    if (least != manifest.minima.end() && size < least->second)
      throw Error("axis " + axis + " has size " + std::to_string(size) + ", expected " +
                      std::to_string(least->second) + " or more, the room that poolings and convolutions need",
                  manifest.model, "give larger inputs");
    auto most = manifest.maxima.find(axis);
    if (most != manifest.maxima.end() && size > most->second)
      throw Error("axis " + axis + " has size " + std::to_string(size) + ", the profile that it was compiled with has " +
                      std::to_string(most->second) + " at most",
                  manifest.model, "compile with a larger profile");
  }
  CheckTables(manifest, sizes);
  CheckIndices(manifest, inputs);
  return sizes;
}

}  // namespace relaxtune
