"use strict";
(() => {
  const root = document.documentElement;
  const charts = [...document.querySelectorAll(".js-plotly-plot")];
  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const palette = [];
  for (let i = 0; css(`--c${i}`); i += 1) palette.push(i);

  const faded = (hex) => {
    const [r, g, b] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
    return `rgba(${r},${g},${b},0.14)`;
  };

  // Plotly draws with fixed colours, so the scheme's are put in anew whenever the scheme changes.
  const paint = (chart) => {
    const own = chart.data.map((trace, i) => (trace.meta ? i : -1)).filter((i) => i >= 0);
    const colours = own.map((i) => css(`--c${chart.data[i].meta.recipe % palette.length}`));
    const axis = (name) => ({
      [`${name}.gridcolor`]: css("--grid"),
      [`${name}.linecolor`]: css("--rule"),
      [`${name}.zerolinecolor`]: css(own.length ? "--quiet" : "--grid"),
    });
    const layout = {
      paper_bgcolor: css("--paper"), plot_bgcolor: css("--paper"), "xaxis.spikecolor": css("--quiet"), "font.color": css("--ink"), "hoverlabel.bgcolor": css("--panel"), "hoverlabel.bordercolor": css("--rule"),
      "hoverlabel.font.color": css("--ink"), ...axis("xaxis"), ...axis("yaxis"),
    };
    if (!own.length) return Plotly.relayout(chart, layout);
    const traces = {
      "line.color": colours, "marker.color": colours, "error_x.color": colours, fillcolor: colours.map(faded),
    };
    return Plotly.update(chart, traces, layout, own);
  };
  const paintAll = () => charts.forEach(paint);

  document.querySelectorAll(".legend button").forEach((button) => {
    button.addEventListener("click", () => {
      const shown = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(shown));
      charts.forEach((chart) => {
        const recipe = Number(button.dataset.recipe);
        const own = chart.data.map((t, i) => (t.meta && t.meta.recipe === recipe ? i : -1)).filter((i) => i >= 0);
        if (own.length) Plotly.restyle(chart, { visible: shown }, own);
      });
    });
  });

  const recipe = document.getElementById("snr-recipe");
  const scale = document.getElementById("snr-scale");
  const snr = document.getElementById("chart-snr");
  const span = (grids) => {
    const known = grids.flat(2).filter(Number.isFinite);
    const lossy = known.filter((value) => value < 100); // exact operands would stretch the colours
    const used = lossy.length ? lossy : known;
    return [used.reduce((a, b) => Math.min(a, b)), used.reduce((a, b) => Math.max(a, b))];
  };
  const show = () => {
    const grids = snr.data.map((trace) => trace.z);
    const spans = grids.map((grid) => span(scale.value === "own" && grid.flat().some(Number.isFinite) ? [grid] : grids));
    Plotly.restyle(snr, {
      visible: grids.map((_, i) => i === Number(recipe.value)), zmin: spans.map((s) => s[0]), zmax: spans.map((s) => s[1]),
    });
  };
  if (snr) {
    recipe.addEventListener("change", show);
    scale.addEventListener("change", show);
    show(); // a browser may have restored other choices on reload
  }

  // A finger that drags scrolls the page; a mouse zooms.
  if (matchMedia("(pointer: fine)").matches) {
    ["chart-gap", "chart-loss"].map((id) => document.getElementById(id)).filter(Boolean)
      .forEach((chart) => Plotly.relayout(chart, { dragmode: "zoom" }));
  }

  paintAll();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paintAll);
})();
