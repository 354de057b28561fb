"""What a page must offer people who see it badly or not at all: names for all controls, landmarks, contrast."""

from typing import Any

from tests.server.console.browser import Browser

NAMED = {"button", "link", "textbox", "combobox", "checkbox", "spinbutton", "grid", "gridcell", "progressbar", "meter",
         "DisclosureTriangle", "image", "table"}  # fmt: skip
CONTRAST = 4.5  # WCAG 2.2, level AA, for text of ordinary size
PALE = """
const clear = (colour) => colour.match(/[\\d.]+/g).map(Number);
const light = (colour) => colour.slice(0, 3).map((c) => c / 255)
  .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const behind = (node) => {
  for (let at = node; at; at = at.parentElement) {
    const [r, g, b, a = 1] = clear(getComputedStyle(at).backgroundColor);
    if (a === 1) return [r, g, b];
  }
  return [255, 255, 255];
};
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || !node.checkVisibility()) continue;
  if (node.closest(":disabled, .unseen, noscript, option")) continue;
  const [a, b] = [light(clear(getComputedStyle(node).color)), light(behind(node))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < arguments[0]) found.push(`${ratio.toFixed(2)} ${walker.currentNode.data.slice(0, 60)}`);
}
return found;
"""


def tree(browser: Browser) -> list[dict[str, Any]]:
    """The nodes that an assistive technology is given."""
    return [node for node in browser.cdp("Accessibility.getFullAXTree")["nodes"] if not node.get("ignored")]


def nameless(browser: Browser) -> list[str]:
    """Controls without a name, by their role."""
    return [
        node["role"]["value"]
        for node in tree(browser)
        if node["role"]["value"] in NAMED and not node.get("name", {}).get("value", "").strip()
    ]


def landmarks(browser: Browser) -> set[str]:
    roles = {"banner", "navigation", "main", "contentinfo"}
    return roles & {node["role"]["value"] for node in tree(browser)}


def pale(browser: Browser) -> list[str]:
    """Texts in sight with less contrast than they need."""
    return list(browser.run(PALE, CONTRAST))
