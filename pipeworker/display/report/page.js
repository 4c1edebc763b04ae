"use strict";
// The timelines of a page: measured and planned, on one axis of time. Zoomed and moved by buttons,
// keys, a finger or a mouse. And the values of curves under the pointer.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const FIELDS = 5; // kind, stage, micro-batch, begin and duration in microseconds
  const ROW = 24, GAP = 4, AXIS = 26, TOP = 4, LEAST = 0.5;
  const panels = [];
  let from = 0, to = 1, row = 0, chosen = null;

  const PRINTED = { "--ink": "#000000", "--soft": "#444444", "--line": "#999999", "--paper": "#ffffff" };
  let printing = false;
  const css = (name) => printing ? PRINTED[name] : getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function time(seconds) {
    const size = Math.abs(seconds);
    if (size >= 1) return seconds.toPrecision(4) + " s";
    return size >= 1e-3 ? (seconds * 1e3).toPrecision(3) + " ms" : (seconds * 1e6).toFixed(0) + " µs";
  }

  function roundStep(least) {
    const power = 10 ** Math.floor(Math.log10(least));
    return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= least * (1 - 1e-9));
  }

  function pattern(context, kind) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 8;
    const pen = tile.getContext("2d");
    pen.fillStyle = kind.color;
    pen.fillRect(0, 0, 8, 8);
    pen.strokeStyle = pen.fillStyle = kind.mark;
    if (kind.pattern === "stripes") {
      pen.lineWidth = 2;
      pen.beginPath();
      for (const x of [-8, 0, 8]) { pen.moveTo(x, 8); pen.lineTo(x + 8, 0); }
      pen.stroke();
    } else {
      pen.beginPath();
      pen.arc(4, 4, 1.4, 0, 7);
      pen.fill();
    }
    return context.createPattern(tile, "repeat");
  }

  class Panel {
    constructor(figure) {
      this.figure = figure;
      this.canvas = figure.querySelector("canvas");
      this.title = figure.querySelector("figcaption");
      panels.push(this);
    }

    show(step) {
      this.step = step;
      this.title.textContent = step.title + ": " + time(step.seconds);
      this.canvas.setAttribute("aria-label", step.title + ", " + data.workers.length + " workers, "
        + time(step.seconds) + "; the table below has the shares of each");
      this.draw();
    }

    margin(pen) {
      pen.font = "12px system-ui, sans-serif";
      const widest = Math.max(...data.workers.map((label) => pen.measureText(label).width));
      return Math.min(widest + 12, this.canvas.clientWidth * 0.35);
    }

    scale() {
      return (this.canvas.clientWidth - this.left - 6) / (to - from);
    }

    draw(density = window.devicePixelRatio || 1) {
      const canvas = this.canvas, width = canvas.clientWidth;
      const height = TOP + data.workers.length * ROW + AXIS;
      canvas.style.height = height + "px";
      canvas.width = Math.round(width * density);
      canvas.height = Math.round(height * density);
      const pen = canvas.getContext("2d");
      pen.scale(density, density);
      pen.clearRect(0, 0, width, height);
      this.left = this.margin(pen);
      const scale = this.scale(), ink = css("--ink"), soft = css("--soft"), line = css("--line");
      const fills = data.kinds.map((kind) => kind.pattern ? pattern(pen, kind) : kind.color);
      const end = Math.min(this.left + (this.step.seconds - from) * scale, width - 6);
      pen.textBaseline = "middle";
      this.step.rows.forEach((spans, number) => {
        const y = TOP + number * ROW;
        pen.globalAlpha = 0.3;
        pen.fillStyle = line;
        if (end > this.left) pen.fillRect(this.left, y, end - this.left, ROW - GAP);
        pen.globalAlpha = 1;
        this.boxes(pen, spans, y, scale, fills, width - 6);
        pen.fillStyle = number === row ? ink : soft;
        pen.textAlign = "right";
        pen.fillText(data.workers[number], this.left - 6, y + (ROW - GAP) / 2, this.left - 8);
      });
      this.axis(pen, scale, height, width, soft, line);
      if (chosen && chosen.panel === this) {
        const span = chosen.at, spans = this.step.rows[chosen.row];
        const x = this.left + (spans[span + 3] * 1e-6 - from) * scale;
        pen.strokeStyle = ink;
        pen.lineWidth = 2;
        pen.strokeRect(x, TOP + chosen.row * ROW - 1, Math.max(spans[span + 4] * 1e-6 * scale, 2),
          ROW - GAP + 2);
      }
    }

    boxes(pen, spans, y, scale, fills, right) {
      pen.save();
      pen.beginPath();
      pen.rect(this.left, y, right - this.left, ROW - GAP);
      pen.clip();
      pen.textAlign = "center";
      pen.lineWidth = 0.6;
      const paper = css("--paper");
      for (let at = 0; at < spans.length; at += FIELDS) {
        const kind = data.kinds[spans[at]];
        const x = this.left + (spans[at + 3] * 1e-6 - from) * scale;
        const wide = spans[at + 4] * 1e-6 * scale;
        if (x + wide < this.left || x > right) continue;
        pen.fillStyle = fills[spans[at]];
        pen.fillRect(x, y, Math.max(wide, LEAST), ROW - GAP);
        if (wide > 3) {
          pen.strokeStyle = paper;
          pen.strokeRect(x, y, wide, ROW - GAP);
        }
        const mark = spans[at + 2] < 0 ? "" : String(spans[at + 2]);
        if (mark && wide > 7 * mark.length + 4) {
          pen.fillStyle = kind.ink;
          pen.fillText(mark, x + wide / 2, y + (ROW - GAP) / 2);
        }
      }
      pen.restore();
    }

    axis(pen, scale, height, width, soft, line) {
      const step = roundStep((to - from) / Math.max(2, Math.floor((width - this.left) / 110)));
      pen.fillStyle = soft;
      pen.strokeStyle = line;
      pen.lineWidth = 1;
      pen.textAlign = "center";
      for (let k = Math.ceil(from / step - 1e-9); k * step <= to + 1e-12; k++) {
        const x = this.left + (k * step - from) * scale;
        pen.beginPath();
        pen.moveTo(x, TOP);
        pen.lineTo(x, height - AXIS + 4);
        pen.globalAlpha = 0.5;
        pen.stroke();
        pen.globalAlpha = 1;
        pen.fillText(k ? time(k * step) : "0", Math.min(x, width - 24), height - AXIS / 2 + 2);
      }
    }

    find(x, y) {
      const number = Math.floor((y - TOP) / ROW);
      const at = ((x - this.left) / this.scale() + from) * 1e6;
      const spans = this.step.rows[number];
      for (let k = 0; spans && k < spans.length; k += FIELDS) {
        if (spans[k + 3] <= at && at <= spans[k + 3] + spans[k + 4]) {
          return { panel: this, row: number, at: k };
        }
      }
      return null;
    }
  }

  const output = document.getElementById("what");

  function choose(found) {
    chosen = found;
    if (!found) { output.textContent = ""; draw(); return; }
    row = found.row;
    const spans = found.panel.step.rows[found.row], at = found.at;
    const begin = spans[at + 3] * 1e-6, took = spans[at + 4] * 1e-6;
    const where = spans[at + 1] < 0 ? "" : " of micro-batch " + spans[at + 2] + " on stage " + spans[at + 1];
    output.textContent = data.workers[found.row] + ": " + data.kinds[spans[at]].name + where + ", "
      + time(begin) + " to " + time(begin + took) + " (" + time(took) + ")";
    if (begin < from || begin + took > to) {
      const half = (to - from) / 2;
      view(begin + took / 2 - half, begin + took / 2 + half);
    } else {
      draw();
    }
  }

  function next(change, panel) {
    const count = panel.step.rows[row].length;
    if (!count) return;
    let at = chosen && chosen.row === row && chosen.panel === panel ? chosen.at + change * FIELDS : 0;
    at = Math.max(0, Math.min(count - FIELDS, at));
    choose({ panel, row, at });
  }

  const whole = () => Math.max(...panels.map((panel) => panel.step.seconds));

  function view(begin, end) {
    const most = whole(), width = Math.min(most, Math.max(end - begin, most * 1e-4, 1e-6));
    from = Math.min(Math.max(begin, 0), most - width);
    to = from + width;
    draw();
  }

  function zoom(factor, middle = (from + to) / 2) {
    view(middle - (middle - from) * factor, middle + (to - middle) * factor);
  }

  let waiting = false;

  function draw() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      panels.forEach((panel) => panel.draw());
    });
  }

  function select(number) {
    row = Math.max(0, Math.min(data.workers.length - 1, number));
    chosen = null;
    output.textContent = data.workers[row];
    draw();
  }

  const keys = {
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), "0": () => view(0, whole()),
    "ArrowLeft": () => view(from - (to - from) / 4, to - (to - from) / 4),
    "ArrowRight": () => view(from + (to - from) / 4, to + (to - from) / 4),
    "ArrowUp": () => select(row - 1), "ArrowDown": () => select(row + 1),
    "n": (panel) => next(1, panel), "p": (panel) => next(-1, panel),
  };

  function listen(panel) {
    const canvas = panel.canvas;
    let drag = null;
    canvas.addEventListener("keydown", (event) => {
      if (keys[event.key] && !event.ctrlKey && !event.metaKey && !event.altKey) {
        event.preventDefault();
        keys[event.key](panel);
      }
    });
    canvas.addEventListener("pointerdown", (event) => {
      drag = { x: event.clientX, from, to, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!drag) return;
      const by = event.clientX - drag.x;
      drag.moved = drag.moved || Math.abs(by) > 4;
      if (drag.moved) view(drag.from - by / panel.scale(), drag.to - by / panel.scale());
    });
    canvas.addEventListener("pointerup", (event) => {
      const box = canvas.getBoundingClientRect();
      if (drag && !drag.moved) choose(panel.find(event.clientX - box.left, event.clientY - box.top));
      drag = null;
    });
    canvas.addEventListener("pointercancel", () => { drag = null; });
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return; // the page scrolls
      event.preventDefault();
      const x = event.clientX - canvas.getBoundingClientRect().left - panel.left;
      zoom(event.deltaY > 0 ? 1.25 : 0.8, from + x / panel.scale());
    }, { passive: false });
  }

  if (data.steps.length) {
    const measured = new Panel(document.getElementById("measured"));
    measured.step = data.steps[0];
    const figure = document.getElementById("planned");
    if (figure) {
      const planned = new Panel(figure);
      planned.step = data.planned;
    }
    to = whole();
    panels.forEach((panel) => { panel.show(panel.step); listen(panel); });
    const buttons = { "zoom-in": "+", "zoom-out": "-", "whole": "0", "earlier": "ArrowLeft",
      "later": "ArrowRight" };
    for (const [id, key] of Object.entries(buttons)) {
      document.getElementById(id).addEventListener("click", () => keys[key](panels[0]));
    }
    const select = document.getElementById("step");
    if (select) {
      select.addEventListener("change", () => {
        chosen = null;
        output.textContent = "";
        measured.show(data.steps[select.selectedIndex]);
        view(0, whole());
      });
    }
    window.addEventListener("resize", draw);
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    window.addEventListener("beforeprint", () => {
      printing = true;
      panels.forEach((panel) => panel.draw(Math.min(3, 200 / data.workers.length)));
    });
    window.addEventListener("afterprint", () => { printing = false; draw(); });
  }

  document.querySelectorAll(".curve").forEach((figure, number) => {
    const svg = figure.querySelector("svg"), caption = figure.querySelector("figcaption");
    const curve = data.curves[number], line = document.createElementNS(svg.namespaceURI, "path");
    const left = +svg.dataset.left, right = +svg.dataset.right;
    line.setAttribute("class", "at");
    svg.append(line);
    const first = curve.first, last = Math.max(curve.steps[curve.steps.length - 1], first + 1);
    let place = -1;

    function show(at) {
      place = Math.max(0, Math.min(curve.steps.length - 1, at));
      const x = left + (curve.steps[place] - first) / (last - first) * (right - left);
      line.setAttribute("d", "M" + x + " 24V146");
      const spread = curve.low[place] === curve.high[place] ? ""
        : ", " + curve.low[place].toPrecision(4) + " to " + curve.high[place].toPrecision(4);
      caption.textContent = "step " + curve.steps[place].toLocaleString("en") + ": "
        + curve.mean[place].toPrecision(6) + spread;
    }

    svg.setAttribute("tabindex", "0");
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = (event.clientX - box.left) * 360 / box.width;
      const step = first + (x - left) / (right - left) * (last - first);
      const found = curve.steps.findIndex((one) => one >= step);
      show(found < 0 ? curve.steps.length - 1 : found);
    });
    svg.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
      if (move) { event.preventDefault(); show(place + move); }
    });
  });
})();
