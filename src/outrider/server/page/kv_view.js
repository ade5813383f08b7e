// The KV cache: a map of each arena, pages by state, and what the prefix cache gave to the latest requests.

import { PageMap, spelt } from "./page_map.js";

const SHOWN = ["free", "cached", "held", "shared", "scratch", "pending", "quarantined", "null page"];
const MEANING = {
  free: "holds nothing",
  cached: "held by no request; a prompt may hit it",
  held: "held by one request",
  shared: "held by several requests",
  scratch: "held by a request; nothing in it is final yet",
  pending: "released, but a step in flight may touch it",
  quarantined: "set aside after a fault",
  "null page": "takes writes that are never read",
};

export class KvView {
  constructor(document) {
    this.arenas = document.getElementById("arenas");
    this.legend = document.getElementById("kv-legend");
    this.hits = document.getElementById("hits");
    this.hitSum = document.getElementById("hit-sum");
    this.maps = [];
    this.shape = "";
    this.latest = 0;
    this.counts = new Map();
    for (const name of SHOWN) {
      const entry = this.legend.appendChild(document.createElement("li"));
      entry.title = MEANING[name];
      const swatch = entry.appendChild(document.createElement("span"));
      swatch.className = `swatch ${name.replace(" ", "-")}`;
      entry.append(name);
      const count = entry.appendChild(document.createElement("span"));
      count.className = "count";
      count.textContent = "–";
      this.counts.set(name, count);
    }
  }

  show(told) {
    const shape = JSON.stringify([told.arenas.map((arena) => [arena.pages, arena.page_bytes]), told.groups.map((group) => group.name)]);
    if (shape !== this.shape) this.build(told, shape);
    const sums = new Map(SHOWN.map((name) => [name, 0]));
    told.arenas.forEach((arena, index) => {
      for (const [, count, letter] of arena.runs.matchAll(/(\d+)([a-z])/g)) {
        const name = told.states[letter];
        sums.set(name, (sums.get(name) ?? 0) + Number(count));
      }
      const { map, figures, canvas } = this.maps[index];
      map.show(spelt(arena.runs));
      canvas.dataset.runs = arena.runs;
      const groups = told.groups.filter((group) => group.arena === index);
      figures.textContent = `${sum(groups, "held")} held, ${sum(groups, "published")} published`;
    });
    for (const [name, count] of sums) this.counts.get(name).textContent = count.toLocaleString("en");
    this.showHits(told.recent_hits);
  }

  build(told, shape) {
    this.shape = shape;
    for (const { map } of this.maps) map.close();
    this.arenas.replaceChildren();
    this.maps = told.arenas.map((arena, index) => {
      const groups = told.groups.filter((group) => group.arena === index);
      const box = this.arenas.appendChild(document.createElement("div"));
      box.className = "arena";
      const line = box.appendChild(document.createElement("p"));
      const name = line.appendChild(document.createElement("span"));
      name.textContent = groups.map((group) => (group.name.endsWith(group.kind) ? group.name : `${group.name} (${group.kind})`)).join(", ");
      name.title = `${arena.pages.toLocaleString("en")} pages of ${Math.round(arena.page_bytes / 1024)} KiB; ${groups.map((group) => `${group.page_tokens} tokens of ${group.name}`).join(", ")} in each`;
      const figures = line.appendChild(document.createElement("span"));
      figures.className = "note";
      figures.title = "held: by requests now; published: a prompt may hit them";
      const canvas = box.appendChild(document.createElement("canvas"));
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `Map of ${arena.pages} pages: ${name.textContent}. The counts are listed below.`);
      return { map: new PageMap(canvas, told.states), figures, canvas };
    });
  }

  showHits(hits) {
    // A new engine counts from the beginning.
    const newest = hits.length ? hits[0].number : 0;
    if (newest < this.latest) this.latest = 0;
    const asked = sum(hits, "prompt_tokens");
    const given = sum(hits, "cached_tokens");
    this.hitSum.textContent = asked ? `${Math.round((100 * given) / asked)} % of ${asked.toLocaleString("en")} prompt tokens` : "no request yet";
    const entries = hits.map((hit) => {
      const entry = document.createElement("li");
      if (hit.number > this.latest && this.latest > 0) entry.className = "new";
      const meter = document.createElement("meter");
      meter.max = Math.max(1, hit.prompt_tokens);
      meter.value = hit.cached_tokens;
      const text = document.createElement("span");
      text.textContent = `${hit.cached_tokens.toLocaleString("en")} of ${hit.prompt_tokens.toLocaleString("en")} tokens cached`;
      meter.setAttribute("aria-label", text.textContent);
      const age = document.createElement("span");
      age.className = "age";
      age.textContent = ago(hit.age_s);
      entry.append(meter, text, age);
      return entry;
    });
    // Ages change at every look, entries only when there is a new one: the animation of those is not cut short.
    if (newest !== this.latest || this.hits.childElementCount !== entries.length) this.hits.replaceChildren(...entries);
    else hits.forEach((hit, place) => (this.hits.children[place].lastChild.textContent = ago(hit.age_s)));
    this.latest = newest;
  }
}

function sum(items, field) {
  return items.reduce((total, item) => total + item[field], 0);
}

function ago(age) {
  if (age < 60) return `${Math.floor(age)} s`;
  return age < 3600 ? `${Math.floor(age / 60)} min` : `${Math.floor(age / 3600)} h`;
}
