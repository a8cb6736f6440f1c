"""Lists the gin files, or those whose name or description has some words, with what they do.

    meliad_like configs size
    meliad_like configs "table 3" state
    meliad_like configs bias_skip               # a name of google-research/meliad

Files of several folders combine: gin/README.md has the rules. `meliad_like describe` shows what a combination is.
"""

from meliad_like.command_line import Command

COMMAND = Command(__doc__, words=True, no_effect=dict.fromkeys(("gin_file", "gin_param"), "all files are listed"))


def main(*words: str) -> int:
    from meliad_like.config import about, shipped_files
    from meliad_like.conversion.meliad_gin import FILES

    descriptions = {name: about(name) for name in shipped_files()}
    for name, theirs in FILES.items():
        descriptions[name] += f" The reference's {theirs}."
    texts = {name: f"{name} {description}".lower() for name, description in descriptions.items()}
    names = [name for name, text in texts.items() if all(word.lower() in text for word in words)]
    for name in names:
        print(f"{name:<{max(map(len, names))}}  {descriptions[name]}")
    if not names:
        print(f"no gin file has {' and '.join(map(repr, words))} in its name or description")
    return int(not names)


if __name__ == "__main__":
    COMMAND.run(main)
