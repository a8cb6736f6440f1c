"""Conversion of gin files to RunConfig and back, and the error messages for mistakes."""

import json
import re
from contextlib import nullcontext

import forked
import pytest

from meliad_like import config
from meliad_like.config import files as config_files
from meliad_like.errors import UserError


def write(folder, name, text):
    (folder / name).write_text(text)
    return str(folder / name)


def message(gin_files=(), gin_params=()):
    with pytest.raises(UserError) as caught:
        config.parse(gin_files, gin_params)
    assert "\n" not in str(caught.value)
    return str(caught.value)


STATES = "DecoderConfig.pattern = ('recurrent_states',)"


@pytest.mark.parametrize(
    ("gin_params", "expected"),
    [
        (["DecoderConfig.num_layer = 3"], "DecoderConfig has no parameter num_layer (nearest: num_layers)"),
        (["DecodrConfig.num_layers = 3"], "unknown class DecodrConfig (nearest: DecoderConfig)"),
        (["DecoderConfig.num_layers = '3'"], "DecoderConfig.num_layers='3' must be int"),
        (["DecoderConfig.num_layers = True"], "DecoderConfig.num_layers=True must be int"),
        (["DecoderConfig.logit_scale = 'a'"], "DecoderConfig.logit_scale='a' must be float or None"),
        (["DecoderConfig.pattern = 1"], "DecoderConfig.pattern=1 must be tuple["),
        ([STATES, "RecurrentStates.gate = 'open'"], "RecurrentStates.gate='open' must be 'fixed' or 'lstm'"),
        (["DecoderConfig.num_layers = %LAYERS"], "%LAYERS has no value; bind LAYERS = ..."),
        (["LAYERS = 3"], "nothing reads LAYERS (nearest: EXTRA_LAYERS)"),
        (["EXTRA_LAYERS = 3"], "nothing reads EXTRA_LAYERS"),
        (["EXTRA_LAYERS = %EXTRA_LAYERS", "DecoderConfig.num_layers = %EXTRA_LAYERS"], "%EXTRA_LAYERS has no value"),
        (["train/DecoderConfig.num_layers = 3"], "scopes are not supported: train/DecoderConfig"),
        (["RecurrentStates.gate = @lstm()"], "references are not supported: @lstm; write the value"),
        (["import os"], "gin imports are not supported: import os"),
        (["include 'size/tiny.gin'"], "pass it as --gin_file=size/tiny.gin"),
        (["DecoderConfig.num_layers"], "bad gin syntax: "),
        (["DecoderConfig.num_layers = (3"], "bad gin syntax: "),
        (["DecoderConfig.num_layers = 3 4"], "bad gin syntax: "),
        (["FolderSourceConfig.folder = books"], "expected Class.parameter = value, with text in quotes"),
        (["RunConfig.model = ['decoder']"], "RunConfig.model = ['decoder'] is not one of decoder, "),
        (["ReaderConfig.segment_length = 1000", "ReaderConfig.tokens_per_step = 1000"], "segment_length=1000 must be a "
         "multiple of window_length=512"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_parameter_is_one_line(gin_params, expected):
    assert expected in message(gin_params=gin_params)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("fixed_skip.gin", "block_recurrent/fixed_skip.gin"),
        ("blok_recurrent/fixed_skip.gin", "block_recurrent/fixed_skip.gin"),
        ("size/tinny.gin", "size/tiny.gin"),
    ],
)
def test_the_error_for_an_unknown_file_names_the_nearest(name, nearest):
    assert message([name]) == f"no gin file or row {name!r} (nearest: {nearest})"


def test_files_that_contradict_each_other_are_named_with_their_values():
    expected = (
        "DecoderConfig.window_length is 16 in size/tiny.gin:8 and 512 in block_recurrent/xl_512.gin:3: "
        "leave one of them out, or settle it with --gin_param"
    )
    assert message(["size/tiny.gin", "block_recurrent/xl_512.gin"]) == expected


def test_a_parameter_settles_a_contradiction():
    params = ["DecoderConfig.window_length = 32", "ReaderConfig.segment_length = 32"]
    assert config.parse(["size/tiny.gin", "block_recurrent/xl_512.gin"], params).model.window_length == 32


def test_files_that_agree_do_not_contradict(tmp_path):
    same = write(tmp_path, "same.gin", "DecoderConfig.window_length = 512\nReaderConfig.segment_length = 512\n")
    assert config.parse([same, "block_recurrent/xl_512.gin"]) == config.parse(["block_recurrent/xl_512.gin"])


def test_a_file_may_not_contradict_itself(tmp_path):
    name = write(tmp_path, "twice.gin", "DecoderConfig.num_layers = 2\nDecoderConfig.num_layers = 3\n")
    assert f"is 2 in {name}:1 and 3 in {name}:2" in message([name])


def test_the_last_parameter_wins_over_the_first_and_over_files():
    params = ["DecoderConfig.num_layers = 5", "DecoderConfig.num_layers = 6"]
    assert config.parse(["size/tiny.gin"], params).model.num_layers == 6


def test_a_file_overrides_what_it_includes(tmp_path):
    name = write(tmp_path, "mine.gin", "include 'size/tiny.gin'\nDecoderConfig.num_layers = 5\n")
    model = config.parse([name]).model
    assert (model.num_layers, model.model_width) == (5, 32)


def test_a_file_overrides_what_it_includes_if_that_is_given_as_well(tmp_path):
    name = write(tmp_path, "mine.gin", "include 'size/tiny.gin'\nDecoderConfig.num_layers = 5\n")
    outer = write(tmp_path, "outer.gin", f"include {name!r}\nDecoderConfig.num_layers = 7\n")
    for files in ([name, "size/tiny.gin"], ["size/tiny.gin", name]):
        assert config.parse(files).model.num_layers == 5
    for files in ([outer, "size/tiny.gin", name], ["size/tiny.gin", name, outer]):
        assert config.parse(files).model.num_layers == 7


def test_an_included_file_that_contradicts_another_file_is_named(tmp_path):
    name = write(tmp_path, "mine.gin", "include 'size/tiny.gin'\n")
    assert "size/tiny.gin:8" in message([name, "block_recurrent/xl_512.gin"])


def write_table(folder, *lines):
    """Writes a table of the user's; returns the beginning of its rows' names."""
    return write(folder, "mine.csv", "\n".join(["name,label,files,bindings,note", *lines])).removesuffix(".csv")


def test_a_row_is_a_file_that_includes_others(tmp_path):
    table = write_table(tmp_path, 'a,A,size/tiny.gin,"MeshConfig.data = 1; DecoderConfig.num_layers = 5",', "b,B,,,")
    model = config.parse([f"{table}/a"]).model
    assert (model.num_layers, model.model_width) == (5, 32)
    assert config.parse([f"{table}/a", "size/tiny.gin"]).model == model
    assert config.parse([f"{table}/b"]) == config.parse()
    inside = write(tmp_path, "inside.gin", f"include '{table}/a'\nDecoderConfig.num_layers = 6\n")
    assert config.parse([inside, f"{table}/a"]).model.num_layers == 6


@pytest.mark.parametrize(
    ("line", "names", "expected"),
    [
        (
            "a,A,,NUM_STATES = 8,",
            ["memory_map/base.gin"],
            "NUM_STATES is 8 in TABLE/a and 32 in memory_map/base.gin:15",
        ),
        ("a,A,,DecoderConfig.num_leyers = 8,", [], "TABLE/a: DecoderConfig has no parameter num_leyers"),
        ("a,A,size/tiny.gin,", [], "TABLE/a: a row has as many cells as the header, among them name, files and "),
        ("a,A,no.gin,,", [], "no gin file or row 'no.gin'"),
        ("a,A,,RecurrentStates.gate lstm,", [], "TABLE/a: bad gin syntax: "),
        ("a,A,,,\na,B,,,", [], "TABLE/a: the table has two rows of this name"),
        ("a,A,TABLE/a,,", [], "gin files include each other: TABLE/a -> TABLE/a"),
        ("able,A,,,", [], "TABLE.csv has no row 'a' (nearest: able)"),
    ],
)
def test_an_error_names_the_row(tmp_path, line, names, expected):
    table = str(tmp_path / "mine")
    write_table(tmp_path, line.replace("TABLE", table))
    assert expected.replace("TABLE", table) in message([f"{table}/a", *names])


def test_a_name_with_a_suffix_or_without_its_table_leads_to_the_row():
    assert message(["states_128"]) == "no gin file or row 'states_128' (nearest: block_recurrent/table3/states_128)"
    expected = "block_recurrent/table3.csv has no row 'states_128.gin' (nearest: states_128)"
    assert message(["block_recurrent/table3/states_128.gin"]) == expected
    expected = "block_recurrent/table3.csv is a table: name one of its rows, block_recurrent/table3/ROW"
    assert message(["block_recurrent/table3.csv"]) == expected


def test_files_that_include_each_other_are_an_error(tmp_path):
    first, second = str(tmp_path / "first.gin"), str(tmp_path / "second.gin")
    write(tmp_path, "first.gin", f"include {second!r}\n")
    write(tmp_path, "second.gin", f"include {first!r}\n")
    assert message([first]) == f"gin files include each other: {first} -> {second} -> {first}"


def test_a_syntax_error_names_file_and_line(tmp_path):
    name = write(tmp_path, "bad.gin", "DecoderConfig.num_layers = 3\nRecurrentStates.gate lstm\n")
    assert message([name]).startswith(f"{name}:2: bad gin syntax: ")


def test_a_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "latin.gin").write_bytes("# café\n".encode("latin-1"))
    assert message([str(tmp_path / "latin.gin")]).startswith(f"{tmp_path}/latin.gin is damaged, or no text in UTF-8: ")


