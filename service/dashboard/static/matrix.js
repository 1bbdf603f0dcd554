// An experiment as matrices side by side, drawn in a page. The table behind it says the same.
import { init } from "/static/lib/echarts.js";
import { inDigits } from "/static/numbers.js";
import { onSheet, printing, read } from "/static/paper.js";
import { element, isAway, patience } from "/static/request.js";
import { colour, readable, sharp, tile, viridis } from "/static/theme.js";
import { hideTip, showTip } from "/static/tip.js";

const MOST_FACETS = 24;
const MOST_HOLES = 20_000; // of larger matrices places without a trial are left empty
const HIGHEST = 16_000; // pixels of a picture: a browser draws nothing on a canvas that is much higher
const GAP = 28;
const TITLE = 18;
const MOST_LINES = 8; // of what stands above a matrix
const WORDS = { early_stopped: "stopped early", other_protocol: "partly under another protocol", missing: "no trial" };
const [FEWEST, MOST] = [2, 10]; // that are compared
const said = (state) => WORDS[state] ?? state.replaceAll("_", " ");

/** A tile as a pattern. Its size is told beside, as what writes SVG does not ask a canvas for it. */
const filling = (image) => ({
  image,
  imageWidth: image.width,
  imageHeight: image.height,
  repeat: "repeat",
  scaleX: 0.5,
  scaleY: 0.5,
});

/** The places of a matrix, drawn in an element. */
export class Matrix {
  constructor(figure, data) {
    this.figure = figure;
    this.data = data;
    this.place = figure.querySelector(".canvas");
    this.readout = figure.querySelector(".readout");
    this.legend = figure.querySelector(".scale");
    this.at = new Map(data.places.trial.map((trial, index) => [trial, index]));
    this.facets = Math.min(data.facets.length, MOST_FACETS);
    this.grid = this.facetGrids();
    this.holes = this.grid.some((places) => places.includes(-1)) && this.facets * (this.grid[0]?.length ?? 0) <= MOST_HOLES;
    this.cursor = null;
    this.chosen = new Map(); // from places to the fingerprints of their cells, where these are known
    this.bar = figure.querySelector(".chosen");
    this.chart = null;
    this.listen();
    this.draw();
  }

  /** By facet: the index of the place at y * width + x, -1 where there is none. */
  facetGrids() {
    const { x, y, places, facets } = this.data;
    const width = x.values.length;
    const grids = facets.slice(0, MOST_FACETS).map(() => new Int32Array(width * y.values.length).fill(-1));
    places.facet.forEach((facet, index) => {
      if (facet < grids.length) grids[facet][places.y[index] * width + places.x[index]] = index;
    });
    return grids;
  }

  format(value, mean = value) {
    const { factor, decimals } = this.data.reading;
    return inDigits(value * factor, decimals, mean * factor);
  }

  /** A number as it stands in a place so wide: one that is too long for it by its power of ten. */
  brief(value, size, room) {
    const text = this.format(value);
    return this.measure([text], size) <= room ? text : (value * this.data.reading.factor).toExponential(1);
  }

  /** What a place has, a mean with its deviation. */
  number(index) {
    const { places, texts } = this.data;
    const [value, deviation] = [places.value[index], places.deviation[index]];
    const spread = deviation === null || texts.seeds !== "mean" ? "" : ` ± ${this.format(deviation, value)}`;
    return `${this.format(value)}${spread}`;
  }

  /** What is said of a place, by lines. */
  lines(facet, x, y) {
    const { texts, places, reading, protocols } = this.data;
    const index = this.grid[facet][y * this.data.x.values.length + x];
    const where = [
      this.data.x.field && `${this.data.x.name} ${texts.x[x]}`,
      this.data.y.field && `${this.data.y.name} ${texts.y[y]}`,
      texts.facets[facet],
    ];
    const head = where.filter(Boolean).join(", ") || "all trials";
    if (index < 0) return [head, "no trial here"];
    const { value, state } = places;
    const unit = reading.unit ? ` ${reading.unit}` : "";
    const lines = [head];
    if (value[index] !== null) {
      const how = texts.seeds === "mean" ? "" : `${texts.seeds} `;
      lines.push(`${how}${reading.heading} ${this.number(index)}${unit}`);
    }
    if (this.chosen.has(index)) lines.push("chosen");
    lines.push(`${places.seeds[index]} of ${places.trials[index]} seeds, ${said(state[index])}`);
    if (protocols.length > 1 && places.protocol[index] !== null) {
      lines.push(`protocol ${protocols[places.protocol[index]].slice(0, 12)}`);
    }
    return lines;
  }

