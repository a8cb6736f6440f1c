"""A run made smaller, by the rule that each field of a model's config states (`registry.size`)."""

import dataclasses
import fnmatch
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from meliad_like.config.run import RunConfig, read_changes, with_changes
from meliad_like.errors import UserError
from meliad_like.mesh import MeshConfig
from meliad_like.models.config import ModelConfig
from meliad_like.models.notation import Pair, entries_by_layer, split_pattern
from meliad_like.registry import ScalesAs, configs_in
from meliad_like.trackers import TensorBoard
from meliad_like.vocabularies.base import BytesVocabularyConfig, FileVocabularyConfig, VocabularyConfig

NUM_STEPS = 40
EVERY = 10
"""Steps between checkpoints; evaluations and samples, if the run has any, come every second time."""
NUM_LANES = 8
SMALLEST_WIDTH, SMALLEST_WINDOW, MOST_LAYERS = 32, 16, 3
VOCABULARY_SIZE = 512
CUTOFF_DIVISOR = 256
"""Divisor of the first ids of a vocabulary's bands, which must remain below the size of the smallest vocabulary."""


@dataclass(frozen=True)
class Divisors:
    """The numbers by which the sizes of a run are divided."""

    divisor: int = 1
    """Divisor of lengths and widths; its square root divides the number of heads and their size."""
    layers: int = 1
    """Divisor of the number of layers, and of the numbers of special layers."""
    lengths: int = 0
    """Divisor of lengths; 0: the same as of widths."""
    segments: int = 1
    """Divisor of the lengths of segments alone; windows keep theirs."""

    def sizes(self, run: RunConfig) -> dict[str, Any]:
        """The smaller sizes of a run, by `Class.field`."""
        model, divisor, root = run.model, self.lengths or self.divisor, math.isqrt(self.divisor)

        def shorter(value: Any) -> Any:
            # Of a few tokens one is left: a size of 0 would be another model.
            return tuple(map(shorter, value)) if isinstance(value, tuple) else max(value // divisor, min(value, 1))

        fields = [size for size in dataclasses.fields(model) if rule_of(type(model), size) == "layer_entries"]
        num_kinds = [len(distinct_entries(getattr(model, size.name))) for size in fields]

        def fewer(number: int) -> int:
            """The number of layers, of which there is one of each kind at least."""
            return max(number // self.layers, *num_kinds, 1)

        def named(layers: tuple[int, ...] | None) -> tuple[int, ...] | None:
            if self.layers == 1:
                return layers
            return layers and tuple(dict.fromkeys(layer % model.total_layers // self.layers for layer in layers))

        def entries(layers: tuple[Any, ...]) -> tuple[Any, ...]:
            extra = model.total_layers - model.num_layers
            return smaller_pattern(layers, model.total_layers, self.layers, fewer(model.num_layers) + extra)

        rules = {
            "length": shorter,
            "width": lambda value: value // self.divisor,
            "heads": lambda value: value // root,
            "layers": fewer,
            "layer_entries": entries,
            "layer_indices": named,
        }
        # Configs inside the reader's have lengths too, such as the lengths of windows with spans.
        _, *inside_reader = configs_in(run.data)
        sizes = {
            f"{type(part).__name__}.{size.name}": rules[rule](getattr(part, size.name))
            for part in (*configs_in(model), *inside_reader, run.stages)
            for size in dataclasses.fields(part)
            if (rule := rule_of(type(part), size)) in rules
        }
        trained = tuple(name for pattern in run.optimizer.trained for name in self._of_fewer_layers(pattern, model))
        segment = shorter(run.data.segment_length) // self.segments
        return sizes | {"OptimizerConfig.trained": trained, "ReaderConfig.segment_length": segment}

    def _of_fewer_layers(self, pattern: str, model: ModelConfig) -> list[str]:
        """A pattern of `OptimizerConfig.trained` for fewer layers: several, if it begins with several layers."""
        match pattern.split("/", 2):
            case ["layers", layer, *rest] if layer != "*" and self.layers > 1:
                numbers = [i for i in range(model.total_layers) if fnmatch.fnmatchcase(str(i), layer)]
                return ["/".join(("layers", str(i), *rest)) for i in dict.fromkeys(i // self.layers for i in numbers)]
        return [pattern]


def rule_of(config_class: type, field: dataclasses.Field) -> ScalesAs:
    """The rule by which a field of a config shrinks; `fixed` for fields that don't hold a whole number. Raises a
    TypeError if a whole number has no rule, so that a smaller model could be a wrong one."""
    rule = field.metadata.get("scales_as")
    if rule is None and isinstance(field.default, int) and not isinstance(field.default, bool):
        name = f"{config_class.__name__}.{field.name}"
        raise TypeError(f"{name} must state how it scales: {field.name}: int = size({field.default}, RULE)")
    return rule or "fixed"


def distinct_entries(layers: Sequence[str | Pair]) -> tuple[str, ...]:
    """The different entries, in their order: the shortest stack with all kinds of layers."""
    return tuple(dict.fromkeys(entry if isinstance(entry, str) else entry[1] for entry in layers))


def smaller_pattern(layers: Sequence[str | Pair], num_layers: int, divisor: int, fewer: int) -> tuple[str | Pair, ...]:
    """The notation for a stack of `fewer` layers that has every kind of layer of the whole stack.

    The numbers of layers are divided by `divisor`. Where that leaves out an entry, each entry has one layer at least.
    """
    repeated, pairs = split_pattern(layers)
    if divisor > 1:
        pairs = [(tuple(dict.fromkeys(i % num_layers // divisor for i in indices)), entry) for indices, entry in pairs]
    named = [i for indices, _ in pairs for i in indices]
    divided = (*(repeated if len(repeated) <= fewer else dict.fromkeys(repeated)), *pairs)
    whole = set(entries_by_layer(layers, num_layers))
    if len(set(named)) == len(named) and set(entries_by_layer(divided, fewer)) == whole:
        return divided
    return tuple(entry for entry in distinct_entries(layers) if entry in whole)


def shrink(run: RunConfig, *, keep_vocabulary: bool = False) -> RunConfig:
    """A run of seconds with all mixers, stages and options of another one, on all devices of this machine. Its
    metrics are only logged locally.

    Lengths, widths, heads and layers are divided by the largest numbers that leave a possible run of at least the
    smallest sizes above; a UserError says why none is possible. First stages and the schedule's numbers of steps keep
    their share of all steps. `keep_vocabulary`: the vocabulary exists; otherwise it is learned from few documents.
    """
    sizes: dict[str, Any] = {}
    changes = _steps(run) | {"mesh": MeshConfig(), "trackers": (TensorBoard(),)}
    if not keep_vocabulary:
        changes["vocabulary"] = _small_vocabulary(run.vocabulary)
        if cutoffs := getattr(run.model, "cutoffs", ()):
            sizes[f"{type(run.model).__name__}.cutoffs"] = tuple(first // CUTOFF_DIVISOR for first in cutoffs)
    short, problem = with_changes(run, changes), None
    for divisors in _divisors(run):
        values = divisors.sizes(short) | sizes
        # A step has a whole number of segments of every stage.
        segments = (values["ReaderConfig.segment_length"], *values["StagesConfig.segment_length"])
        lanes = NUM_LANES * run.training.gradient_accumulation
        try:
            return read_changes(values=values | {"ReaderConfig.tokens_per_step": lanes * math.lcm(*segments)})(short)
        except UserError as error:
            problem = error
    raise UserError(f"this run can't be made smaller: {problem}")


def _divisors(run: RunConfig) -> Iterator[Divisors]:
    """Divisors to try, the preferred ones first; the last ones change no size."""
    model, windows = run.model, (run.model.window_length, *run.stages.window_length)
    lengths = range(max(min(windows) // SMALLEST_WINDOW, 1), 0, -1)
    widths = [d for d in (64, 16, 4, 1) if model.model_width // d >= SMALLEST_WIDTH or d == 1]
    divisors = [d for d in range(1, model.num_layers + 1) if model.num_layers % d == 0]
    few = [d for d in divisors if model.num_layers // d <= MOST_LAYERS]
    many = [d for d in reversed(divisors) if d not in few]
    # A segment keeps two windows at least, if it has two, so that something passes from one to the next.
    blocks = run.data.segment_length // model.window_length
    segments = [d for d in (4, 2, 1) if d == 1 or (blocks % d == 0 and blocks // d >= 2)]
    for layers, width, length, parts in itertools.product((*few, *many), widths, lengths, segments):
        yield Divisors(divisor=width, layers=layers, lengths=length, segments=parts)


def _steps(run: RunConfig) -> dict[str, Any]:
    """Changes of everything that is counted in steps."""
    share = NUM_STEPS / run.training.num_steps
    values = {
        f"schedule.{name}": max(round(steps * share), 1)
        for name, steps in vars(run.schedule).items()
        if name.endswith("_steps") and steps
    }
    for every in ("evaluate_every", "sample_every"):
        values[f"training.{every}"] = 2 * EVERY if getattr(run.training, every) else 0
    return values | {
        # Its share would be a step or two, and the rates after it higher than any of the run's.
        "schedule.warmup_steps": min(run.schedule.warmup_steps, NUM_STEPS // 4),
        "stages.num_steps": tuple(max(round(steps * share), 1) for steps in run.stages.num_steps),
        "training.num_steps": NUM_STEPS,
        "training.log_every": EVERY // 2,
        "training.checkpoint_every": EVERY,
        "training.checkpoint_keep_every": 0,
        "training.evaluate_max_tokens": 2000,
        "training.sample_tokens": 8,
    }


def _small_vocabulary(vocabulary: VocabularyConfig) -> VocabularyConfig:
    """A vocabulary of the same kind that a few documents are enough to learn; bytes, if the kind can't be learned."""
    changes: dict[str, Any] = {"model_file": ""} if isinstance(vocabulary, FileVocabularyConfig) else {}
    if (size := vars(vocabulary).get("size")) is not None:
        changes["size"] = min(size, VOCABULARY_SIZE)
    try:
        return dataclasses.replace(vocabulary, **changes)
    except UserError:
        return BytesVocabularyConfig(vocabulary.size_multiple)