def test_a_users_own_base_file_is_a_file_like_any_other(tmp_path, monkeypatch):
    write(tmp_path, "base.gin", "PretrainedConfig.window_length = 128\n")
    write(tmp_path, "mine.gin", "include 'base.gin'\n")
    monkeypatch.chdir(tmp_path)
    expected = "base.gin:1: nothing reads PretrainedConfig.window_length: RunConfig.model is 'decoder'"
    for name in ("base.gin", "mine.gin"):
        assert expected in message([name])
    assert config.parse(["base.gin"], ["RunConfig.model = 'pretrained'"]).model.window_length == 128


def test_shipped_files_are_found_from_any_folder(tmp_path, monkeypatch):
    # A folder of this name on the path is what gin's own search trips over.
    (tmp_path / "size").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert config.parse(["size/tiny.gin"]).model.model_width == 32


def test_a_file_of_the_current_folder_is_found(tmp_path, monkeypatch):
    write(tmp_path, "mine.gin", "DecoderConfig.num_layers = 5\n")
    monkeypatch.chdir(tmp_path)
    assert config.parse(["mine.gin"]).model.num_layers == 5


def test_an_installed_package_has_its_own_copy_of_the_files(tmp_path, monkeypatch):
    (tmp_path / "package" / "gin_files").mkdir(parents=True)
    write(tmp_path / "package" / "gin_files", "base.gin", "DecoderConfig.num_layers = 5\n")
    # Next to an installed package lies the gin library, without base.gin.
    (tmp_path / "gin").mkdir()
    monkeypatch.setattr(config_files, "_PACKAGE", tmp_path / "package")
    assert config.parse().model.num_layers == 5


