// What the lines are at a place: by pointer or by key.

const ROWS = 12;

class Readout {
  constructor(chart) {
    this.chart = chart;
    this.at = null; // in numbers, not in t
    this.box = made("div", { class: "readout", "aria-hidden": "true", hidden: "" });
    this.spoken = made("p", { class: "unseen", "aria-live": "polite" });
    chart.plot.append(this.box, this.spoken);
  }

  /** All x that are shown and have a place, in order. */
  places() {
    const { log, frame: { view } } = this.chart;
    const known = ([, line]) => line.x.filter((x, i) => line.y[i] !== null);
    return [...new Set(this.chart.lines().flatMap(known))].filter((x) => placed(log.x, x)).filter((x) => {
      const t = forward(log.x, x);
      return t >= view.x[0] && t <= view.x[1];
    }).sort((a, b) => a - b);
  }

  /** The x nearest to a pixel. */
  near(pixel) {
    const far = (x) => Math.abs(this.chart.px(forward(this.chart.log.x, x)) - pixel);
    const places = this.places();
    this.at = places.length ? places.reduce((a, b) => (far(b) < far(a) ? b : a)) : null;
    this.draw();
  }

  /** The next x, forwards or backwards, said aloud. */
  step(by) {
    const places = this.places();
    if (!places.length) return;
    const none = by > 0 ? -1 : places.length;
    const now = this.at === null ? none : places.findLastIndex((x) => x <= this.at);
    this.at = places[Math.min(Math.max(now + by, 0), places.length - 1)];
    this.draw();
    this.spoken.textContent = this.box.innerText.replaceAll("\n", ", ");
  }

  clear() {
    this.at = null;
    this.draw();
  }

  /** Each line's value at its point that is nearest to x, lowest last. */
  values() {
    const { chart, at } = this;
    const t = forward(chart.log.x, at), found = [];
    for (const [series, line] of chart.lines()) {
      let best = -1, least = Infinity;
      line.x.forEach((x, i) => {
        if (!placed(chart.log.x, x) || line.y[i] === null) return;
        const off = Math.abs(forward(chart.log.x, x) - t);
        if (off < least) [best, least] = [i, off];
      });
      const span = chart.frame.view.x[1] - chart.frame.view.x[0];
      if (best >= 0 && least <= 0.03 * span) found.push({ series, line, i: best });
    }
    return found.sort((a, b) => b.line.y[b.i] - a.line.y[a.i]);
  }

  draw() {
    const { chart, box } = this;
    chart.svg.querySelector(".cursor")?.remove();
    box.hidden = this.at === null || !chart.frame || !placed(chart.log.x, this.at);
    if (box.hidden) return;
    const x = chart.px(forward(chart.log.x, this.at)), { left, top, right, bottom } = chart.frame;
    if (x < left - 1 || x > right + 1) {
      box.hidden = true;
      return;
    }
    chart.svg.append(made("line", { class: "cursor", x1: x, x2: x, y1: top, y2: bottom }));
    const name = chart.data.axes.find(([key]) => key === chart.along)[1];
    const rows = this.values().slice(0, ROWS).map(({ series, line, i }) => made("div", {},
      made("i", { class: `k${series.color}` }), made("span", {}, series.name),
      made("span", {}, this.value(line, i))));
    box.replaceChildren(made("b", {}, `${name}: ${written(this.at)}`), ...rows);
    const side = x > (left + right) / 2 ? x - box.offsetWidth - 12 : x + 12;
    box.style.transform = `translate(${Math.max(0, side)}px, ${top}px)`;
  }

  value(line, i) {
    const low = line.low?.[i], high = line.high?.[i];
    const value = written(line.y[i], 3);
    if (low == null || high == null || low === high) return value;
    return `${value} (${written(low, 2)} … ${written(high, 2)})`;
  }
}
