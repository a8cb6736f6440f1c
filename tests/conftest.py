"""Every test runs on eight fake CPU devices: set before jax is imported anywhere, and inherited by subprocesses."""

import atexit
import os
import shutil
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
# The tests' models run for milliseconds after seconds of compilation: without LLVM's optimisations that takes half as
# long. The results are the same to rounding; what is equal bit for bit stays so.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)
# What one process of a test session has compiled (the test runner's, or a subprocess of a test), the others load.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="meliad_like_compiled_")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
