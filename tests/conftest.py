"""Every test runs on eight fake CPU devices: set before jax is imported anywhere, and inherited by subprocesses.

TEST_PLATFORM=cuda (or tpu) runs tests that need one device on an accelerator, such as those of the golden arrays.
"""

import atexit
import gc
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

# The tests' models compute for milliseconds after seconds of compilation, which takes less than half as long without
# LLVM's optimisations, half of that without the emitters that XLA lowers fusions by, and a fifth less in one piece
# instead of 32. The results differ in rounding alone: what is equal bit for bit stays so, and the golden arrays'
# tolerances hold.
FLAGS = ["--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
    # Later versions may not know them, and XLA ends the process where it meets a flag that it doesn't know.
    FLAGS += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]

os.environ["JAX_PLATFORMS"] = os.environ.get("TEST_PLATFORM", "cpu")
if os.environ["JAX_PLATFORMS"] != "cpu":
    # An accelerator's default rounds float32 factors to about three digits.
    os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])
# The lines of our source that a program names would be a part of its lowering.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# Read when gcsfs is imported: otherwise it asks Google, at every access, what kind of bucket the fake one is.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
# What one process of a test session has compiled (the test runner's, or a subprocess of a test), the others load.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="meliad_like_compiled_")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

# jaxtyping imports jax, so it comes after the flags.
import jax  # noqa: E402
import jaxtyping  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import shape_checks  # noqa: E402
from checkouts import PACKAGING  # noqa: E402
from fake_gcs import bucket, server  # noqa: E402, F401

# Annotated shapes are checked in every call. What JAX computes with may be an array of numpy's as well.
jaxtyping.Array = jax.Array | np.ndarray
shape_checks.install([f"meliad_like.{package}" for package in ("data", "layers", "mixers", "models")])

# It imports the package, so it comes after the hook.
import larger_rounding  # noqa: E402

larger_rounding.install()

_ROOT = Path(__file__).resolve().parent.parent


SHARES = {
    "test_adaptive.py": 3,
    "test_attention_kernel.py": 6,
    "test_attention_kernel_states.py": 4,
    "test_beam_search.py": 6,
    "test_careless_configs.py": 2,
    "test_checkpoints.py": 3,
    "test_cost.py": 4,
    "test_dense_memory.py": 4,
    "test_docs.py": 4,
    "test_evaluate_command.py": 3,
    "test_evaluation.py": 3,
    "test_exact_softmax.py": 14,
    "test_experiments.py": 6,
    "test_experiments_shortformer.py": 3,
    "test_export.py": 2,
    "test_flops.py": 2,
    "test_generation.py": 6,
    "test_gin_files.py": 6,
    "test_golden_hybrids.py": 2,
    "test_golden_llama.py": 3,
    "test_golden_melodi.py": 2,
    "test_golden_models.py": 2,
    "test_gradients.py": 12,
    "test_harness.py": 10,
    "test_history_commands.py": 3,
    "test_history_evaluation.py": 3,
    "test_history_reader.py": 3,
    "test_history_scoring.py": 2,
    "test_history_selector.py": 2,
    "test_history_selector_scorer.py": 2,
    "test_initialisation.py": 3,
    "test_interventions.py": 4,
    "test_kernel_check.py": 6,
    "test_launch_two_processes.py": 3,
    "test_layers.py": 2,
    "test_library.py": 12,
    "test_linear_recurrence.py": 6,
    "test_meliad_gin.py": 3,
    "test_melodi.py": 6,
    "test_memory.py": 9,
    "test_mesh.py": 3,
    "test_mixers.py": 8,
    "test_model.py": 9,
    "test_optimizers.py": 3,
    "test_own_decoders.py": 3,
    "test_plan.py": 3,
    "test_positions.py": 4,
    "test_prepare.py": 4,
    "test_pretrained_gin.py": 3,
    "test_pretrained_runs.py": 6,
    "test_protocols.py": 4,
    "test_published_models.py": 7,
    "test_published_opening.py": 7,
    "test_recurrence_kernel.py": 12,
    "test_recurrent_pretrained.py": 8,
    "test_released_mixers.py": 4,
    "test_rg_lru.py": 3,
    "test_sampling.py": 3,
    "test_sharded_families.py": 11,
    "test_sharded_training.py": 3,
    "test_shortformer.py": 6,
    "test_simulated_kernel.py": 5,
    "test_smoke.py": 4,
    "test_stages.py": 6,
    "test_studies.py": 3,
    "test_studies_gates.py": 2,
    "test_table_rows.py": 4,
    "test_token_ids.py": 2,
    "test_training_faults.py": 4,
    "test_training_loop.py": 6,
    "test_windows.py": 3,
}
"""The files of which launch/test.sh without `--all` runs only every n-th case of each test with several cases."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks the cases of `SHARES` that the short run leaves out. Each test of a file begins with another case, so that
    each model of a file is in some tests, and each test has some models."""
    tests: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if item.path.name in SHARES and not item.get_closest_marker("exhaustive"):
            tests.setdefault((item.path.name, item.originalname), []).append(item)
    for number, ((file, _), cases) in enumerate(tests.items()):
        for i, item in enumerate(cases):
            if len(cases) > 1 and (i + number) % min(SHARES[file], len(cases)):
                item.add_marker(pytest.mark.thorough)


def pytest_collection_finish():
    """What imports and collection leave lives to the end: the garbage collector need not visit it again."""
    gc.collect()
    gc.freeze()
    # Tracing makes many objects that live: by default the collector is a tenth of the tests' time.
    gc.set_threshold(200_000)


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_programs():
    """Linux gives a process 65,530 mapped areas (vm.max_map_count), of which the programs of all tests take 63,000."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """The source distribution, and the wheel that is made from it."""
    folder = tmp_path_factory.mktemp("built")
    # A copy of what git would give others: setuptools writes build/ and *.egg-info beside setup.py.
    tracked = [*PACKAGING, "meliad_like", "gin", "CHANGELOG.md", "CITATION.cff", "LICENSE"]
    source = folder / "source"
    source.mkdir()
    subprocess.run(["cp", "-r", *(str(_ROOT / name) for name in tracked), source], check=True)
    sdist = "import setuptools.build_meta as build; build.build_sdist('..')"
    subprocess.run([sys.executable, "-c", sdist], cwd=source, capture_output=True, check=True)
    (archive,) = folder.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, archive],
        check=True,
        env=os.environ | {"PIP_NO_INDEX": "1"},
    )
    (wheel,) = folder.glob("*.whl")
    return archive, wheel
