"""Any config is either refused in one line before anything is compiled, or its step can be traced."""

import dataclasses
import itertools
import typing
from types import NoneType, UnionType
from typing import Literal

import hypothesis.strategies as st
import jax
import pytest
import tiny_run
from fuzzing import FEW
from hypothesis import example, given, settings

from meliad_like import config
from meliad_like.config.construction import field_types
from meliad_like.errors import UserError
from meliad_like.models.config import MODELS
from meliad_like.run.setup import set_up
from meliad_like.sources.base import open_source
from meliad_like.sources.files import TextSource
from meliad_like.vocabularies.sentencepiece import SentencePieceVocabularyConfig

PARTS = {name: type(part) for name, part in vars(config.RunConfig()).items() if name not in ("model", "trackers")}
# Numbers that are meant to be large cost nothing before the first step; layers and widths would take all memory.
SMALL = [-1, 0, 1, 2, 3, 7, 16, 33, 64]
LARGE = [*SMALL, 10**6, -(2**40)]
FLOATS = [-1.0, 0.0, 0.5, 1.0, 1e-30, 1e30, float("inf"), -float("inf")]


def values(kind, integers):
    """Values for a field of this type, few of which are sensible."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, UnionType):
        return st.one_of(*(values(each, integers) for each in arguments))
    if origin is Literal:
        return st.sampled_from([*arguments, "nonsense"])
    if origin is tuple:
        return st.lists(values(arguments[0], integers), max_size=3).map(tuple)
    plain = {
        bool: st.booleans(),
        int: st.sampled_from(integers),
        float: st.one_of(st.sampled_from(FLOATS), st.sampled_from([3, "x"])),
        str: st.sampled_from(["", "nonsense", "/nowhere", "relu", "float32", "bfloat16", "validation", "constant"]),
        NoneType: st.none(),
    }
    return plain[kind]


@st.composite
def bindings(draw, class_name, kind, integers):
    """One or two fields of a class, and what they are bound to."""
    chosen = {field.name for field in dataclasses.fields(kind) if "registry" in field.metadata}
    types = {name: type_ for name, type_ in field_types(kind).items() if name not in chosen}
    names = draw(st.lists(st.sampled_from(sorted(types)), min_size=1, max_size=2, unique=True))
    return [f"{class_name}.{name} = {text(draw(values(types[name], integers)))}" for name in names]


def text(value) -> str:
    """The value as gin text; gin has no literal for infinity, so a number that is too large stands for it."""
    return repr(value).replace("inf", "1e999")


ANY = st.one_of(
    *(
        bindings(kind.__name__, kind, LARGE if name in ("training", "optimizer", "schedule") else SMALL)
        for name, kind in PARTS.items()
        if name not in ("source", "vocabulary")
    )
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_run.make_bindings(tmp_path_factory.mktemp("documents"))


def traced_or_refused(base, changes) -> str | None:
    """The one-line error; None if the step can be traced."""
    try:
        setup = set_up(tiny_run.parse(base, *changes))[-1]
    except UserError as error:
        assert "\n" not in str(error), changes
        return str(error)
    program = setup.program
    with jax.set_mesh(setup.program.mesh):
        state, _ = jax.eval_shape(program.train_step, program.abstract_state, program.abstract_batch)
    assert jax.tree.map(lambda x: x.shape, state) == jax.tree.map(lambda x: x.shape, program.abstract_state), changes
    assert setup.reader.batch(0, [0]).inputs.shape == (1, setup.run.data.segment_length)
    return None


def test_without_changes(base):
    assert traced_or_refused(base, []) is None


@FEW
@given(ANY)
@example(["TrainingConfig.seed = -1"])
@example([f"TrainingConfig.seed = {2**64}"])
def test_settings_of_the_training(base, changes):
    traced_or_refused(base, changes)


@settings(FEW, max_examples=12)
@given(bindings("DecoderConfig", MODELS["decoder"], [n for n in SMALL if n <= 16]))
def test_settings_of_the_model(base, changes):
    traced_or_refused(base, changes)


@settings(FEW, max_examples=40)
@given(bindings("TextSource", TextSource, SMALL))
def test_settings_of_the_documents(tmp_path, changes):
    (tmp_path / "a.txt").write_text("a")
    try:
        run = config.parse([], [f"FolderSourceConfig.folder = '{tmp_path}'", "RunConfig.source = 'text'", *changes])
        for reference in itertools.islice(open_source(run.source).references(), 3):
            assert reference().text
    except UserError as error:
        assert "\n" not in str(error), changes


@settings(FEW, max_examples=40)
@given(bindings("SentencePieceVocabularyConfig", SentencePieceVocabularyConfig, SMALL))
def test_settings_of_the_vocabulary(changes):
    try:
        assert config.parse([], ["RunConfig.vocabulary = 'sentencepiece'", *changes]).vocabulary.settings_fingerprint
    except UserError as error:
        assert "\n" not in str(error), changes
