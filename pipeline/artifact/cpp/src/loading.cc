#include "loading.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <tvm/ffi/extra/json.h>
#include <tvm/ffi/function.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <vector>

#include "manifest.h"
#include "tensors.h"

namespace relaxtune {

namespace ffi = tvm::ffi;
using ffi::Tensor;

namespace {

// A file in memory, page by page as it is read: weights would take their size twice otherwise.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path) {
    int file = open(path.c_str(), O_RDONLY);
    struct stat status {};
    if (file >= 0 && fstat(file, &status) == 0) size = static_cast<size_t>(status.st_size);
    void* mapped = size == 0 ? MAP_FAILED : mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0);
    if (file >= 0) close(file);
    if (mapped == MAP_FAILED) throw Error("it cannot be read", path, "copy the artifact again");
    data = static_cast<const char*>(mapped);
  }
  MappedFile(const MappedFile&) = delete;
  ~MappedFile() { munmap(const_cast<char*>(data), size); }

  const char* data = nullptr;
  size_t size = 0;
};

}  // namespace

// The loader takes a path that it has opened before for the same file, and two artifacts must not share one state: so
// the code gets a name that was never used.
ffi::Module LoadCode(const std::string& path) {
  std::string name = std::filesystem::temp_directory_path() / "relaxtune-XXXXXX";
  if (mkdtemp(name.data()) == nullptr) throw Error("no folder can be made", name, "set TMPDIR to one that is writable");
  std::filesystem::path folder(name), copy = folder / "model.so";
  try {
    std::filesystem::copy_file(path, copy);
    // The code calls TVM's library and does not name it: a program that loaded this library for itself alone (dlopen, ctypes,
    // a plug-in) has not made it known.
    if (dlopen("libtvm_ffi.so", RTLD_NOW | RTLD_NOLOAD | RTLD_GLOBAL) == nullptr) throw std::runtime_error(dlerror());
    ffi::Module module = ffi::Module::LoadFromFile(copy.string());
    std::filesystem::remove_all(folder);
    return module;
  } catch (const std::exception& e) {
    std::filesystem::remove_all(folder);
    throw Error(std::string("it cannot be loaded: ") + e.what(), path, "compile the model again");
  }
}

std::map<std::string, Tensor> LoadWeights(const std::string& path, DLDevice device) {
  std::map<std::string, Tensor> found;
  if (!std::filesystem::exists(path)) return found;
  // The format of safetensors: the header's size, the header as JSON, then the bytes of all tensors.
  MappedFile file(path);
  uint64_t header = 0;
  const Error damaged("it is no safetensors file", path, "compile the model again");
  if (file.size < sizeof(header)) throw damaged;
  std::memcpy(&header, file.data, sizeof(header));
  if (header > file.size - sizeof(header)) throw damaged;
  const std::map<std::string, std::string> names = {
      {"F64", "float64"}, {"F32", "float32"},   {"F16", "float16"}, {"BF16", "bfloat16"}, {"I64", "int64"},
      {"I32", "int32"},   {"I16", "int16"},     {"I8", "int8"},     {"U64", "uint64"},    {"U32", "uint32"},
      {"U16", "uint16"},  {"U8", "uint8"},      {"BOOL", "bool"},   {"F8_E4M3", "float8_e4m3fn"},
      {"F8_E5M2", "float8_e5m2"}};
  auto parsed = ffi::json::Parse(ffi::String(file.data + sizeof(header), header)).cast<ffi::json::Object>();
  const char* data = file.data + sizeof(header) + header;
  const uint64_t data_size = file.size - sizeof(header) - header;
  const ffi::Function copy = Runtime("TVMTensorCopyFromBytes");
  for (const auto& [key, value] : parsed) {
    std::string name = key.cast<ffi::String>();
    if (name == "__metadata__") continue;
    auto entry = value.cast<ffi::json::Object>();
    auto dtype = names.find(entry[ffi::String("dtype")].cast<ffi::String>());
    if (dtype == names.end()) throw Error("weight " + name + " has a dtype that is not known", path, damaged.fix);
    std::vector<int64_t> shape;
    for (const ffi::Any& size : entry[ffi::String("shape")].cast<ffi::json::Array>()) shape.push_back(size.cast<int64_t>());
    auto offsets = entry[ffi::String("data_offsets")].cast<ffi::json::Array>();
    auto begin = offsets[0].cast<int64_t>(), end = offsets[1].cast<int64_t>();
    Tensor tensor = Empty(ffi::Shape(shape), DtypeOf(dtype->second, path), device);
    bool inside = begin >= 0 && end >= begin && static_cast<uint64_t>(end) <= data_size;
    if (!inside || static_cast<size_t>(end - begin) != Bytes(*tensor.GetDLTensorPtr())) throw damaged;
    if (end != begin) copy(tensor, const_cast<void*>(static_cast<const void*>(data + begin)), static_cast<int64_t>(end - begin));
    found.emplace(name, tensor);
  }
  return found;
}

}  // namespace relaxtune
