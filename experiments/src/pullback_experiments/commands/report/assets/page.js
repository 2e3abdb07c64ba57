// The page as a whole: charts when they come into view, filters, theme, copying, addresses, paper.

const all = (selector, where = document) => [...where.querySelectorAll(selector)];

// --- charts -----------------------------------------------------------------------------------

/** Draws a chart once; a chart whose data cannot be drawn stays hidden, with its figure open. */
function start(host) {
  if (host.dataset.drawn) return;
  host.dataset.drawn = "yes";
  new Chart(host, JSON.parse(host.querySelector("script").textContent));
}

const hosts = all("[data-chart]");
const watcher = new IntersectionObserver((seen) => {
  for (const { target, isIntersecting } of seen) {
    if (!isIntersecting) continue;
    watcher.unobserve(target);
    start(target);
  }
}, { rootMargin: "600px" });
for (const host of hosts) {
  host.hidden = false;
  watcher.observe(host);
}
for (const details of all("[data-folded]")) details.open = false;
all("[data-zoom]").forEach(zoomable);
all("table").forEach(sortable);

addEventListener("beforeprint", () => {
  hosts.forEach(start);
  for (const details of all("[data-folded]")) details.open = true;
});

// --- what is shown ----------------------------------------------------------------------------

const form = document.querySelector(".filters");

function filter() {
  const search = form.querySelector("input").value.trim().toLowerCase();
  const paper = form.querySelector("select").value;
  const verdicts = new Set(all("[aria-pressed=true]", form).map((button) => button.dataset.verdict));
  let count = 0;
  for (const section of all("section[data-paper]")) {
    let some = 0;
    for (const article of all("article", section)) {
      const words = [section.querySelector("h2"), ...all("h3, .claim, .why, .checks, .about", article)]
        .map((part) => part.textContent).join(" ").toLowerCase();
      const shown = verdicts.has(article.dataset.verdict) && (!paper || section.dataset.paper === paper)
        && search.split(/\s+/).every((word) => words.includes(word));
      article.hidden = !shown;
      some += shown;
    }
    section.hidden = !some;
    count += some;
  }
  for (const row of all("tr[data-for]")) {
    row.hidden = document.getElementById(row.dataset.for)?.hidden ?? false;
  }
  const total = all("article").length;
  form.querySelector("output").textContent = count === total ? "" : `${count} of ${total} shown`;
}

if (form) {
  form.hidden = false;
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  for (const button of all("[data-verdict]", form)) {
    button.addEventListener("click", () => {
      button.setAttribute("aria-pressed", button.getAttribute("aria-pressed") !== "true");
      filter();
    });
  }
}

/** An address leads to its experiment, whatever is filtered. */
function arrive() {
  let name = location.hash.slice(1);
  try { name = decodeURIComponent(name); } catch { /* as it is */ }
  const target = name && document.getElementById(name);
  if (!target) return;
  if (form && target.closest("[hidden]")) {
    form.reset();
    for (const button of all("[data-verdict]", form)) button.setAttribute("aria-pressed", "true");
    filter();
  }
  target.scrollIntoView({ behavior: "instant" });
}
addEventListener("hashchange", arrive);
arrive(); // what the script shows and folds has moved it

// --- theme ------------------------------------------------------------------------------------

const themes = ["system", "light", "dark"], toggle = document.querySelector("[data-theme-switch]");

function remembered(value) {
  try {
    if (value) localStorage.setItem("pullback-theme", value);
    return localStorage.getItem("pullback-theme");
  } catch { // some browsers keep nothing for files
    return value;
  }
}

function dress(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  toggle.textContent = `Theme: ${theme}`;
}

let theme = themes.includes(remembered()) ? remembered() : "system";
dress(theme);
toggle.hidden = false;
toggle.addEventListener("click", () => {
  theme = themes[(themes.indexOf(theme) + 1) % themes.length];
  remembered(theme);
  dress(theme);
});

// --- copying ----------------------------------------------------------------------------------

for (const block of all(".command")) {
  const button = made("button", { type: "button" }, "Copy"), code = block.querySelector("code");
  button.addEventListener("click", async () => {
    let done = true;
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch { // not allowed everywhere: the text is selected then, and the older way tried
      getSelection().selectAllChildren(code);
      done = document.execCommand("copy");
    }
    button.textContent = done ? "Copied" : "Press Ctrl+C";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  block.append(button);
}
