// What manifest.json says, as far as loading and running need it.
#ifndef RELAXTUNE_SRC_MANIFEST_H_
#define RELAXTUNE_SRC_MANIFEST_H_

#include <relaxtune/artifact.h>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace relaxtune {

struct CodeEntry {
  std::string file;
  std::vector<TensorSpec> inputs, outputs;
  std::vector<std::string> weights;
  bool cuda_graph;
  std::map<std::string, int64_t> sizes;  // of a shape bucket, by axis; none for the artifact's own code
};

// How padding is left out: by which input, and what the number of tokens is rounded up to.
struct Unpadding {
  size_t mask;
  int64_t multiple;
};

// A bound of an axis, or of a sum of axes: two expressions over names, and the table that sets it.
struct AxisLimit {
  std::string axis, sign, size, table;
};

// The integers that an input may hold which are looked up in a table.
struct IndexLimit {
  std::string input;
  int64_t least, most, rows;
  std::string table;
};

struct Manifest {
  std::string model, kind, arch, machine;
  std::vector<std::string> cpu_features;
  CodeEntry main;
  std::vector<CodeEntry> buckets;
  // Along which axes calls may be padded up to a bucket, and on which side; what padding of an input holds; its masks.
  std::map<std::string, std::string> sides;
  std::map<std::string, double> fills;
  std::vector<std::string> masks;
  std::map<std::string, int64_t> minima, maxima;
  std::vector<AxisLimit> limits;
  std::vector<IndexLimit> indices;
  std::optional<Unpadding> unpadding;
  std::map<std::string, std::pair<std::string, int64_t>> files;  // name -> sha256, bytes
};

// Read a manifest and check its own hash; with `verify` also every file against its hash.
Manifest ReadManifest(const std::string& directory, bool verify);

// Check the sizes and dtypes of a call, and indices on the host, as the Python runtime does. Returns the size of each symbolic axis.
std::map<std::string, int64_t> CheckInputs(const Manifest& manifest, const std::vector<DLTensor>& inputs);

DLDataType DtypeOf(const std::string& name, const std::string& where);

}  // namespace relaxtune

#endif  // RELAXTUNE_SRC_MANIFEST_H_
