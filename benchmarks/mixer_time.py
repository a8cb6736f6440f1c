"""Times a training step of stacks that have one kind of mixer each, in turn, so that all see the same changes of speed.

    python benchmarks/mixer_time.py
    python benchmarks/mixer_time.py --mixers=sliding_window,mamba2:32,mamba2:64,mamba2:128

The second command compares chunk lengths. Every layer has a feed-forward network, as well.
"""

import pandas as pd
from absl import app, flags
from rich.console import Console

from meliad_like import config
from meliad_like.experiments.step_time import TimedStep, relative_time, time_in_turn
from meliad_like.mesh import make_mesh
from meliad_like.mixers.base import MIXERS
from meliad_like.studies.frames import table_of

WINDOW = "sliding_window"
KINDS = [WINDOW, "rg_lru", "mamba2", "retention", "lightning_attention", "gated_delta_rule", "kimi_delta_attention"]

MIXERS_TO_TIME = flags.DEFINE_list("mixers", KINDS, "Names of mixers, with :N if their chunks have N tokens.")
SIZE = flags.DEFINE_string("size", "size/quickstart.gin", "Gin file of the models' sizes.")
SEGMENT = flags.DEFINE_integer("segment", 512, "Tokens of a segment.")
LANES = flags.DEFINE_integer("lanes", 4, "Segments of a step.")
REPEATS = flags.DEFINE_integer("repeats", 20, "Timed steps of each mixer.", lower_bound=1)
GIN_PARAM = flags.DEFINE_multi_string("gin_param", ["DecoderConfig.window_length = 64"], "Bindings for all models.")


def parse(mixer: str) -> config.RunConfig:
    name, _, chunk = mixer.partition(":")
    reader = (
        f"ReaderConfig.segment_length = {SEGMENT.value}",
        f"ReaderConfig.tokens_per_step = {SEGMENT.value * LANES.value}",
    )
    chunks = [f"{MIXERS[name].__name__}.chunk_length = {chunk}"] if chunk else []
    layers = f"DecoderConfig.pattern = ('{name}+feedforward',)"
    return config.parse([SIZE.value], [layers, *reader, *chunks, *GIN_PARAM.value])


def main(_) -> None:
    runs = {mixer: parse(mixer) for mixer in MIXERS_TO_TIME.value}
    steps = {mixer: TimedStep(run, 256, make_mesh(run.mesh)) for mixer, run in runs.items()}
    timing = time_in_turn(steps, REPEATS.value)["rows"]
    reference = WINDOW if WINDOW in timing else MIXERS_TO_TIME.value[0]
    fastest = {mixer: 1e3 * min(row["seconds"]) for mixer, row in timing.items()}
    figures = {
        mixer: {
            "parameters": steps[mixer].model.num_parameters,
            "fastest_milliseconds": fastest[mixer],
            "over_window": fastest[mixer] / fastest[reference],
            "median_over_window": relative_time(timing, mixer, reference),
            "MFLOP_a_token": steps[mixer].model.flops.training / 1e6,
            "megabytes": timing[mixer]["memory_bytes"] / 1e6,
            "compile_seconds": timing[mixer]["compile_seconds"],
        }
        for mixer in timing
    }
    frame = pd.DataFrame(figures).T.rename_axis("mixer").reset_index()
    formats = {"parameters": ",.0f", "over_window": ".2f", "median_over_window": ".2f", "MFLOP_a_token": ".1f"}
    Console(width=140).print(table_of(frame, "", dict.fromkeys(frame.columns[1:], ".1f") | formats).to_rich())


if __name__ == "__main__":
    app.run(main)