def test_one_parse_leaves_nothing_behind_for_the_next():
    before = config.parse()
    config.parse(["size/tiny.gin"], ["DecoderConfig.num_heads = 4"])
    assert config.parse() == before


def test_lists_become_tuples_and_whole_numbers_floats():
    run = config.parse(
        gin_params=["DecoderConfig.pattern = ['rg_lru', [[1, 2], 'mamba2']]", "DecoderConfig.logit_scale = 1"]
    )
    assert run.model.pattern == ("rg_lru", ((1, 2), "mamba2"))
    assert type(run.model.logit_scale) is float


def test_the_saved_gin_file_gives_the_same_run(tmp_path):
    run = config.parse(["size/tiny.gin", "block_recurrent/lstm_dual.gin"], ["DecoderConfig.num_heads = 4"])
    config.save(run, tmp_path)
    assert config.parse([str(tmp_path / "config.gin")]) == run
    assert config.from_json((tmp_path / "config.json").read_text()) == run


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"DecoderConfig.num_layer": 3}, "DecoderConfig has no parameter num_layer (nearest: num_layers)"),
        ({"DecoderConfig.num_layers": "3"}, "DecoderConfig.num_layers='3' must be int"),
        ({"RunConfig.model": ["decoder"]}, "RunConfig.model = ['decoder'] is not one of decoder, "),
    ],
)
def test_a_saved_config_of_another_version_is_an_error(change, expected):
    with pytest.raises(UserError) as caught:
        config.from_json(json.dumps(json.loads(config.to_json(config.parse())) | change))
    assert "the saved config: " in str(caught.value)
    assert expected in str(caught.value)


