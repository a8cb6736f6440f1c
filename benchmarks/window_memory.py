"""Memory of training by the number of windows, as the compiler plans it: python benchmarks/window_memory.py

Compiles a training step of one sequence for shapes alone; there are no parameters, and nothing is computed. With a
recurrence the gradient goes through all windows of the sequence. `unmodified` is the same decoder, fine-tuned on one
window.
"""

import argparse
import dataclasses

import jax
import jax.numpy as jnp

from meliad_like import config
from meliad_like.config import RunConfig
from meliad_like.data.batch import Batch
from meliad_like.families.pretrained.config import PretrainedConfig
from meliad_like.models.model import Model
from meliad_like.optimization.optimizers import make_optimizer
from meliad_like.optimization.schedules import make_schedule
from meliad_like.training.step import init_state, make_train_step


def planned_bytes(run: RunConfig, model: Model, num_windows: int) -> int:
    """The peak memory of a step: parameters, optimizer state, and all temporary arrays."""
    tokens = jax.ShapeDtypeStruct((1, num_windows * model.config.window_length), jnp.int32)
    windows = jax.ShapeDtypeStruct((1, num_windows), jnp.int32)
    mask, start = (jax.ShapeDtypeStruct(x.shape, bool) for x in (tokens, windows))
    schedule = make_schedule(run.schedule, run.training.num_steps)
    optimizer = make_optimizer(run.optimizer, schedule, model.kinds)
    state = jax.eval_shape(lambda: init_state(model, optimizer, 1, jax.random.key(0)))
    step = jax.jit(make_train_step(model, optimizer, run.training), donate_argnums=0)
    batch = Batch(tokens, tokens, mask, start, windows, windows)  # type: ignore[arg-type]
    plan = step.lower(state, batch).compile().memory_analysis()
    assert plan is not None
    results = plan.output_size_in_bytes - plan.alias_size_in_bytes
    return plan.argument_size_in_bytes + plan.temp_size_in_bytes + results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gin_file", action="append", default=[], help="default: GPT-2 small, the paper's recurrence")
    parser.add_argument("--gin_param", action="append", default=[])
    parser.add_argument("--windows", type=int, nargs="+", default=[1, 5, 20, 80])
    parser.add_argument("--vocabulary_size", type=int, default=50_257)
    arguments = parser.parse_args()
    files = arguments.gin_file or ["pretrained/gpt2_small.gin", "recurrent_pretrained/tables/recurrent_300_0"]
    run = config.parse(files, arguments.gin_param)
    assert isinstance(run.model, PretrainedConfig)
    plain = Model(dataclasses.replace(run.model, recurrence=()), arguments.vocabulary_size)
    before = planned_bytes(run, plain, 1)
    print(f"unmodified  1 window   {before / 1e6:9,.1f} MB", flush=True)
    for windows in arguments.windows:
        num_bytes = planned_bytes(run, Model(run.model, arguments.vocabulary_size), windows)
        print(f"recurrent  {windows:2} windows  {num_bytes / 1e6:9,.1f} MB, x {num_bytes / before:.3f}", flush=True)


if __name__ == "__main__":
    main()
