// Drawing a chart: series in a pair of axes.

const SVG = "http://www.w3.org/2000/svg";

/** An element of SVG or HTML with attributes and children; texts are texts, never markup. */
function made(tag, attributes = {}, ...children) {
  const drawn = ["svg", "g", "path", "line", "rect", "circle", "text", "clipPath"].includes(tag);
  const element = drawn ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** What is drawn of data, by what is hidden, the view (null for all), the scales and the x axis. */
class Drawing {
  // --- numbers ------------------------------------------------------------------------------

  /** [series, line, place] of those that are shown. */
  lines() {
    return this.data.series.map((series, place) => [series, series.lines[this.along], place])
      .filter(([, line, place]) => line && !this.hidden.has(place));
  }

  positive(axis) {
    return this.data.series.some(({ lines }) => lines[this.along]?.[axis].some((v) => v > 0));
  }

  /** The ends in t of all that is shown, with some air. */
  whole() {
    const ends = (log, values) => {
      let low = Infinity, high = -Infinity;
      for (const v of values) {
        if (!placed(log, v)) continue;
        low = Math.min(low, forward(log, v));
        high = Math.max(high, forward(log, v));
      }
      if (low > high) return log ? [-1, 1] : [0, 1];
      const air = low === high ? Math.max(Math.abs(low) * 0.1, log ? 0.5 : 1e-12) : 0.04 * (high - low);
      return [low - air, high + air];
    };
    const lines = this.lines().map(([, line]) => line);
    return { x: ends(this.log.x, lines.flatMap((l) => l.x)),
      y: ends(this.log.y, lines.flatMap((l) => [...l.y, ...(l.low ?? []), ...(l.high ?? [])])) };
  }

  // --- drawing ------------------------------------------------------------------------------

  draw() {
    const width = this.plot.clientWidth, height = this.plot.clientHeight;
    if (!width || !height) return;
    const view = this.view ?? this.whole();
    const down = ticks(this.log.y, ...view.y, Math.max(3, Math.floor(height / 48)));
    const left = 14 + 18 + 6.6 * Math.max(2, ...down.map((tick) => tick.label.length));
    this.frame = { left, top: 8, right: width - 12, bottom: height - 38, view };
    const across = ticks(this.log.x, ...view.x, Math.max(3, Math.floor((width - left) / 74)));
    this.svg.replaceChildren(...this.rules(across, down), ...this.curves(), ...this.names(height));
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.state();
    this.readout.draw();
  }

  /** Pixels of a place in t. */
  px(t) {
    const { left, right, view: { x: [low, high] } } = this.frame;
    return left + ((t - low) / (high - low)) * (right - left);
  }

  py(t) {
    const { top, bottom, view: { y: [low, high] } } = this.frame;
    return bottom - ((t - low) / (high - low)) * (bottom - top);
  }

  rules(across, down) {
    const { left, top, right, bottom } = this.frame, out = [];
    for (const { t, label } of across) {
      const x = this.px(t);
      out.push(made("line", { class: "rule", x1: x, x2: x, y1: top, y2: bottom }),
        made("text", { x, y: bottom + 16, "text-anchor": "middle" }, label));
    }
    for (const { t, label } of down) {
      const y = this.py(t);
      out.push(made("line", { class: "rule", x1: left, x2: right, y1: y, y2: y }),
        made("text", { x: left - 7, y: y + 4, "text-anchor": "end" }, label));
    }
    out.push(made("line", { class: "edge", x1: left, x2: right, y1: bottom, y2: bottom }));
    return out;
  }

  names(height) {
    const { left, top, right, bottom } = this.frame, middle = (top + bottom) / 2;
    const x = this.data.axes.find(([key]) => key === this.along)[1];
    const common = { "text-anchor": "middle" }, turned = `rotate(-90 12 ${middle})`;
    return [
      made("text", { class: "xname", x: (left + right) / 2, y: height - 5, ...common }, x),
      made("text", { class: "yname", x: 12, y: middle, transform: turned, ...common }, this.data.y),
    ];
  }

  curves() {
    const { left, top, right, bottom } = this.frame;
    const size = { width: Math.max(right - left + 6, 0), height: Math.max(bottom - top + 4, 0) };
    const clip = made("clipPath", { id: this.id }, made("rect", { x: left, y: top - 4, ...size }));
    const inside = made("g", { "clip-path": `url(#${this.id})` });
    for (const [series, line] of this.lines()) if (line.low) inside.append(this.band(series, line));
    for (const [series, line] of this.lines()) inside.append(...this.line(series, line));
    return [clip, inside];
  }

  line(series, line) {
    const points = line.x.map((x, i) => placed(this.log.x, x) && placed(this.log.y, line.y[i])
      ? [this.px(forward(this.log.x, x)), this.py(forward(this.log.y, line.y[i]))] : null);
    let path = "", open = false;
    for (const point of points) {
      if (point) path += `${open ? "L" : "M"}${point[0].toFixed(2)} ${point[1].toFixed(2)}`;
      open = point !== null;
    }
    const kind = `k${series.color}`;
    const there = points.filter((p) => p !== null);
    const dots = this.lines().every(([, { x }]) => x.length <= 24) ? there : there.slice(-1);
    return [made("path", { class: `line ${kind} ${series.style}`, d: path }),
      ...dots.map(([cx, cy]) => made("circle", { class: `dot ${kind}`, cx, cy, r: 3.2 }))];
  }

  /** Between low and high, as far as both are there; on a logarithmic axis zero is far below. */
  band(series, line) {
    const edge = (v) => this.py(Math.max(placed(this.log.y, v) ? forward(this.log.y, v) : -1e9,
      this.frame.view.y[0] - 9));
    let path = "", run = [];
    const close = () => {
      if (run.length > 1) path += `M${[...run.map(([x, , high]) => `${x} ${high}`),
        ...run.reverse().map(([x, low]) => `${x} ${low}`)].join("L")}Z`;
      run = [];
    };
    line.x.forEach((x, i) => {
      if (!placed(this.log.x, x) || line.low[i] === null || !placed(this.log.y, line.high[i])) close();
      else {
        const at = [this.px(forward(this.log.x, x)), edge(line.low[i]), edge(line.high[i])];
        run.push(at.map((pixel) => pixel.toFixed(2)));
      }
    });
    close();
    return made("path", { class: `band k${series.color}`, d: path });
  }
}
