"""What axe-core finds wrong with a page, and what stands over what has the focus."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import Tab
from tests.examples import PROFILE

_FIRST_OF_ALIKE = 0 if PROFILE == "deep" else 2
"""So many of the children of anything that are made alike are looked at; 0 for all."""

# Alike are parts with the same elements in the same order, each with the same classes and attributes; of those that
# say what a thing is or how it looks, the values are the same, too. Texts and addresses may differ.
_SET_APART = """
most => {
  const telling = /^(role|type|scope|style|tabindex|hidden|disabled|fill|stroke|aria-(?!label|describedby|controls))/;
  const shape = one => one.tagName + one.getAttributeNames().sort().map(name =>
    name === "class" || telling.test(name) ? `${name}=${one.getAttribute(name)}` : name).join(" ");
  const [numbers, kinds] = [new Map(), new Map()];
  const number = one => {
    const said = `${shape(one)}(${[...one.children].map(number)})`;
    if (!numbers.has(said)) numbers.set(said, numbers.size);
    kinds.set(one, numbers.get(said));
    return numbers.get(said);
  };
  const set = one => {
    const seen = new Map();
    for (const child of one.children) {
      const kind = kinds.get(child);
      seen.set(kind, (seen.get(kind) ?? 0) + 1);
      // The order of headings is looked at, too.
      if (seen.get(kind) > most && !child.matches(":is(h1, h2, h3), :has(h1, h2, h3)")) child.dataset.alike = "";
      else set(child);
    }
  };
  for (const one of document.querySelectorAll("[data-alike]")) delete one.dataset.alike;
  const main = document.querySelector("main") ?? document.body;
  number(main);
  if (most > 0) set(main);
}
"""
# Of rules that a page keeps, axe would describe every element.
_RUN = """
async ([within, rules]) => (await axe.run(
  {include: [[within]], exclude: [["[data-alike]"]]},
  {resultTypes: ["violations"], ...(rules && {runOnly: rules})},
)).violations
"""
OF_LOOKS = ("color-contrast", "link-in-text-block", "scrollable-region-focusable")
"""The rules by which a page is other in another scheme or width, with the same elements."""


@cache
def _source() -> str:
    axe = pytest.importorskip("axe_playwright_python", reason="pip install axe-playwright-python")
    return Path(axe.__file__).with_name("axe.min.js").read_text()


def violations(tab: Tab, within: str = "html", rules: Sequence[str] | None = None) -> list[tuple[str, list[str]]]:
    """The rules that the page breaks, as it stands there now, each with the first three elements that break it."""
    if not tab.page.evaluate("() => 'axe' in window"):
        tab.page.evaluate(_source())
    tab.page.evaluate(_SET_APART, _FIRST_OF_ALIKE)
    found: list[dict[str, Any]] = tab.page.evaluate(_RUN, [within, None if rules is None else [*rules]])
    return [(one["id"], [node["html"][:150] for node in one["nodes"]][:3]) for one in found]


# Of what has the focus, or of what stands before it in its place.
_COVERED = """
() => {
  const one = document.activeElement;
  const { left, top, width, height } = one.getBoundingClientRect();
  const above = document.elementFromPoint(left + width / 2, top + height / 2);
  return above !== null && !one.contains(above) && !above.contains(one) ? one.outerHTML.slice(0, 200) : null;
}
"""


def covered(tab: Tab, steps: int) -> list[str]:
    """What something else stands over, such as a bar at the edge of a window, of so many elements that Tab comes to."""
    found: list[str] = []
    for _ in range(steps):
        tab.page.keyboard.press("Tab")
        if (one := tab.page.evaluate(_COVERED)) is not None:
            found.append(one)
    return found
