#!/usr/bin/env bash
# Trains a model that writes Python, in minutes on two CPU cores: set-up, documents, training, then a table, a picture and
# a sample. --gin_param arguments change the run: bash launch/quickstart.sh --gin_param=TrainingConfig.seed=1
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
[[ " $* " != *" --help "* ]] || show_help
set_up_environment

workdir=runs/quickstart
say "Reading the documents: the Python standard library's own source, one document per package"
python -m meliad_like.prepare --gin_file=quickstart.gin "$@"
if [[ -e "$workdir/finished" ]]; then
    say "Keeping the finished run of an earlier quick start as $workdir.before until this one is trained"
    mv "$workdir" "$workdir.before"
elif [[ -e "$workdir" ]]; then
    say "Resuming $workdir, which was interrupted; remove that folder to begin anew, with other parameters for instance"
fi
say "Training in $workdir. Press Ctrl-C to save and stop; the same command resumes"
python -m meliad_like.train --gin_file=quickstart.gin --workdir="$workdir" "$@" || {
    status=$?
    if [[ -e "$workdir.before" ]] && ! compgen -G "$workdir/checkpoints/[0-9]*" >/dev/null; then
        rm -rf "$workdir"
        mv "$workdir.before" "$workdir"
        say "Nothing was trained: the finished run is in $workdir again"
    fi
    exit "$status"
}
rm -rf "$workdir.before"

say "Evaluating on held-out documents, before and after the training"
python -m meliad_like.evaluate --checkpoint="$workdir" --compare --nodetails --output="$workdir/evaluation.json"
python -m meliad_like.plot --workdir="$workdir" --evaluation="$workdir/evaluation.json"
say "Continuing the beginning of a held-out document"
python -m meliad_like.generate --checkpoint="$workdir" --document=logging --document_tokens=2000 --echo=500 \
    --tokens=300 --temperature=0.7

touch "$workdir/finished"
say "Done in $((SECONDS / 60)) min $((SECONDS % 60)) s. Everything is in $workdir; docs/guide.md has the next steps"
