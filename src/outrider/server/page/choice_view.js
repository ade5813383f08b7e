// How much the engine speculates and why: what it expects of drafts, what rows cost it, and which drafts were accepted.

const SVG = "http://www.w3.org/2000/svg";
const CHART = { left: 2, right: 174, top: 12, bottom: 58 };
const MOST_ROWS = 128;
const SOURCES = { drafter: "drafter", own_text: "same text", shared_text: "other texts", grammar: "grammar" };
const TALL = 930;

export class ChoiceView {
  constructor(document) {
    this.at = (name) => document.getElementById(`choice${name}`);
    this.lines = new Map(
      Object.entries(SOURCES).map(([source, name]) => {
        const entry = this.at("-sources").appendChild(document.createElement("li"));
        const [label, part] = ["span", "span"].map((kind) => entry.appendChild(document.createElement(kind)));
        label.textContent = name;
        part.textContent = "–";
        return [source, { entry, part }];
      }),
    );
    this.drawn = "";
  }

  /** Shows or hides all of it: a server whose number of drafts is fixed has nothing to explain. */
  appear(chooses) {
    const details = this.at("");
    if (details.hidden && chooses) details.open = innerHeight >= TALL;
    details.hidden = !chooses;
  }

  show(told) {
    if (!told.chooses) return;
    const { choice, costs, sources } = told;
    this.at("-text").textContent = inWords(choice, told.steps);
    this.at("-expected").textContent = rate(choice.rate);
    this.at("-plain").textContent = rate(choice.plain_rate);
    this.at("-observed").textContent = rate(choice.observed_rate);
    this.at("-requests").textContent = String(choice.drafting_requests);
    this.at("-requests").title = `A row of the target costs the time of ${choice.row_price.toFixed(2)} tokens; the machine takes ${choice.speed.toFixed(2)} times as long as when costs were learnt.`;
    for (const [source, { entry, part }] of this.lines) {
      const { offered, verified, accepted } = sources[source];
      part.textContent = verified ? `${Math.round((100 * accepted) / verified)} %` : "–";
      entry.title = `${accepted.toLocaleString("en")} accepted of ${verified.toLocaleString("en")} verified and ${offered.toLocaleString("en")} proposed`;
    }
    this.draw(costs);
  }

  draw(costs) {
    const curves = { target: costs.target, draft: costs.draft };
    const shape = JSON.stringify(curves);
    if (shape === this.drawn) return;
    this.drawn = shape;
    const chart = this.at("-costs");
    const shown = Object.entries(curves).map(([name, points]) => [name, points.filter(([rows]) => rows <= MOST_ROWS)]);
    const all = shown.flatMap(([, points]) => points);
    if (!all.length) return;
    const rowsMost = Math.max(2, ...all.map(([rows]) => rows));
    const most = Math.max(...all.map(([, seconds]) => seconds));
    // Rows double from one part of the axis to the next.
    const x = (rows) => CHART.left + ((CHART.right - CHART.left) * Math.log2(rows)) / Math.log2(rowsMost);
    const y = (seconds) => CHART.bottom - ((CHART.bottom - CHART.top) * seconds) / most;
    const parts = [element("line", { class: "axis", x1: CHART.left, x2: CHART.right, y1: CHART.bottom, y2: CHART.bottom })];
    for (const [name, points] of shown) {
      const path = points.map(([rows, seconds]) => `${x(rows).toFixed(1)},${y(seconds).toFixed(1)}`).join(" ");
      parts.push(element("polyline", { class: `curve ${name}`, points: path }));
      for (const [rows, seconds] of points) {
        const point = element("circle", { class: `point ${name}`, cx: x(rows), cy: y(seconds), r: 2 });
        point.appendChild(element("title", {})).textContent = `${rows} rows: ${milliseconds(seconds)} ms`;
        parts.push(point);
      }
    }
    parts.push(label(CHART.left, 9, "start", `${milliseconds(most)} ms`));
    parts.push(label(CHART.left, 70, "start", "1 row"));
    parts.push(label(CHART.right, 70, "end", `${rowsMost} rows`));
    chart.replaceChildren(...parts);
  }
}

function inWords(choice, steps) {
  if (choice.drafting_requests) return `Drafts of up to ${choice.drafts} tokens ${times(choice)}`;
  return steps.drafting + steps.plain ? "No drafts from the drafter: they would not pay" : "Nothing chosen yet";
}

function times(choice) {
  return choice.plain_rate ? `promise ${(choice.rate / choice.plain_rate).toFixed(2)} times the speed` : "are tried";
}

function rate(value) {
  return value ? value.toFixed(value < 1000 ? 1 : 0) : "–";
}

function milliseconds(seconds) {
  const value = 1000 * seconds;
  return value < 10 ? value.toPrecision(2) : value.toFixed(0);
}

function element(kind, attributes) {
  const found = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
  return found;
}

function label(x, y, anchor, text) {
  const found = element("text", { x, y, "text-anchor": anchor });
  found.textContent = text;
  return found;
}
