# shellcheck shell=bash
# Sourced by bash: completes the commands of meliad_like and their flags, which --help lists.
_complete_meliad_like() {
    local words
    if ((COMP_CWORD == 1)); then
        words="$(meliad_like --help | sed -n 's/^  \([a-z]*\) .*/\1/p')"
    else
        words="$(meliad_like "${COMP_WORDS[1]}" --help | sed -n 's/^  --\[no]/  --/; s/^  \(--[a-z_]*=\{0,1\}\).*/\1/p')"
    fi
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}")
}
complete -o default -o nospace -F _complete_meliad_like meliad_like
