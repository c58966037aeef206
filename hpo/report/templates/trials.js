// The table of all trials (sorting, filtering) and the comparison of those that are ticked.
const trialTable = document.querySelector("table.trials");
const MOST_COMPARED = 8;
const inks = {{ inks|tojson }};
const missing = new Set(["", "-", "nan", "inf", "-inf"]);

// A cell as what it is sorted by: a number, a text, or null where there is nothing.
function sortable(text) {
  const said = text.trim();
  if (missing.has(said.toLowerCase())) return null;
  const number = Number(said);
  return Number.isNaN(number) ? said.toLowerCase() : number;
}

function compared(left, right) {
  if (typeof left === typeof right) return left < right ? -1 : left > right ? 1 : 0;
  return typeof left === "number" ? -1 : 1;  // numbers before texts
}

function sorted(rows, column, sign) {
  const keyed = rows.map((row) => [sortable(row.cells[column].textContent), row]);
  keyed.sort(([left], [right]) => {  // stable; what is missing stays last either way
    if (left === null || right === null) return (left === null) - (right === null);
    return sign * compared(left, right);
  });
  return keyed.map(([, row]) => row);
}

// "word" is in the row, "name<3" is about a column: by its name, or the last part of a dotted one.
function condition(term, names) {
  const found = /^(.+?)(<=|>=|!=|=|<|>)(.*)$/.exec(term);
  if (!found) return (row) => row.textContent.toLowerCase().includes(term.toLowerCase());
  const [, name, sign, said] = found;
  let column = names.indexOf(name);
  if (column < 0) column = names.findIndex((each) => each.split(".").pop() === name);
  if (column < 0) throw new Error(`no column ${name}`);
  const wanted = sortable(said);
  return (row) => {
    const value = sortable(row.cells[column].textContent);
    if (sign === "=" || sign === "!=") return (value === wanted) === (sign === "=");
    if (value === null || wanted === null || typeof value !== typeof wanted) return false;
    const order = compared(value, wanted);
    return sign[0] === "<" ? order < 0 || (sign === "<=" && !order) : order > 0 || (sign === ">=" && !order);
  };
}

function setUpTrials() {
  const body = trialTable.tBodies[0];
  const rows = [...body.rows];
  const heads = [...trialTable.tHead.rows[0].cells];
  const names = heads.map((head) => head.textContent.trim());
  const field = document.getElementById("trial-filter");
  const count = document.getElementById("trial-count");

  for (const head of heads.slice(1)) {
    head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of heads) if (other !== head && other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      body.append(...sorted([...body.rows], head.cellIndex, down ? -1 : 1));
    });
  }
  field.addEventListener("input", () => {
    const terms = field.value.trim().split(/\s+/).filter(Boolean);
    try {
      const conditions = terms.map((term) => condition(term, names));
      for (const row of rows) row.hidden = !conditions.every((holds) => holds(row));
      const left = rows.filter((row) => !row.hidden).length;
      count.textContent = `${left} of ${rows.length} trials`;
    } catch (error) {
      count.textContent = `${error.message}: ${names.slice(1).join(", ")}`;
    }
  });
  body.addEventListener("change", () => compare(body, names));
  document.getElementById("comparison-clear").addEventListener("click", () => {
    for (const box of body.querySelectorAll("input:checked")) box.checked = false;
    compare(body, names);
    field.focus();
  });
  return compare(body, names);
}

// Curves by trial: those of the figure of all, and the ones that it leaves out.
function curvesOf(numbers) {
  const found = new Map(numbers.map((number) => [number, [[], []]]));
  const drawn = document.querySelector('script[data-figure="curves"]');
  const more = document.getElementById("more-curves");
  const traces = drawn ? JSON.parse(drawn.textContent).data.filter((trace) => trace.mode === "lines") : [];
  if (more) traces.push(JSON.parse(more.textContent));
  for (const trace of traces) {
    if (trace.meta === "best") continue;
    (trace.customdata || []).forEach((number, place) => {
      const curve = number === null ? undefined : found.get(number);
      if (curve === undefined) return;
      curve[0].push(trace.x[place]);
      curve[1].push(trace.y[place]);
    });
  }
  return found;
}

async function compare(body, names) {
  const ticked = [...body.querySelectorAll("input:checked")];
  for (const box of body.querySelectorAll("input")) box.disabled = !box.checked && ticked.length >= MOST_COMPARED;
  const rows = ticked.map((box) => box.closest("tr"));
  const numbers = rows.map((row) => Number(row.cells[1].textContent));
  const panel = document.getElementById("comparison");
  panel.hidden = rows.length === 0;
  if (rows.length === 0) return;
  document.getElementById("comparison-said").textContent =
    `Trials ${numbers.join(", ")}` + (rows.length >= MOST_COMPARED ? "; no more than these are compared" : "");
  const table = panel.querySelector("table");
  const made = (kind, text, scope) => {
    const cell = document.createElement(kind);
    cell.textContent = text;
    if (scope) cell.scope = scope;
    return cell;
  };
  const head = document.createElement("tr");
  head.append(made("th", "", "col"), ...numbers.map((number) => made("th", `trial ${number}`, "col")));
  const lines = names.slice(2).map((name, place) => {
    const line = document.createElement("tr");
    const values = rows.map((row) => row.cells[place + 2].textContent.trim());
    line.append(made("th", name, "row"), ...values.map((value) => made("td", value || "-")));
    if (new Set(values).size > 1) line.className = "differs";
    return line;
  });
  table.tHead.replaceChildren(head);
  table.tBodies[0].replaceChildren(...lines);
  await drawComparison(numbers, rows.map((row) => row.cells[2].textContent.trim()));
  showOverflow();
}

async function drawComparison(numbers, outcomes) {
  const place = document.getElementById("figure-comparison");
  if (!place) return;
  const curves = curvesOf(numbers);
  const dashes = ["solid", "dash", "dot", "dashdot"];
  const data = numbers.map((number, index) => ({
    x: curves.get(number)[0], y: curves.get(number)[1], name: `trial ${number}, ${outcomes[index]}`,
    mode: "lines+markers", marker: {size: 5},
    line: {color: inks[index % inks.length], dash: dashes[Math.floor(index / inks.length)], width: 2},
  }));
  const axes = JSON.parse(place.dataset.axes);
  const last = Math.max(...data.flatMap((each) => each.x));
  const layout = {
    template: template(), dragmode: drag, hovermode: "closest", showlegend: true,
    margin: {l: 60, r: 12, t: 20, b: 50}, legend: {orientation: "h", y: 1.02, yanchor: "bottom", x: 0},
    xaxis: {title: {text: axes.x}, dtick: last <= axes.few ? 1 : null}, yaxis: {title: {text: axes.y}, type: axes.type},
  };
  await Plotly.react(place, data, layout, settings);
  if (!places.includes(place)) places.push(place);
}
