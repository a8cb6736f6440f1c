"""Our decoders as folders for transformers: what is written, and in PyTorch the logits and texts of our model."""

import dataclasses
import importlib.util
import json
import os
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from decoders import with_mixer
from families import BYTES, CONFIGS, SLIDE, W
from harness_items import items
from test_export import TEXT, sentencepiece
from test_texts import like_llama_2

from meliad_like.config import RunConfig
from meliad_like.conversion.own_decoders import check_decoder, tokenizer_settings
from meliad_like.conversion.parameters import write_checkpoint
from meliad_like.conversion.pretrained import convert_to_huggingface
from meliad_like.data.readers import LanesReaderConfig
from meliad_like.errors import UserError
from meliad_like.layers.feedforward import PlainFeedForward
from meliad_like.library import LanguageModel
from meliad_like.mixers.gated_delta_rule import GatedDeltaRule
from meliad_like.mixers.positions import T5, Alibi, Rotary
from meliad_like.models.model import Model
from meliad_like.run.opening import OpenedCheckpoint
from meliad_like.training.checkpoints import named_arrays
from meliad_like.vocabularies.dictionary import DictionaryVocabulary

# Nothing is downloaded, and no copy of the model's code stays.
HOME = tempfile.TemporaryDirectory()
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": HOME.name}
LONG = dataclasses.replace(SLIDE, window_length=96)  # Two of the delta rule's chunks.
HYBRID = dataclasses.replace(
    SLIDE,
    mixers=(GatedDeltaRule(values_per_key=2, value_size=3, conv_length=3),),
    num_layers=4,
    pattern=("gated_delta_rule+feedforward", "sliding_window", "recurrent_states+gated_delta_rule", "feedforward"),
    position=Rotary(),
    feedforward_bias=True,
    logit_scale=0.5,
)
MODELS = {
    "slide": SLIDE,
    **{name: CONFIGS[name] for name in CONFIGS if ":" in name},
    "delta rule": with_mixer(LONG, GatedDeltaRule(), (0,)),
    "hybrid": HYBRID,
    "positions": dataclasses.replace(SLIDE, position=Alibi(learned_slope=True, bound="by_head")),
}
UNMASKED = ("slide", "fixed:skip", "hybrid")
MODELS |= {f"{name}, unmasked": dataclasses.replace(MODELS[name], mask_empty_cache=False) for name in UNMASKED}
NEEDED = ("torch", "transformers")
needs_torch = pytest.mark.skipif(not all(map(importlib.util.find_spec, NEEDED)), reason="pip install torch")


def exported(config, tmp_path, vocabulary=BYTES):
    """A model whose parameters are not those of a beginning, and its folder."""
    chance, segment = np.random.default_rng(0), 4 * config.window_length
    data = LanesReaderConfig(segment_length=segment, tokens_per_step=segment)
    run, model = RunConfig(model=config, data=data), Model(config, vocabulary.size)

    def change(path, x):
        noise = chance.normal(size=x.shape)
        return jnp.asarray(2 * noise if path.endswith("attention_scale") else x + 0.1 * noise, jnp.float32)

    fresh = model.init(jax.random.key(0))
    params = jax.tree.unflatten(jax.tree.structure(fresh), [change(*item) for item in named_arrays(fresh).items()])
    write_checkpoint(tmp_path / "ours", params, run, vocabulary)
    convert_to_huggingface(tmp_path / "ours", tmp_path / "theirs")
    return LanguageModel(OpenedCheckpoint(run, model, params, vocabulary, 0)), tmp_path / "theirs"


