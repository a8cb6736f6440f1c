"""Continues a prompt of any length.

    meliad_like generate --checkpoint=runs/quickstart --prompt_file=BOOK.txt --tokens=500
    meliad_like generate --checkpoint=runs/quickstart --document=urllib --echo=300 --temperature=0.7

The cost of a token does not depend on its position. --save_carry keeps what the model remembers, to resume from later.
"""

import sys
import time
from pathlib import Path

from meliad_like.command_line import CONFIG_OF_CHECKPOINT, Command
from meliad_like.errors import UserError, reading

COMMAND = Command(__doc__, no_effect={"gin_file": CONFIG_OF_CHECKPOINT})
CHECKPOINT = COMMAND.shared("checkpoint", "Folder of ours or of transformers.")
STEP = COMMAND.shared("step")
DTYPE = COMMAND.shared("dtype")
PROMPT = COMMAND.string("prompt", None, "Text to continue.")
PROMPT_FILE = COMMAND.string("prompt_file", None, "UTF-8 file with the text to continue, of any length.")
DOCUMENT = COMMAND.string("document", None, "Name of a document of the token store whose beginning is continued.")
DOCUMENT_TOKENS = COMMAND.shared("document_tokens", "Tokens to read of --document.", default=2000)
STORE = COMMAND.shared("store")
ECHO = COMMAND.integer("echo", 0, "Show this number of last characters of the prompt first.", lower_bound=0)
TOKENS = COMMAND.integer("tokens", 200, "Tokens to write, at most.", lower_bound=0)
TEMPERATURE = COMMAND.float("temperature", 1.0, "Below 1: more predictable; 0: always the most likely token.")
TOP_K = COMMAND.integer("top_k", 0, "Sample from this number of most likely tokens; 0: from all.")
TOP_P = COMMAND.float("top_p", 1.0, "Sample from the most likely tokens that reach this probability together.")
SEED = COMMAND.integer("seed", None, "Default: 0, or that in --load_carry.", lower_bound=0, upper_bound=2**32 - 1)
STOP_AT_END = COMMAND.bool("stop_at_end", True, "Whether a document's end ends the text, or is never sampled.")
SAVE_CARRY = COMMAND.output("save_carry", "File for the carry, to resume from later.")
LOAD_CARRY = COMMAND.string("load_carry", None, "File of --save_carry to resume from; a prompt is read next.")


def main() -> None:
    prompt = _given_text()
    saves = SAVE_CARRY.value is not None
    # Imported here, because jax takes seconds to import; mistyped flags are reported earlier.
    import jax

    from meliad_like.generation.sampling import SamplingConfig
    from meliad_like.library import load
    from meliad_like.run.text import read_document

    sampling = SamplingConfig(TEMPERATURE.value, TOP_K.value, TOP_P.value)
    lm = load(CHECKPOINT.value, step=STEP.value, gin_params=COMMAND.gin_param.value, dtype=DTYPE.value)
    if prompt is None:
        prompt = read_document(lm.opened, STORE.value, DOCUMENT.value, DOCUMENT_TOKENS.value)
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]  # independent of the locale
    if ECHO.value:
        print(f"--- read, up to here:\n{prompt[-ECHO.value :]}\n--- written:")
    state = lm.begin() if LOAD_CARRY.value is None else lm.resume(LOAD_CARRY.value)
    before, began = state.num_tokens, time.perf_counter()
    state = lm.read(prompt, state)
    jax.block_until_ready(state.batch_of_one.carry)
    num_read, read_seconds = state.num_tokens - before, time.perf_counter() - began
    moments, counts = [], []
    for piece in lm.stream(state, TOKENS.value, seed=SEED.value, stop_at_end=STOP_AT_END.value, **vars(sampling)):
        print(piece.text, end="", flush=True)
        state = piece.state
        moments.append(time.perf_counter())
        counts.append(len(piece.tokens))
    if not saves:
        print(state.unfinished.decode(errors="replace"), end="", flush=True)
    # The first chunk waits for the compiler.
    rate = f", {sum(counts[1:]) / (moments[-1] - moments[0]):.0f} tokens/s" if len(moments) > 1 else ""
    at_once = ": the model ended the document at once" if sum(counts) == 1 and state.batch_of_one.ended.all() else ""
    # On stderr, so that the outputs of two runs with a saved carry between them join to the output of one run.
    print(f"\nread {num_read} tokens in {read_seconds:.1f} s, wrote {sum(counts)}{rate}{at_once}", file=sys.stderr)
    if saves:
        state.save(SAVE_CARRY.value)
        print(f"saved the carry in {SAVE_CARRY.value}; --load_carry={SAVE_CARRY.value} resumes here", file=sys.stderr)


def _given_text() -> str | None:
    """The prompt from the flags; None for a document of the token store, which needs the checkpoint."""
    prompts = [flag for flag in (PROMPT, PROMPT_FILE, DOCUMENT) if flag.value is not None]
    if len(prompts) > 1:
        raise UserError(f"--{prompts[0].name} and --{prompts[1].name} are both given: choose one")
    if DOCUMENT.value is not None:
        return None
    prompt = PROMPT.value or ""
    if PROMPT_FILE.value is not None:
        with reading(f"--prompt_file={PROMPT_FILE.value}", "text in UTF-8", UnicodeDecodeError):
            # Newlines are not translated, so the vocabulary gets the bytes of the file.
            prompt = Path(PROMPT_FILE.value).read_bytes().decode("utf-8")
    if not prompt and LOAD_CARRY.value is None:
        raise UserError("the prompt is empty: give --prompt, --prompt_file, --document or --load_carry")
    return prompt


if __name__ == "__main__":
    COMMAND.run(main)
