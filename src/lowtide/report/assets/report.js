"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const element = (id) => document.getElementById(id);
  const { summary, ops, plain, planned, peak, modules, tradeoff, kinds } = data;
  const PAGE_ROWS = 100;

  // Units and words.

  const escaped = (text) => String(text).replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);
  const byteUnits = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];
  const unitFor = (bytes) => byteUnits.find(([, size]) => bytes >= 2 * size) || byteUnits[3];
  const [byteUnit, byteSize] = unitFor(summary.baseline_peak_bytes);
  const timeUnits = [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]];
  const timeUnitFor = (seconds) => timeUnits.find(([, size]) => seconds >= 2 * size) || timeUnits[3];
  const [timeUnit, timeSize] = timeUnitFor(summary.baseline_seconds);
  const formatBytes = (bytes) => {
    const [unit, size] = byteUnits.find(([, each]) => bytes >= each) || byteUnits[3];
    return `${unit === "B" ? bytes : (bytes / size).toFixed(2)} ${unit}`;
  };
  const formatSeconds = (seconds) => {
    if (!seconds) return "0 s";
    const [unit, size] = timeUnits.find(([, each]) => seconds >= each) || timeUnits[3];
    return `${(seconds / size).toFixed(2)} ${unit}`;
  };
  const percent = (share) => `${(100 * share).toFixed(2)} %`;
  const tidy = (number) => Number(number.toPrecision(4));
  const ending = (text, length) => (text.length > length ? `…${text.slice(1 - length)}` : text);
  const narrow = () => window.innerWidth < 760;

  // Colours come from the style sheet, so that charts and page change together.

  const colours = () => {
    const style = getComputedStyle(document.documentElement);
    const names = ["page", "card", "text", "soft", "line", "grid", "plain", "planned", "bound", "alert"];
    const found = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    found.list = [1, 2, 3, 4, 5, 6].map((number) => style.getPropertyValue(`--c${number}`).trim());
    return found;
  };
  const axisStyle = (paint) => ({
    nameTextStyle: { color: paint.soft, fontSize: 12 },
    axisLabel: { color: paint.soft, hideOverlap: true },
    axisLine: { lineStyle: { color: paint.line } },
    axisTick: { lineStyle: { color: paint.line } },
    splitLine: { lineStyle: { color: paint.grid } },
  });
  const basics = (paint) => ({
    animation: false,
    aria: { enabled: false },
    textStyle: { color: paint.text, fontFamily: "system-ui, 'Segoe UI', Roboto, sans-serif" },
    tooltip: {
      confine: true,
      backgroundColor: paint.card,
      borderColor: paint.line,
      textStyle: { color: paint.text, fontSize: 13 },
      extraCssText: "max-width: min(440px, 80vw); white-space: normal; overflow-wrap: anywhere;",
    },
  });
  const legendStyle = (paint, more) => ({
    type: "scroll", top: 0, textStyle: { color: paint.text }, pageTextStyle: { color: paint.soft },
    pageIconColor: paint.soft, ...more,
  });

  // Memory over the step.

  const clockOf = (steps) => {
    const clock = [0];
    for (const op of steps) clock.push(clock[clock.length - 1] + ops.seconds[op] / timeSize);
    return clock;
  };
  const clocks = { plain: clockOf(plain.steps), planned: clockOf(planned.steps) };
  const positions = (name, axis) =>
    axis === "time" ? clocks[name] : clocks[name].map((_, step) => step);
  const seenBefore = (() => {
    const seen = new Set();
    return planned.steps.map((op) => seen.size === seen.add(op).size);
  })();
  const stepAt = (places, place) => {
    let low = 0, high = places.length - 2;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (places[middle] <= place) low = middle; else high = middle - 1;
    }
    return Math.max(low, 0);
  };
  const describeStep = (name, course, axis, place) => {
    const places = positions(name, axis);
    if (place > places[places.length - 1]) return `<b>${name}</b>: over`;
    const step = stepAt(places, place), op = course.steps[step];
    const again = name === "planned" && seenBefore[step] ? ", again" : "";
    const phase = step < course.boundary ? "forward" : "backward";
    const where = [ops.module[op], ops.source[op]].filter(Boolean).map(escaped).join(", ");
    return `<b>${name}</b>: ${formatBytes(course.bytes[step])}<br>${phase}, step ${step + 1}: ` +
      `${escaped(ops.target[op])}${again}${where ? `<br><small>${where}</small>` : ""}`;
  };
  const marks = (course, name, axis, paint, label) => ({
    silent: true, symbol: "none", animation: false,
    data: [{
      xAxis: positions(name, axis)[course.boundary],
      lineStyle: { color: paint, type: "dotted", width: 1.5 },
      label: { formatter: label, color: paint, position: "end", fontSize: 11 },
    }],
  });
  const peakPoint = (course, name, axis, paint) => ({
    name: `peak, ${name}`, type: "scatter", symbolSize: 9, z: 5, itemStyle: { color: paint }, tooltip: { show: false },
    data: [[positions(name, axis)[course.peak_step], course.bytes[course.peak_step] / byteSize]],
    label: {
      show: true, position: "top", color: paint, fontWeight: 600,
      formatter: `${name} peak ${formatBytes(course.bytes[course.peak_step])}`,
    },
    labelLayout: { moveOverlap: "shiftY", hideOverlap: false },
  });
  const line = (name, places, bytes, paint, more) => ({
    name, type: "line", step: "end", symbol: "none", showSymbol: false, sampling: "max",
    lineStyle: { width: 1.6, color: paint }, itemStyle: { color: paint }, areaStyle: { color: paint, opacity: 0.13 },
    data: places.map((place, step) => [place, (step < bytes.length ? bytes[step] : bytes[bytes.length - 1]) / byteSize]),
    ...more,
  });
  const budgetLine = (paint) => ({
    name: `budget ${formatBytes(summary.budget_bytes)}`, type: "line", data: [], itemStyle: { color: paint.alert }, lineStyle: { color: paint.alert, type: "dashed" },
    markLine: {
      silent: true, symbol: "none",
      data: [{ yAxis: summary.budget_bytes / byteSize }],
      lineStyle: { color: paint.alert, type: "dashed", width: 1.5 },
      // On a phone the legend says it: here it would lie across the peak.
      label: { show: !narrow(), formatter: `budget ${formatBytes(summary.budget_bytes)}`, position: "insideEndTop", color: paint.alert },
    },
  });
  const memorySeries = (view, axis, paint) => {
    const budget = budgetLine(paint);
    if (view === "kinds") {
      const places = positions("planned", axis);
      const layers = Object.entries(kinds).map(([kind, words], number) =>
        line(words, places, planned.kinds[kind], paint.list[number],
          { stack: "kinds", areaStyle: { color: paint.list[number], opacity: 0.75 }, lineStyle: { width: 0 }, sampling: undefined }));
      layers[0].markLine = marks(planned, "planned", axis, paint.soft, "forward | backward");
      return [...layers, budget, peakPoint(planned, "planned", axis, paint.planned)];
    }
    const one = line("plain", positions("plain", axis), plain.bytes, paint.plain);
    const two = line("planned", positions("planned", axis), planned.bytes, paint.planned);
    const ends = [clocks.plain, clocks.planned].map((clock) => clock[clock.length - 1]);
    const distance = Math.abs(positions("plain", axis)[plain.boundary] - positions("planned", axis)[planned.boundary]);
    if (distance < 0.02 * (axis === "time" ? Math.max(...ends) : planned.steps.length)) {
      two.markLine = marks(planned, "planned", axis, paint.soft, "forward | backward");
    } else {
      one.markLine = marks(plain, "plain", axis, paint.plain, "backward, plain");
      two.markLine = marks(planned, "planned", axis, paint.planned, "backward, planned");
    }
    return [one, two, budget, peakPoint(plain, "plain", axis, paint.plain), peakPoint(planned, "planned", axis, paint.planned)];
  };
  const memoryOption = (paint) => {
    const view = element("memory-view").value, axis = element("memory-axis").value;
    const top = Math.max(summary.budget_bytes > 1.3 * summary.baseline_peak_bytes ? 0 : summary.budget_bytes,
      view === "kinds" ? summary.peak_bytes : summary.baseline_peak_bytes, summary.peak_bytes) / byteSize;
    const series = memorySeries(view, axis, paint);
    const kindRows = (place) => Object.entries(kinds).map(([kind, words], number) => {
      const step = stepAt(positions("planned", axis), place);
      return `<span style="color:${paint.list[number]}">■</span> ${formatBytes(planned.kinds[kind][step])} ${words}`;
    }).join("<br>");
    return {
      ...basics(paint),
      grid: { left: narrow() ? 52 : 70, right: narrow() ? 14 : 28, top: view === "kinds" && !narrow() ? 74 : 58, bottom: 92 },
      legend: legendStyle(paint, {
        type: view === "kinds" && !narrow() ? "plain" : "scroll",
        icon: "roundRect", itemWidth: 16, itemHeight: 5,
        data: series.map((each) => each.name).filter((name) => !name.startsWith("peak")),
      }),
      tooltip: {
        ...basics(paint).tooltip, trigger: "axis",
        axisPointer: { type: "line", snap: false, lineStyle: { color: paint.soft } },
        formatter: (points) => {
          const place = points[0].axisValue;
          const at = axis === "time" ? `after ${tidy(place)} ${timeUnit}` : `ops run: ${Math.round(place)}`;
          return `${at}<br>${view === "both" ? `${describeStep("plain", plain, axis, place)}<br>` : ""}` +
            `${describeStep("planned", planned, axis, place)}${view === "kinds" ? `<br>${kindRows(place)}` : ""}`;
        },
      },
      dataZoom: [
        { type: "inside", zoomOnMouseWheel: "ctrl", moveOnMouseMove: false, preventDefaultMouseMove: false, filterMode: "none" },
        { type: "slider", height: 20, bottom: 10, filterMode: "none", borderColor: paint.line, textStyle: { color: paint.soft },
          fillerColor: "rgba(120, 150, 190, 0.18)", labelFormatter: (place) => `${tidy(place)}` },
      ],
      xAxis: {
        type: "value", min: 0, max: "dataMax", nameLocation: "middle", nameGap: 28,
        name: axis === "time" ? `time in the step (${timeUnit}, predicted)` : "ops run (count)", ...axisStyle(paint),
      },
      yAxis: {
        type: "value", min: 0, max: tidy(1.12 * top), nameLocation: "middle", nameGap: narrow() ? 36 : 48,
        name: `memory above the start (${byteUnit})`, ...axisStyle(paint),
        axisLabel: { color: paint.soft, showMaxLabel: false },
      },
      series,
    };
  };

  // Horizontal bars: one row for each name, with the same names on both sides of a pair.

  const bars = (paint, names, axisName, series, tip, legend) => ({
    ...basics(paint),
    grid: { left: narrow() ? 126 : 182, right: 66, top: legend ? 34 : 10, bottom: 46 },
    legend: legend ? legendStyle(paint, { left: 0 }) : undefined,
    tooltip: { ...basics(paint).tooltip, trigger: "axis", axisPointer: { type: "shadow" }, formatter: (points) => tip(points[0].dataIndex) },
    xAxis: { type: "value", name: axisName, nameLocation: "middle", nameGap: 28, ...axisStyle(paint) },
    yAxis: {
      type: "category", inverse: true, data: names, triggerEvent: true, ...axisStyle(paint),
      // The end of a module's path says more than its beginning.
      axisLabel: { color: paint.text, fontSize: 12, interval: 0, formatter: (name) => ending(name, narrow() ? 16 : 25) },
    },
    series,
  });
  const barSeries = (name, values, paint, labelPaint, label) => ({
    name, type: "bar", barMaxWidth: 16, itemStyle: { color: paint, borderRadius: [0, 3, 3, 0] }, data: values,
    label: label && { show: true, position: "right", color: labelPaint, fontSize: 11, formatter: (point) => label(point.dataIndex) },
  });
  const peakOption = (rows) => (paint) => bars(
    paint, rows.map((row) => row[0]), `alive at the peak (${byteUnit})`,
    [barSeries("alive", rows.map((row) => row[1] / byteSize), paint.planned, paint.soft, (row) => formatBytes(rows[row][1]))],
    (row) => `<b>${escaped(rows[row][3])}</b><br>${formatBytes(rows[row][1])} in ${rows[row][2]} tensor${rows[row][2] === 1 ? "" : "s"}, ` +
      `${percent(rows[row][1] / Math.max(summary.peak_bytes, 1))} of the peak`,
  );
  const moduleTip = (row) => `<b>${escaped(modules.name[row])}</b><br>plain keeps ${formatBytes(modules.plain[row])}, ` +
    `the plan ${formatBytes(modules.kept[row])}<br>${modules.recomputed[row]} runs again, ${formatSeconds(modules.seconds[row])}`;
  const keptOption = (paint) => bars(paint, modules.name, `kept for backward (${byteUnit})`, [
    barSeries("plain", modules.plain.map((bytes) => bytes / byteSize), paint.plain),
    barSeries("planned", modules.kept.map((bytes) => bytes / byteSize), paint.planned),
  ], moduleTip, true);
  const recomputeOption = (paint) => {
    const [unit, size] = timeUnitFor(Math.max(...modules.seconds, 0));
    return bars(paint, modules.name, `time of repeated runs (${unit})`, [
      barSeries("repeated runs", modules.seconds.map((seconds) => tidy(seconds / size)), paint.list[3], paint.soft,
        (row) => (modules.recomputed[row] ? `${modules.recomputed[row]} run${modules.recomputed[row] === 1 ? "" : "s"}` : "")),
    ], moduleTip, true);
  };

  // Memory against time.

  const symbols = ["circle", "rect", "triangle", "diamond"];
  const tradeoffOption = (paint) => {
    const series = tradeoff.curves.map(({ planner, points }, number) => ({
      name: planner, type: "line", symbol: symbols[Math.floor(number / 6) % 4], symbolSize: 8,
      itemStyle: { color: paint.list[number % 6] },
      lineStyle: { color: paint.list[number % 6], width: 1.5, type: number < 6 ? "solid" : "dashed", opacity: 0.8 },
      data: points.map(([bytes, overhead]) => [bytes / byteSize, 100 * overhead]),
    }));
    const bounds = tradeoff.bounds.filter(([, overhead]) => overhead > 0).map(([bytes, overhead]) => [bytes / byteSize, 100 * overhead]);
    if (bounds.length) {
      // A bound for one budget holds for every smaller one: the area reaches to the left.
      series.push({
        name: "proved bound", type: "line", step: "start", symbol: "none", z: 1,
        itemStyle: { color: paint.bound }, lineStyle: { color: paint.bound, type: "dashed", width: 1.5 },
        areaStyle: { color: paint.bound, opacity: 0.12 },
        data: [[0, bounds[0][1]], ...bounds],
      });
    }
    const point = (name, bytes, overhead, symbol, symbolSize, paintPoint, position) => ({
      name, type: "scatter", symbol, symbolSize, z: 10, itemStyle: { color: paintPoint, borderColor: paint.card, borderWidth: 1 },
      data: [[bytes / byteSize, 100 * overhead]],
      label: { show: true, position, formatter: name, color: paintPoint, fontWeight: 600 },
    });
    series.push(point("plain training", summary.baseline_peak_bytes, 0, "circle", 11, paint.plain, "top"));
    series.push(point("this plan", summary.peak_bytes, summary.overhead,
      "path://M0,-10 L2.4,-3.2 L9.5,-3.1 L3.8,1.2 L5.9,8.1 L0,4 L-5.9,8.1 L-3.8,1.2 L-9.5,-3.1 L-2.4,-3.2 Z", 22, paint.planned, "top"));
    return {
      ...basics(paint),
      legend: legendStyle(paint, { data: series.map((each) => each.name).filter((name) => name !== "plain training" && name !== "this plan") }),
      grid: { left: narrow() ? 52 : 66, right: 40, top: 46, bottom: 50 },
      tooltip: {
        ...basics(paint).tooltip, trigger: "item",
        formatter: (found) => `<b>${escaped(found.seriesName)}</b><br>peak ${formatBytes(Math.round(found.value[0] * byteSize))} ` +
          `(${percent(found.value[0] * byteSize / Math.max(summary.baseline_peak_bytes, 1))} of plain)<br>${found.value[1].toFixed(2)} % more time`,
      },
      xAxis: { type: "value", min: 0, max: (range) => tidy(range.max * 1.06), name: `peak memory (${byteUnit})`, nameLocation: "middle", nameGap: 30,
        ...axisStyle(paint), axisLabel: { color: paint.soft, hideOverlap: true, showMaxLabel: false } },
      yAxis: { type: "value", min: 0, max: (range) => Math.max(tidy(range.max * 1.15), 1), name: "extra time (% of the plain step)", nameLocation: "middle",
        nameGap: narrow() ? 34 : 44, ...axisStyle(paint), axisLabel: { color: paint.soft, hideOverlap: true, showMaxLabel: false } },
      series,
    };
  };

  // Drawing, and drawing again when the size or the theme changes.

  const rowsHeight = (rows) => Math.max(150, 34 + 46 + rows * 24);
  const charts = [
    ["memory-chart", memoryOption],
    ["peak-modules-chart", peakOption(peak.modules), rowsHeight(peak.modules.length)],
    ["peak-sources-chart", peakOption(peak.sources), rowsHeight(peak.sources.length)],
    ["kept-chart", keptOption, rowsHeight(1.4 * modules.name.length)],
    ["recompute-chart", recomputeOption, rowsHeight(1.4 * modules.name.length)],
    ["tradeoff-chart", tradeoffOption],
  ].map(([id, option, height]) => {
    if (height) element(id).style.height = `${height}px`;
    return { chart: echarts.init(element(id), null, { renderer: "svg" }), option };
  });
  const draw = () => {
    const paint = colours();
    for (const { chart, option } of charts) chart.setOption(option(paint), { notMerge: true });
  };
  let width = 0;
  const resize = () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    for (const { chart } of charts) chart.resize();
    draw();
  };
  const search = (text) => {
    element("ops-filter").value = "all";
    element("ops-search").value = text;
    showOps();
    element("ops").scrollIntoView();
  };
  charts[1].chart.on("click", (found) => {
    const row = found.componentType === "yAxis" ? found.value : peak.modules[found.dataIndex][3];
    if (!row.startsWith("(")) search(row);
  });
  charts[2].chart.on("click", (found) => {
    const row = found.componentType === "yAxis" ? found.value : peak.sources[found.dataIndex][0];
    if (!row.startsWith("(")) search(row);
  });

  // The table of ops.

  const columns = [
    ["#", (op) => op, (op) => op + 1, "number"],
    ["op", (op) => ops.target[op], null, "long"],
    ["module", (op) => ops.module[op], null, "long"],
    ["source", (op) => ops.source[op], null, "long"],
    ["pass", (op) => (ops.forward[op] ? "forward" : "backward"), null, ""],
    ["runs", (op) => ops.runs[op], null, "number"],
    ["time of a run", (op) => ops.seconds[op], (op) => formatSeconds(ops.seconds[op]), "number"],
    ["writes", (op) => ops.bytes[op], (op) => formatBytes(ops.bytes[op]), "number"],
    ["inside", (op) => ops.inside[op], (op) => formatBytes(ops.inside[op]), "number"],
    ["kept for backward", (op) => ops.kept[op], (op) => formatBytes(ops.kept[op]), "number"],
    ["must run once", (op) => ops.pinned[op], null, "long"],
  ];
  const table = { column: 0, descending: false, shown: PAGE_ROWS };
  const words = ops.name.map((name, op) =>
    [name, ops.target[op], ops.module[op], ops.source[op], ops.pinned[op]].join(" ").toLowerCase());
  const filters = {
    all: () => true, recomputed: (op) => ops.runs[op] > 1, kept: (op) => ops.kept[op] > 0,
    forward: (op) => ops.forward[op], backward: (op) => !ops.forward[op],
  };
  const heads = columns.map(([name, , , kind], number) => {
    const head = document.createElement("th"), button = document.createElement("button");
    head.className = kind;
    head.scope = "col";
    button.type = "button";
    button.textContent = name;
    button.addEventListener("click", () => {
      table.descending = table.column === number ? !table.descending : kind === "number" && number > 0;
      table.column = number;
      showOps();
    });
    head.append(button);
    return head;
  });
  element("ops-table").tHead.rows[0].append(...heads);
  const showOps = () => {
    const wanted = element("ops-search").value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const filter = filters[element("ops-filter").value];
    const value = columns[table.column][1], sign = table.descending ? -1 : 1;
    const found = words.map((_, op) => op).filter((op) => filter(op) && wanted.every((word) => words[op].includes(word)));
    found.sort((one, two) => {
      const a = value(one), b = value(two);
      return sign * (a < b ? -1 : a > b ? 1 : 0) || one - two;
    });
    heads.forEach((head, number) => {
      const sorted = number === table.column;
      head.ariaSort = sorted ? (table.descending ? "descending" : "ascending") : "none";
      head.firstChild.textContent = columns[number][0] + (sorted ? (table.descending ? " ↓" : " ↑") : "");
    });
    element("ops-table").tBodies[0].replaceChildren(...found.slice(0, table.shown).map((op) => {
      const row = document.createElement("tr");
      if (ops.runs[op] > 1) row.className = "again";
      for (const [, plainValue, shown, kind] of columns) {
        const cell = document.createElement("td");
        cell.className = kind;
        cell.textContent = (shown || plainValue)(op);
        row.append(cell);
      }
      return row;
    }));
    element("ops-more").hidden = found.length <= table.shown;
    const again = found.filter((op) => ops.runs[op] > 1).length;
    element("ops-count").textContent = `${found.length} of ${words.length} ops, ${again} of them run more than once (marked)`;
  };
  element("ops-search").addEventListener("input", () => { table.shown = PAGE_ROWS; showOps(); });
  element("ops-filter").addEventListener("change", () => { table.shown = PAGE_ROWS; showOps(); });
  element("ops-more").addEventListener("click", () => { table.shown += 5 * PAGE_ROWS; showOps(); });

  // Light and dark.

  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const remember = (theme) => { try { localStorage.setItem("lowtide-theme", theme); } catch { /* A file may have no storage. */ } };
  const recall = () => { try { return localStorage.getItem("lowtide-theme"); } catch { return null; } };
  if (["light", "dark"].includes(recall())) document.documentElement.dataset.theme = recall();
  element("theme").addEventListener("click", () => {
    const theme = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    remember(theme);
    draw();
  });
  system.addEventListener("change", draw);
  element("memory-view").addEventListener("change", draw);
  element("memory-axis").addEventListener("change", draw);
  window.addEventListener("resize", resize);
  window.addEventListener("beforeprint", () => charts.forEach(({ chart }) => chart.resize()));

  showOps();
  resize();
  document.documentElement.dataset.ready = "true";
})();
