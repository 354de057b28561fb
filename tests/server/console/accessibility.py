"""Checks of a page's accessibility: names for all controls, landmarks, contrast."""

from typing import Any

from tests.server.console.browser import Browser

NAMED = {"button", "link", "textbox", "combobox", "checkbox", "spinbutton", "grid", "gridcell", "progressbar", "meter",
         "DisclosureTriangle", "image", "table"}  # fmt: skip
CONTRAST = 4.5  # WCAG 2.2, level AA, for text of ordinary size
LOW_CONTRAST = """
const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
const luminance = (colour) => colour.slice(0, 3).map((c) => c / 255)
  .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const background = (node) => {
  for (let element = node; element; element = element.parentElement) {
    const [r, g, b, alpha = 1] = channels(getComputedStyle(element).backgroundColor);
    if (alpha === 1) return [r, g, b];
  }
  return [255, 255, 255];
};
const texts = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || !node.checkVisibility()) continue;
  if (node.closest(":disabled, .unseen, noscript, option")) continue;
  const [a, b] = [luminance(channels(getComputedStyle(node).color)), luminance(background(node))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < arguments[0]) texts.push(`${ratio.toFixed(2)} ${walker.currentNode.data.slice(0, 60)}`);
}
return texts;
"""
"""Returns the visible texts whose contrast ratio is below arguments[0], each after its ratio."""


def tree(browser: Browser) -> list[dict[str, Any]]:
    """Returns the nodes of the accessibility tree, without those that assistive technology ignores."""
    return [node for node in browser.cdp("Accessibility.getFullAXTree")["nodes"] if not node.get("ignored")]


def nameless(browser: Browser) -> list[str]:
    """Returns the roles of the controls that have no name."""
    return [
        node["role"]["value"]
        for node in tree(browser)
        if node["role"]["value"] in NAMED and not node.get("name", {}).get("value", "").strip()
    ]


def landmarks(browser: Browser) -> set[str]:
    """Returns the landmark roles that the page has."""
    roles = {"banner", "navigation", "main", "contentinfo"}
    return roles & {node["role"]["value"] for node in tree(browser)}


def low_contrast_texts(browser: Browser) -> list[str]:
    """Returns the visible texts whose contrast ratio is below CONTRAST, each after its ratio."""
    return list(browser.run(LOW_CONTRAST, CONTRAST))
