"""Lists gin files and rows of tables, or those whose name or description has some words, with what they do.

    meliad_like configs size
    meliad_like configs table3 states
    meliad_like configs bias_skip               # a name of google-research/meliad

They combine: gin/README.md has the rules. `meliad_like describe` shows what a combination is.
"""

from meliad_like.command_line import Command

COMMAND = Command(__doc__, words=True, no_effect=dict.fromkeys(("gin_file", "gin_param"), "all files are listed"))


def main(*words: str) -> int:
    from meliad_like.config import about, shipped_files, shipped_rows
    from meliad_like.conversion.meliad_gin import FILES

    descriptions = {name: about(name) for name in (*shipped_files(), *shipped_rows())}
    for name, theirs in FILES.items():
        descriptions[name] += f" The reference's {theirs}."
    texts = {name: f"{name} {description}".lower() for name, description in descriptions.items()}
    names = [name for name, text in texts.items() if all(word.lower() in text for word in words)]
    for name in names:
        print(f"{name:<{max(map(len, names))}}  {descriptions[name]}")
    if not names:
        print(f"no gin file or row has {' and '.join(map(repr, words))} in its name or description")
    return int(not names)


if __name__ == "__main__":
    COMMAND.run(main)
