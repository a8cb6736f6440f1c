"""Generation: reading a prompt, continuing it, stopping and resuming."""

import dataclasses
import functools
import re
import signal
import subprocess
import sys

import forked
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import with_mixer
from families import LLAMA
from tiny_run import environment

from meliad_like.config import RunConfig
from meliad_like.conversion.parameters import write_checkpoint
from meliad_like.data.preparation import prepare
from meliad_like.data.readers import LanesReaderConfig
from meliad_like.errors import UserError
from meliad_like.generation import reading
from meliad_like.generation.beam_search import BeamConfig, beam_search
from meliad_like.generation.reading import load_state, save_state
from meliad_like.generation.sampling import SamplingConfig
from meliad_like.generation.streaming import Generator
from meliad_like.library import LanguageModel
from meliad_like.mixers.dot_product_attention import DotProductAttention, LocalAttention
from meliad_like.mixers.recurrent_states import RecurrentStates
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model
from meliad_like.run.opening import OpenedCheckpoint, checkpoint_metadata, open_checkpoint, save_vocabulary
from meliad_like.run.text import carry_identity, encode_text, read_document
from meliad_like.sources.files import TextSource
from meliad_like.studies.interventions import cleared
from meliad_like.training.checkpoints import Checkpoints
from meliad_like.vocabularies.base import BytesVocabularyConfig, ByteVocabulary
from meliad_like.vocabularies.dictionary import DictionaryVocabulary

W, N, V = 4, 16, 257
CONFIG = with_mixer(
    DecoderConfig(
        num_layers=2,
        model_width=16,
        num_heads=2,
        head_size=8,
        feedforward_width=16,
        window_length=W,
    ),
    RecurrentStates(num_states=3, gate="lstm", cell="dual"),
    (1,),
)
RUN = RunConfig(model=CONFIG, data=LanesReaderConfig(segment_length=N, tokens_per_step=N))
BYTES = ByteVocabulary()
END = BYTES.end_of_document


@pytest.fixture(scope="module")
def opened() -> OpenedCheckpoint:
    model = Model(CONFIG, V)
    params = model.init(jax.random.key(1))
    # Letters are likely, so that the text is mostly complete characters, and so is the beginning of a long one.
    likely = np.zeros((V, 1), np.float32)
    likely[[*b"abcdefgh \xe2\x82\xac"]] = 1.0
    params["embedding"] = params["embedding"] + likely * 0.5
    return OpenedCheckpoint(RUN, model, params, BYTES, 7)


@pytest.fixture(scope="module")
def prompt() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, 300).astype(np.int32)


@pytest.fixture(scope="module")
def make_generator(opened):
    def make(**changes) -> Generator:
        arguments = {"segment_length": N, "vocabulary": BYTES, "sampling": SamplingConfig()} | changes
        return Generator(opened.model, opened.params, **arguments)

    return make


def write(generator, reading, num_tokens):
    """Generates all tokens at once; returns them and the state after them."""
    chunks = list(generator.write(reading, num_tokens))
    return [token for [chunk], _ in chunks for token in chunk], chunks[-1][1]


@functools.partial(jax.jit, static_argnums=0)
def decode(model, params, token, carry):
    return model.bind(params).decode_step(token, carry)


@pytest.mark.parametrize("length", [1, 2, W, W + 1, W + 2, N, N + 1, 3 * N + 2 * W + 3])
def test_reading_is_decoding_token_by_token(make_generator, opened, prompt, length):
    generator = make_generator()
    reading = generator.read(generator.begin(0), [prompt[:length]])
    carry = generator.begin(0).carry
    for token in prompt[: length - 1]:
        _, carry = decode(opened.model, opened.params, token[None], carry)
    last = prompt[length - 1 : length]
    logits = [decode(opened.model, opened.params, last, carry)[0] for carry in (reading.carry, carry)]
    np.testing.assert_allclose(*logits, atol=1e-5)
    assert (reading.num_read[0], reading.token[0]) == (length - 1, last[0])


LONG = [
    dataclasses.replace(
        CONFIG,
        pattern=("dot_product_attention+feedforward", ((1,), "local_attention+feedforward")),
        mixers=(DotProductAttention(span=256), LocalAttention(span=6)),
    ),
    dataclasses.replace(LLAMA, window_length=256, max_positions=256),
    dataclasses.replace(LLAMA, window_length=256, max_positions=256, overlap=16),
]


