"""Converts checkpoints and configurations of other programs to ours, and checkpoints back.

    meliad_like convert meliad         checkpoints of google-research/meliad, also back
    meliad_like convert meliad_gin     its gin files
    meliad_like convert huggingface    pretrained models of transformers; back also our own decoders
    meliad_like convert stablehlo      our checkpoints, for machines with jax alone

--help after one of these words shows how it is used.
"""

from absl import flags

from meliad_like.command_line import Command
from meliad_like.errors import UserError

PAGES = {
    "meliad": """Converts checkpoints of google-research/meliad, or ours to its form.

    meliad_like convert meliad --input=FILE_OR_FOLDER --output=DIR --gin_file=... [--gin_file=...]
    meliad_like convert meliad --reverse --input=DIR --output=FILE.npz

Gin files describe the model as it was trained. The reference does not mask the empty cache at a document's start:
--gin_file=option/unmasked_empty_cache.gin. Its MELODI is --gin_file=melodi/base.gin, and its dense memory
--gin_file=melodi/dense_4k.gin, DecoderConfig.doubled_inputs = (7,) and DenseMemory.horizon = "segment".
""",
    "meliad_gin": """Makes one gin file of files in google-research/meliad's folder transformer/configs.

    meliad_like convert meliad_gin --input=FOLDER --output=FILE.gin --gin_file=THEIRS.gin [--gin_file=...]

For example --gin_file=base_memory.gin and --gin_file=recurrent/bias_skip.gin, in this order. What has no counterpart is
named.
""",
    "huggingface": """Converts pretrained models of transformers, or ours for it.

    meliad_like convert huggingface --input=FOLDER --output=DIR [--gin_file=...]
    meliad_like convert huggingface --reverse --input=DIR --output=FOLDER [--dtype=bfloat16]

Pretrained models contain their own config; gin files may set how they read, such as PretrainedConfig.window_length, and
the documents. With --reverse, pretrained models are written as their own architecture, and decoders of the sliding
window, recurrent states and the gated delta rule with a file of PyTorch (trust_remote_code=True).
""",
    "stablehlo": """Writes a checkpoint as programs for CPUs, GPUs and TPUs.

    meliad_like convert stablehlo --checkpoint=DIR --output=FOLDER [--gin_param=...]

The folder also has the parameters, and read_model.py, which reads and writes with them where jax and flatbuffers are
installed.
""",
}
COMMAND = Command(
    __doc__,
    subjects=PAGES,
    used_by={
        "reverse": ("meliad", "huggingface"),
        "dtype": ("huggingface",),
        "gin_file": [name for name in PAGES if name != "stablehlo"],
    },
)
INPUT = COMMAND.string("input", None, "Their file or folder; our folder for --reverse, stablehlo.", required=True)
flags.DEFINE_alias("checkpoint", "input", COMMAND.flags)
OUTPUT = COMMAND.output("output", "Our folder; theirs, or an npz file, for --reverse, stablehlo.", "any", required=True)
REVERSE = COMMAND.bool("reverse", False, "From ours to theirs.")
DTYPE = COMMAND.shared("dtype", "With --reverse: the dtype of all tensors of a pretrained model.")


def main(subject: str) -> None:
    if REVERSE.value and COMMAND.gin_flags:
        raise UserError("--gin_file and --gin_param have no effect with --reverse: the checkpoint has its config")
    if COMMAND.flags["dtype"].present and not REVERSE.value:
        raise UserError("--dtype has no effect without --reverse: our checkpoints are float32")
    # Importing jax takes seconds: a mistyped flag is reported before.
    from meliad_like.conversion import meliad, meliad_gin, pretrained, stablehlo

    gin = COMMAND.gin_file.value, COMMAND.gin_param.value
    if REVERSE.value:
        if subject == "meliad":
            meliad.convert_to_meliad(INPUT.value, OUTPUT.value)
        else:
            pretrained.convert_to_huggingface(INPUT.value, OUTPUT.value, DTYPE.value)
    elif subject == "meliad_gin":
        meliad_gin.convert_meliad_gin(INPUT.value, *gin, OUTPUT.value)
    elif subject == "stablehlo":
        stablehlo.convert_to_stablehlo(INPUT.value, gin[1], OUTPUT.value)
    elif subject == "huggingface":
        pretrained.convert_from_huggingface(INPUT.value, *gin, OUTPUT.value)
    else:
        meliad.convert_from_meliad(INPUT.value, COMMAND.read_config(), OUTPUT.value)
    print(f"{subject}: {INPUT.value} -> {OUTPUT.value}")


if __name__ == "__main__":
    COMMAND.run(main)
