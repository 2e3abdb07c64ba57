// Tables that sort: by number where most of a column are numbers, words after them ("never"), else
// by words; what is missing comes last.

const NUMBER = /^[<>≤≥≈~]?\s*([−+-]?(?:\d[\d,]*\.?\d*|\.\d+)(?:e[−+-]?\d+)?|[−+-]?(?:inf|∞))/i;
const MISSING = new Set(["", "–", "—", "-", "nan", "none"]);

/** The number that a cell begins with ("1.2e−3 ± 4e−4", "3/10", "97 %"), or NaN. */
function number(words) {
  const found = NUMBER.exec(words.trim());
  if (!found) return NaN;
  const digits = found[1].replaceAll("−", "-").replaceAll(",", "");
  return /inf|∞/i.test(digits) ? (digits.startsWith("-") ? -Infinity : Infinity) : Number(digits);
}

/** The rows in order of a column. */
function sorted(rows, place, up) {
  const cells = rows.map((row) => row.cells[place]);
  const words = cells.map((cell) => (cell ? (cell.dataset.value ?? cell.textContent.trim()) : ""));
  const missing = words.map((w) => MISSING.has(w.toLowerCase()));
  const numbers = words.map(number);
  const known = rows.length - missing.filter(Boolean).length;
  const numeric = 2 * numbers.filter((n, i) => !missing[i] && !Number.isNaN(n)).length >= known;
  const compare = (i, j) => {
    const [a, b] = [Number.isNaN(numbers[i]), Number.isNaN(numbers[j])];
    if (!numeric || (a && b)) return words[i].localeCompare(words[j], "en", { numeric: true });
    if (a || b) return Number(a) - Number(b);
    return numbers[i] < numbers[j] ? -1 : Number(numbers[i] > numbers[j]);
  };
  return rows.map((_, i) => i)
    .sort((i, j) => (missing[i] !== missing[j] ? Number(missing[i]) - Number(missing[j])
      : missing[i] ? i - j : (up ? compare(i, j) : compare(j, i)) || i - j))
    .map((i) => rows[i]);
}

function sortable(table) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0], original = [...body.rows];
  heads.forEach((head, place) => {
    const button = made("button", { type: "button" }, ...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      // up, down, and as it was
      const after = { none: "ascending", ascending: "descending", descending: "none" };
      const next = after[head.getAttribute("aria-sort") ?? "none"];
      for (const other of heads) other.removeAttribute("aria-sort");
      if (next !== "none") head.setAttribute("aria-sort", next);
      body.append(...(next === "none" ? original : sorted(original, place, next === "ascending")));
    });
  });
}