  measure(words, size) {
    this.pen ??= document.createElement("canvas").getContext("2d");
    this.pen.font = `${size}px system-ui, sans-serif`;
    return Math.max(0, ...words.map((text) => this.pen.measureText(text).width));
  }

  /** How many lines a heading takes in so much width: it is broken between words, and within one that is wider. */
  linesOf(text, width) {
    let [lines, used] = [text === "" ? 0 : 1, 0];
    for (const word of text.split(" ").filter(Boolean)) {
      const wide = 1.15 * this.measure([`${word} `], 12); // as bold as headings are
      if (used > 0 && used + wide > width) [lines, used] = [lines + 1, 0];
      used += wide;
      const more = Math.ceil(used / width) - 1;
      [lines, used] = [lines + more, used - more * width];
    }
    return lines;
  }

  /** Where the matrices stand in so wide a picture, below what takes so much of its top. */
  layout(width = Math.max(280, this.place.clientWidth), head = 0) {
    const { texts, x, y } = this.data;
    const [nx, ny, facets] = [x.values.length, y.values.length, this.facets];
    const names = Math.min(110, Math.ceil(this.measure(texts.y, 12)) + 2);
    const left = names + 12 + (y.field ? 20 : 0);
    const least = nx > 60 ? 6 : 22;
    const fits = Math.max(1, Math.floor((width + GAP) / (left + nx * least + GAP)));
    const rows = Math.ceil(facets / Math.min(facets, fits));
    const columns = Math.ceil(facets / rows);
    const cell = Math.min(84, Math.max(2, (width - columns * left - (columns - 1) * GAP - 8) / columns / nx));
    const dense = printing() && ny > 10; // two such matrices fit on a sheet
    const high = ny > 60 ? Math.min(8, HIGHEST / rows / ny) : dense ? 13 : cell >= 56 ? 36 : Math.min(28, Math.max(16, cell * 0.8));
    const longest = Math.min(90, this.measure(texts.x, 12));
    const turned = longest > cell - 6;
    const below = (turned ? Math.min(64, longest * 0.8 + 14) : 22) + (x.field ? 20 : 0);
    const heads = texts.facets.slice(0, facets).map((text) => this.linesOf(text, left + cell * nx - 6));
    const lines = Math.min(MOST_LINES, Math.max(...heads));
    const over = Math.max(0, (this.measure([y.name], 12) - high * ny) / 2);
    const above = lines * TITLE + over + (over > 0 ? 12 : 6);
    const boxes = [];
    for (let facet = 0; facet < facets; facet += 1) {
      const [row, column] = [Math.floor(facet / columns), facet % columns];
      boxes.push({
        left: Math.round(left + column * (left + cell * nx + GAP)),
        top: Math.round(head + above + row * (above + high * ny + below + 8)),
        width: Math.round(cell * nx),
        height: Math.round(high * ny),
      });
    }
    const last = boxes.at(-1);
    const cuts = Array.from({ length: rows - 1 }, (_, row) => Math.round(head + (row + 1) * (above + high * ny + below + 8) - 4));
    return { cuts, dense, boxes, width, height: last.top + last.height + below, cell, high, turned, left, names, lines, over };
  }

  /** Least and largest value that is drawn. */
  range() {
    const { places } = this.data;
    const known = places.value.filter((value, index) => value !== null && places.facet[index] < this.facets);
    if (known.length === 0) return [0, 1];
    return [known.reduce((a, b) => Math.min(a, b)), known.reduce((a, b) => Math.max(a, b))];
  }

