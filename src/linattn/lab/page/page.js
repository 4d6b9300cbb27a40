/* Click a heading to sort by its column: numbers from high to low first, names from a to z. */
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes.length ? [...heading.childNodes] : [""]);
    if (!button.querySelector("span")) {
      const text = document.createElement("span");
      text.append(...button.childNodes);
      button.append(text);
    }
    heading.append(button);
    button.addEventListener("click", () => {
      const value = (row) => row.cells[column].dataset.value;
      const values = [...body.rows].map(value).filter((found) => found !== undefined);
      const numeric = values.every((found) => !Number.isNaN(Number(found)));
      const first = numeric ? "descending" : "ascending";
      const second = numeric ? "ascending" : "descending";
      const order = heading.getAttribute("aria-sort") === first ? second : first;
      const sign = order === "ascending" ? 1 : -1;
      const compare = (a, b) => numeric ? Number(a) - Number(b) : a.localeCompare(b);
      const rows = [...body.rows].sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        /* What was not measured stays at the end, whatever the order. */
        if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
        return sign * compare(x, y);
      });
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", order);
      body.append(...rows);
    });
  });
}
