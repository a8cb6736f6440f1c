"""The flags of a command, its help, and the report of mistakes on its command line."""

import contextlib
import ctypes
import errno
import functools
import os
import re
import shlex
import shutil
import signal
import sys
import textwrap
import threading
from _thread import interrupt_main
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import app, flags, logging

from meliad_like.caches import keep_compiled_programs
from meliad_like.errors import StoreError, UserError, bucket_errors, is_full_disk, one_line, out_of_memory
from meliad_like.remote import Output, check_output

if TYPE_CHECKING:
    from meliad_like.config import RunConfig

REFUSED = (errno.EACCES, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EPERM, errno.EROFS)
"""Errors of the operating system about a path from the user. Commands check for missing files themselves."""

PATHS = ("workdir", "checkpoint", "folder", "input", "load_dir", "output", "store")
"""Flags of any command that name a file or folder. An empty path would be the current folder."""

INTERRUPTED = 128 + signal.SIGINT
"""The exit status in a shell of a program that SIGINT (Ctrl-C) has ended."""

GLIBC_OPTIONS = {-1: 2**31 - 1, -2: 64 << 20, -4: 0, -8: 1}
"""glibc's M_TRIM_THRESHOLD and M_TOP_PAD, in bytes, M_MMAP_MAX and M_ARENA_MAX.

All temporary arrays of a step are one array for glibc. It would map an array above 32 MiB by itself, at any threshold,
and one above 64 MiB also where each thread has an arena of its own; what is mapped by itself is always given back.
"""

SHARED: dict[str, tuple[str, Any, str, dict[str, Any]]] = {
    "checkpoint": ("string", None, "Checkpoint folder, or the --workdir of a training.", {"required": True}),
    "load_dir": ("string", None, "Folder of the model with which the run starts, ours or of transformers.", {}),
    "step": ("integer", None, "Which checkpoint. Default: the newest.", {}),
    "store": ("string", None, "Token store. Default: the one that the model was trained with.", {}),
    "split": ("string", "test", "train, validation or test.", {}),
    "document": ("multi_string", [], "Name of a document to read. Repeatable. Default: all.", {}),
    "document_tokens": ("integer", None, "First tokens to read of each document. Default: all.", {"lower_bound": 1}),
    "max_tokens": ("integer", None, "Tokens of a random subset to read. Default: all documents.", {"lower_bound": 1}),
    "vocabulary_size": ("integer", None, "Default: as store or config say.", {"lower_bound": 1}),
    "dtype": ("enum", "float32", "The dtype in which matrices are kept.", {"enum_values": ["float32", "bfloat16"]}),
    "batch_size": ("integer", 8, "Number of texts that are read at once.", {"lower_bound": 1}),
}
"""Flags that several commands have and that mean the same in all of them: type, default, help, other settings."""

CONFIG_OF_CHECKPOINT = "the config comes from the checkpoint; --gin_param changes it"
"""Why `gin_file` has no effect on commands that open a checkpoint."""
HELP = ("--help", "-h", "-help", "--helpfull", "--helpshort")


