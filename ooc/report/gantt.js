({left, wide, width, character}) => {
function zoomable(box) {
  const drawings = box.matches("svg") ? [box] : [...box.querySelectorAll("svg.gantt")];
  const all = what => drawings.flatMap(svg => [...svg.querySelectorAll(what)]);
  const moving = all("[data-x]").map(e => [e, +e.dataset.x, +(e.dataset.w || 0)]);
  const areas = all("[data-d]").map(e => [e, JSON.parse(e.dataset.d)]);
  const ticks = drawings.flatMap(svg => [...svg.querySelectorAll("[data-t]")].map(
    e => [e, +e.getAttribute("x") - left, +svg.querySelector("[data-span]").dataset.span]));
  let from = 0, scale = 1;
  function draw() {
    const place = x => left + (x - left - from) * scale, end = left + wide;
    for (const [e, x, w] of moving) {
      const a = Math.max(left, place(x)), b = Math.min(end, place(x + w));
      e.style.display = b >= left && a <= end && b >= a ? "" : "none";
      if (e.tagName === "text") { e.setAttribute("x", a + 4); e.textContent = (b - a) / character > 4 ?
        e.dataset.text.slice(0, Math.floor((b - a - 8) / character)) : ""; }
      else { e.setAttribute("x", a); e.setAttribute("width", Math.max(0.6, b - a)); }
    }
    for (const [e, points] of areas) {
      e.setAttribute("points", points.map(([x, y]) => Math.min(end, Math.max(left, place(x))) + "," + y).join(" "));
    }
    for (const [e, x, span] of ticks) e.textContent = ((from + x / scale) / wide * span).toPrecision(4) + " s";
  }
  function zoom(x, factor) {
    const fixed = from + x / scale;
    scale = Math.max(1, Math.min(5000, scale * factor));
    from = Math.max(0, Math.min(wide - wide / scale, fixed - x / scale));
    draw();
  }
  function reset() { from = 0; scale = 1; draw(); }
  for (const svg of drawings) {
    const at = event => (event.clientX - svg.getBoundingClientRect().left) * width / svg.clientWidth - left;
    let held = null;
    svg.addEventListener("wheel", event => {
      if (box !== svg && !event.ctrlKey) return;  // in a page the wheel scrolls
      event.preventDefault();
      zoom(at(event), Math.exp(-event.deltaY / 400));
    }, {passive: false});
    svg.addEventListener("pointerdown", event => { held = at(event); });
    addEventListener("pointerup", () => { held = null; });
    addEventListener("pointermove", event => {
      if (held === null) return;
      const x = at(event);
      from = Math.max(0, Math.min(wide - wide / scale, from - (x - held) / scale));
      held = x;
      draw();
    });
    svg.addEventListener("dblclick", reset);
  }
  for (const button of box.querySelectorAll("button[data-zoom]")) {
    button.hidden = false;
    button.addEventListener("click", () => +button.dataset.zoom ? zoom(wide / 2, +button.dataset.zoom) : reset());
  }
}
const boxes = [...document.querySelectorAll(".zoomable")];
for (const box of boxes.length ? boxes : document.querySelectorAll("svg.gantt")) zoomable(box);
}