@pytest.mark.parametrize(
    ("lengths", "visible", "longest"),
    [
        ([3, 512], 2048, 512),
        ([513], 2**20, 2048),
        ([512], 2047, None),
        ([513], 2048, None),
    ],
)
def test_lengths_up_to_which_attention_leaves_out_what_is_empty(lengths, visible, longest):
    model = Model(dataclasses.replace(LONG[0], mixers=(DotProductAttention(span=visible), LocalAttention(span=6))), V)
    assert reading.longest_text(model, np.array(lengths)) == longest


@pytest.mark.parametrize("config", LONG, ids=["spans", "windows", "windows that overlap"])
def test_attention_to_long_texts_leaves_out_what_is_empty(config, prompt, monkeypatch):
    model = Model(config, V)
    params = model.init(jax.random.key(1))

    def results():
        arguments = {"segment_length": 256, "vocabulary": BYTES, "sampling": SamplingConfig(temperature=0.0)}
        generator, all_nats = Generator(model, params, **arguments), []
        state = generator.begin(0, 1)
        # The first text is always the longer one.
        for first, second in ((5, 1), (30, 4), (100, 0), (140, 20)):
            scores, state = generator.score(state, [prompt[:first], prompt[:second]])
            all_nats += [nats for nats, _ in scores]
        written, _ = write(generator, generator.read(generator.begin(0), [prompt[:7]]), 150)
        beams, _ = beam_search(model, params, BYTES, generator.read(generator.begin(0), [prompt[:7]]), 8, BeamConfig())
        return np.concatenate(all_nats), written, beams.tokens

    expected = results()
    monkeypatch.setattr(reading, "SHORT_TEXT", 8)
    found = results()
    np.testing.assert_allclose(found[0], expected[0], atol=1e-5)
    assert found[1] == expected[1]
    np.testing.assert_array_equal(found[2], expected[2])


def test_no_memory_is_copied_for_a_token(make_generator, prompt):
    """A block's last token replaces the keys that tokens read. XLA copies them at every token if a read may follow."""
    generator = make_generator()
    state = generator.read(generator.begin(0), [prompt[:6]])
    write = generator._write_tokens
    program = write.func.lower(
        *write.args, state.carry, state.token, state.key, np.array([True]), 8, longest=None, **write.keywords
    ).compile()
    shapes = {x.shape for x in jax.tree.leaves(state.carry) if x.ndim > 2}
    (loop,) = (part for part in re.split(r"\n(?=%|ENTRY)", program.as_text()) if " conditional(" in part)
    copied = re.findall(r"= f32\[([\d,]+)\]\S* copy\(", loop)
    assert shapes.isdisjoint({tuple(map(int, dims.split(","))) for dims in copied})


def test_a_prompt_in_pieces_is_the_prompt(make_generator, prompt):
    generator = make_generator(sampling=SamplingConfig(temperature=0))
    whole, _ = write(generator, generator.read(generator.begin(0), [prompt]), 20)
    reading = generator.begin(0)
    for piece in np.split(prompt, [1, 7, 7, 40, 41, 120]):
        reading = generator.read(reading, [piece])
    assert write(generator, reading, 20)[0] == whole


