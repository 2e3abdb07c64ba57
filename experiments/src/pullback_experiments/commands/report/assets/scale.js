// Numbers and places on an axis. An axis is linear in t, the number itself or its logarithm.

const forward = (log, value) => (log ? Math.log10(value) : value);
const backward = (log, t) => (log ? 10 ** t : t);

/** Whether a number has a place on an axis. */
const placed = (log, value) => value !== null && Number.isFinite(value) && (!log || value > 0);

const RAISED = Object.fromEntries([..."-0123456789"].map((c, i) => [c, [..."⁻⁰¹²³⁴⁵⁶⁷⁸⁹"][i]]));

/** A number in a few characters. */
function written(value, digits = 4) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  const short = Number(value.toPrecision(digits));
  let words = String(short);
  if (size < 1e-3 || size >= 1e6) words = short.toExponential().replace("e+", "e");
  else if (size >= 1e4 && Number.isInteger(short)) words = short.toLocaleString("en-US");
  return words.replaceAll("-", "−");
}

/** 1, 10, 10², and 10⁻¹ below. */
const power = (exponent) => (exponent === 0 ? "1" : exponent === 1 ? "10"
  : "10" + [...String(exponent)].map((c) => RAISED[c]).join(""));

/** Multiples of 1, 2 or 5 times a power of ten, about `count` of them, in [low, high]. */
function round(low, high, count) {
  const rough = (high - low) / Math.max(count, 1);
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 5, 10].find((m) => m * unit >= rough * 0.999);
  const found = [];
  if (!(step > 0) || !Number.isFinite(step)) return found;
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9 && found.length < 99; i++) {
    found.push(Number((i * step).toPrecision(12)));
  }
  return found;
}

/** Ticks {t, label} of an axis from t = low to t = high. */
function ticks(log, low, high, count) {
  const plain = (values) => values.map((v) => ({ t: forward(log, v), label: written(v) }));
  if (!log) return plain(round(low, high, count));
  const first = Math.ceil(low - 1e-9), last = Math.floor(high + 1e-9);
  const decades = last - first + 1;
  const stride = decades <= count + 1 ? 1 : Math.ceil(decades / count);
  const tens = [];
  for (let e = Math.ceil(first / stride) * stride; e <= last; e += stride) tens.push(e);
  const small = tens.every((e) => Math.abs(e) <= 3);
  const whole = tens.map((e) => ({ t: e, label: small ? String(10 ** e) : power(e) }));
  if (tens.length >= 3) return whole;
  const within = [];
  for (let e = Math.floor(low); e <= high; e++) within.push(...[1, 2, 5].map((m) => m * 10 ** e));
  const inside = within.filter((v) => Math.log10(v) >= low - 1e-9 && Math.log10(v) <= high + 1e-9);
  if (tens.length === 2 && inside.length > 2 * count) return whole; // more would overlap
  return plain(inside.length >= 3 ? inside : round(10 ** low, 10 ** high, count).filter((v) => v > 0));
}
