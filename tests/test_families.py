"""Several model families in one config: which one a run uses, and what is saved of it."""

import dataclasses
from dataclasses import dataclass

import pytest

from meliad_like import config
from meliad_like.errors import UserError
from meliad_like.layers.flops import Flops
from meliad_like.mixers.positions import Rotary
from meliad_like.models.config import MODELS, ModelConfig
from meliad_like.models.model import Model


@dataclass(frozen=True)
class ToyConfig(ModelConfig):
    depth: int = 1

    def flops(self, vocabulary_size):
        return Flops.of_products(self.depth * vocabulary_size)


TOY = ["RunConfig.model = 'toy'"]


@pytest.fixture(autouse=True)
def _toy(monkeypatch):
    monkeypatch.setitem(MODELS._classes, "toy", ToyConfig)


def message(gin_files=(), gin_params=()):
    with pytest.raises(UserError) as caught:
        config.parse(gin_files, gin_params)
    return str(caught.value)


def test_a_run_is_a_decoder_unless_it_says_otherwise():
    assert type(config.parse().model) is MODELS["decoder"]
    assert config.parse(gin_params=[*TOY, "ToyConfig.depth = 3"]).model == ToyConfig(depth=3)


def test_a_family_that_does_not_exist_is_an_error():
    assert message(gin_params=["RunConfig.model = 'toi'"]).startswith(
        "--gin_param=RunConfig.model = 'toi': RunConfig.model = 'toi' is not one of decoder, "
    )


def test_bindings_of_another_family_are_an_error_that_says_which_one_the_run_has():
    assert message(gin_params=["ToyConfig.depth = 3"]) == (
        "--gin_param=ToyConfig.depth = 3: nothing reads ToyConfig.depth: RunConfig.model is 'decoder' (base.gin:15), "
        "not 'toy'"
    )
    expected = "size/tiny.gin:3: nothing reads DecoderConfig.num_layers: RunConfig.model is 'toy' (--gin_param="
    assert message(["size/tiny.gin"], TOY).startswith(expected)


def test_melodi_reads_what_it_shares_with_the_decoder_from_the_same_bindings():
    melodi = config.parse(["size/tiny.gin", "melodi/base.gin"], ["MelodiConfig.long_layers = (1,)"]).model
    assert (melodi.num_layers, melodi.window_length, melodi.dropout_rate) == (3, 16, 0.05)
    assert config.parse(["melodi/base.gin", "option/rotary.gin"]).model.position == Rotary()
    # The nearest class counts, whatever the order of files.
    assert config.parse(["melodi/base.gin", "size/large_600m.gin"], ["MelodiConfig.num_heads = 3"]).model.num_heads == 3
    nothing_reads = "nothing reads DecoderConfig.attention_kernel: RunConfig.model is 'melodi' (melodi/base.gin:3)"
    assert nothing_reads in message(["melodi/base.gin"], ["DecoderConfig.attention_kernel = 'none'"])
    assert "DecoderConfig has no parameter num_layrs" in message(["melodi/base.gin"], ["DecoderConfig.num_layrs = 3"])
    assert "DecoderConfig has no parameter long_slots" in message([], ["DecoderConfig.long_slots = 3"])


def test_a_parameter_that_chooses_another_family_replaces_the_fields_of_files():
    segment = ["ReaderConfig.segment_length = 512", "ReaderConfig.tokens_per_step = 512"]
    run = config.parse(["melodi/base.gin", "size/tiny.gin"], ["RunConfig.model = 'shortformer'", *segment])
    assert run.model == MODELS["shortformer"]()


def test_a_part_of_the_run_is_bound_by_its_class():
    assert "RunConfig.mesh has fields of its own: bind MeshConfig.FIELD = ..." in message(
        gin_params=["RunConfig.mesh = 3"]
    )


def test_a_run_of_another_family_is_saved_and_read_back(tmp_path):
    run = config.parse(gin_params=[*TOY, "ToyConfig.depth = 3"])
    assert config.from_json(config.to_json(run)) == run
    config.save(run, tmp_path)
    assert config.parse([str(tmp_path / "config.gin")]) == run
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    with pytest.raises(UserError, match="RunConfig.model is 'toy' there, 'decoder' here; choose another --workdir"):
        config.save(config.parse(), tmp_path)


def test_a_saved_config_of_an_unknown_family_is_an_error():
    text = config.to_json(config.parse()).replace('"decoder"', '"decodr"')
    with pytest.raises(UserError, match="RunConfig.model = 'decodr' is not one of decoder"):
        config.from_json(text)


def test_operations_are_the_familys():
    model = Model(ToyConfig(depth=2), 10)
    assert (model.flops.forward, model.flops.training) == (20, 60)


@pytest.mark.parametrize("family", ["decoder", "shortformer"])
def test_training_may_begin_with_parameters_that_were_computed_with_otherwise(family):
    model = MODELS[family]()
    other = dataclasses.replace(model, remat="layers", activation_dtype="bfloat16", dropout_rate=0.5)
    assert model.extends(other)
    assert not model.extends(dataclasses.replace(model, num_layers=3))
    assert not model.extends(MODELS["pretrained"]())
