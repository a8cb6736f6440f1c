"""One command for all, its help, and commands and trainings in one process."""

import json
import platform
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest
from tiny_run import environment

import meliad_like
from meliad_like.__main__ import COMMANDS
from meliad_like.command_line import Command, on_ignored_error

ROOT = Path(__file__).resolve().parent.parent

# All commands in one process: absl's global flags would collide.
HELP = """
import importlib, importlib.util, json, sys
texts = {}
for name in json.loads(sys.argv[1]):
    package = importlib.util.find_spec(f"meliad_like.{name}").submodule_search_locations
    command = importlib.import_module(f"meliad_like.{name}" + (".__main__" if package else "")).COMMAND
    subjects = {subject: command.help(subject) for subject in command._subjects}
    texts[name] = [command.help(), list(command.flags), sorted(command._outputs), subjects]
print(json.dumps(texts))
"""


@pytest.fixture(scope="module")
def texts():
    result = forked.run("-c", HELP, json.dumps(list(COMMANDS)))
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_an_example_and_every_flag_with_the_gin_files_first(texts, name):
    text, flags, *_ = texts[name]
    assert f"\n    meliad_like {name} " in text
    shown = re.findall(r"(?m)^  --(?:\[no\])?(\w+)", text)
    hidden = {"v", "verbosity"} | ({"gin_file", "gin_param"} - set(shown))
    assert sorted(shown) == sorted(set(flags) - hidden)
    if "gin_file" in shown:
        assert shown[:2] == ["gin_file", "gin_param"]
    assert "repeat this option" not in text


OUTPUTS = {"output", "heat_map", "save_carry"}
"""Flags that name a file or folder of results."""


@pytest.mark.parametrize("name", COMMANDS)
def test_every_output_is_checked_before_the_work(texts, name):
    _, flags, checked, _ = texts[name]
    assert OUTPUTS & set(flags) <= set(checked)


def test_an_output_that_can_not_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    words = ["--gin_file=size/tiny.gin", "--topology=cpu:1"]
    for path, message in (
        (f"{tmp_path}/file/plan.json", f"{tmp_path}/file is not a folder that can be written to"),
        (tmp_path, "is a folder: name a file in it"),
    ):
        done = forked.run("-m", "meliad_like.plan", *words, f"--output={path}")
        assert done.returncode == 2 and message in done.stderr and done.stdout == ""


def test_a_subject_has_help_of_its_own(texts):
    pages = texts["convert"][3]
    assert "--reverse" in pages["meliad"] and "--[no]reverse" not in pages["stablehlo"]
    assert all(f"meliad_like convert {name} " in page for name, page in pages.items())
    assert len(set(pages.values())) == len(pages)
    done = forked.run("-m", "meliad_like", "studies", "gates", "--help")
    assert "--split" in done.stdout and "--kind" not in done.stdout


def test_help_says_what_is_required_what_the_default_is_and_what_a_flag_is_for():
    command = Command(
        "Does something.", subjects=("one", "two"), used_by={"size": ("two",)}, no_effect={"gin_file": "x"}
    )
    command.string("folder", None, "Where.", required=True)
    command.integer("size", 3, "How much.", lower_bound=1)
    command.multi_enum("part", [], ["a", "b"], "Which.")
    command.bool("fast", True, "Whether to hurry.")
    assert command.help().splitlines() == [
        "Does something.",
        "",
        "Flags:",
        "  --gin_param=...",
        "      One binding on top of the files, such as DecoderConfig.num_layers=3.",
        "      Repeatable; the last wins.",
        "  --folder=...",
        "      Required. Where.",
        "  --size=...",
        "      For two: How much. Default: 3.",
        "  --part=a|b",
        "      Which.",
        "  --[no]fast",
        "      Whether to hurry. Default: true.",
    ]


def test_one_command_runs_all():
    listed = forked.run("-m", "meliad_like", "--help")
    assert listed.returncode == 0 and all(f"  {name} " in listed.stdout for name in COMMANDS)
    result = forked.run("-m", "meliad_like", "train")
    assert result.returncode == 2
    assert result.stderr == "error: --workdir is missing: name the folder of the run\n"
    result = forked.run("-m", "meliad_like", "plot", "--workdir=/no/such/run", "--gin_file=x")
    reason = "the figures are those of the run"
    assert (result.returncode, result.stderr) == (2, f"error: --gin_file has no effect here: {reason}\n")
    unknown = forked.run("-m", "meliad_like", "trian", "--workdir=x")
    message = "error: meliad_like has no command 'trian' (nearest: train); --help lists them\n"
    assert (unknown.returncode, unknown.stderr) == (2, message)


TWO = """
import sys
from meliad_like import describe
for words in (["1024", "TABLE3/"], ["no such"], ["--noconfig", *sys.argv[1:]]):
    sys.argv[1:] = words
    try:
        describe.COMMAND.run(describe.main)
    except SystemExit as ended:
        print("status", ended.code)
"""