def test_a_saved_config_opens_when_a_field_was_added_later():
    run = config.parse(["size/tiny.gin"])
    saved = json.loads(config.to_json(run))
    del saved["MeshConfig.data"], saved["DecoderConfig.logit_scale"], saved["TrainingConfig.keep_best"]
    assert config.from_json(json.dumps(saved)) == run


def test_a_cut_short_config_is_an_error():
    with pytest.raises(UserError, match="is not JSON"):
        config.from_json(config.to_json(config.parse())[:100])


def with_step(workdir, step=3):
    """The folder, with what looks like a checkpoint."""
    (workdir / "checkpoints" / str(step)).mkdir(parents=True, exist_ok=True)
    return workdir


def test_a_folder_without_a_step_belongs_to_nobody(tmp_path):
    config.save(config.parse(["size/tiny.gin"]), tmp_path)
    other = config.parse(["size/tiny.gin", "option/no_dropout.gin"])
    config.save(other, tmp_path)
    assert config.from_json((tmp_path / "config.json").read_text()) == other


def test_a_working_folder_refuses_another_config(tmp_path):
    config.save(config.parse(["size/tiny.gin"]), with_step(tmp_path))
    with pytest.raises(UserError) as caught:
        config.save(config.parse(["size/tiny.gin", "option/no_dropout.gin"]), tmp_path)
    assert "DecoderConfig.dropout_rate is 0.05 there, 0.0 here; choose another --workdir" in str(caught.value)
    config.save(config.parse(["size/tiny.gin"]), with_step(tmp_path))
    begins = f"choose another --workdir; --load_dir={tmp_path} begins with the parameters of this one"
    with pytest.raises(UserError, match=re.escape(begins)):
        config.save(config.parse(["size/tiny.gin"], ["Adafactor.base_rate = 0.5"]), tmp_path)


@pytest.mark.parametrize(
    "binding",
    [
        "TrainingConfig.num_steps = 600000",
        "TrainingConfig.nonfinite = 'skip'",
        "TrainingConfig.loss_slice = 256",
        "TrainingConfig.evaluate_split = 'test'",
        "TrainingConfig.checkpoints_kept = 1",
        "TrainingConfig.sample_every = 10",
        "MeshConfig.tensor = 2",
        "MeshConfig.sequence = 2",
        "DecoderConfig.remat = 'layers'",
        "ReaderConfig.store = '/elsewhere'",
    ],
)
def test_fields_that_may_change_when_a_run_resumes(tmp_path, binding):
    config.save(config.parse(), with_step(tmp_path))
    other = config.parse(gin_params=[binding])
    assert other != config.parse()
    config.save(other, tmp_path)
    assert config.from_json((tmp_path / "config.json").read_text()) == other