  options({ boxes, dense, cell, high, turned, left, names, lines, over } = this.layout(), above = null) {
    const { texts, x, y, places } = this.data;
    const [low, top] = this.range();
    this.span = [low, top];
    const tiles = new Map();
    const tileOf = (state) => {
      if (!tiles.has(state)) tiles.set(state, filling(tile(state)));
      return tiles.get(state);
    };
    const label = { color: colour("quiet"), fontSize: 12, fontFamily: "system-ui, sans-serif" };
    const axis = (index, values, title, more) => ({
      type: "category",
      gridIndex: index,
      data: values,
      axisLine: { show: false },
      axisTick: { show: false },
      splitLine: { show: false },
      name: title,
      nameLocation: "middle",
      nameTextStyle: { color: colour("text"), fontSize: 12, fontFamily: "system-ui, sans-serif" },
      ...more,
    });
    const seam = cell < 10 || high < 12 ? 0.5 : 1;
    const numbers = cell >= 40 && high >= (dense ? 13 : 20);
    const both = cell >= 56 && high >= 34;
    const draw = (facet) => (params, api) => {
      const index = api.value(2);
      const middle = api.coord([api.value(0), api.value(1)]);
      const [w, h] = api.size([1, 1]);
      const gap = Math.min(w, h) < 4 ? -0.5 : seam; // seams between places so narrow would have no small part in their colours
      const shape = { x: middle[0] - w / 2 + gap / 2, y: middle[1] - h / 2 + gap / 2, width: w - gap, height: h - gap };
      if (index < 0) {
        const style = { fill: "transparent", stroke: colour("quiet"), lineWidth: 0.6 };
        const stroke = { x1: shape.x, y1: shape.y + shape.height, x2: shape.x + shape.width, y2: shape.y };
        return { type: "group", children: [{ type: "rect", shape, style }, { type: "line", shape: stroke, style }] };
      }
      const state = places.state[index];
      const value = places.value[index];
      const marks = above === null && this.chosen.has(index) ? this.marked(shape) : [];
      if (value === null) return { type: "group", children: [{ type: "rect", shape, style: { fill: tileOf(state) } }, ...marks] };
      const rgb = this.hue((value - low) / (top - low));
      const children = [{ type: "rect", shape, style: { fill: `rgb(${rgb.join(",")})` } }];
      const write = (text, size, shift) => {
        const font = `${size}px system-ui, sans-serif`;
        const [x, y] = [middle[0], middle[1] + shift];
        children.push({ type: "text", style: { text, x, y, fill: readable(rgb), align: "center", verticalAlign: "middle", font } });
      };
      // How many seeds are said wherever there is room, and where some lack also in little of it.
      const [seeds, trials] = [places.seeds[index], places.trials[index]];
      const lacks = !both && seeds < trials && (numbers ? high >= 24 : cell >= 22 && high >= 13);
      const [size, shift] = [dense ? 10 : 12, both ? -6 : lacks ? -5 : 0];
      const text = numbers ? this.brief(value, size, shape.width) : "";
      if (state !== "succeeded") {
        // So large that it leaves the number alone.
        const beside = (shape.width - this.measure([text], size)) / 2;
        const room = numbers ? Math.max(5, shape.height / 2 + shift - size / 2 + beside) : shape.width;
        const side = Math.min(shape.width * 0.5, shape.height * 0.5, 12, room);
        const right = shape.x + shape.width;
        children.push({
          type: "polygon",
          shape: { points: [[right - side, shape.y], [right, shape.y], [right, shape.y + side]] },
          style: { fill: tileOf(state), stroke: colour("page"), lineWidth: 1 },
        });
      }
      if (numbers) write(text, size, shift);
      if (both) write(`${seeds} of ${trials}`, 10, 9);
      else if (lacks) write(`${seeds}/${trials}`, 9, numbers ? 7 : 0);
      children.push(...marks);
      return { type: "group", children };
    };
    const series = boxes.map((_, facet) => ({
      id: `facet${facet}`,
      type: "custom",
      xAxisIndex: facet,
      yAxisIndex: facet,
      encode: { x: 0, y: 1 },
      clip: false,
      progressive: 0,
      renderItem: draw(facet),
      data: this.rows(facet),
    }));
    series.push({
      id: "cursor",
      type: "custom",
      xAxisIndex: this.cursor?.facet ?? 0,
      yAxisIndex: this.cursor?.facet ?? 0,
      encode: { x: 0, y: 1 },
      silent: true,
      z: 10,
      clip: false,
      renderItem: (_, api) => {
        const middle = api.coord([api.value(0), api.value(1)]);
        const [w, h] = api.size([1, 1]);
        const shape = { x: middle[0] - w / 2, y: middle[1] - h / 2, width: w, height: h };
        return {
          type: "group",
          children: [
            { type: "rect", shape, style: { fill: null, stroke: colour("page"), lineWidth: 5 } },
            { type: "rect", shape, style: { fill: null, stroke: colour("text"), lineWidth: 2 } },
          ],
        };
      },
      data: this.cursor && above === null ? [[this.cursor.x, this.cursor.y]] : [],
    });
    if (above !== null) {
      series.push({ id: "head", type: "custom", coordinateSystem: "none", silent: true, renderItem: () => above, data: [[0]] });
    }
    return {
      animation: false,
      title: texts.facets.slice(0, this.facets).map((text, facet) => ({
        text,
        left: boxes[facet].left - left,
        top: boxes[facet].top - over - lines * TITLE - (over > 0 ? 9 : 3),
        textStyle: {
          color: colour("text"),
          fontSize: 12,
          fontWeight: 600,
          fontFamily: "system-ui, sans-serif",
          overflow: "break",
          lineHeight: TITLE - 2,
          height: lines * (TITLE - 2),
          width: left + boxes[facet].width - 6,
        },
      })),
      grid: boxes,
      xAxis: boxes.map((_, facet) =>
        axis(facet, texts.x, x.name, {
          nameGap: (turned ? Math.min(64, this.measure(texts.x, 12) * 0.8 + 14) : 22) + 4,
          axisLabel: { ...label, rotate: turned ? 52 : 0, width: 90, overflow: "truncate", interval: cell < 12 ? "auto" : 0 },
        }),
      ),
      yAxis: boxes.map((_, facet) =>
        axis(facet, texts.y, y.name, {
          inverse: true,
          nameRotate: 90,
          nameGap: left - 16,
          axisLabel: { ...label, width: names, overflow: "truncate", interval: high < 13 ? "auto" : 0 },
        }),
      ),
      series,
    };
  }