def opened(folder):
    """What transformers opens: the model and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # type: ignore[import-not-found]

    return [one.from_pretrained(folder, trust_remote_code=True) for one in (AutoModelForCausalLM, AutoTokenizer)]


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (CONFIGS["memorizing"], "external_memory"),
        (CONFIGS["feedback"], "state_reader"),
        (CONFIGS["slide below skip"], "DecoderConfig.clear_states=True"),
        (CONFIGS["shortformer"], "a ShortformerConfig model"),
        (dataclasses.replace(SLIDE, doubled_inputs=(0,)), "DecoderConfig.doubled_inputs"),
        (dataclasses.replace(SLIDE, norms_around=(0,)), "DecoderConfig.norms_around"),
        (dataclasses.replace(SLIDE, feedforwards=(PlainFeedForward("gelu"),)), "PlainFeedForward.activation='gelu'"),
        (
            dataclasses.replace(SLIDE, pattern=("rg_lru", "kimi_delta_attention"), num_layers=2),
            "kimi_delta_attention and rg_lru",
        ),
    ],
)
def test_what_has_no_counterpart_is_named(config, part):
    with pytest.raises(UserError, match=f"runs/x has {part}: only decoders of .*gated_delta_rule.* and pretrained"):
        check_decoder(config, "runs/x")


def test_a_folder_has_all_parameters_and_needs_nothing_else(tmp_path):
    """Without PyTorch: each parameter goes to one place, and instead of the table of positions there are biases."""
    lm, folder = exported(dataclasses.replace(HYBRID, position=T5()), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    ours = named_arrays(lm.params)
    tables = {name: x for name, x in ours.items() if "/position/" in name}
    biases = [x for name, x in tensors.items() if name.endswith("window.bias")]
    assert len(biases) == len(tables) == 2 and {x.shape for x in biases} == {(SLIDE.num_heads, W)}
    size = sum(x.size for x in tensors.values()) - sum(x.size for x in biases)
    assert size == lm.model.num_parameters - sum(x.size for x in tables.values())
    np.testing.assert_array_equal(tensors["layers.1.output.weight"], ours["layers/1/output/kernel"].T)
    assert (config["vocab_size"], config["eos_token_id"], config["layers"][3]["mixers"]) == (257, 256, {})
    source = (folder / "torch_model.py").read_text()
    imports = {line.split()[1].split(".")[0] for line in source.splitlines() if line.startswith(("import", "from"))}
    assert imports == {"functools", "torch", "transformers"}
    assert {"tokenizer.json", "generation_config.json"} < {path.name for path in folder.iterdir()}


def test_a_vocabulary_without_a_tokenizer_gets_none():
    counted = DictionaryVocabulary([("a", 2), ("b", 1)])
    assert tokenizer_settings(counted) is None and tokenizer_settings(like_llama_2()) is None


@needs_torch
@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_the_tokens_of_a_sentencepiece_model_are_ours(model_type, tmp_path):
    vocabulary = sentencepiece(model_type)
    _, tokenizer = opened(exported(SLIDE, tmp_path, vocabulary)[1])
    for text in (TEXT, "", " a  \u2581b", *TEXT):
        tokens = vocabulary.encode(text).tolist()
        assert tokenizer(text)["input_ids"] == tokens and tokenizer.decode(tokens) == text
    assert tokenizer.eos_token_id == vocabulary.end_of_document


@needs_torch
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_ours(name, tmp_path):
    """Of two documents in one pass, in segments, in other parts, and token by token."""
    lm, folder = exported(MODELS[name], tmp_path)
    model, _ = opened(folder)
    import torch  # type: ignore[import-not-found]

    w = MODELS[name].window_length
    n = 3 * w + w // 2 + 1
    tokens, start = np.random.default_rng(1).integers(0, 257, (2, 4 * w)), np.eye(1, 4, dtype=bool).repeat(2, axis=0)
    module = lm.model.bind(lm.params)
    hidden, _ = jax.jit(lambda tokens: module(tokens, module.init_carry(2), start))(tokens)
    tokens, expected = tokens[:, :n], np.asarray(module.logits(hidden))[:, :n]
    for lengths in ([n], [w] * 4, [1, w, w - 2, 2 * w], [1] * n):
        memory, logits = None, []
        for part in np.split(tokens, np.cumsum(lengths), axis=1):
            if part.size:
                with torch.no_grad():
                    outputs = model(torch.tensor(part), past_key_values=memory)
                memory = outputs.past_key_values
                logits.append(outputs.logits.numpy())
        np.testing.assert_allclose(np.concatenate(logits, axis=1), expected, atol=1e-5 * np.abs(expected).max())


@needs_torch
def test_transformers_writes_what_we_write(tmp_path):
    """Greedily, also after what it has written before, and with beams; and it trains."""
    lm, folder = exported(MODELS["hybrid"], tmp_path)
    model, tokenizer = opened(folder)
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    whole = model.generate(**inputs, max_new_tokens=20, do_sample=False, return_dict_in_generate=True)
    assert whole.sequences[0, 16:].tolist() == lm.generate("Once upon a time", 20, temperature=0).tokens
    first = model.generate(**inputs, max_new_tokens=7, do_sample=False, return_dict_in_generate=True)
    rest = model.generate(first.sequences, past_key_values=first.past_key_values, max_new_tokens=13, do_sample=False)
    assert rest.tolist() == whole.sequences.tolist()
    beams = [model.generate(**inputs, num_beams=3, max_new_tokens=9, use_cache=cached) for cached in (True, False)]
    assert beams[0].tolist() == beams[1].tolist()
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert all(bool(x.grad.isfinite().all()) for x in model.parameters() if x.grad is not None)
    padded = {"input_ids": whole.sequences[:, :3], "attention_mask": whole.sequences.new_tensor([[0, 1, 1]])}
    with pytest.raises(ValueError, match="can't be padded on the left: read them one by one"):
        model(**padded)
    padded["attention_mask"] = padded["attention_mask"].flip(1).bool()
    outputs = model(**padded)
    assert outputs.logits.shape == (1, 3, 257)
    # A memory would have read the padding.
    assert outputs.past_key_values is None
    with pytest.raises(ValueError, match="different lengths can't be continued side by side"):
        model.generate(**padded, max_new_tokens=1)
    with pytest.raises(ValueError, match="attention_mask may only say what is padding"):
        model(padded["input_ids"], attention_mask=whole.sequences.new_ones(1, 1, 3, 3))


@needs_torch
def test_packed_documents_are_read_apart(tmp_path):
    """As transformers' collator packs them, whose positions begin again at each document."""
    import torch  # type: ignore[import-not-found]
    from transformers import DataCollatorWithFlattening  # type: ignore[import-not-found]

    lm, folder = exported(MODELS["hybrid"], tmp_path)
    model, _ = opened(folder)
    texts = [np.random.default_rng(i).integers(0, 256, n) for i, n in ((1, W + 3), (2, 2 * W + 1))]
    batch = DataCollatorWithFlattening()([{"input_ids": text.tolist()} for text in texts])
    expected = -np.mean(np.concatenate([lm.score(text).log_probabilities[1:] for text in texts]))
    outputs = model(**batch)
    np.testing.assert_allclose(outputs.loss.item(), expected, rtol=1e-5)
    alone = model(torch.tensor(texts[1][None])).logits
    torch.testing.assert_close(outputs.logits[:, len(texts[0]) :], alone)
    with pytest.raises(ValueError, match="position_ids must count the tokens of each document"):
        model(batch["input_ids"], position_ids=batch["position_ids"] + 1)
    # A memory goes on with its last document.
    first = model(torch.tensor(texts[0][None]))
    position_ids = torch.arange(len(texts[0]), len(texts[0]) + 2)[None]
    rest = model(torch.tensor([[1, 2]]), past_key_values=first.past_key_values, position_ids=position_ids)
    whole = model(torch.tensor([[*texts[0], 1, 2]]))
    torch.testing.assert_close(rest.logits, whole.logits[:, -2:])


