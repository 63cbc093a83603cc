#include <relaxtune/artifact.h>
#include <relaxtune/artifact_c.h>

#include <algorithm>

struct relaxtune_artifact {
  relaxtune::Artifact artifact;
};

namespace {

thread_local std::string last_error;

// No exception leaves a C function.
template <typename F>
int Guarded(F&& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& e) {
    last_error = e.what();
  } catch (...) {
    last_error = "an exception of an unknown kind";
  }
  return 1;
}

const char* NameOf(const std::vector<relaxtune::TensorSpec>& specs, size_t number) {
  return number < specs.size() ? specs[number].name.c_str() : nullptr;
}

}  // namespace

extern "C" {

int relaxtune_load(const char* directory, const relaxtune_options* options, relaxtune_artifact** out) {
  return Guarded([&] {
    relaxtune::Options asked;
    if (options != nullptr)
      asked = {options->verify != 0, options->device, options->threads, options->host_outputs != 0,
               options->size_graphs != 0};
    *out = new relaxtune_artifact{relaxtune::Artifact::Load(directory, asked)};
  });
}

void relaxtune_free(relaxtune_artifact* artifact) { delete artifact; }

const char* relaxtune_last_error(void) { return last_error.c_str(); }

size_t relaxtune_input_count(const relaxtune_artifact* artifact) { return artifact->artifact.inputs().size(); }

size_t relaxtune_output_count(const relaxtune_artifact* artifact) { return artifact->artifact.outputs().size(); }

const char* relaxtune_input_name(const relaxtune_artifact* artifact, size_t number) {
  return NameOf(artifact->artifact.inputs(), number);
}

const char* relaxtune_output_name(const relaxtune_artifact* artifact, size_t number) {
  return NameOf(artifact->artifact.outputs(), number);
}

int relaxtune_run(relaxtune_artifact* artifact, const DLTensor* inputs, size_t count, void* stream,
                  DLManagedTensorVersioned** outputs) {
  return Guarded([&] {
    auto made = artifact->artifact.Run({inputs, inputs + count}, stream);
    std::transform(made.begin(), made.end(), outputs, [](auto& output) { return output.release(); });
  });
}

}  // extern "C"
