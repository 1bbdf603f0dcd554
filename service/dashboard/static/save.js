// Files that the page makes itself: pictures and tables of what is shown.

/** A name that every file system takes. */
export function fileName(...parts) {
  return parts.join("-").replace(/[^A-Za-z0-9._-]+/g, "-").slice(0, 80);
}

/** Hands a text, or a canvas as PNG, to the browser's downloads; what is `given` may be on its way. */
export async function save(name, given, type = "text/plain") {
  const content = await given;
  const blob =
    content instanceof HTMLCanvasElement
      ? await new Promise((done) => content.toBlob(done, "image/png"))
      : new Blob([content], { type });
  const address = URL.createObjectURL(blob);
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** Rows as CSV; a text that a spreadsheet would take for a formula begins with an apostrophe. */
export function csv(rows) {
  const cell = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
    return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  return rows.map((row) => row.map(cell).join(",") + "\r\n").join("");
}
