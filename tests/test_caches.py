"""Compiled programs in the user's cache directory."""

import os
import sys
from types import SimpleNamespace

import pytest

from meliad_like import caches

VARIABLES = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The user's cache directory, in an environment that says nothing about compiled programs, before jax is loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in VARIABLES:
        # Set first, so that what a test leaves there is removed.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "jax")
    return tmp_path / "cache" / "meliad_like" / "compiled"


class Config(SimpleNamespace):
    """jax's config in a program that has jax."""

    jax_compilation_cache_dir = None
    jax_persistent_cache_min_compile_time_secs = 1.0

    def update(self, name, value):
        setattr(self, name, value)


def test_a_command_keeps_what_it_compiles_and_removes_the_oldest(cache, monkeypatch):
    monkeypatch.setattr(caches, "MOST_BYTES", 3 * len("programs"))
    caches.keep_compiled_programs()
    (folder,) = cache.iterdir()
    assert [os.environ[name] for name in VARIABLES] == [str(folder), "0.1"]
    for age in range(4):
        (program := folder / f"{age}-cache").write_text("programs")
        os.utime(program, (2e9 - age, 2e9 - age))
    del os.environ[VARIABLES[0]]
    caches.keep_compiled_programs()
    assert sorted(path.name for path in folder.iterdir()) == ["0-cache", "1-cache", "2-cache"]


def test_a_library_call_leaves_the_environment_and_the_choices_of_the_program_alone(cache, monkeypatch):
    def after(**settings):
        config = Config(**settings)
        monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(config=config))
        caches.keep_compiled_programs()
        assert not set(VARIABLES) & set(os.environ)
        return config.jax_compilation_cache_dir, config.jax_persistent_cache_min_compile_time_secs

    folder, seconds = after()
    assert folder.startswith(str(cache)) and seconds == 0.1
    assert after(jax_compilation_cache_dir="mine") == ("mine", 1)
    assert after(jax_persistent_cache_min_compile_time_secs=5) == (folder, 5)


@pytest.mark.parametrize("value", ["", "elsewhere"])
def test_the_variable_of_jax_wins(cache, monkeypatch, value):
    monkeypatch.setenv(VARIABLES[0], value)
    caches.keep_compiled_programs()
    assert os.environ[VARIABLES[0]] == value and not cache.exists()


def test_without_a_usable_home_nothing_is_kept(cache, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    caches.keep_compiled_programs()
    assert VARIABLES[0] not in os.environ
