#!/usr/bin/env bash
# Trains a small block-recurrent language model on the Python standard library's source: set-up, token store, training,
# evaluation, a sample. Arguments go to the training: bash launch/quickstart.sh --gin_param=TrainingConfig.num_steps=50
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
set_up_environment

workdir=runs/quickstart
if [[ -e "$workdir/finished" ]]; then
    say "Removing $workdir, the last quick start's finished run, to make a new one"
    rm -r "$workdir"
elif [[ -e "$workdir" ]]; then
    say "Going on with $workdir, which was cut off"
fi

configuration=(--gin_file=size/quickstart.gin --gin_file=task/standard_library.gin)
say "Reading the documents: the Python standard library's own source, one document per package"
python -m meliad_like.prepare "${configuration[@]}"
say "Training in $workdir"
python -m meliad_like.train "${configuration[@]}" --workdir="$workdir" "$@"
touch "$workdir/finished"
