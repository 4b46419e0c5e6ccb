/* The map of expert load: one canvas pixel is one expert in one range of steps. */

const SHOWN_OCTAVES = 2;
const dark = matchMedia("(prefers-color-scheme: dark)");

/* Blue, neutral, orange: told apart with every common colour vision; the neutral is the page's own surface. */
const RAMPS = {
  light: ["08306b", "2f79bd", "a8cbe8", "f4f3ef", "f7b97d", "d9670a", "7a2c00"],
  dark: ["b5d8ff", "5a9be0", "2b527e", "1f252d", "85501f", "d98433", "ffd9a8"],
};
const NONE = { light: [16, 16, 20], dark: [255, 255, 255] };

/* Colours of the 256 cell values: 0 is an expert that got nothing, 128 an even share. */
function palette(octaves) {
  const theme = dark.matches ? "dark" : "light";
  const ramp = RAMPS[theme].map((hex) => [0, 2, 4].map((k) => parseInt(hex.slice(k, k + 2), 16)));
  const colours = [NONE[theme]];
  for (let value = 1; value < 256; value++) {
    const octave = ((value - 128) / 127) * octaves;
    const at = (Math.min(Math.max(octave / SHOWN_OCTAVES, -1), 1) + 1) * 0.5 * (ramp.length - 1);
    const low = Math.min(Math.floor(at), ramp.length - 2);
    colours.push(ramp[low].map((c, k) => Math.round(c + (ramp[low + 1][k] - c) * (at - low))));
  }
  return colours;
}

function paint(canvas, width, height, valueAt, colours) {
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  for (let row = 0; row < height; row++)
    for (let column = 0; column < width; column++)
      image.data.set([...colours[valueAt(row, column)], 255], (row * width + column) * 4);
  context.putImageData(image, 0, 0);
}

function expertMaps(heat) {
  const columns = heat.first.length;
  const cells = Uint8Array.from(atob(heat.cells), (c) => c.charCodeAt(0));
  const maps = document.getElementById("maps");
  const picker = document.getElementById("layer");
  const readout = document.getElementById("cell");
  const cellAt = (layer, expert, column) => cells[(layer * heat.experts + expert) * columns + column];
  const firstStep = heat.first[0], lastStep = heat.last[columns - 1];

  function read(event, layer) {
    const box = event.target.getBoundingClientRect();
    const inside = (share, count) => Math.min(Math.max(Math.floor(share * count), 0), count - 1);
    const column = inside((event.clientX - box.left) / box.width, columns);
    const expert = inside((event.clientY - box.top) / box.height, heat.experts);
    const value = cellAt(layer, expert, column);
    const times = 2 ** (((value - 128) / 127) * heat.octaves);
    const [first, last] = [heat.first[column], heat.last[column]];
    const steps = first === last ? `step ${first}` : `steps ${first} to ${last}`;
    const share = value === 0 ? "no assignment" : `${trim((times / heat.experts) * 100)} % of assignments, ${trim(times)} times 1/E`;
    readout.textContent = `MoE layer ${layer}, expert ${expert}, ${steps}: ${share}`;
  }

  function map(layer, colours) {
    const figure = node("figure", { class: "map" });
    const caption = node("figcaption", {}, `MoE layer ${layer}`);
    const plot = node("div", { class: "plot" });
    const canvas = node("canvas", { role: "img", "aria-label": `Expert load of MoE layer ${layer}` });
    paint(canvas, columns, heat.experts, (expert, column) => cellAt(layer, expert, column), colours);
    canvas.addEventListener("pointermove", (event) => read(event, layer));
    canvas.addEventListener("click", () => {
      picker.value = picker.value === "all" ? String(layer) : "all";
      show();
    });
    const up = node("div", { class: "ends up", "aria-hidden": "true" });
    up.append(node("span", {}, "0"), node("span", {}, heat.experts - 1));
    const along = node("div", { class: "ends along", "aria-hidden": "true" });
    along.append(node("span", {}, `step ${firstStep}`), node("span", {}, lastStep));
    plot.append(up, canvas, along);
    figure.append(caption, plot);
    return figure;
  }

  function show() {
    const colours = palette(heat.octaves);
    const all = picker.value === "all";
    const layers = all ? [...Array(heat.layers).keys()] : [Number(picker.value)];
    maps.className = `maps ${all ? (heat.layers > 12 ? "many" : "") : "one"}`;
    maps.replaceChildren(...layers.map((layer) => map(layer, colours)));
    scale(colours, heat);
  }

  if (heat.layers > 1) picker.append(node("option", { value: "all" }, "all"));
  for (let layer = 0; layer < heat.layers; layer++) picker.append(node("option", { value: layer }, layer));
  picker.addEventListener("change", show);
  dark.addEventListener("change", show);
  document.getElementById("experts").hidden = false;
  show();
}

function scale(colours, heat) {
  const canvas = node("canvas", { role: "img", "aria-label": "Colour scale: share of assignments against 1/E" });
  const width = 256;
  const valueOf = (column) => 128 + Math.round((((column / (width - 1)) * 2 - 1) * SHOWN_OCTAVES * 127) / heat.octaves);
  const none = 16, gap = 20, all = none + gap + width;
  paint(canvas, all, 1, (_, column) => (column < none ? 0 : valueOf(Math.max(column - none - gap, 0))), colours);
  canvas.getContext("2d").clearRect(none, 0, gap, 1);
  const list = node("ol");
  const labels = [["none", -1], ["≤ ¼", 0], ["½", 0.25], ["1/E", 0.5], ["2×", 0.75], ["≥ 4×", 1]];
  for (const [text, at] of labels) {
    const item = node("li", { class: at === 0.5 ? "even" : "" }, text);
    item.style.left = `${((at < 0 ? 0 : none + gap + at * width) / all) * 100}%`;
    list.append(item);
  }
  document.getElementById("scale").replaceChildren(canvas, list);
}

if (run.heat) expertMaps(run.heat);