  /** What lies over a place that is chosen. */
  marked({ x, y, width, height }) {
    const shape = { x: x + 1.5, y: y + 1.5, width: width - 3, height: height - 3 };
    return [
      { type: "rect", shape, style: { fill: null, stroke: colour("page"), lineWidth: 4 } },
      { type: "rect", shape, style: { fill: null, stroke: colour("text"), lineWidth: 2, lineDash: [4, 2] } },
    ];
  }

  rows(facet) {
    const width = this.data.x.values.length;
    const rows = [];
    this.grid[facet].forEach((index, at) => {
      if (index >= 0 || this.holes) rows.push([at % width, Math.floor(at / width), index]);
    });
    return rows;
  }

  /** Draws it; where it is not to be seen now, once it is. */
  draw() {
    this.stale = this.place.clientWidth === 0;
    if (this.stale) return;
    const layout = this.layout();
    const { width, height } = layout;
    this.place.style.height = `${height}px`;
    this.chart = sharp(this.chart);
    if (this.chart === null) {
      this.chart = init(this.place, null, { renderer: "canvas", devicePixelRatio });
      this.chart.on("mousemove", ({ seriesIndex, value, event }) => {
        const { clientX, clientY } = event.event;
        showTip(clientX, clientY, this.lines(seriesIndex, value[0], value[1]));
      });
      this.chart.on("globalout", hideTip);
      this.chart.on("mouseout", hideTip);
      this.chart.on("click", ({ seriesIndex, value, event }) => {
        if (event.event.shiftKey) this.choose(seriesIndex, value[0], value[1]);
        else this.open(value[2], event.event.ctrlKey || event.event.metaKey);
      });
    } else {
      this.chart.resize({ width, height });
    }
    this.chart.setOption(this.options(layout), { notMerge: true });
    onSheet(this.place, this.chart, layout.cuts);
    this.drawLegend();
    this.figure.dataset.drawn = String(this.data.places.trial.length);
  }

