"""A CUDA driver that does nothing, under Triton's real launch path: what is left is the host."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

SOURCE = r"""
#include <stdint.h>

long launches = 0;

int cuGetErrorString(int code, const char **text) { *text = "stub"; return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  /* Shared memory, registers and multiprocessors of an H200; the rest is not read. */
  *value = attribute == 97 ? 232448 : attribute == 12 ? 65536 : attribute == 16 ? 132 : 1;
  return 0;
}
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return 0; }
int cuCtxGetLimit(uint64_t *value, int limit) { *value = 0; return 0; }
int cuCtxSetLimit(int limit, uint64_t value) { return 0; }
int cuModuleLoadData(void **module, const void *data) { *module = (void *)2; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = (void *)3; return 0;
}
int cuFuncGetAttribute(int *value, int attribute, void *function) {
  *value = attribute == 0 ? 1024 : 0; return 0;
}
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuFuncSetCacheConfig(void *function, int config) { return 0; }
int cuPointerGetAttribute(uint64_t *value, int attribute, uint64_t pointer) {
  *value = pointer; return 0;
}
int cuLaunchKernelEx(const void *config, void *function, void **params, void **extra) {
  launches += 1; return 0;
}
int cuOccupancyMaxActiveClusters(int *count, void *function, const void *config) {
  *count = 1; return 0;
}
"""


@contextmanager
def stub_cuda(capability: int = 90) -> Iterator[ctypes.c_long]:
    """Triton's active driver is its own for NVIDIA GPUs, of this compute capability, on a libcuda
    that does nothing; tensors on the CPU stand for those on the device. Needs a C compiler.
    Yields the number of launches so far.

    For a process of its own: libcuda stays loaded.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "stub.c"), Path(folder, "libcuda.so.1")
        source.write_text(SOURCE)
        soname = f"-Wl,-soname,{library.name}"
        compiler = os.environ.get("CC", "gcc")
        subprocess.run(
            [compiler, "-O2", "-shared", "-fPIC", soname, "-o", library, source], check=True
        )
        loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        knobs.nvidia.libcuda_path = folder
        from triton.backends.nvidia.driver import CudaDriver

        class Driver(CudaDriver):
            def get_current_target(self) -> GPUTarget:
                return GPUTarget("cuda", capability, 32)

        driver = Driver()
        driver.get_current_device = lambda: 0
        driver.get_current_stream = lambda device: 0
        active = triton.runtime.driver._active
        triton.runtime.driver.set_active(driver)
        try:
            yield ctypes.c_long.in_dll(loaded, "launches")
        finally:
            triton.runtime.driver._active = active
