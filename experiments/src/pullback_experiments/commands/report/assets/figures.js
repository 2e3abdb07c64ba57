// Figures that were drawn by a run, on the whole screen: wheel, drag, + − 0 and arrows.

function zoomable(figure) {
  figure.tabIndex = 0;
  figure.setAttribute("role", "button");
  figure.setAttribute("aria-label", `${figure.getAttribute("aria-label")}, enlarge`);
  figure.addEventListener("click", () => enlarge(figure));
  figure.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    enlarge(figure);
  });
}

function enlarge(figure) {
  const { src, alt } = figure.querySelector("img");
  const image = made("img", { src, alt, draggable: "false" });
  const stage = made("div", { class: "stage" }, image), bar = made("div", { class: "bar" });
  const dialog = made("dialog", { class: "zoom", "aria-label": image.alt }, stage, bar);
  let scale = 1, x = 0, y = 0;
  const show = () => { image.style.transform = `translate(${x}px, ${y}px) scale(${scale})`; };
  const zoom = (factor, cx = stage.clientWidth / 2, cy = stage.clientHeight / 2) => {
    const next = Math.min(Math.max(scale * factor, 0.5), 40), ratio = next / scale;
    [x, y, scale] = [cx - (cx - x) * ratio, cy - (cy - y) * ratio, next];
    show();
  };
  const move = (dx, dy) => { [x, y] = [x + dx, y + dy]; show(); };
  const reset = () => { [scale, x, y] = [1, 0, 0]; show(); };
  const acts = [["−", "Zoom out", () => zoom(1 / 1.4)], ["+", "Zoom in", () => zoom(1.4)],
    ["reset", "Show all", reset], ["close", "Close", () => dialog.close()]];
  for (const [words, label, act] of acts) {
    const button = made("button", { type: "button", "aria-label": label }, words);
    button.addEventListener("click", act);
    bar.append(button);
  }
  const pointers = new Map();
  stage.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, [event.clientX, event.clientY]);
    stage.setPointerCapture(event.pointerId);
  });
  stage.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId), now = [event.clientX, event.clientY];
    if (!before) return;
    pointers.set(event.pointerId, now);
    if (pointers.size === 1) return void move(now[0] - before[0], now[1] - before[1]);
    const other = [...pointers].find(([id]) => id !== event.pointerId)[1];
    const far = (p) => Math.max(Math.hypot(p[0] - other[0], p[1] - other[1]), 1);
    zoom(far(now) / far(before), (now[0] + other[0]) / 2, (now[1] + other[1]) / 2);
  });
  for (const kind of ["pointerup", "pointercancel"]) {
    stage.addEventListener(kind, (event) => pointers.delete(event.pointerId));
  }
  stage.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(Math.exp(-0.0018 * event.deltaY), event.clientX, event.clientY);
  }, { passive: false });
  stage.addEventListener("dblclick", reset);
  const keys = { "+": () => zoom(1.4), "=": () => zoom(1.4), "-": () => zoom(1 / 1.4), 0: reset,
    ArrowLeft: () => move(60, 0), ArrowRight: () => move(-60, 0),
    ArrowUp: () => move(0, 60), ArrowDown: () => move(0, -60) };
  dialog.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || !Object.hasOwn(keys, event.key)) return;
    event.preventDefault();
    keys[event.key]();
  });
  dialog.addEventListener("close", () => { dialog.remove(); figure.focus(); });
  document.body.append(dialog);
  dialog.showModal();
}
