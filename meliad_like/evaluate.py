"""Evaluates every token of the held-out documents with a checkpoint.

    meliad_like evaluate --checkpoint=runs/quickstart --compare --output=runs/quickstart/test.json

Only --checkpoint is needed: the folder has the model, the vocabulary and the config, which names the documents.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from meliad_like.command_line import CONFIG_OF_CHECKPOINT, Command
from meliad_like.errors import UserError
from meliad_like.remote import check_output

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from meliad_like.data.split import Documents
    from meliad_like.run.opening import OpenedCheckpoint

COMMAND = Command(__doc__, no_effect={"gin_file": CONFIG_OF_CHECKPOINT})
CHECKPOINT = COMMAND.string("checkpoint", None, "Checkpoint folder, or the --workdir of a training.", required=True)
STEP = COMMAND.integer("step", None, "Which checkpoint. Default: the newest.")
SPLIT = COMMAND.string("split", "test", "train, validation or test.")
STORE = COMMAND.string("store", None, "Token store. Default: the one that the model was trained with.")
PREPARE = COMMAND.bool("prepare", False, "Make the token store first, if it is not there.")
OUTPUT = COMMAND.string("output", None, "JSON file to write, with a row for each document.")
MAX_TOKENS = COMMAND.integer(
    "max_tokens", None, "Evaluate a random subset of the documents, of this number of tokens at most."
)
COMPARE = COMMAND.bool("compare", False, "Evaluate the untrained model as well, and gzip and xz.")
PROTOCOL = COMMAND.multi_enum(
    "protocol", [], ["segments", "sliding", "token_by_token"],
    "Compare modes of reading the tokens, with their context and cost, instead of evaluating by document. Repeatable.",
)  # fmt: skip
STRIDE = COMMAND.integer("stride", None, "New tokens of a window of --protocol=sliding.", lower_bound=1)
WINDOWS = COMMAND.integer("windows", 1, "Windows of --protocol=sliding that are read side by side.", lower_bound=1)
CONCATENATED = COMMAND.bool(
    "concatenated", True, "Whether a --protocol reads all documents as one, without a reset between them."
)
DETAILS = COMMAND.bool("details", True, "Whether to show all figures, and the loss by position.")


def main() -> None:
    _check_flags()
    # Imported here, because jax takes seconds to import; mistyped flags are reported earlier.
    import jax
    from rich.console import Console

    from meliad_like.config import read_changes
    from meliad_like.evaluation import report
    from meliad_like.evaluation.perplexity import make_evaluator
    from meliad_like.mesh import parameter_shardings
    from meliad_like.run.opening import open_checkpoint, open_store

    changes = read_changes((), COMMAND.gin_param.value)
    opened = open_checkpoint(CHECKPOINT.value, step=STEP.value, changes=changes, mesh="config")
    mesh = opened.mesh
    store = open_store(opened, CHECKPOINT.value, STORE.value, PREPARE.value)
    run, model, vocabulary, split = opened.run, opened.model, opened.vocabulary, store.split(SPLIT.value)
    if PROTOCOL.value:
        compare_protocols(opened, mesh, split)
        return
    evaluator = make_evaluator(run, model, store, SPLIT.value, mesh, max_tokens=MAX_TOKENS.value)
    trained = f"step {opened.step:,}"
    evaluation = report.with_progress(trained, lambda progress: evaluator(opened.params, progress))
    details, console = {}, Console(highlight=False)
    if DETAILS.value:
        console.print(report.table(evaluation).to_rich())
        console.print(report.positions(evaluation).to_rich())
    elif not COMPARE.value:
        console.print(report.comparison({trained: evaluation}).to_rich())
    if COMPARE.value:
        shardings = parameter_shardings(mesh, model.axes, model.abstract_params)
        params = jax.jit(model.init, out_shardings=shardings)(jax.random.key(run.training.seed))
        untrained = report.with_progress("untrained", lambda progress: evaluator(params, progress))
        compressors = {}
        # Where bytes are not counted (`TokenStore.totals`) a model cannot be compared with compressors.
        if evaluation.num_bytes:
            compressors = report.compressed_bits_per_byte(split, evaluator.documents, vocabulary)
            details["other_bits_per_byte"] = {"untrained": untrained.bits_per_byte, **compressors}
        console.print(report.comparison({"untrained": untrained, trained: evaluation}, compressors).to_rich())
    first_bytes = sum(len(vocabulary.document_bytes(split.tokens(int(i), 0, 1))) for i in evaluator.documents)
    console.print(f"Each document's first token is read but not predicted: {first_bytes:,} bytes in all.")
    costs = ", ".join(f"{flops:.3g} {how.replace('_', ' ')}" for how, flops in model.flops_per_prediction.items())
    console.print(f"Floating-point operations for each predicted token: {costs}.")
    if not vocabulary.lossless:
        console.print("The vocabulary does not keep text exactly: compare bits per byte with nothing but itself.")
    if OUTPUT.value:
        details |= {
            "checkpoint": CHECKPOINT.value,
            "step": opened.step,
            "store_fingerprint": store.fingerprint,
            "vocabulary": {"fingerprint": vocabulary.fingerprint, "lossless": vocabulary.lossless},
            "bytes_of_first_tokens": first_bytes,
            "flops_per_prediction": model.flops_per_prediction,
        }
        report.write(evaluation, OUTPUT.value, **details)


def _check_flags() -> None:
    if CONCATENATED.present and not PROTOCOL.value:
        raise UserError("--concatenated has no effect without a --protocol: leave it out")
    for flag in (STRIDE, WINDOWS):
        if flag.present and "sliding" not in PROTOCOL.value:
            raise UserError(f"--{flag.name} has no effect without --protocol=sliding: leave it out")
    if PROTOCOL.value and (COMPARE.value or MAX_TOKENS.value is not None):
        raise UserError("--compare and --max_tokens have no effect with --protocol: leave them out")
    if OUTPUT.value is not None:
        check_output(OUTPUT.value, OUTPUT.name)


def compare_protocols(opened: "OpenedCheckpoint", mesh: "Mesh", split: "Documents") -> None:
    """Prints the results and the cost of each --protocol, and writes them to --output."""
    import dataclasses

    from rich.console import Console

    from meliad_like.evaluation import protocols, report
    from meliad_like.resumable import write_json

    run, model = opened.run, opened.model
    if CONCATENATED.value:
        split = split.concatenated(opened.vocabulary.end_of_document)

    sizes = {"segment_length": run.data.segment_length, "loss_slice": run.training.loss_slice}
    sizes["num_windows"] = WINDOWS.value

    def evaluate(protocol: protocols.ProtocolName, progress: Callable[[int, int], None]) -> protocols.ProtocolScore:
        stride = STRIDE.value if protocol == "sliding" else None
        settings = {"mesh": mesh, "stride": stride, "on_progress": progress, **sizes}
        return protocols.evaluate(model, opened.params, split, protocol, **settings)

    scores = [report.with_progress(name, functools.partial(evaluate, name)) for name in PROTOCOL.value]
    Console().print(report.protocols(scores).to_rich())
    if OUTPUT.value:
        write_json(OUTPUT.value, [dataclasses.asdict(score) for score in scores])


if __name__ == "__main__":
    COMMAND.run(main)
