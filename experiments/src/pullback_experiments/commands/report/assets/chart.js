// A chart that its reader changes: what is shown, along which axis, on which scale.

const KEYS = "Plus and minus zoom, 0 shows all, arrows move, comma and period read values, "
  + "x and y switch between linear and logarithmic axes, t what is on the x axis.";
let charts = 0;

class Chart extends Drawing {
  constructor(host, data) {
    super();
    Object.assign(this, { host, data, hidden: new Set(), view: null, along: data.axes[0][0] });
    this.id = `chart-${charts++}`;
    this.log = { x: data.logx, y: data.logy };
    this.build();
    for (const axis of ["x", "y"]) if (!this.positive(axis)) this.log[axis] = false;
    this.readout = new Readout(this);
    listen(this);
    new ResizeObserver(() => this.draw()).observe(this.plot);
    this.draw();
  }

  // --- parts --------------------------------------------------------------------------------

  build() {
    const { data } = this;
    const heading = this.host.querySelector("h4").textContent;
    this.svg = made("svg", { tabindex: 0, role: "application", "aria-roledescription": "chart",
      "aria-label": heading, "aria-describedby": `${this.id}-keys` });
    this.plot = made("div", { class: "plot" }, this.svg);
    this.legend = made("ul", { class: "legend", "aria-label": "Lines" });
    this.legend.append(...data.series.map((series, i) => made("li", {}, this.entry(series, i))));
    const keys = made("p", { class: "unseen", id: `${this.id}-keys` }, KEYS);
    const note = data.note ? [made("p", { class: "note" }, data.note)] : [];
    this.host.append(this.controls(), this.plot, this.legend, ...note, keys);
  }

  entry(series, place) {
    const sample = made("svg", { viewBox: "0 0 24 8", "aria-hidden": "true" }, made("line",
      { class: `sample k${series.color} ${series.style}`, x1: 2, y1: 4, x2: 22, y2: 4 }));
    const button = made("button", { type: "button", "aria-pressed": "true" }, sample, series.name);
    button.title = "Click to hide or show; with Shift, only this one";
    button.addEventListener("click", (event) => this.toggle(place, event.shiftKey));
    return button;
  }

  controls() {
    const bar = made("div", { class: "controls" });
    const button = (words, label, act) => {
      const element = made("button", { type: "button", "aria-label": label, title: label }, words);
      element.addEventListener("click", act);
      return element;
    };
    this.axes = new Map(this.data.axes.map(([key, name]) => [key,
      button(name, `Against ${name}`, () => this.run(key))]));
    if (this.axes.size > 1) {
      bar.append(made("span", { role: "group", "aria-label": "Against" }, ...this.axes.values()));
    }
    this.scales = { x: button("log x", "Logarithmic x axis", () => this.scale("x")),
      y: button("log y", "Logarithmic y axis", () => this.scale("y")) };
    bar.append(made("span", { role: "group", "aria-label": "Scales" }, this.scales.x, this.scales.y));
    bar.append(made("span", { role: "group", "aria-label": "Zoom" },
      button("−", "Zoom out", () => this.zoom(1.5)), button("+", "Zoom in", () => this.zoom(1 / 1.5)),
      button("reset", "Show all", () => this.reset())));
    return bar;
  }

  // --- what a reader changes ----------------------------------------------------------------

  toggle(place, alone) {
    const all = this.data.series.map((_, i) => i);
    if (alone) this.hidden = new Set(this.hidden.size === all.length - 1 && !this.hidden.has(place)
      ? [] : all.filter((i) => i !== place));
    else if (!this.hidden.delete(place)) this.hidden.add(place);
    this.draw();
  }

  run(key) {
    this.along = key;
    this.log.x = this.data.logx && this.positive("x");
    this.reset();
  }

  scale(axis) {
    if (!this.positive(axis)) return;
    this.log[axis] = !this.log[axis];
    this.reset();
  }

  reset() {
    this.view = null;
    this.draw();
  }

  /** Makes the view so many times as large about a place (in t), both axes or those named. */
  zoom(factor, at = null, axes = "xy") {
    const view = this.view ?? this.whole();
    const next = { ...view };
    for (const axis of axes) {
      const [low, high] = view[axis], center = at ? at[axis] : (low + high) / 2;
      const ends = [center + (low - center) * factor, center + (high - center) * factor];
      const all = this.whole()[axis], span = all[1] - all[0];
      if (ends[1] - ends[0] > 1e-6 * span && ends[1] - ends[0] < 20 * span) next[axis] = ends;
    }
    this.look(next);
  }

  /** Moves the view by shares of itself. */
  pan(dx, dy) {
    const { x, y } = this.view ?? this.whole();
    const moved = ([low, high], share) => [low + share * (high - low), high + share * (high - low)];
    this.look({ x: moved(x, dx), y: moved(y, dy) });
  }

  look(view) {
    this.view = view;
    this.draw();
  }

  /** Buttons say what is the case. */
  state() {
    for (const [key, button] of this.axes) button.setAttribute("aria-pressed", key === this.along);
    for (const [axis, button] of Object.entries(this.scales)) {
      button.setAttribute("aria-pressed", this.log[axis]);
      button.disabled = !this.positive(axis);
    }
    [...this.legend.querySelectorAll("button")].forEach((button, place) =>
      button.setAttribute("aria-pressed", !this.hidden.has(place)));
  }
}