class Command:
    """A command: `COMMAND = Command(__doc__)`, flags (`STEP = COMMAND.integer("step", None, "")`), `COMMAND.run(main)`.

    The flags are the command's own, not absl's global ones, so that one process can import several commands. The
    methods that define flags are absl's `DEFINE_...`, and return objects with the flag's `value`.
    """

    def __init__(
        self,
        documentation: str | None,
        subjects: Sequence[str] | Mapping[str, str] = (),
        used_by: Mapping[str, Sequence[str]] | None = None,
        no_effect: Mapping[str, str] | None = None,
        words: bool = False,
    ):
        """
        Args:
          documentation: a full sentence, then examples and explanations, for `--help`.
          subjects: words of which the first argument must be one; it is passed to `main`. A mapping has a
            documentation of each, which `--help` after the word shows.
          used_by: the subjects for which a flag has an effect; with the others it is an error. Default: all.
          no_effect: the reason why `gin_file` or `gin_param` has no effect on this command, and is an error.
          words: whether arguments that are not flags, in any number, are passed to `main`.
        """
        self._documentation, self._subjects, self._words = documentation or "", subjects, words
        self._used_by, self._no_effect = used_by or {}, no_effect or {}
        self._outputs: dict[str, Output] = {}
        self.flags = values = flags.FlagValues()
        self.string = functools.partial(flags.DEFINE_string, flag_values=values)
        self.integer = functools.partial(flags.DEFINE_integer, flag_values=values)
        self.float = functools.partial(flags.DEFINE_float, flag_values=values)
        self.bool = functools.partial(flags.DEFINE_bool, flag_values=values)
        self.enum = functools.partial(flags.DEFINE_enum, flag_values=values)
        self.list = functools.partial(flags.DEFINE_list, flag_values=values)
        self.multi_string = functools.partial(flags.DEFINE_multi_string, flag_values=values)
        self.multi_enum = functools.partial(flags.DEFINE_multi_enum, flag_values=values)
        text = "A gin file, by path or as in gin/ (size/tiny.gin). Repeatable, in any order."
        self.gin_file = self.multi_string("gin_file", [], text)
        text = "One binding on top of the files, such as DecoderConfig.num_layers=3. Repeatable; the last wins."
        self.gin_param = self.multi_string("gin_param", [], text)
        values["verbosity"] = flags.FLAGS["verbosity"]

    def shared(self, name: str, text: str = "", **changes: Any) -> flags.FlagHolder:
        """A flag that other commands have, too (`SHARED`), with another text, default or setting where it needs one."""
        kind, default, help_text, settings = SHARED[name]
        settings = settings | changes
        default = settings.pop("default", default)
        return getattr(self, kind)(name, default, help=text or help_text, **settings)

    def output(self, name: str, text: str, kind: "Output" = "file", **settings: Any) -> flags.FlagHolder[str | None]:
        """A flag that names a file or folder for results. It is checked before `main` is called."""
        self._outputs[name] = kind
        return self.string(name, None, text, **settings)

    def read_config(self) -> "RunConfig":
        """The run described by `--gin_file` and `--gin_param`."""
        # Imported here, because the configs import jax, which takes seconds; mistyped flags are reported earlier.
        from meliad_like import config

        return config.parse(self.gin_file.value, self.gin_param.value)

    @property
    def gin_flags(self) -> str:
        """The command's --load_dir, --gin_file and --gin_param for another command, each after a space."""
        load_dir = [self.flags["load_dir"].value] if "load_dir" in self.flags and self.flags["load_dir"].value else []
        gin = {"load_dir": load_dir, "gin_file": self.gin_file.value, "gin_param": self.gin_param.value}
        return "".join(f" {shlex.quote(f'--{name}={value}')}" for name, values in gin.items() for value in values)

    def run(self, main: Callable[..., int | None]) -> None:
        """Parses the flags and exits with what `main` returns; a UserError is one line on stderr and exit status 2."""
        sys.unraisablehook = on_ignored_error
        with closed_pipes():
            app.run(functools.partial(self._report, main), flags_parser=self._parse)

    def help(self, subject: str | None = None) -> str:
        """The text of `--help`: the documentation, and all flags that have an effect, perhaps on one subject."""
        pages = self._subjects if isinstance(self._subjects, Mapping) else {}
        lines = [pages.get(subject or "", self._documentation).strip(), "", "Flags:"]
        for name in self.flags:
            users = self._used_by.get(name, ())
            if name in self._no_effect or self.flags[name] is self.flags["verbosity"]:
                continue
            if subject is None or not users or subject in users:
                lines += _flag_help(self.flags[name], users if subject is None else ())
        return "\n".join(lines)

    def _report(self, main: Callable[..., int | None], argv: list[str]) -> int | None:
        try:
            words = self._arguments(argv[1:])
            keep_freed_memory()
            keep_compiled_programs()
            return main(*words)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            # The interpreter's own clean-up crashes, with the report of a segmentation fault, while jax has work left.
            os._exit(INTERRUPTED)
        except Exception as error:
            if (message := self._message(error)) is None:
                raise
            return _fail(message)

    def _arguments(self, words: list[str]) -> list[str]:
        """The arguments for `main`. Raises a UserError for one that is not expected, and for flags without effect."""
        if unexpected := words[len(words) if self._words else bool(self._subjects) :]:
            raise UserError(f"unexpected argument {unexpected[0]!r}; flags are written --name=value")
        if empty := [name for name in PATHS if name in self.flags and self.flags[name].value in ("", [""])]:
            raise UserError(f"--{empty[0]}= is empty: is the variable set that it should hold?")
        if self._subjects and (not words or words[0] not in self._subjects):
            problem = f"not {words[0]!r}" if words else "which is missing"
            raise UserError(f"the first argument must be {' or '.join(self._subjects)}, {problem}")
        for name, kind in self._outputs.items():
            if (path := self.flags[name].value) is not None:
                check_output(path, name, kind)
        for name, reason in self._no_effect.items():
            if self.flags[name].value:
                raise UserError(f"--{name} has no effect here: {reason}")
        for name, subjects in self._used_by.items():
            if self.flags[name].present and words[0] not in subjects:
                raise UserError(f"--{name} has no effect on {words[0]}: it is for {' and '.join(subjects)}")
        return words

    def _message(self, error: Exception) -> object:
        """The message to print for an error; None: it is a defect, whose traceback is needed."""
        match error:
            case StoreError():
                return StoreError(error.folder, error.problem, self.gin_flags)
            case UserError():
                return error
            case OSError() if is_full_disk(error):
                return f"the disk is full: {error.filename or 'a file'} could not be written; free some space"
            case OSError() if error.errno in REFUSED and error.filename is not None:
                return f"{error.filename}: {os.strerror(error.errno)}; name another path"
            case RuntimeError():
                return out_of_memory(error)
        if isinstance(error, bucket_errors()):
            return f"the object store failed: {one_line(error)}; the same command tries again"
        return None

    def _parse(self, argv: list[str]) -> list[str]:
        if any(word in HELP for word in argv):
            print(self.help(next((word for word in argv[1:2] if word in self._subjects), None)))
            sys.exit(0)
        try:
            words = self.flags(argv)
        except flags.Error as error:
            missing = re.match(r"flag --(\w+)=None: ", str(error))
            sys.exit(_fail(f"--{missing[1]} is required: {self.flags[missing[1]].help}" if missing else error))
        # absl asks for this of every program; orbax and grain read flags of theirs.
        flags.FLAGS.mark_as_parsed()
        # jax logs every accelerator that it does not find; --verbosity=0 shows that, and warnings always show. Set here
        # because absl has INFO as the default of every program.
        if self.flags["verbosity"].using_default_value:
            flags.FLAGS.verbosity = logging.WARNING
        return words


