"use strict";
// Shows the part of a page about one document, and its text, a page at a time, coloured by the difference of two models'
// losses. An address such as #2:30555 is token 30,555 of document 2, so that going back in the browser goes back in the
// text. Text of documents only ever becomes text: nothing here parses markup.

const UNITS = 1500; // of a page of the text
const CHART_LEFT = 0.1, CHART_WIDTH = 0.88; // as in page.py
const find = (selector) => document.querySelector(selector);
const text = find("#text"), about = find("#about"), slider = find("#slider"), choice = find("#document");
let shown = -1, units = []; // a unit: its text, first token, tokens since the same text (0: none), bits of both models

async function load(index) {
  const packed = Uint8Array.from(atob(find(`#document-${index}`).textContent), (c) => c.charCodeAt(0));
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

async function follow() {
  const address = /^#\d+:\d+$/.test(location.hash) ? location.hash.slice(1) : `${choice?.value ?? 0}:0`;
  const [index, token] = address.split(":").map(Number);
  if (choice) choice.value = index;
  for (const part of document.querySelectorAll("[data-part]")) part.hidden = Number(part.dataset.part) !== index;
  if (!text || !find(`#document-${index}`)) return;
  if (shown !== index) units = await load(index);
  shown = index;
  slider.max = Math.ceil(units.length / UNITS) - 1;
  const unit = units.findLastIndex((each) => each[1] <= token);
  turn(Math.floor(unit / UNITS));
  if (token) mark(text.children[unit % UNITS]);
}

function turn(page) {
  const spans = units.slice(page * UNITS, (page + 1) * UNITS).map(([string, token, distance, first, other]) => {
    const span = document.createElement("span");
    span.textContent = string || "■";
    const gain = other - first, share = Math.min(100, Math.round(100 * Math.abs(gain) / text.dataset.full));
    span.style.backgroundColor = `color-mix(in srgb, var(--text${gain > 0 ? 1 : 2}) ${share}%, transparent)`;
    const ago = distance ? `the same ${distance.toLocaleString("en")} tokens before` : "not seen before";
    span.dataset.about = `${JSON.stringify(string)}: token ${token.toLocaleString("en")}, ${ago}. Bits: ` +
      `${text.dataset.first} ${first.toFixed(2)}, ${text.dataset.other} ${other.toFixed(2)}; gain ${gain.toFixed(2)}`;
    return span;
  });
  text.replaceChildren(...spans);
  slider.value = page;
  about.textContent = `Page ${page + 1} of ${Number(slider.max) + 1}. Point at a word, or tap it.`;
}

function mark(span) {
  span.className = "target";
  span.scrollIntoView({ block: "center" });
  about.textContent = span.dataset.about;
}

addEventListener("hashchange", follow);
choice?.addEventListener("change", () => { location.hash = `#${choice.value}:0`; });
slider?.addEventListener("input", () => turn(Number(slider.value)));
for (const [button, step] of [["#back", -1], ["#on", 1]]) {
  find(button)?.addEventListener("click", () => turn(Math.min(slider.max, Math.max(0, Number(slider.value) + step))));
}
for (const kind of ["pointerover", "click"]) {
  text?.addEventListener(kind, ({ target }) => { if (target.dataset.about) about.textContent = target.dataset.about; });
}
for (const figure of document.querySelectorAll("figure[data-tokens]")) {
  figure.querySelector("img").addEventListener("click", ({ clientX, currentTarget }) => {
    const { left, width } = currentTarget.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, ((clientX - left) / width - CHART_LEFT) / CHART_WIDTH));
    const index = figure.closest("[data-part]").dataset.part;
    location.hash = `#${index}:${Math.round(share * figure.dataset.tokens)}`;
  });
}
follow();
