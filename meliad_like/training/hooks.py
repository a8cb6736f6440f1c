"""What happens beside training every so many steps."""

from collections.abc import Callable
from typing import NamedTuple

from meliad_like.evaluation import report
from meliad_like.evaluation.perplexity import Evaluator
from meliad_like.training.metrics import MetricsWriter
from meliad_like.training.setup import Setup
from meliad_like.training.state import TrainState


class Hook(NamedTuple):
    """Something that happens after every `every` steps (0: never), and after the last one."""

    every: int
    call: Callable[[int, TrainState], None]

    def due(self, step: int, num_steps: int) -> bool:
        """Whether it is time, `step` steps done."""
        return self.every > 0 and (step % self.every == 0 or step == num_steps)


def evaluation_hook(setup: Setup, writer: MetricsWriter) -> Callable[[int, TrainState], None]:
    """Evaluates the whole of a split, and writes the result as metrics of that split's name."""
    run = setup.run
    evaluator = None

    def evaluate(step: int, state: TrainState) -> None:
        nonlocal evaluator
        if evaluator is None:
            evaluator = Evaluator(
                setup.model,
                setup.store.split(run.training.evaluate_split),
                setup.mesh,
                name=run.training.evaluate_split,
                segment_length=run.data.segment_length,
                max_lanes=run.data.num_lanes,
                max_tokens=run.training.evaluate_max_tokens,
                loss_slice=run.training.loss_slice,
            )
        result = evaluator(state.params)
        figures = {
            "bits_per_token": result.bits_per_token,
            "bits_per_byte": result.bits_per_byte,
            "perplexity": result.perplexity,
            "word_perplexity": result.word_perplexity,
            "accuracy": result.accuracy,
        }
        writer.write(step, figures, kind=run.training.evaluate_split)
        writer.say(f"step {step}: {result.bits_per_byte:.3f} bits/byte on {report.title(result)}")

    return evaluate
