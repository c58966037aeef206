// Plotly's own button for sharing would send a chart's data to a server; it is there unless switched off.
"use strict";
const templates = {{ figure_templates|tojson }};
const touched = matchMedia("(pointer: coarse)").matches;
const settings = {
  displaylogo: false, responsive: true, showSendToCloud: false, plotlyServerURL: "",
  displayModeBar: touched ? false : "hover",
};
const dark = matchMedia("(prefers-color-scheme: dark)");
const paper = 680; // pixels, of a page of A4 or letter within its margins
const places = [];
// On a screen that is touched, a drag moves the page and not the figure.
const drag = touched ? false : "zoom";
const template = () => templates[dark.matches ? "dark" : "light"];
const redrawn = (change) => Promise.all(places.map((place) => Plotly.relayout(place, change(place))));

async function draw() {
  for (const data of document.querySelectorAll("script[data-figure]")) {
    const figure = JSON.parse(data.textContent);
    const place = document.getElementById("figure-" + data.dataset.figure);
    const layout = {...figure.layout, template: template(), dragmode: drag};
    await Plotly.newPlot(place, figure.data, layout, settings);
    places.push(place);
  }
}

// What is larger than its box says so.
function showOverflow() {
  for (const box of document.querySelectorAll(".scroll")) {
    const larger = box.scrollWidth > box.clientWidth + 1 || box.scrollHeight > box.clientHeight + 1;
    box.classList.toggle("larger", larger);
  }
}
addEventListener("resize", showOverflow);
dark.addEventListener("change", () => redrawn(() => ({template: template()})));
let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details:not([open])")];
  for (const each of closed) each.open = true;
  redrawn((place) => ({template: templates.light, width: place.closest(".tiles") ? paper / 2 - 10 : paper}));
});
addEventListener("afterprint", () => {
  for (const each of closed) each.open = false;
  redrawn(() => ({template: template(), width: null, autosize: true}));
});

async function begin() {
  showOverflow();
  await draw();
  if (trialTable) await setUpTrials();
  showOverflow();
  document.documentElement.dataset.drawn = "yes";
}
