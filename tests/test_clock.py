"""The TPU compiler's clock: read from a program's text, and held for a small step that is compiled for a TPU."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from meliad_like.planning.clock import COLLECTIVES, COPIES, OTHER, read_clock
from meliad_like.planning.hlo import Module

ROOT = Path(__file__).parents[1]
COMPILER = ROOT / ".venv" / "libtpu"
"""Where `.ci/run` installs the TPU compiler: JAX programs of an environment that has it look for a TPU."""

# Shortened from the text of a training step as libtpu writes it.
HLO = """HloModule jit_train_step, is_scheduled=true

FileNames
1 "/somewhere/meliad_like/training/step.py"
2 "PACKAGE/layers/attention.py"
3 "/site-packages/jax/_src/numpy/einsum.py"

FunctionNames
1 "attend"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=88 end_line=88 column=1 end_column=2}
3 {file_name_id=3 function_name_id=1 line=500 end_line=500 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}
3 {file_location_id=3 parent_frame_id=2}

%moving (p: f32[8,4]) -> bf16[4,8] {
  %p = f32[8,4]{1,0} parameter(0)
  %t = f32[4,8]{1,0} transpose(%p), dimensions={1,0}
  ROOT %c = bf16[4,8]{1,0} convert(%t)
}

%computing (p.1: f32[8,4]) -> f32[8,4] {
  %p.1 = f32[8,4]{1,0} parameter(0)
  ROOT %e = f32[8,4]{1,0} exponential(%p.1), backend_config={"window_config":{"estimated_cycles":"999999"}}
}

%body (arg: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %sort.1 = f32[8,4]{1,0} sort(%x), dimensions={1}, to_apply=%less
  %fusion.1 = f32[8,4]{1,0:T(8,128)S(1)} fusion(%x), kind=kLoop, calls=%computing, metadata={op_name="jit(train_step)/\
transpose(jvp(attention))/recurrent_states/while/body/exp" stack_frame_id=3}, backend_config={"estimated_cycles":"100"}
  ROOT %tuple = (s32[], f32[8,4]) tuple(%i, %fusion.1)
}

%less (arg.1: (s32[], f32[8,4])) -> pred[] {
  %constant.1 = s32[]{:T(128)} constant(6)
  ROOT %lt = pred[]{:T(512)} compare(%counter, %constant.1), direction=LT
}

%short (q: f32[8]) -> f32[8] {
  ROOT %n = f32[8]{0} negate(%q), backend_config={"estimated_cycles":"3"}
}

%long (q.1: f32[8]) -> f32[8] {
  ROOT %s = f32[8]{0} sine(%q.1), metadata={op_name="jit(train_step)/optimizer/sin"}, \
backend_config={"estimated_cycles":"40"}
}

ENTRY %main (p.2: f32[8,4]) -> f32[8,4] {
  %fusion.2 = bf16[4,8]{1,0} fusion(%p.2), kind=kLoop, calls=%moving, metadata={op_name="jit(train_step)/loss/add"}, \
backend_config={"estimated_cycles":"7"}
  %while.1 = (s32[], f32[8,4]) while(%init), condition=%less, body=%body
  %all-reduce.1 = f32[8,4]{1,0} all-reduce(%p.2), to_apply=%add, backend_config={"estimated_cycles":"11"}
  %choice = f32[8]{0} conditional(%which, %a, %b), branch_computations={%short, %long}
  %kernel = f32[8]{0} custom-call(%a), custom_call_target="tpu_custom_call"
  ROOT %add.1 = f32[8,4]{1,0} add(%p.2, %p.2), metadata={op_name="jit(train_step)/add" stack_frame_id=1}, \
backend_config={"estimated_cycles":"5"}
}
"""


@pytest.fixture(scope="module")
def clock():
    from meliad_like.planning.clock import PACKAGE

    return read_clock(Module(HLO.replace("PACKAGE", str(PACKAGE))))


def test_cycles_are_added_by_part(clock):
    assert clock.parts == {"recurrent_states": 600, "optimizer": 40, COLLECTIVES: 11, COPIES: 7, OTHER: 5}
    assert clock.cycles == 663
    assert clock.without_estimate == {"kernels": 1, "sorts": 6}


def test_the_costliest_instructions_have_their_line_in_this_package(clock):
    first = clock.costliest[0]
    assert first == ("fusion.1", "f32[8,4]", "recurrent_states", "layers/attention.py:88", 6, 600)
    assert [one.name for one in clock.costliest[1:3]] == ["s", "all-reduce.1"]
    # No frame of its stack is in this package.
    assert clock.costliest[-1].source == ""


def test_a_program_without_estimates_has_no_clock():
    assert (
        read_clock(Module("HloModule f\n\nENTRY %main (p: f32[]) -> f32[] {\n  ROOT %p = f32[] parameter(0)\n}\n"))
        is None
    )


# Of the compiler below: million cycles of a training step on one v4 chip, and MiB of its memory.
COMPILER_VERSION = "0.0.42"
CYCLES, MEMORY = 1.116, 66.4


def test_a_small_step_on_a_tpu_became_neither_slower_nor_larger(tmp_path):
    """If it did, `plan --costliest=30` with these flags names the instructions. If it got better, store that above."""
    found = [distribution.version for distribution in importlib.metadata.distributions(path=[str(COMPILER)])]
    if not found:
        pytest.skip("the TPU compiler is not installed in .venv/libtpu (CONTRIBUTING.md)")
    if not found[0].startswith(COMPILER_VERSION):
        pytest.skip(f"the stored figures are of libtpu {COMPILER_VERSION}, not of {found[0]}")
    output = tmp_path / "plan.json"
    files = ("size/laptop.gin", "block_recurrent/fixed_skip.gin", "option/bfloat16.gin")
    flags = [f"--gin_file={file}" for file in files] + ["--gin_param=DecoderConfig.num_layers = 1"]
    flags += [
        "--gin_param=RECURRENT_LAYERS = (-1,)",
        "--vocabulary_size=1024",
        "--topology=v4:1x1x1",
        "--program=training",
        f"--output={output}",
    ]
    # The tests' own XLA_FLAGS would lower the compiler's effort.
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{COMPILER}", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "meliad_like.plan", *flags]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    (program,) = json.loads(output.read_text())["programs"]
    assert program["clock"]["cycles"] / 1e6 < 1.05 * CYCLES
    assert program["total"] / 2**20 < 1.05 * MEMORY
