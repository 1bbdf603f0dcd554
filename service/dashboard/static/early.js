// Before anything is drawn: pages that scripts enhance look from the beginning as they will.
document.documentElement.classList.add("js");