def test_commands_run_one_after_the_other_in_one_process():
    flags = ["--gin_file=size/tiny.gin", "--gin_file=block_recurrent/fixed_skip.gin", "--vocabulary_size=256"]
    result = forked.run("-c", TWO, *flags)
    first, second, third = re.split(r"status (?:0|1|None)\n", result.stdout)[:3]
    assert first.splitlines() == [
        "block_recurrent/table3/states_1024  Rec:fixed:skip, 1024 states",
    ], result.stderr
    assert second == "no gin file or row has 'no such' in its name or description\n"
    assert re.search(r"parameters +│ +42,476 ", third)


IMPORTED = """
import sys
import meliad_like
print({"jax", "numpy", "absl"} & sys.modules.keys())
meliad_like.train, meliad_like.load
print({"tensorflow", "torch", "matplotlib"} & sys.modules.keys())
"""


def test_the_package_is_imported_in_no_time_and_knows_its_names():
    assert {"load", "prepare", "train", "evaluate", "RunConfig"} <= set(dir(meliad_like))
    with pytest.raises(AttributeError, match="has no attribute 'tarin'"):
        meliad_like.tarin  # noqa: B018
    result = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, cwd=ROOT)
    assert result.stdout == "set()\nset()\n", result.stderr


THREAD = """
import os, sys, threading
os.chdir(sys.argv[1])
failed = []
threading.excepthook = lambda hook: failed.append(hook.exc_value)
thread = threading.Thread(target=exec, args=(sys.argv[2], {}))
thread.start()
thread.join()
sys.exit(repr(failed[0]) if failed else 0)
"""


def test_ctrl_c_in_a_callback_ends_the_command(capsys):
    # A shell's background job ignores Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    on_ignored_error(SimpleNamespace(exc_type=RuntimeError, exc_value=RuntimeError("Event loop is closed")))
    with pytest.raises(KeyboardInterrupt):
        on_ignored_error(SimpleNamespace(exc_type=KeyboardInterrupt))
        for _ in range(1000):  # What interrupts the main thread doesn't end its sleep.
            time.sleep(0.01)
    signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == ""


def test_a_reader_that_ends_early_and_the_version():
    program = """
        import os, sys
        from meliad_like.command_line import closed_pipes
        read, write = os.pipe()
        os.close(read)
        os.dup2(write, 1)
        with closed_pipes():
            print("a line")
    """
    ended = forked.run("-c", textwrap.dedent(program))
    assert (ended.returncode, ended.stderr) == (141, "")
    assert re.fullmatch(r"\d+\.\d+.*\n", forked.run("-m", "meliad_like", "--version").stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_memory_that_a_step_frees_is_kept_for_the_next():
    program = """
        import resource
        import sys
        import threading
        from meliad_like.command_line import keep_freed_memory

        def step(number, size):
            arrays = [bytearray(size) for _ in range(number)]
            del arrays

        def pages(*sizes):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(10):
                # As XLA does, in a thread of its own.
                thread = threading.Thread(target=step, args=sizes)
                thread.start()
                thread.join()
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

        if sys.argv[1] == "keep":
            keep_freed_memory()
        # Many arrays, and one with all temporary arrays of a step.
        for sizes in ((10, 4 << 20), (1, 160 << 20)):
            pages(*sizes)
            print(pages(*sizes))
    """

    def pages(argument):
        arguments = [sys.executable, "-c", textwrap.dedent(program), argument]
        return [int(x) for x in subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True).stdout.split()]

    assert max(pages("keep")) < 100 < min(pages("give back"))


def test_the_guides_training_in_python_runs_in_a_thread(tmp_path):
    blocks = re.findall(r"(?s)```python\n(.*?)```", (ROOT / "docs" / "guide.md").read_text())
    (block,) = [block for block in blocks if "meliad_like.train(" in block]
    for split, text in (("train", "a rose is a rose\n" * 400), ("validation", "a rose"), ("test", "is a rose " * 30)):
        (tmp_path / "my_books" / split).mkdir(parents=True)
        (tmp_path / "my_books" / split / "book.txt").write_text(text)
    fewer = block.replace("num_steps=500", "num_steps=2")
    result = forked.run("-c", THREAD, str(tmp_path), fewer, environment=environment(num_devices=1))
    assert result.returncode == 0, result.stderr
    assert 0 < float(result.stdout.splitlines()[-1]) < 20
    assert (tmp_path / "runs/my_books/checkpoints/2").is_dir()


COMPLETE = """
source launch/completion.sh
meliad_like() {
    (($# > 1)) || printf '  plan    plans\\n  plot    plots\\n'
    (($# == 1)) || printf '  --gin_file=...\\n  --[no]gates\\n'
}
COMP_WORDS=(meliad_like "$@") COMP_CWORD=$#
_complete_meliad_like
echo "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("words", "found"), [(["pl"], "plan plot"), (["plo"], "plot"), (["plot", "--g"], "--gin_file= --gates")]
)
def test_bash_completes_commands_and_flags(words, found):
    result = subprocess.run(["bash", "-c", COMPLETE, "bash", *words], capture_output=True, text=True, cwd=ROOT)
    assert (result.stdout.strip(), result.stderr) == (found, "")