@needs_torch
def test_every_argument_has_its_effect_or_is_refused(tmp_path):
    import torch  # type: ignore[import-not-found]

    lm, folder = exported(MODELS["hybrid"], tmp_path)
    model, tokenizer = opened(folder)
    inputs = tokenizer("Once upon a time there was", return_tensors="pt")
    whole = model(**inputs, output_hidden_states=True)
    assert [x.shape for x in whole.hidden_states] == [(1, 26, SLIDE.model_width)] * 5
    torch.testing.assert_close(whole.hidden_states[0], model.embedding(inputs["input_ids"]))
    kept = model(**inputs, logits_to_keep=torch.tensor([2, 5])).logits
    torch.testing.assert_close(kept, whole.logits[:, [2, 5]])
    logits = model.config.logit_scale * whole.hidden_states[-1] @ model.embedding.weight.T
    torch.testing.assert_close(logits, whole.logits)
    assert isinstance(model(**inputs, return_dict=False), tuple)
    written = model.generate(**inputs, max_new_tokens=3, output_hidden_states=True, return_dict_in_generate=True)
    assert len(written.hidden_states) == 3 and len(written.hidden_states[0]) == 5
    summed = model(**inputs, labels=inputs["input_ids"], num_items_in_batch=10).loss
    expected = -lm.score("Once upon a time there was").log_probabilities[1:].sum() / 10
    np.testing.assert_allclose(summed.item(), expected, rtol=1e-5)
    with pytest.raises(ValueError, match="output_attentions"):
        model(**inputs, output_attentions=True)
    for unknown in ("attention_maks", "inputs_embeds", "token_type_ids"):
        with pytest.raises(TypeError, match=unknown):
            model(**inputs, **{unknown: inputs["input_ids"]})


@needs_torch
def test_transformers_trains_on_packed_documents(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments  # type: ignore[import-not-found]

    _, folder = exported(MODELS["delta rule"], tmp_path)
    model, _ = opened(folder)
    texts = [{"input_ids": np.random.default_rng(i).integers(0, 256, 20 + i).tolist()} for i in range(6)]
    arguments = TrainingArguments(
        tmp_path / "run", max_steps=3, per_device_train_batch_size=2, report_to=[], save_strategy="no", use_cpu=True
    )
    trainer = Trainer(model, arguments, data_collator=DataCollatorWithFlattening(), train_dataset=texts)
    assert np.isfinite(trainer.train().training_loss)


@needs_torch
def test_the_harness_says_the_same_of_both(tmp_path):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance  # type: ignore[import-not-found]
    from lm_eval.models.huggingface import HFLM  # type: ignore[import-not-found]

    from meliad_like.harness.model import HarnessModel

    lm, folder = exported(MODELS["fixed:skip"], tmp_path)
    theirs = HFLM(pretrained=str(folder), trust_remote_code=True, dtype="float32", device="cpu", batch_size=4)
    # The harness reads an end of document before a text whose first token counts.
    ours, questions = HarnessModel(lm, batch_size=4, first_tokens=True), items(5)
    for kind, requests in (
        ("loglikelihood", [(item.context, choice) for item in questions for choice in item.choices]),
        ("loglikelihood_rolling", [(item.context,) for item in questions]),
    ):
        nats = [
            np.array(getattr(one, kind)([Instance(kind, {}, request, 0) for request in requests]))
            for one in (ours, theirs)
        ]
        np.testing.assert_allclose(*nats, rtol=1e-5)