  /** The colour of a share of the range; where all values are one it is that between all. */
  hue(share) {
    const [low, top] = this.span;
    return viridis(top > low ? share : 0.5);
  }

  /** What is said beside the picture: which metric, and each pattern that is in it. */
  said() {
    const { places, reading, texts } = this.data;
    const states = new Set(places.state);
    states.delete("succeeded");
    const known = places.value.some((value) => value !== null);
    const partly = places.state.some((state, index) => state !== "succeeded" && places.value[index] !== null);
    return {
      metric: known ? `${reading.heading}, ${texts.seeds} over seeds: ` : "",
      unit: reading.unit ? ` ${reading.unit}` : "",
      states: [...states, ...(this.holes ? ["missing"] : [])],
      notes: partly ? ["a marked corner: not all seeds have a result"] : [],
    };
  }

  drawLegend() {
    const [low, top] = this.span;
    const { metric, unit, states, notes } = this.said();
    const bar = document.createElement("canvas");
    bar.width = 160;
    bar.height = 12;
    const pen = bar.getContext("2d");
    for (let x = 0; x < 160; x += 1) {
      pen.fillStyle = `rgb(${this.hue(x / 159).join(",")})`;
      pen.fillRect(x, 0, 1, 12);
    }
    bar.setAttribute("aria-hidden", "true");
    const parts = [];
    if (metric) {
      parts.push(
        element("span", "", [
          element("span", metric, [], { class: "quiet" }),
          ...(top > low ? [element("span", this.format(low), [], { class: "end" })] : []),
          bar,
          element("span", `${this.format(top)}${unit}`, [], { class: "end" }),
        ], { class: "ramp" }),
      );
    }
    for (const state of states) {
      const swatch = tile(state);
      swatch.className = "tile";
      swatch.setAttribute("aria-hidden", "true");
      parts.push(element("span", "", [swatch, said(state)], { class: "key" }));
    }
    for (const note of notes) parts.push(element("span", note, [], { class: "quiet" }));
    this.legend.replaceChildren(...parts);
  }

  open(index, aside) {
    if (index < 0) return;
    const address = `/trials/${this.data.places.trial[index]}/cell`;
    if (aside) window.open(address, "_blank", "noopener");
    else location.assign(address);
  }

  /** Chooses a place for comparison, or no longer. */
  async choose(facet, x, y) {
    const index = this.grid[facet][y * this.data.x.values.length + x];
    if (index < 0) return;
    if (this.chosen.has(index)) this.chosen.delete(index);
    else this.chosen.set(index, null);
    this.moveTo(facet, x, y);
    this.redraw([facet]);
    await this.identify(index);
  }

  /** Asks which cell a chosen place is, which its comparison names: again where the service does not answer. */
  async identify(index, missed = 1) {
    if (this.chosen.get(index) !== null) return; // known, or no longer chosen
    const found = await read(`/v1/trials/${this.data.places.trial[index]}?fields=cell`);
    if (isAway(found)) setTimeout(() => this.identify(index, missed + 1), patience(missed));
    if (found.answer?.cell && this.chosen.has(index)) this.chosen.set(index, found.answer.cell);
    this.count();
  }

  chooseNone() {
    const facets = new Set([...this.chosen.keys()].map((index) => this.data.places.facet[index]));
    this.chosen.clear();
    this.redraw([...facets]);
    this.place.focus();
  }

  redraw(facets) {
    const drawn = facets.filter((facet) => facet < this.facets);
    this.chart.setOption({ series: drawn.map((facet) => ({ id: `facet${facet}`, data: this.rows(facet) })) });
    this.count();
  }

