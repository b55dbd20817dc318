"use strict";
(function () {
  function key(row, column) {
    const cell = row.cells[column];
    const text = cell.dataset.sort ?? cell.textContent;
    return cell.classList.contains("num") ? Number(text) : text.toLowerCase();
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.textContent = head.textContent;
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const number = head.classList.contains("num");
        const before = head.getAttribute("aria-sort") ?? (number ? "ascending" : "descending");
        const order = before === "ascending" ? "descending" : "ascending";
        for (const one of heads) one.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", order);
        const sign = order === "ascending" ? 1 : -1;
        const rows = [...table.tBodies[0].rows].map((row) => [key(row, column), row]);
        rows.sort((a, b) => (a[0] < b[0] ? -sign : a[0] > b[0] ? sign : 0));
        table.tBodies[0].append(...rows.map((pair) => pair[1]));
        table.dispatchEvent(new Event("sorted"));
      });
    });
  }

  for (const tools of document.querySelectorAll(".tools")) {
    const table = tools.nextElementSibling;
    const text = tools.querySelector('input[type="search"]');
    const shown = tools.querySelector("output");
    const content = new Map([...table.tBodies[0].rows].map((row) => [row, row.textContent.toLowerCase()]));
    const first = Number(table.dataset.first);
    let all = content.size <= first * 1.25;
    const more = document.createElement("button");
    more.className = "button all";
    more.textContent = "Show all " + content.size;
    more.hidden = all;
    table.after(more);
    tools.hidden = false;

    function filter() {
      const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
      const filtered = words.length > 0;
      let fitting = 0;
      for (const row of table.tBodies[0].rows) {
        const fits = words.every((word) => content.get(row).includes(word));
        fitting += fits;
        row.style.display = fits && (all || filtered || fitting <= first) ? "" : "none";
      }
      more.hidden = all || filtered;
      shown.textContent = filtered ? fitting + " of " + content.size : "";
    }
    text.addEventListener("input", filter);
    more.addEventListener("click", () => { all = true; filter(); });
    table.addEventListener("sorted", filter);
    filter();
  }

  for (const block of document.querySelectorAll("pre.copied")) {
    const button = document.createElement("button");
    button.className = "button copy";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      const code = block.querySelector("code");
      let done = false;
      try {
        await navigator.clipboard.writeText(code.textContent);
        done = true;
      } catch {
        getSelection().selectAllChildren(code);
        done = document.execCommand("copy");
      }
      button.textContent = done ? "Copied" : "Press Ctrl+C";
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
    block.before(button);
  }
})();
