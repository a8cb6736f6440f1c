#!/usr/bin/env bash
# What to run first on a new kind of device, in about 30 minutes of one GPU or TPU: the golden arrays, the check of the
# kernels, every row of table 1 at the paper's size with the kernels and without, layers with linear recurrences and
# stacks of them, and generation. Where PyTorch, Triton and flash-linear-attention (fla-core) are installed, its layers
# are timed as well. It writes first_hour.md and the figures of the rows as first_hour.json into a folder:
#
#     bash benchmarks/first_hour.sh runs/first_hour
#     SIZE=tiny bash benchmarks/first_hour.sh runs/first_hour    # seconds on a CPU, to see that it works
#
# ROWS, HYBRIDS, LANES (of 4,096 tokens), JOBS (programs compiled at the same time) and REPEATS change what is timed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
folder="$(realpath -m "${1:-runs/first_hour}")" size="${SIZE:-paper}"
all_rows="$(cut -d, -f1 gin/block_recurrent/table1.csv | tail -n +2 | paste -sd,)"
rows="${ROWS:-$all_rows}"
golden=(tests/test_golden_models.py tests/test_golden_melodi.py tests/test_released_mixers.py tests/test_rg_lru.py)
generation=() layers=()
hybrids="${HYBRIDS:-slide_13l,mixer/rg_lru,mixer/mamba2,mixer/retention,mixer/lightning,mixer/qwen3_next,mixer/kimi_delta_attention}"
if [[ "$size" == tiny ]]; then
    rows="${ROWS:-slide_12l,fixed_skip}" golden=(tests/test_golden_models.py -k attention)
    generation=(--tokens=128 --repeats=1 --models=Slide)
    layers=(--lanes=1 --segment=128 --window=64 --width=64 --heads=2 --head_size=32 --repeats=1 --rounds=1 --norules)
    layers+=("--mixers=sliding_window,mamba2") hybrids="${HYBRIDS:-mixer/mamba2}"
fi
mkdir -p "$folder"
page="$folder/first_hour.md"
platform="$(python -c 'import jax; print(jax.default_backend().replace("gpu", "cuda"))')"
{
    echo "# First measurements"
    python -c 'import jax, platform as p; print(f"\n{jax.devices()[0].device_kind}, Python {p.python_version()}, jax {jax.__version__}, {jax.device_count()} device(s)")'
} >"$page"

# part TITLE COMMAND...: runs a command, shows it and puts what it prints into the page; a failure is shown and the
# others go on.
status=0
part() {
    local title="$1" began=$SECONDS result=0
    shift
    echo "== $title: $*"
    "$@" >"$folder/output.txt" 2>&1 || result=$?
    tail -n 40 "$folder/output.txt"
    [[ "$result" == 0 ]] || status=1
    # shellcheck disable=SC2016  # these are Markdown's
    printf '\n## %s\n\n`%s`, status %s after %s s\n\n```text\n%s\n```\n' "$title" "$*" "$result" "$((SECONDS - began))" \
        "$(tail -n 40 "$folder/output.txt")" >>"$page"
}
# time_rows NAME ROWS KERNEL: the steps of rows, with the kernels or without.
time_rows() {
    part "Steps of $1, kernels: $3" python benchmarks/step_time.py --scale="$size" --rows="$2" \
        --lanes="${LANES:-4}" --jobs="${JOBS:-4}" --repeats="${REPEATS:-10}" --in_a_row=4 --output="$folder/$1_$3.json" \
        --gin_param="DecoderConfig.attention_kernel = '$3'" --gin_param="DecoderConfig.recurrence_kernel = '$3'"
}
part "Golden arrays" env TEST_PLATFORM="$platform" python -m pytest -q -p no:cacheprovider "${golden[@]}"
time_rows rows "$rows" none
time_rows rows "$rows" auto
part "Layers" python benchmarks/layer_time.py --jobs="${JOBS:-4}" "${layers[@]}"
if python -c "import torch, triton, fla" 2>"$folder/output.txt"; then
    part "Layers of flash-linear-attention" python benchmarks/layer_time_fla.py
fi
time_rows hybrids "$hybrids" none
time_rows hybrids "$hybrids" auto
part "Generation" python benchmarks/generation_speed.py "${generation[@]}"
python - "$folder" <<'PYTHON'
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
paths = [path for rows in ("rows", "hybrids") for path in sorted(folder.glob(f"{rows}_*.json"))]
figures = {path.stem: json.loads(path.read_text()) for path in paths}
(folder / "first_hour.json").write_text(json.dumps(figures, indent=2))
PYTHON
rm -f "$folder/output.txt"
echo "wrote $page and $folder/first_hour.json"
exit "$status"