def test_greedy_is_the_most_likely_token_of_the_parallel_pass(make_generator, opened, prompt):
    generator = make_generator(sampling=SamplingConfig(temperature=0))
    written, _ = write(generator, generator.read(generator.begin(0), [prompt[:5]]), 11)
    tokens = np.concatenate([prompt[:5], written]).astype(np.int32)[None]

    @jax.jit
    def parallel(params, tokens):
        module = opened.model.bind(params)
        return module.logits(module(tokens, module.init_carry(1), jnp.zeros((1, N // W), bool))[0])

    assert np.argmax(parallel(opened.params, tokens), axis=-1)[0, 4:-1].tolist() == written


def test_chunks_change_nothing(make_generator, prompt):
    texts = []
    for chunk, sizes in ((5, [5] * 10), (64, [50]), (None, [8, 16, 26])):
        generator = make_generator(chunk=chunk, stop_at_end=False)
        pieces = [piece for [piece], _ in generator.write(generator.read(generator.begin(3), [prompt[:9]]), 50)]
        assert [len(piece) for piece in pieces] == sizes
        texts.append([token for piece in pieces for token in piece])
    assert texts[0] == texts[1] == texts[2]
    assert len(set(texts[0])) > 10


def test_the_seed_decides(make_generator, prompt):
    generator = make_generator()
    texts = [write(generator, generator.read(generator.begin(seed), [prompt[:9]]), 20)[0] for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_the_end_of_the_document_ends_the_text(opened, prompt):
    # Everything points to the end, after some tokens.
    params = opened.params | {"embedding": opened.params["embedding"].at[END].multiply(4)}
    arguments = {"segment_length": N, "vocabulary": BYTES, "sampling": SamplingConfig()}
    generator = Generator(opened.model, params, **arguments)
    written, reading = write(generator, generator.read(generator.begin(0), [prompt[:9]]), 1000)
    assert 1 < len(written) < 1000
    assert written.index(END) == len(written) - 1
    with pytest.raises(UserError, match="the document has ended"):
        next(generator.write(reading, 1))
    # A prompt takes the end back.
    again = generator.read(reading, [prompt[9:12]])
    assert again.num_read == 9 + len(written) - 2 + 3
    going_on = Generator(opened.model, params, **arguments, stop_at_end=False)
    written, _ = write(going_on, going_on.read(going_on.begin(0), [prompt[:9]]), 200)
    assert len(written) == 200
    assert END not in written


def test_a_prompt_may_end_with_the_token_that_ends_documents(make_generator):
    """Of whole words it ends lines as well, and a prompt, or half of one, may end with a line."""
    generator = make_generator(stop_at_end=False)
    reading = generator.read(generator.begin(0), [np.array([5, END])])
    assert len(write(generator, reading, 3)[0]) == 3
    assert generator.read(generator.read(generator.begin(0), [np.array([5, END])]), [np.array([7])]).num_read == 2


def test_nothing_to_continue(make_generator):
    generator = make_generator()
    with pytest.raises(UserError, match="the prompt is empty"):
        next(generator.write(generator.begin(0), 1))


def test_a_token_out_of_range_is_named(make_generator):
    with pytest.raises(UserError, match="token 257 is not in the vocabulary, whose ids are 0 to 256"):
        make_generator().read(make_generator().begin(0), [np.array([1, 257])])


def test_states_cleared_by_segment_are_refused():
    model = Model(cleared(CONFIG), V)
    with pytest.raises(UserError, match="depends on where segments end"):
        Generator(model, {}, segment_length=N, vocabulary=BYTES, sampling=SamplingConfig())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_carry_comes_back_exactly(opened, tmp_path, dtype):
    model = Model(dataclasses.replace(CONFIG, activation_dtype=dtype), V)
    generator = Generator(
        model, opened.params, segment_length=N, vocabulary=BYTES, sampling=SamplingConfig(), stop_at_end=False
    )
    reading = generator.read(generator.begin(5), [np.arange(30)])._replace(ended=np.array([True]))
    save_state(tmp_path / "carry", reading, b"\xe2", {"step": 7})
    loaded, unfinished = load_state(tmp_path / "carry", jax.eval_shape(lambda: reading.carry), {"step": 7})
    jax.tree.map(np.testing.assert_array_equal, loaded, reading)
    assert jax.tree.map(lambda x: x.dtype, loaded.carry) == jax.tree.map(lambda x: x.dtype, reading.carry)
    assert unfinished == b"\xe2"
    assert [path.name for path in tmp_path.iterdir()] == ["carry"]


def test_a_carry_of_another_checkpoint_is_refused(make_generator, opened, tmp_path):
    reading = make_generator().begin(0)
    shapes = jax.eval_shape(lambda: reading.carry)
    save_state(tmp_path / "carry", reading, b"", carry_identity(opened))
    retrained = opened._replace(params=jax.tree.map(lambda x: x + 1, opened.params))
    wider = dataclasses.replace(RUN, model=dataclasses.replace(CONFIG, window_length=8))
    for other, message in (
        (opened._replace(step=8), "belongs to another config: step is 7 there, 8 here"),
        (opened._replace(run=wider), "DecoderConfig.window_length is 4 there, 8"),
        (opened._replace(vocabulary=ByteVocabulary(8)), "vocabulary is .* there"),
        (retrained, "parameters is .* there"),
        # Training went on.
        (retrained._replace(step=9), "step is 7 there, 9"),
    ):
        with pytest.raises(UserError, match=message):
            load_state(tmp_path / "carry", shapes, carry_identity(other))


def test_files_that_are_no_carry(make_generator, tmp_path):
    with pytest.raises(UserError, match="cannot read .*: No such file"):
        load_state(tmp_path / "none", {}, {})
    (tmp_path / "text").write_text("not a carry")
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    np.save(tmp_path / "array.npy", np.zeros(3))
    # A way of compression that there isn't.
    damaged = bytearray((tmp_path / "other.npz").read_bytes())
    damaged[damaged.index(b"PK\x01\x02") + 10] = 99
    (tmp_path / "damaged.npz").write_bytes(damaged)
    for name in ("text", "other.npz", "array.npy", "damaged.npz"):
        with pytest.raises(UserError, match=f"{name} is damaged, or no saved carry"):
            load_state(tmp_path / name, {}, {})
    with pytest.raises(UserError, match="cannot read .*: Is a directory"):
        load_state(tmp_path, {}, {})
    with pytest.raises(UserError, match="cannot write the carry"):
        save_state(tmp_path / "text" / "carry", make_generator().begin(0), b"", {})


def test_stopping_and_going_on_writes_the_same_text(opened, tmp_path):
    lm = LanguageModel(opened)

    def text(num_tokens, start, save=None, **settings):
        continuation = lm.generate(start, num_tokens, stop_at_end=False, **settings)
        assert len(continuation.tokens) == num_tokens
        if save is None:
            return str(continuation)
        continuation.state.save(save)
        # Half a character is written with its other half.
        return continuation.text.removesuffix(continuation.state.unfinished.decode(errors="replace"))

    whole = text(90, "Call me Ishmael.")
    carry = str(tmp_path / "carry")
    pieces = [text(1, "Call me Ishmael.", carry)]
    for count in (2, 17, 1, 29):
        pieces.append(text(count, lm.resume(carry), carry))
    pieces.append(text(40, lm.resume(carry)))
    assert "".join(pieces) == whole
    # Another seed, or a prompt on top, is another text.
    text(50, "Call me Ishmael.", carry)
    place = lm.resume(carry)
    assert text(40, place) == whole[-len(text(40, place)) :]
    assert text(40, place, seed=1) not in whole
    assert text(40, lm.read(" And", place)) not in whole


def test_of_whole_words_the_end_of_a_document_may_end_lines_alone(opened):
    vocabulary = DictionaryVocabulary([("Call", 2), ("me", 1)], size_multiple=V)
    end = vocabulary.end_of_document
    params = opened.params | {"embedding": opened.params["embedding"].at[end].multiply(4)}
    words = LanguageModel(opened._replace(params=params, vocabulary=vocabulary))

    def write_lines(stop_at_end):
        found = words.generate("Call me", 100, stop_at_end=stop_at_end)
        return len(found.tokens), found.text.count("\n"), found.text.endswith("\n")

    num_tokens, *lines = write_lines(stop_at_end=True)
    assert num_tokens < 100 and lines == [1, True]
    num_tokens, num_lines, _ = write_lines(stop_at_end=False)
    assert num_tokens == 100 and num_lines > 1


class NoEuro(ByteVocabulary):
    """Like SentencePiece without bytes: unknown characters become one token, which decodes to a mark."""

    def document_bytes(self, ids):
        return super().document_bytes(ids).replace("\u20ac".encode(), " \u2047 ".encode())


def test_the_beginning_of_a_document_is_a_prompt(opened, tmp_path):
    for split, text in (("train", "in training"), ("test", "5€, held out")):
        (tmp_path / "texts" / split).mkdir(parents=True)
        (tmp_path / "texts" / split / "book.txt").write_text(text, encoding="utf-8")
    store = str(tmp_path / "store")
    prepare(TextSource(folder=str(tmp_path / "texts")), BytesVocabularyConfig(), store, num_workers=1)
    # Held-out documents come first; neither the end of the document nor half a character is part of a prompt.
    assert read_document(opened, store, "book", 1000) == "5€, held out"
    assert read_document(opened, store, "book", 3) == "5"
    with pytest.raises(UserError, match="has no document 'bok'; it has book"):
        read_document(opened, store, "bok", 3)


def test_a_character_without_a_token_is_named():
    with pytest.raises(UserError, match=r"no token for '€' \(U\+20AC\), which the prompt has at character 5"):
        encode_text(NoEuro(), "cost 5€"[:4] + " €")
    assert encode_text(BYTES, "5€ \u2047").tokens.size == 8


@pytest.fixture(scope="module")
def folder(opened, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    with Checkpoints(folder) as checkpoints:
        state = {"step": jnp.asarray(7), "params": opened.params}
        checkpoints.save(7, state, checkpoint_metadata(RUN, BYTES, 7, None))
    save_vocabulary(BYTES, folder)
    return folder


def test_a_checkpoint_folder_is_all_that_is_needed(opened, folder):
    for place in (folder, folder.parent):
        again = open_checkpoint(place)
        jax.tree.map(np.testing.assert_array_equal, again.params, opened.params)
        assert (again.run, again.model, again.step) == (opened.run, opened.model, opened.step)
        assert again.vocabulary.fingerprint == BYTES.fingerprint


def test_another_vocabulary_in_the_folder_is_an_error(folder, opened, tmp_path):
    save_vocabulary(ByteVocabulary(8), tmp_path)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"step": jnp.asarray(1), "params": opened.params}, checkpoint_metadata(RUN, BYTES, 1, None))
    with pytest.raises(UserError, match="is not the one that the checkpoint was trained with"):
        open_checkpoint(tmp_path)


def generate(*arguments):
    return forked.run("-m", "meliad_like.generate", *map(str, arguments))


def test_command_line(folder, tmp_path):
    prompt = tmp_path / "book.txt"
    prompt.write_text("Grün, a book. " * 30, encoding="utf-8")
    save = f"--save_carry={tmp_path / 'place.npz'}"
    done = generate(f"--checkpoint={folder}", f"--prompt_file={prompt}", "--tokens=30", "--top_k=5", "--step=7", save)
    assert done.returncode == 0, done.stderr
    assert f"saved the carry in {tmp_path / 'place.npz'}; --load_carry=" in done.stderr
    assert len(done.stdout) > 5
    assert "read 450 tokens in" in done.stderr
    assert "tokens/s" in done.stderr


def test_a_document_that_ends_at_once_is_named(opened, tmp_path):
    """Instead of a text without a word. Here the end's logit is twice that of the most likely token."""
    [first] = LanguageModel(opened).generate("A book.", 1, temperature=0.0, stop_at_end=False).tokens
    table = opened.params["embedding"]
    write_checkpoint(tmp_path / "run", opened.params | {"embedding": table.at[END].set(2 * table[first])}, RUN, BYTES)
    done = generate(f"--checkpoint={tmp_path / 'run'}", "--prompt=A book.", "--temperature=0")
    assert (done.stdout, done.returncode) == ("", 0)
    assert re.search("s, wrote 1: the model ended the document at once\n$", done.stderr)


@pytest.mark.thorough
def test_who_reads_may_have_enough(folder, tmp_path):
    save = f"--save_carry={tmp_path / 'place.npz'}"
    command = [sys.executable, "-m", "meliad_like.generate", f"--checkpoint={folder}", "--prompt=a", save]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment(1), **pipes) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGPIPE and not (tmp_path / "place.npz").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the prompt is empty: give --prompt, --prompt_file, --document or --load_carry"),
        (["--prompt=a", "--prompt_file=b"], "--prompt and --prompt_file are both given"),
        (["--prompt_file=none.txt"], "cannot read --prompt_file=none.txt: No such file"),
        (["--prompt=a", "--seed=4294967296"], "--seed=4294967296: 4294967296 is not an integer in the range [0, "),
        (
            ["--prompt=a", "--save_carry=/dev/null/a"],
            "cannot write --save_carry=/dev/null/a: /dev/null is not a folder",
        ),
        (["--prompt=a", "--save_carry=/tmp"], "--save_carry=/tmp is a folder"),
        (["--prompt=a", "--top_p=0"], "top_p=0.0 must be above 0 and at most 1"),
        (["--prompt=a", "--gin_file=size/tiny.gin"], "--gin_file has no effect here: the config comes from the"),
        (["--prompt=a", "--gin_param=SIZE=3"], "--gin_param=SIZE=3: nothing reads SIZE"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    done = generate("--checkpoint=none", *arguments)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]


def test_a_prompt_that_is_not_utf8(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"gr\xfcn")
    done = generate("--checkpoint=none", f"--prompt_file={tmp_path / 'latin.txt'}")
    assert done.returncode == 2
    assert "latin.txt is damaged, or no text in UTF-8: " in done.stderr
