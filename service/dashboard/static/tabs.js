// Sections of a page as tabs. Without scripts they stand below each other, as on paper (`paper.js`).

function setUp(list) {
  const links = [...list.querySelectorAll("a")];
  const panels = links.map((link) => document.getElementById(link.hash.slice(1)));
  list.setAttribute("role", "tablist");
  links.forEach((link, index) => {
    link.id = `tab-${panels[index].id}`;
    link.setAttribute("role", "tab");
    link.setAttribute("aria-controls", panels[index].id);
    panels[index].setAttribute("role", "tabpanel");
    panels[index].setAttribute("aria-labelledby", link.id);
  });

  function show(chosen) {
    links.forEach((link, index) => {
      const current = index === chosen;
      link.setAttribute("aria-selected", String(current));
      link.tabIndex = current ? 0 : -1;
      panels[index].classList.toggle("current", current);
    });
    // Of a narrow window's tabs the chosen one is in sight, and what lies beside it.
    const [strip, tab] = [list.getBoundingClientRect(), links[chosen].getBoundingClientRect()];
    list.scrollLeft += tab.left + tab.width / 2 - strip.left - strip.width / 2;
    panels[chosen].dispatchEvent(new CustomEvent("shown"));
  }

  const named = () => links.findIndex((link) => link.hash === location.hash);
  const choose = (index) => {
    history.replaceState(history.state, "", links[index].hash);
    show(index);
  };
  list.addEventListener("click", (event) => {
    const index = links.indexOf(event.target.closest("a"));
    if (index < 0 || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    choose(index);
  });
  list.addEventListener("keydown", (event) => {
    const now = links.indexOf(document.activeElement);
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -now, End: links.length - 1 - now }[event.key];
    if (step === undefined || now < 0) return;
    event.preventDefault();
    const next = (now + step + links.length) % links.length;
    choose(next);
    links[next].focus();
  });
  const first = Math.max(0, panels.findIndex((panel) => panel.classList.contains("current")));
  /** The tab that the address names; the first on the way back to where none was chosen yet. */
  const follow = () => {
    const index = location.hash === "" ? first : named();
    if (index >= 0 && links[index].getAttribute("aria-selected") !== "true") show(index);
  };
  addEventListener("hashchange", follow);
  addEventListener("popstate", follow); // an address that differs in its query as well changes no hash
  show(named() >= 0 ? named() : first);
}

for (const list of document.querySelectorAll(".tabs")) setUp(list);
