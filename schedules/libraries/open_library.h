// How the calls of this folder find what they need when they first run: a vendor's library, and CUDA's driver.
#ifndef RELAXTUNE_OPEN_LIBRARY_H_
#define RELAXTUNE_OPEN_LIBRARY_H_

#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { DEVICE_CUDA = 2 };  // of DLPack, by which TVM names devices

typedef struct {
  void *from;
  const char *name;
  void *to;  // pointer to a pointer to a function
} Symbol;

// Returns a library by the loader's path, else from where the environment variable says; NULL when it is nowhere.
static inline void *open_library(const char *name, const char *variable) {
  void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  const char *path = getenv(variable);
  return library == NULL && path != NULL ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : library;
}

static inline void *open_driver(void) { return dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL); }

// Returns whether all symbols were found.
static inline int take_symbols(const Symbol *symbols, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    void *function = symbols[i].from != NULL ? dlsym(symbols[i].from, symbols[i].name) : NULL;
    if (function == NULL) return 0;
    memcpy(symbols[i].to, &function, sizeof function);
  }
  return 1;
}

#endif  // RELAXTUNE_OPEN_LIBRARY_H_
