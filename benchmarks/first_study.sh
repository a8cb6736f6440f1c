#!/usr/bin/env bash
# Which stack is best at equal time, at 150M parameters on one GPU: a window, recurrent states, Griffin's and Qwen3-Next's
# hybrids. It uses the kernels of the device, and documents that a machine has: the sources of its Python packages, byte
# by byte, 60 MB at most. It times the steps of all rows in turn, trains each row for as many steps as fit into SECONDS,
# seed by seed, and prints intervals of the differences from Slide:13L over test documents and seeds:
#
#     bash benchmarks/first_study.sh runs/first_study    # for MINUTES (25); the same command resumes
#     SECONDS_EACH=600 SEEDS=0 MINUTES=60 bash benchmarks/first_study.sh runs/first_study    # all rows in an hour
#     SIZE=tiny SECONDS_EACH=60 MINUTES=12 bash benchmarks/first_study.sh runs/first_study_tiny    # on a CPU
#
# ROWS, SEEDS, LANES (of 4,096 tokens) and PACKAGES (a folder of packages) change what is compared, and so do arguments
# after the folder: bindings and flags for all commands of the table.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder="$(realpath -m "${1:-runs/first_study}")" size="${SIZE:-paper}" began=$SECONDS
minutes="${MINUTES:-25}" seconds_each="${SECONDS_EACH:-1500}" seeds="${SEEDS:-0,1,2}"
IFS=, read -ra rows <<<"${ROWS:-slide_13l,fixed_skip,rg_lru,qwen3_next}"
packages="${PACKAGES:-$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')}"
mkdir -p "$folder"

if [[ ! -d "$folder/documents" ]]; then
    # One folder, and so one document, for each package; whole packages are held out.
    python - "$packages" "$folder/documents.new" "$([[ "$size" == tiny ]] && echo 2000000 || echo 60000000)" <<'PYTHON'
import pathlib, shutil, sys
packages, documents, left = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
shutil.rmtree(documents, ignore_errors=True)
sources = {path: sorted(path.rglob("*.py")) for path in sorted(packages.iterdir()) if path.is_dir()}
# Copies of packages in others would be in two splits.
sources = {path: [file for file in files if "_vendor" not in file.parts] for path, files in sources.items()}
sizes = {path: sum(file.stat().st_size for file in files) for path, files in sources.items()}
# The small packages first, so that there are many documents.
for number, package in enumerate(sorted((path for path, size in sizes.items() if size > 20_000), key=sizes.get)):
    if (left := left - sizes[package]) < 0:
        break
    split = {4: "validation", 9: "test"}.get(number % 10, "train")
    text = b"".join(file.read_bytes() for file in sources[package]).decode(errors="ignore")
    target = documents / split / f"{package.name}.txt"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
PYTHON
    mv "$folder/documents.new" "$folder/documents"
fi

table=(python -m meliad_like.experiments mixers --scale="$size" --task=task/books.gin --store="$folder/store")
table+=(--folder="$folder/runs" --gin_param="FolderSourceConfig.folder = '$folder/documents'")
if [[ "$size" != tiny ]]; then
    table+=(--gin_file=option/bfloat16.gin --gin_file=option/cosine.gin)
    table+=(--gin_param="ReaderConfig.tokens_per_step = $((${LANES:-8} * 4096))")
fi
table+=("${@:2}")
[[ -f "$folder/runs/step_time.json" ]] || "${table[@]}" --step_time "${rows[@]/#/--row=}"
steps() {
    python - "$folder/runs/step_time.json" "$1" "$seconds_each" <<'PYTHON'
import json, statistics, sys
timing, row, seconds = sys.argv[1:]
print(int(float(seconds) / statistics.median(json.load(open(timing))["rows"][row]["seconds"])))
PYTHON
}
# The table and picture of what is finished, and the intervals over the seeds that both rows have.
report() {
    "${table[@]}" --report "${rows[@]/#/--row=}" --seeds="$seeds"
    for row in "${rows[@]:1}"; do
        both=()
        for seed in ${seeds//,/ }; do
            [[ ! -f "$folder/runs/$row-$seed/test.json" || ! -f "$folder/runs/${rows[0]}-$seed/test.json" ]] || both+=("$seed")
        done
        ((${#both[@]})) || continue
        echo "== $row against ${rows[0]}"
        python benchmarks/paired_intervals.py --seeds="$(IFS=, && echo "${both[*]}")" \
            --model="$folder/runs/$row-{seed}/test.json" --baseline="$folder/runs/${rows[0]}-{seed}/test.json"
    done
}
time_is_up() {
    report
    echo "time is up; the same command resumes"
    exit
}
for seed in ${seeds//,/ }; do
    for row in "${rows[@]}"; do
        left=$((minutes * 60 - (SECONDS - began)))
        ((left > 60)) || time_is_up
        num_steps="$(steps "$row")" status=0
        echo "== $row, seed $seed: $num_steps steps"
        # SIGTERM saves the run, which ends with status 75. In the foreground, Ctrl-C reaches it, too.
        timeout --foreground --signal=TERM "$left" "${table[@]}" --row="$row" --seeds="$seed" \
            --gin_param="TrainingConfig.num_steps = $num_steps" || status=$?
        case "$status" in
            0) ;;
            75 | 124) time_is_up ;;
            *) exit "$status" ;;
        esac
    done
done
report
