// One arena as squares on a canvas. The canvas keeps its size; with more pages than fit, a square stands for several
// neighbours and shows the busiest of them. Only squares that change are painted.

const HEIGHT = 74;
const SMALLEST = 3;
const LARGEST = 14;
const FLASH_MS = 900;
const BUSIEST_FIRST = "qshxpckf";
const RANK = new Map([...BUSIEST_FIRST].map((letter, rank) => [letter, rank]));

/** "1k12h" as one letter per page. */
export function spelt(runs) {
  return runs.replace(/(\d+)([a-z])/g, (_all, count, letter) => letter.repeat(Number(count)));
}

export class PageMap {
  constructor(canvas, names) {
    this.canvas = canvas;
    this.names = names;
    this.pages = "";
    this.cells = [];
    this.flashes = new Map();
    this.frame = null;
    this.resized = new ResizeObserver(() => this.layOut());
    this.resized.observe(canvas);
    this.dark = matchMedia("(prefers-color-scheme: dark)");
    this.dark.addEventListener("change", () => this.layOut());
    canvas.addEventListener("mousemove", (event) => this.point(event));
  }

  show(pages) {
    const before = this.pages;
    this.pages = pages;
    if (before.length !== pages.length) {
      this.layOut();
      return;
    }
    this.paint(before);
  }

  layOut() {
    const width = this.canvas.clientWidth;
    if (!width || !this.pages) return;
    const scale = window.devicePixelRatio || 1;
    this.size = Math.max(SMALLEST, Math.min(LARGEST, Math.floor(Math.sqrt((width * HEIGHT) / this.pages.length))));
    // Rounding rows and columns down can leave too little room for the last pages.
    while (this.size > SMALLEST && Math.floor(width / this.size) * Math.floor(HEIGHT / this.size) < this.pages.length) this.size -= 1;
    this.columns = Math.floor(width / this.size);
    const room = this.columns * Math.floor(HEIGHT / this.size);
    this.perCell = Math.ceil(this.pages.length / room);
    const rows = Math.ceil(Math.ceil(this.pages.length / this.perCell) / this.columns);
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(rows * this.size * scale);
    this.canvas.style.height = `${rows * this.size}px`;
    this.context = this.canvas.getContext("2d");
    this.context.scale(scale, scale);
    const style = getComputedStyle(this.canvas);
    this.colours = new Map(Object.entries(this.names).map(([letter, name]) => [letter, style.getPropertyValue(`--page-${name.replace(" ", "-")}`)]));
    this.hitColour = style.getPropertyValue("--page-hit");
    this.cells = [];
    this.paint(this.pages);
  }

  paint(before) {
    if (!this.context) return;
    const now = performance.now();
    const count = Math.ceil(this.pages.length / this.perCell);
    for (let cell = 0; cell < count; cell++) {
      const start = cell * this.perCell;
      const stop = Math.min(start + this.perCell, this.pages.length);
      let state = this.pages[start];
      for (let page = start; page < stop; page++) {
        const letter = this.pages[page];
        if (RANK.get(letter) < RANK.get(state)) state = letter;
        // A cached page that a request holds now was found by a prompt.
        if (before[page] === "c" && (letter === "h" || letter === "s")) this.flashes.set(cell, now + FLASH_MS);
      }
      if (this.cells[cell] !== state || this.flashes.has(cell)) {
        this.cells[cell] = state;
        this.square(cell, this.flashes.has(cell) ? this.hitColour : this.colours.get(state));
      }
    }
    this.fade();
  }

  fade() {
    if (this.frame !== null || !this.flashes.size) return;
    this.frame = requestAnimationFrame((now) => {
      this.frame = null;
      for (const [cell, until] of this.flashes) {
        if (now < until) continue;
        this.flashes.delete(cell);
        this.square(cell, this.colours.get(this.cells[cell]));
      }
      this.fade();
    });
  }

  square(cell, colour) {
    const gap = this.size > 4 ? 1 : 0.5;
    const x = (cell % this.columns) * this.size;
    const y = Math.floor(cell / this.columns) * this.size;
    this.context.clearRect(x, y, this.size, this.size);
    this.context.fillStyle = colour;
    this.context.fillRect(x, y, this.size - gap, this.size - gap);
  }

  point(event) {
    if (!this.columns) return;
    const cell = Math.floor(event.offsetY / this.size) * this.columns + Math.floor(event.offsetX / this.size);
    const page = cell * this.perCell;
    const inside = event.offsetX < this.columns * this.size && page < this.pages.length;
    const last = Math.min(page + this.perCell, this.pages.length) - 1;
    this.canvas.title = inside ? `${page === last ? `page ${page}` : `pages ${page} to ${last}`}: ${this.names[this.cells[cell]]}` : "";
  }

  close() {
    this.resized.disconnect();
  }
}