def keep_freed_memory() -> None:
    """Lets the C library keep the memory that a training step on a CPU frees, for the next step.

    glibc would give it back to the system, which clears each page of it again, for up to a quarter of the step. A
    program calls it before its first thread, and so before most imports: a thread keeps the arena that it has.
    """
    with contextlib.suppress(OSError, AttributeError):  # another library than glibc
        libc = ctypes.CDLL(None)
        for option, value in GLIBC_OPTIONS.items():
            libc.mallopt(option, value)


def on_ignored_error(ignored: Any) -> None:
    """Repeats a Ctrl-C that Python ignores because it comes in a callback, such as jax's at a garbage collection."""
    if ignored.exc_type is KeyboardInterrupt:
        # After the callback.
        threading.Timer(0.01, interrupt_main).start()
    # tensorstore has it for each array of a checkpoint that could not be written, which is reported once.
    elif str(ignored.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(ignored)


@contextlib.contextmanager
def closed_pipes() -> Iterator[None]:
    """Ends the program without a traceback when the reader of its output ends before it, as `head` does."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Python would fail again when it flushes what is left.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


def _flag_help(flag: flags.Flag, subjects: Sequence[str]) -> list[str]:
    """The lines about a flag; it is for these subjects alone, if there are any."""
    choices = getattr(flag.parser, "enum_values", ["..."])
    usage = f"--[no]{flag.name}" if flag.boolean else f"--{flag.name}={'|'.join(choices)}"
    # absl adds the choices before the text, and to repeatable flags a remark after it.
    text = re.sub(r"^<.*?>: |;\s+repeat this option.*$", "", flag.help or "")
    if any("other than None" in validator.message for validator in flag.validators):
        text = f"Required. {text}"
    elif flag.default and "Default" not in text:
        text += f" Default: {','.join(flag.default) if isinstance(flag.default, list) else str(flag.default).lower()}."
    if subjects:
        text = f"For {', '.join(subjects)}: {text}"
    width, indent = min(shutil.get_terminal_size().columns, 120), " " * 6
    return [f"  {usage}", *textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent)]


def _fail(message: object) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2