  /** Says how many places are chosen, and leads to their comparison. */
  count() {
    const cells = [...this.chosen.values()];
    const right = cells.length >= FEWEST && cells.length <= MOST;
    const fix = cells.length < FEWEST ? `choose ${FEWEST} to ${MOST} to compare them` : `at most ${MOST} are compared`;
    this.bar.hidden = cells.length === 0;
    this.bar.querySelector(".count").textContent = `${cells.length} chosen${right ? "" : `: ${fix}`}`;
    const link = this.bar.querySelector(".compare");
    const ready = right && cells.every((cell) => cell !== null);
    link.hidden = !ready;
    if (ready) link.href = `/compare?cells=${cells.join(",")}`;
  }

  moveTo(facet, x, y) {
    this.cursor = { facet, x, y };
    this.chart.setOption({ series: [{ id: "cursor", xAxisIndex: facet, yAxisIndex: facet, data: [[x, y]] }] });
    this.readout.textContent = this.lines(facet, x, y).join("; ");
  }

  listen() {
    const { x, y } = this.data;
    this.place.addEventListener("focus", () => {
      const { facet, x: column, y: row } = this.cursor ?? { facet: 0, x: 0, y: 0 };
      this.moveTo(facet, column, row);
    });
    this.place.addEventListener("keydown", (event) => {
      if (!this.cursor || event.ctrlKey || event.metaKey || event.altKey) return;
      const { facet, x: column, y: row } = this.cursor;
      const steps = {
        ArrowRight: [0, 1, 0],
        ArrowLeft: [0, -1, 0],
        ArrowDown: [0, 0, 1],
        ArrowUp: [0, 0, -1],
        Home: [0, -column, 0],
        End: [0, x.values.length - 1 - column, 0],
        PageDown: [1, 0, 0],
        PageUp: [-1, 0, 0],
      };
      if (event.key === "Enter") {
        this.open(this.grid[facet][row * x.values.length + column], false);
        return;
      }
      if (event.key === " ") {
        event.preventDefault();
        this.choose(facet, column, row);
        return;
      }
      const step = steps[event.key];
      if (step === undefined) return;
      event.preventDefault();
      const within = (value, count) => Math.min(count - 1, Math.max(0, value));
      this.moveTo(
        within(facet + step[0], this.facets),
        within(column + step[1], x.values.length),
        within(row + step[2], y.values.length),
      );
    });
  }

  /** Takes in places as they are now. False: one is new, and the whole has to be read again. */
  patch({ places, protocols }) {
    if (places.trial.some((trial) => !this.at.has(trial))) return false;
    const mine = this.data.places;
    const names = this.data.protocols;
    for (const name of protocols) if (!names.includes(name)) names.push(name);
    const facets = new Set();
    places.trial.forEach((trial, from) => {
      const index = this.at.get(trial);
      for (const column of ["state", "value", "deviation", "seeds", "trials"]) mine[column][index] = places[column][from];
      mine.protocol[index] = places.protocol[from] === null ? null : names.indexOf(protocols[places.protocol[from]]);
      facets.add(mine.facet[index]);
      this.write(mine.facet[index], mine.x[index], mine.y[index]);
    });
    if (this.place.clientWidth === 0) {
      this.stale = true; // there is no room now by which it could be laid out
      return true;
    }
    const [low, top] = this.range();
    if (low !== this.span[0] || top !== this.span[1]) {
      this.chart.setOption(this.options(), { notMerge: true });
    } else {
      const changed = [...facets].filter((facet) => facet < this.facets);
      this.chart.setOption({ series: changed.map((facet) => ({ id: `facet${facet}`, data: this.rows(facet) })) });
    }
    this.drawLegend();
    if (this.cursor && document.activeElement === this.place) {
      const { facet, x, y } = this.cursor;
      const text = this.lines(facet, x, y).join("; ");
      if (this.readout.textContent !== text) this.readout.textContent = text;
    }
    return true;
  }

  /** The table behind the picture, one place of it. */
  write(facet, x, y) {
    const table = this.figure.parentElement.querySelectorAll(".behind table")[facet];
    const cell = table?.tBodies[0].rows[y]?.cells[x + 1];
    if (!cell || facet >= this.facets) return;
    const { places } = this.data;
    const index = this.grid[facet][y * this.data.x.values.length + x];
    const [value, state] = [places.value[index], places.state[index]];
    const count = `(${places.seeds[index]} of ${places.trials[index]})`;
    const word = state.replaceAll("_", " ");
    cell.textContent =
      value === null ? `${word} ${count}` : `${this.number(index)} ${count}${state === "succeeded" ? "" : ` ${word}`}`;
    cell.className = state;
  }

