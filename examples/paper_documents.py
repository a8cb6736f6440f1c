"""Writes the documents of Yoshida et al. 2020 as the folders `wikitext` and `pg19`, which `task/books.gin` reads.

It expects three things in the current folder: the raw version of WikiText-103 as `wikitext-103-raw`, the books of PG-19
as published in `pg19-original` (one text file each, in folders named by split), and GPT-2's tokenizer in `gpt2`.
"""

import re
from pathlib import Path

from tokenizers import Tokenizer


def main() -> None:
    splits = {"train": "train", "validation": "valid", "test": "test"}
    for split, name in splits.items():
        # An article begins with a line ` = Title = `; headings within it have more signs.
        text = Path(f"wikitext-103-raw/wiki.{name}.raw").read_text("utf-8")
        articles = re.split(r"(?m)^(?= = [^=\n]+ = *$)", text)[1:]
        Path("wikitext", split).mkdir(parents=True)
        for i, article in enumerate(articles):
            Path("wikitext", split, f"{i:05}.txt").write_text(article, "utf-8")

    tokenizer = Tokenizer.from_file("gpt2/tokenizer.json")
    for split, most in (("train", 1250), ("validation", None), ("test", None)):
        Path("pg19", split).mkdir(parents=True)
        for path in sorted(Path("pg19-original", split).glob("*.txt"))[:most]:
            text = path.read_text("utf-8")
            if split == "validation":
                text = text[: tokenizer.encode(text).offsets[:15_000][-1][1]]
            Path("pg19", split, path.name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
