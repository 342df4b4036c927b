// Numbers with their units.

const whole = new Intl.NumberFormat("en");
const NONE = "–";

export const count = (value) => (value === null || value === undefined ? NONE : whole.format(value));

// 1,234 → "1.2 k": three digits are enough to look at.
export function short(value) {
  if (value === null || value === undefined) return NONE;
  for (const [size, unit] of [[1e9, " G"], [1e6, " M"], [1e4, " k"]]) {
    if (value >= size) return `${Number((value / (unit === " k" ? 1e3 : size)).toPrecision(3))}${unit}`;
  }
  return whole.format(Math.round(value));
}

export const percent = (part, of) => (of ? `${Math.round((100 * part) / of)} %` : NONE);

export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 120) return `${Math.round(value)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return `${Math.round(value / 3600)} h`;
}

export const ago = (value) => (value < 1 ? "now" : `${value < 10 ? `${Math.floor(value)} s` : seconds(value)} ago`);

export const perSecond = (value) => `${value >= 10 ? Math.round(value) : Number(value.toFixed(1))} /s`;

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;
