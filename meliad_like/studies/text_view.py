"""The text of a document for a page, coloured by the difference of two models' losses."""

import gzip
from collections.abc import Sequence
from xml.etree.ElementTree import Element

import numpy as np
from jaxtyping import Float

from meliad_like.studies.page import blob, paragraph, section, tag
from meliad_like.studies.units import Units

STEPS_PER_BIT = 100
FULL_COLOURS = (0.1, 0.25, 0.5, 1, 2, 4, 8)
"""The choices for the number of bits at which colours are strongest."""


def pack(units: Units, first_bits: Float[np.ndarray, " units"], other_bits: Float[np.ndarray, " units"]) -> bytes:
    """The text and its losses as `reader.js` unpacks them.

    gzip of the number of units and of bytes (uint32), then of each unit its number of tokens, its number of bytes, and
    the hundredths of a bit that each model paid (uint16, all of one kind together), then the text.
    """
    first, other = (np.clip(np.rint(bits * STEPS_PER_BIT), 0, 2**16 - 1) for bits in (first_bits, other_bits))
    columns = (units.stop - units.first, units.ends - units.starts, first, other)
    head = np.array([len(units.first), len(units.text)], "<u4").tobytes()
    return gzip.compress(head + np.stack(columns).astype("<u2").tobytes() + units.text, mtime=0)


def text_view(first: str, other: str, gains: Float[np.ndarray, " units"], packed: Sequence[bytes]) -> Element:
    """The section with the documents' texts.

    Args:
      first, other: labels of the models.
      gains: of all units; the default strength of colours follows from them.
      packed: the documents, from `pack`.
    """
    usual = np.quantile(np.abs(gains), 0.99) / 2
    chosen = min(FULL_COLOURS, key=lambda bits: abs(np.log(bits) - np.log(max(usual, 1e-9))))
    options = [
        tag("option", f"{bits:g} bits", value=str(bits), **({"selected": ""} if bits == chosen else {}))
        for bits in FULL_COLOURS
    ]
    legend = paragraph(
        tag("span", other, class_="other"),
        " predicted better ",
        tag("span", class_="scale"),
        " ",
        tag("span", first, class_="first"),
        " did",
    )
    return section(
        "The text, coloured by the difference",
        legend,
        tag(
            "div",
            tag("button", "← Back", type="button"),
            tag("button", "On →", type="button"),
            tag("input", id="page", type="range", min="0", value="0", aria_label="page"),
            tag("label", "full colour at ", tag("select", *options, id="full")),
            class_="controls",
        ),
        tag("p", id="where", class_="note"),
        tag("div", id="text"),
        tag("div", "Point at a word, or tap it.", id="unit", aria_live="polite"),
        *(blob(f"document-{i}", content) for i, content in enumerate(packed)),
        id="reader",
        data_first=first,
        data_other=other,
    )