def test_the_folder_of_the_documents_may_move_before_a_run_resumes(tmp_path):
    config.save(config.parse(["task/books.gin"]), with_step(tmp_path))
    config.check_workdir(config.parse(["task/books.gin"], ["FolderSourceConfig.folder = 'moved'"]), tmp_path)


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        ("TrainingConfig.seed = 1", "TrainingConfig.seed is 0 there, 1 here"),
        # Dropout masks are drawn for each part of the lanes.
        ("TrainingConfig.gradient_accumulation = 2", "TrainingConfig.gradient_accumulation is 1 there, 2 here"),
        (
            "DecoderConfig.activation_dtype = 'bfloat16'",
            "activation_dtype is 'float32' there, 'bfloat16' here",
        ),
        ("ScheduleConfig.warmup_steps = 7", "InverseSquareRootSchedule.warmup_steps is 1000 there, 7 here"),
    ],
)
def test_fields_that_may_not_change_when_a_run_resumes(tmp_path, binding, message):
    config.save(config.parse(), with_step(tmp_path))
    with pytest.raises(UserError, match=re.escape(message)):
        config.save(config.parse(gin_params=[binding]), tmp_path)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        # The rates of earlier steps were those of a run of another length.
        (
            ["RunConfig.schedule = 'cosine'", "TrainingConfig.num_steps = 1000"],
            ["RunConfig.schedule = 'cosine'", "TrainingConfig.num_steps = 2000"],
            "TrainingConfig.num_steps is 1000 there, 2000 here",
        ),
        # Steps that were skipped would have stopped the run.
        (["TrainingConfig.nonfinite = 'skip'"], [], "TrainingConfig.nonfinite is 'skip' there, 'stop' here"),
        # The best bits so far are those of other documents.
        (
            ["TrainingConfig.keep_best = True", "TrainingConfig.evaluate_every = 10"],
            [
                "TrainingConfig.keep_best = True",
                "TrainingConfig.evaluate_every = 10",
                "TrainingConfig.evaluate_split = 'test'",
            ],
            "TrainingConfig.evaluate_split is 'validation' there, 'test' here",
        ),
    ],
)
def test_what_a_run_can_not_resume_with_depends_on_the_rest(tmp_path, before, after, message):
    config.save(config.parse(gin_params=before), with_step(tmp_path))
    with pytest.raises(UserError, match=re.escape(message)):
        config.save(config.parse(gin_params=after), tmp_path)


def test_the_number_of_steps_may_change_where_the_schedule_has_a_length_of_its_own(tmp_path):
    params = ["RunConfig.schedule = 'cosine'", "CosineSchedule.max_scheduled_steps = 1000"]
    config.save(config.parse(gin_params=params), with_step(tmp_path))
    config.save(config.parse(gin_params=[*params, "TrainingConfig.num_steps = 2000"]), tmp_path)


@pytest.mark.parametrize(
    ("step", "num_steps", "may_resume"), [(9000, 20000, True), (9001, 20000, False), (9000, 9500, False)]
)
def test_a_stable_rate_may_go_on_for_longer(tmp_path, step, num_steps, may_resume):
    """The rates of all steps before a decay that has not begun are those of a run of another length."""
    params = ["RunConfig.schedule = 'warmup_stable_decay'", "TrainingConfig.num_steps = 10000"]
    config.save(config.parse(gin_params=params), with_step(tmp_path, step))
    other = config.parse(gin_params=[*params[:1], f"TrainingConfig.num_steps = {num_steps}"])
    with nullcontext() if may_resume else pytest.raises(UserError, match="num_steps"):
        config.check_workdir(other, tmp_path)


PROGRAM = """
from meliad_like.command_line import Command

COMMAND = Command(None)

def main():
    print(COMMAND.read_config().model.num_layers)

COMMAND.run(main)
"""


FULL_MEMORY = """
import jax.numpy as jnp
from meliad_like.command_line import Command

Command(None).run(lambda: jnp.zeros(1 << 50).block_until_ready())
"""


def test_a_full_memory_is_one_line_with_the_size_and_the_way_out():
    result = run_program(program=FULL_MEMORY)
    line = r"error: the device's memory is full \(Out of memory allocating \d+ bytes.*\): raise TrainingConfig\..*\n"
    assert (result.returncode, bool(re.fullmatch(line, result.stderr))) == (2, True), result.stderr


def run_program(*arguments, program=PROGRAM):
    return forked.run("-c", program, *arguments)


def test_flags_reach_the_config():
    result = run_program("--gin_file=size/tiny.gin", "--gin_param=DecoderConfig.num_layers = 5")
    assert (result.stdout, result.returncode) == ("5\n", 0), result.stderr


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--gin_file=size/tinny.gin", "error: no gin file or row 'size/tinny.gin' (nearest: size/tiny.gin)\n"),
        ("--gin_fil=size/tiny.gin", "error: Unknown command line flag 'gin_fil'. Did you mean: gin_file ?\n"),
        ("size/tiny.gin", "error: unexpected argument 'size/tiny.gin'; flags are written --name=value\n"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_and_status_2(argument, expected):
    result = run_program(argument)
    assert (result.stderr, result.stdout, result.returncode) == (expected, "", 2)
