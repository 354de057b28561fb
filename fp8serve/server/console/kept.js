// What the chat keeps over a reload, in the storage of this browser and for this server alone. No key is in it: the page
// never sees one, the browser sends it by itself.

import { ROOT } from "./api.js";

const NAME = `fp8serve chat ${ROOT.pathname}`;

/** What was kept last; null where nothing was, or what is there cannot be read. */
export function kept() {
  try {
    return JSON.parse(localStorage.getItem(NAME));
  } catch {
    return null;
  }
}

/** Keeps the first of `forms` for which there is room; whether there is for any. Forms are made when they are tried. */
export function keep(...forms) {
  forget();
  return forms.some((form) => {
    try {
      localStorage.setItem(NAME, JSON.stringify(form()));
      return true;
    } catch {
      return false; // the browser's limit, or a browser that stores nothing
    }
  });
}

export function forget() {
  try {
    localStorage.removeItem(NAME);
  } catch {
    /* a browser that stores nothing */
  }
}
