"use strict";
// The text of a document, a page at a time, coloured by the difference between two models. An address such as
// #2:30555 is the 30,556th token of the third document, so that going back in the browser goes back in the text.

const PAGE_BYTES = 6000;
const decoder = new TextDecoder();

/** A document as `page.py` packs it: units of one or more tokens, and what each model paid for them. */
class TextDocument {
  constructor(buffer) {
    const [units, length] = new Uint32Array(buffer, 0, 2);
    const [tokens, bytes, first, other] = [0, 1, 2, 3].map((i) => new Uint16Array(buffer, 8 + 2 * units * i, units));
    this.units = units;
    this.paid = [first, other];
    this.text = new Uint8Array(buffer, 8 + 8 * units, length);
    this.tokenAt = sums(tokens);
    this.byteAt = sums(bytes);
    this.pages = [0];
    for (let i = 0; i < units; i++) {
      if (this.byteAt[i] - this.byteAt[this.pages[this.pages.length - 1]] >= PAGE_BYTES) this.pages.push(i);
    }
  }

  static async load(index) {
    const packed = Uint8Array.from(atob(document.getElementById(`document-${index}`).textContent), (c) => c.charCodeAt(0));
    const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new TextDocument(await new Response(unpacked).arrayBuffer());
  }

  bytes(unit) {
    return this.text.subarray(this.byteAt[unit], this.byteAt[unit + 1]);
  }

  string(unit) {
    return decoder.decode(this.bytes(unit));
  }

  /** Bits; the gain of the first model over the other. */
  bits(unit) {
    const [first, other] = this.paid.map((paid) => paid[unit] / 100);
    return { first, other, gain: other - first };
  }

  /** Tokens since the same characters last stood there; 0 where they never did. */
  distance(unit) {
    const bytes = this.bytes(unit);
    for (let i = unit - 1; i >= 0; i--) {
      const start = this.byteAt[i];
      if (this.byteAt[i + 1] - start === bytes.length && bytes.every((byte, j) => this.text[start + j] === byte)) {
        return this.tokenAt[unit] - this.tokenAt[i];
      }
    }
    return 0;
  }
}

function sums(counts) {
  const total = new Uint32Array(counts.length + 1);
  for (let i = 0; i < counts.length; i++) total[i + 1] = total[i] + counts[i];
  return total;
}

/** The last index whose value is not above `value`. */
function indexOf(values, value) {
  let low = 0, high = values.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (values[middle] <= value) low = middle; else high = middle - 1;
  }
  return low;
}

class Reader {
  constructor(root) {
    this.text = root.querySelector("#text");
    this.unit = root.querySelector("#unit");
    this.hint = this.unit.textContent;
    this.slider = root.querySelector("#page");
    this.where = root.querySelector("#where");
    this.full = root.querySelector("#full");
    [this.previous, this.next] = root.querySelectorAll("button");
    this.loaded = new Map();
    this.at = { document: 0, page: 0 };
    this.names = [root.dataset.first, root.dataset.other];

    this.previous.addEventListener("click", () => this.turn(this.at.page - 1));
    this.next.addEventListener("click", () => this.turn(this.at.page + 1));
    this.slider.addEventListener("input", () => this.turn(Number(this.slider.value)));
    this.full.addEventListener("change", () => this.turn(this.at.page));
    for (const kind of ["pointerover", "click"]) this.text.addEventListener(kind, (event) => this.tell(event.target));
    window.addEventListener("hashchange", () => this.follow());
    this.follow();
  }

  /** Goes where the address says. */
  async follow() {
    const found = /^#(\d+):(\d+)$/.exec(location.hash);
    const [index, token] = found ? [Number(found[1]), Number(found[2])] : [0, 0];
    if (!document.getElementById(`document-${index}`)) return;
    if (!this.loaded.has(index)) this.loaded.set(index, TextDocument.load(index));
    this.document = await this.loaded.get(index);
    this.at.document = index;
    showPart(index);
    const unit = Math.min(indexOf(this.document.tokenAt, token), this.document.units - 1);
    this.turn(indexOf(this.document.pages, unit), token ? unit : -1);
  }

  turn(page, target = -1) {
    const { document: doc, at, full } = this;
    at.page = page;
    const from = doc.pages[page];
    const to = doc.pages[page + 1] ?? doc.units;
    const part = document.createDocumentFragment();
    let marked = null;
    for (let i = from; i < to; i++) {
      const span = document.createElement("span");
      span.textContent = doc.string(i);
      span.dataset.unit = i;
      const { gain } = doc.bits(i);
      const share = Math.round(100 * Math.min(1, Math.abs(gain) / Number(full.value)));
      if (share > 2) span.style.backgroundColor = `color-mix(in srgb, var(--text${gain > 0 ? 1 : 2}) ${share}%, transparent)`;
      if (span.textContent.startsWith("\n") && share > 10) span.className = "end";
      if (!span.textContent) span.className = "stop";
      if (i === target) { span.classList.add("target"); marked = span; }
      part.append(span);
    }
    this.text.replaceChildren(part);
    this.slider.max = doc.pages.length - 1;
    this.slider.value = page;
    this.previous.disabled = page === 0;
    this.next.disabled = page === doc.pages.length - 1;
    const [first, last] = [doc.tokenAt[from], doc.tokenAt[to] - 1];
    this.where.textContent = `page ${number(page + 1)} of ${number(doc.pages.length)}: tokens ${number(first)} to ${number(last)}`;
    document.dispatchEvent(new CustomEvent("page", { detail: { document: at.document, from: first, to: last } }));
    if (marked) {
      marked.scrollIntoView({ block: "center" });
      this.tell(marked);
    } else {
      this.unit.textContent = this.hint;
    }
  }

  /** Says what is known of a unit. */
  tell(span) {
    if (span.dataset.unit === undefined) return;
    const unit = Number(span.dataset.unit);
    const { first, other, gain } = this.document.bits(unit);
    const distance = this.document.distance(unit);
    const text = JSON.stringify(this.document.string(unit));
    const ago = distance ? `the same ${number(distance)} tokens before` : "not seen before";
    const sign = gain > 0 ? "+" : "";
    this.unit.replaceChildren();
    element(this.unit, "strong", "", `${text} `);
    this.unit.append(`token ${number(this.document.tokenAt[unit])}, ${ago}. Bits: `);
    element(this.unit, "span", "first", `${this.names[0]} ${number(first)}`);
    this.unit.append(", ");
    element(this.unit, "span", "other", `${this.names[1]} ${number(other)}`);
    this.unit.append(`; gain ${sign}${number(gain)}`);
  }
}

const choice = document.querySelector("#document");

/** Shows what belongs to one of the documents alone. */
function showPart(index) {
  if (choice) choice.value = String(index);
  for (const part of document.querySelectorAll("[data-part]")) part.hidden = Number(part.dataset.part) !== index;
}

const root = document.querySelector("#reader");
const reader = root && new Reader(root);
choice?.addEventListener("change", () => {
  if (reader) location.hash = `#${choice.value}:0`;
  else showPart(Number(choice.value));
});
