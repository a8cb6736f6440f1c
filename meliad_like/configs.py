"""Lists the gin files, or those whose name or description has some words, with what they do.

    meliad_like configs size
    meliad_like configs "table 3" state

Files of several folders combine: gin/README.md has the rules. `meliad_like describe` shows what a combination is.
"""

from meliad_like.command_line import Command

COMMAND = Command(
    __doc__,
    words=True,
    no_effect={"gin_file": "all files are listed", "gin_param": "all files are listed"},
)


def main(*words: str) -> int:
    from meliad_like.config import about, shipped_files

    descriptions = {name: about(name) for name in shipped_files()}
    found = [
        name
        for name, description in descriptions.items()
        if all(word.lower() in f"{name} {description}".lower() for word in words)
    ]
    for name in found:
        print(f"{name:<{max(map(len, found))}}  {descriptions[name]}")
    if not found:
        print(f"no gin file has {' and '.join(map(repr, words))} in its name or description")
    return int(not found)


if __name__ == "__main__":
    COMMAND.run(main)
