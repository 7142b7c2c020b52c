// What a reply cost, and what its cache kept, as numbers and as a picture.

import { element, svg } from "./dom.js";

const LINE = 40; // pixels of one kind of layer: its name above its bar

const seconds = (value) => (value === null || value === undefined ? "–" : `${value.toFixed(value < 10 ? 2 : 1)} s`);
const rate = (value) => (value === null ? "–" : value.toFixed(1));

/** In one line. ``reply``: a message of the assistant's, whose ``timings`` are the server's, null if it was stopped. */
export function summary({ timings, firstSeconds }) {
  if (!timings) return firstSeconds === undefined ? "no token came" : `first token after ${seconds(firstSeconds)}`;
  return `${rate(timings.tokens_per_second)} tokens/s, first after ${seconds(timings.first_token_seconds)}, ` +
    `${timings.cached_tokens} cached + ${timings.fed_tokens} fed`;
}

/** All of it; null where the server told nothing. */
export function figures({ timings }) {
  if (!timings) return null;
  const rows = [
    ["tokens/s", "rate", rate(timings.tokens_per_second)],
    ["time to first token", "first", seconds(timings.first_token_seconds)],
    ["tokens cached", "cached", timings.cached_tokens],
    ["tokens fed", "fed", timings.fed_tokens],
    ["tokens generated", "generated", timings.generated_tokens],
    ["prefill", "prefill", seconds(timings.prefill_seconds)],
    ["decoding", "decode", seconds(timings.decode_seconds)],
  ];
  const list = rows.map(([name, id, value]) =>
    element("div", {}, element("dt", { class: `of-${id}` }, name), element("dd", { "data-figure": id }, String(value))));
  return element("div", { class: "figures" }, element("dl", {}, ...list), picture(timings));
}

function layers(count) {
  return count === 1 ? "1 layer" : `${count} layers`;
}

/** Where the tokens came from, and below it, on the same scale, the positions that each kind of layer keeps. */
function picture(timings) {
  const prompt = timings.prompt_tokens;
  const whole = Math.max(1, prompt + timings.generated_tokens);
  const made = [
    { name: "prompt and reply", told: `${whole}`, bars: [
      ["cached", 0, timings.cached_tokens], ["fed", timings.cached_tokens, prompt], ["generated", prompt, whole]] },
    ...timings.cache.map(({ kind, layers: count, start, end }) => ({
      name: `${kind}, ${layers(count)}`, told: end > start ? `${start} to ${end - 1}` : "nothing",
      bars: [["kept", start, end]] })),
  ];
  const described = timings.cache.map(({ kind, layers: count, start, end }) =>
    `${kind} (${layers(count)}) keeps ${end - start} of ${whole} positions, from ${start}`);
  const drawn = svg("svg", { class: "picture", width: "100%", height: LINE * made.length, role: "img",
    "aria-label": `What the cache keeps: ${described.join("; ")}` });
  made.forEach(({ name, told, bars }, index) => {
    const y = index * LINE;
    drawn.append(svg("text", { x: "0", y: y + 14 }, name),
      svg("text", { x: "100%", y: y + 14, "text-anchor": "end", class: "told" }, told),
      svg("rect", { class: "track", x: "0", y: y + 20, width: "100%", height: 12 }));
    for (const [type, start, end] of bars.filter((bar) => bar[2] > bar[1])) {
      drawn.append(svg("rect", { class: type, x: `${(100 * start) / whole}%`, y: y + 20,
        width: `${(100 * (end - start)) / whole}%`, height: 12, "data-start": start, "data-end": end },
        svg("title", {}, `${type}: ${start} to ${end - 1}`)));
    }
  });
  return drawn;
}
