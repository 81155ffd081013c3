"use strict";
// The step as a whole; and one block of it, which is put in its place before the script of a single plan runs.
(() => {
  const step = JSON.parse(document.getElementById("step-data").textContent);
  const element = (id) => document.getElementById(id);

  // One block: the part of the address behind # says which.

  const chosen = step.blocks.find((block) => location.hash === `#${block.id}`) || step.blocks[0];
  if (chosen) {
    element("block-view").append(element(`${chosen.id}-sections`).content.cloneNode(true));
    element("block-name").textContent = chosen.name;
    element("block-choice").value = chosen.id;
    const data = document.createElement("script");
    data.type = "application/json";
    data.id = "data";
    data.textContent = JSON.stringify(chosen.data);
    document.body.append(data);
    element("block-choice").addEventListener("change", (event) => { location.hash = event.target.value; });
    window.addEventListener("hashchange", () => {
      if (step.blocks.some((block) => location.hash === `#${block.id}`)) location.reload();
    });
    if (location.hash === `#${chosen.id}`) window.addEventListener("load", () => element("block").scrollIntoView());
  }

  // The level over the step.

  const units = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];
  const [unit, size] = units.find(([, each]) => step.summary.baseline_peak_bytes >= 2 * each) || units[3];
  const formatBytes = (bytes) => {
    const [name, each] = units.find(([, least]) => bytes >= least) || units[3];
    return `${name === "B" ? bytes : (bytes / each).toFixed(2)} ${name}`;
  };
  const escaped = (text) => String(text).replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);
  const chart = echarts.init(element("step-chart"), null, { renderer: "svg" });
  const draw = () => {
    const style = getComputedStyle(document.documentElement);
    const paint = (name) => style.getPropertyValue(`--${name}`).trim();
    const axis = { axisLabel: { color: paint("soft") }, axisLine: { lineStyle: { color: paint("line") } }, nameTextStyle: { color: paint("soft") } };
    const line = (name, peaks, colour) => ({
      name, type: "line", step: "middle", symbol: "none", data: peaks.map((bytes) => bytes / size),
      lineStyle: { width: 1.6, color: colour }, itemStyle: { color: colour }, areaStyle: { color: colour, opacity: 0.13 },
    });
    const planned = line("planned", step.planned, paint("planned"));
    planned.markLine = {
      silent: true, symbol: "none", data: [
        { yAxis: step.summary.budget_bytes / size, lineStyle: { color: paint("alert"), type: "dashed" }, label: { formatter: `budget ${formatBytes(step.summary.budget_bytes)}`, position: "insideEndTop", color: paint("alert") } },
        { xAxis: step.boundary, lineStyle: { color: paint("soft"), type: "dotted" }, label: { formatter: "forward | backward", color: paint("soft") } },
      ],
    };
    chart.setOption({
      animation: false,
      textStyle: { color: paint("text") },
      legend: { top: 0, textStyle: { color: paint("text") } },
      grid: { left: 70, right: 20, top: 40, bottom: 40 },
      tooltip: {
        trigger: "axis", confine: true, backgroundColor: paint("card"), borderColor: paint("line"), textStyle: { color: paint("text") },
        formatter: ([first]) => `${escaped(step.moments[first.dataIndex])}<br><b>planned</b>: ${formatBytes(step.planned[first.dataIndex])}` +
          `<br><b>plain</b>: ${formatBytes(step.plain[first.dataIndex])}`,
      },
      xAxis: { type: "category", name: "parts of the step", nameLocation: "middle", nameGap: 26, data: step.moments.map((_, number) => number + 1), ...axis },
      yAxis: { type: "value", name: unit, splitLine: { lineStyle: { color: paint("grid") } }, ...axis },
      series: [line("plain", step.plain, paint("plain")), planned],
    }, true);
  };
  draw();
  window.addEventListener("resize", () => chart.resize());
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  element("theme").addEventListener("click", () => {
    // Where no block is shown, no other script switches.
    if (!chosen) {
      const root = document.documentElement;
      root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
    }
    setTimeout(draw);
  });
  window.addEventListener("load", () => { draw(); document.documentElement.dataset.step = "true"; });
})();