  /** What a saved picture says above its matrices, as shapes: whose they are, the scale, the patterns. */
  head(width) {
    const [low, top] = this.span;
    const { metric, unit, states, notes } = this.said();
    const conditions = [...this.figure.closest("#matrix").querySelectorAll("[name=where]")].map(({ value }) => value).filter(Boolean);
    const name = document.querySelector("h1")?.textContent.trim() ?? "";
    const children = [];
    const row = 22;
    let [x, y] = [8, 16];
    const room = (wide) => {
      if (x > 8 && x + wide > width - 8) [x, y] = [8, y + row];
    };
    const write = (text, { weight = 400, role = "text", after = 6 } = {}) => {
      const font = `${weight} 12px system-ui, sans-serif`;
      const wide = Math.min(this.measure([text], 12) * (weight > 400 ? 1.1 : 1), width - 16);
      room(wide);
      children.push({ type: "text", style: { text, x, y, fill: colour(role), font, verticalAlign: "middle", width: width - 16, overflow: "truncate" } });
      x += wide + after;
    };
    const rect = (wide, high, style, after = 6) => {
      children.push({ type: "rect", shape: { x, y: y - high / 2, width: wide, height: high }, style });
      x += wide + after;
    };
    write(`${name} (experiment ${this.data.experiment})`, { weight: 600, after: 16 });
    if (conditions.length > 0) write(`where ${conditions.join(", ")}`, { role: "quiet" });
    if (metric) {
      [x, y] = [8, y + row];
      write(metric);
      if (top > low) write(this.format(low));
      room(160);
      const colorStops = Array.from({ length: 11 }, (_, at) => ({ offset: at / 10, color: `rgb(${this.hue(at / 10).join(",")})` }));
      rect(160, 12, { fill: { type: "linear", x: 0, y: 0, x2: 1, y2: 0, colorStops } });
      write(`${this.format(top)}${unit}`, { after: 20 });
    }
    if (states.length + notes.length > 0) [x, y] = [8, y + row];
    for (const state of states) {
      room(24 + this.measure([said(state)], 12));
      rect(14, 14, { fill: filling(tile(state)), stroke: colour("line"), lineWidth: 1 });
      write(said(state), { after: 16 });
    }
    for (const note of notes) write(note, { role: "quiet", after: 16 });
    return { shapes: { type: "group", children }, height: y + row };
  }

  /** A picture that says by itself what it shows: an SVG as text, or a canvas. */
  picture(renderer) {
    const wide = Math.max(420, this.place.clientWidth);
    const head = this.head(wide);
    const layout = this.layout(wide, head.height);
    const size = { width: wide, height: layout.height };
    const text = renderer === "svg";
    const aside = init(text ? null : document.createElement("div"), null, { renderer, ssr: text, ...size });
    aside.setOption({ ...this.options(layout, head.shapes), backgroundColor: colour("page") });
    const made = text ? aside.renderToSVGString() : aside.renderToCanvas({ pixelRatio: 2 });
    aside.dispose();
    return made;
  }

  /** Goes on where another stood: its cursor, and what is chosen. */
  follow({ cursor, chosen, grid, data }) {
    const now = (index) => this.at.get(data.places.trial[index]) ?? -1;
    for (const [index, cell] of chosen) if (cell !== null && now(index) >= 0) this.chosen.set(now(index), cell);
    this.redraw(Array.from({ length: this.facets }, (_, facet) => facet));
    if (cursor === null) return;
    const at = now(grid[cursor.facet][cursor.y * data.x.values.length + cursor.x]);
    const { facet, x, y } = this.data.places;
    if (at >= 0 && facet[at] < this.facets) this.moveTo(facet[at], x[at], y[at]);
  }

  dispose() {
    this.chart?.dispose();
  }
}
