"""What axe-core finds wrong with a page."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import Tab
from tests.examples import PROFILE

_FIRST_OF_ALIKE = 0 if PROFILE == "deep" else 2
"""So many of a table's or drawing's children that are made alike are looked at; 0 for all."""

# Alike are parts with the same elements in the same order, each with the same classes and attributes; of those that
# say what a thing is or how it looks, the values are the same, too. Texts and addresses may differ.
_SET_APART = """
most => {
  const telling = /^(role|type|scope|style|tabindex|hidden|disabled|fill|stroke|aria-(?!label|describedby|controls))/;
  const shape = one => one.tagName + one.getAttributeNames().sort().map(name =>
    name === "class" || telling.test(name) ? `${name}=${one.getAttribute(name)}` : name).join(" ");
  for (const parent of document.querySelectorAll("tbody, svg, svg g")) {
    const seen = new Map();
    for (const child of parent.children) {
      const key = [child, ...child.querySelectorAll("*")].map(shape).join();
      seen.set(key, (seen.get(key) ?? 0) + 1);
      child.toggleAttribute("data-alike", most > 0 && seen.get(key) > most);
    }
  }
}
"""
# Of rules that a page keeps, axe would describe every element.
_RUN = """
async () => (await axe.run({exclude: [["[data-alike]"]]}, {resultTypes: ["violations"]})).violations
"""


@cache
def _source() -> str:
    axe = pytest.importorskip("axe_playwright_python", reason="pip install axe-playwright-python")
    return Path(axe.__file__).with_name("axe.min.js").read_text()


def violations(tab: Tab) -> list[tuple[str, list[str]]]:
    """The rules that the page breaks, as it stands there now, each with the first three elements that break it."""
    if not tab.page.evaluate("() => 'axe' in window"):
        tab.page.evaluate(_source())
    tab.page.evaluate(_SET_APART, _FIRST_OF_ALIKE)
    found: list[dict[str, Any]] = tab.page.evaluate(_RUN)
    return [(one["id"], [node["html"][:150] for node in one["nodes"]][:3]) for one in found]
