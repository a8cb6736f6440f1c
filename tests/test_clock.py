"""The TPU compiler's clock (`benchmarks/tpu_clock.py`), read from a program's text."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from tpu_clock import COLLECTIVES, COPIES, OTHER, PACKAGE, read_clock

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
    return read_clock(HLO.replace("PACKAGE", str(PACKAGE)))


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
    text = "HloModule f\n\nENTRY %main (p: f32[]) -> f32[] {\n  ROOT %p = f32[] parameter(0)\n}\n"
    assert read_clock(text) is None
