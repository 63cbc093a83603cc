// How the calls of this folder find what they need when they first run: a vendor's library, and CUDA's driver.
#ifndef RELAXTUNE_OPEN_LIBRARY_H_
#define RELAXTUNE_OPEN_LIBRARY_H_

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
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

// What is made once for a device. Never freed: the process may end after its CUDA context.
typedef struct Device {
  int ordinal;
  void *handle;  // of the library
  uint64_t workspace;
  struct Device *next;
} Device;

// Returns a device with the library's handle for it, by the list of those made so far; NULL when none can be made.
static inline Device *device_of(Device **devices, int ordinal, int (*create)(void **)) {
  for (Device *device = *devices; device != NULL; device = device->next) {
    if (device->ordinal == ordinal) return device;
  }
  void *handle = NULL;
  Device *device = create(&handle) == 0 ? calloc(1, sizeof *device) : NULL;
  if (device == NULL) return NULL;
  *device = (Device){ordinal, handle, 0, *devices};
  return *devices = device;
}

#endif  // RELAXTUNE_OPEN_LIBRARY_H_
