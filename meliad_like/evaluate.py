"""Evaluates every token of the held-out documents with a checkpoint.

    meliad_like evaluate --checkpoint=runs/quickstart --compare --output=runs/quickstart/test.json

Only --checkpoint is needed: the folder has the model, the vocabulary and the config, which names the documents.
"""

from meliad_like.command_line import CONFIG_OF_CHECKPOINT, Command

COMMAND = Command(__doc__, no_effect={"gin_file": CONFIG_OF_CHECKPOINT})
CHECKPOINT = COMMAND.shared("checkpoint", "Folder of ours or of transformers.")
STEP = COMMAND.shared("step")
DTYPE = COMMAND.shared("dtype")
SPLIT = COMMAND.shared("split")
STORE = COMMAND.shared("store")
PREPARE = COMMAND.bool("prepare", False, "Make the token store first, if it is not there.")
OUTPUT = COMMAND.output("output", "JSON file to write, with a row for each document.")
MAX_TOKENS = COMMAND.shared("max_tokens")
COMPARE = COMMAND.bool("compare", False, "Evaluate the untrained model as well, and gzip and xz.")
DETAILS = COMMAND.bool("details", True, "Whether to show all figures, and the loss by position.")


def main() -> None:
    # Imported here, because jax takes seconds to import; mistyped flags are reported earlier.
    import jax
    from rich.console import Console

    from meliad_like.config import read_changes
    from meliad_like.evaluation import report
    from meliad_like.evaluation.perplexity import make_evaluator
    from meliad_like.mesh import parameter_shardings
    from meliad_like.run.opening import open_model, open_store

    changes = read_changes((), COMMAND.gin_param.value)
    opened = open_model(CHECKPOINT.value, step=STEP.value, changes=changes, mesh="config", dtype=DTYPE.value)
    store = open_store(opened, CHECKPOINT.value, STORE.value, PREPARE.value)
    (run, model, params, vocabulary, step, _), split = opened, store.split(SPLIT.value)
    evaluator = make_evaluator(run, model, store, SPLIT.value, opened.mesh, max_tokens=MAX_TOKENS.value)
    trained, console = f"step {step:,}", Console(highlight=False)
    evaluation = report.with_progress(trained, lambda progress: evaluator(params, progress))
    details, compressors, evaluations = {}, {}, {trained: evaluation}
    if DETAILS.value:
        console.print(report.table(evaluation).to_rich())
        console.print(report.positions(evaluation).to_rich())
    if COMPARE.value:
        shardings = parameter_shardings(opened.mesh, model.axes, model.abstract_params)
        fresh = jax.jit(model.init, out_shardings=shardings)(jax.random.key(run.training.seed))
        untrained = report.with_progress("untrained", lambda progress: evaluator(fresh, progress))
        evaluations = {"untrained": untrained} | evaluations
        # Where not all bytes are counted (`TokenStore.totals`) a model cannot be compared with compressors.
        if evaluation.num_bytes and split.scored is None:
            compressors = report.compressed_bits_per_byte(split, evaluator.documents, vocabulary)
            details["other_bits_per_byte"] = {"untrained": untrained.bits_per_byte, **compressors}
    if COMPARE.value or not DETAILS.value:
        console.print(report.comparison(evaluations, compressors).to_rich())
    first_bytes = sum(len(vocabulary.document_bytes(split.tokens(int(i), 0, 1))) for i in evaluator.documents)
    console.print(f"Each document's first token is read but not predicted: {first_bytes:,} bytes in all.")
    costs = ", ".join(f"{flops:.3g} {how.replace('_', ' ')}" for how, flops in model.flops_per_prediction.items())
    console.print(f"Floating-point operations for each predicted token: {costs}.")
    if not vocabulary.lossless:
        console.print("The vocabulary does not keep text exactly: compare bits per byte with nothing but itself.")
    if OUTPUT.value:
        details |= {
            "checkpoint": CHECKPOINT.value,
            "step": step,
            "store_fingerprint": store.fingerprint,
            "vocabulary": {"fingerprint": vocabulary.fingerprint, "lossless": vocabulary.lossless},
            "bytes_of_first_tokens": first_bytes,
            "flops_per_prediction": model.flops_per_prediction,
        }
        report.write(evaluation, OUTPUT.value, **details)


if __name__ == "__main__":
    COMMAND.run(main)
