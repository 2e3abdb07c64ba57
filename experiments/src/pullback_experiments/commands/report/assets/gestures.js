// Pointer, wheel and keys on a chart.

const SMALL = 6; // pixels that are a click and no drag

function listen(chart) {
  const { svg } = chart, pointers = new Map();
  let start = null;

  const place = (event) => {
    const box = svg.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const inverse = ([x, y]) => {
    const { left, top, right, bottom, view } = chart.frame;
    return { x: view.x[0] + ((x - left) / (right - left)) * (view.x[1] - view.x[0]),
      y: view.y[0] + ((bottom - y) / (bottom - top)) * (view.y[1] - view.y[0]) };
  };
  const shares = ([ax, ay], [bx, by]) => {
    const { left, top, right, bottom } = chart.frame;
    return [(ax - bx) / (right - left), (by - ay) / (bottom - top)];
  };

  svg.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || !chart.frame) return;
    svg.focus({ preventScroll: true });
    pointers.set(event.pointerId, place(event));
    svg.setPointerCapture(event.pointerId);
    start = pointers.size === 1 ? { at: place(event), view: chart.view, pan: event.shiftKey } : null;
  });

  svg.addEventListener("pointermove", (event) => {
    const now = place(event), before = pointers.get(event.pointerId);
    if (!chart.frame) return;
    if (!before) return void chart.readout.near(now[0]);
    pointers.set(event.pointerId, now);
    if (pointers.size === 2) return pinch(before, now, event.pointerId);
    if (event.pointerType === "mouse" && start && !start.pan) box(start.at, now);
    else if (start?.pan || chart.view) chart.pan(...shares(before, now));
    else chart.readout.near(now[0]);
  });

  const end = (event) => {
    const now = place(event), mouse = event.pointerType === "mouse";
    if (pointers.delete(event.pointerId) && start && mouse && !start.pan) select(start.at, now);
    svg.querySelector(".box")?.remove();
    start = null;
  };
  svg.addEventListener("pointerup", end);
  svg.addEventListener("pointercancel", (event) => {
    pointers.delete(event.pointerId);
    svg.querySelector(".box")?.remove();
    start = null;
  });
  svg.addEventListener("pointerleave", () => pointers.size || chart.readout.clear());
  svg.addEventListener("dblclick", () => chart.reset());

  const corners = ([ax, ay], [bx, by]) => {
    const { left, top, right, bottom } = chart.frame;
    const within = (v, low, high) => Math.min(Math.max(v, low), high);
    const x = [Math.min(ax, bx), Math.max(ax, bx)].map((v) => within(v, left, right));
    const y = [Math.min(ay, by), Math.max(ay, by)].map((v) => within(v, top, bottom));
    // a drag along one axis takes all of the other
    return { x: x[1] - x[0] > SMALL ? x : [left, right], y: y[1] - y[0] > SMALL ? y : [top, bottom] };
  };
  const dragged = (a, b) => Math.hypot(a[0] - b[0], a[1] - b[1]) > SMALL;

  function box(a, b) {
    svg.querySelector(".box")?.remove();
    if (!dragged(a, b)) return;
    const { x, y } = corners(a, b);
    const size = { width: x[1] - x[0], height: y[1] - y[0] };
    svg.append(made("rect", { class: "box", x: x[0], y: y[0], ...size }));
  }

  function select(a, b) {
    if (!dragged(a, b)) return;
    const { x, y } = corners(a, b);
    const low = inverse([x[0], y[1]]), high = inverse([x[1], y[0]]);
    chart.look({ x: [low.x, high.x], y: [low.y, high.y] });
  }

  function pinch(before, now, id) {
    const other = [...pointers].find(([key]) => key !== id)[1];
    const far = (p) => Math.max(Math.hypot(p[0] - other[0], p[1] - other[1]), 1);
    const middle = [(now[0] + other[0]) / 2, (now[1] + other[1]) / 2];
    chart.zoom(far(before) / far(now), inverse(middle));
  }

  svg.addEventListener("wheel", (event) => {
    if (!chart.frame) return;
    // a page that is scrolled must not be caught by a chart in passing
    if (document.activeElement !== svg && !event.ctrlKey && !event.metaKey) return void hint(chart);
    event.preventDefault();
    const lines = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? 400 : 1;
    const power = Math.max(-0.5, Math.min(0.5, 0.0018 * lines * event.deltaY));
    chart.zoom(Math.exp(power), inverse(place(event)));
  }, { passive: false });

  const keys = {
    "+": () => chart.zoom(1 / 1.3), "=": () => chart.zoom(1 / 1.3), "-": () => chart.zoom(1.3),
    "_": () => chart.zoom(1.3), 0: () => chart.reset(),
    ArrowLeft: () => chart.pan(-0.1, 0), ArrowRight: () => chart.pan(0.1, 0),
    ArrowUp: () => chart.pan(0, 0.1), ArrowDown: () => chart.pan(0, -0.1),
    ",": () => chart.readout.step(-1), ".": () => chart.readout.step(1),
    Escape: () => chart.readout.clear(), x: () => chart.scale("x"), y: () => chart.scale("y"),
    t: () => {
      const all = [...chart.axes.keys()];
      chart.run(all[(all.indexOf(chart.along) + 1) % all.length]);
    },
  };
  svg.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(keys, event.key)) return;
    event.preventDefault();
    keys[event.key]();
  });
}

/** Says once in a while how the wheel zooms. */
function hint(chart) {
  if (chart.plot.querySelector(".hint")) return;
  const words = made("div", { class: "hint" }, "Click first, or hold Ctrl, to zoom with the wheel");
  chart.plot.append(words);
  setTimeout(() => words.remove(), 1600);
}
