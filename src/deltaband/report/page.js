"use strict";
(() => {
  const tip = document.getElementById("tip");
  const REACH = 14; // how far from a mark the pointer may be, in units of the picture
  let pointed = null;

  function hide() {
    tip.hidden = true;
    if (pointed) pointed.classList.remove("pointed");
    pointed = null;
  }

  // Set as text, never as markup, whatever a column holds.
  function line(name, value) {
    const row = document.createElement("div");
    for (const text of [name, value]) row.appendChild(document.createElement("span")).textContent = text;
    return row;
  }

  function show(mark, tips, event) {
    if (pointed) pointed.classList.remove("pointed");
    pointed = mark;
    mark.classList.add("pointed");
    tip.replaceChildren();
    const head = document.createElement("b");
    if (mark.dataset.row !== undefined) {
      head.textContent = "row " + mark.dataset.row + (mark.closest(".missed") ? ", missed" : "");
      tip.append(head, ...tips.names.map((name, k) => line(name, tips.rows[mark.dataset.row][k])));
    } else {
      const [first, ...rest] = mark.dataset.tip.split("\n");
      head.textContent = first;
      tip.append(head, ...rest.map((text) => line(text, "")));
    }
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = Math.min(event.clientX + 14, document.documentElement.clientWidth - box.width - 8);
    const above = event.clientY - box.height - 14;
    tip.style.left = Math.max(8, left) + "px";
    tip.style.top = (above > 8 ? above : event.clientY + 18) + "px";
  }

  for (const svg of document.querySelectorAll("figure > svg")) {
    const marks = [...svg.querySelectorAll("[data-row], [data-tip]")].map((mark) => ({
      mark,
      x: Number(mark.getAttribute("cx")),
      y: Number(mark.getAttribute("cy")),
    }));
    const data = svg.closest("section").querySelector("script.tips");
    const tips = data ? JSON.parse(data.textContent) : null;
    const point = (event) => {
      const box = svg.getBoundingClientRect();
      const scale = svg.viewBox.baseVal.width / box.width;
      const x = (event.clientX - box.left) * scale;
      const y = (event.clientY - box.top) * scale;
      let nearest = null;
      let least = REACH;
      for (const each of marks) {
        const distance = Math.hypot(each.x - x, each.y - y);
        if (distance <= least) [nearest, least] = [each.mark, distance];
      }
      if (nearest) show(nearest, tips, event);
      else hide();
    };
    svg.addEventListener("pointermove", point);
    svg.addEventListener("pointerdown", point);
    svg.addEventListener("pointerleave", hide);
  }
  addEventListener("scroll", hide, { passive: true });

  // Missing values come last in both directions.
  function compare(a, b, sign) {
    if (a === "" || b === "") return (a === "") - (b === "");
    const difference = Number(a) - Number(b);
    return sign * (Number.isNaN(difference) ? a.localeCompare(b, undefined, { numeric: true }) : difference);
  }

  const value = (cell) => cell.dataset.value ?? cell.textContent;

  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, k) => {
      head.querySelector("button").addEventListener("click", () => {
        const sign = head.getAttribute("aria-sort") === "descending" ? 1 : -1;
        for (const each of heads) each.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
        const body = table.tBodies[0];
        body.append(...[...body.rows].sort((a, b) => compare(value(a.cells[k]), value(b.cells[k]), sign)));
      });
    });
  }
})();
